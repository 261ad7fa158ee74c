"""Worlds made from searches that ran on a real card: their times, what preparing took, how far processes lay apart.

A recipe that was recorded takes the time that was recorded. One that was not takes what its switches did in the others: a
regression on the recorded times that begins with the tuner's own expectations. A draw varies it within what the records leave
open. What was given up is taken to need twice the seconds it had. Recipes with a switch that was removed since are left out.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import fmean, median, stdev

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from redline.bench.device import open_device
from redline.bench.recipe.compose import switch_choices
from redline.model.protocol import SwitchChoice
from redline.model.record import RunRecord
from redline.model.work import Facts
from redline.search.tune.record import KeptSearches, TuneRecord
from redline.search.tune.space import BY_BLOCK, expectation
from redline.testing.landscape import Landscape
from redline.verbs.workspace import Workspace
from worlds.recipes import RecipeTruth, Switches, switches_of

LONGER = 2.0
"""What preparing a recipe takes over what it had taken when it was given up."""
BESIDE = 1.3
"""What a process took to compile beside the others of a search, over what it takes alone."""
TIMED_S = 2.0
"""Of a trial, for timing it."""
WARM_SHARE = 0.25
"""Of what compiling takes, where nothing was recorded that found it in the cache."""
OBSERVED_SD = 0.02
LEAST_SPREAD, MOST_SPREAD = 0.002, 0.08
SMALLEST_VARIANCE = 1e-9
"""Beside rounding, which may make a variance negative."""
OLDER = (
    *("fp16", "bf16", "amp", "amp-bf16", "tf32", "channels-last", "fold-bn"),
    *("compile", "compile:reduce-overhead", "compile:freeze", BY_BLOCK, "compile:max-autotune", "torchscript"),
    *("fused-optimizer", "graphs", "cudnn-benchmark"),
    *("sdpa:flash", "sdpa:efficient", "sdpa:cudnn", "sdpa:math"),
)
"""Every recorded search could choose these, where it did not refuse them."""


@dataclass
class RecordedTruth(RecipeTruth):
    """What was recorded holds; the rest is estimated."""

    recorded_s: dict[Switches, float] = field(default_factory=dict)
    synchronises: bool = False
    offset_sigma: float = LEAST_SPREAD
    noise_sigma: float = LEAST_SPREAD

    def step_s(self, switches: Switches) -> float:
        recorded_s = self.recorded_s.get(switches)
        return super().step_s(switches) if recorded_s is None else recorded_s

    def landscape(self, chance: Random) -> Landscape:
        return replace(
            super().landscape(chance),
            offset_sigma=self.offset_sigma,
            noise_sigma=self.noise_sigma,
            step_synchronises=self.synchronises,
            issue_share=lambda spec: self._issue_share(switches_of(spec)),
        )

    def _issue_share(self, switches: Switches) -> float:
        if self.synchronises:
            return 0.98  # issuing includes waiting for the device
        return min(self.host_time_s(switches) / self.step_s(switches), 0.98)


@dataclass(frozen=True)
class Recorded:
    """One search as it was recorded."""

    name: str
    tune: TuneRecord
    records: Mapping[str, RunRecord]

    @property
    def facts(self) -> Facts:
        assert self.tune.facts is not None
        return self.tune.facts

    @property
    def before_s(self) -> float:
        """Until the search began: starting up and the facts, which take about what the baseline's trial takes."""
        return min(self.tune.spent.other, self.tune.trials[0].cost_s)  # planning is in the former too

    def truth(self, chance: Random | None = None) -> RecordedTruth:
        """`chance`: draw what the records leave open, instead of taking the middle of it."""
        task, facts = self.tune.tune.spec.workload.task, self.facts
        choices, times = self._choices(), self._times()
        device, host = _fitted(choices, self._observed(), task, chance)
        baseline_s = times[frozenset()]
        host_s = facts.host_s or baseline_s
        plain_s = min(trial.cost_s for trial in self.tune.trials)
        whole_s, block_s = self._compile_s(whole=True, plain_s=plain_s), self._compile_s(whole=False, plain_s=plain_s)
        return RecordedTruth(
            choices=choices,
            device_s=facts.device_s or 0.5 * baseline_s,
            host_s=host_s,
            on_cpu=False,
            effects=device,
            host_effects=host,
            pairs={},
            quirk=lambda _: 0.0,
            failing=(),
            wrong=(),
            cold_compile_s=whole_s,
            warm_compile_s=self._warm_s(whole_s),
            compile_shares={BY_BLOCK: block_s / whole_s, "torchscript": 3.0 / whole_s},
            build_s=max(plain_s - TIMED_S, 0.5),
            first_use_s={"cudnn-benchmark": 3.0},
            task=task,
            recorded_s=times,
            synchronises=bool(facts.synchronises),
            offset_sigma=self._spread(),
        )

    def _choices(self) -> tuple[SwitchChoice, ...]:
        """Today's switches as a bench offers them; those that are newer than some records, where the search tried them."""
        refused = {each.switch for each in self.tune.refused}
        known = {*OLDER, *(switch for recipe in self._times() for switch in recipe)} - refused
        return tuple(msgspec.structs.replace(each, refusal=None) for each in self._offered() if each.switch in known)

    def _offered(self) -> list[SwitchChoice]:
        """All switches of today."""
        return switch_choices(torch.nn.Identity(), open_device("cpu"), self.tune.tune.spec.workload.task)

    def _records_of(self, switches: Switches) -> list[RunRecord]:
        return [each for each in self.records.values() if switches_of(each.spec) == switches and each.blocks]

    def _times(self) -> dict[Switches, float]:
        """The middle of the processes of each recipe."""
        recorded = {switches_of(each.spec) for each in self.records.values() if each.blocks}
        names = {each.switch for each in self._offered()}
        recipes = [recipe for recipe in recorded if recipe <= names]
        return {recipe: median(map(step_s_of, self._records_of(recipe))) for recipe in recipes}

    def _observed(self) -> list[tuple[Switches, float, float]]:
        """Each recipe with its time over the device's in the baseline, and the time to issue it over the host's, as logarithms."""
        times, facts = self._times(), self.facts
        device_s, host_s = facts.device_s or 0.5 * times[frozenset()], facts.host_s or times[frozenset()]
        found = []
        for recipe, step_s in times.items():
            issued_s = [median(b.issue_s) for each in self._records_of(recipe) for b in each.blocks if b.issue_s]
            issue_s = min(median(issued_s), step_s) if issued_s and not facts.synchronises else math.nan
            found.append((recipe, math.log(step_s / device_s), math.log(issue_s / host_s)))
        return found

    def _compile_s(self, *, whole: bool, plain_s: float) -> float:
        """What compiling the model, or its blocks, took alone; where it was given up, `LONGER` times what it had taken."""
        took = [trial.cost_s - plain_s for trial in self.tune.trials if _compiles(trial.recipe, whole=whole)]
        late = [LONGER * each.seconds / BESIDE for each in self.tune.given_up if _compiles(each.recipe, whole=whole)]
        usual_s = 30.0 if whole else 12.0
        return max(max(took, default=0.0), max(late, default=0.0)) or usual_s

    def _warm_s(self, cold_s: float) -> float:
        starts = [each.prepared.cold_start for each in self.records.values() if each.prepared is not None]
        shares = [
            (each.first_call_s or 0.0) / BESIDE / cold_s
            for each in starts
            if each.compile_cache == "warm" and each.first_call_s
        ]
        return cold_s * (max(shares) if shares else WARM_SHARE)

    def _spread(self) -> float:
        """Of the times of processes of one recipe."""
        several = [list(map(step_s_of, self._records_of(recipe))) for recipe in self._times()]
        spreads = [stdev(map(math.log, each)) for each in several if len(each) > 1]
        return min(max(fmean(spreads), LEAST_SPREAD), MOST_SPREAD) if spreads else LEAST_SPREAD


