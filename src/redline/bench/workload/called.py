"""This module calls what people bring: factories with a batch and a seed, steps that are timed as they are, and modules
that define how they train.

A step may hold everything: its model, optimizer, accumulation, a loader. `setup` makes what it needs, once. The step gets
what `setup` returned, if it takes something. `teardown` ends it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.workload.inputs import Inputs, seeded
from redline.bench.workload.structure import reached_modules
from redline.model.errors import BenchError, SpecError
from redline.model.units import counted

BATCH_NAMES = ("batch", "batch_size", "bs")
SEED_NAME, DEVICE_NAME = "seed", "device"
NO_INPUTS: Inputs = ((), {})


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a function by name. The mapping is empty if they cannot be read."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def batch_parameter(
    function: Callable[..., Any], whose: str, *, known: tuple[str, ...] = ()
) -> inspect.Parameter | None:
    """Returns the parameter that takes the batch, by its name. Any other parameter that must be given, and is not `known`, is refused."""
    parameters = parameters_of(function)
    for name, parameter in parameters.items():
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        is_required = parameter.default is parameter.empty and not is_variable
        if is_required and name not in (*BATCH_NAMES, SEED_NAME, *known):
            raise SpecError(
                f"{whose} must be given {name}, which Redline does not know: "
                f"give it a default, or call it batch if it is the batch"
            )
    return next((parameters[name] for name in parameters if name in BATCH_NAMES), None)


def call_with(
    function: Callable[..., Any],
    parameter: inspect.Parameter | None,
    batch: int | None,
    seed: int,
    whose: str,
    **besides: Any,
) -> Any:
    """Returns the result of a function of the user's. It is given the batch, the seed and what is `besides` if it takes them."""
    given, takes = {SEED_NAME: seed, **besides}, parameters_of(function)
    if parameter is not None and batch is not None:
        given[parameter.name] = batch
    try:
        return function(**{name: value for name, value in given.items() if name in takes})
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            # Running out of memory is a failure of another kind, which has an error of its own.
            raise
        raise BenchError("user", f"{whose} raised {one_line(error)}") from error


def required_positional(function: Callable[..., Any]) -> int:
    """Returns how many positional arguments a function must be given. It is 0 if that cannot be read."""
    return sum(
        one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and one.default is one.empty
        for one in parameters_of(function).values()
    )


# This part is about steps that are timed as they are.


class OwnStep:
    """This is a function with its inputs, and with what is called once before it and once after it."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        inputs: Inputs = NO_INPUTS,
        *,
        setup: Callable[..., Any] | None = None,
        teardown: Callable[..., Any] | None = None,
    ) -> None:
        self.function, self.name, self.inputs = function, name, inputs
        self._setup, self._teardown = setup, teardown
        self.state: tuple[Any, ...] = ()
        """It holds what `setup` returned, if the function takes it."""
        self._returned: Any = None
        self._is_set_up = self._is_checked = False
        missing = required_positional(function) - len(inputs[0]) - len(inputs[1])
        if missing > 1 or (missing == 1 and setup is None):
            raise SpecError(
                f"{name} must be given {counted(missing, 'more argument')}: "
                "a step takes nothing, its inputs, or what setup returns"
            )
        self._takes_state = missing == 1

    def batch_parameter(self) -> inspect.Parameter | None:
        """Returns the parameter of `setup` that takes the batch."""
        if self._setup is None:
            return None
        return batch_parameter(self._setup, f"setup of {self.name}", known=(DEVICE_NAME,))

    def start(self, device: torch.device | str, batch: int | None, seed: int) -> None:
        """Calls `setup` if that has not been done."""
        if self._is_set_up:
            return
        self._is_set_up = True
        if self._setup is not None:
            whose = f"setup of {self.name}"
            with seeded(seed):
                self._returned = call_with(self._setup, self.batch_parameter(), batch, seed, whose, device=str(device))
            self.state = (self._returned,) if self._takes_state else ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*self.state, *args, **kwargs)
        # Later calls are not checked, because they are timed.
        if not self._is_checked:
            self._is_checked = True
            parts = result if isinstance(result, tuple | list) else (result,)
            if any(isinstance(part, nn.Module) for part in parts):
                raise BenchError(
                    "user",
                    f"{self.name} is timed as it is, but it returned a module: to measure the module, give the factory "
                    "a name that does not end in step, or call it and pass what it returns",
                )
            refuse_what_has_not_run(result, self.name)
        return result

    def close(self) -> None:
        """Calls `teardown` if `setup` was called. An error that it raises is only printed, because the measurement is done by then."""
        if not self._is_set_up:
            return
        self._is_set_up = False
        state, self._returned, self.state = self._returned, None, ()
        if self._teardown is not None:
            try:
                self._teardown(state) if required_positional(self._teardown) else self._teardown()
            except Exception as error:
                print(f"teardown of {self.name} raised {one_line(error)}", flush=True)  # noqa: T201  (kept with the record)

    def modules(self) -> dict[str, nn.Module]:
        """Returns the modules that the function reaches through what it closes over, its globals, its arguments and its state."""
        return reached_modules(self.function, self._returned, self.inputs)


def refuse_what_has_not_run(result: Any, name: str) -> None:
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise BenchError(
            "user",
            f"{name} returned a {type(result).__name__}: nothing of it has run yet; let a module of yours call it and use it up",
        )


class StepModule(nn.Module):
    """This stands in for a model where a step is timed. The step's own modules stay hidden: nothing may cast, move or switch them."""

    def __init__(self, step: OwnStep) -> None:
        super().__init__()
        self.step = step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.step(*args, **kwargs)

    def with_modules(self) -> nn.Module:
        """Returns the same step with its modules visible, so that they can be counted and marked one by one."""
        shown = StepModule(self.step)
        for name, module in self.step.modules().items():
            shown.add_module(f"{name}_" if hasattr(shown, name) else name, module)
        return shown


