"""This module measures a candidate against its baseline until the gate is decided or its time is up.

Where the baseline can be run, both sides are fresh processes measured interleaved, replicate by replicate. Where only
records of it are left, the candidate is measured in one fresh process after the other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from redline.analyze.compare import why_broken
from redline.analyze.gate import FEWEST_PROCESSES, MOST_PROCESSES, Judged, inputs_apart, judge, judge_stored
from redline.analyze.pairs import logs_of, racer_names
from redline.launch.door import Door
from redline.model.note import Note, note
from redline.model.record import RunRecord
from redline.model.spec import RunSpec
from redline.search.decide import Race
from redline.search.observer import Journal, Observer

Clock = Callable[[], float]


@dataclass
class GateRun:
    """A run takes one benchmark through the gate."""

    door: Door
    journal: Journal
    observer: Observer
    threshold: float
    budget_s: float
    seed: int = 0
    clock: Clock = time.monotonic
    baseline: list[RunRecord] = field(default_factory=list)
    candidate: list[RunRecord] = field(default_factory=list)
    judged: Judged | None = None
    unlike: Note | None = None
    """It says why the two sides do not compare."""
    out_of_time: bool = False

    def __post_init__(self) -> None:
        order = random.Random(self.seed)
        self._race = Race(self.door, self.journal, self.observer, order, only="throughput", planned=FEWEST_PROCESSES)

    @property
    def broken(self) -> RunRecord | None:
        """Returns the first record of either side whose process has failed."""
        return next((record for record in (*self.baseline, *self.candidate) if record.failure is not None), None)

    def interleaved(self, baseline: RunSpec, candidate: RunSpec) -> None:
        """Measures both sides in fresh processes, interleaved, replicate by replicate."""
        first, other = names = racer_names([baseline, candidate])

        def measure() -> bool:
            ours, theirs = self._race.run_replicate([baseline, candidate])
            self.baseline.append(ours)
            self.candidate.append(theirs)
            self.unlike = inputs_apart(self.baseline[0], self.candidate[0])
            if self.unlike is None:
                self.judged = judge(logs_of(self._race.replicates, first, other), self.threshold)
            return self.judged is not None

        self._until_decided(names, measure)

    def against(self, comparable: Callable[[RunRecord], list[RunRecord]], candidate: RunSpec) -> None:
        """Measures the candidate against those stored records that are comparable with its first process."""

        def measure() -> bool:
            self.candidate += self.one_process(candidate)
            if len(self.candidate) == 1 and self.broken is None:
                self.baseline = comparable(self.candidate[0])
            self.judged = judge_stored(self.baseline, self.candidate, self.threshold)
            return self.judged is not None

        self._until_decided(racer_names([candidate]), measure)

    def one_process(self, spec: RunSpec) -> list[RunRecord]:
        """Measures the spec in a fresh process that has the device to itself, and returns its record in a list."""
        return self._race.run_replicate([spec])

    def _until_decided(self, names: list[str], measure: Callable[[], bool]) -> None:
        """Measures as many replicates as a verdict needs at least; after that, none is begun that would not end in time."""
        started, longest_s = self.clock(), 0.0
        for number in range(MOST_PROCESSES):
            begun = self.clock()
            self.out_of_time = number >= FEWEST_PROCESSES and begun - started + longest_s > self.budget_s
            if self.out_of_time:
                return
            self.observer.replicate(number + 1, FEWEST_PROCESSES, names)
            goes_on = measure()
            longest_s = max(longest_s, self.clock() - begun)
            if not goes_on or self.broken is not None or (self.judged and self.judged.verdict != "inconclusive"):
                return

    def notes(self) -> Iterator[Note]:
        """Says why there is no clear verdict, or what to know of the one there is."""
        processes, judged = f"{len(self.candidate)} processes", self.judged
        if self.broken is not None:
            yield why_broken(self.broken)
        elif self.unlike is not None:
            yield self.unlike
        elif judged is not None and judged.verdict == "inconclusive" and self.out_of_time:
            yield note("budget", f"{processes} did not decide it within its share of the time: a larger --budget may")
        elif judged is not None and judged.verdict == "inconclusive":
            yield note("spread", f"{processes} differ too much among themselves")
        if judged is not None and judged.disturbed:
            pairs = f"{judged.disturbed} of {len(self.candidate)} pairs"
            text = f"other processes had the processors during {pairs}: the interval has room for what they took"
            yield note("shared-cpu", text)
