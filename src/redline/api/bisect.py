"""`redline gate --bisect`: which commit, environment or recipe made a benchmark slower? Gates between two ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import RenderableType

from redline.analyze.compare import why_broken
from redline.analyze.gate import GateVerdict, Judged, judged_at
from redline.api.benchmarks import GateBenchmark, check_budget, load_benchmarks
from redline.api.workspace import Workspace, use
from redline.launch.checkout import Setup, checked_out, commits_between, resolve_commit, subject_of
from redline.model.errors import BenchError, UsageError
from redline.model.spec import Recipe, RunSpec
from redline.search.gate import Clock, GateRun
from redline.show.export import JsonDocument
from redline.show.gate import BisectStep, bisect_json, bisect_report
from redline.show.notebook import Bars, Shown

if TYPE_CHECKING:
    from collections.abc import Iterator

BUDGET_S = 3600.0
"""For all gates together."""
Open = Callable[[RunSpec, ExitStack], RunSpec]
"""From the benchmark to the benchmark of one candidate; the stack holds what that needs."""


class Candidate:
    """A commit, an environment or a recipe that may have made the benchmark slower."""

    def __init__(self, name: str, about: str, opened: Open) -> None:
        self.name = name
        self.about = about
        self.opened = opened


class BisectResult(Shown):
    """The first position at which it was slower, and the gates that found it."""

    def __init__(
        self,
        benchmark: str,
        what: str,
        steps: Sequence[BisectStep],
        suspects: Sequence[Candidate],
        earlier: BisectStep | None = None,
    ) -> None:
        self.benchmark = benchmark
        self.what = what
        """Commit, environment or recipe."""
        self.steps = list(steps)
        self.suspects = [candidate.name for candidate in suspects]
        """All that may have made it slower: more than one where those between could not be measured or decided."""
        self.culprit = suspects[0].name if len(suspects) == 1 else None
        self.about = suspects[0].about if len(suspects) == 1 else ""
        self.earlier = earlier
        """The last one before the suspects, where it was already slower than the first, by the smaller part of the whole."""

    def report(self) -> RenderableType:
        return bisect_report(self.benchmark, self.what, self.steps, self.suspects, self.about, self.earlier)

    def frame_rows(self) -> Sequence[Any]:
        return self.steps

    def bars(self) -> Bars | None:
        bars = [(step.name, step.ratio, step.low, step.high) for step in self.steps if step.ratio is not None]
        return Bars(self.benchmark, "time of the first over time of this one", bars)

    def to_json(self) -> JsonDocument:
        return bisect_json(self.benchmark, self.what, self.steps, self.suspects, self.about, self.earlier)


def bisect(
    file: str | Path,
    between: str | Sequence[str],
    *,
    benchmark: str | None = None,
    threshold: float | None = None,
    budget_s: float = BUDGET_S,
    trust: bool = False,
    workspace: Workspace | None = None,
    clock: Clock = time.monotonic,
    **settings: Any,
) -> BisectResult:
    """Find the first of several commits, interpreters (environments) or recipes that is slower than the first.

    `between` is "GOOD..BAD" for the commits after GOOD up to BAD, or a list, in the order to look in: of interpreters, which
    are paths with a slash, or of recipes.
    """
    check_budget(budget_s)
    found, environment = load_benchmarks(file, settings, threshold=threshold, trust=trust)
    chosen = _chosen(found, benchmark)
    what, candidates = _candidates([between] if isinstance(between, str) else list(between), environment)
    with use(workspace) as opened:
        return _Search(chosen, what, candidates, opened, budget_s, clock).result()


def _chosen(found: Sequence[GateBenchmark], name: str | None) -> GateBenchmark:
    if name is None:
        if len(found) > 1:
            raise UsageError(f"the file has {len(found)} benchmarks: choose one with --benchmark NAME")
        return found[0]
    for each in found:
        if each.name == name:
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
    if not Path(python).expanduser().is_file():
        raise UsageError(f"no interpreter at {python}")

    def opened(spec: RunSpec, stack: ExitStack) -> RunSpec:
        launch = msgspec.structs.replace(spec.launch, door="spawn", python=str(Path(python).expanduser().absolute()))
        return msgspec.structs.replace(spec, launch=launch)

    return opened


def _under(recipe: Recipe) -> Open:
    return lambda spec, stack: msgspec.structs.replace(spec, recipe=recipe)


class _Search:
    def __init__(
        self,
        benchmark: GateBenchmark,
        what: str,
        candidates: Sequence[Candidate],
        workspace: Workspace,
        budget_s: float,
        clock: Clock,
    ) -> None:
        self._benchmark = benchmark
        self._what = what
        self._candidates = candidates
        self._workspace = workspace
        self._deadline = clock() + budget_s
        self._clock = clock
        self._steps: list[BisectStep] = []

    def result(self) -> BisectResult:
        first = self._candidates[0]
        with ExitStack() as stack:
            try:
                good = stack.enter_context(self._prepared(first))
            except BenchError as error:
                raise UsageError(f"the first {self._what} ({first.name[:40]}) cannot be measured: {error}") from None
            suspects = self._suspects(good)
        return BisectResult(self._benchmark.name, self._what, self._steps, suspects, self._slower_before(suspects))

    def _slower_before(self, suspects: Sequence[Candidate]) -> BisectStep | None:
        """The search follows the larger part of a slowdown that came in several."""
        if not suspects:
            return None
        before = self._candidates[self._candidates.index(suspects[0]) - 1].name
        return next((step for step in self._steps if step.name == before and step.verdict == "slower"), None)

    def _suspects(self, good: RunSpec) -> Sequence[Candidate]:
        """The one that made it slower; several, where those between could not be decided; none, where the last is not slower."""
        low, high = 0, len(self._candidates) - 1
        whole = self._gate(good, high, self._benchmark.threshold)
        if whole is None or whole.verdict != "slower":
            return ()
        # Half way between no change and the whole of it: what is slower by more has the change in it.
        threshold = max(1 / whole.ratio - 1, self._benchmark.threshold)
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
        return self._candidates[low + 1 : high + 1]

    def _gate(self, good: RunSpec, index: int, threshold: float) -> Judged | None:
        """None where this candidate cannot be measured."""
        candidate = self._candidates[index]
        left = max((len(self._candidates)).bit_length() + 1 - len(self._steps), 1)
        try:
            with self._prepared(candidate) as spec, self._workspace.lock(spec.device):
                running = GateRun(
                    self._workspace.door(spec.launch),
                    self._workspace.journal,
                    self._workspace.observer,
                    threshold=threshold,
                    budget_s=max((self._deadline - self._clock()) / left, 0.0),
                    seed=spec.seed,
                    clock=self._clock,
                )
                running.interleaved(good, spec)
        except (UsageError, BenchError) as error:
            self._note(candidate, "failed", None, str(error))
            return None
        judged, broken = running.judged, running.broken
        if broken is not None and broken in running.baseline:
            raise UsageError(f"the first {self._what} ({self._candidates[0].name[:40]}) broke: {why_broken(broken)}")
        if broken is not None:
            self._note(candidate, "failed", None, str(why_broken(broken)))
            return None
        # Told by the benchmark's own threshold; the search goes by that of the whole slowdown.
        verdict = judged_at(judged, self._benchmark.threshold) if judged else "incomparable"
        self._note(candidate, verdict, judged, str(running.unlike or ""))
        return judged

    def _note(self, candidate: Candidate, verdict: GateVerdict, judged: Judged | None, said: str = "") -> None:
        self._steps.append(
            BisectStep(
                name=candidate.name,
                about=candidate.about,
                verdict=verdict,
                ratio=judged.ratio if judged else None,
                low=judged.low if judged else None,
                high=judged.high if judged else None,
                said=said,
            )
        )

    @contextmanager
    def _prepared(self, candidate: Candidate) -> Iterator[RunSpec]:
        with ExitStack() as stack:
            spec = candidate.opened(self._benchmark.spec, stack)
            yield self._workspace.checked([spec])[0]
