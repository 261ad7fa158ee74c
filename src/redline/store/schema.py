"""This module has the tables of a history, says what is written to them of a record, and updates those of an older layout.

A record is a row with what queries need as columns and the rest as bytes; its blocks are rows that are only ever
appended, so writing one costs the same however many there are. No column carries a name that SQL reserves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import msgspec
import msgspec.inspect
from sqlalchemy import (
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Select,
    Table,
    Text,
    delete,
    func,
    inspect,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import SchemaItem

from redline.analyze.blocks import timed_blocks
from redline.model.errors import RecordError, RedlineError, StoreError
from redline.model.fields import LAST_MOMENT, Moment
from redline.model.identity import Series, is_capture, series_of
from redline.model.migrations import encode, migrate
from redline.model.note import notes_from_texts
from redline.model.record import FailureKind, RunRecord, device_of
from redline.model.work import CEILINGS_SCHEMA, Ceilings
from redline.system.processes import this_process

LAYOUT = 8
"""This number is raised with every change of the tables; `bring_up` then says how older ones are updated."""
DAMAGE = (msgspec.MsgspecError, RedlineError, LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""These are the errors that msgspec, a migration or a spec's own checks raise for damaged or foreign bytes."""
VALUES_AT_ONCE = 10_000
"""A statement has at most this many values, which is below what SQLite (32 766) and PostgreSQL (65 535) take."""

# These are read from a history.

Status = Literal["running", "done", "failed", "interrupted", "cut off"]
"""`running` is called `cut off` once its writer is gone; no table has that word."""


_ROW = {"key": "spec_key", "group": "group_id", "position": "group_position", "schema": "record_schema"}


class Row(msgspec.Struct, frozen=True, kw_only=True, rename=_ROW):
    """This is a record in a listing. It can be read even if the record itself is damaged or of a newer Redline."""

    id: str
    created_at: float
    key: str | None
    group: str | None
    position: int
    model: str
    task: str
    recipe: str
    batch: int | None
    """A step has this many items."""
    device: str
    """It is the device that was asked for; `auto` becomes what it turned out to be, once the bench has said so."""
    device_name: str
    status: Status
    """`running` also stands where the writer was killed on another machine, which cannot be seen from here."""
    stopped: str | None
    schema: int


class SettledCell(msgspec.Struct, frozen=True, kw_only=True, rename={"key": "cell_key"}):
    """This cell needs no further look, unless someone asks for one."""

    key: str
    """This is the plan key, made of the spec, the machine and the model as they were known before anything ran."""
    status: Literal["done", "failed"]
    record_id: str
    failure_kind: FailureKind | None
    failure_stage: str | None
    failure_message: str | None

    @classmethod
    def by(cls, key: str, record: RunRecord) -> SettledCell:
        """Returns the cell as it is settled by this record."""
        failure = record.failure
        return cls(
            key=key,
            status="failed" if failure else "done",
            record_id=record.id,
            failure_kind=failure.kind if failure else None,
            failure_stage=failure.stage if failure else None,
            failure_message=failure.told if failure else None,
        )


class TuneRow(msgspec.Struct, frozen=True, kw_only=True):
    """This is a search in a listing."""

    name: str
    created_at: float
    model: str
    task: str
    state: str


ActivityKind = Literal["sweep", "tune", "watch"]


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """A process writes this to say how far it is, for those who look on."""

    kind: ActivityKind
    name: str
    begun_at: float
    done_before: int = 0
    """It counts what earlier processes have done."""
    done: int = 0
    total: int | None = None
    now: str = ""
    """It says in words what is being done."""
    is_over: bool = False
    """It is True if the process is gone and has not ended its work."""


MarkKind = Literal["tag", "note", "gate"]
"""A `gate` mark says what a gate decided of a record, as one of its codes; the others are a person's words."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A mark is what somebody said of a record."""

    record_id: str
    kind: MarkKind
    words: str
    created_at: float


class Point(msgspec.Struct, frozen=True):
    """A point is one record in a trend. Points are made again from the records whenever these change."""

    record_id: str
    series_key: str
    created_at: Moment
    """It says when the record was measured, or when its commit was made if that was checked out to be measured."""
    step_s: Annotated[float, msgspec.Meta(gt=0, le=LAST_MOMENT)]
    items: Annotated[int, msgspec.Meta(ge=1)]
    git_commit: str | None
    torch: str | None
    driver: str | None


