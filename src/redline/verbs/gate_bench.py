"""Reads what `redline gate` is asked, the benchmarks of a file and a baseline, and measures one against the other.

The pytest plug-in measures by the same functions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec

from redline.analyze.checks import (
    COMPILE_THRESHOLD,
    MEMORY_THRESHOLD,
    Check,
    CheckName,
    check,
    count_check,
    finite_check,
)
from redline.analyze.compare import why_broken
from redline.analyze.gate import FEWEST_PROCESSES, FEWEST_STORED, THRESHOLD, GateBasis, GateRow, GateVerdict, middle_s
from redline.launch.checkout import Checkout, Setup, checked_out, resolve_commit
from redline.model.errors import BenchError, SpecError, UsageError
from redline.model.fields import Frozen, require_choice, shown_number
from redline.model.files import is_file
from redline.model.identity import benchmark_of, differences
from redline.model.note import Note, note
from redline.model.protocol import Profile as ProfileRequest
from redline.model.record import RunRecord
from redline.model.spec import Recipe, RunSpec
from redline.model.spec_table import layered, read_toml, refuse_too_many, specs_from_table
from redline.search.gate import Clock, GateRun
from redline.store.archive import read_exported
from redline.store.history import history_in
from redline.verbs.capture import profile_spec
from redline.verbs.workspace import Workspace, measure_specs, one_spec, use

BUDGET_S = 900.0
"""Seconds for all benchmarks together."""
LONGEST_BUDGET_S = 7 * 86400.0
PROFILED_STEPS = 8
"""Steps of the profile that counts kernels: more than operators are called once per profile, on a CPU."""
LOOK_BACK = 200
"""How many of the latest stored records of a benchmark are its baseline."""
MOST = {"threshold": 1, "memory_threshold": 10, "compile_threshold": 10}
"""Each threshold must be below this."""
TEXTS = {"name", "baseline_recipe", "baseline_model"}
LONGEST_NAME = 200
REJECTED = "rejected"
"""A mark on records that did not pass: they are no baseline, or the second run of the same code would pass."""
ACCEPTED = "accepted"
"""A mark on the first record of a run: nothing older is a baseline any more."""


# What is asked


def check_budget(budget_s: float) -> None:
    """Raises for a budget of a gate, or of all gates of a bisection, that makes no sense."""
    if not 1 <= budget_s <= LONGEST_BUDGET_S:
        raise SpecError(f"budget must be between 1 and {LONGEST_BUDGET_S:g} seconds, got {budget_s:g}")


class GateBenchmark(Frozen):
    """One thing that must not get slower."""

    name: str
    spec: RunSpec
    threshold: float = THRESHOLD
    """The relative slowdown that must be caught."""
    fail_on: tuple[CheckName, ...] = ()
    memory_threshold: float = MEMORY_THRESHOLD
    compile_threshold: float = COMPILE_THRESHOLD
    baseline_recipe: Recipe | None = None
    """Measured against this recipe instead of another commit."""
    baseline_model: str | None = None
    """The model has this name at the other commit, where its file or factory has moved since."""


def load_benchmarks(
    path: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    threshold: float | None = None,
    fail_on: Sequence[str] = (),
    trust: bool = False,
) -> tuple[list[GateBenchmark], Setup]:
    """The benchmarks of a file as `redline run --file` reads it, with a name, thresholds and checks for each."""
    document = read_toml(Path(path), trust=trust)
    environment = _table(document.pop("environment", {}), Setup, f"{path}: environment")
    runs = document.pop("run", None)
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise SpecError(f"{path}: write each benchmark as a [[run]] table")
    try:
        refuse_too_many(len(runs))
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    given = {} if threshold is None else {"threshold": threshold}
    found = []
    for number, run in enumerate(runs, 1):
        where = str(path) if len(runs) == 1 else f"{path}: [[run]] {number}"
        for each in _benchmarks(layered({"effort": "quick"}, document, run), overrides, where):
            asked = msgspec.structs.replace(each, **given, fail_on=(*each.fail_on, *fail_on))
            found.append(checked_benchmark(asked))
    names: set[str] = set()
    for benchmark in found:
        if benchmark.name in names:
            raise SpecError(
                f"{path}: two benchmarks are called {benchmark.name!r}: give each [[run]] a name of its own"
            )
        names.add(benchmark.name)
    return found, environment


def _benchmarks(table: Mapping[str, Any], overrides: Mapping[str, Any] | None, where: str) -> Iterator[GateBenchmark]:
    own = {name: table[name] for name in GateBenchmark.__struct_fields__ if name in table and name != "spec"}
    rest = {name: value for name, value in table.items() if name not in own}
    try:
        for name in TEXTS & own.keys():
            _check_text(name, own[name])
        specs = specs_from_table(layered(rest, overrides or {}))
        if "baseline_recipe" in own:
            own["baseline_recipe"] = Recipe.parse(own["baseline_recipe"])
        name, checks = own.pop("name", ""), own.pop("fail_on", ())
        checks = checks if isinstance(checks, list) else [checks] if checks != () else []
        for spec in specs:
            shown = name if name and len(specs) == 1 else " ".join(part for part in (name, _name_of(spec)) if part)
            yield checked_benchmark(GateBenchmark(**own, name=shown, spec=spec, fail_on=tuple(checks)))
    except SpecError as error:  # of a field, which does not know the file
        raise SpecError(f"{where}: {error}") from None


def _check_text(name: str, value: object) -> None:
    """Raise a `SpecError` for what is no text, or a name that no report could show."""
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value.strip()) <= LONGEST_NAME:
        shown = repr(value) if len(repr(value)) <= LONGEST_NAME else f"{repr(value)[:40]}…"
        raise SpecError(f"{name} must be a text of 1 to {LONGEST_NAME} printable characters, got {shown}")


def _name_of(spec: RunSpec) -> str:
    workload = spec.workload
    parts = (workload.model, workload.task, str(spec.recipe), f"batch {workload.batch}" if workload.batch else "")
    return " ".join(part for part in parts if part)


def _table(table: Any, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise SpecError(f"{where}: {error}") from None


def checked_benchmark(benchmark: GateBenchmark) -> GateBenchmark:
    """With its checks in order; a mistake in it is raised."""
    for name, most in MOST.items():
        value = getattr(benchmark, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < most:
            got = shown_number(value) if is_number else f"{value!r:.{LONGEST_NAME}}"
            raise SpecError(f"{name} must be above 0 and below {most}, got {got}: 0.05 is 5 %")
    for name in benchmark.fail_on:
        require_choice("fail_on", name, CheckName)
    in_order = tuple(name for name in get_args(CheckName) if name in benchmark.fail_on)
    return msgspec.structs.replace(benchmark, fail_on=in_order)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The other side comes from a checkout that can be measured, from stored records, or is another recipe."""

    name: str
    checkout: Checkout | None = None
    records: Sequence[RunRecord] | None = None
    history: bool = False
    tag: str | None = None
    recipe: Recipe | None = None

    def stored(self, spec: RunSpec, workspace: Workspace) -> list[RunRecord]:
        """Returns what is kept of this benchmark, whatever its settings; of a commit, what was measured at it."""
        if self.records is not None:
            return list(self.records)
        with workspace.reading() as history:
            ids = set(history.tagged(self.tag)) if self.tag else None
            decided = {(mark.record_id, mark.words) for mark in history.marks() if mark.kind == "gate"}
            found = history.find(model=spec.workload.model, task=spec.workload.task, status="done", limit=LOOK_BACK * 5)
        if ids is not None:
            return [record for record in found if record.id in ids]
        if self.checkout is not None:
            return [record for record in found if _measured_at(record, self.checkout.commit)]
        since = max((record.created_at for record in found if (record.id, ACCEPTED) in decided), default=0.0)
        return [record for record in found if record.created_at >= since and (record.id, REJECTED) not in decided]


