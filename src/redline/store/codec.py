"""Turns a record into columns and bytes, and back."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import msgspec

from redline.analyze.blocks import timed_blocks
from redline.model.errors import RecordError, RedlineError
from redline.model.fields import LAST_MOMENT, Moment
from redline.model.identity import Series, is_capture, series_of
from redline.model.migrations import encode, migrate
from redline.model.note import notes_from_texts
from redline.model.record import Block, FailureKind, RunRecord, TelemetrySample, device_of
from redline.model.work import CEILINGS_SCHEMA, Ceilings

Status = Literal["running", "done", "failed", "interrupted"]
CutOff = Literal["cut off"]
"""`running` is called this once its writer is gone."""

DAMAGE = (msgspec.MsgspecError, RedlineError, LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""These are the errors that msgspec, a migration or a spec's own checks raise for damaged or foreign bytes."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A record in a listing. Readable also where the record itself is damaged or of a newer Redline."""

    id: str
    created_at: float
    key: str | None
    group: str | None
    position: int
    model: str
    task: str
    recipe: str
    batch: int | None
    """Items per step."""
    device: str
    """As it was asked for; `auto` becomes what it turned out to be, once the bench has said so."""
    device_name: str
    status: Status | CutOff
    """`running` also stands where the writer was killed on another machine, which cannot be seen from here."""
    stopped: str | None
    schema: int


CellStatus = Literal["done", "failed"]


