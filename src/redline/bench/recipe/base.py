"""A switch is one optimisation. It also writes its part of the plain PyTorch code for people who do not have Redline."""

from __future__ import annotations

import inspect
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn

from redline.bench.device.base import Device
from redline.bench.workload.step import Setup
from redline.model.errors import BenchError, MissingExtra, SpecError
from redline.model.protocol import Relief, SwitchNeed
from redline.model.record import Capabilities
from redline.model.registry import Registry
from redline.model.spec import OptionValue, Switch, Task
from redline.model.work import Facts, LayerKind

FLAGS, WEIGHTS, REWRITE, PRECISION, LAYOUT, QUANTIZE, ATTENTION, RECOMPUTE = 0, 5, 7, 10, 20, 30, 40, 45
DISTRIBUTE, COMPILER, GRAPHS = 48, 50, 60
"""These are the stages: a recipe is applied in this order, however it is written.

Weights are rewritten before they are cast, while they have all their digits, and casting comes before compiling. The numbers
have gaps, so that a stage can be added between two.
"""
INFER: tuple[Task, ...] = ("infer",)
TRAIN: tuple[Task, ...] = ("train",)
ALL_MODELS: tuple[Task, ...] = ("infer", "train", "generate")
NEEDS_STATIC_CACHE = SwitchNeed(
    wants=("static-cache",), reason="with a cache that grows, every token has another shape; add static-cache"
)


@dataclass
class RecipeCode:
    """These are the parts that a snippet is put together from. Their lines speak of `model`, and of `tensor` for one input."""

    task: Task
    device: str
    """It is spelt as torch spells it: `cuda` or `cpu`."""
    imports: list[str] = field(default_factory=list)
    """These are whole lines, without `import torch`, which every snippet has."""
    flags: list[str] = field(default_factory=list)
    """These lines set flags of the process before anything else."""
    helpers: list[str] = field(default_factory=list)
    """This is the source code of the functions and classes that the lines call."""
    model_lines: list[str] = field(default_factory=list)
    """These statements make `model` faster, in this order. `args` and `kwargs` hold prepared example inputs."""
    input_changes: list[str] = field(default_factory=list)
    """These expressions turn `tensor` into what the model wants, in this order."""
    autocast: str | None = None
    """Autocast around the forward and the loss has this dtype, such as `torch.bfloat16`. It is None without autocast."""
    scales_gradients: bool = False
    """True if the loss is scaled by GradScaler."""
    optimizer_options: dict[str, str] = field(default_factory=dict)
    is_graphed: bool = False
    """True if the whole step is recorded in one CUDA graph."""
    shortens_launches: bool = False
    """True if the program is compiled or recorded, because its launches become shorter once all kernels are loaded."""
    is_static: bool = False
    """True if, in a generation, keys and values have one place that is written to."""
    cache_length: int | None = None
    """A static cache has this many positions. None stands for as many as the text has."""
    decode_lines: list[str] = field(default_factory=list)
    """In a generation, these statements make `step` faster, which is the forward of one token."""
    notes: list[str] = field(default_factory=list)
    """These are remarks for the reader. The snippet has them as comments."""

    def carry(self, *things: Callable[..., Any]) -> None:
        """Includes these functions or classes as they stand in their files, so that the snippet runs the code that was measured.

        What they use comes along: the imports of their files, and other functions and classes of the same file.
        """
        for thing in things:
            source, module = inspect.getsource(thing).rstrip(), sys.modules[thing.__module__]

            def is_used(name: str, source: str = source) -> bool:
                return re.search(rf"(?<![.\w]){re.escape(name.rpartition(' as ')[2])}\b", source) is not None

            own = [value for name, value in vars(module).items() if is_used(name) and value is not thing]
            self.carry(*(value for value in own if callable(value) and value.__module__ == module.__name__))
            for line in imports_of(module):
                start, _, names = line.partition("import ")
                self.bring_in(*(f"{start}import {name}" for name in names.split(", ") if is_used(name)))
            self.helpers += [source] if source not in self.helpers else []

    def bring_in(self, *lines: str) -> None:
        """Adds lines of imports, each once."""
        self.imports += [line for line in lines if line not in self.imports]


