"""When are two measurements the same? Each way to ask is a named set of fields; all of them are in this file.

| asked by | function | same when |
|---|---|---|
| history, resume | `record_key` | everything that decides the numbers is the same, model and inputs by their hashes |
| a sweep, before it runs | `plan_key` | the same, with what is known of the model before it is built |
| a sweep's or a search's name | `spec_key`, `question_key` | the same was asked for, on whatever machine |
| `compare` | `Benchmark`, then `differences` | the same work; the recipe, the machine and the versions may differ |
| a trend over time | `series_of` | the same benchmark on a device of the same name; versions and code may differ |
| reports | `Subject` | the same model, task and settings on the same device; recipes and batches vary within it |
| ceilings | `device_key` | the same device, driver, torch and, on a CPU, threads |

How a bench was opened, where a pickled model lies and which of several equal cards was used are never part of it.
Keys leave out fields that hold their default, so that a field added later changes no old key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import BENCHMARK_VERSION, Environment, Prepared, RunRecord, device_name, device_of
from redline.model.spec import DEFAULT_NEW_TOKENS, DEFAULT_PROMPT, RunSpec, WorkloadSpec
from redline.model.units import counted, format_bytes
from redline.model.work import Ceilings

KEY_LENGTH = 24
"""A key keeps so many hexadecimal digits of its hash: these are 96 bits, so that no two keys collide by chance."""
NOT_OF_THE_WORKLOAD = ("artifact",)
"""It says where a pickled model lies; its hash says what it is."""
NOT_OF_THE_DATA = ("folder", "download", "loader_timeout_s")
"""They say where the data lie and how they came there; their fingerprint says what they are."""
NOT_SETTINGS = (*NOT_OF_THE_WORKLOAD, "model", "task", "batch")
"""A benchmark and a subject have fields of their own for these."""


def record_key(spec: RunSpec, prepared: Prepared) -> str:
    """Returns a key: two records that have the same measured the same thing in the same way."""
    hashes = {"model": prepared.workload.model_hash, "inputs": prepared.workload.input_hash}
    return spec_key(spec, {**hashes, **_software(prepared.environment)})


def plan_key(spec: RunSpec, fingerprint: str, environment: Environment) -> str:
    """Returns the same key before anything ran. `fingerprint` is what is known of a model that is not built yet."""
    return spec_key(spec, {"plan": fingerprint, **_software(environment)})


def spec_key(spec: RunSpec, besides: Mapping[str, str | None] | None = None) -> str:
    """Returns the key of what was asked for, and of what is known `besides`."""
    asked = {
        **given(spec, leave_out=("launch", "recipe", "device", "workload", "measure", "train", "load")),
        "workload": given(spec.workload, leave_out=NOT_OF_THE_WORKLOAD),
        "measure": given(spec.measure),
        "recipe": spec.recipe.canonical(),
        "device": spec.device.partition(":")[0],
    }
    if spec.train is not None:
        asked["train"] = given(spec.train, leave_out=("data",))
        asked["data"] = given(spec.train.data, leave_out=NOT_OF_THE_DATA)
    if spec.load is not None:
        asked["load"] = {"max_batch": spec.load.max_batch, "max_wait_s": spec.load.max_wait_s}
    limit = spec.launch.memory_limit_bytes  # it decides what fits
    return _digest([asked, {**(besides or {}), **({} if limit is None else {"memory_limit": str(limit)})}])


def question_key(spec: RunSpec, question: Mapping[str, Any]) -> str:
    """Returns the key of a search: what it is about and what it asks, whatever its budget."""
    return spec_key(spec, {name: msgspec.json.encode(value).decode() for name, value in sorted(question.items())})


def device_key(environment: Environment) -> str:
    device = environment.device
    threads = environment.threads if device.kind == "cpu" else None
    return _digest([device.kind, device.name, device.driver, environment.versions.get("torch"), threads])


def device_key_of_ceilings(ceilings: Ceilings) -> str:
    return _digest([ceilings.kind, ceilings.name, ceilings.driver, ceilings.torch, ceilings.threads])


def given(struct: Frozen, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """Returns the fields that hold another value than their default."""
    return {
        name: value
        for name, default in _defaults_of(type(struct))
        if name not in leave_out and (value := getattr(struct, name)) != default
    }


@cache
def _defaults_of(kind: type[Frozen]) -> tuple[tuple[str, Any], ...]:
    """Fields with their defaults, kept because msgspec evaluates every annotation each time it is asked."""
    return tuple((field.name, field.default) for field in msgspec.structs.fields(kind))


def different_fields(one: RunSpec, other: RunSpec) -> Iterator[str]:
    """Yields fields of two specs that differ, as options name them; neither the recipe nor how the bench is opened."""
    for field in msgspec.structs.fields(one.workload):
        if getattr(one.workload, field.name) != getattr(other.workload, field.name):
            yield field.name.replace("_", "-")
    for name in ("device", "threads", "seed", "ranks"):
        if getattr(one, name) != getattr(other, name):
            yield name
    if one.launch.memory_limit_bytes != other.launch.memory_limit_bytes:
        yield "max-memory"


def _software(environment: Environment) -> dict[str, str | None]:
    return {
        "device": f"{environment.device.kind} {environment.device.name}",
        "driver": environment.device.driver,
        "torch": environment.versions.get("torch"),
        "benchmark": BENCHMARK_VERSION,
    }


def _digest(parts: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:KEY_LENGTH]


class Benchmark(Frozen):
    """A benchmark says what was measured, independent of who measured it and where."""

    model: str
    task: str
    recipe: str
    """This is the canonical form: the order of its switches does not matter."""
    batch: int | None
    device: str
    """This is `cpu`, `cuda` or `rocm`."""
    settings: tuple[tuple[str, str], ...] = ()
    """Other fields of the spec that decide what is computed, where they were given."""

    def __str__(self) -> str:
        batch = f"batch {self.batch}" if self.batch else ""
        settings = ", ".join(condition_words(dict(self.settings)).values())
        return " · ".join(part for part in (self.model, self.task, self.recipe, batch, settings, self.device) if part)


def benchmark_of(record: RunRecord) -> Benchmark:
    spec, workload, prepared = record.spec, record.spec.workload, record.prepared
    return Benchmark(
        model=workload.model,
        task=workload.task,
        recipe=spec.recipe.canonical(),
        batch=batch_of(record),
        device=prepared.environment.device.kind if prepared else spec.device.partition(":")[0],
        settings=tuple((name, str(value)) for name, value in settings_of(spec).items()),
    )


class Series(Frozen):
    """A trend over time is drawn for each series."""

    benchmark: Benchmark
    device_name: str

    @property
    def key(self) -> str:
        return _digest(msgspec.to_builtins(self))

    def __str__(self) -> str:
        return f"{self.benchmark} ({self.device_name})" if self.device_name else str(self.benchmark)


def series_of(record: RunRecord) -> Series:
    return Series(benchmark=benchmark_of(record), device_name=device_name(record))


def settings_of(spec: RunSpec) -> dict[str, Any]:
    """Returns what was asked for besides model, task, batch and recipe and decides what is computed, or how fast."""
    found = given(spec.workload, leave_out=NOT_SETTINGS)
    if spec.workload.task != "train":
        found.pop("optimizer", None)
    found |= text_lengths(spec.workload)
    limits = {
        "threads": spec.threads,
        "max_memory": spec.launch.memory_limit_bytes,
        "data": data_words(spec),
        "ranks": spec.ranks if spec.ranks > 1 else None,
    }
    return found | {name: value for name, value in limits.items() if value is not None}


def whether_in_turns(one: RunRecord, other: RunRecord) -> bool:
    return one.group is not None and one.group == other.group and one.id != other.id


ACROSS = frozenset({"device", "driver", "threads", "data"})
"""These may differ where somebody asks for a comparison across devices: they say where it ran, and how it was fed."""


def across_devices(benchmark: Benchmark) -> Benchmark:
    """Returns the benchmark without its device."""
    settings = tuple((name, value) for name, value in benchmark.settings if name not in ACROSS)
    return msgspec.structs.replace(benchmark, device="", settings=settings)


def differences(
    mine: Benchmark,
    first: Sequence[RunRecord],
    yours: Benchmark,
    other: Sequence[RunRecord],
    *,
    across: bool = False,
) -> tuple[list[Note], list[Note]]:
    """Returns what makes the two incomparable, and what is only worth knowing. Which of two recipes is faster is a fair question.

    `across`: that they ran on different devices or with other threads is then worth knowing; each side must be of one.
    """
    unlike: dict[str, Note] = {}
    noted: list[Note] = []

    def tell(name: str, ours: list[str], theirs: list[str], *, is_fine: bool) -> None:
        text = f"{name.replace('_', ' ')}: {' and '.join(ours)} against {' and '.join(theirs)}"
        if is_fine:
            noted.append(note("differs", text, about=name))
        else:
            unlike[name] = note("differs", text, about=name)

    asked = [
        {"model": side.model, "task": side.task, "batch": side.batch, "device": side.device, **dict(side.settings)}
        for side in (mine, yours)
    ]
    for name in dict.fromkeys((*asked[0], *asked[1])):
        one, another = (str(side.get(name) or "default") for side in asked)
        if one != another:
            tell(name, [one], [another], is_fine=across and name in ACROSS)
    for name, look in (_DECIDING | _WORTH_KNOWING).items():
        ours, theirs = (sorted({look(record) or "unknown" for record in side}) for side in (first, other))
        if name in _WHERE_KNOWN and "unknown" in (*ours, *theirs):
            continue
        if ours != theirs or (name in _DECIDING and len(ours) > 1):
            is_asked_for = across and name in ACROSS and len(ours) == len(theirs) == 1
            tell(name, ours, theirs, is_fine=is_asked_for or name in _WORTH_KNOWING)
    return list(unlike.values()), noted


def _of_environment(look: Callable[[Environment], str | None]) -> Callable[[RunRecord], str | None]:
    return lambda record: look(record.prepared.environment) if record.prepared else None


def _version(package: str) -> Callable[[RunRecord], str | None]:
    return _of_environment(lambda environment: environment.versions.get(package))


def _of_workload(field: str) -> Callable[[RunRecord], str | None]:
    return lambda record: getattr(record.prepared.workload, field) if record.prepared else None


_DECIDING: dict[str, Callable[[RunRecord], str | None]] = {
    "device": _of_environment(lambda environment: environment.device.name),
    "driver": _of_environment(lambda environment: environment.device.driver),
    "torch": _version("torch"),
    "benchmark version": lambda record: record.benchmark_version,
    "model (its structure)": _of_workload("model_hash"),
    "inputs": _of_workload("input_hash"),
    "threads": _of_environment(lambda environment: str(environment.threads) if environment.threads else None),
    "loss": _of_workload("loss"),
    "optimizer": _of_workload("optimizer"),
}
"""If these differ, the numbers are of two different things."""
_WHERE_KNOWN = ("loss", "optimizer")
"""Records of older versions do not say them; the optimizer is the module's own, where it brings one."""

