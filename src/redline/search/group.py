"""This is the measuring core: sessions of one device are held open together and timed in interleaved rounds.

Drift of clocks, temperature and neighbours then hits all of them alike, and only then may a ratio carry an interval.
A `Group` opens and times; a `StopRule` decides who takes part in the next round and who is done. `run`, `race` and
`tune` differ only in their rules.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from zlib import crc32

import msgspec

from redline.analyze.blocks import blocks_as
from redline.analyze.statistics import Interval, median_interval
from redline.launch.door import Door, Session
from redline.model.identity import record_key
from redline.model.note import Note
from redline.model.protocol import (
    BlockReply,
    FailureReply,
    Measure,
    Prepare,
    PreparedReply,
    Progress,
    Reply,
    Request,
    Sharing,
    Squeeze,
    SqueezeReply,
)
from redline.model.record import Block, BlockKind, Closed, Failure, RunRecord, StopReason, TimeKind, new_id
from redline.model.spec import RunSpec
from redline.search.observer import Journal, Observer

SOLO_BLOCKS = 3
"""A session times this many blocks before it shares a GPU with siblings. They show what processes that take turns do to each other."""
FEWEST_SOLO_BLOCKS = 2
"""This many solo blocks are enough if other processes will show the same again."""


@dataclass
class Entry:
    """An entry is one session that is open and prepared, with what it has measured so far."""

    record: RunRecord
    session: Session
    blocks: dict[BlockKind, list[Block]] = field(default_factory=dict)
    """These are the blocks of the rounds; solo blocks are only in the record."""
    timed_s: float = 0.0
    stopped: StopReason | None = None
    only: TimeKind | None = None
    """If a session could measure several kinds of blocks, this one alone is wanted; None means all of them."""

    @property
    def spec(self) -> RunSpec:
        return self.record.spec

    @property
    def is_sound(self) -> bool:
        return self.record.failure is None

    @property
    def is_accelerator(self) -> bool:
        prepared = self.record.prepared
        return prepared is not None and prepared.environment.device.kind != "cpu"

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """A GPU's latency needs blocks of its own; elsewhere one kind of block says both."""
        if self.is_accelerator and self.spec.workload.task == "infer" and self.only != "energy":
            return (self.only,) if self.only in ("throughput", "latency") else ("throughput", "latency")
        return ("throughput",)

    @property
    def target(self) -> float:
        measure = self.spec.measure
        return measure.target_half_width if self.is_accelerator else measure.cpu_target_half_width

    def interval(self, kind: TimeKind) -> Interval | None:
        kept = [block for blocks in self.blocks.values() for block in blocks]
        return median_interval([block.samples for block in blocks_as(kept, kind)])


@dataclass
class Pending:
    """This is a session that is being prepared."""

    record: RunRecord
    session: Session
    contended: bool
    """It is True if others are prepared at the same time, so that its cold start takes longer than alone."""
    reply: Reply | None = None
    stage: str = ""
    """The worker was last heard of in this stage."""


class StopRule(ABC):
    """A rule decides who takes part in the next round, and when to stop measuring."""

    def visited(self, entries: Sequence[Entry]) -> list[Entry]:
        """Returns the entries of the next round; if there are none, the measurement is over."""
        return [entry for entry in entries if entry.stopped is None]

    @abstractmethod
    def after_round(self, entries: Sequence[Entry], rounds: int) -> None:
        """Sets `stopped` on entries that are done, after this many rounds of the group."""


