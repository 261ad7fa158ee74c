"""A grid and its plan: every setting of a run may have several values; cells that differ in their recipe alone are compared.

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
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any, get_args

import msgspec

from redline.model.errors import SpecError, UnknownName, UsageError
from redline.model.fields import MOST_CELLS, MOST_ITEMS, Frozen, require_range
from redline.model.identity import plan_key, spec_key
from redline.model.note import Note, note
from redline.model.protocol import Checked
from redline.model.record import Environment, RunRecord
from redline.model.spec import Recipe, RunSpec, Task
from redline.model.spec_table import SHARED, for_tasks, specs_from_table, training_table
from redline.store import History, Row, SettledCell

AXES = ("model", "task", "threads", "batch", "recipe")
"""Settings that an exclusion may name."""
STRUCTURED = ("measure", "launch", "train", "batch_axis")
"""Settings whose one value may be a list or a table."""
CHOICES = {"device", *(name for name, declared in SHARED.items() if declared.choices)}
"""Settings whose values are words without commas, so that several may be written as one text: cpu,cuda."""
MOST_DIGITS = 19
"""Digits of a number written as text. The number itself is checked against the ranges of a spec."""
_DOUBLING = re.compile(rf"(\d{{1,{MOST_DIGITS}}})\.\.(\d{{1,{MOST_DIGITS}}})")
_NUMBER = re.compile(rf"-?\d{{1,{MOST_DIGITS + 1}}}")
WHOLE = {name for name, declared in SHARED.items() if declared.kind is int}
"""Settings that are whole numbers: a text such as 1,8 or 1..8 means several."""


def listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple | set | range) else [value]


def parse_numbers(value: Any, what: str = "batch") -> list[int]:
    """Reads `8`, `[1, 8]`, `"1,8,16"` and `"16..512"`, which doubles from the first to the last."""
    numbers: list[int] = []
    for part in (word for item in listed(value) for word in (item.split(",") if isinstance(item, str) else [item])):
        if isinstance(part, int) and abs(part) > MOST_ITEMS:  # before it is written out, which may not be possible
            require_range(what, part, 1, MOST_ITEMS)
        text = str(part).strip()
        doubling = _DOUBLING.fullmatch(text)
        if doubling:
            numbers += _doubled(int(doubling.group(1)), int(doubling.group(2)), text, what)
        elif text.isdecimal() and not isinstance(part, bool):
            # A longer number is refused as too large; int() would refuse to read thousands of digits.
            number = int(text[: MOST_DIGITS + 1])
            require_range(what, number, 0, MOST_ITEMS)
            numbers.append(number)
        else:
            shown = text if len(text) < 40 else f"{text[:37]}…"
            raise SpecError(f"{what} must be a number, a list such as 1,8,16 or a range such as 16..512, got {shown!r}")
    return list(dict.fromkeys(numbers))


def _doubled(low: int, high: int, text: str, what: str) -> list[int]:
    if not 0 < low <= high:
        raise SpecError(f"{what} range {text!r} must go from 1 or more upwards")
    numbers = [low]
    while numbers[-1] * 2 <= high:
        numbers.append(numbers[-1] * 2)
    return numbers if numbers[-1] == high else [*numbers, high]


class IdleExclusion(Frozen):
    """An exclusion that matches nothing in the grid: left over from another grid, or misspelt."""

    exclusion: dict[str, list[Any]]
    reason: Note

    def __str__(self) -> str:
        fields = (f"{axis} {', '.join(map(str, values))}" for axis, values in self.exclusion.items())
        return f"the exclusion of {'; '.join(fields)}: {self.reason}"


class LeftOut(Frozen):
    """What is not measured: an impossible combination, such as training with a switch for inference, or a missing device."""

    name: str
    """It is the name of its run, or else its model, task and recipe."""
    reason: Note


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
        """Returns what it asks for in vain, if anything. Cells are the whole product, so one that fits none has an axis with no value of it."""
        fits_none = not any(self.fits(cell) for cell in cells)
        missing = {
            axis: [value for value in values if not any(_has(cell, axis, value) for cell in cells)]
            for axis, values in self.wanted.items()
            if fits_none or axis in _WORDS
        }
        absent = [f"no {axis} {', '.join(map(str, values))}" for axis, values in missing.items() if values]
        if not absent:
            return None
        exclusion = {axis: list(values) for axis, values in self.wanted.items()}
        return IdleExclusion(exclusion=exclusion, reason=note("not-in-grid", f"the grid has {' and '.join(absent)}"))


def parse_exclusions(tables: Any) -> list[Exclusion]:
    if not isinstance(tables, list | tuple) or not all(isinstance(table, Mapping) for table in tables):
        raise SpecError("write each exclusion as a [[exclude]] table")
    return [_parsed(table) for table in tables]


def _parsed(table: Mapping[str, Any]) -> Exclusion:
    if not table:
        raise SpecError(f"an exclusion must name at least one of {', '.join(AXES)}")
    for axis in table:
        if axis not in AXES:
            raise UnknownName("field of an exclusion", str(axis), AXES, hint=f"there are {', '.join(AXES)}")
    return Exclusion({axis: _values(axis, value) for axis, value in table.items()})


def _values(axis: str, value: Any) -> list[Any]:
    values: list[Any] = parse_numbers(value) if axis == "batch" else listed(value)
    what = f"{axis} of an exclusion"
    if not values:
        raise SpecError(f"{what} must name at least one value, got {value!r}")
    if axis in ("batch", "threads"):
        for number in values:
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise SpecError(f"{what} must be a whole number of 1 or more, or a list of them, got {number!r}")
        return values
    if not all(isinstance(text, str) for text in values):
        raise SpecError(f"{what} must be a text or a list of texts, got {value!r}")
    for text in values if axis == "task" else ():
        if text not in _TASKS:
            raise UnknownName("task", text, _TASKS, hint=f"{what}: there are {', '.join(_TASKS)}")
    return [Recipe.parse(text).canonical() for text in values] if axis == "recipe" else values


def _has(cell: RunSpec, axis: str, value: Any) -> bool:
    if axis == "model":
        return fnmatchcase(cell.workload.model, value)
    values = {"task": cell.workload.task, "threads": cell.threads, "batch": cell.workload.batch}
    return bool(value == (cell.recipe.canonical() if axis == "recipe" else values[axis]))


@dataclass(frozen=True, kw_only=True)
class Grid:
    cells: list[RunSpec]
    """One spec for each combination, in the order in which the values were written."""
    runs: list[str] = field(default_factory=list)
    """The name of each cell's [[run]]; empty for one without a name."""
    idle: tuple[IdleExclusion, ...] = ()
    """Exclusions that ask for what no combination has."""


