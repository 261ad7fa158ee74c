"""This module says how far a record is from the roofline of its device, and holds the peaks that datasheets promise (`Datasheet`)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from redline.analyze.attainable import Attainable, ClassLimit, LimitedBy, attainable
from redline.analyze.bound import Bound, bound, step_s
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import RunRecord
from redline.model.work import Ceilings, WorkCount

_MEMORY_SIZE = r"(?:[- ]\d+ ?GB)?"
"""Some names have the size of the memory at their end, which changes no peak listed here."""


class Datasheet(Frozen):
    card: str
    flops_per_s: dict[str, float]
    """These are dense rates, by number format."""
    bytes_per_s: float
    source: str
    verified: bool
    """If False, the figures are remembered and were not checked against the source."""

    @staticmethod
    def of(device_name: str) -> Datasheet | None:
        return next((sheet for names, sheet in _sheets() if any(_is(name, device_name) for name in names)), None)


def _is(name: str, device_name: str) -> bool:
    """Returns whether the device is called so, by whole words at the end: an A10 is no A100, an RTX 4090 no RTX 4090 Laptop GPU, a slice of
    a card not the card."""
    return re.search(rf"(?:^|\s){re.escape(name)}{_MEMORY_SIZE}$", device_name.strip()) is not None


@cache
def _sheets() -> list[tuple[tuple[str, ...], Datasheet]]:
    table: dict[str, Any] = tomllib.loads((files("redline.analyze") / "data" / "gpu_peaks.toml").read_text("utf-8"))
    formats = ("fp32", "tf32", "fp16", "bf16", "fp8")
    return [
        (
            tuple(card["match"]),
            Datasheet(
                card=name,
                flops_per_s={form: card[form] * 1e12 for form in formats if form in card},
                bytes_per_s=card["memory"] * 1e9,
                source=card["source"],
                verified=card["verified"],
            ),
        )
        for name, card in table.items()
    ]


class Roofline(Frozen):
    flops: int
    """These are the products of the whole step, forward and backward."""
    compulsory_bytes: int
    operator_bytes: int
    """It counts operators unfused and is never part of the limit."""
    intensity: float | None
    """These are FLOPs per compulsory byte. It is None where nothing must move."""
    ridge: float | None
    """FLOPs per byte above which the matrix units, not memory, are the limit."""
    compute_s: float
    memory_s: float
    attainable_s: float
    """This is the roofline time: the longer of the two."""
    limited_by: LimitedBy | None
    """The limit itself is from this; `bound` says what limits the step now. It is None where a number format has no ceiling."""
    unfused_s: float
    """This is what the operators need one by one, each at its own limit."""
    measured_s: float
    headroom: float | None
    """This is measured over roofline time. It is None where the limit is 0 or leaves out products that have no ceiling."""
    efficiency: float | None
    """Its products need this share of the step at the measured ceilings: it is achieved over peak. It is None where some have no
    ceiling."""
    mfu: float | None
    """This is the same share against the datasheet's peak."""
    achieved_flops_per_s: float
    achieved_bytes_per_s: float
    """These are the compulsory bytes over the measured time."""
    bound: Bound
    error: Note | None = None
    """Set where the step is faster than its limit: the count or a ceiling is wrong."""
    notes: tuple[Note, ...] = ()
    classes: tuple[ClassLimit, ...] = ()


def roofline_of(
    record: RunRecord, ceilings: Ceilings | None, *, class_times: Mapping[str, float] | None = None
) -> Roofline | None:
    """Returns the roofline, or None where the record was not counted or not measured, or the device's ceilings are not known."""
    measured_s = step_s(record)
    work = record.prepared.work if record.prepared else None
    if work is None or ceilings is None or measured_s is None or record.failure is not None:
        return None
    return roofline(work, ceilings, measured_s, bound(record, ceilings), class_times=class_times)


