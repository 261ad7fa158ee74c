"""What a grid leaves out: tables of values of its axes, and which of them leave out nothing.

A value of the wrong kind or a word that nobody knows is a mistake. One that is only missing from this grid is told: a
grid is edited, and its exclusions may be older or newer than it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, get_args

import msgspec

from redline.analyze.sweep import IdleExclusion
from redline.errors import SpecError, UnknownName, UsageError
from redline.protocol import Checked
from redline.search.axes import AXES, listed, parse_batches
from redline.spec import Recipe, RunSpec, Task

_TASKS: tuple[Task, ...] = get_args(Task)
_WORDS = ("model", "recipe")
"""Axes on which each value is told that no cell has; a range of batches may well reach beyond the grid."""


@dataclass(frozen=True)
class Exclusion:
    """Fits the cells that have one of the wanted values on each of the axes it names."""

    wanted: Mapping[str, Sequence[Any]]

    def fits(self, cell: RunSpec) -> bool:
        return all(any(_has(cell, axis, value) for value in values) for axis, values in self.wanted.items())

    def idle(self, cells: Sequence[RunSpec]) -> IdleExclusion | None:
        """What it asks for in vain. Cells are the whole product, so one that fits none has an axis with no value of it."""
        fits_none = not any(self.fits(cell) for cell in cells)
        missing = {
            axis: [value for value in values if not any(_has(cell, axis, value) for cell in cells)]
            for axis, values in self.wanted.items()
            if fits_none or axis in _WORDS
        }
        told = [f"no {axis} {', '.join(map(str, values))}" for axis, values in missing.items() if values]
        if not told:
            return None
        exclusion = {axis: list(values) for axis, values in self.wanted.items()}
        return IdleExclusion(exclusion=exclusion, reason=f"the grid has {' and '.join(told)}")


def parse_exclusions(tables: Any, where: str) -> list[Exclusion]:
    if not isinstance(tables, list | tuple) or not all(isinstance(table, Mapping) for table in tables):
        raise SpecError(f"{where}: write each exclusion as a [[sweep.exclude]] table")
    return [_parsed(table, where) for table in tables]


def recipe_probes(idle: Sequence[IdleExclusion], cell: RunSpec) -> list[RunSpec]:
    """Only the bench knows all steps. So ask it whether a cell that is sound could have these recipes, in any task."""
    recipes = dict.fromkeys(text for found in idle for text in found.exclusion.get("recipe", []))
    return [
        msgspec.structs.replace(
            cell, recipe=Recipe.parse(text), workload=msgspec.structs.replace(cell.workload, task=task)
        )
        for text in recipes
        for task in _TASKS
    ]


def refuse_unknown_recipes(answers: Sequence[Checked]) -> None:
    """Raises for the first recipe that was refused in every task."""
    for recipe, group in groupby(answers, key=lambda answer: str(answer.spec.recipe)):
        reasons = [answer.usage for answer in group]
        if all(reasons):
            raise UsageError(f"an exclusion names the recipe {recipe}, which cannot be: {reasons[0]}")


def _parsed(table: Mapping[str, Any], where: str) -> Exclusion:
    if not table:
        raise SpecError(f"{where}: an exclusion must name at least one of {', '.join(AXES)}")
    for axis in table:
        if axis not in AXES:
            raise UnknownName("field of an exclusion", str(axis), AXES, hint=f"{where}: there are {', '.join(AXES)}")
    return Exclusion({axis: _values(axis, value, f"{where}: {axis} of an exclusion") for axis, value in table.items()})


def _values(axis: str, value: Any, what: str) -> list[Any]:
    values: list[Any] = parse_batches(value) if axis == "batch" else listed(value)
    if not values:
        raise SpecError(f"{what} must name at least one value, got {value!r}")
    if axis in ("batch", "threads"):
        _require_numbers(values, what)
        return values
    if not all(isinstance(text, str) for text in values):
        raise SpecError(f"{what} must be a text or a list of texts, got {value!r}")
    for text in values if axis == "task" else ():
        if text not in _TASKS:
            raise UnknownName("task", text, _TASKS, hint=f"{what}: there are {', '.join(_TASKS)}")
    return [Recipe.parse(text).canonical() for text in values] if axis == "recipe" else values


def _require_numbers(values: Sequence[Any], what: str) -> None:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SpecError(f"{what} must be a whole number of 1 or more, or a list of them, got {value!r}")


def _has(cell: RunSpec, axis: str, value: Any) -> bool:
    if axis == "model":
        return fnmatchcase(cell.workload.model, value)
    values = {"task": cell.workload.task, "threads": cell.threads, "batch": cell.workload.batch}
    return bool(value == (cell.recipe.canonical() if axis == "recipe" else values[axis]))