def imports_of(module: ModuleType) -> list[str]:
    """Returns the lines by which a module imports what is not part of Redline."""
    return re.findall(r"^(?:import|from) (?!redline|__future__).+", inspect.getsource(module), re.MULTILINE)


def literal(value: Any) -> str:
    """Returns the value as a formatter would write it in code, with texts in double quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    return json.dumps(value) if isinstance(value, str) else repr(value)


class RecipeSwitch(ABC):
    """A switch is one optimisation for one task. It says what it needs, what it excludes, and how it is applied.

    The attributes of a class hold for all its uses. If the task or an argument decides, `__init__` sets them on the instance.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    stage: ClassVar[int]
    tasks: ClassVar[tuple[Task, ...]] = ("infer", "train")
    arguments: ClassVar[tuple[str, ...]] = ()
    """These words may stand behind the colon."""
    offered: ClassVar[Sequence[str | None]] = (None,)
    """A tuner tries these arguments. None stands for the switch without one."""
    family: ClassVar[str] = ""
    """Switches of one family do the same job in different ways, and a tuner takes at most one. An empty name is a family of its own."""
    leaves_program: ClassVar[bool] = False
    """True if a compiler is given the same program with and without it, so that its cache serves both."""
    relieves: Relief = "device"
    """It relieves the host, the device, both of them, or memory."""
    does: Capabilities = Capabilities()
    """These are its effects on the program. A switch that quantizes is never tried or recommended unless it is asked for."""
    excludes: frozenset[str] = frozenset()
    """These switches, as `name` or `name:argument`, cannot stand in the same recipe. It is enough if one side says so."""
    needs: tuple[SwitchNeed, ...] = ()
    """These switches must stand beside it. A recipe without them is refused, and is never tried."""
    number_format: str | None = None
    """It makes the model compute in this number format, by which numerics are then judged. None if it changes nothing about that."""
    is_slow_to_prepare: bool = False
    """True if it takes minutes to compile."""
    prepare_s: float | None = None
    """Preparing takes about this long. It is None if that is not known beforehand."""
    caution: str | None = None
    """This says why a tuner leaves it alone although it can be used, or None."""
    layer: LayerKind | None = None
    """It is about this kind of layer, and changes nothing about a model that calls none."""
    needs_gpu: str = ""
    """This says why a CPU cannot do it. It is empty if a CPU can."""
    packages: Sequence[str] = ()
    """The first is the extra of Redline that brings what it needs, and the others are the packages in it."""
    # The following is its part of a snippet: functions that the lines call, imports, lines that set flags of the process, lines
    # about the model, changes of inputs and remarks, as in `RecipeCode`.
    carries: Sequence[Callable[..., Any]] = ()
    imports: Sequence[str] = ()
    flag_lines: Sequence[str] = ()
    lines: Sequence[str] = ()
    input_changes: Sequence[str] = ()
    remarks: Sequence[str] = ()

    def __init__(self, switch: Switch, task: Task) -> None:
        self.switch, self.task, self.argument = switch, task, switch.argument
        if task not in self.tasks:
            raise SpecError(f"switch {self.name} is for {', '.join(self.tasks)}, not for {task}")
        if self.argument is not None and self.argument not in self.arguments:
            choice = "one of " if len(self.arguments) > 1 else ""
            allowed = f"{choice}{', '.join(self.arguments) or 'no argument'}"
            raise SpecError(f"switch {self.name} takes {allowed}, got {self.argument!r}")
        self.accept_options(switch.options)

    def accept_options(self, options: dict[str, OptionValue]) -> None:
        """Raises a `SpecError` for options that the switch does not have. Most have none."""
        if options:
            raise SpecError(f"switch {self.name} takes no options, got {', '.join(sorted(options))}")

    def refusal(self, device: Device) -> str | None:
        """Returns why this device, with what is installed, cannot do it, or None if it can."""
        is_missing = self.needs_gpu and not device.is_accelerator
        if reason := self.needs_gpu if is_missing else self.refused_by(device):
            return reason
        extra, *packages = self.packages or [""]
        return next((str(MissingExtra("it", package, extra)) for package in packages if not find_spec(package)), None)

    def refused_by(self, device: Device) -> str | None:
        """Returns why a device that has what the attributes ask for cannot do it all the same, or None if it can."""
        return None

    def irrelevance(self, model: nn.Module, facts: Facts | None) -> str | None:
        """Returns why it would change nothing about this model, or cannot be applied to it. Returns None if no reason is known.

        `facts` tells what a real step did. A tuner always has it, a single run never.
        """
        if facts is not None and self.layer is not None and self.layer not in facts.layers:
            return f"no {self.layer.replace('-', ' ')} runs in this model"
        return self.unsuited(model, facts)

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        """Returns another such reason than that no layer of its kind runs, or None. Switches override this one."""
        return None

    def is_doubtful(self, facts: Facts) -> bool:
        """Returns whether it often cannot run a model with these facts."""
        return False

    def formats(self, facts: Facts) -> frozenset[str] | None:
        """Returns the number formats of the rest of the recipe in which it can do this model, or None if it can in any."""
        return None

    @abstractmethod
    def apply(self, setup: Setup) -> None: ...

    def write(self, code: RecipeCode) -> None:
        """Adds what this switch does to a snippet of plain PyTorch."""
        if not any((self.flag_lines, self.lines, self.remarks)):
            code.notes.append(f"{self.switch} has no plain form: it is left out here")
        code.carry(*self.carries)
        code.bring_in(*self.imports)
        code.flags += self.flag_lines
        code.model_lines += self.lines
        code.input_changes += self.input_changes
        code.notes += self.remarks


