"""What a gate is asked: the benchmarks of its file, and the baseline that they are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import msgspec

from redline.analyze.checks import COMPILE_THRESHOLD, MEMORY_THRESHOLD, CheckName
from redline.analyze.gate import THRESHOLD
from redline.launch.checkout import Checkout, Setup, checked_out, resolve_commit
from redline.model.errors import SpecError, UsageError
from redline.model.fields import Frozen, require_choice, shown_number
from redline.model.files import is_file
from redline.model.record import RunRecord
from redline.model.spec import Recipe, RunSpec
from redline.model.spec_table import layered, read_toml, refuse_too_many, specs_from_table
from redline.store.codec import read_exported
from redline.store.history import history_in
from redline.verbs.workspace import Workspace

LOOK_BACK = 200
"""How many of the latest stored records of a benchmark are its baseline."""
THRESHOLDS = ("threshold", "memory_threshold", "compile_threshold")
OWN_SETTINGS = ("name", *THRESHOLDS, "fail_on", "baseline_recipe", "baseline_model")
LONGEST_NAME = 200
REJECTED = "rejected"
"""A mark on records that did not pass: they are no baseline, or the second run of the same code would pass."""
ACCEPTED = "accepted"
"""A mark on the first record of a run: nothing older is a baseline any more."""


LONGEST_BUDGET_S = 7 * 86400.0


def check_budget(budget_s: float) -> None:
    """Of a gate, or of all gates of a bisection."""
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
    """What the model is called at the other commit, where its file or factory has moved since."""


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
    own = {name: table[name] for name in OWN_SETTINGS if name in table}
    rest = {name: value for name, value in table.items() if name not in OWN_SETTINGS}
    try:
        _check_own(own)
        specs = specs_from_table(layered(rest, overrides or {}))
        if "baseline_recipe" in own:
            own["baseline_recipe"] = Recipe.parse(own["baseline_recipe"])
    except SpecError as error:  # of a field, which does not know the file
        raise SpecError(f"{where}: {error}") from None
    name, checks = own.pop("name", ""), own.pop("fail_on", ())
    checks = [checks] if isinstance(checks, str) else checks
    for spec in specs:
        told = name if name and len(specs) == 1 else " ".join(part for part in (name, _name_of(spec)) if part)
        yield GateBenchmark(**own, name=told, spec=spec, fail_on=tuple(checks))


def _check_own(own: Mapping[str, Any]) -> None:
    """Raise a `SpecError` for a setting of the wrong type, or a name that no report could show."""
    for name in THRESHOLDS:
        value = own.get(name, THRESHOLD)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecError(f"{name} must be a number such as 0.05, got {value!r}")
    for name in ("name", "baseline_recipe", "baseline_model"):
        value = own.get(name, "x")
        if not isinstance(value, str) or not value.isprintable() or not 0 < len(value.strip()) <= LONGEST_NAME:
            told = repr(value) if len(repr(value)) <= LONGEST_NAME else f"{repr(value)[:40]}…"
            raise SpecError(f"{name} must be a text of 1 to {LONGEST_NAME} printable characters, got {told}")
    checks = own.get("fail_on", [])
    for each in [checks] if isinstance(checks, str) else checks if isinstance(checks, list) else [checks]:
        require_choice("fail_on", each, CheckName)


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
    for name in THRESHOLDS:
        value, most = getattr(benchmark, name), 1 if name == "threshold" else 10
        if not 0 < value < most:
            got = shown_number(value)
            raise SpecError(f"{benchmark.name}: {name} must be above 0 and below {most}, got {got}: 0.05 is 5 %")
    for name in benchmark.fail_on:
        require_choice("fail-on", name, CheckName)
    in_order = tuple(name for name in get_args(CheckName) if name in benchmark.fail_on)
    return msgspec.structs.replace(benchmark, fail_on=in_order)


class Baseline:
    """Where the other side comes from: a checkout that can be measured, stored records, or another recipe."""

    def __init__(
        self,
        told: str,
        *,
        checkout: Checkout | None = None,
        records: Sequence[RunRecord] | None = None,
        history: bool = False,
        tag: str | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        self.told = told
        self.checkout = checkout
        self.records = records
        self.history = history
        self.tag = tag
        self.recipe = recipe

    def stored(self, spec: RunSpec, workspace: Workspace) -> list[RunRecord]:
        """What is kept of this benchmark, whatever its settings; of a commit, what was measured at it."""
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
        return Baseline("the history", history=True)
    if kind == "recipe" and name:
        return Baseline(f"recipe {name}", recipe=Recipe.parse(name))
    if kind == "tag" and name:
        with workspace.reading() as history:
            if not history.tagged(name):
                raise UsageError(
                    f"no record in {history.location} has the tag {name!r}: 'redline history tag ID {name}' sets it"
                )
        return Baseline(f"records tagged {name}", tag=name)
    if is_file(word):
        return Baseline(word, records=read_records(Path(word)))
    commit = resolve_commit(word)
    told = word if commit.startswith(word) else f"{word} ({commit[:12]})"
    return Baseline(told, checkout=stack.enter_context(checked_out(word, environment)))


def read_records(path: Path) -> list[RunRecord]:
    """The records of an exported document, a back-up or another history."""
    with history_in(path) as history:
        return read_exported(path) if history is None else history.find(status="done")
