"""The shortcut that torch's own encoder layers take in inference, and what it does to positions that a mask hides.

A layer becomes one operator, into which no compiler sees, and which autocast on a CPU breaks. With a mask of padding, the
encoder also leaves out what the mask hides, reading its lengths on the host, and sets those positions to zero afterwards.
Compiled, recorded and under autocast none of that happens, and those positions hold numbers that nobody is meant to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from redline.bench.recipe.base import RecipeCode
from redline.bench.recipe.outputs import Answer
from redline.bench.workload.step import Setup
from redline.model.note import note

OFF = "    torch.backends.mha.set_fastpath_enabled(False)  # it would pass this recipe by"
SAME = 1e-3
"""Of the size of an output: what two ways to compute it may differ by."""
NOT_COMPARED = note(
    "masked-positions",
    "outputs at positions that the padding mask hides are not compared: nn.TransformerEncoder sets them to zero where it "
    "takes its fast path, and not where it is compiled, recorded or under autocast",
)


def leave_fast_path(setup: Setup, kind: type[nn.Module] = nn.MultiheadAttention) -> None:
    """Have torch's own layers run operator by operator where the model has any of this kind; they all hold a MultiheadAttention."""
    model = setup.workload.model
    if setup.task != "train" and any(isinstance(module, kind) for module in model.modules()):
        torch.backends.mha.set_fastpath_enabled(False)
        setup.notes["fast path"] = (
            "that of MultiheadAttention and TransformerEncoder is off: it would pass this recipe by"
        )


def write_without_fast_path(code: RecipeCode, kind: type[nn.Module] = nn.MultiheadAttention) -> None:
    asked = [
        f"if any(isinstance(module, torch.nn.{each.__name__}) for module in model.modules()):"
        for each in (nn.MultiheadAttention, kind)
    ]
    if code.task != "train" and not set(asked) & set(code.flags):
        code.flags += [asked[-1], OFF]


@contextmanager
def without_fast_path() -> Iterator[None]:
    held = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(held)


def hidden_positions(model: nn.Module, answer: Answer, again: Callable[[], Answer]) -> list[Tensor | None]:
    """For each floating output the positions at which only the fast path makes it what it is; None: it makes no difference.

    `again` computes the answer anew. Where the two ways differ at other positions too, such as in a mean over all of them,
    the difference is one of the model's answer, and nothing is left out.
    """
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
    if not encoders or not torch.backends.mha.get_fastpath_enabled():
        return [None] * len(answer.numbers)
    with without_fast_path(), _masks_given(encoders) as masks:
        plain = again()
    if plain.form != answer.form:
        return [None] * len(answer.numbers)
    return [_hidden(*both, masks) for both in zip(answer.numbers, plain.numbers, strict=True)]


def _hidden(fast: Tensor, plain: Tensor, masks: list[Tensor]) -> Tensor | None:
    if fast.shape != plain.shape:
        return None
    differs = (fast - plain).abs() > SAME * plain.abs().max()
    fitting = [mask for mask in masks if fast.shape[: mask.dim()] == mask.shape]
    if not fitting or not bool(differs.any()):
        return None
    mask = torch.stack([each for each in fitting if each.shape == fitting[0].shape]).any(0)
    return mask if not bool(differs[~mask].any()) else None


@contextmanager
def _masks_given(encoders: list[nn.TransformerEncoder]) -> Iterator[list[Tensor]]:
    """The masks of padding that encoders are given meanwhile, True where they hide something."""
    masks: list[Tensor] = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
        if isinstance(mask, Tensor):
            masks.append(mask if mask.dtype == torch.bool else mask.isinf())

    hooks = [encoder.register_forward_pre_hook(look, with_kwargs=True) for encoder in encoders]
    try:
        yield masks
    finally:
        for hook in hooks:
            hook.remove()