SWITCHES: Registry[type[RecipeSwitch]] = Registry(
    "switch", package="redline.bench.recipe.switches", group="redline.switches"
)
"""Redline's own switches are in the files of `switches/`. Others register a class under the entry-point group."""


def registered(switch: type[RecipeSwitch]) -> type[RecipeSwitch]:
    """Registers a switch by its name, and returns it."""
    return SWITCHES.register(switch.name)(switch)


def data_dependence(facts: Facts) -> str | None:
    """Returns how the program depends on its inputs, which a program made from one example cannot do. Returns None if it does not."""
    if facts.branches:
        return "runs other operators on other inputs"
    return "gives its operators other shapes on other inputs" if facts.varies_shapes else None


def must_change(setup: Setup, name: str, changes: Any, missing: str) -> None:
    """Makes the setup refuse the switch after the first call if its pass over the compiler's programs found nothing to change."""

    def look() -> None:
        if changes.graphs and not changes.changed:
            raise BenchError("unsupported", f"{name}: torch.compile saw {missing}", switches=(name,), scope="switch")

    setup.after_first_call.append(look)


# The rest is about the fast path, a shortcut that torch's own encoder layers take in inference. A layer becomes one operator, into
# which no compiler sees, and which autocast on a CPU breaks.

OFF = "    torch.backends.mha.set_fastpath_enabled(False)  # it would pass this recipe by"
"""A snippet has this line. It is a name because the line must not be written twice."""


def leave_fast_path(setup: Setup, kind: type[nn.Module] = nn.MultiheadAttention) -> None:
    """Makes torch's own layers run operator by operator if the model has any of this kind. All of them hold a MultiheadAttention."""
    if setup.task != "train" and any(isinstance(module, kind) for module in setup.workload.model.modules()):
        torch.backends.mha.set_fastpath_enabled(False)
        off = "that of MultiheadAttention and TransformerEncoder is off: it would pass this recipe by"
        setup.notes["fast path"] = off


def write_without_fast_path(code: RecipeCode, kind: type[nn.Module] = nn.MultiheadAttention) -> None:
    """Adds to a snippet what `leave_fast_path` does."""
    if code.task != "train" and OFF not in code.flags:
        code.flags += [f"if any(isinstance(module, torch.nn.{kind.__name__}) for module in model.modules()):", OFF]


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Within this context torch's encoder layers run operator by operator."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)