class SeriesSeen(msgspec.Struct, frozen=True, kw_only=True):
    """There is a trend of this."""

    key: str
    series: Series


# These are the tables.

metadata = MetaData()

# Ids have the collation C, because prefixes are looked up as a range, which a language's sorting rules on a server would tear apart.
_Id = Text().with_variant(Text(collation="C"), "postgresql")
_TYPES = {"StrType": Text, "LiteralType": Text, "FloatType": Double, "IntType": Integer}


def _of_record(*, is_key: bool = False) -> Column[str]:
    return Column("record_id", _Id, ForeignKey("records.id"), primary_key=is_key, nullable=False)


def _column(field: msgspec.inspect.Field) -> Column[Any]:
    """Returns the column for a struct's field. It may be empty if the field may be None."""
    name, kinds = field.encode_name, [type(kind).__name__ for kind in getattr(field.type, "types", [field.type])]
    if name == "record_id":
        return _of_record()
    kind = _Id if name == "id" else next(_TYPES[kind] for kind in kinds if kind in _TYPES)
    return Column(name, kind, nullable="NoneType" in kinds)


def _table(name: str, kind: type[msgspec.Struct], key: Sequence[str], *others: SchemaItem) -> Table:
    """Returns the table from which rows of this kind are read. It has a column for each field, and what only queries or writers need."""
    known: Any = msgspec.inspect.type_info(kind)
    return Table(name, metadata, *map(_column, known.fields), *others, PrimaryKeyConstraint(*key))


meta = Table("meta", metadata, Column("name", Text, primary_key=True), Column("value", Text, nullable=False))
"""This table has the number of the layout."""

records = _table(
    "records",
    Row,
    ("id",),
    # This column is last, so that SQLite reads a listing without following the bytes into their overflow pages.
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
    _of_record(is_key=True),
    Column("number", Integer, primary_key=True),
    Column("body", LargeBinary, nullable=False),
)
"""This table has the samples."""

marks = _table("marks", Mark, ("record_id", "kind", "words"), Index("marks_by_words", "kind", "words"))
"""People tag records and write notes about them, and gates mark records too; the marks are kept here."""

sweep_cells = _table(
    "sweep_cells",
    SettledCell,
    ("sweep", "cell_key"),
    Column("sweep", Text, nullable=False),
    Index("sweep_cells_by_record", "record_id"),  # deleting a record asks whether a cell refers to it
)
"""This table has the settled cells of sweeps, and which record settles each."""

tunes = _table("tunes", TuneRow, ("name",), Column("body", LargeBinary, nullable=False))
"""This table has the searches for the fastest recipe: what was asked, how far each came, and by which records."""

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

points = _table(
    "points",
    Point,
    ("record_id",),
    Index("points_by_series", "series_key", "created_at", "record_id"),
    Index("points_by_time", "created_at", "series_key"),
)
"""This table has the step time of each finished record, so that a trend needs no samples."""

WRITER = "record "
"""The name of a holder that writes a record begins with this."""
OWNED = (blocks, marks, sweep_cells)
"""These tables have what belongs to a record. The points are left out, because they are derived from it."""


def columns_of(table: Table, kind: type[msgspec.Struct]) -> list[Column[Any]]:
    """Returns those columns of a table from which a struct is made."""
    return [table.c[name] for name in kind.__struct_encode_fields__]


def portions(
    connection: Connection, statement: Select[Any], column: Column[Any], values: Iterable[str] | None
) -> Iterator[Any]:
    """Yields the rows of a statement: all of them, or those whose column has one of these values, which are asked for in portions."""
    if values is None:
        yield from connection.execute(statement)
        return
    waiting = iter(values)
    while portion := list(islice(waiting, VALUES_AT_ONCE)):
        yield from connection.execute(statement.where(column.in_(portion)))


# These functions write to the tables.


