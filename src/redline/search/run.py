"""What `run` measures: specs interleaved, each until its interval is narrow enough; and the frame of verbs that measure otherwise."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence

import msgspec

from redline.identity import record_key
from redline.launch.door import Door, Session
from redline.note import Note, note
from redline.protocol import Prepare, PreparedReply, Reply, Request
from redline.record import RunRecord, StopReason, new_id
from redline.search.group import Entry, Group, StopRule, failure_of
from redline.search.observer import Journal, Observer
from redline.spec import RunSpec

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


class OneRecord:
    """A record on its way that one session fills with something else than timed blocks: epochs, a load.

    What breaks becomes its failure, and whatever was kept until then stays.
    """

    def __init__(self, spec: RunSpec, journal: Journal, observer: Observer, going_on: RunRecord | None = None) -> None:
        """`going_on`: a record that was cut off, which is continued."""
        fresh = RunRecord(id=new_id(), spec=spec, created_at=time.time())
        self.record = msgspec.structs.replace(going_on, failure=None, stopped=None) if going_on else fresh
        self.journal, self.observer = journal, observer
        self.stopped: StopReason | None = None
        observer.opened(self.record)

    def fill(self, door: Door, ask: Callable[[Session], None]) -> RunRecord:
        """Open a session, let `ask` fill the record, and close both."""
        session = door.open(self.record.spec)
        try:
            ask(session)
        except BaseException:
            session.kill()  # it may be in the middle of a long epoch
            raise
        finally:
            self.finish(session)
        return self.record

    def prepare(self, session: Session, checkpoint: str | None = None) -> PreparedReply | None:
        """Prepare the session; None where that failed."""
        reply = self.ask(session, Prepare(spec=self.record.spec, checkpoint=checkpoint))
        if not isinstance(reply, PreparedReply):
            self.fail(reply)
            return None
        self.change(prepared=reply.prepared, key=record_key(self.record.spec, reply.prepared))
        self.journal.begin(self.record)
        return reply

    def ask(self, session: Session, request: Request) -> Reply:
        return session.ask(request, lambda progress: self.observer.progress(self.record, progress))

    def fail(self, reply: Reply) -> None:
        self.change(failure=failure_of(reply))
        self.stopped = "failed"

    def change(self, **fields: object) -> None:
        self.record = msgspec.structs.replace(self.record, **fields)

    def finish(self, session: Session) -> None:
        self.change(closed=session.close(), stopped=self.stopped or "interrupted")
        self.journal.finish(self.record)
        self.observer.closed(self.record)
