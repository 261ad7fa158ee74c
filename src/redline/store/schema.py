"""The tables of a history, and how those of an older layout are updated.

A record is a row with what queries need as columns and the rest as bytes; its blocks are rows that are only ever
appended, so writing one costs the same however many there are. No column carries a name that SQL reserves.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict
from sqlalchemy import (
    Column,
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
    inspect,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite

from redline.model.errors import RecordError, StoreError
from redline.store.codec import Row, pack_block, pack_head, point_values, row_of, series_body, unpack
from redline.system.processes import this_process

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from redline.model.record import RunRecord

LAYOUT = 8
"""Raised with every change of the tables; `bring_up` then says how older ones are updated."""

metadata = MetaData()

# Prefixes of ids are looked up as a range, which a language's sorting rules on a server would tear apart.
_Id = Text().with_variant(Text(collation="C"), "postgresql")


def _of_record(*, is_key: bool = True) -> Column[str]:
    return Column("record_id", _Id, ForeignKey("records.id"), primary_key=is_key, nullable=False)


meta = Table("meta", metadata, Column("name", Text, primary_key=True), Column("value", Text, nullable=False))
"""The number of the layout."""

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
    Index("records_by_time", "created_at", "id"),
    Index("records_by_model", "model", "created_at", "id"),
    Index("records_by_recipe", "recipe", "created_at", "id"),
    Index("records_by_status", "status", "created_at", "id"),
    Index("records_by_group", "group_id", "group_position", "id"),
)
Index("records_by_key", records.c.spec_key, records.c.status, records.c.created_at.desc(), records.c.id.desc())

blocks = Table(
    "blocks",
    metadata,
    _of_record(),
    Column("number", Integer, primary_key=True),
    Column("body", LargeBinary, nullable=False),
)
"""The samples."""

marks = Table(
    "marks",
    metadata,
    _of_record(),
    Column("kind", Text, primary_key=True),
    Column("words", Text, primary_key=True),
    Column("created_at", Double, nullable=False),
    Index("marks_by_words", "kind", "words"),
)
"""People tag records and note something about them. Gates mark records too."""

sweep_cells = Table(
    "sweep_cells",
    metadata,
    Column("sweep", Text, primary_key=True),
    Column("cell_key", Text, primary_key=True),
    Column("status", Text, nullable=False),
    _of_record(is_key=False),
    Column("failure_kind", Text),
    Column("failure_stage", Text),
    Column("failure_message", Text),
    Index("sweep_cells_by_record", "record_id"),  # deleting a record asks whether a cell refers to it
)
"""Cells of sweeps that are settled, and by which record."""

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

ceilings = Table(
    "ceilings",
    metadata,
    Column("device_key", Text, primary_key=True),
    Column("device_name", Text, nullable=False),
    Column("measured_at", Double, nullable=False),
    Column("body", LargeBinary, nullable=False),
)
"""Each device has one row, with what it can do at most."""

holders = Table(
    "holders",
    metadata,
    Column("name", Text, primary_key=True),
    Column("token", Text, nullable=False),
    Column("process", Text, nullable=False),
    Column("until", Double),
    Column("said", Text),
)
"""A row says who works on a sweep, a search, a watched script or a record, until when unless it is renewed, and as JSON how far that is."""

series = Table("series", metadata, Column("series_key", Text, primary_key=True), Column("body", Text, nullable=False))
"""A series, of which there is a trend, is described as JSON."""

points = Table(
    "points",
    metadata,
    _of_record(),
    Column("series_key", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("step_s", Double, nullable=False),
    Column("items", Integer, nullable=False),
    Column("git_commit", Text),
    Column("torch", Text),
    Column("driver", Text),
    Index("points_by_series", "series_key", "created_at", "record_id"),
    Index("points_by_time", "created_at", "series_key"),
)
"""The step of each finished record, so that a trend needs no samples. Derived: it can be made again from the records."""

WRITER = "record "
"""The name of a holder that writes a record begins with this."""
RENAMED = {"key": "spec_key", "group": "group_id", "position": "group_position", "schema": "record_schema"}
"""Columns of a `Row` that have another name in the table."""
ROW = tuple(records.c[RENAMED.get(name, name)].label(name) for name in Row.__struct_fields__)

OWNED = (blocks, marks, sweep_cells)
"""Tables of what belongs to a record; points are derived."""


def put(connection: Connection, table: Table, *rows: dict[str, Any], replace: bool = True) -> int:
    """Insert rows, and return how many of them were written. One that is there already is replaced, or left as it is.

    So a write may be given again when its answer was lost.
    """
    statement = _inserting(table, connection.dialect.name, replace)
    counted = {"preserve_rowcount": True}
    return connection.execute(statement, list(rows), execution_options=counted).rowcount if rows else 0


@cache
def _inserting(table: Table, dialect: str, replace: bool) -> Any:
    statement: Any = (sqlite if dialect == "sqlite" else postgresql).insert(table)
    keys = [column.name for column in table.primary_key.columns]
    others = {column.name: statement.excluded[column.name] for column in table.columns if column.name not in keys}
    if replace and others:
        return statement.on_conflict_do_update(index_elements=keys, set_=others)
    return statement.on_conflict_do_nothing(index_elements=keys)


def record_row(record: RunRecord, *, over: bool) -> dict[str, Any]:
    """Returns the row of a record in its table."""
    plain = asdict(row_of(record, over=over))
    return {**{RENAMED.get(name, name): value for name, value in plain.items()}, "head": pack_head(record)}


def write_record(connection: Connection, record: RunRecord, *, over: bool) -> None:
    """Write a record's head, new or replaced, and those of its blocks that were not appended yet.

    `over`: nothing more will come, however little there is.
    """
    row = record_row(record, over=over)
    put(connection, records, row)
    writer = {"name": f"{WRITER}{record.id}", "token": "", "process": this_process()}
    if row["status"] == "running":
        put(connection, holders, {**writer, "until": None, "said": None})
    else:
        connection.execute(delete(holders).where(holders.c.name == writer["name"]))
    new = ({"record_id": record.id, "number": n, "body": pack_block(block)} for n, block in enumerate(record.blocks))
    put(connection, blocks, *new, replace=False)
    if row["status"] == "done" and record.blocks:
        keep_point(connection, record)
    elif row["status"] == "done":  # the blocks were appended one by one
        keep_points(connection, [record.id])


def keep_point(connection: Connection, record: RunRecord) -> None:
    """Write the record's point in its trend, in place of an older one."""
    values = point_values(record)
    if values is None:
        connection.execute(delete(points).where(points.c.record_id == record.id))
        return
    put(connection, points, values)
    put(connection, series, {"series_key": values["series_key"], "body": series_body(record)}, replace=False)


