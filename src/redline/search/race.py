"""Which recipe is faster? Heats of fresh processes, held open together and measured in randomly interleaved blocks.

Blocks in turns take away what drifts; fresh processes take away what a process happens to be born with (two processes
of one recipe were seen 4 % apart, each steady to 0.2 %). A race ends as soon as every pair is decided, and goes on
twice before it calls one inconclusive.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import msgspec

from redline.analyze.race import TIME_BAND, Pair, log_ratio, pairs_of, racer_names
from redline.analyze.statistics import student_t
from redline.errors import UsageError
from redline.launch.door import Door
from redline.record import BlockKind, RunRecord, new_id
from redline.search.group import (
    FEWEST_ALONE,
    Entry,
    finish_entry,
    in_random_order,
    measure_alone_first,
    measure_round,
    open_entry,
)
from redline.search.observer import Journal, Observer
from redline.spec import RunSpec

REPLICATES = 3
EXTENSIONS = 2
HEATS_PER_EXTENSION = 2
FEWEST_HEATS = 2
"""With two, Student's factor is 64: only what is very clear is decided then."""
FEWEST_ROUNDS = 4
"""In a heat: what differs between processes is learned from more heats, not from more rounds."""
WITHIN_SHARE = 1 / 3
"""Of the band: rounds go on until what they leave open inside a heat is no more than this."""
TOO_CROWDED = "did not fit in memory beside the others: opened in turn instead"


@dataclass
class Race:
    """Recipes of one workload, raced heat by heat."""

    door: Door
    journal: Journal
    observer: Observer
    order: random.Random
    only: BlockKind | None = None
    """The only kind of block to measure; None: all that a run measures."""
    replicates: int = REPLICATES
    heats: list[list[RunRecord]] = field(default_factory=list)
    in_turns: bool = False
    """Sessions did not fit in memory together."""

    @property
    def kind(self) -> BlockKind:
        return self.only or "throughput"

    @property
    def pairs(self) -> list[Pair]:
        return pairs_of(self.heats, self.kind)

    def run_heat(self, specs: Sequence[RunSpec]) -> list[RunRecord]:
        """One fresh process for each spec; the records come in the order of the specs and are kept."""
        is_inline = any(spec.launch.door == "inline" for spec in specs)
        records = None if self.in_turns or is_inline else self._together(specs)
        if records is None:
            self.in_turns = True
            records = self._one_by_one(specs)
        self.heats.append(records)
        return records

    def _together(self, specs: Sequence[RunSpec]) -> list[RunRecord] | None:
        """None where memory does not allow it."""
        group = new_id() if len(specs) > 1 else None
        entries: list[Entry] = []
        done: dict[int, RunRecord] = {}
        is_crowded = False
        try:
            for position in self.order.sample(range(len(specs)), len(specs)):
                entry = self._open(specs[position], group, position)
                failure = entry.record.failure
                if failure is None:
                    entries.append(entry)
                    measure_alone_first(entry, self.journal, len(specs), blocks=FEWEST_ALONE, only=self.kind)
                elif failure.kind == "oom" and entries:
                    entry.session.close()
                    is_crowded = True
                    break
                else:
                    done[position] = finish_entry(entry, self.journal, self.observer)
            if not is_crowded:
                self._rounds(entries)
        finally:
            for entry in entries:
                if is_crowded:
                    entry.record = msgspec.structs.replace(entry.record, notes=(TOO_CROWDED,))
                self._close(entry, done)
        return None if is_crowded else [done[position] for position in range(len(specs))]

    def _one_by_one(self, specs: Sequence[RunSpec]) -> list[RunRecord]:
        done: dict[int, RunRecord] = {}
        for position in self.order.sample(range(len(specs)), len(specs)):
            entry = self._open(specs[position], None, position)
            try:
                if entry.record.failure is None:
                    self._rounds([entry])
            finally:
                self._close(entry, done)
        return [done[position] for position in range(len(specs))]

    def _open(self, spec: RunSpec, group: str | None, position: int) -> Entry:
        entry = open_entry(spec, group, position, self.door, self.journal, self.observer)
        entry.only = self.only
        return entry

    def _close(self, entry: Entry, done: dict[int, RunRecord]) -> None:
        entry.stopped = entry.stopped or "interrupted"
        done[entry.record.position] = finish_entry(entry, self.journal, self.observer)

    def _rounds(self, entries: list[Entry]) -> None:
        """Until the rounds leave little open, or a heat's share of the time is used up."""
        number = 0
        while running := [entry for entry in entries if entry.stopped is None]:
            for entry in in_random_order(running, self.order, newest=None if number else entries[-1]):
                measure_round(entry, number, self.journal, len(entries))
                self.observer.measured(entry.record, number + 1, entry.interval(self.kind), entry.target)
            number += 1
            self._stop_where_done(running, number)

    def _stop_where_done(self, running: list[Entry], rounds: int) -> None:
        measure = running[0].spec.measure
        sound = [entry for entry in running if entry.record.failure is None]
        if rounds >= min(measure.min_rounds, FEWEST_ROUNDS) and self._leave_little_open(sound):
            for entry in sound:
                entry.stopped = "target"
        for entry in sound:
            if entry.stopped is None and entry.timed_s >= measure.max_seconds / self.replicates:
                entry.stopped = "ceiling"

    def _leave_little_open(self, entries: Sequence[Entry]) -> bool:
        if len(entries) < 2:
            interval = entries[0].interval(self.kind) if entries else None
            return not entries or (interval is not None and interval.half_width <= TIME_BAND * WITHIN_SHARE)
        for one, other in combinations(entries, 2):
            log = log_ratio(one.record, other.record, self.kind)
            if log is None:
                return False
            half = student_t(log.rounds - 1) * log.error
            is_far_out = abs(log.mean) - 2 * half > TIME_BAND
            if half > TIME_BAND * WITHIN_SHARE and not is_far_out:
                return False
        return True


