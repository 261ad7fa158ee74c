"""What to measure. Specs are frozen, refuse unknown fields, and come from flags, from TOML files and from Python."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, dataclass_transform, get_args

import msgspec

from redline.errors import SpecError
from redline.units import parse_bytes

Task = Literal["infer", "train"]
Effort = Literal["quick", "normal", "strict"]
DoorName = Literal["inline", "fork", "spawn", "fake"]
OptimizerName = Literal["sgd", "adam", "adamw"]
OptionValue = bool | int | float | str


def _require_choice(name: str, value: str, choices: Any) -> None:
    allowed = get_args(choices)
    if value not in allowed:
        raise SpecError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class _SpecMeta(msgspec.StructMeta):
    """Gives every spec and record the same settings: msgspec hands down none of them by itself."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **settings: Any) -> Any:
        fixed = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}
        return super().__new__(mcls, name, bases, namespace, **{**fixed, **settings})


class Spec(msgspec.Struct, metaclass=_SpecMeta):
    """The base of all specs and records: frozen, keyword-only, unknown fields refused."""


class Step(Spec):
    """One optimisation: `compile:reduce-overhead,fullgraph=true` is name, argument and options."""

    name: str
    argument: str | None = None
    options: dict[str, OptionValue] = {}

    def __str__(self) -> str:
        words = [self.argument] if self.argument else []
        words += [f"{key}={_option_text(value)}" for key, value in sorted(self.options.items())]
        return f"{self.name}:{','.join(words)}" if words else self.name


