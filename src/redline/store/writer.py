"""What is written of records, sweeps, searches and ceilings, each in a transaction of the caller's.

A row that is written again replaces the old one, so that a write may be repeated when its answer was lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import delete
from sqlalchemy.dialects import postgresql, sqlite

from redline.model.errors import StoreError
from redline.model.fields import Frozen
from redline.model.record import Block, RunRecord
from redline.model.work import Ceilings
from redline.store import queries
from redline.store.codec import TuneRow, column_text, pack_block, pack_head, point_values, row_of, series_body
from redline.store.layout import blocks, ceilings, meta, points, records, series, sweep_cells, tunes
from redline.system.processes import this_process

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table


def put(connection: Connection, table: Table, *rows: dict[str, Any], replace: bool = True) -> None:
    """Insert rows. One that is there already is replaced, or left as it is."""
    statement: Any = (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(table)
    keys = [column.name for column in table.primary_key.columns]
    others = {column.name: statement.excluded[column.name] for column in table.columns if column.name not in keys}
    if replace and others:
        statement = statement.on_conflict_do_update(index_elements=keys, set_=others)
    else:
        statement = statement.on_conflict_do_nothing(index_elements=keys)
    if rows:
        connection.execute(statement, list(rows))


def write_record(connection: Connection, record: RunRecord, *, over: bool) -> None:
    """A record's head, new or replaced, and those of its blocks that were not appended yet.

    `over`: nothing more will come, however little there is.
    """
    row = row_of(record, over=over)
    put(connection, records, queries.values_of(row, pack_head(record)))
    put_meta(connection, queries.writer_name(record.id), this_process() if row.status == "running" else None)
    new = ({"record_id": record.id, "number": n, "body": pack_block(block)} for n, block in enumerate(record.blocks))
    put(connection, blocks, *new, replace=False)
    if row.status == "done":
        keep_point(connection, record)


def keep_point(connection: Connection, record: RunRecord) -> None:
    """The record's point in its trend, in place of an older one."""
    if not record.blocks:  # they were appended one by one
        bodies = connection.execute(queries.BLOCKS_OF, {"ids": [record.id]}).all()
        read = tuple(msgspec.msgpack.decode(body, type=Block) for _, body in bodies)
        record = msgspec.structs.replace(record, blocks=read)
    values = point_values(record)
    if values is None:
        connection.execute(delete(points).where(points.c.record_id == record.id))
        return
    put(connection, points, values)
    put(connection, series, {"series_key": values["series_key"], "body": series_body(record)}, replace=False)


def append_block(connection: Connection, record_id: str, block: Block, *, again: bool) -> None:
    """A block at the end of a record. `again`: it may have been appended, and only the answer was lost."""
    if connection.execute(queries.LOCK_RECORD, {"record_id": record_id}).first() is None:
        raise StoreError(f"no record {record_id!r}: begin it before appending to it")
    body = pack_block(block)
    if again and connection.execute(queries.LAST_BLOCKS, {"record_id": record_id, "number": 1}).scalar() == body:
        return
    connection.execute(queries.APPEND_BLOCK, {"record_id": record_id, "body": body})


def settle_cell(connection: Connection, sweep: str, key: str, record: RunRecord, holder: str | None) -> None:
    """A record, and that it settles a cell of a sweep. `holder`: who must still be working on the sweep."""
    refuse_overtaken(connection, "sweep", sweep, holder)
    write_record(connection, record, over=True)
    failure = record.failure
    put(
        connection,
        sweep_cells,
        {
            "sweep": sweep,
            "cell_key": key,
            "status": "failed" if failure else "done",
            "record_id": record.id,
            "failure_kind": failure.kind if failure else None,
            "failure_stage": column_text(failure.stage) if failure else None,
            "failure_message": column_text(failure.told) if failure else None,
        },
    )


def save_tune(connection: Connection, row: TuneRow, body: bytes, holder: str | None) -> None:
    """A search, as far as it has come."""
    refuse_overtaken(connection, "tune", row.name, holder)
    plain: dict[str, Any] = msgspec.to_builtins(row)
    values = {name: column_text(value) if isinstance(value, str) else value for name, value in plain.items()}
    put(connection, tunes, {**values, "body": body})


def keep_ceilings(connection: Connection, device_key: str, found: Ceilings) -> None:
    """What a device can do at most, in place of what was known of it."""
    body = msgspec.msgpack.encode(found)
    values = {"device_name": column_text(found.name), "measured_at": found.measured_at, "body": body}
    put(connection, ceilings, {"device_key": device_key, **values})


def put_meta(connection: Connection, name: str, value: str | None) -> None:
    """Write an entry, or remove it."""
    if value is None:
        connection.execute(queries.DELETE_META, {"this_name": name})
    else:
        put(connection, meta, {"name": name, "value": value})


class Holder(Frozen):
    """Who works on a sweep or a search, and until when that holds unless renewed."""

    token: str
    process: str
    until: float
    """Seconds since the epoch, by the clock of the server or, of a file, of this machine."""


def read_holder(connection: Connection, what: str) -> Holder | None:
    """Locks the entry until the transaction ends."""
    value = connection.execute(queries.META, {"this_name": queries.holder_name(what)}).scalar()
    return None if value is None else msgspec.json.decode(value, type=Holder)


def write_holder(connection: Connection, what: str, holder: Holder | None) -> None:
    value = None if holder is None else msgspec.json.encode(holder).decode()
    put_meta(connection, queries.holder_name(what), value)


def refuse_overtaken(connection: Connection, kind: str, name: str, token: str | None) -> None:
    """Raise where another process works on it by now."""
    if token is None:
        return
    holder = read_holder(connection, f"{kind} {name}")
    if holder is None or holder.token != token:
        raise StoreError(
            f"another process has taken over {kind} {name!r}: this one stops, and its last result is not kept"
        )
