"""Functions of the user's, and how they are called: factories with a batch and a seed, steps that are timed as they are,
and modules that say themselves how they train.

A step may hold everything: its model, optimizer, accumulation, a loader. `setup` makes what it needs, once; the step gets
what `setup` returned, where it takes something; `teardown` ends it.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.workload.inputs import Inputs, seeded
from redline.bench.workload.structure import reached_modules
from redline.model.errors import BenchError, SpecError
from redline.model.units import counted

BATCH_NAMES = ("batch", "batch_size", "bs")
SEED_NAME, DEVICE_NAME = "seed", "device"
NO_INPUTS: Inputs = ((), {})


def batch_parameter(
    function: Callable[..., Any], whose: str, *, known: tuple[str, ...] = ()
) -> inspect.Parameter | None:
    """The parameter that takes the batch, by its name. Another one that must be given, and is not `known`, is refused."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters:
        is_required = parameter.default is inspect.Parameter.empty and parameter.kind not in variable
        if is_required and parameter.name not in (*BATCH_NAMES, SEED_NAME, *known):
            raise SpecError(
                f"{whose} must be given {parameter.name}, which Redline does not know: "
                f"give it a default, or call it batch if it is the batch"
            )
    return next((parameter for parameter in parameters if parameter.name in BATCH_NAMES), None)


def call_with(
    function: Callable[..., Any],
    parameter: inspect.Parameter | None,
    batch: int | None,
    seed: int,
    whose: str,
    **besides: Any,
) -> Any:
    """What a function of the user's returns, given the batch, the seed and what is `besides` where it takes them."""
    positional: list[int] = []
    named: dict[str, Any] = {}
    if parameter is not None and batch is not None:
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(batch)
        else:
            named[parameter.name] = batch
    named |= {name: value for name, value in {SEED_NAME: seed, **besides}.items() if _takes(function, name)}
    try:
        return function(*positional, **named)
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise  # a failure of another kind, known by its own error
        raise BenchError("user", f"{whose} raised {one_line(error)}") from error


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameter = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY


def required_positional(function: Callable[..., Any]) -> int:
    """How many positional arguments a function must be given; 0 where that cannot be read."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in positional and each.default is inspect.Parameter.empty for each in parameters)


# Steps that are timed as they are


def is_named_as_step(name: str) -> bool:
    return name == "step" or name.endswith("_step")


class OwnStep:
    """A function with its inputs, and what is called once before it and once after it."""

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
        self._state: Any = None
        self._is_set_up = self._is_checked = False
        missing = required_positional(function) - len(inputs[0]) - len(inputs[1])
        if missing > 1 or (missing == 1 and setup is None):
            raise SpecError(
                f"{name} must be given {counted(missing, 'more argument')}: "
                "a step takes nothing, its inputs, or what setup returns"
            )
        self._takes_state = missing == 1

    def batch_parameter(self) -> inspect.Parameter | None:
        """Where `setup` takes the batch."""
        if self._setup is None:
            return None
        return batch_parameter(self._setup, f"setup of {self.name}", known=(DEVICE_NAME,))

    def start(self, device: torch.device | str, batch: int | None, seed: int) -> None:
        """Call `setup`, the first time."""
        if self._is_set_up:
            return
        self._is_set_up = True
        if self._setup is not None:
            parameter, whose = self.batch_parameter(), f"setup of {self.name}"
            with seeded(seed):
                self._state = call_with(self._setup, parameter, batch, seed, whose, device=str(device))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(self._state, *args, **kwargs) if self._takes_state else self.function(*args, **kwargs)
        if not self._is_checked:
            self._check(result)
        return result

    def _check(self, result: Any) -> None:
        """Raise in one line where the function did not do a step; later calls are not looked at, because they are timed."""
        self._is_checked = True
        parts = result if isinstance(result, tuple | list) else (result,)
        if any(isinstance(part, nn.Module) for part in parts):
            raise BenchError(
                "user",
                f"{self.name} is timed as it is, but it returned a module: to measure the module, give the factory "
                "a name that does not end in step, or call it and pass what it returns",
            )
        refuse_what_has_not_run(result, self.name)

    def close(self) -> None:
        """Call `teardown`, where `setup` was called. What it raises is printed: the measurement is done by then."""
        if not self._is_set_up:
            return
        self._is_set_up = False
        state, self._state = self._state, None
        if self._teardown is not None:
            try:
                self._teardown(state) if required_positional(self._teardown) else self._teardown()
            except Exception as error:
                print(f"teardown of {self.name} raised {one_line(error)}", flush=True)  # noqa: T201  (kept with the record)

    def modules(self) -> dict[str, nn.Module]:
        """Modules the function reaches by what it closes over, its globals, its arguments and its state."""
        return reached_modules([self.function, self._state, self.inputs])


def refuse_what_has_not_run(result: Any, name: str) -> None:
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise BenchError(
            "user",
            f"{name} returned a {type(result).__name__}: nothing of it has run yet; let a module of yours call it and use it up",
        )


def _show(owner: nn.Module, modules: dict[str, nn.Module]) -> None:
    for name, module in modules.items():
        owner.add_module(f"{name}_" if hasattr(owner, name) else name, module)


class StepModule(nn.Module):
    """A step in the place of a model. Its own modules stay out of sight: nothing may cast, move or switch them."""

    def __init__(self, step: OwnStep) -> None:
        super().__init__()
        self.step = step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.step(*args, **kwargs)

    def with_modules(self) -> nn.Module:
        """The same with its modules in sight, to be counted and marked one by one."""
        shown = StepModule(self.step)
        _show(shown, self.step.modules())
        return shown


class CallsFunction(nn.Module):
    """A function in the place of a model, with the modules it reaches in sight: they are moved, cast and counted."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        _show(self, reached_modules([function]))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CallsFunction:
        """Python copies no function, so a copy would go on calling the original modules."""
        raise BenchError("unsupported", f"the modules that {name_of(self)} calls cannot be copied with it")