class Recipe(Spec):
    """A set of steps. The order in which they are written does not matter; the bench knows which comes first."""

    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return "+".join(str(step) for step in self.steps) or "baseline"

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Read `fp16+channels-last+compile:max-autotune,fullgraph=true`; `baseline` is strict fp32, eager."""
        words = [word.strip() for word in text.split("+")]
        if not all(words):
            raise SpecError(f"recipe {text!r} has an empty step: write steps joined by '+', or 'baseline'")
        steps = tuple(_parse_step(word) for word in words)
        names = [step.name for step in steps]
        if "baseline" in names:
            if len(names) > 1:
                raise SpecError(f"recipe {text!r}: baseline means no step at all and stands alone")
            return cls()
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise SpecError(f"recipe {text!r} names {', '.join(sorted(twice))} twice")
        return cls(steps=steps)

    def canonical(self) -> str:
        """The same text for the same steps in any order."""
        return "+".join(sorted(str(step) for step in self.steps)) or "baseline"


class WorkloadSpec(Spec):
    """Which model does what, on how much."""

    model: str
    """A torchvision name, `timm:NAME`, `hf:NAME`, `path/to/file.py:factory` or `package.module:factory`."""
    task: Task = "infer"
    batch: int | None = None
    """Items per step. None: a model by name takes its source's default, the user's own inputs stay as given."""
    image_size: int | None = None
    classes: int | None = None
    sequence_length: int | None = None
    optimizer: OptimizerName = "sgd"
    """For training only."""
    artifact: str | None = None
    """Path of a cloudpickled (module, inputs, loss) for a live model; `model` then carries its name."""

    def __post_init__(self) -> None:
        _require_choice("task", self.task, Task)
        _require_choice("optimizer", self.optimizer, OptimizerName)
        for name, low in (("batch", 1), ("image_size", 1), ("classes", 1), ("sequence_length", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise SpecError(f"{name} must be {low} or more, got {value}")
        if not self.model.strip():
            raise SpecError("model must not be empty")


class MeasureSpec(Spec):
    """How long to look and when to be content. `for_effort` fills it in; single fields may be set by hand."""

    effort: Effort = "normal"
    target_half_width: float = 0.01
    """Stop when the 95 % interval of the median is this narrow, relative to the median."""
    cpu_target_half_width: float = 0.05
    """The same on a CPU, which is shared and never reaches 1 %."""
    min_samples: int = 30
    tail_samples: int = 130
    """Inference goes on to this many latency samples within the ceiling, so that p95 (130) or p99 (662) exists."""
    max_seconds: float = 60.0
    """Ceiling on timed blocks per session; reaching it is recorded as the reason for stopping."""
    block_seconds: float = 0.25
    settle_seconds: float = 0.02
    """Steps in this first part of a block are kept apart: a neighbour's idle threads may still spin."""
    min_rounds: int = 8
    """Interleaved rounds before a ratio gets an interval."""
    warmup_min_seconds: float = 1.0
    warmup_min_steps: int = 3
    warmup_max_seconds: float = 60.0
    warmup_window: int = 10
    """Two windows of so many steps must agree before the state counts as steady."""
    loss_path_steps: int = 20
    """Training numerics compare the loss over so many steps."""
    check_numerics: bool = True
    """False leaves the comparison with fp32 out: its reference may not fit where the recipe itself does."""
    squeeze_memory: bool = False
    """After timing, find the least memory with which the step still runs. Devices whose allocator can be capped only."""

    def __post_init__(self) -> None:
        _require_choice("effort", self.effort, Effort)
        for name in (
            "target_half_width",
            "cpu_target_half_width",
            "max_seconds",
            "block_seconds",
            "warmup_max_seconds",
        ):
            if not getattr(self, name) > 0:
                raise SpecError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("min_samples", "tail_samples", "min_rounds", "warmup_window", "loss_path_steps"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be 1 or more, got {getattr(self, name)}")

    @classmethod
    def for_effort(cls, effort: Effort = "normal", *, tail: bool = False) -> MeasureSpec:
        _require_choice("effort", effort, Effort)
        presets: dict[str, MeasureSpec] = {
            "quick": cls(
                effort="quick",
                target_half_width=0.03,
                cpu_target_half_width=0.10,
                min_samples=10,
                tail_samples=10,
                max_seconds=10.0,
                min_rounds=5,
                warmup_min_seconds=0.3,
                warmup_min_steps=2,
                warmup_max_seconds=10.0,
                warmup_window=3,
                loss_path_steps=5,
            ),
            "normal": cls(),
            "strict": cls(effort="strict", target_half_width=0.005, cpu_target_half_width=0.03, min_rounds=12),
        }
        spec = presets[effort]
        return msgspec.structs.replace(spec, tail_samples=662) if tail else spec


class LaunchSpec(Spec):
    """Through which door the bench is opened, and how long it may take to answer."""

    door: DoorName = "fork"
    prepare_timeout_s: float = 1800.0
    measure_timeout_s: float = 300.0
    """For one block; a block that takes this long hangs."""
    command_prefix: tuple[str, ...] = ()
    """Put in front of a spawned interpreter: a vendor profiler, numactl."""
    memory_limit_bytes: int | None = None
    """Measure as if the device had this much: GPUs cap torch's allocator, CPU workers their private memory.

    None: what is free when the worker starts. Part of what was measured, because it decides what fits.
    """

    def __post_init__(self) -> None:
        _require_choice("door", self.door, DoorName)
        if self.memory_limit_bytes is not None and self.memory_limit_bytes < 1:
            raise SpecError(f"max_memory must be above 0, got {self.memory_limit_bytes}")
        if self.command_prefix and self.door != "spawn":
            raise SpecError(f"command_prefix needs the spawn door, got door {self.door!r}")


class RunSpec(Spec):
    """One thing to measure: a workload under a recipe on a device."""

    workload: WorkloadSpec
    recipe: Recipe = Recipe()
    measure: MeasureSpec = MeasureSpec()
    launch: LaunchSpec = LaunchSpec()
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, `rocm`, `rocm:0`."""
    threads: int | None = None
    """CPU threads inside operators; None leaves torch's own choice."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise SpecError(f"threads must be 1 or more, got {self.threads}")


def key_of(spec: RunSpec, identity: Mapping[str, str | None]) -> str:
    """The spec key: two runs with the same key measured the same thing.

    `identity` is what the spec cannot know: model and input hash, device model, driver, torch and benchmark version.
    How the bench was opened (door, timeouts) and where a pickled model lay are not part of what was measured. Fields
    that hold their default are left out, so that a new one does not make strangers of all that was measured before.
    """
    workload = msgspec.structs.replace(spec.workload, artifact=None)
    launch = LaunchSpec(memory_limit_bytes=spec.launch.memory_limit_bytes)
    what = _without_defaults(msgspec.structs.replace(spec, workload=workload, launch=launch))
    what["recipe"] = spec.recipe.canonical()
    encoded = msgspec.json.encode([what, dict(identity)], order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:24]


def _without_defaults(spec: Spec) -> dict[str, Any]:
    """What differs from a spec of which nothing was said."""
    said = {}
    for field in msgspec.structs.fields(spec):
        value = getattr(spec, field.name)
        if value != field.default:
            said[field.name] = _without_defaults(value) if isinstance(value, Spec) else msgspec.to_builtins(value)
    return said


def load_specs(path: Path, overrides: Mapping[str, Any] | None = None) -> list[RunSpec]:
    """Read a TOML file: shared settings at the top, one `[[run]]` table per thing to measure.

    A value under `[[run]]` overrides the same one at the top, and `overrides` (the flags) override both; `recipe` may
    be text or a list of texts, and `model` a name or a list of names, each combination being one spec.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"no such file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path} is not TOML: {error}") from None
    runs = document.pop("run", [{}])
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise SpecError(f"{path}: write each run as a [[run]] table")
    return [
        spec for run in runs for spec in specs_from_table({**document, **run, **(overrides or {})}, where=str(path))
    ]


def specs_from_table(table: Mapping[str, Any], where: str = "spec") -> list[RunSpec]:
    """Specs from a flat table of plain values, as flags and TOML write them."""
    rest = dict(table)
    models = _as_list(rest.pop("model", None))
    recipes = _as_list(rest.pop("recipe", "baseline"))
    if not models:
        raise SpecError(f"{where}: name at least one model")
    effort, tail = rest.pop("effort", "normal"), rest.pop("tail", False)
    measure = _override(MeasureSpec.for_effort(effort, tail=tail), rest.pop("measure", {}), f"{where}: measure")
    launch = _override(LaunchSpec(), _launch_table(rest), f"{where}: launch")
    shared: dict[str, Any] = {name: rest.pop(name) for name in ("device", "threads", "seed") if name in rest}
    specs = []
    for model in models:
        workload = _convert({"model": model, **rest}, WorkloadSpec, where)
        for recipe in recipes:
            specs.append(
                _convert(
                    {
                        "workload": workload,
                        "recipe": Recipe.parse(recipe),
                        "measure": measure,
                        "launch": launch,
                        **shared,
                    },
                    RunSpec,
                    where,
                )
            )
    return specs


def _launch_table(rest: dict[str, Any]) -> dict[str, Any]:
    """`max_memory` is a person's word for the launch's memory limit: a size such as 16GiB, or bytes."""
    table = dict(rest.pop("launch", {}))
    if (limit := rest.pop("max_memory", None)) is not None:
        table["memory_limit_bytes"] = limit if isinstance(limit, int) else parse_bytes(str(limit))
    return table


def _override(base: Any, changes: Mapping[str, Any], where: str) -> Any:
    return _convert({**msgspec.to_builtins(base), **changes}, type(base), where)


def _convert(table: Mapping[str, Any], kind: type[Any], where: str) -> Any:
    try:
        return msgspec.convert(msgspec.to_builtins(table), kind)
    except msgspec.ValidationError as error:
        raise SpecError(f"{where}: {error}") from None


def _as_list(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _parse_step(word: str) -> Step:
    name, colon, rest = word.partition(":")
    if colon and not rest:
        raise SpecError(f"step {word!r} ends in ':' without an argument")
    argument, options = None, {}
    for position, part in enumerate(rest.split(",") if rest else []):
        key, equals, value = part.partition("=")
        if equals and key.strip():
            options[key.strip()] = _option_value(value.strip())
        elif position == 0 and part.strip():
            argument = part.strip()
        else:
            raise SpecError(f"step {word!r}: expected key=value, got {part!r}")
    return Step(name=name.strip(), argument=argument, options=options)


def _option_value(text: str) -> OptionValue:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _option_text(value: OptionValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