def grid_from_tables(tables: Sequence[Mapping[str, Any]], exclude: Any = (), where: str = "") -> Grid:
    """All cells of all tables of settings: each table is a grid of its own, and may have a `name`."""
    try:
        exclusions = parse_exclusions(exclude)
        named = _named_cells(tables)
    except UsageError as error:
        # A range, an effort or a recipe is refused by its own class, which does not know the file.
        raise (SpecError(f"{where}: {error}") if where else error) from None
    kept = [(name, cell) for name, cell in named if not any(exclusion.fits(cell) for exclusion in exclusions)]
    cells = [cell for _, cell in named]
    if cells and not kept:
        raise SpecError(f"{where}: the exclusions leave nothing to measure".removeprefix(": "))
    idle = [found for exclusion in exclusions if (found := exclusion.idle(cells)) is not None]
    return Grid(cells=[cell for _, cell in kept], runs=[name for name, _ in kept], idle=tuple(idle))


def _named_cells(tables: Sequence[Mapping[str, Any]]) -> list[tuple[str, RunSpec]]:
    numbered = [_expanded(table) for table in tables]
    number = sum(count for count, _ in numbered)
    if number > MOST_CELLS:
        raise SpecError(f"the grid has {number} cells; it may have {MOST_CELLS} at most")
    combinations = [combination for _, found in numbered for combination in found]
    tasked = for_tasks([combination for _, combination in combinations])
    return [
        (cell_name(name, cell), cell)
        for (name, _), table in zip(combinations, tasked, strict=True)
        for cell in specs_from_table(table)
    ]


