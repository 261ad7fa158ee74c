"""From lists to cells: every combination of models, tasks, threads, batches and recipes, less what is excluded."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from redline.analyze.sweep import IdleExclusion
from redline.errors import SpecError, UnknownName
from redline.search.axes import listed, parse_batches
from redline.search.exclude import parse_exclusions
from redline.spec import Recipe, RunSpec, key_of, memory_identity
from redline.spec_table import layered, specs_from_table

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


def read_sweep(path: Path) -> dict[str, Any]:
    """The `[sweep]` table of a TOML file, over the settings at the top of the file."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"no such file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path} is not TOML: {error}") from None
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


def cells_from_table(table: Mapping[str, Any], where: str = "sweep") -> list[RunSpec]:
    """The cells of the grid alone."""
    return grid_from_table(table, where).cells


def grid_from_table(table: Mapping[str, Any], where: str = "sweep") -> Grid:
    rest = dict(table)
    exclusions = parse_exclusions(rest.pop("exclude", []), where)
    tasks = listed(rest.pop("task", None)) or ["infer"]
    threads = listed(rest.pop("threads", None)) or [None]
    batches: list[int | None] = [*parse_batches(rest.pop("batch", None))] or [None]
    rest["model"], rest["recipe"] = listed(rest.get("model")), listed(rest.get("recipe")) or ["baseline"]
    cells = []
    for task, thread_count, batch in product(tasks, threads, batches):
        given = {"task": task, "threads": thread_count, "batch": batch}
        combination = {**rest, **{name: value for name, value in given.items() if value is not None}}
        cells += specs_from_table(combination, where=where)
    kept = [cell for cell in cells if not any(exclusion.fits(cell) for exclusion in exclusions)]
    if not kept:
        raise SpecError(f"{where}: the exclusions leave nothing to measure")
    idle = [found for exclusion in exclusions if (found := exclusion.idle(cells)) is not None]
    return Grid(cells=_once_each(kept), idle=tuple(idle))


def in_informative_order(cells: Sequence[RunSpec]) -> list[RunSpec]:
    """Early cells should tell most: does it run at all, does the largest fit, then what lies between.

    Smallest batch first, then the largest, then halves of halves; at each, recipes that compile come last, because the
    others answer within seconds. Cells that compile the same graph stand next to each other.
    """
    ranks = _batch_ranks(cells)
    return sorted(cells, key=lambda cell: (ranks[cell.workload.batch], _compiles(cell.recipe)))


def default_name(cells: Sequence[RunSpec]) -> str:
    """The same grid has the same name, so running it again goes on."""
    models = list(dict.fromkeys(cell.workload.model for cell in cells))
    first = re.sub(r"[^\w.+-]+", "-", Path(models[0].partition(":")[0]).stem if "/" in models[0] else models[0])
    digest = hashlib.sha256(
        "".join(sorted({key_of(cell, memory_identity(cell)) for cell in cells})).encode()
    ).hexdigest()[:8]
    return f"{first}{f'+{len(models) - 1}' if len(models) > 1 else ''}-{digest}"


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


def _compiles(recipe: Recipe) -> bool:
    return any(step.name in ("compile", "torchscript") for step in recipe.steps)


def _once_each(cells: Iterable[RunSpec]) -> list[RunSpec]:
    """Specs hold dictionaries, which cannot be hashed: told apart by how they are written down."""
    return list({msgspec.msgpack.encode(cell): cell for cell in cells}.values())