_WORTH_KNOWING: dict[str, Callable[[RunRecord], str | None]] = {
    "machine": _of_environment(lambda environment: environment.hostname),
    "power limit": _of_environment(lambda environment: str(environment.device.power_limit_w)),
    "cuDNN": _version("cudnn"),
    "Triton": _version("triton"),
    "effort": lambda record: record.spec.measure.effort,
    "code": _of_environment(lambda environment: environment.git_commit),
}


class Subject(Frozen):
    model: str
    task: str
    device: str
    """The device's name, or what was asked for where the bench never said it."""
    setting: str = ""
    """This says in words what else was asked for that changes the speed. It is empty where nothing was."""

    def __str__(self) -> str:
        return " · ".join(part for part in (self.model, self.task, self.setting, self.device) if part)


def subjects_of(records: Sequence[RunRecord]) -> list[Subject]:
    """Returns one subject per record. A record that broke before its device was named takes the name its siblings gave that device.

    What was not asked for but differs between records of one subject, such as torch's version, sets them apart too.
    """
    named: dict[str, set[str]] = {}
    for record in records:
        if name := device_name(record):
            named.setdefault(device_of(record), set()).add(name)
    subjects, seen = [], dict[tuple[Subject, str], set[str]]()
    for record in records:
        workload, device = record.spec.workload, device_of(record)
        known = named.get(device, set())
        name = device_name(record) or (next(iter(known)) if len(known) == 1 else device)
        setting = setting_text(record.spec)
        subject = Subject(model=workload.model, task=workload.task, device=name, setting=setting)
        # The inputs are left out, as they change with the batch.
        words = condition_words(conditions_of(record), device) if record.prepared is not None else {}
        unasked = ("loss", "torch", "driver", *(() if record.spec.threads else ("threads",)))
        own = {name: words[name] for name in unasked if name in words}
        subjects.append((subject, own))
        for condition, told in own.items():
            seen.setdefault((subject, condition), set()).add(told)
    apart = (
        (subject, [told for condition, told in own.items() if len(seen[subject, condition]) > 1])
        for subject, own in subjects
    )
    return [
        msgspec.structs.replace(subject, setting=", ".join(filter(None, (subject.setting, *words))))
        for subject, words in apart
    ]


