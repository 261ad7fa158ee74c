"""The file of a gate: benchmarks as `redline run --file` reads them, with a name, thresholds and checks for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from redline.analyze.gate import COMPILE_THRESHOLD, MEMORY_THRESHOLD, THRESHOLD, CheckName
from redline.errors import SpecError
from redline.launch.checkout import Setup
from redline.spec import Frozen, Recipe, RunSpec, require_choice
from redline.spec_table import layered, read_toml, specs_from_table

OWN_SETTINGS = ("name", "threshold", "fail_on", "memory_threshold", "compile_threshold", "baseline_recipe")


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
    found = [
        each for run in runs for each in _benchmarks(layered({"effort": "quick"}, document, run), overrides, str(path))
    ]
    given = {} if threshold is None else {"threshold": threshold}
    found = [
        checked_benchmark(msgspec.structs.replace(each, **given, fail_on=(*each.fail_on, *fail_on))) for each in found
    ]
    twice = [each.name for index, each in enumerate(found) if each.name in {other.name for other in found[:index]}]
    if twice:
        raise SpecError(f"{path}: two benchmarks are called {twice[0]!r}: give each [[run]] a name of its own")
    return found, environment


def _benchmarks(table: Mapping[str, Any], overrides: Mapping[str, Any] | None, where: str) -> Iterator[GateBenchmark]:
    own = {name: table[name] for name in OWN_SETTINGS if name in table}
    rest = {name: value for name, value in table.items() if name not in OWN_SETTINGS}
    specs = specs_from_table(layered(rest, overrides or {}), where=where)
    name = own.pop("name", None)
    if name is not None and not isinstance(name, str):
        raise SpecError(f"{where}: name must be a text, got {name!r}")
    if "baseline_recipe" in own:
        own["baseline_recipe"] = msgspec.to_builtins(Recipe.parse(own["baseline_recipe"]))
    for spec in specs:
        told = name if name and len(specs) == 1 else " ".join(part for part in (name, _name_of(spec)) if part)
        yield _table({**own, "name": told, "spec": msgspec.to_builtins(spec)}, GateBenchmark, where)


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
    for name in ("threshold", "memory_threshold", "compile_threshold"):
        value = getattr(benchmark, name)
        if not 0 < value < 10:
            raise SpecError(f"{name} must be above 0 and below 10, got {value:g}: 0.05 is 5 %")
    for name in benchmark.fail_on:
        require_choice("fail-on", name, CheckName)
    in_order = tuple(name for name in get_args(CheckName) if name in benchmark.fail_on)
    return msgspec.structs.replace(benchmark, fail_on=in_order)
