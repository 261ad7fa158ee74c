"""Which recipe is faster? Replicates of fresh processes tell: they are held open together and measured in randomly interleaved blocks.

Interleaving cancels drift; fresh processes average out what differs from process to process (two processes of one
recipe were seen 4 % apart, each steady to 0.2 %). A race ends as soon as every pair is decided, and is extended twice
before it calls one inconclusive.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations

import msgspec

from redline.analyze.pairs import TIME_BAND, Pair, log_ratio, pairs_of, racer_name, racer_names
from redline.analyze.statistics import student_t
from redline.launch.door import Door
from redline.model.errors import UsageError
from redline.model.note import note
from redline.model.record import RunRecord, TimeKind
from redline.model.spec import RunSpec
from redline.search.group import FEWEST_SOLO_BLOCKS, Entry, Group, Pending, StopRule
from redline.search.observer import Journal, NoJournal, Observer

REPLICATES = 3
"""A race has this many replicates unless the user asks for another number."""
EXTENSIONS = 2
"""A race is extended this often before its open pairs are called inconclusive."""
REPLICATES_PER_EXTENSION = 2
"""Each extension adds this many replicates."""
FEWEST_REPLICATES = 2
"""No pair is decided by fewer. With two, Student's factor is 64, so only what is very clear is decided then."""
FEWEST_ROUNDS = 4
"""A replicate has at least this many rounds. It needs no more, because only more replicates show how much processes differ."""
WITHIN_SHARE = 1 / 3
"""Rounds go on until what they leave open inside a replicate is no more than this share of the band that counts as a tie."""
TOO_CROWDED = note("crowded", "did not fit in memory beside the others: opened one after the other instead")


@dataclass
class UntilTold(StopRule):
    """All entries are visited until the rounds leave little open about any pair, or a replicate's share of the time is used up."""

    kind: TimeKind
    planned: int
    """This many replicates share the time that the spec allows."""
    is_over: Callable[[], bool] = lambda: False
    """Says whether there is no more time for this replicate. It ends early then, so that the next has some time too."""

    def after_round(self, entries: Sequence[Entry], rounds: int) -> None:
        running = [entry for entry in entries if entry.is_sound and entry.stopped is None]
        if not running:
            return
        measure = running[0].spec.measure
        are_enough = rounds >= min(measure.min_rounds, FEWEST_ROUNDS)
        if are_enough and self._leave_little_open(running):
            for entry in running:
                entry.stopped = "target"
        is_over = are_enough and self.is_over()
        for entry in running:
            if entry.stopped is None and (is_over or entry.timed_s >= measure.max_seconds / self.planned):
                entry.stopped = "ceiling"

    def _leave_little_open(self, entries: Sequence[Entry]) -> bool:
        if len(entries) < 2:
            interval = entries[0].interval(self.kind)
            return interval is not None and interval.half_width <= TIME_BAND * WITHIN_SHARE
        for one, other in combinations(entries, 2):
            log = log_ratio(one.record, other.record, self.kind)
            if log is None:
                return False
            half = student_t(log.rounds - 1) * log.error + log.doubt
            is_far_out = abs(log.centre) - 2 * half > TIME_BAND
            if half > TIME_BAND * WITHIN_SHARE and not is_far_out:
                return False
        return True