def batch_of(record: RunRecord) -> int | None:
    """Returns the batch as measured, else as asked for, or None where it is unknown."""
    return record.prepared.workload.batch if record.prepared else record.spec.workload.batch


def is_capture(record: RunRecord) -> bool:
    """Returns whether it was timed only briefly, beside a profile. That is good for a row, but not as good as a record that was measured
    thoroughly."""
    return record.trace is not None


# These functions tell a row from its neighbours by more than model, task, recipe, batch and device.


def setting_text(spec: RunSpec) -> str:
    """Returns what `settings_of` finds, in words."""
    return ", ".join(condition_words(settings_of(spec)).values())


def text_lengths(workload: WorkloadSpec) -> dict[str, int]:
    """Returns prompt and new tokens of a generation, asked for or not, or nothing for other tasks."""
    if workload.task != "generate":
        return {}
    return {
        "prompt": workload.prompt or DEFAULT_PROMPT,
        "new_tokens": workload.new_tokens or DEFAULT_NEW_TOKENS,
    }


def data_words(spec: RunSpec) -> str | None:
    """Returns the data of a training and how they are fed, on which its speed depends, or None where one batch is timed."""
    if spec.train is None:
        return None
    data = spec.train.data
    words = (
        data.name,
        f"{data.train_samples} samples" if data.train_samples else "",
        counted(data.workers, "loader worker") if data.workers else "",
        f"augmented on the {data.augment}" if data.augment != "none" else "",
        "on the device" if data.on_device else "",
        "" if data.prefetch else "no prefetch",
    )
    return ", ".join(word for word in words if word)