def roofline(
    work: WorkCount,
    ceilings: Ceilings,
    measured_s: float,
    limit: Bound,
    *,
    class_times: Mapping[str, float] | None = None,
) -> Roofline:
    found = attainable(work, ceilings)
    times = class_times or {}
    sheet = Datasheet.of(ceilings.name)
    error, notes = _sound(work, ceilings, found, measured_s)
    return Roofline(
        flops=work.total_flops,
        compulsory_bytes=work.compulsory_bytes,
        operator_bytes=work.operator_bytes,
        intensity=work.total_flops / work.compulsory_bytes if work.compulsory_bytes else None,
        ridge=_ridge(work, ceilings, found),
        compute_s=found.compute_s,
        memory_s=found.memory_s,
        attainable_s=found.limit_s,
        limited_by=found.limited_by,
        unfused_s=found.unfused_s,
        measured_s=measured_s,
        headroom=measured_s / found.limit_s if found.limit_s and not found.without_ceiling else None,
        efficiency=found.compute_s / measured_s if not found.without_ceiling else None,
        mfu=_mfu(work, sheet, measured_s) if sheet else None,
        achieved_flops_per_s=work.total_flops / measured_s,
        achieved_bytes_per_s=work.compulsory_bytes / measured_s,
        bound=limit,
        error=error,
        notes=tuple(notes),
        classes=tuple(msgspec.structs.replace(one, measured_s=times.get(one.name)) for one in found.classes),
    )


def at_step(found: Roofline, measured_s: float) -> Roofline:
    """Returns the same work and limits when the step has another time, such as that of all processes together."""
    scale = found.measured_s / measured_s
    return msgspec.structs.replace(
        found,
        measured_s=measured_s,
        headroom=found.headroom / scale if found.headroom is not None else None,
        efficiency=found.efficiency * scale if found.efficiency is not None else None,
        mfu=found.mfu * scale if found.mfu is not None else None,
        achieved_flops_per_s=found.achieved_flops_per_s * scale,
        achieved_bytes_per_s=found.achieved_bytes_per_s * scale,
    )


def _sound(work: WorkCount, ceilings: Ceilings, found: Attainable, measured_s: float) -> tuple[Note | None, list[Note]]:
    """Returns what is wrong with the numbers, and what to know about them."""
    notes = list(work.notes)
    if work.for_these_inputs is not None:
        notes.append(note("counted-for-inputs", f"counted for these inputs: {work.for_these_inputs}"))
    if found.without_ceiling:
        text = f"no ceiling for {', '.join(found.without_ceiling)}: those products are not in the limit"
        notes.append(note("no-ceiling", text))
    if not ceilings.is_trusted:
        text = f"the ceilings may be too low ({ceilings.doubts[0]}); 'redline roofline' measures them again"
        notes.append(note("busy-ceilings", text))
    cache = ceilings.cache_bytes
    lives_in_cache = cache is None or work.compulsory_bytes <= cache
    if found.limited_by == "memory" and lives_in_cache:
        known = "the device does not report its cache size" if cache is None else "all of it fits into the cache"
        text = f"the limit comes from memory bandwidth, but {known}: the step may be faster than this limit"
        notes.append(note("fits-in-cache", text))
    if found.limit_s <= measured_s:
        return None, notes
    over = found.limit_s / measured_s - 1
    # Products take their time wherever their numbers lie; bytes only when no cache holds them.
    beaten = found.compute_s if lives_in_cache else found.limit_s
    if beaten <= measured_s:
        return None, notes
    convolves = any(one.kind == "convolution" for one in work.operators)
    winograd = " (convolutions by Winograd take fewer products than are counted)" if convolves else ""
    error = (
        f"the roofline of {found.limit_s:.3g} s ({found.limited_by or 'memory'}) is {over:.1%} above the measured {measured_s:.3g} s: "
        f"the count{winograd} or the ceiling is wrong; 'redline roofline --fresh' measures the ceilings again"
    )
    return note("limit-beaten", error), notes


def _ridge(work: WorkCount, ceilings: Ceilings, found: Attainable) -> float | None:
    """Returns the ridge for the step's own mix of number formats."""
    counted = sum(flops for form, flops in work.flops_by_format().items() if form in ceilings.flops_per_s)
    return counted / found.compute_s / ceilings.copy_bytes_per_s if found.compute_s else None


def _mfu(work: WorkCount, sheet: Datasheet, measured_s: float) -> float | None:
    formats = {form: flops for form, flops in work.flops_by_format().items() if flops}
    if not formats or any(form not in sheet.flops_per_s for form in formats):
        return None
    return sum(flops / sheet.flops_per_s[form] for form, flops in formats.items()) / measured_s
