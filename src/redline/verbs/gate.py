"""`redline gate`: is this checkout slower than a baseline? And `--bisect`: since which commit?

Each benchmark of the file goes through `gated`, which measures it against its baseline and makes a row. The commits of a bisection do the
same, with the good commit as their baseline, and so does the fixture of the pytest plug-in (`against_history`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from xml.etree import ElementTree

import msgspec

from redline.analyze.checks import COMPILE_THRESHOLD, MEMORY_THRESHOLD, Check, CheckName, check, finite_check
from redline.analyze.gate import (
    FEWEST_PROCESSES,
    FEWEST_STORED,
    THRESHOLD,
    GateBasis,
    GateRow,
    GateVerdict,
    Judged,
    middle_s,
)
from redline.launch.checkout import Checkout, Setup, checked_out, commits_between, resolve_commit, subject_of
from redline.model.errors import BenchError, Exit, SpecError, UsageError
from redline.model.fields import Frozen, require_choice
from redline.model.files import is_file
from redline.model.identity import benchmark_of, differences
from redline.model.metrics import Figure, Headline, Row, Table
from redline.model.note import Note, note
from redline.model.record import RunRecord
from redline.model.settings import OUTPUT, WHAT, check_settings, setting
from redline.model.spec import Recipe, RunSpec
from redline.model.spec_table import convert_table, layered, read_runs, refuse_too_many, specs_from_table
from redline.search.gate import Clock, GateRun
from redline.show.folder import check_file, write_text
from redline.show.result import Result
from redline.show.terminal import one_line
from redline.store.history import history_in
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, one_spec, use

BUDGET_S, BISECT_BUDGET_S = 900.0, 3600.0
"""A gate, and a search for a commit, take at most so long unless another budget is given."""
LOOK_BACK = 200
"""This many of the latest stored records of a benchmark are its baseline."""
LONGEST_NAME = 200
"""The name of a benchmark has at most so many characters."""
STRUCTURE = "model (its structure)"
REJECTED, ACCEPTED = "rejected", "accepted"
"""Marks on records. Those that did not pass are no baseline, or the second run of the same code would pass; and once one is accepted,
nothing older is a baseline any more."""

_THRESHOLD = setting("The slowdown that must be caught: 0.05 is 5 %. Default: 0.03.", least=0, most=1)
_FAIL_ON = setting(
    "Also fail when this got worse. Repeat for several.", shape=f"[{'|'.join(get_args(CheckName))}]", kind=list[str]
)
_GROWTH = setting("The growth that --fail-on lets pass: 0.05 is 5 %.", least=0, most=10)

CHANGE = Figure(name="change", unit="change", header="time", better="lower", doc="Of a step, relative to the baseline.")
BASELINE = Figure(name="baseline", unit="s", doc="A step of the baseline.")
NOW = Figure(name="now", unit="s", better="lower", doc="A step of the candidate.")
LIMIT = Figure(name="threshold", unit="share", doc="The slowdown that must be caught.")


@verb(
    takes=("device", "effort"),
    examples=(
        "redline gate bench.toml --baseline main",
        "redline gate bench.toml --baseline records.redline --summary gate.md",
        "redline gate bench.toml --bisect v1.0..main",
    ),
    also=("summary", "save"),
)
def gate(
    file: Annotated[
        Any, setting("A file with a [[run]] table per benchmark.", kind=str, is_argument=True, shape="BENCH.toml")
    ],
    baseline: Annotated[
        str | None,
        setting(
            "What to compare with: a git ref such as main (checked out beside this one and measured interleaved with it), a file of "
            "records (--save) or a history, 'history', tag:NAME, or recipe:RECIPE.",
            group=WHAT,
            shape="REF|FILE",
        ),
    ] = None,
    *,
    bisect: Annotated[
        str | None,
        setting(
            "Instead of a baseline: find the commit since which it is slower, by gates halfway between the two.",
            group=WHAT,
            shape="GOOD..BAD",
        ),
    ] = None,
    benchmark: Annotated[str | None, setting("Only this benchmark of the file.", group=WHAT)] = None,
    threshold: Annotated[float | None, _THRESHOLD] = None,
    fail_on: Annotated[Sequence[str], _FAIL_ON] = (),
    budget: Annotated[
        float | None, setting("Seconds for everything together. Default: 900; 3600 with --bisect.", least=1)
    ] = None,
    undecided: Annotated[Literal["fail", "ok"], setting("Whether an undecided benchmark exits with 3 or 0.")] = "fail",
    trust: Annotated[bool, setting("Accept a file that another user owns and that names code to run.")] = False,
    junit: Annotated[Path | None, setting("Write JUnit XML.", group=OUTPUT, shape="FILE.xml")] = None,
    workspace: Workspace | None = None,
    clock: Clock = time.monotonic,
    **settings: Any,
) -> Result:
    """Fail when a benchmark got slower than a baseline. For CI.

    Fresh processes of both sides are measured interleaved until each benchmark is faster, slower or the same, or the time is up. Where the baseline
    cannot be run, its stored records of the same device and settings are used. The time of a step is compared: +5 % is slower. Without --effort it is quick.

    Exit codes: 0 nothing is slower; 1 something is slower, broken or failed a check; 2 a mistake in what was asked; 3 undecided or incomparable
    (0 with --undecided ok). With --bisect: 0 found; 3 not found, as the last is not slower or a gate was not decided.
    """
    if (baseline is None) == (bisect is None):
        raise UsageError("give either --baseline or --bisect GOOD..BAD")
    for name in fail_on:
        require_choice("fail-on", name, CheckName)
    if junit is not None:
        check_file(junit)
    benchmarks, environment = load_benchmarks(file, settings, threshold=threshold, fail_on=fail_on, trust=trust)
    chosen = [known for known in benchmarks if benchmark in (None, known.name)]
    if not chosen:
        names = ", ".join(known.name for known in benchmarks)
        raise UsageError(f"no benchmark {benchmark!r}: the file has {names}")
    if bisect is not None and len(chosen) > 1:
        raise UsageError(f"the file has {len(chosen)} benchmarks: choose one with --benchmark NAME")
    with use(workspace) as opened, ExitStack() as stack:
        measuring = Gate(opened, clock, clock() + (budget or (BISECT_BUDGET_S if bisect else BUDGET_S)))
        if bisect is not None:
            return bisected(chosen[0], bisect, environment, measuring, stack)
        assert baseline is not None
        source = open_baseline(baseline, environment, opened, stack)
        rows = [measuring.row(known, source, left=len(chosen) - number) for number, known in enumerate(chosen)]
    is_ok = undecided == "ok"
    if junit is not None:
        write_text(junit, junit_of(rows, source.name, undecided_ok=is_ok))
    return result_of(rows, source.name, undecided_ok=is_ok)


# What is asked


class GateSettings(Frozen):
    """A [[run]] says these things beside the settings of what is measured."""

    name: Annotated[str, setting("How reports call it. Default: model, task, recipe and batch.")] = ""
    threshold: Annotated[float, _THRESHOLD] = THRESHOLD
    fail_on: Annotated[tuple[str, ...], _FAIL_ON] = ()
    memory_threshold: Annotated[float, _GROWTH] = MEMORY_THRESHOLD
    compile_threshold: Annotated[float, _GROWTH] = COMPILE_THRESHOLD

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.name.isprintable() or len(self.name) > LONGEST_NAME:
            raise SpecError(f"name must be {LONGEST_NAME} printable characters or less, got {self.name[:40]!r}")
        for name in self.fail_on:
            require_choice("fail_on", name, CheckName)


class GateBenchmark(GateSettings, kw_only=True):
    """One thing that must not get slower."""

    spec: RunSpec


def load_benchmarks(
    path: str | Path,
    given: Mapping[str, Any] | None = None,
    *,
    threshold: float | None = None,
    fail_on: Sequence[str] = (),
    trust: bool = False,
) -> tuple[list[GateBenchmark], Setup]:
    """Returns the benchmarks of a file as `redline run --file` reads it, and how to make the environment of a baseline."""
    about, tables = read_runs(Path(path), given, trust=trust)
    if about:
        raise SpecError(
            f"{path}: {next(iter(about))} is not a setting of a gate; the name of a benchmark stands in its [[run]]"
        )
    refuse_too_many(len(tables))
    environment: Any = Setup()
    found: dict[str, GateBenchmark] = {}
    for number, table in enumerate(tables, 1):
        try:
            environment = convert_table(table.pop("environment", {}), Setup, "environment: ")
            own: dict[str, Any] = {name: table.pop(name) for name in GateSettings.__struct_fields__ if name in table}
            checks = own.get("fail_on", [])
            own["fail_on"] = [*(checks if isinstance(checks, list) else [checks]), *fail_on]
            if threshold is not None:
                own["threshold"] = threshold
            asked = convert_table(own, GateSettings)
            table.pop("asked_device", None)
            specs = specs_from_table(layered({"effort": "quick"}, table))
            for spec in specs:
                name = asked.name if asked.name and len(specs) == 1 else f"{asked.name} {_name_of(spec)}".strip()
                if name in found:
                    raise SpecError(f"two benchmarks are called {name!r}: give each [[run]] a name of its own")
                found[name] = GateBenchmark(**{**msgspec.structs.asdict(asked), "name": name, "spec": spec})
        except SpecError as error:  # of a field, which does not know the file
            where = f": [[run]] {number}" if len(tables) > 1 else ""
            raise SpecError(f"{path}{where}: {error}") from None
    return list(found.values()), environment


def _name_of(spec: RunSpec) -> str:
    workload = spec.workload
    batch = f"batch {workload.batch}" if workload.batch else ""
    return " ".join(filter(None, (workload.model, workload.task, str(spec.recipe), batch)))


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The other side comes from a checkout that can be measured, is another recipe, or comes from stored records."""

    name: str
    records: Callable[[RunSpec], Sequence[RunRecord]] = lambda spec: ()
    """Returns what is kept of a benchmark, whatever its settings."""
    checkout: Checkout | None = None
    recipe: Recipe | None = None
    is_history: bool = False