def column_text(text: str) -> str:
    """Returns text that every database takes: PostgreSQL has no NUL, and no database stores half a surrogate pair."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def put(connection: Connection, table: Table, *rows: dict[str, Any], replace: bool = True) -> int:
    """Inserts rows, and returns how many of them were written. One that is there already is replaced, or left as it is.

    A write may therefore be given again when its answer was lost.
    """
    clean = [{name: column_text(v) if isinstance(v, str) else v for name, v in row.items()} for row in rows]
    statement = _inserting(table, connection.dialect.name, replace)
    counted = {"preserve_rowcount": True}
    return connection.execute(statement, clean, execution_options=counted).rowcount if clean else 0


@cache
def _inserting(table: Table, dialect: str, replace: bool) -> Any:
    statement: Any = (sqlite if dialect == "sqlite" else postgresql).insert(table)
    keys = [column.name for column in table.primary_key.columns]
    others = {column.name: statement.excluded[column.name] for column in table.columns if column.name not in keys}
    if replace and others:
        return statement.on_conflict_do_update(index_elements=keys, set_=others)
    return statement.on_conflict_do_nothing(index_elements=keys)


def record_row(record: RunRecord, *, over: bool) -> dict[str, Any]:
    """Returns the row that a record has in its table. `over` says that nothing more will come, however little there is."""
    workload, prepared = record.spec.workload, record.prepared
    status = (
        record.stopped
        if record.stopped in ("failed", "interrupted")
        else "done"
        if over or record.stopped
        else "running"
    )
    return {
        "id": record.id,
        "created_at": record.created_at,
        "spec_key": record.key,
        "group_id": record.group,
        "group_position": record.position,
        "model": workload.model,
        "task": workload.task,
        "recipe": str(record.spec.recipe),
        "batch": prepared.workload.batch if prepared else workload.batch,
        "device": device_of(record),
        "device_name": prepared.environment.device.name if prepared else "",
        "status": "failed" if record.failure else status,
        "stopped": record.stopped,
        "record_schema": record.schema,
        "head": pack_head(record),
    }


def block_rows(record: RunRecord) -> list[dict[str, Any]]:
    """Returns the rows for the blocks that a record holds."""
    bodies = map(msgspec.msgpack.encode, record.blocks)
    return [{"record_id": record.id, "number": number, "body": body} for number, body in enumerate(bodies)]


def write_record(connection: Connection, record: RunRecord, *, over: bool) -> None:
    """Writes a record's head, new or replaced, and those of its blocks that were not appended yet."""
    row, writer = record_row(record, over=over), f"{WRITER}{record.id}"
    put(connection, records, row)
    if row["status"] == "running":
        put(connection, holders, {"name": writer, "token": "", "process": this_process(), "until": None, "said": None})
    else:
        connection.execute(delete(holders).where(holders.c.name == writer))
    put(connection, blocks, *block_rows(record), replace=False)
    if row["status"] == "done":
        keep_points(connection, [record.id])


def keep_points(connection: Connection, ids: Iterable[str] | None = None) -> None:
    """Makes the points of records anew from what is stored of them: of all that are done, or of some.

    A record that was not timed, or only beside a profile, has none. A gate measures another commit in a folder of its own, between
    measurements of the person's checkout. In the trend that record stands where its commit does, or nowhere if the time of the
    commit is not known.
    """
    done = select(records.c.id, records.c.head).where(records.c.status == "done")
    for record_id, head in list(portions(connection, done, records.c.id, ids)):
        own = select(blocks.c.body).where(blocks.c.record_id == record_id).order_by(blocks.c.number)
        try:
            record = unpack(record_id, head, connection.execute(own).scalars())
        except RecordError:
            continue  # whoever reads the record is told
        connection.execute(delete(points).where(points.c.record_id == record_id))
        samples = [sample for block in timed_blocks(record, "throughput") for sample in block.samples]
        if record.prepared is None or record.failure is not None or not samples or is_capture(record):
            continue
        environment, step_s = record.prepared.environment, median(samples)
        moment = environment.git_committed_at if record.spec.launch.folder else record.created_at
        if step_s <= 0 or moment is None:
            continue
        of_series = series_of(record)
        versions = environment.git_commit, environment.versions.get("torch"), environment.device.driver
        point = Point(record_id, of_series.key, moment, step_s, record.prepared.workload.items_per_step, *versions)
        put(connection, points, msgspec.structs.asdict(point))
        body = msgspec.json.encode(of_series).decode()
        put(connection, series, {"series_key": of_series.key, "body": body}, replace=False)