def keep_points(connection: Connection, ids: list[str] | None = None) -> None:
    """Make the points of records anew from what is stored of them: of all that are done, or of some."""
    asked = select(records.c.id, records.c.head).where(records.c.status == "done")
    for record_id, head in connection.execute(asked if ids is None else asked.where(records.c.id.in_(ids))).all():
        own = select(blocks.c.body).where(blocks.c.record_id == record_id).order_by(blocks.c.number)
        try:
            keep_point(connection, unpack(record_id, head, connection.execute(own).scalars()))
        except RecordError:
            continue  # said to whoever reads it


def version(connection: Connection) -> int | None:
    """Returns the layout of this database, or None where there is none yet."""
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


_ADVISORY_LOCK = 0x7265646C
"""Any fixed number: on PostgreSQL it makes two first openers take turns."""


def bring_up(connection: Connection, location: str) -> None:
    """Make the tables, or update older ones, in a transaction of the caller's that holds the write lock.

    Every layout since the first is a part of today's tables, so whatever is missing is created.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
    found = version(connection)  # again, under the lock: another process may have been faster
    if found is None:
        check_foreign(connection, location)
    else:
        check_readable(found, location)
        if inspect(connection).has_table(ceilings.name) and found <= 4:
            columns = {column["name"] for column in inspect(connection).get_columns(ceilings.name)}
            if "place" in columns:  # what layouts 3 and 4 called the key of a device
                connection.execute(text("ALTER TABLE ceilings RENAME COLUMN place TO device_key"))
    metadata.create_all(connection)
    if found is not None and found < 7:
        # Layouts before 6 had no points; layout 6 placed those of other checkouts by when they were measured.
        connection.execute(delete(points))
        keep_points(connection)
    if found is not None and found < 8:
        writers = connection.execute(select(meta).where(meta.c.name.startswith("writer of "))).all()
        own = ({"name": f"{WRITER}{name[10:]}", "token": "", "process": value} for name, value in writers)
        put(connection, holders, *own)
        connection.execute(delete(meta).where(meta.c.name != "layout"))
    put(connection, meta, {"name": "layout", "value": str(LAYOUT)})


def check_readable(found: int, location: str) -> None:
    if found > LAYOUT:
        raise StoreError(f"the history at {location} has layout {found}, this Redline knows {LAYOUT}: update Redline")