def open_baseline(word: str, environment: Setup, workspace: Workspace, stack: ExitStack) -> Baseline:
    kind, _, name = word.partition(":")

    def kept(spec: RunSpec) -> list[RunRecord]:
        with workspace.reading() as history:
            return history.find(model=spec.workload.model, task=spec.workload.task, status="done", limit=LOOK_BACK * 5)

    def passed(spec: RunSpec) -> list[RunRecord]:
        with workspace.reading() as history:
            marks = {(mark.record_id, mark.words) for mark in history.marks() if mark.kind == "gate"}
        records = kept(spec)
        since = max((record.created_at for record in records if (record.id, ACCEPTED) in marks), default=0.0)
        return [record for record in records if record.created_at >= since and (record.id, REJECTED) not in marks]

    if word == "history":
        return Baseline(name="the history", records=passed, is_history=True)
    if kind == "recipe" and name:
        return Baseline(name=f"recipe {name}", recipe=Recipe.parse(name))
    if kind == "tag" and name:
        with workspace.reading() as history:
            ids = set(history.tagged(name))
        if not ids:
            raise UsageError(f"no record has the tag {name!r}: 'redline history tag ID {name}' sets it")
        return Baseline(
            name=f"records tagged {name}", records=lambda spec: [record for record in kept(spec) if record.id in ids]
        )
    if is_file(word):
        with history_in(Path(word)) as other:
            records = other.find(status="done")
        return Baseline(name=word, records=lambda spec: records)
    checkout = stack.enter_context(checked_out(word, environment))
    commit = checkout.commit
    return Baseline(
        name=word if commit.startswith(word) else f"{word} ({commit[:12]})",
        records=lambda spec: [record for record in kept(spec) if _measured_at(record, commit)],
        checkout=checkout,
    )


