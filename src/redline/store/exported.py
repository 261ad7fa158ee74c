"""Records that left a history as a file: what `redline export --format json --raw` writes, read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from redline.errors import RecordError, SpecError, UsageError
from redline.record import RunRecord, migrate


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
