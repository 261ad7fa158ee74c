"""How values of a grid's axes are written: one, a list, and for batches a range as well."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby, product
from pathlib import Path
from typing import Any, get_args

import msgspec

from redline.analyze.sweep import IdleExclusion
from redline.model.errors import SpecError, UnknownName, UsageError
from redline.model.fields import MOST_CELLS, MOST_ITEMS, require_range
from redline.model.identity import spec_key
from redline.model.note import note
from redline.model.questions import Checked
from redline.model.spec import Recipe, RunSpec, Task
from redline.model.spec_table import for_trainers, layered, read_toml, specs_from_table

AXES = ("model", "task", "threads", "batch", "recipe")
LENGTHS = ("prompt", "new_tokens")
"""Axes of generation alone: cells of another task are the same for all of them."""
MOST_DIGITS = 19
"""For a number that is written as text; what they make is checked against the ranges of a spec."""
_DOUBLING = re.compile(rf"(\d{{1,{MOST_DIGITS}}})\.\.(\d{{1,{MOST_DIGITS}}})")


def listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple | set | range) else [value]


def parse_batches(value: Any, what: str = "batch") -> list[int]:
    """`8`, `[1, 8]`, `"1,8,16"` and `"16..512"`, which doubles from the first to the last."""
    found: list[int] = []
    for part in (word for item in listed(value) for word in (item.split(",") if isinstance(item, str) else [item])):
        if isinstance(part, int) and abs(part) > MOST_ITEMS:  # before it is written out, which may not be possible
            require_range(what, part, 1, MOST_ITEMS)
        text = str(part).strip()
        doubling = _DOUBLING.fullmatch(text)
        if doubling:
            found += _doubled(int(doubling.group(1)), int(doubling.group(2)), text)
        elif text.isdecimal() and not isinstance(part, bool):
            # A longer number is refused as too large; int() would refuse to read thousands of digits.
            number = int(text[: MOST_DIGITS + 1])
            require_range(what, number, 0, MOST_ITEMS)
            found.append(number)
        else:
            shown = text if len(text) < 40 else f"{text[:37]}…"
            raise SpecError(f"{what} must be a number, a list such as 1,8,16 or a range such as 16..512, got {shown!r}")
    return list(dict.fromkeys(found))


def _doubled(low: int, high: int, text: str) -> list[int]:
    if not 0 < low <= high:
        raise SpecError(f"batch range {text!r} must go from 1 or more upwards")
    batches = [low]
    while batches[-1] * 2 <= high:
        batches.append(batches[-1] * 2)
    return batches if batches[-1] == high else [*batches, high]


_TASKS: tuple[Task, ...] = get_args(Task)
_WORDS = ("model", "recipe")
"""Axes on which a value that no cell has is reported; a range of batches may reach beyond the grid."""


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
        return IdleExclusion(exclusion=exclusion, reason=note("not-in-grid", f"the grid has {' and '.join(told)}"))


def parse_exclusions(tables: Any, where: str) -> list[Exclusion]:
    if not isinstance(tables, list | tuple) or not all(isinstance(table, Mapping) for table in tables):
        raise SpecError(f"{where}: write each exclusion as a [[sweep.exclude]] table")
    return [_parsed(table, where) for table in tables]


def recipe_probes(idle: Sequence[IdleExclusion], cell: RunSpec) -> list[RunSpec]:
    """Only the bench knows all switches. So ask it whether a cell that is sound could have these recipes, in any task."""
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


PRESETS: dict[str, dict[str, Any]] = {
    "fp16-torchscript": {
        "model": ["resnet50", "vit_b_16"],
        "recipe": ["baseline", "fp16", "torchscript"],
        "batch": [1, 8, 16, 32],
        "task": "infer",
    },
    # On pictures of CIFAR-10's size, as the study did.
    "amp-batches": {
        "model": "resnet18",
        "recipe": "amp",
        "batch": "16..512",
        "task": "train",
        "image_size": 32,
        "classes": 10,
    },
}
"""Studies by name: half precision and TorchScript for inference, and how far AMP training goes with the batch."""


def preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        raise UnknownName("preset", name, PRESETS, hint=f"there are {', '.join(PRESETS)}")
    return PRESETS[name]


def read_sweep(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """The `[sweep]` table of a TOML file, over the settings at the top of the file."""
    document = read_toml(path, trust=trust)
    table = document.pop("sweep", None)
    if not isinstance(table, dict):
        raise SpecError(f"{path} has no [sweep] table")
    return layered(document, table)


@dataclass(frozen=True, kw_only=True)
class Grid:
    cells: list[RunSpec]
    """One spec for each combination, in the order in which the lists were written, each once."""
    idle: tuple[IdleExclusion, ...] = ()
    """Exclusions that ask for what no combination has."""


def grid_from_table(table: Mapping[str, Any], where: str = "sweep") -> Grid:
    rest = dict(table)
    exclusions = parse_exclusions(rest.pop("exclude", []), where)
    tasks = listed(rest.pop("task", None)) or ["infer"]
    threads = listed(rest.pop("threads", None)) or [None]
    batches: list[int | None] = [*parse_batches(rest.pop("batch", None))] or [None]
    lengths: dict[str, list[int | None]] = {
        name: [*parse_batches(rest.pop(name, None), name)] or [None] for name in LENGTHS
    }
    if rest.get("items") is not None and len(batches) > 1:
        raise SpecError(f"{where}: items is what one batch counts as: for several the factory must return items itself")
    rest["model"], rest["recipe"] = listed(rest.get("model")), listed(rest.get("recipe")) or ["baseline"]
    number = math.prod(map(len, (tasks, threads, batches, *lengths.values(), rest["model"], rest["recipe"])))
    if number > MOST_CELLS:
        raise SpecError(f"{where}: the grid has {number} cells; a sweep takes {MOST_CELLS} at most")
    combinations = [
        {**rest, **{name: value for name, value in given.items() if value is not None}}
        for task, thread_count, batch, prompt, new_tokens in product(tasks, threads, batches, *lengths.values())
        if (
            given := {
                "task": task,
                "threads": thread_count,
                "batch": batch,
                **({"prompt": prompt, "new_tokens": new_tokens} if task == "generate" else {}),
            }
        )
    ]
    cells = [cell for table in for_trainers(combinations) for cell in specs_from_table(table, where=where)]
    kept = [cell for cell in cells if not any(exclusion.fits(cell) for exclusion in exclusions)]
    if not kept:
        raise SpecError(f"{where}: the exclusions leave nothing to measure")
    idle = [found for exclusion in exclusions if (found := exclusion.idle(cells)) is not None]
    return Grid(cells=_once_each(kept), idle=tuple(idle))


def in_informative_order(answers: Sequence[Checked]) -> list[Checked]:
    """Cells in the order of what they tell: whether it runs at all, whether the largest fits, then those between.

    Smallest batch first, then the largest, then halves of halves; at each, recipes that compile come last, because the
    others answer within seconds. Cells that compile the same graph stand next to each other.
    """
    ranks = _batch_ranks(answer.spec for answer in answers)
    return sorted(answers, key=lambda answer: (ranks[answer.spec.workload.batch], answer.capabilities.compiles))


def default_name(cells: Sequence[RunSpec]) -> str:
    """The same grid has the same name, so running it again goes on."""
    models = list(dict.fromkeys(cell.workload.model for cell in cells))
    first = re.sub(r"[^\w.+-]+", "-", Path(models[0].partition(":")[0]).stem if "/" in models[0] else models[0])
    digest = hashlib.sha256("".join(sorted({spec_key(cell) for cell in cells})).encode()).hexdigest()[:8]
    return f"{first}{f'+{len(models) - 1}' if len(models) > 1 else ''}-{digest}"


def is_default_name(name: str) -> bool:
    """Whether a sweep was named by its grid, and not by a person."""
    return re.fullmatch(r".*-[0-9a-f]{8}", name) is not None


def _batch_ranks(cells: Iterable[RunSpec]) -> dict[int | None, int]:
    batches = sorted({cell.workload.batch for cell in cells}, key=lambda batch: batch or 0)
    order = [batches[0], batches[-1], *_middles(batches[1:-1])]
    return {batch: rank for rank, batch in enumerate(dict.fromkeys(order))}


def _middles(batches: list[int | None]) -> list[int | None]:
    """Halves of halves, level by level."""
    order, waiting = [], [batches]
    while waiting:
        part = waiting.pop(0)
        if part:
            middle = len(part) // 2
            order.append(part[middle])
            waiting += [part[:middle], part[middle + 1 :]]
    return order


def _once_each(cells: Iterable[RunSpec]) -> list[RunSpec]:
    """Specs hold dictionaries, which cannot be hashed: told apart by how they are written down."""
    return list({msgspec.msgpack.encode(cell): cell for cell in cells}.values())
