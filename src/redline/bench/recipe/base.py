"""What a switch is, and the parts of the plain PyTorch code it writes for people without Redline."""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

import torch

from redline.bench.device.base import Device
from redline.bench.workload.step import Setup
from redline.model.errors import BenchError, MissingExtra, SpecError
from redline.model.questions import Relief, SwitchNeed
from redline.model.record import Capabilities
from redline.model.registry import Registry
from redline.model.spec import OptionValue, Switch, Task
from redline.model.work import Facts

NEEDS_STATIC_CACHE = SwitchNeed(
    wants=("static-cache",), reason="with a cache that grows, every token has another shape; add static-cache"
)

FLAGS, WEIGHTS, REWRITE, PRECISION, LAYOUT, QUANTIZE, ATTENTION, RECOMPUTE = 0, 5, 7, 10, 20, 30, 40, 45
DISTRIBUTE, COMPILER, GRAPHS = 48, 50, 60
"""Stages: a recipe is applied in this order, however it was written. Casting comes before compiling.

Weights are rewritten before they are cast, in all the digits there are; what is quantized stays as it is from then on.
"""


@dataclass
class CacheCode:
    """Generation: how a snippet keeps keys and values."""

    is_static: bool = False
    length: int | None = None
    """Positions; None: as many as the text has."""


@dataclass
class RecipeCode:
    """The parts a snippet is put together from. Lines speak of `model`, and of `tensor` for one input."""

    task: Task
    device: str
    """As torch spells it: `cuda`, `cpu`."""
    imports: list[str] = field(default_factory=list)
    """Whole lines, beyond `import torch`."""
    flags: list[str] = field(default_factory=list)
    """Switches of the process, set first."""
    helpers: list[str] = field(default_factory=list)
    """Functions or classes the lines below call; each a whole block of code."""
    model_lines: list[str] = field(default_factory=list)
    """Statements that turn `model` into a faster one, in order. `args` and `kwargs` hold prepared example inputs."""
    input_changes: list[str] = field(default_factory=list)
    """Expressions of `tensor` that give the tensor the model wants, in order."""
    contexts: list[str] = field(default_factory=list)
    """Context managers held around every call of the model."""
    autocast: str | None = None
    """The dtype as text (`torch.bfloat16`), where autocast is held around the forward and the loss."""
    scales_gradients: bool = False
    optimizer_options: dict[str, str] = field(default_factory=dict)
    """Keyword arguments of the optimizer, as text."""
    is_graphed: bool = False
    """The whole step goes into one CUDA graph."""
    shortens_launches: bool = False
    """It is compiled or recorded: when it has run, all its kernels are loaded, and how soon they start may be what counts."""
    cache: CacheCode = field(default_factory=CacheCode)
    decode_lines: list[str] = field(default_factory=list)
    """Generation: statements that turn `step`, the forward of one token, into a faster one."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the reader, each printed as a comment."""

    def carry(self, *things: Callable[..., Any]) -> None:
        """Functions or classes of `plain.py` and its kin, as they stand there, each once: the snippet does what was measured."""
        sources = [inspect.getsource(thing).rstrip() for thing in things]
        self.helpers += [source for source in sources if source not in self.helpers]

    def bring_in(self, *lines: str) -> None:
        """Imports, each once."""
        self.imports += [line for line in lines if line not in self.imports]


