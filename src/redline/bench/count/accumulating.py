"""Which buffers a model adds to call by call: the running model is asked, by giving them another start."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.bench.device.failure import is_out_of_memory
from redline.bench.recipe.rounding import unchanged_buffers
from redline.bench.workload.step import Setup

MOST_BUFFERS = 8
"""That are asked about one by one: each takes two more calls."""
A_LITTLE = 1e-3
"""Of its value: a model that looks something up by it still finds the same."""
NEARLY_ALL = 0.2
"""Of what is added to a buffer before a call, the part that may be gone afterwards, or be there twice, in one that accumulates."""


def accumulating(setup: Setup, written: Sequence[str], seed: int) -> tuple[str, ...]:
    """Buffers whose new value is their old one and a little more: a count, a sum, a moving average.

    Another start is given to one buffer at a time. Where it is still there after a call, in the same place, the call adds to
    what it found; what a cache of keys and values is given does not depend on what was there.
    """
    model, (args, kwargs) = setup.workload.model, (setup.workload.args, setup.workload.kwargs)
    buffers = [(name, each) for name, each in model.named_buffers() if name in written and each.is_floating_point()]
    found: list[str] = []

    def after_a_call(name: str, start: Tensor) -> Tensor:
        with setup.workload.context(), unchanged_buffers(model):
            model.get_buffer(name).copy_(start)
            torch.manual_seed(seed)
            model(*args, **kwargs)
            return model.get_buffer(name).clone()

    for name, buffer in buffers[:MOST_BUFFERS]:
        start = buffer.detach().clone()
        # Each element by another amount: what is only moved to another place does not match.
        other = start + A_LITTLE * (1 + start.abs()) * (torch.rand_like(start) + 0.5) * torch.randn_like(start).sign()
        try:
            plain, moved = after_a_call(name, start), after_a_call(name, other)
        except Exception as error:  # it may not take any start
            if is_out_of_memory(error):
                raise
            continue
        if plain.shape == start.shape == moved.shape:
            kept = ((moved - plain) / (other - start))[plain != start]
            if kept.numel() and bool(((kept - 1).abs() <= NEARLY_ALL).all()):
                found.append(name)
    return tuple(found)
