"""From lists to cells: every combination of models, tasks, threads, batches and recipes, less what is excluded."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from redline.errors import SpecError, UnknownName
from redline.spec import Recipe, RunSpec, key_of, layered, memory_identity, specs_from_table

AXES = ("model", "task", "threads", "batch", "recipe")
_DOUBLING = re.compile(r"(\d+)\.\.(\d+)")

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


def cells_from_table(table: Mapping[str, Any], where: str = "sweep") -> list[RunSpec]:
    """One spec for each combination, in the order in which the lists were written, each once."""
    rest = dict(table)
    exclusions = _exclusions(rest.pop("exclude", []), where)
    tasks = _listed(rest.pop("task", None)) or ["infer"]
    threads = _listed(rest.pop("threads", None)) or [None]
    batches: list[int | None] = [*parse_batches(rest.pop("batch", None))] or [None]
    rest["model"], rest["recipe"] = _listed(rest.get("model")), _listed(rest.get("recipe")) or ["baseline"]
    cells = []
    for task, thread_count, batch in product(tasks, threads, batches):
        given = {"task": task, "threads": thread_count, "batch": batch}
        combination = {**rest, **{name: value for name, value in given.items() if value is not None}}
        cells += specs_from_table(combination, where=where)
    kept = [cell for cell in cells if not any(_fits(cell, exclusion) for exclusion in exclusions)]
    if not kept:
        raise SpecError(f"{where}: the exclusions leave nothing to measure")
    return _once_each(kept)


def parse_batches(value: Any) -> list[int]:
    """`8`, `[1, 8]`, `"1,8,16"` and `"16..512"`, which doubles from the first to the last."""
    found: list[int] = []
    for part in (word for item in _listed(value) for word in (item.split(",") if isinstance(item, str) else [item])):
        text = str(part).strip()
        doubling = _DOUBLING.fullmatch(text)
        if doubling:
            found += _doubled(int(doubling.group(1)), int(doubling.group(2)), text)
        elif text.isdecimal() and not isinstance(part, bool):
            found.append(int(text))
        else:
            raise SpecError(f"batch must be a number, a list such as 1,8,16 or a range such as 16..512, got {text!r}")
    return list(dict.fromkeys(found))


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


def _exclusions(tables: Any, where: str) -> list[dict[str, list[Any]]]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SpecError(f"{where}: write each exclusion as a [[sweep.exclude]] table")
    exclusions = []
    for table in tables:
        for name in table:
            if name not in AXES:
                raise UnknownName("field of an exclusion", name, AXES, hint=f"{where}: there are {', '.join(AXES)}")
        if not table:
            raise SpecError(f"{where}: an exclusion must name at least one of {', '.join(AXES)}")
        exclusion = {name: _listed(value) for name, value in table.items()}
        if "batch" in exclusion:
            exclusion["batch"] = parse_batches(exclusion["batch"])
        if "recipe" in exclusion:
            exclusion["recipe"] = [Recipe.parse(text).canonical() for text in exclusion["recipe"]]
        exclusions.append(exclusion)
    return exclusions


def _fits(cell: RunSpec, exclusion: Mapping[str, list[Any]]) -> bool:
    values = {
        "task": cell.workload.task,
        "threads": cell.threads,
        "batch": cell.workload.batch,
        "recipe": cell.recipe.canonical(),
    }
    return all(
        any(fnmatchcase(cell.workload.model, pattern) for pattern in wanted)
        if name == "model"
        else values[name] in wanted
        for name, wanted in exclusion.items()
    )


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


def _doubled(low: int, high: int, text: str) -> list[int]:
    if not 0 < low <= high:
        raise SpecError(f"batch range {text!r} must go from 1 or more upwards")
    batches = [low]
    while batches[-1] * 2 <= high:
        batches.append(batches[-1] * 2)
    return batches if batches[-1] == high else [*batches, high]


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple | set | range) else [value]


def _once_each(cells: Iterable[RunSpec]) -> list[RunSpec]:
    """Specs hold dictionaries, which cannot be hashed: told apart by how they are written down."""
    return list({msgspec.msgpack.encode(cell): cell for cell in cells}.values())