@dataclass
class Race:
    """A race measures recipes of one workload replicate by replicate."""

    door: Door
    journal: Journal
    observer: Observer
    order: random.Random
    only: TimeKind | None = None
    """This is the only kind of block to measure; None means all that a run measures."""
    planned: int = REPLICATES
    left_s: Callable[[], float] = lambda: math.inf
    """Returns the seconds that are left for the whole race."""
    replicates: list[list[RunRecord]] = field(default_factory=list)
    in_turns: bool = False
    """It is True once sessions did not fit in memory together, or cannot be open together: they are then measured one after the other."""
    _before: list[int] = field(default_factory=list)
    """This is the order of the last replicate, if the next one reverses it."""

    @property
    def kind(self) -> TimeKind:
        return self.only or "throughput"

    @property
    def pairs(self) -> list[Pair]:
        return pairs_of(self.replicates, self.kind)

    def run_replicate(self, specs: Sequence[RunSpec]) -> list[RunRecord]:
        """Measures each spec in a fresh process, and returns the records in the order of the specs. The race keeps them too."""
        is_inline = any(spec.launch.door == "inline" for spec in specs)
        records = None if self.in_turns or is_inline else self._together(specs)
        if records is None:
            self.in_turns = True
            records = self._one_by_one(specs)
        self.replicates.append(records)
        return records

    def run_replicates(
        self, planned: Sequence[Sequence[RunSpec]], begun: Sequence[Pending] = ()
    ) -> list[list[RunRecord]]:
        """Measures several replicates, each given by its specs, and prepares all of their processes at the same time.

        One replicate is timed after the other.

        This is for those who have little time: a process that was prepared beside others is a little less like one by itself.
        `begun` holds processes that are being prepared already, and takes them in place of new ones for specs of the same
        recipe. If memory does not allow it, or nothing would be prepared together, the replicates are measured as usual.
        """
        if len(planned) == 1 and not begun:
            return [self.run_replicate(planned[0])]
        unused = list(begun)

        def start(group: Group, spec: RunSpec, position: int) -> Pending:
            mine = next((each for each in unused if each.record.spec.recipe == spec.recipe), None)
            if mine is None:
                return group.start(spec, position)
            unused.remove(mine)
            return group.adopt(mine, position)

        with ExitStack() as stack:
            groups = [stack.enter_context(self._group(is_shared=True)) for _ in planned]
            started = [
                [start(group, specs[position], position) for position in self._opening_order(len(specs))]
                for group, specs in zip(groups, planned, strict=True)
            ]
            for pending in unused:
                pending.session.kill()
            # Nothing is timed while anybody still prepares.
            for group, all_pending in zip(groups, started, strict=True):
                for entry in filter(None, map(group.admit, all_pending)):
                    group.keep_still(entry)
            if not any(group.crowded for group in groups):
                for still_to_come, group in zip(reversed(range(len(groups))), groups, strict=True):
                    rule = self._until_told(still_to_come)
                    for entry in self.order.sample(group.entries, len(group.entries)):
                        group.measure_solo(entry, self.kind, follows_others=True)
                    group.measure(rule)
                    for entry in list(group.entries):
                        group.close(entry)
                replicates = [[group.done[position] for position in sorted(group.done)] for group in groups]
                self.replicates += replicates
                return replicates
        return [self.run_replicate(specs) for specs in planned]

    def _together(self, specs: Sequence[RunSpec]) -> list[RunRecord] | None:
        """Measures the specs interleaved; returns None if they do not fit in memory together."""
        with self._group(is_shared=len(specs) > 1) as group:
            for position in self._opening_order(len(specs)):
                entry = group.open(specs[position], position)
                if entry is not None:
                    group.measure_solo(entry, self.kind)
                elif group.crowded:
                    for other in group.entries:
                        other.record = msgspec.structs.replace(other.record, notes=(TOO_CROWDED,))
                    return None
            group.measure(self._until_told())
        return [group.done[position] for position in range(len(specs))]

    def _one_by_one(self, specs: Sequence[RunSpec]) -> list[RunRecord]:
        done: dict[int, RunRecord] = {}
        for position in self._opening_order(len(specs)):
            with self._group(is_shared=False) as group:
                group.open(specs[position], position)
                group.measure(self._until_told())
            done |= group.done
        return [done[position] for position in range(len(specs))]

    def _until_told(self, still_to_come: int = 0) -> UntilTold:
        """Returns the rule for one replicate. Those that are `still_to_come` are prepared already, and share the time left with it."""
        left_s = self.left_s()
        if math.isinf(left_s):
            return UntilTold(self.kind, self.planned)
        kept_s = left_s * still_to_come / (1 + still_to_come)
        return UntilTold(self.kind, self.planned, lambda: self.left_s() <= kept_s)

    def _opening_order(self, count: int) -> list[int]:
        """Returns the positions in random order; every other time it is the reverse of the last.

        What a process owes to its turn (every other one runs on another socket, the first finds a cool device) then cancels out.
        """
        if len(self._before) == count:
            order, self._before = self._before[::-1], []
        else:
            order = self._before = self.order.sample(range(count), count)
        return order

    def _group(self, *, is_shared: bool) -> Group:
        return Group(
            self.door,
            self.journal,
            self.observer,
            self.order,
            is_shared=is_shared,
            only=self.only,
            solo_blocks=FEWEST_SOLO_BLOCKS,
        )


def decide(
    specs: Sequence[RunSpec],
    door: Door,
    observer: Observer,
    keep: Callable[[list[RunRecord]], None] = lambda records: None,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
    before: Sequence[Sequence[RunRecord]] = (),
) -> list[list[RunRecord]]:
    """Measures `specs` until every pair is decided, and returns the replicates. The specs differ in their recipes alone or are functions.

    `keep` receives the records of each replicate, whose positions are those of `specs`. A recipe that breaks is out after
    that replicate; one whose every pair is decided leaves before an extension. `before` holds replicates that an earlier process
    has measured.
    """
    check_racers(specs, replicates)
    race = Race(door, NoJournal(), observer, random.Random(seed), planned=replicates)
    names = racer_names(specs)
    racing, planned, extensions = list(range(len(specs))), replicates, 0
    resumed = [list(records) for records in before]
    while True:
        if resumed:
            records = resumed.pop(0)
            race.replicates.append(records)
        else:
            observer.replicate(len(race.replicates) + 1, planned, [names[index] for index in racing])
            records = race.run_replicate([specs[index] for index in racing])
            records = race.replicates[-1] = [
                msgspec.structs.replace(record, position=index) for index, record in zip(racing, records, strict=True)
            ]
            keep(records)
        broken = {racer_name(record.spec) for record in records if record.failure is not None}
        racing = [index for index in racing if racer_name(specs[index]) not in broken]
        pairs = race.pairs
        observer.standing(pairs)
        here = set(racer_names(specs[index] for index in racing))
        undecided = [pair for pair in pairs if pair.verdict == "inconclusive" and {pair.a, pair.b} <= here]
        if len(racing) < 2 or (len(race.replicates) >= min(FEWEST_REPLICATES, replicates) and not undecided):
            return race.replicates
        if len(race.replicates) >= planned:
            if extensions == EXTENSIONS or replicates == 1:
                return race.replicates
            extensions, planned = extensions + 1, planned + REPLICATES_PER_EXTENSION
            in_doubt = {name for pair in undecided for name in (pair.a, pair.b)}
            # Copies of one recipe that is compared with itself stay together, or their names would change.
            stays = {racer_name(specs[index]) for index in racing if names[index] in in_doubt}
            racing = [index for index in racing if racer_name(specs[index]) in stays]


def check_racers(specs: Sequence[RunSpec], replicates: int) -> None:
    """Refuses what cannot be decided. The same recipe may be compared with itself: what differs then is noise."""
    if len(specs) < 2:
        raise UsageError(
            "--decide compares at least two recipes (-r A -r B, or -r A -r A to see the noise floor), or two functions"
        )
    if replicates < 1:
        raise UsageError(f"replicates must be 1 or more, got {replicates}")
