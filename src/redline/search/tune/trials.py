"""Trials: recipes are prepared beside each other, then timed one at a time in turns with the fastest so far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import msgspec

from redline.analyze.pairs import log_ratio
from redline.model.note import Note, note
from redline.model.protocol import Sharing
from redline.model.record import RunRecord, TimeKind
from redline.model.spec import RunSpec
from redline.search.group import FEWEST_SOLO_BLOCKS, Entry, Group, StopRule
from redline.search.tune.choose import OnItsWay, least_gain, ready_chance
from redline.search.tune.costs import CONTENTION, Costs
from redline.search.tune.lessons import lesson_of, rejection
from redline.search.tune.record import GivenUp, Lesson, Trial
from redline.search.tune.space import BASELINE, BY_BLOCK, Switches
from redline.search.tune.state import Search, final_measure

LOOK_AGAIN = 0.05
"""After waiting for this share of the budget, the search asks again what to start, as what compiles is less likely to be in time."""
LOOK_S = 0.05
"""The search waits so long for each worker that prepares, one after the other."""
RESOLUTION = 0.004
"""A trial is timed until its ratio to the fastest is known to this share, or it is clearly behind or far ahead."""
SURE = 0.97
"""A recipe that is less likely than this to leave time for opening it again has the processes of its race prepared beside its trial:
compiling took up to three times what was expected."""


@dataclass
class UntilPlaced(StopRule):
    """Times a candidate interleaved with the fastest so far, with more rounds for one that may win than for one that is clearly behind."""

    candidate: Entry
    kind: TimeKind
    is_over: Callable[[], bool]
    """Says whether the budget has ended."""

    def visited(self, entries: Sequence[Entry]) -> list[Entry]:
        return super().visited(entries) if self.candidate.stopped is None else []

    def after_round(self, entries: Sequence[Entry], rounds: int) -> None:
        if self.candidate.is_sound and self._has_seen_enough(entries):
            self.candidate.stopped = "target"

    def _has_seen_enough(self, entries: Sequence[Entry]) -> bool:
        entry = self.candidate
        rounds = max((len(blocks) for blocks in entry.blocks.values()), default=0)
        if entry.timed_s >= entry.spec.measure.max_seconds or rounds >= 8 or (rounds >= 2 and self.is_over()):
            return True
        anchor = next((each for each in entries if each is not entry and each.is_sound), None)
        log = log_ratio(anchor.record, entry.record, self.kind) if anchor is not None and rounds >= 3 else None
        if log is None:
            return False
        doubt = 2.5 * max(log.error, RESOLUTION) + log.doubt
        is_decided = log.centre + doubt < -0.02 or log.centre - doubt > 0.2
        return is_decided or (log.error <= RESOLUTION and rounds > 3)


class Trials:
    """Context manager: the worker of the fastest recipe so far lives as long as it does."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._anchor: Entry | None = None
        self.flights: list[OnItsWay] = []
        self._seen_at_s = search.clock()
        """Up to then the time that passed is counted for those on their way."""
        self._idle_s = 0.0
        """Waited for workers since the last of them was ready."""
        self._crowded_out: list[Switches] = []
        """Ran out of memory beside others; tried again alone."""
        self._has_been_crowded = False
        self._positions = itertools.count(len(search.tune.trials))
        self._group = Group(
            search.door,
            search.journal,
            search.observer,
            search.order,
            only=search.only,
            solo_blocks=FEWEST_SOLO_BLOCKS,
        )

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        search = self._search
        if kind is None:
            self._leave_to_the_race()
        else:
            self._drop_held(set())
        self._let_go()
        self._group.__exit__(kind, error, trace)
        search.records.update((record.id, record) for record in self._group.done.values())

    @property
    def in_flight(self) -> list[OnItsWay]:
        return [*self.flights, *map(OnItsWay, self._crowded_out)]

    @property
    def is_open(self) -> bool:
        """Whether the fastest so far is open, so that others can be interleaved with it."""
        return self._anchor is not None

    # Preparing

    def has_room(self, more: int = 1) -> bool:
        """Returns whether more may be prepared, by the jobs that were asked for, by host memory and by device memory."""
        if not self.flights and more == 1:
            return True
        if self._has_been_crowded or self._crowded_out or self._preparing + more > self._search.jobs:
            return False
        opened = len(self.flights) + len(self._search.held) + (self._anchor is not None)
        return self._search.has_memory_for(opened + more)

    @property
    def _preparing(self) -> int:
        return len(self.flights) + sum(pending.reply is None for pending in self._search.held)

    def start(self, switches: Switches, why: str, gain: float = math.inf) -> None:
        """Have a worker prepare this recipe; and another the same for its race, where there may be no time for that later."""
        search, position = self._search, next(self._positions)
        search.observer.attempting(search.space.text(switches), position + 1, why)
        is_held = self._needs_company(switches)
        sharing: Sharing = "shares" if is_held and BY_BLOCK in switches else "alone"
        pending = self._group.start(search.trial_spec(switches), position, sharing=sharing)
        self._pass_time()
        self.flights.append(OnItsWay(switches, gain, pending, is_held))
        if is_held:
            # The trial checks the numbers; in training the path of losses is longer in the race.
            checks = search.asked.spec.workload.task == "train"
            search.held.append(self._group.start(self._race_spec(switches, checks=checks), 0, sharing=sharing))

    def _needs_company(self, switches: Switches) -> bool:
        """Returns whether to prepare a second process of it beside its trial, so that it can be raced as soon as it was timed.

        Only on a GPU, as on a CPU they would compute where it compiles; and for one recipe at a time.
        """
        search, costs = self._search, Costs(self._search)
        if search.on_cpu or search.held or search.asked.replicates < 2 or not costs.compiles(switches):
            return False
        within_s = search.left_s - costs.race_s(switches)
        return self.has_room(2) and costs.ready_chance(switches, within_s, beside=len(self.flights)) < SURE

    def _race_spec(self, switches: Switches, *, checks: bool) -> RunSpec:
        search = self._search
        return search.spec_of(switches, final_measure(on_cpu=search.on_cpu, checks=checks, hurried=True))

    def prepare_race(self) -> None:
        """While a recipe compiles whose race must follow at once, prepare the baseline for that race too."""
        search = self._search
        if any(flight.is_held for flight in self.flights):
            missing = search.fewest - search.held_of(BASELINE)
            if missing > 0 and self.has_room(missing):
                spec = self._race_spec(BASELINE, checks=False)
                search.held += [self._group.start(spec, 0) for _ in range(missing)]

    def _leave_to_the_race(self) -> None:
        """The race takes over the processes of the fastest, with that on trial, and of the baseline; others have no use."""
        search, anchor, leader = self._search, self._anchor, self._search.leader()
        self._drop_held({BASELINE, leader} if leader else set())
        for pending in search.held:
            self._group.release(pending)
        if not leader or anchor is None or not anchor.is_sound or not search.held_of(leader):
            return
        if search.recipe_of(anchor.record) == leader:
            self._anchor, anchor.stopped = None, "target"
            measure = final_measure(on_cpu=search.on_cpu, checks=True, hurried=True)
            steps = anchor.spec.measure.loss_path_steps  # its numbers were looked at as on trial
            measure = msgspec.structs.replace(measure, loss_path_steps=steps)
            search.held.append(self._group.hand_over(anchor, measure))
            search.records[anchor.record.id] = anchor.record

    def _drop_held(self, wanted: set[Switches]) -> None:
        search = self._search
        for pending in [each for each in search.held if search.recipe_of(each.record) not in wanted]:
            self._group.cancel(pending)
            search.held.remove(pending)

    # Waiting

    def finish(self, switches: Switches) -> None:
        """Time those that are prepared until this one is done."""
        while any(flight.switches == switches for flight in self.in_flight):
            self.finish_one(patiently=True)

    def finish_one(self, *, patiently: bool = False) -> None:
        """Wait for the first that is prepared, check its numerics, and only then time it.

        The trial is kept, whatever became of it. `patiently`: however little is left of the budget.
        """
        if not self.flights:
            self._let_go()  # alone it may still fit
            self.start(self._crowded_out.pop(0), "again, alone")
        flight = self._first_ready(patiently=patiently)
        if flight is None:
            return  # what is worth the seconds may be another recipe by now
        self.flights.remove(flight)
        search, pending = self._search, flight.pending
        assert pending is not None
        entry = self._group.admit(pending)
        if entry is None and pending.record.position in self._group.crowded:
            self._has_been_crowded = True
            self._crowded_out.append(flight.switches)
            search.charge_as_failed(flight.waited_s)
            if flight.switches == BASELINE:
                self._give_up(list(self.flights), "nothing can be timed before the baseline")
            return
        anchor_id, began_s = None, search.clock()
        if entry is not None and rejection(entry.record, search.tune) is None:
            anchor_id = self._anchor.record.id if self._anchor is not None else None
            self._measure(entry, contended=pending.contended)
        flight.taken_s += search.clock() - began_s
        record = self._group.done[pending.record.position] if entry is None else entry.record
        self._keep(flight, record, anchor_id)
        said = self._settle(entry) if entry is not None else rejection(record, search.tune)
        search.observer.attempted(search.space.text(flight.switches), str(said or ""))
        lesson = lesson_of(flight.switches, search.space.text(flight.switches), record, search.tune, raced=False)
        if lesson is not None and flight.switches != BASELINE:
            search.learn(lesson)
            lessons = search.lessons()
            ruled_out = [each for each in self.flights if lessons.rules_out(each.switches)]
            self._give_up(ruled_out, "it holds what was ruled out")
        leader, baseline = search.leader(), search.baseline()
        if leader is not None and baseline is not None:
            gain = math.exp(baseline.log_s - search.seen()[leader].log_s)
            search.observer.leads(search.space.text(leader), gain)
        self._drop_held({BASELINE, *([leader] if leader else []), *(each.switches for each in self.flights)})

    def _pass_time(self, *, still: bool = False) -> None:
        """Count what has passed for all on their way. `still`: they stood still, while others were timed."""
        now_s = self._search.clock()
        passed_s, self._seen_at_s = now_s - self._seen_at_s, now_s
        for flight in self.flights if not still else ():
            flight.taken_s += passed_s
            flight.shared_s += passed_s * (self._preparing - 1)

    def _first_ready(self, *, patiently: bool) -> OnItsWay | None:
        """The first that is prepared. None: none for a while, or nothing would be in time for its race any more."""
        search = self._search
        search.charge("other")
        until_s, weighed_s = search.clock() + LOOK_AGAIN * search.budget_s, search.clock()
        while True:
            first = self.flights[0]
            awaited = [first] if first.switches == BASELINE else self.flights  # nothing is timed before the baseline
            for flight in awaited:
                before_s = search.clock()
                assert flight.pending is not None
                is_ready = self._group.is_ready(flight.pending, LOOK_S)
                self._idle_s += search.clock() - before_s
                self._pass_time()
                search.charge("baseline" if first.switches == BASELINE else "trials")
                if is_ready:
                    # Without those that go on being prepared beside it, the search would have waited as long.
                    flight.waited_s, self._idle_s = self._idle_s, 0.0
                    return flight
            if not patiently and first.switches != BASELINE and search.clock() > weighed_s + 10 * LOOK_S:
                weighed_s = search.clock()
                self._give_up_late()
                if not self.flights or weighed_s > until_s:
                    return None

    def _give_up_late(self) -> None:
        """Give up what is too unlikely to be ready in time for what it promised, unless what may be lost on failures is not used up yet."""
        search, costs = self._search, Costs(self._search)
        leader = search.leader() or BASELINE
        race_s = costs.race_s(leader)
        # One more would be timed before the race.
        is_over = search.left_s <= race_s + (2 * costs.timed_s if race_s else 0.0)
        may_wait = self._idle_s < search.allowance_s - 0.6  # so much later it is noticed
        late, hung = list[OnItsWay](), list[Switches]()
        for flight in self.flights:
            # With nothing to race, a ratio without an interval is better than none.
            is_only_hope = search.tried() == {BASELINE}
            ready = ready_chance(search, costs, flight, -costs.race_s(flight.switches) if is_only_hope else 0.0)
            wait_s = min(search.left_s, costs.seconds(flight.switches)) / max(search.jobs // 2, 1)
            is_hopeless = not flight.is_compiled and not may_wait and flight.gain * ready < least_gain(search, wait_s)
            if is_over or is_hopeless:
                late.append(flight)
                was_due = costs.ready_chance(flight.switches, flight.taken_s, beside=flight.beside) > 0.9
                hung += [flight.switches] if was_due and not flight.is_compiled else []
        if not late:
            return
        if len(late) == len(self.flights):
            search.charge_as_failed(self._idle_s)
            self._idle_s = 0.0
            self._crowded_out.clear()
        gone = tuple(GivenUp(recipe=search.space.text(each.switches), seconds=each.taken_s) for each in late)
        search.keep(given_up=(*search.tune.given_up, *gone))
        why = note("given-up", "it took far longer than was expected", about="late")
        for switches in hung:
            text = search.space.text(switches)
            search.learn(Lesson(switches=tuple(sorted(switches)), scope="recipe", reason=why, recipe=text))
        self._give_up(late, "it will not be ready in time")

    def _give_up(self, flights: Sequence[OnItsWay], why: str) -> None:
        """Stop preparing these, for good."""
        search = self._search
        for flight in flights:
            search.given_up.add(flight.switches)
            search.observer.attempted(search.space.text(flight.switches), f"given up: {why}")
            assert flight.pending is not None
            self._group.cancel(flight.pending)
            self.flights.remove(flight)
            self._drop_held({search.recipe_of(each.record) for each in search.held} - {flight.switches})

    # Timing

    def _measure(self, entry: Entry, *, contended: bool) -> None:
        search, is_first = self._search, self._anchor is None
        self._pass_time()
        # A process that was prepared beside others on a GPU is no longer as it would be alone.
        if is_first or contended:
            self._group.keep_still(entry)
        else:
            self._group.measure_solo(entry)
        self._group.measure(UntilPlaced(entry, search.asked.kind, lambda: search.left_s <= 0), solo=is_first)
        self._pass_time(still=True)
        if self._anchor is not None and not self._anchor.is_sound:
            self._let_go()

    def _keep(self, flight: OnItsWay, record: RunRecord, anchor_id: str | None) -> None:
        search = self._search
        search.records[record.id] = record
        if self._anchor is not None:
            search.records[self._anchor.record.id] = self._anchor.record
        is_broken = rejection(record, search.tune) is not None and not record.blocks
        search.charge("baseline" if flight.switches == BASELINE else "failed" if is_broken else "trials")
        if is_broken:
            search.charge_as_failed(flight.waited_s)
        trial = Trial(
            recipe=search.space.text(flight.switches),
            record_id=record.id,
            anchor_id=anchor_id,
            cost_s=flight.taken_s / (1 + CONTENTION * flight.beside),  # less what others slowed it down
        )
        search.keep(trials=(*search.tune.trials, trial))

    def _settle(self, entry: Entry) -> Note:
        """The faster of the two stays open; returns what is to be said of the newer."""
        search = self._search
        why = rejection(entry.record, search.tune)
        log = log_ratio(self._anchor.record, entry.record, search.asked.kind) if self._anchor is not None else None
        if why is None and (self._anchor is None or (log is not None and log.centre > 0)):
            self._let_go()
            entry.stopped = None  # it goes on being measured
            self._anchor = entry
        else:
            self._close(entry)
        if why is not None:
            return why
        return note("note", f"{math.exp(log.centre):.3f}× the fastest so far" if log is not None else "timed alone")

    def _let_go(self) -> None:
        if self._anchor is not None:
            anchor, self._anchor = self._anchor, None
            self._close(anchor)

    def _close(self, entry: Entry) -> None:
        entry.stopped = entry.stopped or ("target" if entry.record.blocks else "interrupted")
        self._search.records[entry.record.id] = self._group.close(entry)
