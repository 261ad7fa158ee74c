"""Measure a candidate against its baseline until the gate is decided or its time is up.

Where the baseline can be run, both sides are fresh processes measured interleaved, replicate by replicate. Where only
records of it are left, the candidate is measured in one fresh process after the other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from redline.analyze.gate import FEWEST_PROCESSES, MOST_PROCESSES, Judged, inputs_apart, judge, judge_stored
from redline.analyze.pairs import logs_of, racer_names
from redline.launch.door import Door
from redline.model.note import Note
from redline.model.record import RunRecord
from redline.model.spec import RunSpec
from redline.search.decide import Race
from redline.search.observer import Journal, Observer

HURRIED_S = 15.0
"""For one replicate: with less, a GPU's first processes are prepared side by side, which takes a fraction of the time."""

Clock = Callable[[], float]


class GateRun:
    """Takes one benchmark through the gate."""

    def __init__(
        self,
        door: Door,
        journal: Journal,
        observer: Observer,
        *,
        threshold: float,
        budget_s: float,
        seed: int = 0,
        clock: Clock = time.monotonic,
    ) -> None:
        self.threshold = threshold
        self._budget_s = budget_s
        self._clock = clock
        self._observer = observer
        self._race = Race(door, journal, observer, random.Random(seed), only="throughput", planned=FEWEST_PROCESSES)
        self.baseline: list[RunRecord] = []
        self.candidate: list[RunRecord] = []
        self.judged: Judged | None = None
        self.unlike: Note | None = None
        """Why the two sides do not compare."""
        self.out_of_time = False

    @property
    def in_turns(self) -> bool:
        """The two sides did not fit in memory together and were measured one after the other."""
        return self._race.in_turns

    @property
    def broken(self) -> RunRecord | None:
        """Returns the first process of either side that failed."""
        return next((record for record in (*self.baseline, *self.candidate) if record.failure is not None), None)

    def interleaved(self, baseline: RunSpec, candidate: RunSpec) -> None:
        """Both sides in turns. A GPU's processes are prepared side by side where the time is short."""
        first, other = racer_names([baseline, candidate])
        specs = [baseline, candidate]
        is_hurried = candidate.device != "cpu" and self._budget_s < HURRIED_S * FEWEST_PROCESSES

        def measure(count: int) -> None:
            if count > 1:
                replicates = self._race.run_replicates_at_once([specs] * count)
            else:
                replicates = [self._race.run_replicate(specs)]
            for ours, theirs in replicates:
                self.baseline.append(ours)
                self.candidate.append(theirs)
            self.unlike = inputs_apart(self.baseline[0], self.candidate[0])
            if self.unlike is None:
                self.judged = judge(logs_of(self._race.replicates, first, other), self.threshold)

        self._until_decided([first, other], measure, FEWEST_PROCESSES, at_once=is_hurried)

    def against(self, comparable: Callable[[RunRecord], list[RunRecord]], candidate: RunSpec) -> None:
        """Against stored records: those that are comparable with the first process of the candidate."""

        def measure(_: int) -> None:
            self.candidate += self.one_process(candidate)
            if len(self.candidate) == 1 and self.broken is None:
                self.baseline = comparable(self.candidate[0])
            self.judged = judge_stored(self.baseline, self.candidate, self.threshold)

        self._until_decided(racer_names([candidate]), measure, FEWEST_PROCESSES)

    def one_process(self, spec: RunSpec) -> list[RunRecord]:
        """Returns the record of a fresh process, by itself."""
        return self._race.run_replicate([spec])

    def _until_decided(
        self, names: list[str], measure: Callable[[int], None], fewest: int, *, at_once: bool = False
    ) -> None:
        """Never fewer replicates than a verdict needs; after that, none that would not end in time."""
        started, longest_s, number = self._clock(), 0.0, 0
        while number < MOST_PROCESSES:
            begun = self._clock()
            if number >= fewest and begun - started + longest_s > self._budget_s:
                self.out_of_time = True
                return
            count = fewest if at_once and number == 0 else 1
            self._observer.replicate(number + 1, fewest, names)
            measure(count)
            number += count
            longest_s = max(longest_s, (self._clock() - begun) / count)
            if self.broken is not None or self.judged is None:
                return
            if self.judged.verdict != "inconclusive":
                return