@dataclass
class Group:
    """A group is a context manager of sessions that are open together. Whatever is still open at its end is closed."""

    door: Door
    journal: Journal
    observer: Observer
    order: random.Random
    is_shared: bool = True
    """It is True if several sessions are to be measured in turns; else one is measured by itself, and its record names no group."""
    only: TimeKind | None = None
    solo_blocks: int = SOLO_BLOCKS
    pending: list[Pending] = field(default_factory=list)
    """These sessions are being prepared, or are prepared and not yet admitted. They stand still while an entry is timed."""
    entries: list[Entry] = field(default_factory=list)
    """These sessions are open and prepared, in the order in which they were admitted."""
    done: dict[int, RunRecord] = field(default_factory=dict)
    """The records of what was closed are kept by position."""
    crowded: list[int] = field(default_factory=list)
    """The specs at these positions ran out of memory beside the others; alone they may fit."""
    rounds: int = 0
    _newcomer: Entry | None = None

    def __post_init__(self) -> None:
        self._id = new_id() if self.is_shared else None
        self._first_turn = crc32((self._id or "").encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pending in list(self.pending):
            self.cancel(pending)  # it may be compiling for minutes
        for entry in list(self.entries):
            self.close(entry)

    def open(self, spec: RunSpec, position: int, notes: tuple[Note, ...] = ()) -> Entry | None:
        """Opens a session and prepares it. Returns None if it failed and is done, or if there was no room beside the others."""
        return self.admit(self.start(spec, position, notes))

    def start(self, spec: RunSpec, position: int, notes: tuple[Note, ...] = (), sharing: Sharing = "alone") -> Pending:
        """Opens a session that prepares itself while others do."""
        record = RunRecord(
            id=new_id(), spec=spec, created_at=time.time(), group=self._id, position=position, notes=notes
        )
        self.observer.opened(record)
        pending = Pending(record, self.door.open(spec), contended=bool(self.pending))
        for other in self.pending:
            other.contended = True
        self.pending.append(pending)
        pending.session.begin(Prepare(spec=spec, sharing=sharing))
        return pending

    def is_ready(self, pending: Pending, timeout_s: float | None = None) -> bool:
        """Waits this many seconds, or as long as it takes for None; returns whether the session is prepared or has failed by then."""
        if pending.reply is None:

            def heard(progress: Progress) -> None:
                pending.stage = progress.stage
                self.observer.progress(pending.record, progress)

            pending.reply = pending.session.wait(heard, timeout_s)
        return pending.reply is not None

    def cancel(self, pending: Pending) -> None:
        """Gives up what is being prepared; nothing of it is kept."""
        self.pending.remove(pending)
        pending.session.kill()

    def release(self, pending: Pending) -> None:
        """Lets go of a session that goes on being prepared, for another group to adopt."""
        self.pending.remove(pending)

    def adopt(self, pending: Pending, position: int) -> Pending:
        """Takes over a session that was started in another group."""
        pending.record = msgspec.structs.replace(pending.record, group=self._id, position=position)
        self.pending.append(pending)
        return pending

    def admit(self, pending: Pending) -> Entry | None:
        """Makes an entry of what was prepared. Returns None if it failed and is done, or if there was no room beside the others."""
        self.is_ready(pending)
        has_siblings = bool(self.entries) or pending.contended
        self.pending.remove(pending)
        entry = self._entry(pending)
        position = entry.record.position
        if entry.is_sound:
            self.entries.append(entry)
            self._newcomer = entry
            return entry
        failure = entry.record.failure
        if failure is not None and failure.kind == "oom" and has_siblings:
            entry.session.close()
            self.crowded.append(position)
        else:
            self.close(entry)
        return None

    def _entry(self, pending: Pending) -> Entry:
        """Returns the entry of a prepared session, whose record goes to the journal before it is timed."""
        record, reply = pending.record, pending.reply
        if isinstance(reply, PreparedReply):
            prepared = reply.prepared
            if pending.contended:
                cold_start = msgspec.structs.replace(prepared.cold_start, contended=True)
                prepared = msgspec.structs.replace(prepared, cold_start=cold_start)
            key = record_key(record.spec, prepared)
            record = msgspec.structs.replace(record, prepared=prepared, key=key)
            self.journal.begin(record)
        else:
            record = msgspec.structs.replace(record, failure=failure_of(reply), stopped="failed")
        return Entry(record=record, session=pending.session, stopped=record.stopped, only=self.only)

    def measure_solo(self, entry: Entry, kind: TimeKind | None = None, *, follows_others: bool = False) -> None:
        """Times some blocks of a session that was just prepared, before the next one is; `redline.analyze.blocks` says what for.

        With `kind` only blocks of this kind are timed, and the other kind is rescaled by them. `follows_others` says that
        others have used the device since the session was prepared, so that one block passes that is not kept.
        """
        kinds = tuple(each for each in entry.kinds if each == kind) or entry.kinds
        if self.is_shared and entry.is_accelerator:
            with self._others_still():
                if follows_others:
                    measure = entry.spec.measure
                    entry.session.ask(
                        Measure(kind=kinds[0], seconds=measure.block_seconds, settle_seconds=measure.settle_seconds)
                    )
                for number in range(self.solo_blocks):
                    if entry.is_sound:
                        self._measure_blocks(entry, kinds, number, solo=True)
        self.keep_still(entry)

    def measure(self, rule: StopRule, *, solo: bool = False) -> None:
        """Takes rounds in random order until the rule visits no entry. `solo` says that siblings are to come, but none has run yet."""
        with self._others_still():
            while visited := rule.visited(self.entries):
                turn = self._first_turn + self.rounds if len(visited) > 1 else None
                for entry in self._in_random_order(visited):
                    self._measure_round(entry, turn, solo=solo)
                self.rounds, self._newcomer = self.rounds + 1, None
                rule.after_round(self.entries, self.rounds)

    def _measure_round(self, entry: Entry, turn: int | None, *, solo: bool) -> None:
        """Times one entry's blocks of one round. `turn` is the processor from which all sessions of this round feed a GPU.

        The processors of a shared machine differ by half, each for seconds at a time, so that two sessions on two of them would
        be told apart by that.
        """
        entry.session.resume()
        # Only a GPU is fed: on a CPU it makes no difference to have been alone, and a step uses all processors.
        is_fed = entry.is_accelerator
        blocks = self._measure_blocks(
            entry, entry.kinds, self.rounds, solo=solo and is_fed, turn=turn if is_fed else None
        )
        for block in blocks:
            entry.blocks.setdefault(block.kind, []).append(block)
            entry.timed_s += block.wall_s
        self.keep_still(entry)
        interval = entry.interval(self.only or "throughput")
        self.observer.measured(entry.record, self.rounds + 1, interval, entry.target)

    @contextmanager
    def _others_still(self) -> Iterator[None]:
        """Pauses whoever is being prepared, who would take processors and the device from the one that is timed."""
        for pending in self.pending:
            pending.session.pause()
        try:
            yield
        finally:
            for pending in self.pending:
                pending.session.resume()

    def _in_random_order(self, visited: Sequence[Entry]) -> list[Entry]:
        """Returns the entries shuffled. Who was opened last does not begin its first round, or its blocks would be solo ones again."""
        shuffled = self.order.sample(list(visited), len(visited))
        if self._newcomer is not None and shuffled[0] is self._newcomer:
            shuffled.append(shuffled.pop(0))
        return shuffled

    def _measure_blocks(
        self, entry: Entry, kinds: Sequence[BlockKind], number: int, *, solo: bool, turn: int | None = None
    ) -> list[Block]:
        """Returns one block of each kind, which is in the record and in the journal too; there are fewer if the session breaks."""
        measure, blocks = entry.spec.measure, []
        for kind in kinds:
            request = Measure(
                kind=kind,
                seconds=measure.block_seconds,
                settle_seconds=measure.settle_seconds,
                round=number,
                turn=turn,
            )
            reply = entry.session.ask(request)
            if not isinstance(reply, BlockReply):
                entry.record = msgspec.structs.replace(entry.record, failure=failure_of(reply))
                entry.stopped = "failed"
                break
            block = msgspec.structs.replace(reply.block, solo=True) if solo else reply.block
            self.journal.append(entry.record.id, block)
            entry.record = msgspec.structs.replace(entry.record, blocks=(*entry.record.blocks, block))
            blocks.append(block)
        return blocks

    def keep_still(self, entry: Entry) -> None:
        """Pauses an idle worker on a CPU, whose threads spin for a while and would disturb the next one. A GPU's worker just sleeps."""
        if self.is_shared and not entry.is_accelerator:
            entry.session.pause()

    def close(self, entry: Entry) -> RunRecord:
        """Ends a session and returns its whole record, which counts as interrupted if no rule has stopped it."""
        if entry in self.entries:
            self.entries.remove(entry)
        needed_bytes = _squeezed(entry)
        closed = entry.session.close()
        if needed_bytes is not None:
            memory = msgspec.structs.replace(closed.memory, needed_bytes=needed_bytes)
            closed = msgspec.structs.replace(closed, memory=memory)
        return self._keep(entry, closed)

    def _keep(self, entry: Entry, closed: Closed | None) -> RunRecord:
        entry.stopped = entry.stopped or "interrupted"
        record = msgspec.structs.replace(entry.record, stopped=entry.stopped, closed=closed)
        self.journal.finish(record)
        self.observer.closed(record)
        self.done[record.position] = record
        return record


def _squeezed(entry: Entry) -> int | None:
    """Returns the least memory that would have done, if the spec asks for it. It is asked after the timing, which it would disturb."""
    is_whole = entry.is_sound and entry.stopped not in (None, "interrupted")
    if not entry.spec.measure.squeeze_memory or not is_whole:
        return None
    entry.session.resume()
    reply = entry.session.ask(Squeeze())
    return reply.needed_bytes if isinstance(reply, SqueezeReply) else None


def failure_of(reply: object) -> Failure:
    if isinstance(reply, FailureReply):
        return reply.failure
    return Failure(stage="door", kind="crash", message=f"the worker sent an unexpected reply: {type(reply).__name__}")


class OneRecord:
    """This is a record in the making that one session fills with something else than timed blocks, such as epochs or a load.

    What breaks becomes its failure, and whatever was kept until then stays.
    """

    def __init__(self, spec: RunSpec, journal: Journal, observer: Observer, going_on: RunRecord | None = None) -> None:
        """`going_on` is a record that was cut off and is continued here."""
        fresh = RunRecord(id=new_id(), spec=spec, created_at=time.time())
        self.record = msgspec.structs.replace(going_on, failure=None, stopped=None) if going_on else fresh
        self.journal, self.observer = journal, observer
        self.stopped: StopReason | None = None
        observer.opened(self.record)

    def fill(self, door: Door, ask: Callable[[Session], None]) -> RunRecord:
        """Opens a session, lets `ask` fill the record, and then closes both."""
        session = door.open(self.record.spec)
        try:
            ask(session)
        except BaseException:
            session.kill()  # it may be in the middle of a long epoch
            raise
        finally:
            self.finish(session)
        return self.record

    def prepare(self, session: Session, **how: Any) -> PreparedReply | None:
        """Prepares the session; returns None if that failed. `how` holds fields of the request beside the spec."""
        reply = self.ask(session, Prepare(spec=self.record.spec, **how))
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
