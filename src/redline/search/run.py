"""What `run` measures: specs interleaved, each until its interval is narrow enough."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from redline.launch.door import Door
from redline.model.note import Note, note
from redline.model.record import RunRecord, StopReason
from redline.model.spec import RunSpec
from redline.search.group import Entry, Group, StopRule
from redline.search.observer import Journal, Observer

HOPELESS_AFTER = 0.25
HOPELESS_FACTOR = 4.0
"""After a quarter of the ceiling, a target that would take four times the ceiling is given up."""


def measure_together(
    specs: Sequence[RunSpec],
    door: Door,
    journal: Journal,
    observer: Observer | None = None,
    seed: int = 0,
) -> list[RunRecord]:
    """Measure `specs` interleaved; one record each, in their order. What breaks becomes a failed record."""
    observer = observer or Observer()
    why = _why_not_together(specs) if len(specs) > 1 else None
    if why is not None:
        return [_measure_solo(spec, position, why, door, journal, observer) for position, spec in enumerate(specs)]
    with Group(door, journal, observer, random.Random(seed), is_shared=len(specs) > 1) as group:
        for position, spec in enumerate(specs):
            entry = group.open(spec, position)
            if entry is not None:
                group.measure_solo(entry)
        group.measure(UntilPrecise())
    text = "did not fit in memory beside the other recipes: measured by itself, so there is no ratio"
    why = note("measured-separately", text, about="memory")
    for position in group.crowded:
        group.done[position] = _measure_solo(specs[position], position, why, door, journal, observer)
    return [group.done[position] for position in range(len(specs))]


def _why_not_together(specs: Sequence[RunSpec]) -> Note | None:
    separately = "measured one after the other, so there is no ratio"
    if any(spec.launch.door == "inline" for spec in specs):
        text = f"inline sessions share one process and its settings: {separately}"
        return note("measured-separately", text, about="inline")
    if any(spec.launch.rendezvous for spec in specs):
        text = f"ranks that others start serve one recipe at a time: {separately}"
        return note("measured-separately", text, about="rendezvous")
    return None


def _measure_solo(
    spec: RunSpec, position: int, why: Note, door: Door, journal: Journal, observer: Observer
) -> RunRecord:
    """Runs that merely followed each other have no ratio."""
    with Group(door, journal, observer, random.Random(0), is_shared=False) as group:
        group.open(spec, position, notes=(why,))
        group.measure(UntilPrecise())
    return group.done[position]


class UntilPrecise(StopRule):
    """Each entry until its own interval is narrow enough, or its time is up; the first as long as anybody needs it."""

    def visited(self, entries: Sequence[Entry]) -> list[Entry]:
        visited = super().visited(entries)
        first = entries[0] if entries else None
        if visited and first is not None and first not in visited and self._has_time(first):
            visited.append(first)  # ratios are to the first: without it a round says nothing about them
        return visited

    def after_round(self, entries: Sequence[Entry], rounds: int) -> None:
        for entry in entries:
            if entry.is_sound:
                entry.stopped = self._reason(entry)

    @staticmethod
    def _has_time(entry: Entry) -> bool:
        return entry.is_sound and entry.timed_s < entry.spec.measure.max_seconds

    def _reason(self, entry: Entry) -> StopReason | None:
        """Target reached, out of time, or bound to run out of it."""
        ceiling_s = entry.spec.measure.max_seconds
        is_over = entry.timed_s >= ceiling_s
        if not _has_enough_samples(entry):
            return "ceiling" if is_over else None
        intervals = [entry.interval(kind) for kind in entry.kinds]
        width = max(interval.half_width if interval else math.inf for interval in intervals)
        if width <= entry.target:
            return "target"
        if is_over:
            return "ceiling"
        # An interval narrows with the square root of time; do not spend a minute to learn that it was not enough.
        needed_s = entry.timed_s * (width / entry.target) ** 2
        is_hopeless = entry.timed_s >= HOPELESS_AFTER * ceiling_s and needed_s > HOPELESS_FACTOR * ceiling_s
        return "unreachable" if is_hopeless else None


def _has_enough_samples(entry: Entry) -> bool:
    measure = entry.spec.measure
    if len(entry.blocks.get("throughput", [])) < measure.min_rounds:
        return False
    tail = measure.tail_samples if entry.spec.workload.task == "infer" else 0
    needed = dict.fromkeys(entry.kinds, measure.min_samples) | {entry.kinds[-1]: max(measure.min_samples, tail)}
    return all(sum(len(block.samples) for block in entry.blocks[kind]) >= count for kind, count in needed.items())
