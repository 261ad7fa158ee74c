"""`redline.gate`: is this checkout slower than a baseline? For CI."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich.console import RenderableType

from redline.analyze.checks import Check, CheckName, check, count_check, finite_check
from redline.analyze.compare import why_broken
from redline.analyze.gate import (
    FEWEST_PROCESSES,
    FEWEST_STORED,
    THRESHOLD,
    GateBasis,
    GateRow,
    GateVerdict,
    middle_s,
    sessions_of,
)
from redline.api.benchmarks import (
    ACCEPTED,
    LOOK_BACK,
    REJECTED,
    Baseline,
    GateBenchmark,
    check_budget,
    checked_benchmark,
    load_benchmarks,
    open_baseline,
)
from redline.api.profile import profile_spec
from redline.api.settings import one_spec
from redline.api.workspace import Workspace, measure_specs, use
from redline.launch.checkout import Setup
from redline.model.errors import BenchError, SpecError, UsageError
from redline.model.identity import benchmark_of, differences
from redline.model.note import Note, note
from redline.model.protocol import Profile as ProfileRequest
from redline.model.record import RunRecord
from redline.model.spec import RunSpec
from redline.model.spec_table import layered
from redline.search.gate import Clock, GateRun
from redline.show.export import JsonDocument
from redline.show.gate import gate_json, gate_junit, gate_markdown, gate_report
from redline.show.notebook import Bars, Shown

BUDGET_S = 900.0
"""For all benchmarks together."""
PROFILED_STEPS = 8
"""To count kernels: more than are called once per profile, on a CPU."""


class GateResult(Shown, Sequence[GateRow]):
    """One row per benchmark."""

    def __init__(self, baseline: str, rows: Sequence[GateRow]) -> None:
        self.baseline = baseline
        """What everything was set against, in words."""
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    @property
    def failed(self) -> bool:
        """Something is slower, broken, or failed a check."""
        return any(row.failed for row in self.rows)

    @property
    def undecided(self) -> bool:
        return any(row.undecided for row in self.rows)

    def report(self) -> RenderableType:
        return gate_report(self.rows, self.baseline)

    def frame_rows(self) -> Sequence[Any]:
        return self.rows

    def bars(self) -> Bars | None:
        bars = [(row.name, row.ratio, row.low, row.high) for row in self.rows if row.ratio is not None]
        return Bars(f"against {self.baseline}", "time of the baseline over time now", bars)

    def to_json(self) -> JsonDocument:
        return gate_json(self.rows, self.baseline, failed=self.failed)

    def to_markdown(self) -> str:
        """For a pull request."""
        return gate_markdown(self.rows, self.baseline)

    def to_junit(self, *, undecided_ok: bool = False) -> str:
        """JUnit's XML: one test case per benchmark."""
        return gate_junit(self.rows, self.baseline, undecided_ok=undecided_ok)