def pack_head(record: RunRecord) -> bytes:
    """Returns the bytes of a record without its blocks, which have rows of their own."""
    head = msgspec.structs.replace(record, blocks=())
    try:
        return encode(head)
    except UnicodeEncodeError:  # a message may hold a file name that is not UTF-8
        return msgspec.msgpack.encode(_in_unicode(msgspec.to_builtins(head)))


def _in_unicode(plain: Any) -> Any:
    if isinstance(plain, str):
        return plain.encode("utf-8", "backslashreplace").decode()
    if isinstance(plain, dict):
        return {_in_unicode(name): _in_unicode(value) for name, value in plain.items()}
    return [_in_unicode(value) for value in plain] if isinstance(plain, list | tuple) else plain


def unpack(record_id: str, head: bytes, bodies: Iterable[bytes]) -> RunRecord:
    """Puts a record together again, and takes it through the migrations if it is old."""
    try:
        plain: Any = msgspec.msgpack.decode(head)
        plain["blocks"] = [msgspec.msgpack.decode(body) for body in bodies]
        return msgspec.convert(migrate(plain), RunRecord)
    except RecordError:
        raise  # it already says well that the record is too new, or that no way leads up from its schema
    except DAMAGE as error:
        raise RecordError(f"record {record_id} is damaged: {error}") from error


def read_ceilings(body: bytes) -> Ceilings | None:
    """Returns ceilings from their bytes; None if they were measured in another way, or are damaged."""
    try:
        plain = msgspec.msgpack.decode(body)
        # Early ceilings of this schema have notes without codes.
        found = msgspec.convert({**plain, "notes": notes_from_texts(plain["notes"])}, Ceilings)
    except DAMAGE:
        return None
    return found if found.schema == CEILINGS_SCHEMA else None


def with_trace(record: RunRecord, folder: Path | None, *, is_stored: bool = False) -> RunRecord:
    """Returns the record with the path of its trace: relative to the history's folder, as it is stored, or whole.

    The folder and the history can then be moved together. A path that leads out of the folder, also by a link, is never opened: it
    becomes empty.
    """
    if record.trace is None:
        return record
    path = ""
    if folder is not None and record.trace.path:
        try:
            whole, real = os.path.join(folder, record.trace.path), os.path.realpath(folder)
            if Path(os.path.realpath(whole)).is_relative_to(real):
                path = os.path.relpath(os.path.realpath(whole), real) if is_stored else whole
        except (OSError, ValueError):  # the path is too long, or has a NUL
            pass
    return msgspec.structs.replace(record, trace=msgspec.structs.replace(record.trace, path=path))


# These update older tables.


def layout_of(connection: Connection, location: str) -> int | None:
    """Returns the layout of this database, or None where there is none yet. Refuses somebody else's tables, and newer ones."""
    present = set(inspect(connection).get_table_names())
    value = None
    if meta.name in present:
        value = connection.execute(select(meta.c.value).where(meta.c.name == "layout")).scalar()
    if not isinstance(value, str) or not value.isdecimal():
        # On a server other tables are normal neighbours; a SQLite file with tables is somebody else's.
        if foreign := present if connection.dialect.name == "sqlite" else present & set(metadata.tables):
            names = ", ".join(sorted(foreign)[:3])
            raise StoreError(
                f"the database at {location} belongs to something else (tables {names}): set REDLINE_STORE to another location"
            )
        return None
    if int(value) > LAYOUT:
        raise StoreError(f"the history at {location} has layout {value}, this Redline knows {LAYOUT}: update Redline")
    return int(value)


_ADVISORY_LOCK = 0x7265646C
"""Any fixed number would do: on PostgreSQL it makes two who first open a history take turns."""


def bring_up(connection: Connection, location: str) -> None:
    """Makes the tables, or updates older ones, in a transaction of the caller's that holds the write lock.

    Every layout since the first is a part of today's tables, so whatever is missing is created, and the points are made anew.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
    found = layout_of(
        connection, location
    )  # it is read again under the lock, because another process may have been faster
    if found == LAYOUT:
        return
    if found in (3, 4):  # they called the key of a device its place
        connection.execute(text("ALTER TABLE ceilings RENAME COLUMN place TO device_key"))
    metadata.create_all(connection)
    if found is not None:
        connection.execute(delete(points))
        keep_points(connection)
    put(connection, meta, {"name": "layout", "value": str(LAYOUT)})
