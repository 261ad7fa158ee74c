"""What of a record becomes columns, what becomes bytes, and the way back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from redline.errors import RecordError, RedlineError, SpecError, StoreError, UsageError
from redline.record import Block, RunRecord, device_of, encode, migrate

Status = Literal["running", "done", "failed", "interrupted"]
CutOff = Literal["cut off"]
"""What `running` is called once its writer is gone."""

# What damaged or foreign bytes make msgspec, a migration or a spec's own checks raise.
_DAMAGE = (msgspec.MsgspecError, RedlineError, LookupError, TypeError, ValueError, AttributeError, RecursionError)


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


def row_of(record: RunRecord, *, over: bool) -> Row:
    """The columns of a record; `over` says that nothing more will come, however little there is."""
    workload, prepared = record.spec.workload, record.prepared
    return Row(
        id=record.id,
        created_at=record.created_at,
        key=record.key,
        group=record.group,
        position=record.position,
        model=workload.model,
        task=workload.task,
        recipe=str(record.spec.recipe),
        batch=prepared.workload.items_per_step if prepared else workload.batch,
        device=device_of(record),
        device_name=prepared.environment.device.name if prepared else "",
        status=_status_of(record, over),
        stopped=record.stopped,
        schema=record.schema,
    )


def _status_of(record: RunRecord, over: bool) -> Status:
    if record.failure is not None or record.stopped == "failed":
        return "failed"
    if record.stopped == "interrupted":
        return "interrupted"
    return "done" if over or record.stopped is not None else "running"


def pack_head(record: RunRecord) -> bytes:
    """The record without its blocks, which lie in rows of their own."""
    try:
        return encode(msgspec.structs.replace(record, blocks=()))
    except UnicodeEncodeError:
        raise StoreError(
            f"record {record.id} holds text that is not Unicode, such as an undecodable file name"
        ) from None


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
    except _DAMAGE as error:
        raise RecordError(f"record {record_id} is damaged: {error}") from error


def read_exported(path: Path) -> list[RunRecord]:
    """The records of an exported document, old ones through the migrations."""
    try:
        document: Any = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a JSON document of Redline: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("results"), list):
        raise UsageError(f"{path} is not a JSON document of Redline: it has no results")
    records = document.get("records")
    if not isinstance(records, list):
        raise UsageError(
            f"{path} holds no raw records, and rows alone say neither where nor how they were measured: "
            "write it with 'redline export --format json --raw'"
        )
    return [_record(plain, path) for plain in records]


def _record(plain: Any, path: Path) -> RunRecord:
    if not isinstance(plain, dict):
        raise RecordError(f"{path}: not a record: expected a table")
    try:
        return msgspec.convert(migrate(plain), RunRecord)
    except (msgspec.ValidationError, SpecError) as error:
        raise RecordError(f"{path}: record {plain.get('id')!r} is damaged: {error}") from None
