"""This module makes grids and plans. Every setting of a run may have several values; cells that differ in their recipe alone are compared.

A plan knows the keys of its cells before anything runs. The spec key of a record holds the hash of the built model, so
it comes too late to ask whether a cell is already measured. The plan key stands in for it: the spec, the machine as one
question to the bench describes it, and what the model's source knows without building it
(`docs/decisions/0002-plan-keys.md`).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from redline.model.errors import SpecError, UsageError
from redline.model.fields import MOST_CELLS, MOST_ITEMS, Frozen, require_range
from redline.model.identity import plan_key, spec_key
from redline.model.note import Note, note
from redline.model.protocol import Checked
from redline.model.record import Environment
from redline.model.spec import Recipe, RunSpec
from redline.model.spec_table import SHARED, for_tasks, specs_from_table, training_table
from redline.store import SettledCell

STRUCTURED = ("model", "recipe", "measure", "launch", "train", "batch_axis")
"""One value of these settings may itself be a list or a table."""
CHOICES = {"device", *(name for name, declared in SHARED.items() if declared.choices)}
"""The values of these settings are words without commas, so that several may be written as one text: cpu,cuda."""
WHOLE = {name for name, declared in SHARED.items() if declared.kind is int}
"""These settings are whole numbers, so that a text such as 1,8 or 1..8 means several."""
MOST_DIGITS = 19
"""A number written as text has at most this many digits. The number itself is checked against the ranges of a spec."""
_DOUBLING = re.compile(rf"(\d{{1,{MOST_DIGITS}}})\.\.(\d{{1,{MOST_DIGITS}}})")
_NUMBER = re.compile(rf"-?\d{{1,{MOST_DIGITS + 1}}}")


def listed(value: Any) -> list[Any]:
    """Returns a list of one value or of several; it is empty for None."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple | set | range) else [value]


