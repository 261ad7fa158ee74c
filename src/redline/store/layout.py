"""The tables, their version, and how older ones are updated.

A record is a row with what queries need as columns and the rest as bytes; its blocks are rows that are only ever
appended, so writing one costs the same however many there are. No column carries a name that SQL reserves.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from sqlalchemy import (
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    delete,
    func,
    insert,
    inspect,
    select,
    text,
    update,
)

from redline.model.errors import RecordError, StoreError
from redline.store.codec import DAMAGE, point_values, series_body, unpack

LAYOUT = 7
"""Raised with every change of the tables; `MIGRATIONS` then says how to make it."""

Migration = Callable[[Connection], None]

metadata = MetaData()

# Prefixes of ids are looked up as a range, which a language's sorting rules on a server would tear apart.
_Id = Text().with_variant(Text(collation="C"), "postgresql")

meta = Table(
    "meta",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

records = Table(
    "records",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("created_at", Double, nullable=False),
    Column("spec_key", Text),
    Column("group_id", Text),
    Column("group_position", Integer, nullable=False),
    Column("model", Text, nullable=False),
    Column("task", Text, nullable=False),
    Column("recipe", Text, nullable=False),
    Column("batch", Integer),
    Column("device", Text, nullable=False),
    Column("device_name", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("stopped", Text),
    Column("record_schema", Integer, nullable=False),
    # Last, so that SQLite reads a listing without following the bytes into their overflow pages.
    Column("head", LargeBinary, nullable=False),
)

blocks = Table(
    "blocks",
    metadata,
    Column("record_id", _Id, ForeignKey("records.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("body", LargeBinary, nullable=False),
)

sweep_cells = Table(
    "sweep_cells",
    metadata,
    Column("sweep", Text, primary_key=True),
    Column("cell_key", Text, primary_key=True),
    Column("status", Text, nullable=False),
    Column("record_id", _Id, ForeignKey("records.id"), nullable=False),
    Column("failure_kind", Text),
    Column("failure_stage", Text),
    Column("failure_message", Text),
)
"""Cells of sweeps that are settled, and by which record."""

ceilings = Table(
    "ceilings",
    metadata,
    Column("device_key", Text, primary_key=True),
    Column("device_name", Text, nullable=False),
    Column("measured_at", Double, nullable=False),
    Column("body", LargeBinary, nullable=False),
)
"""What each device can do at most."""

tunes = Table(
    "tunes",
    metadata,
    Column("name", Text, primary_key=True),
    Column("created_at", Double, nullable=False),
    Column("model", Text, nullable=False),
    Column("task", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
)
"""Searches for the fastest recipe: what was asked, how far each came, and by which records."""

marks = Table(
    "marks",
    metadata,
    Column("record_id", _Id, ForeignKey("records.id"), primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("words", Text, primary_key=True),
    Column("created_at", Double, nullable=False),
)
"""What people have said of records: tags and notes."""

series = Table(
    "series",
    metadata,
    Column("series_key", Text, primary_key=True),
    Column("body", Text, nullable=False),
)
"""What trends are of, as JSON."""

points = Table(
    "points",
    metadata,
    Column("record_id", _Id, ForeignKey("records.id"), primary_key=True),
    Column("series_key", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("step_s", Double, nullable=False),
    Column("items", Integer, nullable=False),
    Column("git_commit", Text),
    Column("torch", Text),
    Column("driver", Text),
)
"""The step of each finished record, so that a trend needs no samples. Derived: it can be made again from the records."""

Index("points_by_series", points.c.series_key, points.c.created_at, points.c.record_id)
Index("points_by_time", points.c.created_at, points.c.series_key)
Index("marks_by_words", marks.c.kind, marks.c.words)

# Rewriting a record asks whether a cell refers to it.
Index("sweep_cells_by_record", sweep_cells.c.record_id)

Index("records_by_time", records.c.created_at, records.c.id)
Index("records_by_model", records.c.model, records.c.created_at, records.c.id)
Index("records_by_recipe", records.c.recipe, records.c.created_at, records.c.id)
Index("records_by_status", records.c.status, records.c.created_at, records.c.id)
Index("records_by_group", records.c.group_id, records.c.group_position, records.c.id)
Index(
    "records_by_key",
    records.c.spec_key,
    records.c.status,
    records.c.created_at.desc(),
    records.c.id.desc(),
)


def _add_sweeps(connection: Connection) -> None:
    sweep_cells.create(connection)


def _add_ceilings(connection: Connection) -> None:
    ceilings.create(connection)


def _add_tunes(connection: Connection) -> None:
    tunes.create(connection)


def _name_device_keys(connection: Connection) -> None:
    """Layout 4 called the key of a device its place. Layouts before 3 had no such table, and got it with this name."""
    if "place" in {column["name"] for column in inspect(connection).get_columns(ceilings.name)}:
        connection.execute(text("ALTER TABLE ceilings RENAME COLUMN place TO device_key"))


def _add_points(connection: Connection) -> None:
    for table in (marks, series, points):
        table.create(connection)
    kept: set[str] = set()
    heads = connection.execute(select(records.c.id, records.c.head).where(records.c.status == "done")).all()
    for record_id, head in heads:
        bodies = connection.execute(
            select(blocks.c.body).where(blocks.c.record_id == record_id).order_by(blocks.c.number)
        )
        try:
            record = unpack(record_id, head, bodies.scalars())
        except RecordError:
            continue  # told by whoever reads it
        if (values := point_values(record)) is None:
            continue
        connection.execute(insert(points).values(**values))
        if values["series_key"] not in kept:
            kept.add(values["series_key"])
            connection.execute(insert(series).values(series_key=values["series_key"], body=series_body(record)))


def _drop_points_of_other_checkouts(connection: Connection) -> None:
    """Until layout 6, measurements of another commit stood in the trend by the time at which they were made."""
    for record_id, head in connection.execute(select(records.c.id, records.c.head).where(records.c.status == "done")):
        try:
            is_elsewhere = bool(msgspec.msgpack.decode(head)["spec"]["launch"]["folder"])
        except DAMAGE:
            continue
        if is_elsewhere:
            connection.execute(delete(points).where(points.c.record_id == record_id))


MIGRATIONS: dict[int, Migration] = {
    1: _add_sweeps,
    2: _add_ceilings,
    3: _add_tunes,
    4: _name_device_keys,
    5: _add_points,
    6: _drop_points_of_other_checkouts,
}
"""From layout n to n + 1, inside the transaction that writes the new version down."""

_ADVISORY_LOCK = 0x7265646C
"""Any fixed number: on PostgreSQL it makes two first openers take turns."""


def version(connection: Connection) -> int | None:
    """The layout of this database; None where there is none yet."""
    if not inspect(connection).has_table(meta.name):
        return None
    value = connection.execute(select(meta.c.value).where(meta.c.name == "layout")).scalar()
    return int(value) if isinstance(value, str) and value.isdecimal() else None


def check_foreign(connection: Connection, location: str) -> None:
    """Refuse a database without a layout of ours that holds somebody else's tables."""
    present = set(inspect(connection).get_table_names())
    # On a server other tables are normal neighbours; a SQLite file with tables is somebody else's.
    foreign = present if connection.dialect.name == "sqlite" else present & set(metadata.tables)
    if foreign:
        names = ", ".join(sorted(foreign)[:3])
        raise StoreError(
            f"the database at {location} belongs to something else (tables {names}): set REDLINE_STORE to another location"
        )


def bring_up(connection: Connection, location: str) -> None:
    """Make the tables, or update older ones, in a transaction of the caller's that holds the write lock."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
    found = version(connection)  # again, under the lock: another process may have been faster
    if found is None:
        check_foreign(connection, location)
        metadata.create_all(connection, checkfirst=False)
        connection.execute(insert(meta).values(name="layout", value=str(LAYOUT)))
        return
    check_readable(found, location)
    for layout in range(found, LAYOUT):
        if layout not in MIGRATIONS:
            raise StoreError(f"the history at {location} has layout {found}: no way from {layout} to {layout + 1}")
        MIGRATIONS[layout](connection)
    connection.execute(update(meta).where(meta.c.name == "layout").values(value=str(LAYOUT)))


def check_readable(found: int, location: str) -> None:
    if found > LAYOUT:
        raise StoreError(f"the history at {location} has layout {found}, this Redline knows {LAYOUT}: update Redline")
