"""The loss of a training step: the one given, else the output's own, else cross-entropy on fixed random targets.

Targets are drawn once, at the first call: a later step only reads them, so that it can be compiled and captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from redline.bench.workload.structure import float_tensors
from redline.errors import BenchError

Loss = Callable[[Any], Tensor]

AUXILIARY_WEIGHTS = {"aux": 0.5, "aux_logits": 0.4, "aux_logits1": 0.3, "aux_logits2": 0.3}
"""As torchvision trains its segmentation models, Inception and GoogLeNet."""

_WANTS_VALUES = {
    "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss", "PoissonNLLLoss",
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "poisson_nll_loss",
}  # fmt: skip
"""Losses of torch whose targets look like the output instead of naming classes."""


def training_loss(given: Callable[..., Tensor] | None = None, seed: int = 0) -> Loss:
    """A function of the output alone; `given` may be `loss(output)` or `loss(output, targets)`."""
    if given is None:
        return DefaultLoss(seed)
    return GivenLoss(given, seed) if takes_targets(given) else given


class DefaultLoss:
    """`output.loss` where there is one, else cross-entropy of every part of the output that holds logits."""

    def __init__(self, seed: int = 0) -> None:
        self._targets = Targets(seed)

    def __call__(self, output: Any) -> Tensor:
        own = own_loss(output)
        if own is not None:
            return own
        total = None
        for weight, name, logits in weighted_logits(output):
            term = weight * self._cross_entropy(name, logits)
            total = term if total is None else total + term
        if total is None:
            raise BenchError(
                "user",
                f"no loss to train on: the model returned {type(output).__name__} without a floating tensor; give a loss",
            )
        return total

    def _cross_entropy(self, name: str, logits: Tensor) -> Tensor:
        # Half precision sums many exponentials badly. Autocast has rules of its own for that, and people who train
        # under it leave them alone; a copy in fp32 beside them took a tenth of the largest batch of a transformer.
        if not torch.is_autocast_enabled(logits.device.type):
            logits = logits.float()
        if not _has_classes(logits):
            return F.mse_loss(logits, self._targets.values(name, logits))
        targets = self._targets.classes(name, logits)
        if logits.ndim == 3:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return F.cross_entropy(logits, targets)


class GivenLoss:
    """The user's `loss(output, targets)` with targets for the first floating tensor of the output."""

    def __init__(self, given: Callable[..., Tensor], seed: int = 0) -> None:
        self._given = given
        self._targets = Targets(seed)
        self._wants_values = _name_of(given) in _WANTS_VALUES

    def __call__(self, output: Any) -> Tensor:
        floating = float_tensors(output)
        if not floating:
            raise BenchError(
                "user", f"the loss takes targets, but {type(output).__name__} holds no floating tensor to match"
            )
        name, logits = floating[0]
        if self._wants_values or not _has_classes(logits):
            return self._given(output, self._targets.values(name, logits))
        return self._given(output, self._targets.classes(name, logits))


class Targets:
    """Random targets, drawn once per output and kept on its device."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: dict[tuple[Any, ...], Tensor] = {}

    def classes(self, name: str, logits: Tensor) -> Tensor:
        """One class per item, per position (N, T, V) or per pixel (N, C, H, W)."""
        axis = 2 if logits.ndim == 3 else 1
        shape = tuple(size for dimension, size in enumerate(logits.shape) if dimension != axis)

        def draw(generator: torch.Generator) -> Tensor:
            return torch.randint(0, logits.shape[axis], shape, generator=generator)

        return self._keep(("classes", name, *logits.shape), logits, draw)

    def values(self, name: str, logits: Tensor) -> Tensor:
        """Values of the output's shape between 0 and 1, which suit regression and binary cross-entropy alike."""

        def draw(generator: torch.Generator) -> Tensor:
            return torch.rand(logits.shape, generator=generator).to(logits.dtype)

        return self._keep(("values", name, str(logits.dtype), *logits.shape), logits, draw)

    def _keep(self, what: tuple[Any, ...], like: Tensor, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
        key = (*what, str(like.device))
        # What a fake tensor mode draws must not outlive it, and what is kept must not enter it.
        fake = isinstance(like, FakeTensor)
        if not fake and key in self._kept:
            return self._kept[key]
        # inference_mode(False): a tensor made under inference mode could never take part in autograd.
        with torch.inference_mode(False):
            targets = draw(torch.Generator().manual_seed(self._seed)).to(like.device)
        if not fake:
            self._kept[key] = targets
        return targets


def own_loss(output: Any) -> Tensor | None:
    """The scalar the output carries as `loss`, by attribute or key; an output that is one scalar is itself the loss."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, Tensor) and output.ndim == 0:
        found = output
    if isinstance(found, Tensor) and found.is_floating_point() and found.numel() == 1:
        return found.reshape(())
    return None


def weighted_logits(output: Any) -> list[tuple[float, str, Tensor]]:
    """What enters the loss, with its weight.

    Where the output names its main part (`logits`, `out`), only that and the auxiliary heads count: the rest is
    hidden states and the like. Otherwise every floating tensor does, so that every parameter gets a gradient.
    """
    floating = float_tensors(output)
    names = [name for name, _ in floating]
    main = next((name for name in ("logits", "out") if name in names), None)
    if main is None:
        return [(1.0, name, tensor) for name, tensor in floating if tensor.ndim > 0]
    weights = {main: 1.0, **AUXILIARY_WEIGHTS}
    return [(weights[name], name, tensor) for name, tensor in floating if name in weights]


def takes_targets(loss: Callable[..., Any]) -> bool:
    """Whether a loss must be given a second positional argument."""
    # The signature of a module is that of its call, which takes anything.
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in: nothing to read
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters) >= 2


def _has_classes(logits: Tensor) -> bool:
    """One output per item, or a single class, leaves cross-entropy nothing to choose from."""
    axis = 2 if logits.ndim == 3 else 1
    return logits.ndim >= 2 and logits.shape[axis] > 1


def _name_of(loss: Callable[..., Any]) -> str:
    return type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", "")
