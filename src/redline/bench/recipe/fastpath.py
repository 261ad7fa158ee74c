"""The shortcut that torch's own encoder layers take in inference, and what it does to positions that a mask hides.

A layer becomes one operator, into which no compiler sees, and which autocast on a CPU breaks. With a padding mask, the
encoder also skips the positions that the mask hides, reads its lengths on the host, and sets those positions to zero afterwards.
None of that happens when it is compiled, recorded or under autocast, so those positions hold numbers that nobody is meant to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from redline.bench.recipe.base import RecipeCode
from redline.bench.recipe.difference import Answer
from redline.bench.workload.step import Setup
from redline.bench.workload.workload import Workload
from redline.model.note import note

OFF = "    torch.backends.mha.set_fastpath_enabled(False)  # it would pass this recipe by"
SAME = 1e-3
"""Two ways to compute an output may differ by this share of its size."""
NOT_COMPARED = note(
    "masked-positions",
    "outputs at positions that the padding mask hides are not compared: nn.TransformerEncoder sets them to zero where it "
    "takes its fast path, and not where it is compiled, recorded or under autocast",
)


def leave_fast_path(setup: Setup, kind: type[nn.Module] = nn.MultiheadAttention) -> None:
    """Let torch's own layers run operator by operator if the model has any of this kind; they all hold a MultiheadAttention."""
    if setup.task != "train" and any(isinstance(module, kind) for module in setup.workload.model.modules()):
        torch.backends.mha.set_fastpath_enabled(False)
        off = "that of MultiheadAttention and TransformerEncoder is off: it would pass this recipe by"
        setup.notes["fast path"] = off


def write_without_fast_path(code: RecipeCode, kind: type[nn.Module] = nn.MultiheadAttention) -> None:
    if code.task != "train" and OFF not in code.flags:
        code.flags += [f"if any(isinstance(module, torch.nn.{kind.__name__}) for module in model.modules()):", OFF]


@contextmanager
def without_fast_path() -> Iterator[None]:
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


def hidden_positions(workload: Workload, answer: Answer, again: Callable[[], Answer]) -> list[Tensor | None]:
    """For each floating-point output, the positions at which only the fast path makes it what it is; None if there are none.

    `again` computes the answer anew. If the two ways differ at other positions too, such as in a mean over all of them,
    the difference is one of the model's answer, and nothing is left out.
    """
    encoders = [module for module in workload.model.modules() if isinstance(module, nn.TransformerEncoder)]
    hidden: list[Tensor | None] = [None] * len(answer.numbers)
    if not encoders or not torch.backends.mha.get_fastpath_enabled():
        return hidden
    masks: list[Tensor] = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
        if isinstance(mask, Tensor):
            masks.append(mask if mask.dtype == torch.bool else mask.isinf())

    hooks = [encoder.register_forward_pre_hook(look, with_kwargs=True) for encoder in encoders]
    with without_fast_path():
        plain = again()
    for hook in hooks:
        hook.remove()
    for number, (fast, slow) in enumerate(zip(answer.numbers, plain.numbers, strict=False)):
        fitting = [mask for mask in masks if fast.shape[: mask.dim()] == mask.shape and mask.shape == masks[0].shape]
        if fitting and fast.shape == slow.shape:
            differs, mask = (fast - slow).abs() > SAME * slow.abs().max(), torch.stack(fitting).any(0)
            hidden[number] = mask if bool(differs.any()) and not bool(differs[~mask].any()) else None
    if any(mask is not None for mask in hidden) and NOT_COMPARED not in workload.notes:
        workload.notes.append(NOT_COMPARED)
    return hidden
