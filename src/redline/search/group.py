"""Several recipes of one workload measured together: sessions held open, blocks in random order, round by round.

Drift of clocks, heat and neighbours then hits all of them alike, and only then may a ratio carry an interval.
A single recipe takes the same path alone.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from redline.analyze.statistics import Interval, median_interval
from redline.launch.door import Door, Session
from redline.protocol import BlockReply, FailureReply, Measure, Prepare, PreparedReply, Squeeze, SqueezeReply
from redline.record import Block, BlockKind, Failure, RunRecord, StopReason, key_of_record, new_id
from redline.search.observer import Journal, Observer
from redline.spec import RunSpec

ALONE_BLOCKS = 3
"""Before a GPU is shared with siblings: what processes that take turns do to each other shows against these."""
FEWEST_ALONE = 2
"""Where other processes will say the same again."""
HOPELESS_AFTER = 0.25
HOPELESS_FACTOR = 4.0
"""After a quarter of the ceiling, a target that would take four times the ceiling is given up."""


@dataclass
class Entry:
    """One session and what came out of it so far."""

    record: RunRecord
    session: Session
    blocks: dict[BlockKind, list[Block]] = field(default_factory=dict)
    timed_s: float = 0.0
    stopped: StopReason | None = None
    only: BlockKind | None = None
    """Of several kinds of blocks, the one that is wanted."""

    @property
    def spec(self) -> RunSpec:
        return self.record.spec

    @property
    def is_accelerator(self) -> bool:
        prepared = self.record.prepared
        return prepared is not None and prepared.environment.device.kind != "cpu"

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """A GPU's latency needs blocks of its own; elsewhere one kind of block says both."""
        if self.is_accelerator and self.spec.workload.task == "infer":
            return (self.only,) if self.only is not None else ("throughput", "latency")
        return ("throughput",)

    @property
    def target(self) -> float:
        measure = self.spec.measure
        return measure.target_half_width if self.is_accelerator else measure.cpu_target_half_width

    def interval(self, kind: BlockKind) -> Interval | None:
        return median_interval([block.samples for block in self.blocks.get(kind, [])])

    def has_enough_samples(self) -> bool:
        measure = self.spec.measure
        if len(self.blocks.get("throughput", [])) < measure.min_rounds:
            return False
        tail = measure.tail_samples if self.spec.workload.task == "infer" else 0
        needed = dict.fromkeys(self.kinds, measure.min_samples) | {self.kinds[-1]: max(measure.min_samples, tail)}
        return all(sum(len(block.samples) for block in self.blocks[kind]) >= count for kind, count in needed.items())

    def reason_to_stop(self) -> StopReason | None:
        """Content, out of time, or bound to run out of it."""
        if self.stopped is not None:
            return self.stopped
        ceiling_s = self.spec.measure.max_seconds
        is_over = self.timed_s >= ceiling_s
        if not self.has_enough_samples():
            return "ceiling" if is_over else None
        intervals = [self.interval(kind) for kind in self.kinds]
        width = max(interval.half_width if interval else math.inf for interval in intervals)
        if width <= self.target:
            return "target"
        if is_over:
            return "ceiling"
        # An interval narrows with the square root of time; do not spend a minute to learn that it was not enough.
        needed_s = self.timed_s * (width / self.target) ** 2
        is_hopeless = self.timed_s >= HOPELESS_AFTER * ceiling_s and needed_s > HOPELESS_FACTOR * ceiling_s
        return "unreachable" if is_hopeless else None

    def can_go_on(self) -> bool:
        return self.record.failure is None and self.timed_s < self.spec.measure.max_seconds


def measure_together(
    specs: Sequence[RunSpec],
    door: Door,
    journal: Journal,
    observer: Observer | None = None,
    seed: int = 0,
) -> list[RunRecord]:
    """Measure `specs` interleaved; one record each, in their order. What breaks becomes a failed record."""
    observer = observer or Observer()
    if len(specs) > 1 and any(spec.launch.door == "inline" for spec in specs):
        alone = "inline sessions share one process and its switches; measured one after the other, without a ratio"
        return [_measure_alone(spec, place, alone, door, journal, observer) for place, spec in enumerate(specs)]
    group = new_id() if len(specs) > 1 else None
    done: dict[int, RunRecord] = {}
    waiting: list[int] = []
    entries: list[Entry] = []
    try:
        for position, spec in enumerate(specs):
            entry = open_entry(spec, group, position, door, journal, observer)
            if entry.record.failure is None:
                entries.append(entry)
                measure_alone_first(entry, journal, len(specs))
            elif entry.record.failure.kind == "oom" and entries:
                entry.session.close()
                waiting.append(position)  # alone it may still fit
            else:
                done[position] = finish_entry(entry, journal, observer)
        _measure_rounds(entries, random.Random(seed), journal, observer)
    finally:
        for entry in entries:
            entry.stopped = entry.reason_to_stop() or "interrupted"
            done[entry.record.position] = finish_entry(entry, journal, observer)
    alone = "did not fit in memory beside the other recipes; measured alone, without a ratio"
    for position in waiting:
        done[position] = _measure_alone(specs[position], position, alone, door, journal, observer)
    return [done[position] for position in range(len(specs))]