def literal(value: Any) -> str:
    """As a formatter would leave it: texts in double quotes."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    return repr(value)


class RecipeSwitch(ABC):
    """One optimisation: what it needs, what it excludes, how it is applied. One family, one file."""

    name: ClassVar[str]
    summary: ClassVar[str]
    stage: ClassVar[int]
    family: ClassVar[str] = ""
    """Switches of one family do the same job in different ways; the tuner takes at most one. Empty: a family of its own."""
    relieves: ClassVar[Relief] = "device"
    does: ClassVar[Capabilities] = Capabilities()
    """What it does to the program. What quantizes is never tried or recommended unless asked for."""
    tasks: ClassVar[tuple[Task, ...]] = ("infer", "train")
    excludes: ClassVar[frozenset[str]] = frozenset()
    """Switches that cannot stand in the same recipe, as `name` or `name:argument`; saying it on one side is enough."""
    needs: ClassVar[dict[Task, tuple[SwitchNeed, ...]]] = {}
    """By task: switches that must stand beside it once some other does. A recipe without them is refused, and never tried."""
    number_format: ClassVar[str | None] = None
    """The number format it computes in, where it changes that: what the numerics are judged against."""
    arguments: ClassVar[tuple[str, ...]] = ()
    """What may stand behind the colon."""
    offered: ClassVar[tuple[str | None, ...]] = (None,)
    """The arguments a tuner tries; None is the switch without one."""
    leaves_program: ClassVar[bool] = False
    """A compiler sees the same program with and without it, and finds in its cache what it made for the other."""
    slow_to_prepare: ClassVar[frozenset[str | None]] = frozenset()
    """Those of the arguments that take minutes to compile; None is the switch without one."""

    def prepare_s(self, task: Task) -> float | None:
        """About how long preparing it takes, for a switch that is worth its time in this task; None: as usual."""
        return None

    def __init__(self, switch: Switch) -> None:
        self.switch = switch
        if switch.argument is not None and switch.argument not in self.arguments:
            several = f"one of {', '.join(self.arguments)}" if len(self.arguments) > 1 else "".join(self.arguments)
            allowed = several or "no argument"
            raise SpecError(f"switch {self.name} takes {allowed}, got {switch.argument!r}")
        self.accept_options(switch.options)

    def accept_options(self, options: dict[str, OptionValue]) -> None:
        """Refuse what the switch does not know."""
        if options:
            raise SpecError(f"switch {self.name} takes no options, got {', '.join(sorted(options))}")

    def exclusions(self, task: Task) -> frozenset[str]:
        """What it excludes, for a switch where the task decides."""
        return self.excludes

    def capabilities(self) -> Capabilities:
        """What it does to the program, for a switch whose argument or options decide."""
        return self.does

    def computes_in(self) -> str | None:
        """The same, for a switch whose argument decides."""
        return self.number_format

    def refusal(self, device: Device, task: Task) -> str | None:
        """Why this device cannot do it, or None."""
        return None

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
        """Why it would change nothing about this model, or cannot be applied to it; None where neither is known.

        `facts` is what a real step did, where one has been watched: for a tuner always, for a single run never.
        """
        return None

    def is_doubtful(self, facts: Facts) -> bool:
        """Whether it often cannot run a model of which these facts are true."""
        return False

    def formats(self, facts: Facts) -> frozenset[str] | None:
        """The number formats of the rest of the recipe in which it can do this model; None: in any."""
        return None

    def caution(self, task: Task) -> str | None:
        """Why a tuner leaves it alone although it can be done, or None."""
        return None

    @abstractmethod
    def apply(self, setup: Setup) -> None: ...

    def write(self, code: RecipeCode) -> None:
        """Add what this switch does to a snippet of plain PyTorch."""
        code.notes.append(f"{self.switch} has no plain form: it is left out here")


SWITCHES: Registry[type[RecipeSwitch]] = Registry(
    "switch", package="redline.bench.recipe.switches", group="redline.switches"
)
"""Switches of the house are files in `switches/`; others register a class under the entry-point group."""


def data_dependence(facts: Facts) -> str | None:
    """How the program follows its inputs, which a program made from one example cannot; None where it does not."""
    if facts.branches:
        return "runs other operators on other inputs"
    return "gives its operators other shapes on other inputs" if facts.varies_shapes else None


class CountsChanges(Protocol):
    """A pass over programs of torch.compile."""

    graphs: int
    changed: int


def must_change(setup: Setup, name: str, done: CountsChanges, missing: str) -> None:
    """Else a program in which a switch found nothing to change would be timed under its name."""

    def look() -> None:
        if done.graphs and not done.changed:
            raise BenchError("unsupported", f"{name}: torch.compile saw {missing}", switches=(name,), scope="switch")

    setup.after_first_call.append(look)


def missing_extra(package: str, extra: str) -> str | None:
    """Why a switch cannot be had without `package`, or None where it is installed. Nothing is imported."""
    return None if find_spec(package) else str(MissingExtra("it", package, extra))
