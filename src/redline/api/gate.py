"""How one benchmark is measured against its baseline, for `redline gate` and for the pytest plug-in."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec

from redline.analyze.checks import Check, CheckName, check, count_check, finite_check
from redline.analyze.compare import why_broken
from redline.analyze.gate import FEWEST_PROCESSES, FEWEST_STORED, THRESHOLD, GateBasis, GateRow, GateVerdict, middle_s
from redline.api.benchmarks import (
    ACCEPTED,
    LOOK_BACK,
    REJECTED,
    Baseline,
    GateBenchmark,
    checked_benchmark,
    open_baseline,
)
from redline.launch.checkout import Setup
from redline.model.errors import BenchError, SpecError, UsageError
from redline.model.identity import benchmark_of, differences
from redline.model.note import Note, note
from redline.model.protocol import Profile as ProfileRequest
from redline.model.record import RunRecord
from redline.model.spec import RunSpec
from redline.model.spec_table import layered
from redline.search.gate import Clock, GateRun
from redline.verbs.capture import profile_spec
from redline.verbs.workspace import Workspace, measure_specs, one_spec, use

BUDGET_S = 900.0
"""Seconds for all benchmarks together."""
PROFILED_STEPS = 8
"""Steps of the profile that counts kernels: more than operators are called once per profile, on a CPU."""


def against_history(
    model: Any,
    inputs: Any | None = None,
    *,
    name: str,
    threshold: float = THRESHOLD,
    fail_on: Sequence[CheckName] = (),
    recipe: str = "baseline",
    baseline: str = "history",
    budget_s: float = BUDGET_S,
    accept: bool = False,
    workspace: Workspace | None = None,
    **settings: Any,
) -> GateRow:
    """Measures a live module or function against stored records of the same name; without any, measures it for the next time.

    `accept`: whatever comes out is what later runs are compared with.
    """
    with use(workspace) as opened, ExitStack() as stack:
        table = layered({"effort": "quick"}, settings)
        spec, working = one_spec(opened, "a benchmark", model, inputs, recipes=recipe, **table)
        if not isinstance(model, str):
            workload = msgspec.structs.replace(spec.workload, model=f"live:{name}")
            spec = msgspec.structs.replace(spec, workload=workload)
        benchmark = checked_benchmark(GateBenchmark(name=name, spec=spec, threshold=threshold, fail_on=tuple(fail_on)))
        source = open_baseline(baseline, Setup(), working, stack)
        row = Gate(benchmark, source, working, budget_s, time.monotonic).row()
        if row.verdict == "incomparable" and row.basis == "none":
            row = _first(row, benchmark, measure_specs([spec], working, FEWEST_PROCESSES))
        return remembered(row, source, working, accept=accept)


def _first(row: GateRow, benchmark: GateBenchmark, records: Sequence[RunRecord]) -> GateRow:
    """Says of what was never measured under these conditions whether it runs at all, and gives finite numbers."""
    ids = tuple(record.id for record in records)
    for record in records:
        if record.failure is not None:
            return msgspec.structs.replace(row, verdict="failed", reasons=(why_broken(record),), record_ids=ids)
    checks = (finite_check(records),) if "numerics" in benchmark.fail_on else ()
    done = note("no-baseline", f"nothing to compare with yet: {len(records)} processes were measured for the next time")
    reasons = tuple(done if reason.code == "no-baseline" else reason for reason in row.reasons)
    return msgspec.structs.replace(row, checks=checks, candidate_s=middle_s(records), record_ids=ids, reasons=reasons)


def remembered(row: GateRow, source: Baseline, workspace: Workspace, *, accept: bool = False) -> GateRow:
    """Notes the row in the history where that is the baseline: what did not pass must not become one by being measured."""
    if source.history and workspace.keeps and (accept or row.failed):
        for record_id in row.record_ids[: 1 if accept else None]:
            workspace.history.mark(record_id, "gate", ACCEPTED if accept else REJECTED, at=time.time())
    return row


@dataclass
class Gate:
    """One benchmark before the gate."""

    benchmark: GateBenchmark
    source: Baseline
    workspace: Workspace
    budget_s: float
    clock: Clock
    notes: list[Note] = field(default_factory=list)
    reasons: list[Note] = field(default_factory=list)
    basis: GateBasis = "none"

    def row(self) -> GateRow:
        asked = self.benchmark.spec
        if self.source.checkout is not None and self.source.checkout.python and asked.launch.door == "fork":
            # Both sides go through the same kind of door, and another environment needs a fresh interpreter.
            asked = msgspec.structs.replace(asked, launch=msgspec.structs.replace(asked.launch, door="spawn"))
        try:
            (spec,) = self.workspace.checked([asked])
        except (UsageError, SpecError) as error:
            # What only the other commit can run was broken since; what neither can is a mistake in what was asked.
            if self.source.checkout is None or self._runnable(asked) is None:
                raise
            self.reasons.append(note("not-runnable", f"it cannot be measured any more: {error}"))
            return self._row("failed")
        baseline = self._runnable(spec)
        with self.workspace.lock(spec.device):
            running = gate_run(self.workspace, asked, self.benchmark.threshold, self.budget_s, self.clock)
            if baseline is not None:
                running.interleaved(baseline, spec)
                if running.broken in running.baseline and self.source.checkout is not None:
                    self._not_runnable(why_broken(running.baseline[-1]))
                    running = gate_run(self.workspace, asked, self.benchmark.threshold, self.budget_s, self.clock)
                    baseline = None
            if baseline is None:
                self._against_stored(running, spec)
            elif running.unlike is None:
                self.basis = "interleaved"
            else:
                self.reasons.append(running.unlike)
            kernels = None if running.broken or running.unlike else self._kernels(baseline, spec)
        return self._told(running, kernels)

    def _runnable(self, spec: RunSpec) -> RunSpec | None:
        """The other side as a spec, where it can be measured."""
        recipe = self.benchmark.baseline_recipe or self.source.recipe
        if recipe is not None:
            return self.workspace.checked([msgspec.structs.replace(spec, recipe=recipe)])[0]
        checkout = self.source.checkout
        if checkout is None:
            return None
        if checkout.other_packages:
            names = ", ".join(checkout.other_packages)
            text = f"the two differ in {names}, and both ran in this environment: [environment] gives the other its own"
            self.notes.append(note("other-packages", text))
        moved = self.benchmark.baseline_model or spec.workload.model
        workload = msgspec.structs.replace(spec.workload, model=moved)
        other = msgspec.structs.replace(spec, launch=checkout.launch(spec.launch), workload=workload)
        try:
            return self.workspace.checked([other])[0]
        except (UsageError, SpecError, BenchError) as error:
            self._not_runnable(error)
            return None

    def _not_runnable(self, why: object) -> None:
        text = f"{self.source.told} cannot be measured here ({why}): only stored records of it compare"
        self.notes.append(note("not-runnable", text))

    def _against_stored(self, running: GateRun, spec: RunSpec) -> None:
        records = self.source.stored(spec, self.workspace)
        stored = [record for record in records if record.blocks and not record.failure]
        if not stored:
            text = f"nothing is stored of {spec.workload.model} for {self.source.told}: measure it with 'redline run --replicates 5' there first"
            self.reasons.append(note("no-baseline", text))
            return
        running.against(lambda first: self._comparable(stored, first), spec)
        self.basis = "stored" if running.baseline else "none"

    def _comparable(self, stored: Sequence[RunRecord], first: RunRecord) -> list[RunRecord]:
        """Stored records of the same device and settings as the first process of the candidate."""
        mine = benchmark_of(first)
        alike, reasons = [], dict[str, Note]()
        for record in stored:
            theirs = benchmark_of(record)
            unlike, _ = differences(theirs, [record], mine, [first])
            told = [each for each in unlike if each.about != "model (its structure)"]
            if theirs.recipe != mine.recipe:
                told.append(note("differs", f"recipe: {theirs.recipe} against {mine.recipe}", about="recipe"))
            reasons |= {each.about: each for each in told}
            if not told:
                alike.append(record)
                if unlike:
                    self._note_once(note("other-model", "the model's structure is another than when it was stored"))
        if not alike:
            self.reasons += reasons.values()
        return alike[:LOOK_BACK]

    def _note_once(self, told: Note) -> None:
        if told.code not in {each.code for each in self.notes}:
            self.notes.append(told)

    def _kernels(self, baseline: RunSpec | None, spec: RunSpec) -> Check | None:
        if "kernels" not in self.benchmark.fail_on:
            return None
        if baseline is None:
            text = "kernels are counted only where the baseline can be measured"
            self.notes.append(note("kernels-not-counted", text))
            return count_check("kernels", None, None)
        return count_check("kernels", *(self._kernels_of(side) for side in (baseline, spec)))

    def _kernels_of(self, spec: RunSpec) -> float | None:
        """How many kernels a step launches, from a short profile; on a CPU, which launches none, how many operators it calls."""
        try:
            found = profile_spec(spec, ProfileRequest(path="", active=PROFILED_STEPS), self.workspace).profile
        except BenchError as error:
            self.notes.append(note("no-trace", f"kernels could not be counted: {error}"))
            return None
        if not found.steps_seen:
            return None
        if found.has_device:
            return found.launches.work / found.steps_seen
        self._note_once(note("operators-counted", "a CPU launches no kernels: calls of operators were counted instead"))
        # What is called once, before the first step or after the last, is no part of a step.
        calls = sum(row.calls for row in found.operators if row.source == "operator")
        return float(calls // found.steps_seen)

    def _told(self, running: GateRun, kernels: Check | None) -> GateRow:
        judged, broken = running.judged, running.broken
        verdict: GateVerdict = judged.verdict if judged is not None else "incomparable"
        processes = f"{len(running.candidate)} processes"
        if broken is not None:
            self.reasons.append(why_broken(broken))
            verdict = "failed" if broken in running.candidate else "incomparable"
        elif verdict == "inconclusive" and running.out_of_time:
            text = f"{processes} did not decide it within its share of the time: a larger --budget may"
            self.reasons.append(note("budget", text))
        elif verdict == "inconclusive":
            self.reasons.append(note("spread", f"{processes} differ too much among themselves"))
        if self.basis == "interleaved" and running.in_turns:
            text = "the two did not fit in memory together: measured one after the other"
            self.notes.append(note("in-turns", text))
        if judged is not None and judged.disturbed:
            pairs = f"{judged.disturbed} of {len(running.candidate)} pairs"
            text = f"other processes had the processors during {pairs}: the interval has room for what they took"
            self.notes.append(note("shared-cpu", text))
        if self.basis == "stored" and len(running.baseline) < FEWEST_STORED:
            text = f"only {len(running.baseline)} stored processes: what processes usually differ by is allowed for"
            self.notes.append(note("single-runs", text))
        elif self.basis == "stored":
            text = "the baseline was measured at another time: the interval leaves out drift of the machine since then"
            self.notes.append(note("one-after-the-other", text))
        limits = {name: getattr(self.benchmark, name) for name in ("memory_threshold", "compile_threshold")}
        asked = [] if broken or self.basis == "none" else self.benchmark.fail_on
        checks = [check(name, running.baseline, running.candidate, **limits) for name in asked if name != "kernels"]
        return self._row(verdict, running, (*checks, *([kernels] if kernels else [])))

    def _row(self, verdict: GateVerdict, running: GateRun | None = None, checks: tuple[Check, ...] = ()) -> GateRow:
        baseline, candidate = (running.baseline, running.candidate) if running else ([], [])
        judged = running.judged if running else None
        before_s, now_s = middle_s(baseline), middle_s(candidate)
        if judged is not None and before_s and now_s:
            # The ratio is of processes that ran side by side. Both times are moved as little as they must to be that far apart.
            centre_s, half = math.sqrt(before_s * now_s), math.sqrt(judged.ratio)
            before_s, now_s = centre_s * half, centre_s / half
        return GateRow(
            name=self.benchmark.name,
            verdict=verdict,
            threshold=self.benchmark.threshold,
            basis=self.basis,
            ratio=judged.ratio if judged else None,
            low=judged.low if judged else None,
            high=judged.high if judged else None,
            confidence=judged.confidence if judged else None,
            baseline_s=before_s,
            candidate_s=now_s,
            baseline_processes=len(baseline),
            candidate_processes=len(candidate),
            checks=checks,
            reasons=tuple(self.reasons),
            notes=tuple(self.notes),
            record_ids=tuple(record.id for record in candidate),
        )


def gate_run(workspace: Workspace, spec: RunSpec, threshold: float, budget_s: float, clock: Clock) -> GateRun:
    return GateRun(
        workspace.door(spec.launch),
        workspace.journal,
        workspace.observer,
        threshold=threshold,
        budget_s=budget_s,
        seed=spec.seed,
        clock=clock,
    )