def open_entry(
    spec: RunSpec, group: str | None, position: int, door: Door, journal: Journal, observer: Observer
) -> Entry:
    """Open a session and prepare it; what is ready to be timed is in the journal before it is."""
    record = RunRecord(id=new_id(), spec=spec, created_at=time.time(), group=group, position=position)
    observer.opened(record)
    session = door.open(spec)
    try:
        reply = session.ask(Prepare(spec=spec), lambda progress: observer.progress(record, progress))
    except KeyboardInterrupt:
        session.kill()  # it may be compiling for minutes
        raise
    if isinstance(reply, PreparedReply):
        key = key_of_record(spec, reply.prepared)
        record = msgspec.structs.replace(record, prepared=reply.prepared, key=key)
        journal.begin(record)
    else:
        record = msgspec.structs.replace(record, failure=failure_of(reply), stopped="failed")
    return Entry(record=record, session=session, stopped=record.stopped)


def _measure_rounds(entries: list[Entry], order: random.Random, journal: Journal, observer: Observer) -> None:
    """Each round visits, in random order, everybody who is not done; the first goes on as long as anybody needs it."""
    rounds = 0
    while unfinished := [entry for entry in entries if entry.reason_to_stop() is None]:
        visited = list(unfinished)
        if entries[0] not in visited and entries[0].can_go_on():
            visited.append(entries[0])  # ratios are to the first: without it a round says nothing about them
        for entry in in_random_order(visited, order, newest=None if rounds else entries[-1]):
            measure_round(entry, rounds, journal, len(entries))
            observer.measured(entry.record, rounds + 1, entry.interval("throughput"), entry.target)
        rounds += 1


def measure_alone_first(
    entry: Entry, journal: Journal, siblings: int, *, blocks: int = ALONE_BLOCKS, only: BlockKind | None = None
) -> None:
    """Some blocks of a session that was just prepared, before the next is: `redline.analyze.blocks` says what for.

    `only`: of this kind alone; the other is led back by it.
    """
    kinds = entry.kinds if only is None or only not in entry.kinds else (only,)
    if siblings > 1 and entry.is_accelerator:
        for number in range(blocks):
            if entry.record.failure is None:
                _measure_blocks(entry, kinds, number, journal, alone=True)
    keep_still(entry, siblings)


def in_random_order(visited: Sequence[Entry], order: random.Random, *, newest: Entry | None) -> list[Entry]:
    """`newest`: prepared last and not yet in company; it does not begin, or its first turn would be one more alone."""
    shuffled = order.sample(list(visited), len(visited))
    if newest is not None and shuffled[0] is newest:
        shuffled.append(shuffled.pop(0))
    return shuffled


def measure_round(entry: Entry, number: int, journal: Journal, siblings: int, *, alone: bool = False) -> None:
    """`alone`: siblings are to come, but none has run yet. On a CPU that is no state of the device."""
    entry.session.resume()
    for block in _measure_blocks(entry, entry.kinds, number, journal, alone=alone and entry.is_accelerator):
        entry.blocks.setdefault(block.kind, []).append(block)
        entry.timed_s += block.wall_s
    keep_still(entry, siblings)


def _measure_blocks(
    entry: Entry, kinds: Sequence[BlockKind], number: int, journal: Journal, *, alone: bool = False
) -> list[Block]:
    """One of each kind, in the record and in the journal; fewer where the session breaks."""
    measure, blocks = entry.spec.measure, []
    for kind in kinds:
        request = Measure(kind=kind, seconds=measure.block_seconds, settle_seconds=measure.settle_seconds, round=number)
        reply = entry.session.ask(request)
        if not isinstance(reply, BlockReply):
            entry.record = msgspec.structs.replace(entry.record, failure=failure_of(reply))
            entry.stopped = "failed"
            break
        block = msgspec.structs.replace(reply.block, alone=True) if alone else reply.block
        journal.append(entry.record.id, block)
        entry.record = msgspec.structs.replace(entry.record, blocks=(*entry.record.blocks, block))
        blocks.append(block)
    return blocks


def keep_still(entry: Entry, siblings: int) -> None:
    """An idle CPU worker's threads spin for a while and would disturb the next; a GPU's worker just sleeps."""
    if siblings > 1 and not entry.is_accelerator:
        entry.session.pause()


def finish_entry(entry: Entry, journal: Journal, observer: Observer) -> RunRecord:
    needed_bytes = _squeezed(entry)
    closed = entry.session.close()
    if needed_bytes is not None:
        memory = msgspec.structs.replace(closed.memory, needed_bytes=needed_bytes)
        closed = msgspec.structs.replace(closed, memory=memory)
    record = msgspec.structs.replace(entry.record, stopped=entry.stopped, closed=closed)
    journal.finish(record)
    observer.closed(record)
    return record


def _squeezed(entry: Entry) -> int | None:
    """The least memory that would have done, where the spec asks for it; after the timing, which it would disturb."""
    is_whole = entry.record.failure is None and entry.stopped != "interrupted"
    if not entry.spec.measure.squeeze_memory or not is_whole:
        return None
    reply = entry.session.ask(Squeeze())
    return reply.needed_bytes if isinstance(reply, SqueezeReply) else None


def _measure_alone(
    spec: RunSpec, position: int, why: str, door: Door, journal: Journal, observer: Observer
) -> RunRecord:
    """Runs that merely followed each other have no ratio."""
    entry = open_entry(spec, None, position, door, journal, observer)
    entry.record = msgspec.structs.replace(entry.record, notes=(why,))
    try:
        if entry.record.failure is None:
            _measure_rounds([entry], random.Random(0), journal, observer)
    finally:
        entry.stopped = entry.reason_to_stop() or "interrupted"
        record = finish_entry(entry, journal, observer)
    return record


def failure_of(reply: object) -> Failure:
    if isinstance(reply, FailureReply):
        return reply.failure
    return Failure(stage="door", kind="crash", message=f"the bench answered out of turn: {type(reply).__name__}")
