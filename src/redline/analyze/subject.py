"""What a record is about, but for its recipe and its batch: rows with one subject may stand in one chart."""

from __future__ import annotations

from collections.abc import Sequence

from redline.record import RunRecord, device_of
from redline.spec import Spec
from redline.units import format_bytes


class Subject(Spec):
    model: str
    task: str
    device: str
    """The device's name, or what was asked for where the bench never said it."""
    setting: str = ""
    """What else was asked for and changes the speed, in words; empty where nothing was."""

    def __str__(self) -> str:
        return " · ".join(part for part in (self.model, self.task, self.setting, self.device) if part)


def subjects_of(records: Sequence[RunRecord]) -> list[Subject]:
    """One per record. A record that broke before its device was named takes the name its siblings gave that device."""
    named: dict[str, set[str]] = {}
    for record in records:
        if name := _device_name(record):
            named.setdefault(device_of(record), set()).add(name)
    return [_subject(record, named) for record in records]


def _subject(record: RunRecord, named: dict[str, set[str]]) -> Subject:
    workload, device = record.spec.workload, device_of(record)
    known = named.get(device, set())
    name = _device_name(record) or (next(iter(known)) if len(known) == 1 else device)
    return Subject(model=workload.model, task=workload.task, device=name, setting=_setting(record))


def _device_name(record: RunRecord) -> str:
    return record.prepared.environment.device.name if record.prepared else ""


def batch_of(record: RunRecord) -> int | None:
    """Items per step: as measured, else as asked for."""
    return record.prepared.workload.items_per_step if record.prepared else record.spec.workload.batch


def is_capture(record: RunRecord) -> bool:
    """Timed only briefly, beside a profile: good for a row, but no rival of a record that was measured at length."""
    return record.trace is not None


def _setting(record: RunRecord) -> str:
    workload, limit = record.spec.workload, record.spec.launch.memory_limit_bytes
    words = (
        f"{workload.image_size} px" if workload.image_size else "",
        f"{workload.sequence_length} tokens" if workload.sequence_length else "",
        f"{workload.classes} classes" if workload.classes else "",
        workload.optimizer if workload.task == "train" and workload.optimizer != "sgd" else "",
        f"{record.spec.threads} threads" if record.spec.threads else "",
        f"within {format_bytes(limit)}" if limit else "",
    )
    return ", ".join(word for word in words if word)
