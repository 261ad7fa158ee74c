"""What a recipe switch is, and the setup it works on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from redline.bench.device.base import Device
from redline.bench.recipe.code import RecipeCode
from redline.bench.workload.workload import Workload
from redline.errors import MissingExtra, SpecError
from redline.protocol import Relief, SwitchNeed
from redline.registry import Registry
from redline.spec import OptionValue, Switch, Task

FLAGS, WEIGHTS, PRECISION, LAYOUT, QUANTIZE, ATTENTION, COMPILER, GRAPHS = 0, 5, 10, 20, 30, 40, 50, 60
"""Stages: a recipe is applied in this order, however it was written. Casting comes before compiling.

Weights are rewritten before they are cast, in all the digits there are; what is quantized stays as it is from then on.
"""


@dataclass
class Setup:
    """A workload on its way through a recipe; each switch changes what it is about and nothing else."""

    workload: Workload
    device: Device
    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast_dtype: torch.dtype | None = None
    scales_gradients: bool = False
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    is_graphed: bool = False
    """The whole step is recorded once and replayed."""
    before_step: list[Callable[[], None]] = field(default_factory=list)
    input_changes: list[Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        return self.workload.task

    def change_inputs(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change every input tensor, now and whenever other inputs are put in their place."""
        self.input_changes.append(change)
        self.args, self.kwargs = pytree.tree_map_only(torch.Tensor, change, (self.args, self.kwargs))

    def prepared_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fresh fp32 inputs as this recipe wants them."""
        for change in self.input_changes:
            args, kwargs = pytree.tree_map_only(torch.Tensor, change, (args, kwargs))
        return args, kwargs

    def let_originals_go(self) -> None:
        """Keep only the inputs this recipe works on: the fp32 ones beside them would count as the recipe's memory."""
        self.workload.args, self.workload.kwargs = self.args, self.kwargs

    def autocast(self, *, cache: bool = True) -> torch.autocast:
        """A fresh autocast context: entered once per step, as a server does once per request."""
        return torch.autocast(
            self.device.autocast_type,
            dtype=self.autocast_dtype,
            enabled=self.autocast_dtype is not None,
            cache_enabled=cache,
        )


class RecipeSwitch(ABC):
    """One optimisation: what it needs, what it excludes, how it is applied. One family, one file."""

    name: ClassVar[str]
    summary: ClassVar[str]
    stage: ClassVar[int]
    family: ClassVar[str] = ""
    """Switches of one family do the same job in different ways; the tuner takes at most one. Empty: a family of its own."""
    relieves: ClassVar[Relief] = "device"
    quantizes: ClassVar[bool] = False
    """Changes the weights themselves: never tried or recommended unless asked for."""
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

    def __init__(self, switch: Switch) -> None:
        self.switch = switch
        if switch.argument is not None and switch.argument not in self.arguments:
            allowed = f"one of {', '.join(self.arguments)}" if self.arguments else "no argument"
            raise SpecError(f"switch {self.name} takes {allowed}, got {switch.argument!r}")
        self.accept_options(switch.options)

    def accept_options(self, options: dict[str, OptionValue]) -> None:
        """Refuse what the switch does not know."""
        if options:
            raise SpecError(f"switch {self.name} takes no options, got {', '.join(sorted(options))}")

    def computes_in(self) -> str | None:
        """The same, for a switch whose argument decides."""
        return self.number_format

    def refusal(self, device: Device, task: Task) -> str | None:
        """Why this device cannot do it, or None."""
        return None

    def irrelevance(self, model: torch.nn.Module, task: Task) -> str | None:
        """Why it would change nothing about this model, or None. Only looks."""
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


def missing_extra(package: str, extra: str) -> str | None:
    """Why a switch cannot be had without `package`, or None where it is installed. Nothing is imported."""
    return None if find_spec(package) else str(MissingExtra("it", package, extra))