def name_of(model: nn.Module) -> str:
    """Returns the name that the model's author gave it."""
    return type(model).__name__


def plain_call(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Returns the call as its author would write it in a loop, without the modules that we put around functions."""
    function: Callable[..., Any] = model
    if isinstance(model, StepModule):
        function, args = model.step.function, (*model.step.state, *args)
    elif isinstance(model, TrainsItself):
        function, args, kwargs = model.step, model.arguments(args, kwargs), {}
    return functools.partial(function, *args, **kwargs)


# This part is about modules that define how they train.

_REFUSED_HOOKS = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric", "torch", "builtins")
AS_A_FUNCTION = "measure its loop as a function (--task step)"


def _defined_by_user(module: nn.Module) -> set[str]:
    """Returns the names that the user's own classes define. Names from the library that they are derived from are left out."""
    kinds = [kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] not in _LIBRARIES]
    return {name for kind in kinds for name in vars(kind)}


def trains_itself(model: nn.Module) -> bool:
    """Returns whether the model is built as Lightning's modules are, with a training step and optimizers of its own."""
    return {"training_step", "configure_optimizers"} <= _defined_by_user(model)


class TrainsItself(nn.Module):
    """The forward of this module is the training step of the user's module, so that a recipe changes what really trains."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._name, own = type(module).__name__, _defined_by_user(module)
        if getattr(module, "automatic_optimization", True) is False:
            raise BenchError("user", f"{self._name} optimizes by hand: {AS_A_FUNCTION}")
        if refused := own.intersection(_REFUSED_HOOKS):
            raise BenchError("user", f"{self._name} has its own {min(refused)}: {AS_A_FUNCTION}")
        self.step: Callable[..., Any] = module.training_step  # type: ignore[assignment]
        # Lightning calls this so that a module can make layers late.
        if "configure_model" in own:
            module.configure_model()  # type: ignore[operator]
        self.module = module
        self._index = (0,) if required_positional(self.step) > 1 else ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.step(*self.arguments(args, kwargs))

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Returns the batch as Lightning would give it, and its index if the step takes one."""
        return (kwargs or (args[0] if len(args) == 1 else args), *self._index)

    def optimizer(self) -> torch.optim.Optimizer:
        """Returns a new optimizer each time, as the module makes it. Schedulers are left out."""
        configured = tree_leaves(self.module.configure_optimizers())  # type: ignore[operator]
        found = [leaf for leaf in configured if isinstance(leaf, torch.optim.Optimizer)]
        if len(found) != 1:
            raise BenchError("user", f"{self._name} has {len(found)} optimizers: {AS_A_FUNCTION}")
        if isinstance(found[0], torch.optim.LBFGS):
            raise BenchError("user", f"{self._name} uses LBFGS, whose steps run the model again: {AS_A_FUNCTION}")
        return found[0]