def _expanded(table: Mapping[str, Any]) -> tuple[int, Iterable[tuple[str, dict[str, Any]]]]:
    """How many cells a table has, and a table for each combination of its settings; models and recipes stay lists."""
    rest = dict(table)
    name = rest.pop("name", "")
    if not isinstance(name, str):
        raise SpecError(f"the name of a run must be a text, got {name!r}")
    models, recipes = listed(rest.get("model")), listed(rest.get("recipe"))
    axes = {setting: values for setting in list(rest) if len(values := setting_values(setting, rest[setting])) != 1}
    for setting, values in axes.items():
        if not values:
            raise SpecError(f"{setting} must name at least one value")
    single = {
        setting: value for setting in rest if setting not in axes for value in setting_values(setting, rest[setting])
    }
    if single.get("items") is not None and len(axes.get("batch", ())) > 1:
        raise SpecError("items is what one batch counts as: for several the factory must return items itself")
    count = math.prod(map(len, axes.values())) * len(models) * max(len(recipes), 1)

    def tables() -> Iterable[tuple[str, dict[str, Any]]]:
        for values in product(*axes.values()):
            combination = {**single, **dict(zip(axes, values, strict=True))}
            data = combination.pop("data", None)
            yield name, combination if data is None else training_table(data, combination)

    return count, tables()


def setting_values(setting: str, value: Any) -> list[Any]:
    """The values of a setting; a single one for settings that are lists by nature, and for models and recipes."""
    if setting in ("model", "recipe", *STRUCTURED):
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
    """Returns the value of a setting in a spec, wherever it stands there; None where the spec has no such field."""
    if setting == "effort":
        return cell.measure.effort
    if setting == "max_memory":
        return cell.launch.memory_limit_bytes
    if setting == "data":
        return cell.train.data.name if cell.train is not None else None
    data = cell.train.data if cell.train is not None else None
    return next(
        (getattr(part, setting) for part in (cell, cell.workload, cell.train, data) if hasattr(part, setting)), None
    )


def cell_name(template: str, cell: RunSpec) -> str:
    """Returns the name of a run, where `{threads}` stands for the value of that setting."""
    return re.sub(r"\{(\w+)\}", lambda found: str(value_of(cell, found[1])), template)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination, to be measured in a process of its own."""

    spec: RunSpec
    key: str
    replicate: int = 1
    run: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    name: str
    groups: tuple[tuple[Cell, ...], ...]
    """Cells of one group differ in their recipe alone and are measured interleaved. In the order of measuring."""
    is_kept: bool = True
    """Its cells have keys by which a later process finds them; without, the keys are mere numbers."""
    shares: bool = False
    """It has no name of its own: cells that another such grid has measured need not be measured again."""
    left_out: tuple[LeftOut, ...] = ()
    idle_exclusions: tuple[IdleExclusion, ...] = ()

    @cached_property
    def cells(self) -> list[Cell]:
        return [cell for group in self.groups for cell in group]

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return axes_of(self.cells)


def axes_of(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Settings that are not the same in all cells, apart from model, task and recipe."""
    return tuple(name for name in _SETTINGS if len({str(value_of(cell.spec, name)) for cell in cells}) > 1)


_SETTINGS = tuple(dict.fromkeys(("device", "threads", "ranks", "batch", *SHARED, "data")))
"""Settings that tell the rows of a table apart, in the order of its columns."""