def _measured_at(record: RunRecord, commit: str) -> bool:
    environment = record.prepared.environment if record.prepared else None
    return environment is not None and environment.git_commit == commit and not environment.git_dirty


# Measuring it


@dataclass
class Gate:
    """Benchmarks go through a gate one after the other, within one budget."""

    workspace: Workspace
    clock: Clock
    deadline: float

    def row(self, benchmark: GateBenchmark, source: Baseline, *, left: int = 1, accept: bool = False) -> GateRow:
        """Measures a benchmark within its share of the time: as many are `left`.

        `accept`: whatever comes out is what later runs are compared with.
        """
        notes: list[Note] = []
        asked, checkout = benchmark.spec, source.checkout
        if checkout is not None and checkout.python:  # both sides go through the same kind of door
            launch = msgspec.structs.replace(asked.launch, door=checkout.launch(asked.launch).door)
            asked = msgspec.structs.replace(asked, launch=launch)
        other = self._other_side(asked, source, notes)
        try:
            (spec,) = self.workspace.checked([asked])
        except (UsageError, SpecError) as error:
            # If only the other commit can run it, it was broken since. If neither can, there is a mistake in what was asked.
            if checkout is None or other is None:
                raise
            why = note("not-runnable", f"it cannot be measured any more: {error}")
            return GateRow(
                name=benchmark.name, verdict="failed", threshold=benchmark.threshold, basis="none", notes=(why,)
            )
        with self.workspace.lock(spec.device):
            run = self._run(benchmark, left)
            if other is not None:
                run.interleaved(other, spec)
            if other is not None and checkout is not None and run.broken in run.baseline:
                notes.append(_not_runnable(source, why=next(run.notes())))
                other, run = None, self._run(benchmark, left)
            if other is None:
                self._against_stored(run, spec, source, notes)
        row = _measured(benchmark, run, notes, is_stored=other is None)
        if source.is_history and self.workspace.keeps and (accept or row.failed):
            for record_id in row.record_ids[: 1 if accept else None]:
                self.workspace.history.mark(record_id, "gate", ACCEPTED if accept else REJECTED, at=time.time())
        return row

    def _run(self, benchmark: GateBenchmark, left: int) -> GateRun:
        return GateRun(
            self.workspace.door(benchmark.spec.launch),
            self.workspace.journal,
            self.workspace.observer,
            threshold=benchmark.threshold,
            budget_s=max((self.deadline - self.clock()) / left, 0.0),
            seed=benchmark.spec.seed,
            clock=self.clock,
        )

    def _other_side(self, asked: RunSpec, source: Baseline, notes: list[Note]) -> RunSpec | None:
        """Returns the baseline as a spec if it can be measured."""
        if source.recipe is not None:
            return self.workspace.checked([msgspec.structs.replace(asked, recipe=source.recipe)])[0]
        if source.checkout is None:
            return None
        other = msgspec.structs.replace(asked, launch=source.checkout.launch(asked.launch))
        try:
            return self.workspace.checked([other])[0]
        except (UsageError, SpecError, BenchError) as error:
            notes.append(_not_runnable(source, why=error))
            return None

    def _against_stored(self, run: GateRun, spec: RunSpec, source: Baseline, notes: list[Note]) -> None:
        records = source.records(spec)
        stored = [record for record in records if record.blocks and not record.failure]
        if stored or source.is_history:
            run.against(lambda first: _alike(stored, first, notes), spec)
        if run.baseline or run.broken is not None:
            return
        text = f"nothing is stored of {spec.workload.model} for {source.name}: measure it with 'redline run --replicates 5' there first"
        if source.is_history:  # this is the first time
            while len(run.candidate) < FEWEST_PROCESSES and run.broken is None:
                run.candidate += run.one_process(spec)
            text = f"nothing to compare with yet: {len(run.candidate)} processes were measured for the next time"
        notes.append(note("no-baseline", text))