def _measured_at(record: RunRecord, commit: str) -> bool:
    environment = record.prepared.environment if record.prepared else None
    return environment is not None and environment.git_commit == commit and not environment.git_dirty


def open_baseline(word: str, environment: Setup, workspace: Workspace, stack: ExitStack) -> Baseline:
    kind, _, name = word.partition(":")
    if word == "history":
        return Baseline(name="the history", history=True)
    if kind == "recipe" and name:
        return Baseline(name=f"recipe {name}", recipe=Recipe.parse(name))
    if kind == "tag" and name:
        with workspace.reading() as history:
            if not history.tagged(name):
                raise UsageError(
                    f"no record in {history.location} has the tag {name!r}: 'redline history tag ID {name}' sets it"
                )
        return Baseline(name=f"records tagged {name}", tag=name)
    if is_file(word):
        return Baseline(name=word, records=read_records(Path(word)))
    commit = resolve_commit(word)
    shown = word if commit.startswith(word) else f"{word} ({commit[:12]})"
    return Baseline(name=shown, checkout=stack.enter_context(checked_out(word, environment)))


def read_records(path: Path) -> list[RunRecord]:
    """Returns the records of an exported document, a back-up or another history."""
    with history_in(path) as history:
        return read_exported(path) if history is None else history.find(status="done")


# Measuring it


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
        text = f"{self.source.name} cannot be measured here ({why}): only stored records of it compare"
        self.notes.append(note("not-runnable", text))

    def _against_stored(self, running: GateRun, spec: RunSpec) -> None:
        records = self.source.stored(spec, self.workspace)
        stored = [record for record in records if record.blocks and not record.failure]
        if not stored:
            text = f"nothing is stored of {spec.workload.model} for {self.source.name}: measure it with 'redline run --replicates 5' there first"
            self.reasons.append(note("no-baseline", text))
            return
        running.against(lambda first: self._comparable(stored, first), spec)
        self.basis = "stored" if running.baseline else "none"

    def _comparable(self, stored: Sequence[RunRecord], first: RunRecord) -> list[RunRecord]:
        """Returns stored records of the same device and settings as the first process of the candidate."""
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
        """Returns how many kernels a step launches, from a short profile; on a CPU, which launches none, how many operators it calls."""
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
