"""Trials: recipes prepared side by side, then timed one at a time in turns with the fastest so far; and what broke."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from redline.analyze.pairs import log_ratio
from redline.model.note import Note, note
from redline.model.protocol import Sharing
from redline.model.record import RunRecord
from redline.model.spec import MeasureSpec, RunSpec
from redline.search.group import FEWEST_SOLO_BLOCKS, Entry, Group
from redline.search.tune.costs import Costs, most_helpers
from redline.search.tune.flight import Flight, UntilPlaced
from redline.search.tune.inquiry import learn_from
from redline.search.tune.lessons import accepts, numerics_reason, rejection
from redline.search.tune.record import GivenUp, Trial
from redline.search.tune.space import BASELINE, BY_BLOCK, Switches
from redline.search.tune.tuner import Purpose, Tuner, final_measure

LOOK_S = 0.05
"""How long each worker that prepares is waited for in turn."""


class Trials:
    """Context manager: the worker of the fastest recipe so far lives as long as it does."""

    def __init__(self, tuner: Tuner) -> None:
        self._tuner = tuner
        self._anchor: Entry | None = None
        self._flights: list[Flight] = []
        self.idle_s = 0.0
        """Waited for workers since the last of them was ready."""
        self._crowded_out: list[Switches] = []
        """Ran out of memory beside others; tried again alone."""
        self._has_been_crowded = False
        self._positions = itertools.count(len(tuner.tune.trials))
        self._group = Group(
            tuner.door,
            tuner.journal,
            tuner.observer,
            tuner.order,
            only=tuner.only,
            solo_blocks=FEWEST_SOLO_BLOCKS,
        )

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_twins_to_the_race(is_over=kind is None)
        self._let_go()
        self._group.__exit__(kind, error, trace)
        self._tuner.records.update((record.id, record) for record in self._group.done.values())

    @property
    def in_flight(self) -> list[Switches]:
        return [flight.switches for flight in self._flights] + self._crowded_out

    @property
    def is_open(self) -> bool:
        """Whether the fastest so far is open, so that others can be measured in turns with it."""
        return self._anchor is not None

    @property
    def flights(self) -> Sequence[Flight]:
        return self._flights

    def has_room(self) -> bool:
        """Whether one more may be prepared: by the jobs that were asked for, by host memory and by device memory."""
        if not self._flights:
            return True
        tuner, twins = self._tuner, len(self._tuner.twins)
        if self._has_been_crowded or self._crowded_out or self._preparing >= tuner.jobs:
            return False
        return tuner.has_memory_for(len(self._flights) + 1 + twins + (self._anchor is not None))

    def start(self, switches: Switches, why: str, twins: Sequence[RunSpec] = ()) -> None:
        """Have a worker prepare this recipe; and others its twins, with which it will go on into the last race."""
        tuner, position = self._tuner, next(self._positions)
        tuner.observer.attempting(tuner.space.text(switches), position + 1, why)
        spec, company = tuner.trial_spec(switches), self._company_of(switches, len(twins))
        sharing: Sharing = "shares" if company else "alone"
        helpers = [self._group.start(spec, 0, sharing="helps") for _ in range(company - len(twins))]
        pending = self._group.start(spec, position, sharing=sharing)
        self._flights.append(Flight(switches, pending, tuner.clock(), helpers))
        if twins:
            tuner.lent = switches
            self.start_twins(twins, sharing)

    def _company_of(self, switches: Switches, twins: int) -> int:
        """With how many workers it can share the compiling of its blocks, its twins among them."""
        tuner, most = self._tuner, most_helpers(self._tuner)
        if BY_BLOCK not in switches or not most:
            return 0
        opened = 1 + len(self._flights) + len(tuner.twins) + self._helping + (self._anchor is not None)
        wanted = range(most if not self._has_been_crowded else 0, twins, -1)
        return next((count for count in wanted if tuner.has_memory_for(opened + count)), twins)

    @property
    def _helping(self) -> int:
        return sum(len(flight.helpers) for flight in self._flights)

    def _land(self, flight: Flight) -> None:
        """It is no longer on its way: nobody need help it."""
        self._flights.remove(flight)
        for helper in flight.helpers:
            self._group.cancel(helper)

    @property
    def _preparing(self) -> int:
        """Workers that prepare: twins are taken to be ready when the trial of their recipe is."""
        return len(self._flights) + sum(self._tuner.twins_of(flight.switches) for flight in self._flights)

    def start_twins(self, specs: Sequence[RunSpec], sharing: Sharing = "alone") -> None:
        """Have workers prepare recipes once more, for the last race: they will not be opened again then."""
        self._tuner.twins += [self._group.start(spec, 0, sharing=sharing) for spec in specs]

    def has_room_for_twins(self, count: int) -> bool:
        """Whether so many more processes may wait for the last race beside all others."""
        tuner = self._tuner
        is_free = not self._has_been_crowded and self._preparing + count <= tuner.jobs
        workers = len(self._flights) + len(tuner.twins) + count + (self._anchor is not None)
        return is_free and tuner.has_memory_for(workers)

    def _cancel_twins(self, switches: Switches) -> None:
        """Those of this recipe."""
        tuner = self._tuner
        for twin in [each for each in tuner.twins if tuner.recipe_of(each.record) == switches]:
            self._group.cancel(twin)
            tuner.twins.remove(twin)
        if tuner.lent == switches:
            tuner.lent = None

    def _cancel_without_prospect(self, finished: Switches) -> None:
        """What compiles a recipe that turned out slow without; and twins of what is no longer the fastest."""
        tuner, leader = self._tuner, self._tuner.leader()
        for flight in [each for each in self._flights if tuner.is_slow_without_compiler(each.switches)]:
            if finished <= flight.switches:  # else it was begun in spite of that
                self.cancel(flight, "given up: it is slow without its compiler")
        wanted = {BASELINE, tuner.lent, tuner.space.switches_of(leader.recipe) if leader is not None else BASELINE}
        for switches in {tuner.recipe_of(twin.record) for twin in tuner.twins} - wanted:
            self._cancel_twins(switches)

    def _leave_twins_to_the_race(self, *, is_over: bool) -> None:
        """The race takes over those of the fastest, with its process on trial, and of the baseline; others have no use."""
        tuner, anchor = self._tuner, self._anchor
        leader = tuner.leader() if is_over else None
        wanted = {BASELINE, tuner.space.switches_of(leader.recipe)} if leader is not None else set[Switches]()
        for switches in {tuner.recipe_of(twin.record) for twin in tuner.twins} - wanted:
            self._cancel_twins(switches)
        for twin in tuner.twins:
            self._group.release(twin)
        if (
            anchor is not None
            and anchor.is_sound
            and tuner.lent in wanted
            and tuner.recipe_of(anchor.record) == tuner.lent
        ):
            self._anchor, anchor.stopped = None, "target"
            tuner.twins.append(self._group.hand_over(anchor, self._race_measure(anchor)))
            tuner.records[anchor.record.id] = anchor.record
        tuner.lent = None

    def _race_measure(self, entry: Entry) -> MeasureSpec:
        """As all are timed in a hurried race; its numbers were looked at as on trial."""
        measure = final_measure(on_cpu=self._tuner.on_cpu, checks=True, hurried=True)
        return msgspec.structs.replace(measure, loss_path_steps=entry.spec.measure.loss_path_steps)

    def finish(self, switches: Switches) -> None:
        """Time those that are prepared until this one is done."""
        while switches in self.in_flight:
            self.finish_one()

    def finish_one(self, keep_s: Callable[[], float] = lambda: -math.inf) -> None:
        """Wait for the first that is prepared, check its numerics, and only then time it.

        The trial is kept, whatever became of it. When no more than `keep_s` of the budget is left, all that is still on its
        way is given up; it is asked again where one has been compiled meanwhile.
        """
        if not self._flights:
            self._let_go()  # alone it may still fit
            self.start(self._crowded_out.pop(0), "again, alone")
        flight = self._first_ready(keep_s)
        if flight is None:
            self._give_up()
            return
        self._land(flight)
        tuner, position = self._tuner, flight.pending.record.position
        ready_s = tuner.clock()
        entry = self._group.admit(flight.pending)
        if entry is None and position in self._group.crowded:
            self._has_been_crowded = True
            self._crowded_out.append(flight.switches)
            tuner.charge_as_failed(flight.waited_s)
            if flight.switches == BASELINE:
                self._cancel_all()  # nothing can be timed before it is
            return
        anchor_id = None
        if entry is not None and self._is_right(entry):
            anchor_id = self._anchor.record.id if self._anchor is not None else None
            self._measure(entry, flight)
        record = self._group.done[position] if entry is None else entry.record
        cost_s = flight.cost_s(tuner.clock())
        self._keep(flight, record, anchor_id, cost_s, timed_s=tuner.clock() - ready_s)
        said = self._settle(entry) if entry is not None else rejection(record, tuner.tune)
        tuner.observer.attempted(tuner.space.text(flight.switches), str(said or ""))
        self._tell_leader()
        if self._anchor is None or self._anchor is not entry:
            self._cancel_twins(flight.switches)
        if flight.switches != BASELINE:
            self._cancel_without_prospect(flight.switches)
            learn_from(tuner, flight.switches, record)
            self._cancel_ruled_out()

    def _cancel_ruled_out(self) -> None:
        """What is being prepared and holds what has just been ruled out would only fail the same way."""
        lessons = self._tuner.lessons()
        for flight in [each for each in self._flights if lessons.rules_out(each.switches)]:
            self.cancel(flight, "given up: it holds what was ruled out")

    def cancel(self, flight: Flight, why: str) -> None:
        """Stop preparing it, for good."""
        self._tuner.given_up.add(flight.switches)
        self._group.cancel(flight.pending)
        self._land(flight)
        self._cancel_twins(flight.switches)
        self._tuner.observer.attempted(self._tuner.space.text(flight.switches), why)

    def _first_ready(self, keep_s: Callable[[], float]) -> Flight | None:
        tuner = self._tuner
        tuner.charge("other")
        compiled, kept_s = self._compiled, keep_s()
        first = self._flights[0]
        awaited = [first] if first.switches == BASELINE else self._flights  # nothing can be timed before the baseline
        purpose: Purpose = "baseline" if first.switches == BASELINE else "trials"
        while True:
            for flight in awaited:
                before_s = tuner.clock()
                is_ready = self._group.is_ready(flight.pending, LOOK_S)
                passed_s = tuner.clock() - before_s
                self.idle_s += passed_s
                for each in self._flights:
                    each.shared_s += passed_s * (self._preparing + self._helping - len(each.helpers) - 1)
                tuner.charge(purpose)
                if is_ready:
                    # Without those that go on being prepared beside it, the search would have waited as long.
                    flight.waited_s, self.idle_s = self.idle_s, 0.0
                    return flight
            if self._compiled != compiled:
                compiled, kept_s = self._compiled, keep_s()
            if tuner.left_s <= kept_s:
                return None

    @property
    def _compiled(self) -> int:
        return sum(flight.is_compiled for flight in self._flights)

    def _give_up(self) -> None:
        tuner = self._tuner
        tuner.charge_as_failed(self.idle_s)
        self.idle_s = 0.0
        for flight in self._flights:
            tuner.observer.attempted(tuner.space.text(flight.switches), "given up: no time left to prepare it")
        now_s = tuner.clock()
        tuner.given_up |= {*self._crowded_out, *(flight.switches for flight in self._flights)}
        taken = [(flight, flight.taken_s(now_s)) for flight in self._flights]
        late = [GivenUp(recipe=tuner.space.text(flight.switches), seconds=seconds) for flight, seconds in taken]
        tuner.keep(given_up=(*tuner.tune.given_up, *late))
        costs = Costs(tuner)
        hung = [(each.switches, s) for each, s in taken if costs.is_overdue(each.switches, each.others(now_s), s)]
        tuner.overdue.update(hung)
        self._cancel_all()
        self._crowded_out.clear()

    def _cancel_all(self) -> None:
        for flight in list(self._flights):
            self._group.cancel(flight.pending)
            self._cancel_twins(flight.switches)
            self._land(flight)

    def _is_right(self, entry: Entry) -> bool:
        prepared = entry.record.prepared
        return prepared is not None and accepts(prepared.numerics, self._tuner.asked.tolerance)

    def _measure(self, entry: Entry, flight: Flight) -> None:
        tuner, is_first = self._tuner, self._anchor is None
        started_s = tuner.clock()
        # A process that was prepared beside others on a GPU is no longer as it would be alone.
        if is_first or flight.pending.contended:
            self._group.keep_still(entry)
        else:
            self._group.measure_solo(entry)
        self._group.measure(UntilPlaced(entry, tuner.asked.kind, lambda: tuner.left_s <= 0), solo=is_first)
        for other in self._flights:
            other.still_s += tuner.clock() - started_s
        if self._anchor is not None and not self._anchor.is_sound:
            self._let_go()

    def _keep(self, flight: Flight, record: RunRecord, anchor_id: str | None, cost_s: float, timed_s: float) -> None:
        tuner = self._tuner
        tuner.records[record.id] = record
        if self._anchor is not None:
            tuner.records[self._anchor.record.id] = self._anchor.record
        is_broken = rejection(record, tuner.tune) is not None and not record.blocks
        tuner.charge("baseline" if flight.switches == BASELINE else "failed" if is_broken else "trials", timed_s)
        if is_broken:
            tuner.charge_as_failed(flight.waited_s)
        text = tuner.space.text(flight.switches)
        trial = Trial(recipe=text, record_id=record.id, anchor_id=anchor_id, cost_s=cost_s)
        tuner.keep(trials=(*tuner.tune.trials, trial))

    def _settle(self, entry: Entry) -> Note:
        """The faster of the two stays open; what is to be said of the newer."""
        tuner = self._tuner
        why, prepared = rejection(entry.record, tuner.tune), entry.record.prepared
        log = log_ratio(self._anchor.record, entry.record, tuner.asked.kind) if self._anchor is not None else None
        is_faster = self._anchor is None or (log is not None and log.centre > 0)
        if why is None and is_faster:
            self._let_go()
            entry.stopped = None  # it goes on being measured
            self._anchor = entry
        else:
            self._close(entry)
        if why is not None:
            return why
        if log is not None:
            return note("note", f"{math.exp(log.centre):.3f}× the fastest so far")
        assert prepared is not None
        return numerics_reason(prepared.numerics, tuner.asked.tolerance)

    def _tell_leader(self) -> None:
        leader, baseline = self._tuner.leader(), self._tuner.baseline()
        if leader is not None and baseline is not None:
            self._tuner.observer.leads(leader.recipe, math.exp(baseline.log_s - leader.log_s))

    def _let_go(self) -> None:
        if self._anchor is not None:
            anchor, self._anchor = self._anchor, None
            if self._tuner.recipe_of(anchor.record) == self._tuner.lent:
                self._tuner.lent = None
            self._close(anchor)

    def _close(self, entry: Entry) -> None:
        entry.stopped = entry.stopped or ("target" if entry.record.blocks else "interrupted")
        self._tuner.records[entry.record.id] = self._group.close(entry)