def _not_runnable(source: Baseline, why: object) -> Note:
    return note("not-runnable", f"{source.name} cannot be measured here ({why}): only stored records of it compare")


def _alike(stored: Sequence[RunRecord], first: RunRecord, notes: list[Note]) -> list[RunRecord]:
    """Returns stored records of the same device and settings as the first process of the candidate."""
    mine = benchmark_of(first)
    alike, reasons = [], dict[str, Note]()
    for record in stored:
        theirs = benchmark_of(record)
        # A gate is about changes of the code, which may have changed the model's structure, too.
        told = {why.about: why for why in differences(theirs, [record], mine, [first])[0] if why.about != STRUCTURE}
        if theirs.recipe != mine.recipe:
            told["recipe"] = note("differs", f"recipe: {theirs.recipe} against {mine.recipe}", about="recipe")
        reasons |= told
        if not told:
            alike.append(record)
    if not alike:
        notes += reasons.values()
    return alike[:LOOK_BACK]


def _measured(benchmark: GateBenchmark, run: GateRun, notes: list[Note], *, is_stored: bool) -> GateRow:
    """Returns the row of a benchmark whose processes have run."""
    judged, broken = run.judged or Judged(verdict="incomparable"), run.broken
    verdict: GateVerdict = judged.verdict
    if broken is not None:
        verdict = "failed" if broken in run.candidate else "incomparable"
    basis: GateBasis = "interleaved" if run.unlike is None else "none"
    if is_stored:
        basis = "stored" if run.baseline else "none"
        if 0 < len(run.baseline) < FEWEST_STORED:
            text = (
                f"only {len(run.baseline)} stored processes: 'redline run --replicates 5' measures enough for a verdict"
            )
            notes.append(note("single-runs", text))
        elif run.baseline:
            text = "the baseline was measured at another time: the interval leaves out drift of the machine since then"
            notes.append(note("one-after-the-other", text))
    limits = {name: getattr(benchmark, name) for name in ("memory_threshold", "compile_threshold")}
    checks: list[Check] = []
    if broken is None and basis != "none":
        order = [name for name in get_args(CheckName) if name in benchmark.fail_on]
        checks = [check(name, run.baseline, run.candidate, **limits) for name in order]
    elif broken is None and is_stored and run.candidate and "numerics" in benchmark.fail_on:
        checks = [finite_check(run.candidate)]
    before_s, now_s = middle_s(run.baseline), middle_s(run.candidate)
    if judged.ratio is not None and before_s and now_s:
        # The ratio is of processes that ran side by side. Both times are moved as little as they must to be that far apart.
        centre_s, half = math.sqrt(before_s * now_s), math.sqrt(judged.ratio)
        before_s, now_s = centre_s * half, centre_s / half
    return GateRow(
        name=benchmark.name,
        verdict=verdict,
        threshold=benchmark.threshold,
        basis=basis,
        ratio=judged.ratio,
        low=judged.low,
        high=judged.high,
        confidence=judged.confidence,
        baseline_s=before_s,
        candidate_s=now_s,
        baseline_processes=len(run.baseline),
        candidate_processes=len(run.candidate),
        checks=tuple(checks),
        notes=(*run.notes(), *notes),
        record_ids=tuple(record.id for record in run.candidate),
    )


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
    """Measures a live module or function against stored records of the same name; without any, measures it for the next time."""
    with use(workspace) as opened, ExitStack() as stack:
        table = layered({"effort": "quick"}, settings)
        spec, working = one_spec(opened, "a benchmark", model, inputs, recipes=recipe, **table)
        if not isinstance(model, str):
            workload = msgspec.structs.replace(spec.workload, model=f"live:{name}")
            spec = msgspec.structs.replace(spec, workload=workload)
        benchmark = GateBenchmark(name=name, spec=spec, threshold=threshold, fail_on=tuple(fail_on))
        source = open_baseline(baseline, Setup(), working, stack)
        return Gate(working, time.monotonic, time.monotonic() + budget_s).row(benchmark, source, accept=accept)