def make_plan(
    grid: Grid,
    answers: Sequence[Checked],
    environment_of: Callable[[str], Environment],
    name: str | None = None,
    *,
    replicates: int = 1,
    decides: bool = False,
    is_kept: bool | None = None,
    left_out: Sequence[LeftOut] = (),
) -> Plan:
    """Makes a plan from a grid and the bench's answers about it. A mistake is raised; a combination that cannot be is left out.

    `decides`: a group is measured until its pairs are decided; functions are then compared with each other too.
    `is_kept`: a later process may go on with it. A single group, which is settled all at once, is kept only where that is asked for: its keys cost
    a question about the machine.
    """
    possible = [answer for answer in answers if answer.usage is None]
    runs = grid.runs or [""] * len(answers)
    refused = [
        _left_out(answer, possible, run) for answer, run in zip(answers, runs, strict=True) if answer.usage is not None
    ]
    numbered = list(enumerate(zip(answers, runs, strict=True)))
    together: dict[bytes, list[int]] = {}
    for number, (answer, _) in numbered:
        if answer.usage is None:
            together.setdefault(_comparison(answer.spec, number, decides), []).append(number)
    is_kept = decides or len(together) * replicates > 1 if is_kept is None else is_kept
    devices = {answer.spec.device for answer in possible} if is_kept else set()
    places = {device: environment_of(device) for device in devices}
    copies: Counter[str] = Counter()

    def cell_at(number: int) -> Cell:
        answer, run = numbered[number][1]
        key = plan_key(answer.spec, answer.fingerprint, places[answer.spec.device]) if is_kept else str(number)
        key = f"decide {key}" if decides else key
        copies[key] += 1  # the same twice is measured twice
        return Cell(spec=answer.spec, key=key if copies[key] == 1 else f"{key}~{copies[key]}", run=run)

    groups = [[cell_at(number) for number in numbers] for numbers in together.values()]
    ordered = in_informative_order(groups)
    return Plan(
        # The name follows from what was asked for, as what `auto` means may differ from machine to machine.
        name=name or default_name(grid.cells, "decide" if decides else ""),
        # All cells once before any is measured again: what drifts then hits all of them alike.
        groups=tuple(
            tuple(_repeated(cell, number) for cell in group)
            for number in range(1, (1 if decides else replicates) + 1)
            for group in ordered
        ),
        is_kept=is_kept,
        shares=name is None and not decides,
        left_out=(*left_out, *refused),
        idle_exclusions=grid.idle,
    )


def _comparison(spec: RunSpec, number: int, decides: bool) -> bytes:
    """The same for cells that are compared: those that differ in their recipe alone. Trainings on data run by themselves."""
    if spec.train is not None:
        return str(number).encode()
    same = msgspec.structs.replace(spec, recipe=Recipe())
    if decides and spec.workload.task == "step":  # one function against another
        same = msgspec.structs.replace(
            same, workload=msgspec.structs.replace(spec.workload, model="step", artifact=None)
        )
    return msgspec.msgpack.encode(same)


def _repeated(cell: Cell, replicate: int) -> Cell:
    """The first keeps the plain key, so that asking for more replicates goes on with what is there."""
    if replicate == 1:
        return cell
    return Cell(spec=cell.spec, key=f"{cell.key}-{replicate}", replicate=replicate, run=cell.run)


def _left_out(answer: Checked, possible: Sequence[Checked], run: str) -> LeftOut:
    """A refusal is a mistake, unless its model and its recipe are both possible elsewhere in the grid."""
    spec, reason = answer.spec, answer.usage
    assert reason is not None
    model_is_sound = any(other.spec.workload.model == spec.workload.model for other in possible)
    recipe_is_sound = any(other.spec.recipe == spec.recipe for other in possible)
    if not (model_is_sound and recipe_is_sound):
        raise UsageError(reason)
    name = run or f"{spec.workload.model} {spec.workload.task} {spec.recipe}"
    return LeftOut(name=name, reason=note("impossible", reason))


def check_name(name: Any) -> None:
    """Refuse a name that cannot be used later: `redline compare` takes several joined by commas."""
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise SpecError(f"name must be a text that is not empty, got {name!r}")
    if name is not None and "," in name:
        raise SpecError(f"name must not have a comma, which joins names where grids are compared, got {name!r}")


def in_informative_order(groups: Sequence[Sequence[Cell]]) -> list[Sequence[Cell]]:
    """Groups in the order of what they tell: whether it runs at all, whether the largest fits, then those between.

    Smallest batch first, then the largest, then halves of halves. Named runs keep the order of their file.
    """
    places = {run: place for place, run in enumerate(dict.fromkeys(group[0].run for group in groups))}
    named = any(places)
    ranks = _batch_ranks(group[0].spec for group in groups)
    return sorted(groups, key=lambda group: 0 if named else ranks[group[0].spec.workload.batch])