class SettledCell(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that needs no further look, unless someone asks for one."""

    key: str
    """The plan key: of the spec, the machine and the model, as they were known before anything ran."""
    status: CellStatus
    record_id: str
    failure_kind: FailureKind | None
    failure_stage: str | None
    failure_message: str | None


class TuneRow(msgspec.Struct, frozen=True, kw_only=True):
    """A search in a listing."""

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
    process: str
    done_before: int = 0
    """Counts what earlier processes have done."""
    done: int = 0
    total: int | None = None
    now: str = ""
    """In words."""
    telemetry: TelemetrySample | None = None
    """The measuring process took this reading of the device last."""
    is_over: bool = False
    """The process is gone and did not end it."""


MarkKind = Literal["tag", "note", "gate"]
"""`gate`: what a gate decided of a record, as one of its codes; the others are a person's words."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A mark is what somebody said of a record."""

    record_id: str
    kind: MarkKind
    words: str
    created_at: float


class Point(msgspec.Struct, frozen=True):
    """One record in a trend; the fields are in the order of the table's columns."""

    record_id: str
    series_key: str
    created_at: Moment
    """When it was measured; of another commit that was checked out to be measured, when that commit was made."""
    step_s: Annotated[float, msgspec.Meta(gt=0, le=LAST_MOMENT)]
    items: Annotated[int, msgspec.Meta(ge=1)]
    git_commit: str | None
    torch: str | None
    driver: str | None


class SeriesSeen(msgspec.Struct, frozen=True, kw_only=True):
    """There is a trend of this."""

    key: str
    series: Series
    number: int
    latest: float


def column_text(text: str) -> str:
    """Text that every database takes: PostgreSQL has no NUL, and neither stores half a surrogate pair."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def row_of(record: RunRecord, *, over: bool) -> Row:
    """The columns of a record; `over` says that nothing more will come, however little there is."""
    workload, prepared = record.spec.workload, record.prepared
    return Row(
        id=record.id,
        created_at=record.created_at,
        key=record.key,
        group=record.group,
        position=record.position,
        model=column_text(workload.model),
        task=workload.task,
        recipe=column_text(str(record.spec.recipe)),
        batch=prepared.workload.batch if prepared else workload.batch,
        device=column_text(device_of(record)),
        device_name=column_text(prepared.environment.device.name) if prepared else "",
        status=_status_of(record, over),
        stopped=record.stopped,
        schema=record.schema,
    )


def point_values(record: RunRecord) -> dict[str, Any] | None:
    """Returns the columns of a record's point in its trend, or None if it was not timed, or only beside a profile.

    A gate measures another commit in a folder of its own, between measurements of the person's checkout. In the trend that
    record stands where its commit does, or nowhere where the time of the commit is not known.
    """
    samples = [sample for block in timed_blocks(record, "throughput") for sample in block.samples]
    if record.prepared is None or record.failure is not None or not samples or is_capture(record):
        return None
    environment, middle_s = record.prepared.environment, median(samples)
    moment = environment.git_committed_at if record.spec.launch.folder else record.created_at
    return (
        None
        if middle_s <= 0 or moment is None
        else {
            "record_id": record.id,
            "series_key": series_of(record).key,
            "created_at": moment,
            "step_s": middle_s,
            "items": record.prepared.workload.items_per_step,
            "git_commit": environment.git_commit,
            "torch": environment.versions.get("torch"),
            "driver": environment.device.driver,
        }
    )


def series_body(record: RunRecord) -> str:
    return column_text(msgspec.json.encode(series_of(record)).decode())


def row_from(row: Row) -> Row:
    """Replaces a time outside the calendar, as in a damaged or foreign history, by the nearest valid one."""
    sane = 0 <= row.created_at <= LAST_MOMENT
    return row if sane else msgspec.structs.replace(row, created_at=LAST_MOMENT if row.created_at > 0 else 0.0)


def _status_of(record: RunRecord, over: bool) -> Status:
    if record.failure is not None or record.stopped == "failed":
        return "failed"
    if record.stopped == "interrupted":
        return "interrupted"
    return "done" if over or record.stopped is not None else "running"


def pack_head(record: RunRecord) -> bytes:
    """The record without its blocks, which have rows of their own."""
    head = msgspec.structs.replace(record, blocks=())
    try:
        return encode(head)
    except UnicodeEncodeError:  # such as a file name that is not UTF-8, in a message
        return msgspec.msgpack.encode(_in_unicode(msgspec.to_builtins(head)))


def _in_unicode(plain: Any) -> Any:
    if isinstance(plain, str):
        return plain.encode("utf-8", "backslashreplace").decode()
    if isinstance(plain, dict):
        return {_in_unicode(name): _in_unicode(value) for name, value in plain.items()}
    return [_in_unicode(value) for value in plain] if isinstance(plain, list | tuple) else plain


def pack_block(block: Block) -> bytes:
    return msgspec.msgpack.encode(block)


def unpack(record_id: str, head: bytes, blocks: Iterable[bytes]) -> RunRecord:
    """Put a record together again, through the migrations where it is old."""
    try:
        plain: Any = msgspec.msgpack.decode(head)
        plain["blocks"] = [msgspec.msgpack.decode(block) for block in blocks]
        return msgspec.convert(migrate(plain), RunRecord)
    except RecordError:
        raise  # already says it well: too new, or no way up from its schema
    except DAMAGE as error:
        raise RecordError(f"record {record_id} is damaged: {error}") from error


def read_ceilings(body: bytes) -> Ceilings | None:
    """None for ceilings that were measured in another way, or are damaged."""
    try:
        plain = msgspec.msgpack.decode(body)
        # Early ceilings of this schema have notes without codes.
        found = msgspec.convert({**plain, "notes": notes_from_texts(plain["notes"])}, Ceilings)
    except DAMAGE:
        return None
    return found if found.schema == CEILINGS_SCHEMA else None


def with_stored_trace(record: RunRecord, folder: Path) -> RunRecord:
    """With the path of its trace relative to the history's folder, so that the two can be moved together."""
    if record.trace is None or not _is_inside(record.trace.path, folder):
        return record
    relative = os.path.relpath(os.path.realpath(record.trace.path), os.path.realpath(folder))
    return with_trace_path(record, relative)


def with_found_trace(record: RunRecord, folder: Path) -> RunRecord:
    """With the whole path of its trace where that is in the history's folder; any other path is not opened."""
    if record.trace is None:
        return record
    path = os.path.join(folder, record.trace.path)  # an absolute one, of an older Redline, stays as it is
    return with_trace_path(record, path if _is_inside(path, folder) else "")


def _is_inside(path: str, folder: Path) -> bool:
    """Returns whether a file is in a folder, also when links are followed."""
    try:
        return os.path.isabs(path) and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def with_trace_path(record: RunRecord, path: str) -> RunRecord:
    assert record.trace is not None
    return msgspec.structs.replace(record, trace=msgspec.structs.replace(record.trace, path=path))