# What it shows


def result_of(rows: Sequence[GateRow], baseline: str, *, undecided_ok: bool = False) -> Result:
    failed, undecided = any(row.failed for row in rows), any(row.undecided for row in rows)
    told = ", ".join(f"{count} {verdict}" for verdict, count in Counter(row.verdict for row in rows).items())
    checks = ", ".join(f"{row.name}: {known.name}" for row in rows for known in row.checks if known.failed)
    outcome = "failed" if failed else "undecided" if undecided else "passed"
    columns = ("benchmark", "verdict", "change", "baseline", "now", "threshold", "processes", "basis")
    return Result(
        verb="gate",
        headline=Headline(
            template=f"{outcome}: {told}" + ("; failed checks: {checks}" if checks else ""), figures={"checks": checks}
        ),
        tables=(
            Table(name="benchmarks", title=f"against {baseline}", rows=tuple(map(row_of, rows)), columns=columns),
            Table(
                name="checks",
                title="checks",
                rows=tuple(_check_row(row.name, known) for row in rows for known in row.checks),
            ),
        ),
        about={"baseline": baseline, "failed": failed, "undecided": undecided},
        record_ids=tuple(record_id for row in rows for record_id in row.record_ids),
        exit_code=Exit.SLOWER if failed else Exit.INCOMPARABLE if undecided and not undecided_ok else Exit.DONE,
    )


def row_of(row: GateRow) -> Row:
    metrics = (BASELINE(row.baseline_s), NOW(row.candidate_s), CHANGE(*row.change), LIMIT(row.threshold))
    return Row(
        facts={
            "benchmark": row.name,
            "verdict": row.verdict,
            "basis": row.basis,
            "processes": f"{row.baseline_processes} / {row.candidate_processes}",
            "confidence": row.confidence,
        },
        metrics=tuple(metric for metric in metrics if metric.value is not None),
        notes=row.notes,
    )


def _check_row(name: str, known: Check) -> Row:
    unit = {"memory": "B", "compile": "s", "numerics": "error"}.get(known.name, "")
    sides = (("baseline", known.baseline), ("now", known.candidate))
    return Row(
        facts={"benchmark": name, "check": known.name, "failed": known.failed, "said": str(known.said)},
        metrics=tuple(Figure(name=side, unit=unit)(value) for side, value in sides if value is not None),
    )