def name_of(model: nn.Module) -> str:
    """What its author calls it: a function has a name, and of the module around it nobody knows."""
    if not isinstance(model, CallsFunction):
        return type(model).__name__
    function = model.function
    while isinstance(function, functools.partial):
        function = function.func
    name: str = getattr(function, "__name__", type(function).__name__)
    return name


# Modules that say themselves how they train

_REFUSED_HOOKS = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
_HOOKS = (
    "setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "lr_scheduler_step",
)  # fmt: skip
_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric", "torch")


def trains_itself(model: nn.Module) -> bool:
    """Whether it is built as Lightning's modules are: with a training step and optimizers of its own.

    Lightning's own class has both by name, and neither does anything.
    """
    return all(_overrides(model, name) for name in ("training_step", "configure_optimizers"))


class TrainsItself(nn.Module):
    """A module whose forward is its own training step: a recipe changes, and a step calls, what really trains."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        name = type(module).__name__
        if getattr(module, "automatic_optimization", True) is False:
            raise BenchError("user", f"{name} optimizes by hand: measure its loop as a function (--task step)")
        for hook in _REFUSED_HOOKS:
            if _overrides(module, hook):
                raise BenchError("user", f"{name} has its own {hook}: measure its loop as a function (--task step)")
        arguments = required_positional(module.training_step)  # type: ignore[arg-type]
        if arguments not in (1, 2):
            raise BenchError("user", f"training_step of {name} takes {arguments} arguments, not a batch and its index")
        if _overrides(module, "configure_model"):  # layers that are made late
            configure: Callable[[], None] = module.configure_model  # type: ignore[assignment]
            configure()
        self.module = module
        self._takes_index = arguments == 2

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        batch = kwargs or (args[0] if len(args) == 1 else args)
        step: Callable[..., Any] = self.module.training_step  # type: ignore[assignment]
        with _missing_trainer(self.module):
            output = step(batch, 0) if self._takes_index else step(batch)
        if output is None:
            raise BenchError("user", f"training_step of {type(self.module).__name__} returned no loss")
        return output

    def optimizer(self) -> torch.optim.Optimizer:
        """A fresh one each time, as the module makes it."""
        configure: Callable[[], Any] = self.module.configure_optimizers  # type: ignore[assignment]
        with _missing_trainer(self.module):
            configured = configure()
        return one_optimizer(configured, type(self.module).__name__)

    def unused_hooks(self) -> list[str]:
        """Those of its hooks that a bare step does not call."""
        return [hook for hook in _HOOKS if _overrides(self.module, hook)]


@contextmanager
def _missing_trainer(module: nn.Module) -> Iterator[None]:
    """Say in one line what a module needs a Trainer for, which a bare step has not."""
    try:
        yield
    except RuntimeError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        is_lightnings = frames[-1].f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES[:-1]
        if not is_lightnings or frames[-1].f_code.co_name != "trainer":
            raise
        asker = next((each.f_code.co_name for each in reversed(frames[:-1]) if _is_users(each, module)), "it")
        name = type(module).__name__
        raise BenchError(
            "user",
            f"{asker} of {name} asks for its Trainer, and a bare step has none: measure its loop as a function (--task step)",
        ) from error


def _is_users(frame: FrameType, module: nn.Module) -> bool:
    return frame.f_globals.get("__name__") == type(module).__module__


def _overrides(module: nn.Module, name: str) -> bool:
    """Whether the user's own class defines it, rather than the library it is derived from."""
    owner = next((kind for kind in type(module).__mro__ if name in vars(kind)), None)
    return owner is not None and owner.__module__.partition(".")[0] not in _LIBRARIES


def one_optimizer(configured: Any, name: str) -> torch.optim.Optimizer:
    """The one optimizer among what Lightning allows to be returned; schedulers are left out."""
    found = configured
    if isinstance(found, tuple | list):
        several = found[0] if found and isinstance(found[0], tuple | list) else found
        if len(several) != 1:
            raise BenchError(
                "user", f"{name} has {len(several)} optimizers: measure its loop as a function (--task step)"
            )
        found = several[0]
    if isinstance(found, Mapping):
        found = found.get("optimizer")
    if not isinstance(found, torch.optim.Optimizer):
        raise BenchError("user", f"configure_optimizers of {name} gave {type(found).__name__}, not an optimizer")
    if isinstance(found, torch.optim.LBFGS):
        raise BenchError("user", f"{name} uses LBFGS, whose steps run the model again: measure its loop as a function")
    return found
