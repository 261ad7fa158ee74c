"""The timed step: one forward for inference; forward, loss, backward and optimizer for training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch

from redline.bench.recipe.base import Setup
from redline.spec import OptimizerName

Mark = Callable[[], None]

LEARNING_RATE = 0.01
OPTIMIZER_SETTINGS: dict[OptimizerName, dict[str, Any]] = {
    "sgd": {"lr": LEARNING_RATE, "momentum": 0.9},
    "adam": {"lr": LEARNING_RATE / 10},
    "adamw": {"lr": LEARNING_RATE / 10},
}
INITIAL_GRADIENT_SCALE = 2.0**10
"""Lower than torch's 2¹⁶, which overflows and skips the first steps of most models: the loss path starts at once."""


def no_mark() -> None:
    """For steps whose phases nobody asks for."""


class TimedStep(Protocol):
    phases: ClassVar[tuple[str, ...]]
    """Names of the parts; the step calls `mark` at the end of each, so the last mark is the end of the step."""

    def __call__(self, mark: Mark = no_mark) -> Any: ...

    def context(self) -> AbstractContextManager[Any]:
        """To be held around a row of steps."""

    def recover(self) -> None:
        """Forget a step that broke half-way, so that the next one starts clean."""


class InferenceStep:
    phases: ClassVar[tuple[str, ...]] = ("forward",)

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def __call__(self, mark: Mark = no_mark) -> Any:
        setup = self._setup
        for prepare in setup.before_step:
            prepare()
        if setup.autocast_dtype is None:
            output = setup.model(*setup.args, **setup.kwargs)
        else:
            with setup.autocast():
                output = setup.model(*setup.args, **setup.kwargs)
        mark()
        return output

    def context(self) -> AbstractContextManager[Any]:
        return torch.inference_mode()

    def recover(self) -> None:
        """A broken forward leaves nothing behind."""

    def on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output for other inputs of the same shapes, outside any timing."""
        held = self._setup.args, self._setup.kwargs
        self._setup.args, self._setup.kwargs = args, kwargs
        try:
            with self.context():
                return self()
        finally:
            self._setup.args, self._setup.kwargs = held


class TrainingStep:
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward", "optimizer")

    def __init__(self, setup: Setup, optimizer: OptimizerName) -> None:
        self._setup = setup
        self._optimizer = make_optimizer(optimizer, setup.workload.model, **setup.optimizer_options)
        self._scaler = make_scaler(setup)

    def __call__(self, mark: Mark = no_mark) -> torch.Tensor:
        setup = self._setup
        for prepare in setup.before_step:
            prepare()
        with setup.autocast():
            loss: torch.Tensor = setup.workload.loss(setup.model(*setup.args, **setup.kwargs))
        mark()
        self._scaler.scale(loss).backward()
        mark()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        mark()
        return loss.detach()

    def context(self) -> AbstractContextManager[Any]:
        return torch.enable_grad()

    def recover(self) -> None:
        """Half of the gradients may be there, and the scaler may think that it has already unscaled them."""
        self._optimizer.zero_grad(set_to_none=True)
        self._scaler = make_scaler(self._setup)


def make_scaler(setup: Setup) -> torch.amp.GradScaler:
    kind = setup.device.autocast_type
    return torch.amp.GradScaler(kind, init_scale=INITIAL_GRADIENT_SCALE, enabled=setup.scales_gradients)


def make_optimizer(name: OptimizerName, model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return kinds[name](parameters, **OPTIMIZER_SETTINGS[name], **options)