def junit_of(rows: Sequence[GateRow], baseline: str, *, undecided_ok: bool = False) -> str:
    """Returns JUnit's XML: one test case per benchmark. An undecided benchmark with a failed check is one failure, as its exit code
    says."""
    suite = ElementTree.Element("testsuite", name="redline gate", tests=str(len(rows)))
    counts: Counter[str] = Counter()
    for row in rows:
        case = ElementTree.SubElement(suite, "testcase", classname="redline.gate", name=one_line(row.name))
        undecided = ("skipped" if undecided_ok else "error") if row.undecided else ""
        kind = "error" if row.verdict == "failed" else "failure" if row.failed else undecided
        said = one_line(str(row))
        if kind:
            details = map(one_line, map(str, (*(known.said for known in row.checks), *row.notes)))
            ElementTree.SubElement(case, kind, message=said).text = "\n".join(details)
        ElementTree.SubElement(case, "system-out").text = f"{said} (against {one_line(baseline)})"
        counts[kind] += 1
    for attribute, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(counts[kind]))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


# The following finds which commit made it slower.


def bisected(benchmark: GateBenchmark, between: str, environment: Setup, measuring: Gate, stack: ExitStack) -> Result:
    """Gates halfway between the two find the first commit that is slower than the good one.

    A commit that does not run, or cannot be decided, is passed over and its neighbours are tried.
    """
    good, dots, bad = between.partition("..")
    if not good or not dots or not bad:
        raise UsageError(f"bisect GOOD..BAD needs both ends, got {between!r}")
    commits = [resolve_commit(good), *commits_between(good, bad)]
    if len(commits) < 2:
        raise UsageError("there is nothing between the two ends: name two that differ")
    source = open_baseline(commits[0], environment, measuring.workspace, stack)
    steps: dict[str, GateRow] = {}

    def verdict_at(index: int) -> GateVerdict:
        commit, spec = commits[index], benchmark.spec
        with checked_out(commit, environment) as checkout:
            known = msgspec.structs.replace(
                benchmark,
                name=commit,
                spec=msgspec.structs.replace(spec, launch=checkout.launch(spec.launch)),
            )
            still_to_come = max(len(commits).bit_length() + 1 - len(steps), 1)
            steps[commit] = measuring.row(known, source, left=still_to_come)
        return steps[commit].verdict

    low, high, skipped = 0, len(commits) - 1, set[int]()
    is_slower = verdict_at(high) == "slower"
    while is_slower and (left := [index for index in range(low + 1, high) if index not in skipped]):
        middle = min(left, key=lambda index: abs(2 * index - low - high))
        match verdict_at(middle):
            case "slower":
                high = middle
            case "same" | "faster":
                low = middle
            case _:  # it does not run, or its processes differ too much: its neighbours may do
                skipped.add(middle)
    suspects = commits[low + 1 : high + 1] if is_slower else []
    return _found(suspects, steps, f"{benchmark.name}: each commit against {good}")


def _found(suspects: Sequence[str], steps: Mapping[str, GateRow], title: str) -> Result:
    last, row = next(iter(steps.items()))
    culprit = suspects[0] if len(suspects) == 1 else None
    subject = subject_of(culprit) if culprit else None
    names = ", ".join(commit[:12] for commit in suspects)
    if culprit:
        text = "it got slower with commit {commit}: {subject}"
    elif suspects:
        text = (
            f"not found: one of these {len(suspects)} made it slower, and those between could not be decided: {names}"
        )
    elif row.verdict in ("same", "faster"):
        text = "nothing to find: the last commit is not slower than the first"
    else:
        text = f"not found: the last commit ({last[:12]}) was {row.verdict}"
    rows = [
        Row(
            facts={"commit": commit, "about": subject_of(commit), "verdict": known.verdict},
            metrics=(CHANGE(*known.change),),
            notes=known.notes,
        )
        for commit, known in steps.items()
    ]
    return Result(
        verb="bisect",
        headline=Headline(template=text, figures={"commit": culprit, "subject": subject}),
        tables=(Table(name="steps", title=title, rows=tuple(rows)),),
        about={"culprit": culprit, "subject": subject, "suspects": ", ".join(suspects)},
        exit_code=Exit.DONE if culprit else Exit.INCOMPARABLE,
    )
