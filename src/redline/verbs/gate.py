"""`redline gate`: is this checkout slower than a baseline? And `--bisect`: which commit, environment or recipe made it slower?"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import msgspec

from redline.analyze.checks import Check, CheckName
from redline.analyze.compare import why_broken
from redline.analyze.gate import (
    GateRow,
    GateVerdict,
    Judged,
    judged_at,
)
from redline.launch.checkout import Setup, checked_out, commits_between, resolve_commit, subject_of
from redline.model.errors import BenchError, Exit, SpecError, UsageError
from redline.model.fields import require_choice
from redline.model.metrics import Figure, Headline, Metric, Row, Table
from redline.model.note import Note, note
from redline.model.settings import HOW, OUTPUT, WHAT, setting
from redline.model.spec import Recipe, RunSpec
from redline.search.gate import Clock
from redline.show.folder import check_file, write_text
from redline.show.result import Result
from redline.show.terminal import one_line
from redline.verbs.gate_bench import (
    BUDGET_S,
    Gate,
    GateBenchmark,
    check_budget,
    gate_run,
    load_benchmarks,
    open_baseline,
    remembered,
)
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, use

BISECT_BUDGET_S = 3600.0

CHANGE = Figure(name="change", unit="change", header="time", better="lower", doc="Of a step, relative to the baseline.")
BASELINE = Figure(name="baseline", unit="s", doc="A step of the baseline.")
NOW = Figure(name="now", unit="s", better="lower", doc="A step of the candidate.")
LIMIT = Figure(name="threshold", unit="share", doc="The slowdown that must be caught.")


@verb(
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
        str | Sequence[str],
        setting(
            "Instead of a baseline: find the commit that made it slower, by gates halfway between the two. Or repeat it with interpreters of "
            "environments, or with recipes, in order.",
            group=WHAT,
            shape="GOOD..BAD",
            kind=list[str],
        ),
    ] = (),
    benchmark: Annotated[str | None, setting("With --bisect: which benchmark of the file.", group=WHAT)] = None,
    device: Annotated[
        str | None,
        setting("The device, instead of the one in the file.", group=WHAT, shape="[auto|cpu|cuda|cuda:N|rocm|rocm:N]"),
    ] = None,
    threshold: Annotated[
        float | None,
        setting("The slowdown that must be caught, instead of the file's: 0.05 is 5 %. Default: 0.03.", group=HOW),
    ] = None,
    fail_on: Annotated[
        Sequence[str],
        setting(
            "Also fail when this got worse. Repeat for several.",
            group=HOW,
            shape="[memory|numerics|compile|graph-breaks|kernels]",
            kind=list[str],
        ),
    ] = (),
    effort: Annotated[
        str | None,
        setting("How long each process is timed. Default: quick.", group=HOW, shape="[quick|normal|strict]"),
    ] = None,
    budget: Annotated[
        float | None, setting("Seconds for everything together. Default: 900; 3600 with --bisect.", group=HOW)
    ] = None,
    undecided: Annotated[
        str, setting("Whether an undecided benchmark exits with 3 or 0.", group=HOW, shape="[fail|ok]")
    ] = "fail",
    trust: Annotated[
        bool, setting("Accept a file that another user owns and that names code to run.", group=HOW)
    ] = False,
    junit: Annotated[Path | None, setting("Write JUnit XML.", group=OUTPUT, shape="FILE.xml")] = None,
    workspace: Workspace | None = None,
    clock: Clock = time.monotonic,
    **settings: Any,
) -> Result:
    """Fail when a benchmark got slower than a baseline. For CI.

    Fresh processes of both sides are measured interleaved until each benchmark is faster, slower or the same, or the time is up. Where the baseline
    cannot be run, its stored records of the same device and settings are used. The time of a step is compared: +5 % is slower.

    Exit codes: 0 nothing is slower; 1 something is slower, broken or failed a check; 2 a mistake in what was asked; 3 undecided or incomparable
    (0 with --undecided ok). With --bisect: 0 found; 3 not found, as the last is not slower or a gate was not decided.
    """
    given = {name: value for name, value in (("device", device), ("effort", effort)) if value is not None} | settings
    budget_s = budget if budget is not None else BISECT_BUDGET_S if bisect else BUDGET_S
    check_budget(budget_s)
    if bisect and (needless := baseline or fail_on or junit):
        names = {"baseline": baseline, "fail-on": fail_on, "junit": junit}
        name = next(name for name, value in names.items() if value == needless)
        raise UsageError(f"--bisect looks for the change and judges nothing: leave out --{name}")
    if not bisect and (baseline is None or benchmark is not None):
        raise UsageError("--benchmark goes with --bisect" if benchmark else "give --baseline, or --bisect GOOD..BAD")
    if undecided not in ("fail", "ok"):
        raise SpecError(f"undecided must be fail or ok, got {undecided!r}")
    for name in fail_on:
        require_choice("fail-on", name, CheckName)
    if junit is not None:
        check_file(junit)
    benchmarks, environment = load_benchmarks(file, given, threshold=threshold, fail_on=fail_on, trust=trust)
    with use(workspace) as opened, ExitStack() as stack:
        if baseline is None:
            what, candidates = _candidates([bisect] if isinstance(bisect, str) else list(bisect), environment)
            return _Search(_chosen(benchmarks, benchmark), what, candidates, opened, budget_s, clock).result()
        source = open_baseline(baseline, environment, opened, stack)
        rows: list[GateRow] = []
        deadline = clock() + budget_s
        for each in benchmarks:
            share_s = max((deadline - clock()) / (len(benchmarks) - len(rows)), 0.0)
            rows.append(remembered(Gate(each, source, opened, share_s, clock).row(), source, opened))
    if junit is not None:
        write_text(junit, junit_of(rows, source.name, undecided_ok=undecided == "ok"))
    return result_of(rows, source.name, undecided_ok=undecided == "ok")


# What it shows


def result_of(rows: Sequence[GateRow], baseline: str, *, undecided_ok: bool = False) -> Result:
    failed, undecided = any(row.failed for row in rows), any(row.undecided for row in rows)
    checks = tuple(_check_row(row.name, each) for row in rows for each in row.checks)
    columns = ("benchmark", "verdict", "change", "baseline", "now", "threshold", "processes", "basis")
    return Result(
        verb="gate",
        headline=_headline(rows),
        tables=(
            Table(name="benchmarks", title=f"against {baseline}", rows=tuple(map(row_of, rows)), columns=columns),
            Table(name="checks", title="checks", rows=checks),
        ),
        about={"baseline": baseline, "failed": failed, "undecided": undecided},
        record_ids=tuple(record_id for row in rows for record_id in row.record_ids),
        exit_code=Exit.SLOWER if failed else Exit.INCOMPARABLE if undecided and not undecided_ok else Exit.DONE,
    )


def _headline(rows: Sequence[GateRow]) -> Headline:
    told = ", ".join(f"{count} {verdict}" for verdict, count in Counter(row.verdict for row in rows).items())
    checks = [f"{row.name}: {each.name}" for row in rows for each in row.checks if each.failed]
    if any(row.failed for row in rows):
        text = f"failed: {told}" + ("; failed checks: {checks}" if checks else "")
        return Headline(template=text, figures={"checks": ", ".join(checks)})
    return Headline(template=f"{'undecided' if any(row.undecided for row in rows) else 'passed'}: {told}")


def change_of(row: GateRow | Judged) -> Metric:
    return CHANGE(*row.change)


def row_of(row: GateRow) -> Row:
    metrics = (BASELINE(row.baseline_s), NOW(row.candidate_s), change_of(row), LIMIT(row.threshold))
    return Row(
        facts={
            "benchmark": row.name,
            "verdict": row.verdict,
            "basis": row.basis,
            "processes": f"{row.baseline_processes} / {row.candidate_processes}",
            "confidence": row.confidence,
        },
        metrics=tuple(metric for metric in metrics if metric.value is not None),
        notes=(*row.reasons, *row.notes),
    )


def _check_row(name: str, each: Check) -> Row:
    unit = {"memory": "B", "compile": "s", "numerics": "error"}.get(each.name, "")
    sides = (("baseline", each.baseline), ("now", each.candidate))
    return Row(
        facts={"benchmark": name, "check": each.name, "failed": each.failed, "said": str(each.said)},
        metrics=tuple(Figure(name=side, unit=unit)(value) for side, value in sides if value is not None),
    )


def junit_of(rows: Sequence[GateRow], baseline: str, *, undecided_ok: bool = False) -> str:
    """JUnit's XML: one test case per benchmark. An undecided benchmark with a failed check is one failure, as its exit code says."""
    outcomes = {
        row.name: "error"
        if row.verdict == "failed" or (row.undecided and not row.failed and not undecided_ok)
        else "failure"
        if row.failed
        else "skipped"
        if row.undecided
        else ""
        for row in rows
    }
    counts = Counter(outcomes.values())
    plurals = {"failure": "failures", "error": "errors", "skipped": "skipped"}
    attributes: Any = {name: str(counts[outcome]) for outcome, name in plurals.items()}
    suite = ElementTree.Element("testsuite", name="redline gate", tests=str(len(rows)), **attributes)
    for row in rows:
        case = ElementTree.SubElement(suite, "testcase", classname="redline.gate", name=one_line(row.name))
        said = one_line(str(row))
        if outcomes[row.name]:
            details = map(one_line, map(str, (*(each.said for each in row.checks), *row.reasons, *row.notes)))
            ElementTree.SubElement(case, outcomes[row.name], message=said).text = "\n".join(details)
        ElementTree.SubElement(case, "system-out").text = f"{said} (against {one_line(baseline)})"
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