def conditions_of(record: RunRecord) -> dict[str, Any]:
    """Returns the conditions by name, as measured; where the bench never said it, as asked for. None is unknown, or means nothing here."""
    spec, workload, prepared = record.spec, record.spec.workload, record.prepared
    info, environment = (prepared.workload, prepared.environment) if prepared is not None else (None, None)
    lengths = text_lengths(workload)
    if prepared is not None and prepared.generation is not None:
        lengths = {"prompt": prepared.generation.prompt, "new_tokens": prepared.generation.new_tokens}
    asked_optimizer = workload.optimizer if workload.task == "train" else None
    return {
        "inputs": list(info.input_shapes) if info else [],
        "image_size": (info and info.image_size) or workload.image_size,
        "sequence_length": (info and info.sequence_length) or workload.sequence_length,
        "prompt": lengths.get("prompt"),
        "new_tokens": lengths.get("new_tokens"),
        "classes": workload.classes,
        "optimizer": (info and info.optimizer) or asked_optimizer,
        "loss": (info and info.loss) or None,
        "stem": prepared.data.stem if prepared and prepared.data else workload.stem,
        "data": data_words(spec),
        "threads": (environment and environment.threads) or spec.threads,
        "max_memory_bytes": spec.launch.memory_limit_bytes,
        "ranks": spec.ranks,
        "seed": spec.seed,
        "effort": spec.measure.effort,
        "torch": environment.versions.get("torch") if environment else None,
        "driver": environment.device.driver if environment else None,
        "redline": (environment and environment.redline) or None,
    }


MOST_INPUTS = 2
"""A headline names so many inputs; more are counted."""


def _within(limit_bytes: int | str) -> str:
    return f"within {format_bytes(int(limit_bytes))}"


def _inputs(shapes: Sequence[str]) -> str:
    return ", ".join(shapes) if len(shapes) <= MOST_INPUTS else counted(len(shapes), "input")


_WORDS: dict[str, Callable[[Any], str]] = {
    "image_size": "{} px".format,
    "sequence_length": "length {}".format,
    "prompt": "prompt {}".format,
    "new_tokens": "{} new tokens".format,
    "inputs": _inputs,
    "classes": "{} classes".format,
    "optimizer": str,
    "loss": str,
    "stem": "{} stem".format,
    "data": "trained on {}".format,
    "ranks": "{} ranks".format,
    "threads": lambda threads: counted(int(threads), "thread"),
    "max_memory": _within,
    "max_memory_bytes": _within,
    "torch": "torch {}".format,
    "driver": "driver {}".format,
}
"""These say a condition in a headline or a title."""
_UNSAID = ("seed", "effort", "redline")


def condition_words(conditions: Mapping[str, Any], device: str = "cpu") -> dict[str, str]:
    """Returns the conditions that matter on this device, in words, by name. A size says more than the shapes of the inputs."""
    said = {name: value for name, value in conditions.items() if value not in (None, "", []) and name not in _UNSAID}
    if said.get("ranks") == 1:
        del said["ranks"]
    if device.partition(":")[0] != "cpu":
        said.pop("threads", None)
    if any(name in said for name in ("image_size", "sequence_length", "prompt")):
        said.pop("inputs", None)
    names = [*(name for name in _WORDS if name in said), *(name for name in said if name not in _WORDS)]
    return {name: _WORDS.get(name, f"{name.replace('_', ' ')} {{}}".format)(said[name]) for name in names}


def conditions_text(record: RunRecord) -> str:
    return " · ".join(condition_words(conditions_of(record), device_of(record)).values())