def recorded_searches(path: Path) -> list[Recorded]:
    """The last search of each workload in an archive of records."""
    with tempfile.TemporaryDirectory() as folder, Workspace(history=Path(folder) / "history.db") as workspace:
        workspace.history.add_file(path)
        history, found = workspace.history, dict[str, Recorded]()
        for tune in KeptSearches(history.tunes()).newest_first():
            name = f"{tune.tune.spec.workload.model.rpartition(':')[2]} {tune.tune.spec.workload.task}"
            if name not in found and tune.facts is not None:
                found[name] = Recorded(name, tune, history.load_many(tune.record_ids))
    return list(found.values())


def step_s_of(record: RunRecord) -> float:
    return median(sample for block in record.blocks if block.kind == "throughput" for sample in block.samples)


def _compiles(recipe: str, *, whole: bool) -> bool:
    compilers = [switch for switch in recipe.split("+") if switch.partition(":")[0] == "compile"]
    return any((switch != BY_BLOCK) == whole for switch in compilers)


def _fitted(
    choices: Sequence[SwitchChoice],
    observed: Sequence[tuple[Switches, float, float]],
    task: str,
    chance: Random | None,
) -> tuple[dict[str, float], dict[str, float]]:
    """What each switch does to the time of the device and to the time of the host."""
    names = [choice.switch for choice in choices]
    expected = [expectation(choice, on_cpu=False, task="train" if task == "train" else "infer") for choice in choices]
    host_bound = [math.isfinite(issue) and issue > device - 0.1 for _, device, issue in observed]
    rows = [[float(name in recipe) for name in names] for recipe, _, _ in observed]
    device = _posterior(
        [row for row, is_host in zip(rows, host_bound, strict=True) if not is_host],
        [each for (_, each, _), is_host in zip(observed, host_bound, strict=True) if not is_host],
        [each.device for each in expected],
        [each.device_sd for each in expected],
        chance,
    )
    host = _posterior(
        [row for row, (_, _, issue) in zip(rows, observed, strict=True) if math.isfinite(issue)],
        [issue for _, _, issue in observed if math.isfinite(issue)],
        [each.host for each in expected],
        [each.host_sd for each in expected],
        chance,
    )
    return dict(zip(names, device, strict=True)), dict(zip(names, host, strict=True))


def _posterior(
    rows: Sequence[Sequence[float]],
    seen: Sequence[float],
    means: Sequence[float],
    sds: Sequence[float],
    chance: Random | None,
) -> list[float]:
    """Of effects that add up: their middle, or a draw."""
    mean, covariance = np.array(means), np.diag(np.square(sds))
    if rows:
        design: NDArray[np.float64] = np.array(rows)
        noise = OBSERVED_SD**2 * np.eye(len(rows))
        gain = covariance @ design.T @ np.linalg.inv(design @ covariance @ design.T + noise)
        mean = mean + gain @ (np.array(seen) - design @ mean)
        covariance = covariance - gain @ design @ covariance
    if chance is None:
        return [float(each) for each in mean]
    # Not by eigenvectors: of equal eigenvalues these are arbitrary, and every run would draw others.
    triangle = np.linalg.cholesky(covariance + SMALLEST_VARIANCE * np.eye(len(mean)))
    return [float(each) for each in mean + triangle @ np.array([chance.gauss(0.0, 1.0) for _ in mean])]
