"""The statements, in SQLAlchemy Core so that SQLite and PostgreSQL understand the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypedDict

from sqlalchemy import ColumnElement, Select, Text, bindparam, case, delete, func, insert, select, text

from redline.store.codec import Row, Status, column_text
from redline.store.layout import blocks, ceilings, marks, meta, points, records, series, sweep_cells, tunes

ROW = (
    records.c.id,
    records.c.created_at,
    records.c.spec_key.label("key"),
    records.c.group_id.label("group"),
    records.c.group_position.label("position"),
    records.c.model,
    records.c.task,
    records.c.recipe,
    records.c.batch,
    records.c.device,
    records.c.device_name,
    records.c.status,
    records.c.stopped,
    records.c.record_schema.label("schema"),
)
"""The columns of a `Row`, by its names."""

HEAD = (records.c.id, records.c.head)


LOCK_RECORD = select(records.c.id).where(records.c.id == bindparam("record_id")).with_for_update()
"""On PostgreSQL, appenders to one record take turns; SQLite lets only one write anyway."""

DELETE_META = delete(meta).where(meta.c.name == bindparam("this_name"))
META = select(meta.c.value).where(meta.c.name == bindparam("this_name")).with_for_update()
"""Locked until the transaction ends, on PostgreSQL; SQLite lets only one write anyway."""
WRITERS = select(meta.c.name, meta.c.value).where(meta.c.name.in_(bindparam("names", expanding=True)))

ACTIVITY = "activity "
"""What the names of activities begin with."""
ACTIVITIES = select(meta.c.name, meta.c.value).where(meta.c.name.startswith(ACTIVITY)).order_by(meta.c.name)

NEXT_BLOCK = select(func.coalesce(func.max(blocks.c.number) + 1, 0)).where(blocks.c.record_id == bindparam("record_id"))
APPEND_BLOCK = insert(blocks).values(
    record_id=bindparam("record_id"), number=NEXT_BLOCK.scalar_subquery(), body=bindparam("body")
)

LAST_BLOCKS = (
    select(blocks.c.body, blocks.c.number)
    .where(blocks.c.record_id == bindparam("record_id"))
    .order_by(blocks.c.number.desc())
    .limit(bindparam("number"))
)

BLOCKS_OF = (
    select(blocks.c.record_id, blocks.c.body)
    .where(blocks.c.record_id.in_(bindparam("ids", expanding=True)))
    .order_by(blocks.c.record_id, blocks.c.number)
)

SETTLED = (
    sweep_cells.c.cell_key.label("key"),
    sweep_cells.c.status,
    sweep_cells.c.record_id,
    sweep_cells.c.failure_kind,
    sweep_cells.c.failure_stage,
    sweep_cells.c.failure_message,
)
"""The columns of a `SettledCell`, by its names."""
CELLS_OF_SWEEP = select(*SETTLED).where(sweep_cells.c.sweep == bindparam("name"))
DONE_CELLS = select(sweep_cells.c.sweep, *SETTLED).where(
    sweep_cells.c.status == "done", sweep_cells.c.cell_key.in_(bindparam("keys", expanding=True))
)
DELETE_CELLS = delete(sweep_cells).where(sweep_cells.c.sweep == bindparam("name"))

CEILINGS_OF = select(ceilings.c.body).where(ceilings.c.device_key == bindparam("this_key"))

TUNE = select(tunes.c.body).where(tunes.c.name == bindparam("this_name"))
TUNES = select(tunes.c.name, tunes.c.created_at, tunes.c.model, tunes.c.task, tunes.c.state).order_by(
    tunes.c.created_at.desc(), tunes.c.name
)

ALL_SERIES = select(series.c.series_key, series.c.body)
POINTS_OF = (
    select(points)
    .where(points.c.series_key.in_(bindparam("keys", expanding=True)))
    .order_by(points.c.series_key, points.c.created_at, points.c.record_id)
)
SERIES_SEEN = select(
    points.c.series_key, func.count().label("number"), func.max(points.c.created_at).label("latest")
).group_by(points.c.series_key)

FASTEST_CELL = (
    select(
        records.c.model,
        records.c.task,
        records.c.recipe,
        ("batch " + records.c.batch.cast(Text)).label("batch"),
        (points.c["items"] / points.c.step_s).label("per_s"),
    )
    .join(points, points.c.record_id == records.c.id)
    .join(sweep_cells, sweep_cells.c.record_id == records.c.id)
    .where(sweep_cells.c.sweep == bindparam("name"), sweep_cells.c.status == "done")
    .order_by((points.c["items"] / points.c.step_s).desc())
    .limit(1)
)

RECENT_SWEEPS = (
    select(sweep_cells.c.sweep, func.count(), func.sum(case((sweep_cells.c.status == "failed", 1), else_=0)))
    .where(
        sweep_cells.c.sweep.in_(
            select(sweep_cells.c.sweep)
            .join(records, records.c.id == sweep_cells.c.record_id)
            .where(records.c.created_at >= bindparam("since"))
        )
    )
    .group_by(sweep_cells.c.sweep)
    .order_by(sweep_cells.c.sweep)
)

MARKS = select(marks).order_by(marks.c.created_at, marks.c.record_id, marks.c.words)
MARKS_OF_SERIES = MARKS.where(
    marks.c.record_id.in_(select(points.c.record_id).where(points.c.series_key.in_(bindparam("keys", expanding=True))))
)
TAGGED = select(marks.c.record_id).where(marks.c.kind == "tag", marks.c.words == bindparam("words"))
DELETE_MARK = delete(marks).where(
    marks.c.record_id == bindparam("this_id"),
    marks.c.kind == bindparam("this_kind"),
    marks.c.words == bindparam("these"),
)

DELETE_BY_RECORD = tuple(
    delete(table).where(table.c.record_id.in_(bindparam("ids", expanding=True)))
    for table in (marks, points, sweep_cells, blocks)
)
"""What belongs to records, in an order in which it may go."""
DELETE_RECORDS = delete(records).where(records.c.id.in_(bindparam("ids", expanding=True)))
SWEEPS_OF = select(sweep_cells.c.sweep).where(sweep_cells.c.record_id.in_(bindparam("ids", expanding=True))).distinct()

GROUPS_OF = select(records.c.id, records.c.group_id).where(records.c.id.in_(bindparam("ids", expanding=True)))
HEADS_OF_GROUPS = (
    select(*HEAD, records.c.group_id)
    .where(records.c.group_id.in_(bindparam("groups", expanding=True)))
    .order_by(records.c.group_id, records.c.group_position, records.c.id)
)
HEADS_OF = select(*HEAD).where(records.c.id.in_(bindparam("ids", expanding=True)))

COUNT = select(func.count()).select_from(records)

HEAD_OF = select(*HEAD).where(records.c.id == bindparam("record_id"))


SERVER_CLOCKS = text(
    "SELECT extract(epoch FROM clock_timestamp())::float8 AS now, "
    "extract(epoch FROM pg_postmaster_start_time())::float8 AS started"
)


def writer_name(record_id: str) -> str:
    """Under which it is noted who writes a record, as long as it is being written."""
    return f"writer of {record_id}"


def holder_name(what: str) -> str:
    """Under which a server notes who works on a sweep or a tune."""
    return f"holder of {what}"


def values_of(row: Row, head: bytes) -> dict[str, Any]:
    return {
        "id": row.id,
        "created_at": row.created_at,
        "spec_key": row.key,
        "group_id": row.group,
        "group_position": row.position,
        "model": row.model,
        "task": row.task,
        "recipe": row.recipe,
        "batch": row.batch,
        "device": row.device,
        "device_name": row.device_name,
        "status": row.status,
        "stopped": row.stopped,
        "record_schema": row.schema,
        "head": head,
    }


class Filters(TypedDict, total=False):
    """Which records `rows` and `find` of a history return; a filter that is left out excludes none."""

    model: str | None
    task: str | None
    recipe: str | None
    """The recipe's text as it was written."""
    key: str | None
    group: str | None
    status: Status | None
    since: float | None
    """Seconds since the epoch."""
    limit: int | None
    newest_first: bool