def parse_numbers(value: Any, what: str = "batch") -> list[int]:
    """Returns the numbers that `8`, `[1, 8]`, `"1,8,16"` or `"16..512"` means; the last form doubles from its first number to its last."""
    numbers: list[int] = []
    for part in (word for item in listed(value) for word in (item.split(",") if isinstance(item, str) else [item])):
        if (
            isinstance(part, int) and abs(part) > MOST_ITEMS
        ):  # it is checked before it is written out, which may not be possible
            require_range(what, part, 1, MOST_ITEMS)
        text = str(part).strip()
        if doubling := _DOUBLING.fullmatch(text):
            low, high = map(int, doubling.groups())
            if not 0 < low <= high:
                raise SpecError(f"{what} range {text!r} must go from 1 or more upwards")
            numbers += [*(low << power for power in range((high // low).bit_length())), high]
        elif text.isdecimal() and not isinstance(part, bool):
            # A longer number is refused as too large; int() would refuse to read thousands of digits.
            numbers.append(int(text[: MOST_DIGITS + 1]))
            require_range(what, numbers[-1], 0, MOST_ITEMS)
        else:
            shown = text if len(text) < 40 else f"{text[:37]}…"
            raise SpecError(f"{what} must be a number, a list such as 1,8,16 or a range such as 16..512, got {shown!r}")
    return list(dict.fromkeys(numbers))


class LeftOut(Frozen):
    """This is left out of a plan: an impossible combination, such as training with a switch for inference, or a missing device."""

    name: str
    """It is the name of its run, or else its model, task and recipe."""
    reason: Note


@dataclass(frozen=True, kw_only=True)
class Grid:
    cells: list[RunSpec]
    """There is one spec for each combination, in the order in which the values were written."""
    runs: list[str] = field(default_factory=list)
    """These are the names of each cell's [[run]]; a name is empty if the run has none."""


def grid_from_tables(tables: Sequence[Mapping[str, Any]], where: str = "") -> Grid:
    """Returns the cells of all tables of settings. Each table is a grid of its own, and may have a `name`."""
    try:
        numbered = [_expanded(table) for table in tables]
        number = sum(count for count, _ in numbered)
        if number > MOST_CELLS:
            raise SpecError(f"the grid has {number} cells; it may have {MOST_CELLS} at most")
        named = [combination for _, combinations in numbered for combination in combinations]
        tasked = for_tasks([table for _, table in named])
        cells = [
            (cell_name(name, cell), cell)
            for (name, _), table in zip(named, tasked, strict=True)
            for cell in specs_from_table(table)
        ]
    except UsageError as error:
        # A range, an effort or a recipe is refused by its own class, which does not know the file.
        raise (SpecError(f"{where}: {error}") if where else error) from None
    return Grid(cells=[cell for _, cell in cells], runs=[name for name, _ in cells])


def _expanded(table: Mapping[str, Any]) -> tuple[int, Iterable[tuple[str, dict[str, Any]]]]:
    """Returns how many cells a table has, and a table for each combination of its settings; models and recipes stay lists."""
    rest = dict(table)
    name = rest.pop("name", "")
    if not isinstance(name, str):
        raise SpecError(f"the name of a run must be a text, got {name!r}")
    axes = {setting: setting_values(setting, value) for setting, value in rest.items()}
    if empty := next((setting for setting, values in axes.items() if not values), None):
        raise SpecError(f"{empty} must name at least one value")
    if rest.get("items") is not None and len(axes.get("batch", ())) > 1:
        raise SpecError("items is what one batch counts as: for several the factory must return items itself")
    several = [len(listed(rest.get("model"))), max(len(listed(rest.get("recipe"))), 1)]

    def tables() -> Iterable[tuple[str, dict[str, Any]]]:
        for values in product(*axes.values()):
            combination = dict(zip(axes, values, strict=True))
            data = combination.pop("data", None)
            yield name, combination if data is None else training_table(data, combination)

    return math.prod([*map(len, axes.values()), *several]), tables()


def setting_values(setting: str, value: Any) -> list[Any]:
    """Returns the values of a setting. There is a single one for settings that are lists by nature, and for models and recipes."""
    if setting in STRUCTURED:
        return [value]
    for part in listed(value):
        if isinstance(part, dict | list | tuple | set):
            raise SpecError(f"{setting} takes texts, numbers, true or false, or a list of them, got {part!r}")
    texts = [part.strip() for part in listed(value) if isinstance(part, str)]
    if setting in WHOLE and len(texts) == len(listed(value)) == 1 and _NUMBER.fullmatch(texts[0]):
        return [int(texts[0])]  # its range is checked where the spec is made
    if setting in WHOLE and texts:
        return list(parse_numbers(value, setting))
    if setting in CHOICES and isinstance(value, str):
        return [word.strip() for word in value.split(",")]
    return list(dict.fromkeys(value)) if isinstance(value, list | tuple | set | range) else [value]


def value_of(cell: RunSpec, setting: str) -> Any:
    """Returns the value that a setting has in a spec, wherever it stands there; None if the spec has no such field."""
    data = cell.train.data if cell.train is not None else None
    elsewhere = {
        "effort": cell.measure.effort,
        "max_memory": cell.launch.memory_limit_bytes,
        "data": data and data.name,
    }
    parts = (part for part in (cell, cell.workload, cell.train, data) if hasattr(part, setting))
    return elsewhere[setting] if setting in elsewhere else getattr(next(parts, None), setting, None)


def cell_name(template: str, cell: RunSpec) -> str:
    """Returns the name of a run, in which `{threads}` is replaced by the value of that setting."""
    filled = re.sub(r"\{(\w+)\}", lambda found: str(value_of(cell, found[1])), template)
    return re.sub(r"\b1 (loader )?(thread|worker|rank|epoch)s\b", r"1 \1\2", filled)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell is one combination, to be measured in a process of its own."""

    spec: RunSpec
    key: str
    replicate: int = 1
    run: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    name: str
    groups: tuple[tuple[Cell, ...], ...]
    """Cells of one group differ in their recipe alone and are measured interleaved. The groups are in the order of measuring."""
    is_kept: bool = True
    """If it is True, the cells have keys by which a later process finds them; else the keys are mere numbers."""
    left_out: tuple[LeftOut, ...] = ()

    @cached_property
    def cells(self) -> list[Cell]:
        return [cell for group in self.groups for cell in group]

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return axes_of(self.cells)


def axes_of(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Returns the settings that are not the same in all cells, apart from model, task and recipe."""
    return tuple(name for name in _SETTINGS if len({str(value_of(cell.spec, name)) for cell in cells}) > 1)


_SETTINGS = tuple(dict.fromkeys(("device", "threads", "ranks", "batch", *SHARED, "data")))
"""These settings tell the rows of a table apart, in the order of its columns."""


def make_plan(
    grid: Grid,
    answers: Sequence[Checked],
    environment_of: Callable[[str], Environment],
    name: str | None = None,
    *,
    replicates: int = 1,
    decides: bool = False,
    is_kept: bool | None = None,
) -> Plan:
    """Makes a plan from a grid and the bench's answers about it. A mistake is raised, and an impossible combination is left out.

    With `decides` a group is measured until its pairs are decided; functions are then compared with each other too. With `is_kept`
    a later process may go on with the plan. A single group, which is settled all at once, is kept only where that is asked for,
    because its keys cost a question about the machine.
    """
    possible = [answer.spec for answer in answers if answer.usage is None]
    left_out: list[LeftOut] = []
    together: dict[bytes, list[tuple[int, Checked, str]]] = {}
    for number, (answer, run) in enumerate(zip(answers, grid.runs or [""] * len(answers), strict=True)):
        if answer.usage is None:
            together.setdefault(_comparison(answer.spec, number, decides), []).append((number, answer, run))
        else:
            left_out.append(_left_out(answer.spec, answer.usage, possible, run))
    is_kept = decides or len(together) * replicates > 1 if is_kept is None else is_kept
    places = {device: environment_of(device) for device in {spec.device for spec in possible if is_kept}}
    copies: Counter[str] = Counter()

    def cell_of(number: int, answer: Checked, run: str) -> Cell:
        key = plan_key(answer.spec, answer.fingerprint, places[answer.spec.device]) if is_kept else str(number)
        key = f"decide {key}" if decides else key
        copies[key] += 1  # a cell that was asked for twice is measured twice
        return Cell(spec=answer.spec, key=key if copies[key] == 1 else f"{key}~{copies[key]}", run=run)

    groups = [[cell_of(*numbered) for numbered in group] for group in together.values()]
    return Plan(
        # The name follows from what was asked for, as what `auto` means may differ from machine to machine.
        name=name or default_name(grid.cells, "decide" if decides else ""),
        # All cells are measured once before any is measured again, so that what drifts hits all of them alike.
        groups=tuple(
            tuple(_repeated(cell, number) for cell in group)
            for number in range(1, (1 if decides else replicates) + 1)
            for group in groups
        ),
        is_kept=is_kept,
        left_out=tuple(left_out),
    )


def _comparison(spec: RunSpec, number: int, decides: bool) -> bytes:
    """Returns a key that cells share if they differ in their recipe alone, and so are compared. Trainings on data run by themselves."""
    if spec.train is not None:
        return str(number).encode()
    workload = spec.workload
    if decides and workload.task == "step":  # one function is compared with another
        workload = msgspec.structs.replace(workload, model="step", artifact=None)
    return msgspec.msgpack.encode(msgspec.structs.replace(spec, recipe=Recipe(), workload=workload))


def _repeated(cell: Cell, replicate: int) -> Cell:
    """Returns the cell of a replicate. The first keeps the plain key, so that asking for more replicates goes on with what is there."""
    if replicate == 1:
        return cell
    return Cell(spec=cell.spec, key=f"{cell.key}-{replicate}", replicate=replicate, run=cell.run)


def _left_out(spec: RunSpec, reason: str, possible: Sequence[RunSpec], run: str) -> LeftOut:
    """Returns the combination with its reason. The refusal is raised as a mistake unless model and recipe are both possible elsewhere."""
    model_is_sound = any(other.workload.model == spec.workload.model for other in possible)
    if not (model_is_sound and any(other.recipe == spec.recipe for other in possible)):
        raise UsageError(reason)
    name = run or f"{spec.workload.model} {spec.workload.task} {spec.recipe}"
    return LeftOut(name=name, reason=note("impossible", reason))


def check_name(name: Any) -> None:
    """Refuses a name that cannot be used later, because `redline compare` takes several names joined by commas."""
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise SpecError(f"name must be a text that is not empty, got {name!r}")
    if name is not None and "," in name:
        raise SpecError(f"name must not have a comma, which joins names where grids are compared, got {name!r}")


def default_name(cells: Sequence[RunSpec], besides: str = "") -> str:
    """Returns a name that is the same for the same grid, so that a resume finds it."""
    models = list(dict.fromkeys(cell.workload.model for cell in cells))
    first = re.sub(r"[^\w.+-]+", "-", Path(models[0].partition(":")[0]).stem if "/" in models[0] else models[0])
    text = "".join(sorted({spec_key(cell) for cell in cells})) + besides
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{first}{f'+{len(models) - 1}' if len(models) > 1 else ''}-{digest}"


@dataclass(frozen=True, kw_only=True)
class GridSummary:
    """The summary says how every cell of a grid stands; None stands for a cell that is still to be measured."""

    name: str
    cells: tuple[tuple[Cell, SettledCell | None], ...]
    left_out: tuple[LeftOut, ...] = ()

    def count(self, status: str | None) -> int:
        """Returns how many cells stand so; None counts those that are still to be measured."""
        return sum((settled and settled.status) == status for _, settled in self.cells)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return axes_of([cell for cell, _ in self.cells])

    @property
    def sweeps(self) -> bool:
        """Returns whether cells differ in more than models and recipes: they have other batches, threads or devices, or are named runs."""
        return bool(self.axes) or any(cell.run for cell, _ in self.cells)


def standing(plan: Plan, settled: Mapping[str, SettledCell]) -> GridSummary:
    """Returns how every cell of the plan stands."""
    cells = tuple((cell, settled.get(cell.key)) for cell in plan.cells)
    return GridSummary(name=plan.name, cells=cells, left_out=plan.left_out)