# Which change made it slower


Open = Callable[[RunSpec, ExitStack], RunSpec]
"""It turns the benchmark into that of one candidate. The stack holds what that needs."""


@dataclass(frozen=True)
class Candidate:
    """A commit, an environment or a recipe that may have made the benchmark slower."""

    name: str
    about: str
    opened: Open


def _chosen(found: Sequence[GateBenchmark], name: str | None) -> GateBenchmark:
    if name is None and len(found) > 1:
        raise UsageError(f"the file has {len(found)} benchmarks: choose one with --benchmark NAME")
    for each in found:
        if name in (None, each.name):
            return each
    raise UsageError(f"no benchmark {name!r}: the file has {', '.join(each.name for each in found)}")


def _candidates(between: Sequence[str], environment: Setup) -> tuple[str, list[Candidate]]:
    good, dots, bad = between[0].partition("..")
    if dots and len(between) == 1:
        if not good or not bad:
            raise UsageError(f"bisect GOOD..BAD needs both ends, got {between[0]!r}")
        commits = [resolve_commit(good), *commits_between(good, bad)]
        found = "commit", [Candidate(commit, subject_of(commit), _at(commit, environment)) for commit in commits]
    elif all("/" in each for each in between):
        found = "environment", [Candidate(python, "", _in_environment(python)) for python in between]
    else:
        found = "recipe", [Candidate(recipe, "", _under(Recipe.parse(recipe))) for recipe in between]
    if len(found[1]) < 2:
        raise UsageError("there is nothing between the two ends: name two that differ")
    return found


