"""What brings its own step: any function that is timed as it is, and modules that say themselves how they train.

A function may hold everything: its model, optimizer, accumulation, a loader. `setup` makes what it needs, once; the
function gets what `setup` returned, where it takes something; `teardown` ends it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redline.bench.workload.fingerprint import function_code
from redline.bench.workload.inputs import Inputs
from redline.bench.workload.structure import named_tensors
from redline.bench.workload.workload import Workload, assemble
from redline.errors import BenchError, SpecError
from redline.note import Note
from redline.record import BatchOrigin
from redline.spec import WorkloadSpec

NO_INPUTS: Inputs = ((), {})


@dataclass(frozen=True, kw_only=True)
class Called:
    """A function with what belongs to it."""

    function: Callable[..., Any]
    name: str
    inputs: Inputs = NO_INPUTS
    setup: Callable[[], Any] | None = None
    """Called once, with nothing; what it returns goes to the function and to `teardown` where they take something."""
    teardown: Callable[..., Any] | None = None
    batch: int | None = None
    batch_from: BatchOrigin = "unknown"
    items: int | None = None


class CalledFunction(nn.Module):
    """The function in the place of a model. It has no parameters of its own: those of the function stay hidden in it."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__()
        self._function = function
        self._name = name
        self._is_checked = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self._function(*args, **kwargs)
        if not self._is_checked:
            self._check(result)
        return result

    def _check(self, result: Any) -> None:
        self._is_checked = True
        parts = result if isinstance(result, tuple | list) else (result,)
        if any(isinstance(part, nn.Module) for part in parts):
            raise BenchError(
                "user",
                f"{self._name} is timed as it is, but returned a module: to measure that module, "
                "give the function another name than step and leave task out",
            )
        if inspect.isawaitable(result) or inspect.isgenerator(result):
            raise BenchError("user", f"{self._name} returned a {type(result).__name__}: nothing of it has run yet")


def workload_of_call(called: Called, spec: WorkloadSpec, *, source: str, identity: str, notes: list[Note]) -> Workload:
    """A workload that calls the function, after `setup` has made what it needs."""
    state = called.setup() if called.setup is not None else None
    wanted = _required(called.function) - len(called.inputs[0]) - len(called.inputs[1])
    if wanted > 1 or (wanted == 1 and called.setup is None):
        raise SpecError(
            f"{called.name} must be given {_required(called.function)} things: a step takes nothing, its inputs, "
            "or what setup returns"
        )
    function = (lambda *args, **kwargs: called.function(state, *args, **kwargs)) if wanted == 1 else called.function
    workload = assemble(
        CalledFunction(function, called.name),
        called.inputs,
        task="step",
        source=source,
        identity=f"{identity} {function_code(called.function)}",
        seed=0,
        batch=called.batch,
        batch_from=called.batch_from,
        weights_are_random=False,
        inputs_are_free=False,
        notes=notes,
    )
    workload.name = called.name
    workload.items = spec.items or called.items
    if called.teardown is not None:
        workload.teardown = _closing(called.teardown, state)
    return workload


def _closing(teardown: Callable[..., Any], state: Any) -> Callable[[], None]:
    def close() -> None:
        teardown(state) if _required(teardown) else teardown()

    return close


def _required(function: Callable[..., Any]) -> int:
    """How many positional arguments must be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in positional and each.default is inspect.Parameter.empty for each in parameters)


# Modules that say themselves how they train


def trains_itself(model: nn.Module) -> bool:
    """Whether it is built as Lightning's modules are: with a training step and optimizers of its own."""
    return callable(getattr(model, "training_step", None)) and callable(getattr(model, "configure_optimizers", None))


class TrainsItself(nn.Module):
    """A module whose forward is its own training step: a recipe changes, and a step calls, what really trains."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._takes_index = _arguments_of_step(module) == 2

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        batch = kwargs or (args[0] if len(args) == 1 else args)
        step: Callable[..., Any] = self.module.training_step  # type: ignore[assignment]
        output = step(batch, 0) if self._takes_index else step(batch)
        if output is None:
            raise BenchError("user", f"training_step of {type(self.module).__name__} returned no loss")
        return output

    def optimizer(self) -> torch.optim.Optimizer:
        """A fresh one each time, as the module makes it."""
        configure: Callable[[], Any] = self.module.configure_optimizers  # type: ignore[assignment]
        return one_optimizer(configure(), type(self.module).__name__)


def _arguments_of_step(module: nn.Module) -> int:
    name = type(module).__name__
    if getattr(module, "automatic_optimization", True) is False:
        raise BenchError("user", f"{name} optimizes by hand: measure its loop as a function (--task step)")
    count = _required(module.training_step)  # type: ignore[arg-type]
    if count not in (1, 2):
        raise BenchError("user", f"training_step of {name} takes {count} things: expected a batch and its index")
    return count


def one_optimizer(configured: Any, name: str) -> torch.optim.Optimizer:
    """The one optimizer among what Lightning allows to be returned; schedulers are left out."""
    found = configured
    if isinstance(found, Mapping):
        found = found.get("optimizer")
    if isinstance(found, tuple | list):
        first = found[0] if found and isinstance(found[0], tuple | list) else found
        several = [each.get("optimizer") if isinstance(each, Mapping) else each for each in first]
        if len(several) != 1:
            raise BenchError(
                "user", f"{name} has {len(several)} optimizers: measure its loop as a function (--task step)"
            )
        found = several[0]
    if not isinstance(found, torch.optim.Optimizer):
        raise BenchError("user", f"configure_optimizers of {name} gave {type(found).__name__}, not an optimizer")
    if isinstance(found, torch.optim.LBFGS):
        raise BenchError("user", f"{name} uses LBFGS, whose steps run the model again: measure its loop as a function")
    return found


def any_gradient(output: Any) -> bool:
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for _, tensor in named_tensors(output))