def default_name(cells: Sequence[RunSpec], besides: str = "") -> str:
    """The same grid has the same name, so that a resume finds it."""
    models = list(dict.fromkeys(cell.workload.model for cell in cells))
    first = re.sub(r"[^\w.+-]+", "-", Path(models[0].partition(":")[0]).stem if "/" in models[0] else models[0])
    text = "".join(sorted({spec_key(cell) for cell in cells})) + besides
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{first}{f'+{len(models) - 1}' if len(models) > 1 else ''}-{digest}"


def is_default_name(name: str) -> bool:
    """Returns whether a grid was named by its cells, and not by a person."""
    return re.fullmatch(r".*-[0-9a-f]{8}", name) is not None


def _batch_ranks(cells: Iterable[RunSpec]) -> dict[int | None, int]:
    batches = sorted({cell.workload.batch for cell in cells}, key=lambda batch: batch or 0)
    order = [batches[0], batches[-1], *_middles(batches[1:-1])] if batches else []
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


class Estimate(Frozen):
    """How long cells may take, from what the history knows of their models."""

    seconds: float
    known: int
    """Cells that the seconds are about."""
    unknown: int
    unknown_models: tuple[str, ...] = ()


def seconds_each(together: Sequence[RunRecord]) -> float | None:
    """Returns the seconds that each of the records measured together took, from opening the first worker to the last block."""
    blocks = [record.blocks[-1] for record in together if record.blocks]
    if not blocks:
        return None
    last = max(block.started_at + block.wall_s for block in blocks)
    seconds = (last - min(record.created_at for record in together)) / len(together)
    return seconds if seconds > 0 else None  # a simulated bench has a clock of its own


LOOK_BACK = 100
"""Records of a model that an estimate looks through: the newest, so that a long history costs no more than a short one."""


def estimate(cells: Iterable[Cell], past: History) -> Estimate:
    """A cell takes about as long as the newest of its model and task under the same recipe, else under any."""

    @cache
    def rows_of(model: str) -> list[Row]:
        return [row for row in past.rows(model=model, limit=LOOK_BACK) if row.status == "done"]

    @cache
    def seconds_of(model: str, task: str, recipe: str) -> float | None:
        same_task = [row for row in rows_of(model) if row.task == task]
        for row in sorted(same_task, key=lambda row: row.recipe != recipe)[:1]:
            return seconds_each(past.load_with_groups([row.id]))
        return None

    cells = list(cells)
    times = [seconds_of(cell.spec.workload.model, cell.spec.workload.task, str(cell.spec.recipe)) for cell in cells]
    known = [seconds for seconds in times if seconds is not None]
    strangers = [cell.spec.workload.model for cell, seconds in zip(cells, times, strict=True) if seconds is None]
    return Estimate(
        seconds=sum(known),
        known=len(known),
        unknown=len(strangers),
        unknown_models=tuple(dict.fromkeys(strangers)),
    )


@dataclass(frozen=True, kw_only=True)
class GridSummary:
    """How every cell of a grid stands; None where it is still to be measured."""

    name: str
    cells: tuple[tuple[Cell, SettledCell | None], ...]
    left_out: tuple[LeftOut, ...] = ()
    idle_exclusions: tuple[IdleExclusion, ...] = ()

    def count(self, status: str) -> int:
        return sum(settled is not None and settled.status == status for _, settled in self.cells)

    @property
    def pending(self) -> int:
        return sum(settled is None for _, settled in self.cells)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return axes_of([cell for cell, _ in self.cells])

    @property
    def sweeps(self) -> bool:
        """Returns whether more than models and recipes differ: batches, threads, devices, named runs."""
        return bool(self.axes) or any(cell.run for cell, _ in self.cells)


def standing(plan: Plan, settled: Mapping[str, SettledCell]) -> GridSummary:
    """How every cell of the plan stands."""
    cells = tuple((cell, settled.get(cell.key)) for cell in plan.cells)
    return GridSummary(name=plan.name, cells=cells, left_out=plan.left_out, idle_exclusions=plan.idle_exclusions)
