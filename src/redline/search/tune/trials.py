"""In trials, recipes are prepared beside each other, and then timed one at a time in turns with the fastest so far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from redline.analyze.pairs import TIME_BAND, log_ratio
from redline.model.note import Note, note
from redline.model.protocol import Sharing
from redline.model.record import RunRecord, TimeKind
from redline.search.group import FEWEST_SOLO_BLOCKS, Entry, Group, Pending, StopRule
from redline.search.tune.choose import Candidate, least_gain, ready_chance
from redline.search.tune.costs import CONTENTION, Costs
from redline.search.tune.lessons import HANGS, lesson_of, rejection
from redline.search.tune.record import GivenUp, Lesson, Trial
from redline.search.tune.space import BASELINE, BY_BLOCK, Switches
from redline.search.tune.standings import NEAR_ENOUGH
from redline.search.tune.state import FAILED_SHARE, Search

LOOK_S = 0.05
"""The search waits this long for each worker that prepares, one after the other. Every ten times this long it asks what to give up."""


@dataclass
class UntilPlaced(StopRule):
    """A candidate is timed interleaved with the fastest so far. One that may win gets more rounds than one that is clearly behind."""

    candidate: Entry
    kind: TimeKind
    is_over: Callable[[], bool]
    """It says whether the budget has ended."""

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
        if rounds < 3:
            return False
        anchor = next((each for each in entries if each is not entry and each.is_sound), None)
        if anchor is None:  # the first only gives the scale, as the others are timed in turns with it
            interval = entry.interval(self.kind)
            return interval is not None and interval.half_width <= TIME_BAND
        log = log_ratio(anchor.record, entry.record, self.kind)
        if log is None:
            return False
        doubt = 2.5 * max(log.error, NEAR_ENOUGH) + log.doubt
        is_decided = log.centre + doubt < -0.02 or log.centre - doubt > 0.2
        return is_decided or (log.error <= NEAR_ENOUGH and rounds > 3)


class Trials:
    """This context manager runs trials. The worker of the fastest recipe so far lives as long as it does."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._anchor: Entry | None = None
        self.flights: list[Candidate] = []
        self._seen_at_s = search.clock()
        """The time that passed until then has been counted for the recipes on their way."""
        self._idle_s = 0.0
        """The search has waited this long for workers since the last of them was ready."""
        self._positions = itertools.count(len(search.tune.trials))
        given = (search.door, search.journal, search.observer, search.order)
        self._group = Group(*given, only=search.only, solo_blocks=FEWEST_SOLO_BLOCKS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves to the race what was prepared for it of the fastest recipe, and ends all other processes, which have no use."""
        search, leader = self._search, self._search.leader()
        for pending in list(search.held):
            is_wanted = kind is None and search.recipe_of(pending.record) == leader
            (self._group.release if is_wanted else self._drop)(pending)
        self._let_go()
        self._group.__exit__(kind, error, trace)
        search.records.update((record.id, record) for record in self._group.done.values())

    @property
    def is_open(self) -> bool:
        """It is True if the fastest so far is open, so that others can be interleaved with it."""
        return self._anchor is not None

    # Preparing

    def has_room(self, more: int = 1) -> bool:
        """Returns whether more may be prepared, by the jobs that were asked for, by host memory and by device memory."""
        if not self.flights and more == 1:
            return True
        opened = len(self.flights) + len(self._search.held) + (self._anchor is not None)
        return self._preparing + more <= self._search.jobs and self._search.has_memory_for(opened + more)

    @property
    def _preparing(self) -> int:
        return len(self.flights) + sum(pending.reply is None for pending in self._search.held)

    def start(self, candidate: Candidate, why: str) -> None:
        """Has a worker prepare this recipe, and others the same for its race if there may be no time for that later."""
        search, position, switches = self._search, next(self._positions), candidate.switches
        search.observer.attempting(search.space.text(switches), position + 1, why)
        is_held = self._needs_company(switches)
        sharing: Sharing = "shares" if is_held and BY_BLOCK in switches else "alone"
        self._pass_time()
        candidate.pending = self._group.start(search.trial_spec(switches), position, sharing=sharing)
        self.flights.append(candidate)
        if is_held:
            # The trial checks the numbers; in training the path of losses is longer in the race.
            checks = search.asked.spec.workload.task == "train"
            specs = [search.race_spec(switches, checks=checks and not number) for number in range(search.fewest)]
            search.held += [self._group.start(spec, 0, sharing=sharing) for spec in specs]

    def _needs_company(self, switches: Switches) -> bool:
        """Returns whether to prepare the processes of a recipe's race beside its trial, because it may be too late to open them afterwards.

        This is done only on a GPU, because on a CPU they would compute where it compiles; and only for one recipe at a time.
        """
        search, costs = self._search, Costs(self._search)
        if search.on_cpu or search.held or search.asked.replicates < 2 or not costs.compiles(switches):
            return False
        within_s = (search.left_s - costs.race_s(switches)) / (1 + CONTENTION * (len(self.flights) + search.fewest))
        return self.has_room(1 + search.fewest) and costs.ready_chance(switches, within_s) < 1 - HANGS - NEAR_ENOUGH

    # Waiting

    def finish(self, switches: Switches) -> None:
        """Times recipes that are prepared until this one is done."""
        while any(flight.switches == switches for flight in self.flights):
            self.finish_one(patiently=True)

    def finish_one(self, *, patiently: bool = False) -> None:
        """Waits for the first recipe that is prepared, checks its numerics, and only then times it.

        The trial is kept, whatever became of it. With `patiently` it waits however little is left of the budget.
        """
        flight = self._first_ready(patiently=patiently)
        if flight is None:
            return  # what is worth the seconds may be another recipe by now
        self.flights.remove(flight)
        search, pending = self._search, flight.pending
        assert pending is not None
        entry = self._group.admit(pending)
        if entry is None and pending.record.position in self._group.crowded:
            self._make_room()
            self.start(Candidate(flight.switches), "again, alone")
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
            broken = [each for each in self.flights if search.lessons.rules_out(each.switches)]
            self._give_up(broken, "it holds what was ruled out")
        leader, baseline = search.leader(), search.baseline()
        if leader and baseline is not None:
            search.observer.leads(search.space.text(leader), math.exp(baseline.log_s - search.seen[leader].log_s))
        wanted = {leader, *(each.switches for each in self.flights)}
        for pending in [each for each in search.held if search.recipe_of(each.record) not in wanted]:
            self._drop(pending)

    def _pass_time(self, *, still: bool = False) -> None:
        """Counts what has passed for all recipes on their way, less what they slowed each other down.

        With `still` nothing is counted, because they stood still while others were timed.
        """
        now_s = self._search.clock()
        alone_s = (now_s - self._seen_at_s) / (1 + CONTENTION * max(self._preparing - 1, 0))
        for flight in self.flights if not still else ():
            flight.taken_s += alone_s
        self._seen_at_s = now_s

    def _first_ready(self, *, patiently: bool) -> Candidate | None:
        """Returns the first that is prepared; None if there was none for a while, or nothing would be in time for its race any more."""
        search = self._search
        search.charge("other")
        # After a while a compile is less likely to be in time, so that another recipe may be worth starting. The wait ends then.
        until_s, weighed_s = search.clock() + FAILED_SHARE / 2 * search.budget_s, search.clock()
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
                    return flight
            if not patiently and first.switches != BASELINE and search.clock() > weighed_s + 10 * LOOK_S:
                weighed_s = search.clock()
                self._give_up_late()
                if not self.flights or weighed_s > until_s:
                    return None

    def _give_up_late(self) -> None:
        """Gives up what is too unlikely to be ready in time for what it promised.

        Nothing is given up as too unlikely while what may be lost on failures is not used up yet.
        """
        search, costs = self._search, Costs(self._search)
        race_s = costs.race_s(search.leader() or BASELINE)
        # One more trial would be timed before the race, so there must be time for both.
        is_over = search.left_s <= race_s + (2 * costs.timed_s if race_s else 0.0)
        may_wait = self._idle_s < search.allowance_s - 12 * LOOK_S  # it may be noticed this much later
        late, beside = list[Candidate](), len(self.flights) - 1
        for flight in self.flights:
            wait_s = min(search.left_s, costs.seconds(flight.switches)) / max(search.jobs // 2, 1)
            promise = flight.gain * ready_chance(search, costs, flight, beside)
            is_hopeless = promise < least_gain(search, wait_s) and not flight.is_compiled and not may_wait
            late += [flight] if is_over or is_hopeless else []
        if late and len(late) == len(self.flights):
            search.charge("trials", failed_s=self._idle_s)
            self._idle_s = 0.0
        why = note("given-up", "it took far longer than was expected", about="late")
        for flight in late:
            text = search.space.text(flight.switches)
            search.keep(given_up=(*search.tune.given_up, GivenUp(recipe=text, seconds=flight.taken_s)))
            if not flight.is_compiled and costs.ready_chance(flight.switches, flight.taken_s) > 0.9:
                lesson = Lesson(switches=tuple(sorted(flight.switches)), scope="recipe", reason=why, recipe=text)
                search.learn(lesson)
        self._give_up(late, "it will not be ready in time")

    def _give_up(self, flights: Sequence[Candidate], why: str) -> None:
        """Stops preparing these for good."""
        for flight in flights:
            self._search.given_up.add(flight.switches)
            self._search.observer.attempted(self._search.space.text(flight.switches), f"given up: {why}")
            self._cancel(flight)

    def _cancel(self, flight: Candidate) -> None:
        search = self._search
        assert flight.pending is not None
        self._group.cancel(flight.pending)
        self.flights.remove(flight)
        for pending in [each for each in search.held if search.recipe_of(each.record) == flight.switches]:
            self._drop(pending)

    def _drop(self, pending: Pending) -> None:
        self._group.cancel(pending)
        self._search.held.remove(pending)

    def _make_room(self) -> None:
        """Ends all workers, because a recipe ran out of memory beside others. From now on each is prepared alone."""
        self._search.jobs = 1
        for flight in list(self.flights):
            self._cancel(flight)
        self._let_go()

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

    def _keep(self, flight: Candidate, record: RunRecord, anchor_id: str | None) -> None:
        search = self._search
        search.records[record.id] = record
        if self._anchor is not None:
            search.records[self._anchor.record.id] = self._anchor.record
        is_broken = rejection(record, search.tune) is not None and not record.blocks
        purpose = "baseline" if flight.switches == BASELINE else "failed" if is_broken else "trials"
        # All of the wait is charged to the one that broke: without the others beside it, the search would have waited as long.
        search.charge(purpose, failed_s=self._idle_s if is_broken else 0.0)  # type: ignore[arg-type]
        self._idle_s = 0.0
        text = search.space.text(flight.switches)
        trial = Trial(recipe=text, record_id=record.id, anchor_id=anchor_id, cost_s=flight.taken_s)
        search.keep(trials=(*search.tune.trials, trial))

    def _settle(self, entry: Entry) -> Note:
        """Keeps the faster of the two open; returns what is to be said of the newer."""
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
