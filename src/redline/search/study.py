"""Many small groups of recipes: the workers of several groups prepare side by side, then each group is timed by itself.

Compiling takes most of a study's time and keeps the device idle. It is done for several batches at once; nothing is
timed until all of them are ready.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import msgspec

from redline.launch.door import Door
from redline.model.record import RunRecord
from redline.model.spec import MeasureSpec, RunSpec
from redline.search.group import FEWEST_SOLO_BLOCKS, Group, Pending
from redline.search.observer import Journal, Observer
from redline.search.run import UntilPrecise, measure_together

LOOK_S = 0.05
"""How long each worker that prepares is waited for in turn."""
TAIL_SAMPLES = 130
"""How many latencies p95 needs."""


def study_measure(measure: MeasureSpec) -> MeasureSpec:
    """As much measuring as a quick study needs: short blocks, but enough samples for p95. Other efforts stay as they are."""
    if measure.effort != "quick":
        return measure
    return msgspec.structs.replace(
        measure, block_seconds=0.1, max_seconds=8.0, warmup_max_seconds=3.0, tail_samples=TAIL_SAMPLES
    )


def measure_groups(
    groups: Sequence[Sequence[RunSpec]], door: Door, journal: Journal, observer: Observer, workers: int
) -> list[RunRecord]:
    """Measure the specs of each group interleaved; one record each, in their order. At most `workers` are open at once."""
    records: list[RunRecord] = []
    for chunk in _chunks(groups, workers):
        if len(chunk) == 1 and len(chunk[0]) > workers:
            records += measure_together(chunk[0], door, journal, observer)
        else:
            records += _measure_chunk(chunk, door, journal, observer)
    return records


def _chunks(groups: Sequence[Sequence[RunSpec]], workers: int) -> Iterator[list[Sequence[RunSpec]]]:
    """Neighbouring groups, as many as fit; one that does not fit stands alone."""
    chunk: list[Sequence[RunSpec]] = []
    for specs in groups:
        if chunk and sum(map(len, chunk)) + len(specs) > workers:
            yield chunk
            chunk = []
        chunk.append(specs)
    if chunk:
        yield chunk


def _measure_chunk(
    chunk: Sequence[Sequence[RunSpec]], door: Door, journal: Journal, observer: Observer
) -> list[RunRecord]:
    with ExitStack() as stack:
        opened: list[tuple[Group, list[Pending]]] = []
        for specs in chunk:
            group = Group(
                door, journal, observer, random.Random(0), is_shared=len(specs) > 1, solo_blocks=FEWEST_SOLO_BLOCKS
            )
            stack.enter_context(group)
            opened.append((group, [group.start(spec, position) for position, spec in enumerate(specs)]))
        _wait_for(opened)
        for group, pending in opened:
            _measure_group(group, pending)
    records: list[RunRecord] = []
    for specs, (group, _) in zip(chunk, opened, strict=True):
        if group.crowded:  # some ran out of memory beside other groups' workers: once more, without them
            records += measure_together(specs, door, journal, observer)
        else:
            records += [group.done[position] for position in range(len(specs))]
    return records


def _wait_for(opened: Sequence[tuple[Group, Sequence[Pending]]]) -> None:
    """Until every worker is ready or has failed: whoever still compiles would disturb the one that is timed."""
    waiting = [(group, each) for group, pending in opened for each in pending]
    while waiting:
        waiting = [(group, each) for group, each in waiting if not group.is_ready(each, LOOK_S)]


def _measure_group(group: Group, pending: Sequence[Pending]) -> None:
    entries = [entry for each in pending if (entry := group.admit(each)) is not None]
    for entry in entries:
        group.measure_solo(entry, follows_others=True)
    group.measure(UntilPrecise())
    for entry in list(group.entries):  # its memory is free for the next group
        group.close(entry)
