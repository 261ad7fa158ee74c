"""What the hooks of a watched process heard, until it is worked through.

Between two hooks of a real program the processor's caches hold none of this code, and each call costs several times what a
loop over it suggests. So a hook only notes what it heard and when, and every few steps the events are worked through at once.
A step in which the same was heard as in earlier ones is split as they were, without working through its events one by one.
After such a step nothing is noted of the next few but their batches and ends (`is_resting`): what lies between a batch and
the step's end is split as in that step. Anything else that is heard, as a model in evaluation mode, ends the rest.
Of steps that have ended and are not worked through yet their number and end are written down, in case the process is killed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from .marks import STEP, DeviceMarks
from .spool import COLUMNS, PHASES, Spool

MOST_EVENTS = 500
"""That wait to be worked through although no step has ended, as in a long validation."""
MOST_WAITING, MOST_WAITING_S = 12, 0.1
"""Steps that wait to be worked through, and how long the first of them may wait."""
REPEATS = 5
"""Steps that are the same, before little is noted of those after them."""
MOST_PATTERNS = 64
"""Kinds of steps that are remembered: batches of every size may make many of them."""
MOST_INTERVALS = 50
"""In a step that is remembered: each is a bit of a 64-bit float."""
EARLY = len(PHASES)
"""Stands for `OTHER` before the batch is first used."""


class Pattern(NamedTuple):
    """Of a step, given what was heard in it: what its times are charged to, and what its row says besides."""

    phases: tuple[int, ...]
    number: float
    loaded: float
    fed: float
    backwards: float
    models: float
    forwards: int
    can_rest: bool
    """It has batches from a loader, which is fetched in the open, and no evaluation."""


NOTHING = (0.0,) * len(PHASES)
NO_USUAL: tuple[list[Any], Pattern | None] = ([], None)


class Events(DeviceMarks):
    """Events, and how steps are made of them."""

    # In the order of use: what a step touches lies together.
    __slots__ = (  # noqa: RUF023
        "thread", "is_resting", "put_time", "put", "is_direct", "is_inside", "is_asking", "events", "times", "_ends", "_most_waiting", "_work_at",
        "_is_behind", "_is_fresh", "_usual", "_since", "loss", "forwards", "_paused", "_looked", "_numbers", "_bits", "_patterns", "_met", "_rests", "_repeats", "_split", "can_rest",
    )  # fmt: skip

    def __init__(self, spool: Spool, now: Callable[[], float]) -> None:
        super().__init__(spool, now)
        self.events: list[Any] = []
        """What was heard and not worked through yet: a method of this class with its arguments."""
        self.times = array("d")
        """When it was heard."""
        self.put, self.put_time = self.events.append, self.times.append
        self._ends: list[int] = []
        """After how many events a step has ended."""
        self._most_waiting, self._work_at = 0, -math.inf
        self._is_behind = False
        """More events wait to be worked through."""
        self.is_direct = True
        """Each event is worked through at once: a step may end with any of them, or its transitions are marked or captured."""
        self.is_resting = False
        """Only batches and ends of steps are noted."""
        self._rests = 0
        """How many of the steps that wait to be worked through were noted like this, after the first of them."""
        self._repeats = 0
        """Steps like the last one that were noted in full, one after the other."""
        self._split = NOTHING
        """What the work on a batch was split into when it was last noted, as shares."""
        self.is_inside = False
        """The script is in a forward or backward pass now, whatever has been worked through."""
        self.is_asking = True
        """In this step more is looked at than when something happens: in the first ones, and in one after each look."""
        self.thread: int | None = None
        """The thread that trains; None until that is known."""
        self.forwards = 0
        """Of the models, since somebody set this to 0."""
        self.loss = math.nan
        """Of this step, where it was read."""
        self._since: float | None = None
        self._numbers: dict[int, int] = {}
        """Of the optimizers, by their ids."""
        self._bits: dict[int, int] = {}
        """Of the models, by their ids."""
        self._paused = 0.0
        self._looked = 0.0
        """What our own work after the last step took: time of the script's, but no waiting for data."""
        self._is_fresh = False
        """A step has ended, and nothing was heard since."""
        self._patterns: dict[tuple[Any, ...], Pattern | None] = {}
        """By what is heard in a step; None where that makes no pattern."""
        self._met: set[tuple[Any, ...]] = set()
        """What was heard in one step so far."""
        self._usual = NO_USUAL
        """The one of the last step."""
        self.can_rest = True
        """Of all that was worked through: no evaluation, no batch that was fetched within something else."""

    def _after_row(self, ended: float) -> None:
        """The row of a step that ended then has been written."""
        raise NotImplementedError

    def _rehearsal(self, spool: Spool) -> Self:
        """One of this kind after a step, with a clock at 0, that knows the same optimizers and models."""
        raise NotImplementedError

    def work_through(self) -> None:
        """Do what was noted, as if at the time when it was heard."""
        times, heard, ends, rests = self.times[:], self.events[:], self._ends[:], self._rests
        del self.times[:], self.events[:], self._ends[:]
        self.is_resting, self._rests = False, 0
        begin = 0
        for number, end in enumerate(ends):
            self._is_behind = end < len(heard)
            if 0 < number <= rests:
                self._rest(heard[begin:end], times[begin:end])
            else:
                self._work_on(heard[begin:end], times[begin:end])
            begin = end
        self._is_behind = False
        if begin < len(heard):
            self._work_on(heard[begin:], times[begin:])

    def step_ended(self, at: float) -> None:
        """To be said after the event that ends it, where events are not worked through at once."""
        self._ends.append(len(self.events))
        waiting = len(self._ends)
        if self.is_resting:
            self._rests += 1
            if self.events[-1] != self._usual[0][-1]:  # another optimizer: no step like those before
                self.is_resting, self._repeats = False, 0
        elif waiting == 1 and self._is_fresh and self._repeats >= REPEATS:
            self.is_resting = self.events == self._usual[0]
        if waiting >= self._most_waiting or at >= self._work_at:
            self.work_through()
        else:
            self.spool.ended(self.steps + waiting, at)

    def _work_on(self, heard: list[Any], times: Sequence[float]) -> None:
        if self._is_fresh and not self.is_direct:
            if heard != self._usual[0]:
                self._usual, self._repeats = (heard, self._pattern(tuple(heard))), 0
            if self._usual[1] is not None:
                self._repeat(self._usual[1], times)
                return
            self._usual = NO_USUAL
        self._replay(heard, times)

    def _replay(self, heard: Sequence[tuple[Any, ...]], times: Sequence[float]) -> None:
        for (call, *details), at in zip(heard, times, strict=True):
            call(self, *details, at)

    def _repeat(self, pattern: Pattern, times: Sequence[float]) -> None:
        """A step like others before it."""
        phases, number, loaded, fed, backwards, models, forwards, _ = pattern
        spent = [0.0] * (EARLY + 1)
        since: float = self._since  # type: ignore[assignment]  # a step has ended
        began = since
        for phase, at in zip(phases, times, strict=True):
            spent[phase] += at - since
            since = at
        early = spent.pop()
        spent[-1] += early
        if pattern.can_rest:
            self._repeats += 1
            self._split = _shares_of_work(spent, times[0] - began)
        before = early - self._looked if early > self._looked else 0.0
        self.spool.row(
            (STEP, self.steps, since, *spent, self._paused, loaded, fed, backwards, self.loss, number, 0.0, models, before, *NOTHING)
        )  # fmt: skip
        self._since, self.loss, self._paused = since, math.nan, 0.0
        self.forwards += forwards
        self._after_row(since)

    def _rest(self, heard: list[Any], times: Sequence[float]) -> None:
        """A step of which only batches and end were noted, between two of which there is work."""
        pattern = self._usual[1]
        assert pattern is not None
        since: float = self._since  # type: ignore[assignment]  # a step has ended
        if len(heard) == 3:  # as most steps are: one batch
            waited, loaded = times[1] - times[0], heard[1][1]
        else:
            waited = sum(times[at + 1] - times[at] for at in range(0, len(heard) - 1, 2))
            loaded = sum(heard[at][1] for at in range(1, len(heard) - 1, 2))
        ended, early = times[-1], times[0] - since
        work = ended - since - waited - early
        _, copy, forward, backward, optimizer, other = self._split
        self.spool.row(
            (STEP, self.steps, ended, waited, work * copy, work * forward, work * backward, work * optimizer, work * other + early,
             self._paused, loaded, pattern.fed, pattern.backwards, math.nan, self._number(heard[-1][1]), 0.0, pattern.models, 0.0, *NOTHING)
        )  # fmt: skip
        self._since, self._paused = ended, 0.0
        self.forwards += pattern.forwards
        self._after_row(ended)

    def _number(self, optimizer: int) -> int:
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = max(self._numbers.values(), default=-1) + 1
        return number

    def renew(self, optimizer: int) -> None:
        """An optimizer was made whose id is that of one that is gone, as in cross-validation: it is another one."""
        if optimizer in self._numbers:
            self.work_through()
            self._numbers[optimizer] = max(self._numbers.values()) + 1
            self._usual, self._repeats = NO_USUAL, 0
            self._patterns.clear()
            self._met.clear()

    def _pattern(self, heard: tuple[Any, ...]) -> Pattern | None:
        """What times are charged to when this is heard, from the second time on; None where it makes no pattern."""
        if heard in self._patterns:
            return self._patterns[heard]
        if heard in self._met:
            self._met.remove(heard)
            self._patterns[heard] = self._learned(heard)
            return self._patterns[heard]
        if len(self._patterns) + len(self._met) < MOST_PATTERNS and len(heard) <= MOST_INTERVALS:
            self._met.add(heard)
        return None

    def _learned(self, heard: tuple[Any, ...]) -> Pattern | None:
        rows: list[tuple[float, ...]] = []
        rehearsal = self._rehearsal(Rehearsed(rows))
        # Each interval twice as long as the one before it: the sum of any of them says which they are.
        rehearsal._replay(heard, [2.0**number - 1 for number in range(1, len(heard) + 1)])
        if len(rows) != 1 or not rehearsal._is_fresh:
            return None
        row = dict(zip(COLUMNS, rows[0], strict=True))
        if row["kind"] != STEP or row["paused"] or any(row[f"aside_{name}"] for name in PHASES):
            return None
        return _pattern_of(row, len(heard), rehearsal)


class Rehearsed(Spool):
    """Takes the place of the files in a rehearsal."""

    def __init__(self, rows: list[tuple[float, ...]]) -> None:
        super().__init__("")
        self._kept = rows

    def row(self, values: tuple[float, ...]) -> None:
        self._kept.append(values)


def _shares_of_work(spent: Sequence[float], other: float) -> tuple[float, ...]:
    """Of what lies between a batch and the end of its step: all but waiting for data, and what was done before it."""
    work = sum(spent[1:]) - other
    return (0.0, *(each / work for each in spent[1:-1]), (spent[-1] - other) / work) if work > 0 else NOTHING


def _pattern_of(row: Mapping[str, float], intervals: int, rehearsal: Events) -> Pattern:
    """From the row of a step whose intervals took 1, 2, 4, 8… seconds."""
    phases = [0] * intervals
    for phase, name in enumerate((*PHASES, "before")):  # what is early is also in `other`, and comes last
        for number in range(intervals):
            if int(row[name]) >> number & 1:
                phases[number] = phase
    return Pattern(
        tuple(phases), row["caller"], row["loaded"], row["fed"], row["backwards"], row["models"],
        rehearsal.forwards, row["loaded"] > 0 and rehearsal.can_rest,
    )  # fmt: skip