def matching(
    columns: Sequence[ColumnElement[Any]],
    *,
    model: str | None = None,
    task: str | None = None,
    recipe: str | None = None,
    key: str | None = None,
    group: str | None = None,
    status: str | None = None,
    since: float | None = None,
    limit: int | None = None,
    newest_first: bool = True,
) -> Select[Any]:
    """`columns` of the records that fit, in order of time."""
    asked = {
        records.c.model: model,
        records.c.task: task,
        records.c.recipe: recipe,
        records.c.spec_key: key,
        records.c.group_id: group,
        records.c.status: status,
    }
    fits = [column == column_text(value) for column, value in asked.items() if value is not None]
    statement = select(*columns).where(*fits)
    if since is not None:
        statement = statement.where(records.c.created_at >= since)
    order = (records.c.created_at, records.c.id)  # ids sort by time too and settle what falls on one instant
    statement = statement.order_by(*(column.desc() if newest_first else column for column in order))
    return statement if limit is None else statement.limit(limit)


def in_group(group: str) -> Select[Any]:
    """Heads of a group, the one that the others are set against first."""
    return select(*HEAD).where(records.c.group_id == group).order_by(records.c.group_position, records.c.id)


def ids_from(prefix: str, limit: int) -> Select[Any]:
    """Ids that begin with `prefix`, shortest first. As a range, because LIKE would not use the index."""
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    return select(records.c.id).where(records.c.id >= prefix, records.c.id < end).order_by(records.c.id).limit(limit)


CHUNK = 10_000
"""Values per IN list: below what SQLite (32 766) and PostgreSQL (65 535) take in one statement."""


def chunks(values: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(values)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk
