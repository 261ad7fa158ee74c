"""Specs from plain tables: flags, TOML files and keyword arguments, one over the other."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import msgspec

from redline.model.errors import SpecError, closest
from redline.model.fields import MOST_BYTES, MOST_CELLS, MOST_ITEMS, Frozen, require_choice, require_range
from redline.model.files import MOST_SETTINGS_BYTES, open_to_read, read_up_to
from redline.model.settings import WHAT, Declared, plain_type, setting, settings_of
from redline.model.spec import BASELINE, DataSpec, LaunchSpec, MeasureSpec, Recipe, RunSpec, TrainSpec, WorkloadSpec
from redline.model.units import parse_bytes


class Words(Frozen):
    """These are settings that a person gives under a name of their own and that become fields of a spec."""

    tail: Annotated[bool, setting("Collect enough samples (662) to report p99.")] = False
    no_check: Annotated[bool, setting("Do not compare outputs (training: losses) with strict fp32.")] = False
    max_memory: Annotated[
        str | None,
        setting("Measure as if the device had this much memory, such as 16GiB or 14GB. On a CPU: stay within it."),
    ] = None
    batch_per_rank: Annotated[
        int | None,
        setting("Items per step on every rank, instead of --batch.", group=WHAT, least=1, most=MOST_ITEMS),
    ] = None


SHARED: Mapping[str, Declared] = {
    name: declared
    for owner in (WorkloadSpec, RunSpec, MeasureSpec, LaunchSpec, Words, DataSpec, TrainSpec)
    for name, declared in settings_of(owner).items()
}
"""Every setting of what is measured and how, by name: flags, keyword arguments and keys of TOML files have these names."""


MOST_NESTED = 100
"""A TOML file may have so many tables and lists inside each other. What Redline reads has four."""


def read_toml(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """Returns a TOML file as a table; any mistake in it is one line.

    A file may name code: a model of its own, a pickle, a command in front of the worker. One that belongs to somebody
    else is refused then, unless `trust` says that it was read.
    """
    try:
        with open_to_read(path) as file:
            owner = _owner(file.fileno())
            document = tomllib.loads(read_up_to(file, MOST_SETTINGS_BYTES, str(path)).decode())
    except FileNotFoundError:
        raise SpecError(f"no such file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read {path}: {error}") from None
    except (ValueError, RecursionError) as error:  # not TOML, a number of thousands of digits, tables without end
        raise SpecError(f"{path} is not TOML: {error}") from None
    _refuse_deep(document, path)
    code = next(_code_named(document), None)
    if code is not None and not trust and owner not in (os.getuid(), 0):
        raise SpecError(
            f"{path} belongs to another user (id {owner}) and runs code ({code}): read it, then say so with --trust"
        )
    return document


def _refuse_deep(document: dict[str, Any], path: Path) -> None:
    """A line such as a.a.a = 1 nests tables as deep as it is long: neither recursion nor `repr` gets to the end of it."""
    level: list[Any] = [document]
    for _ in range(MOST_NESTED):
        tables = [part for part in level if isinstance(part, dict | list)]
        level = [inside for part in tables for inside in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return
    raise SpecError(f"{path} nests tables or lists more than {MOST_NESTED} deep")


def _owner(descriptor: int) -> int:
    return os.fstat(descriptor).st_uid


def _code_named(table: Any) -> Iterator[str]:
    """Yields what in a table is run: pickles, commands, functions and models from files."""
    if isinstance(table, list):
        for part in table:
            yield from _code_named(part)
    if not isinstance(table, dict):
        return
    for name, value in table.items():
        texts = value if isinstance(value, list) else [value]
        if name in ("artifact", "command_prefix", "python", "setup"):
            yield name
        elif name == "model" and any(".py:" in text for text in texts if isinstance(text, str)):
            yield "a model from a file"
        else:
            yield from _code_named(value)


def read_runs(
    path: Path, overrides: Mapping[str, Any] | None = None, *, trust: bool = False
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Reads a file of runs: what it says of itself, and one table of settings for each of its runs.

    Settings at the top are shared by all [[run]] tables; without such a table the file is one run. A value in a
    [[run]] is over the same one at the top, and `overrides` (the flags) are over both, also inside the tables
    `measure` and `launch`. A run on a device of its own stays there. `trust`: see `read_toml`.
    """
    document = read_toml(path, trust=trust)
    about = {name: document.pop(name) for name in ABOUT if name in document}
    quick = document.pop("quick", {})
    runs = document.pop("run", [{}])
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise SpecError(f"{path}: write each run as a [[run]] table")
    if not isinstance(quick, dict):
        raise SpecError(f"{path}: quick must be a table of the settings that --effort quick changes, got {quick!r}")
    given = dict(overrides or {})
    is_quick = (given.get("effort") or document.get("effort")) in ("quick", ["quick"])
    tables = [layered(document, quick if is_quick else {}, run, given) for run in runs]
    for run, table in zip(runs, tables, strict=True):
        if "device" in run and "device" in given:
            table["device"], table["asked_device"] = run["device"], given["device"]
    return about, tables


ABOUT = ("title", "question", "name", "columns")
"""A file of runs says these things of itself, beside the settings of its runs."""


def refuse_too_many(count: int) -> None:
    """More would take weeks to measure; a typing mistake, or a file by another program, easily makes millions."""
    if count > MOST_CELLS:
        raise SpecError(f"{count} things to measure are more than {MOST_CELLS}: split them")


def specs_from_table(table: Mapping[str, Any]) -> list[RunSpec]:
    """Specs from a flat table of plain values, as flags and TOML write them."""
    _refuse_unknown(table)
    rest = dict(table)
    models, recipes = _names(rest.pop("model", []), "model"), _names(rest.pop("recipe", BASELINE), "recipe")
    refuse_too_many(len(models) * len(recipes))
    own_measure = rest.pop("measure", {})
    if isinstance(own_measure, Mapping) and "effort" in own_measure:
        raise SpecError("effort stands beside the table measure, not in it")
    flags = {name: rest.pop(name, False) for name in ("tail", "no_check")}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise SpecError(f"{name} must be true or false, got {value!r}")
    axis = rest.get("batch_axis")
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
        raise SpecError(f"batch_axis must be a number, got {axis!r}; for other inputs let the factory take batch")
    measure = MeasureSpec.for_effort(rest.pop("effort", "normal"), tail=flags["tail"])
    measure = _override(measure, own_measure, "measure")
    if flags["no_check"]:
        measure = msgspec.structs.replace(measure, check_numerics=False)
    launch = _override(LaunchSpec(), _launch_table(rest), "launch")
    _share_batch(rest)
    shared: dict[str, Any] = {name: rest.pop(name) for name in settings_of(RunSpec) if name in rest}
    if (train := rest.pop("train", None)) is not None:
        shared["train"] = _train(train)
    specs = []
    for model in models:
        workload = convert_table({"model": model, **rest}, WorkloadSpec)
        if "optimizer" in rest and workload.task != "train":
            raise SpecError(f"optimizer {rest['optimizer']} is for training: give task train, or leave it out")
        for recipe in map(Recipe.parse, recipes):
            parts = {"workload": workload, "recipe": recipe, "measure": measure, "launch": launch}
            specs.append(convert_table({**parts, **shared}, RunSpec))
    return specs


OF_TASK = {"optimizer": "train", "prompt": "generate", "new_tokens": "generate"}
"""Settings that only one task has."""


def for_tasks(tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Drops settings of one task from runs of another. Where no run has the task, the setting is left to be refused."""
    tasks = {table.get("task") for table in tables}
    return [
        {
            name: value
            for name, value in table.items()
            if OF_TASK.get(name) in (None, table.get("task")) or OF_TASK[name] not in tasks
        }
        for table in tables
    ]


def training_table(data: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flat settings as a table of a spec: those of the data and of the training go below `train`."""
    of_data = {field.name for field in msgspec.structs.fields(DataSpec)}
    of_train = {field.name for field in msgspec.structs.fields(TrainSpec)}
    rest = {name: value for name, value in settings.items() if name not in of_data | of_train}
    inner = {name: value for name, value in settings.items() if name in of_data}
    if inner.get("folder") is not None:
        inner["folder"] = str(Path(inner["folder"]).expanduser().absolute())
    train = {name: value for name, value in settings.items() if name in of_train}
    return {**rest, "task": "train", "train": {**train, "data": {"name": data, **inner}}}


def _refuse_unknown(table: Mapping[str, Any]) -> None:
    """A key written wrong is named first: what is missing without it would be told as the mistake else."""
    own = {"model", "recipe", "measure", "launch", "train"}
    known = own | (SHARED.keys() - settings_of(DataSpec).keys() - settings_of(TrainSpec).keys())
    known |= set(WorkloadSpec.__struct_fields__)
    for name in table:
        if name not in known:
            near = closest(str(name), known, count=1)
            raise SpecError(f"unknown setting {name!r}{f'; did you mean {near[0]}?' if near else ''}")


def _train(table: Any) -> TrainSpec:
    if not isinstance(table, Mapping) or not isinstance(table.get("data"), Mapping):
        raise SpecError(f"train must be a table with a table data in it, got {table!r}")
    data = convert_table(table["data"], DataSpec, "data: ")
    train: TrainSpec = convert_table({**table, "data": data}, TrainSpec, "train: ")
    return train


def _share_batch(rest: dict[str, Any]) -> None:
    """`batch_per_rank` is another way to give the batch: items on every rank."""
    each = rest.pop("batch_per_rank", None)
    if each is None:
        return
    if rest.get("batch") is not None:
        raise SpecError("give batch (of all ranks) or batch_per_rank, not both")
    ranks = rest.get("ranks", 1)
    for name, value in (("batch_per_rank", each), ("ranks", ranks)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise SpecError(f"{name} must be a whole number, got {value!r}")
        require_range(name, value, 1, MOST_ITEMS)
    rest["batch"] = each * ranks


def _launch_table(rest: dict[str, Any]) -> Any:
    """`max_memory` is a person's word for the launch's memory limit: a size such as 16GiB, or bytes.

    Ranks are started by torchrun unless another door is named.
    """
    table = rest.pop("launch", {})
    rendezvous, door = rest.pop("rendezvous", None), rest.pop("door", None)
    limit = rest.pop("max_memory", None)
    if not isinstance(table, Mapping):
        return table
    if rest.get("ranks") is not None or rendezvous is not None:
        table = {"door": "torchrun", **table}
    if door is not None:
        table = {**table, "door": door}
    if rendezvous is not None:
        table = {**table, "rendezvous": rendezvous}
    if limit is None:
        return table
    try:
        limit_bytes = limit if isinstance(limit, int) else parse_bytes(str(limit))
    except SpecError as error:
        raise SpecError(f"max_memory: {error}") from None
    if limit_bytes < 1:
        raise SpecError(f"max_memory must be above 0, got {limit}")
    require_range("max_memory", limit_bytes, 1, MOST_BYTES)
    return {**table, "memory_limit_bytes": limit_bytes}


def layered(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all tables as one. Later tables win, value by value also one level down: a flag for the door leaves the file's timeouts."""
    merged: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            below = merged.get(name)
            merged[name] = {**below, **value} if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged


def _override(base: Any, changes: Any, name: str) -> Any:
    if not isinstance(changes, Mapping):
        raise SpecError(f"{name} must be a table, got {changes!r}")
    return convert_table({**msgspec.to_builtins(base), **changes}, type(base), f"{name}: ")


def convert_table(table: Any, kind: Any, where: str = "") -> Any:
    """Returns the settings of a table; a mistake in it is one line that begins with `where`."""
    if not isinstance(table, Mapping):
        raise SpecError(f"{where}must be a table, got {table!r}")
    for name, choices in _choices_of(kind).items():
        if isinstance(value := table.get(name), str):
            require_choice(name, value, choices)
    try:
        return msgspec.convert(msgspec.to_builtins(table), kind)
    except msgspec.ValidationError as error:
        raise SpecError(f"{where}{error}") from None


@cache
def _choices_of(kind: Any) -> dict[str, Any]:
    """Fields that are one of a few words. msgspec refuses others too, but does not name the choices."""
    types = {field.name: plain_type(field.type) for field in msgspec.structs.fields(kind)}
    return {name: each for name, each in types.items() if get_origin(each) is Literal}


def _names(value: Any, what: str) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise SpecError(f"{what} must be a name or a list of names, got {value!r}")
    if not names:
        raise SpecError(f"name at least one {what}")
    return list(names)