def gate(
    file: str | Path,
    baseline: str,
    *,
    threshold: float | None = None,
    fail_on: Sequence[str] = (),
    budget_s: float = BUDGET_S,
    trust: bool = False,
    workspace: Workspace | None = None,
    clock: Clock = time.monotonic,
    **settings: Any,
) -> GateResult:
    """Measure the benchmarks of a TOML file against a baseline, each until it is decided or its time is up.

    `baseline` is a git ref (checked out beside this one and measured interleaved with it), a file of records
    (`redline history export --raw`, or a history), `history`, `tag:NAME` or `recipe:RECIPE`.
    """
    check_budget(budget_s)
    benchmarks, environment = load_benchmarks(file, settings, threshold=threshold, fail_on=fail_on, trust=trust)
    with use(workspace) as opened, ExitStack() as stack:
        source = open_baseline(baseline, environment, opened, stack)
        rows = []
        deadline = clock() + budget_s
        for number, benchmark in enumerate(benchmarks):
            share_s = max((deadline - clock()) / (len(benchmarks) - number), 0.0)
            rows.append(_remembered(_Gate(benchmark, source, opened, share_s, clock).row(), source, opened))
        return GateResult(source.told, rows)


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
    """Measure a live module or function against stored records of the same name; without any, measure it for the next time.

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
        row = _Gate(benchmark, source, working, budget_s, time.monotonic).row()
        if row.verdict == "incomparable" and row.basis == "none":
            row = _first(row, benchmark, measure_specs([spec], working, FEWEST_PROCESSES))
        return _remembered(row, source, working, accept=accept)


def _first(row: GateRow, benchmark: GateBenchmark, records: Sequence[RunRecord]) -> GateRow:
    """Of what was never measured under these conditions: whether it runs at all, and gives finite numbers."""
    ids = tuple(record.id for record in records)
    for record in records:
        if record.failure is not None:
            return msgspec.structs.replace(row, verdict="failed", reasons=(why_broken(record),), record_ids=ids)
    checks = (finite_check(records),) if "numerics" in benchmark.fail_on else ()
    done = note("no-baseline", f"nothing to compare with yet: {len(records)} processes were measured for the next time")
    reasons = tuple(done if each.code == "no-baseline" else each for each in row.reasons)
    return msgspec.structs.replace(row, checks=checks, candidate_s=middle_s(records), record_ids=ids, reasons=reasons)


def _remembered(row: GateRow, source: Baseline, workspace: Workspace, *, accept: bool = False) -> GateRow:
    """The row, noted in the history where that is the baseline: what did not pass must not become one by being measured."""
    if source.history and workspace.keeps:
        for record_id in row.record_ids[: 1 if accept else None] if accept or row.failed else ():
            workspace.history.mark(record_id, "gate", ACCEPTED if accept else REJECTED, at=time.time())
    return row


class _Gate:
    """One benchmark before the gate."""

    def __init__(
        self, benchmark: GateBenchmark, source: Baseline, workspace: Workspace, budget_s: float, clock: Clock
    ) -> None:
        self.benchmark = benchmark
        self._source = source
        self._workspace = workspace
        self._budget_s = budget_s
        self._clock = clock
        self._notes: list[Note] = []
        self._reasons: list[Note] = []
        self._basis: GateBasis = "none"

    def row(self) -> GateRow:
        asked = self._launched(self.benchmark.spec)
        try:
            (spec,) = self._workspace.checked([asked])
        except (UsageError, SpecError) as error:
            # What only the other commit can run was broken since; what neither can is a mistake in what was asked.
            if self._source.checkout is None or self._runnable(asked) is None:
                raise
            return self._unmeasured("failed", note("not-runnable", f"it cannot be measured any more: {error}"))
        baseline = self._runnable(spec)
        with self._workspace.lock(spec.device):
            running = self._run()
            if baseline is not None:
                running.interleaved(baseline, spec)
                broken = running.broken
                if broken is not None and broken in running.baseline and self._source.checkout is not None:
                    self._notes.append(self._not_runnable(why_broken(broken)))
                    running, baseline = self._run(), None
            if baseline is None:
                self._against_stored(running, spec)
            elif running.unlike is None:
                self._basis = "interleaved"
            else:
                self._reasons.append(running.unlike)
            kernels = None if running.broken or running.unlike else self._kernels(baseline, spec)
        return self._told(running, kernels)

    def _run(self) -> GateRun:
        launch = self._launched(self.benchmark.spec).launch
        return GateRun(
            self._workspace.door(launch),
            self._workspace.journal,
            self._workspace.observer,
            threshold=self.benchmark.threshold,
            budget_s=self._budget_s,
            seed=self.benchmark.spec.seed,
            clock=self._clock,
        )

    def _launched(self, spec: RunSpec) -> RunSpec:
        """Both sides through the same kind of door: another environment needs a fresh interpreter."""
        if self._source.checkout is None or not self._source.checkout.python or spec.launch.door != "fork":
            return spec
        return msgspec.structs.replace(spec, launch=msgspec.structs.replace(spec.launch, door="spawn"))

    def _runnable(self, spec: RunSpec) -> RunSpec | None:
        """The other side as a spec, where it can be measured."""
        recipe = self.benchmark.baseline_recipe or self._source.recipe
        if recipe is not None:
            return self._workspace.checked([msgspec.structs.replace(spec, recipe=recipe)])[0]
        checkout = self._source.checkout
        if checkout is None:
            return None
        if checkout.other_packages:
            names = ", ".join(checkout.other_packages)
            text = f"the two differ in {names}, and both ran in this environment: [environment] gives the other its own"
            self._notes.append(note("other-packages", text))
        moved = self.benchmark.baseline_model or spec.workload.model
        other = msgspec.structs.replace(
            spec,
            launch=checkout.launch(spec.launch),
            workload=msgspec.structs.replace(spec.workload, model=moved),
        )
        try:
            return self._workspace.checked([other])[0]
        except (UsageError, SpecError, BenchError) as error:
            self._notes.append(self._not_runnable(error))
            return None

    def _not_runnable(self, why: object) -> Note:
        return note(
            "not-runnable", f"{self._source.told} cannot be measured here ({why}): only stored records of it compare"
        )

    def _against_stored(self, running: GateRun, spec: RunSpec) -> None:
        stored = [
            record for record in self._source.stored(spec, self._workspace) if record.blocks and not record.failure
        ]
        if not stored:
            text = f"nothing is stored of {spec.workload.model} for {self._source.told}"
            self._reasons.append(
                note("no-baseline", f"{text}: measure it with 'redline run --replicates 5' there first")
            )
            return
        running.against(lambda first: self._comparable(stored, first), spec)
        self._basis = "stored" if running.baseline else "none"

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
            self._reasons += reasons.values()
        return alike[:LOOK_BACK]

    def _note_once(self, told: Note) -> None:
        if told.code not in {each.code for each in self._notes}:
            self._notes.append(told)

    def _kernels(self, baseline: RunSpec | None, spec: RunSpec) -> Check | None:
        if "kernels" not in self.benchmark.fail_on:
            return None
        if baseline is None:
            text = "kernels are counted only where the baseline can be measured"
            self._notes.append(note("kernels-not-counted", text))
            return count_check("kernels", None, None)
        return count_check("kernels", *(self._kernels_of(each) for each in (baseline, spec)))

    def _kernels_of(self, spec: RunSpec) -> float | None:
        """How many kernels a step launches, from a short profile; on a CPU, which launches none, how many operators it calls."""
        try:
            found = profile_spec(spec, ProfileRequest(path="", active=PROFILED_STEPS), self._workspace).profile
        except BenchError as error:
            self._notes.append(note("no-trace", f"kernels could not be counted: {error}"))
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
        if broken is not None:
            self._reasons.append(why_broken(broken))
            verdict = "failed" if broken in running.candidate else "incomparable"
        elif verdict == "inconclusive" and running.out_of_time:
            text = "did not decide it within its share of the time: a larger --budget may"
            self._reasons.append(note("budget", f"{len(running.candidate)} processes {text}"))
        elif verdict == "inconclusive":
            self._reasons.append(note("spread", f"{len(running.candidate)} processes differ too much among themselves"))
        self._doubt(running)
        asked = [name for name in self.benchmark.fail_on if name != "kernels"]
        checks = [] if broken or self._basis == "none" else [self._check(name, running) for name in asked]
        return GateRow(
            name=self.benchmark.name,
            verdict=verdict,
            ratio=judged.ratio if judged else None,
            low=judged.low if judged else None,
            high=judged.high if judged else None,
            confidence=judged.confidence if judged else None,
            threshold=self.benchmark.threshold,
            basis=self._basis,
            change=1 / judged.ratio - 1 if judged else None,
            baseline_s=middle_s(running.baseline),
            candidate_s=middle_s(running.candidate),
            baseline_processes=len(running.baseline),
            candidate_processes=len(running.candidate),
            checks=(*checks, *([kernels] if kernels else [])),
            reasons=tuple(self._reasons),
            notes=tuple(self._notes),
            record_ids=tuple(record.id for record in running.candidate),
        )

    def _unmeasured(self, verdict: GateVerdict, why: Note) -> GateRow:
        return GateRow(
            name=self.benchmark.name,
            verdict=verdict,
            ratio=None,
            low=None,
            high=None,
            threshold=self.benchmark.threshold,
            basis="none",
            reasons=(why,),
        )

    def _doubt(self, running: GateRun) -> None:
        if self._basis == "interleaved" and running.in_turns:
            self._notes.append(note("in-turns", "the two did not fit in memory together: measured one after the other"))
        if running.judged is not None and running.judged.disturbed:
            pairs = f"{running.judged.disturbed} of {len(running.candidate)} pairs"
            text = f"other processes had the processors during {pairs}: the interval has room for what they took"
            self._notes.append(note("shared-cpu", text))
        if self._basis != "stored":
            return
        if len(running.baseline) < FEWEST_STORED:
            text = f"only {len(running.baseline)} stored processes: what processes usually differ by is allowed for"
            self._notes.append(note("single-runs", text))
        elif len(sessions_of(running.baseline)) < FEWEST_STORED:
            text = "the baseline was measured at another time: the interval leaves out drift of the machine since then"
            self._notes.append(note("one-after-the-other", text))

    def _check(self, name: CheckName, running: GateRun) -> Check:
        limits = {each: getattr(self.benchmark, each) for each in ("memory_threshold", "compile_threshold")}
        return check(name, running.baseline, running.candidate, **limits)