def race_specs(
    specs: Sequence[RunSpec],
    door: Door,
    journal: Journal,
    observer: Observer | None = None,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> list[list[RunRecord]]:
    """Race `specs`, which differ in their recipes alone; the heats, each a list of records.

    A recipe that breaks is out after its first heat; one whose every pair is decided leaves before an extension.
    """
    check_racers(specs, replicates)
    observer = observer or Observer()
    running = Race(door, journal, observer, random.Random(seed), replicates=replicates)
    racers = list(specs)
    planned, extensions = replicates, 0
    while True:
        observer.replicate(len(running.heats) + 1, planned, racer_names(racers))
        records = running.run_heat(racers)
        broken = {str(record.spec.recipe) for record in records if record.failure is not None}
        racers = [spec for spec in racers if str(spec.recipe) not in broken]
        pairs = running.pairs
        observer.standing(pairs)
        open_pairs = _undecided(pairs, racers)
        if len(racers) < 2 or (len(running.heats) >= min(FEWEST_HEATS, replicates) and not open_pairs):
            return running.heats
        if len(running.heats) >= planned:
            if extensions == EXTENSIONS or replicates == 1:
                return running.heats
            extensions, planned = extensions + 1, planned + HEATS_PER_EXTENSION
            in_doubt = {name for pair in open_pairs for name in (pair.a, pair.b)}
            # By recipe: copies of one that races itself stay together, or their names would change.
            stays = {
                str(spec.recipe) for spec, name in zip(racers, racer_names(racers), strict=True) if name in in_doubt
            }
            racers = [spec for spec in racers if str(spec.recipe) in stays]


def check_racers(specs: Sequence[RunSpec], replicates: int) -> None:
    """Refuse what is no race. The same recipe may race itself: what then differs is noise."""
    if len(specs) < 2:
        raise UsageError("a race needs at least two recipes: -r A -r B, or -r A -r A to see the noise floor")
    if replicates < 1:
        raise UsageError(f"replicates must be 1 or more, got {replicates}")


def _undecided(pairs: Sequence[Pair], racers: Collection[RunSpec]) -> list[Pair]:
    names = set(racer_names(racers))
    return [pair for pair in pairs if pair.verdict == "inconclusive" and {pair.a, pair.b} <= names]