def _at(commit: str, environment: Setup) -> Open:
    def opened(spec: RunSpec, stack: ExitStack) -> RunSpec:
        checkout = stack.enter_context(checked_out(commit, environment))
        door = "spawn" if checkout.python and spec.launch.door == "fork" else spec.launch.door
        launch = checkout.launch(msgspec.structs.replace(spec.launch, door=door, python=""))
        return msgspec.structs.replace(spec, launch=launch)

    return opened


def _in_environment(python: str) -> Open:
    path = Path(python).expanduser()
    if not path.is_file():
        raise UsageError(f"no interpreter at {python}")

    def opened(spec: RunSpec, stack: ExitStack) -> RunSpec:
        launch = msgspec.structs.replace(spec.launch, door="spawn", python=str(path.absolute()))
        return msgspec.structs.replace(spec, launch=launch)

    return opened


def _under(recipe: Recipe) -> Open:
    return lambda spec, stack: msgspec.structs.replace(spec, recipe=recipe)


@dataclass
class _Search:
    benchmark: GateBenchmark
    what: str
    """Commit, environment or recipe."""
    candidates: Sequence[Candidate]
    workspace: Workspace
    budget_s: float
    clock: Clock
    steps: list[Row] = field(default_factory=list)

    def result(self) -> Result:
        first = self.candidates[0]
        self.deadline = self.clock() + self.budget_s
        with ExitStack() as stack:
            try:
                good = stack.enter_context(self._prepared(first))
            except BenchError as error:
                raise UsageError(f"the first {self.what} ({_short(first.name)}) cannot be measured: {error}") from None
            suspects = self._suspects(good)
        culprit = suspects[0] if len(suspects) == 1 else None
        return Result(
            verb="bisect",
            headline=self._headline(suspects),
            tables=(
                Table(
                    name="steps",
                    title=f"{self.benchmark.name}: each {self.what} against the first",
                    rows=tuple(self.steps),
                ),
            ),
            about={
                "what": self.what,
                "culprit": culprit.name if culprit else None,
                "subject": culprit.about if culprit else None,
                "suspects": ", ".join(each.name for each in suspects),
            },
            notes=tuple(self._smaller_part(suspects)),
            exit_code=Exit.DONE if culprit else Exit.INCOMPARABLE,
        )

    def _suspects(self, good: RunSpec) -> Sequence[Candidate]:
        """The one that made it slower; several, where those between could not be decided; none, where the last is not slower."""
        low, high = 0, len(self.candidates) - 1
        whole = self._gate(good, high, self.benchmark.threshold)
        if whole is None or whole.verdict != "slower":
            return ()
        # A candidate that is slower by more than half of the whole has the change in it.
        threshold = max(1 / whole.ratio - 1, self.benchmark.threshold)
        skipped: set[int] = set()
        while left := [index for index in range(low + 1, high) if index not in skipped]:
            middle = min(left, key=lambda index: abs(2 * index - low - high))
            judged = self._gate(good, middle, threshold)
            if judged is None or judged.verdict == "inconclusive":
                skipped.add(middle)  # it does not run, or its processes differ too much: its neighbours may do
            elif judged.verdict == "slower":
                high = middle
            else:
                low = middle
        return self.candidates[low + 1 : high + 1]

    def _gate(self, good: RunSpec, index: int, threshold: float) -> Judged | None:
        """Returns None where this candidate cannot be measured."""
        candidate = self.candidates[index]
        left = max(len(self.candidates).bit_length() + 1 - len(self.steps), 1)
        share_s = max((self.deadline - self.clock()) / left, 0.0)
        try:
            with self._prepared(candidate) as spec, self.workspace.lock(spec.device):
                running = gate_run(self.workspace, spec, threshold, share_s, self.clock)
                running.interleaved(good, spec)
        except (UsageError, BenchError) as error:
            self._note(candidate, "failed", None, str(error))
            return None
        judged, broken = running.judged, running.broken
        if broken is not None and broken in running.baseline:
            raise UsageError(f"the first {self.what} ({_short(self.candidates[0].name)}) broke: {why_broken(broken)}")
        if broken is not None:
            self._note(candidate, "failed", None, str(why_broken(broken)))
            return None
        # Each verdict goes by the benchmark's own threshold; the search goes by that of the whole slowdown.
        verdict = judged_at(judged, self.benchmark.threshold) if judged else "incomparable"
        self._note(candidate, verdict, judged, str(running.unlike or ""))
        return judged

    def _note(self, candidate: Candidate, verdict: GateVerdict, judged: Judged | None, failure: str) -> None:
        facts = {self.what: candidate.name, "about": candidate.about, "verdict": verdict}
        self.steps.append(Row(facts=facts, metrics=(change_of(judged),) if judged else (), failure=failure))

    @contextmanager
    def _prepared(self, candidate: Candidate) -> Iterator[RunSpec]:
        with ExitStack() as stack:
            spec = candidate.opened(self.benchmark.spec, stack)
            yield self.workspace.checked([spec])[0]

    def _smaller_part(self, suspects: Sequence[Candidate]) -> Iterator[Note]:
        """The search follows the larger part of a slowdown that came in several."""
        before = self.candidates[self.candidates.index(suspects[0]) - 1].name if suspects else None
        for step in self.steps:
            if step[self.what] == before and step["verdict"] == "slower":
                told = f"{self.what} {_short(str(before))} before it was already {step['change']} slower than the first"
                text = f"that is the larger part: {told}; bisect again up to that one to find the other part"
                yield note("part-slower", text, about=str(before))

    def _headline(self, suspects: Sequence[Candidate]) -> Headline:
        what, last = self.what, self.steps[-1]
        figures: dict[str, Any] = {"last": _short(str(last[what])), "verdict": last["verdict"]}
        if len(suspects) == 1:
            figures |= {"name": suspects[0].name, "about": suspects[0].about}
            text = f"it got slower with {what} {{name}}" + (": {about}" if suspects[0].about else "")
        elif suspects:
            figures["names"] = ", ".join(_short(each.name) for each in suspects)
            text = f"not found: one of these {len(suspects)} made it slower, and those between could not be decided: {{names}}"
        elif last["verdict"] in ("same", "faster"):
            text = f"nothing to find: the last {what} is not slower than the first"
        elif last["verdict"] == "failed":
            text = f"not found: the last {what} ({{last}}) cannot be measured"
        else:
            text = f"not found: the last {what} ({{last}}) was {{verdict}}; a larger --budget may decide it"
        return Headline(template=text, figures=figures)


def _short(name: str) -> str:
    return name if len(name) <= 40 else name[:12]
