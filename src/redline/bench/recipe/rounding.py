"""Numbers as another format would hold them, still stored as fp32: what the floor of the numerics is made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from redline.bench.recipe.plain import plain_linears

FP32_PERTURBATION = 2.0**-20
"""fp32 itself: another sound algorithm (Winograd, another order of sums) differs by some 16 units in the last place."""

_TF32_DROPPED_BITS = 13
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_HALF_UNITS = {
    "fp32": FP32_PERTURBATION,
    "tf32": 2.0**-11,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "int8": 2.0**-8,
    "int8-weights": 2.0**-8,
    "fp8": 2.0**-4,
    "fp8-weights": 2.0**-4,
    "int4-weights": 2.0**-4,
}
"""Half a unit in the last place, relative to the number."""
_QUANTIZED = {"int8": True, "int8-weights": False, "fp8": True, "fp8-weights": False, "int4-weights": False}
"""Formats of quantized linear layers, and whether what goes into such a layer is rounded too."""

_OWN_FORMATS = {torch.float64: "fp64", torch.complex128: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}


def own_format(model: torch.nn.Module) -> str:
    """What the model's own weights are in: fp32 for most, and where it has none."""
    found = {_OWN_FORMATS.get(weight.dtype, "fp32") for weight in model.parameters()}
    if any(type(module).__module__.startswith("torch.ao.nn.quantized") for module in model.modules()):
        found.add("int8")
    return "/".join(sorted(found)) or "fp32"


def own_unit(model: torch.nn.Module) -> float:
    """For a model in half precision: rounding its weights again moves nothing, but every sum in another order does."""
    halves = {weight.dtype for weight in model.parameters()} & {torch.float16, torch.bfloat16}
    return max((torch.finfo(dtype).eps for dtype in halves), default=0.0)


def rounded_tensor(tensor: torch.Tensor, number_format: str) -> torch.Tensor:
    """`tensor` rounded to `number_format` and back; what is not floating stays as it is."""
    if not tensor.is_floating_point() or (tensor.layout != torch.strided and number_format not in _DTYPES):
        return tensor  # a sparse or ragged tensor can be cast, and little else
    if number_format == "fp32":
        noise = torch.empty_like(tensor).uniform_(-FP32_PERTURBATION, FP32_PERTURBATION)
        return tensor * (1 + noise)
    if number_format == "tf32":
        half = 1 << (_TF32_DROPPED_BITS - 1)
        bits = (tensor.float().view(torch.int32) + half) & ~((1 << _TF32_DROPPED_BITS) - 1)
        # Adding to the bits of a NaN may carry into its sign and make a zero of it.
        return torch.where(torch.isfinite(tensor), bits.view(torch.float32).to(tensor.dtype), tensor)
    if number_format in ("int8", "int8-weights"):
        # A scale for each row: an output channel of a weight, a token of an activation.
        scale = (tensor.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=torch.finfo(tensor.dtype).tiny)
        return (tensor / scale).round() * scale
    if number_format == "int4-weights":
        return _rounded_in_groups(tensor)
    if number_format in ("fp8", "fp8-weights"):
        largest = torch.finfo(torch.float8_e4m3fn).max
        scale = (tensor.abs().amax() / largest).clamp(min=torch.finfo(tensor.dtype).tiny)
        return (tensor / scale).to(torch.float8_e4m3fn).to(tensor.dtype) * scale
    return tensor.to(_DTYPES[number_format]).to(tensor.dtype)


INT4_GROUP = 128
"""Weights of a row that share a scale and a zero, as torchao groups them."""


def _rounded_in_groups(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.shape[-1] % INT4_GROUP:
        return tensor
    groups = tensor.reshape(*tensor.shape[:-1], -1, INT4_GROUP)
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=torch.finfo(tensor.dtype).tiny)
    return (((groups - low) / scale).round() * scale + low).reshape(tensor.shape)


def rounded_inputs(inputs: Any, number_format: str) -> Any:
    if number_format in _QUANTIZED:
        return inputs  # rounded where a quantized layer takes them, and nowhere else
    return pytree.tree_map_only(torch.Tensor, lambda leaf: rounded_tensor(leaf, number_format), inputs)


@contextmanager
def rounded_weights(model: torch.nn.Module, number_format: str, *, draw: int = 0) -> Iterator[None]:
    """The model's weights and statistics rounded, as long as the context lasts.

    In a quantized format those of linear layers alone are, and what goes into these with them where products are in it.
    `draw`: above 0 they are moved by up to half a unit of the format before they are rounded, otherwise for each number, and
    what layers hand on is rounded too: of two scores that are nearly the same, either may then be the largest.
    """

    def rounded(leaf: torch.Tensor) -> torch.Tensor:
        # Rounding has no slope of its own: in training, gradients pass it as if it were not there.
        return leaf + (rounded_tensor(leaf.detach(), number_format) - leaf.detach())

    def round_handed(*told: Any) -> Any:
        """A hook that rounds what goes into a layer, or what comes out of it."""
        return pytree.tree_map_only(torch.Tensor, rounded, told[-1])

    if number_format in _QUANTIZED:
        layers = plain_linears(model, number_format)
        tensors: Iterable[torch.Tensor] = [layer.weight for layer in layers]
        takers = layers if _QUANTIZED[number_format] else []
    else:
        tensors, takers = chain(model.parameters(), model.buffers()), []
    handles = [layer.register_forward_pre_hook(round_handed) for layer in takers]
    if draw and number_format not in _QUANTIZED:
        leaves = [module for module in model.modules() if not any(module.children())]
        handles += [leaf.register_forward_hook(round_handed) for leaf in leaves]
    try:
        with unchanged_afterwards(model):
            with torch.no_grad():
                for seed, tensor in enumerate(tensors, draw << 32):
                    tensor.copy_(rounded_tensor(_moved(tensor, number_format, seed) if draw else tensor, number_format))
            yield
    finally:
        for handle in handles:
            handle.remove()


def _moved(tensor: torch.Tensor, number_format: str, seed: int) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    half_unit = _HALF_UNITS[number_format]
    generator = torch.Generator(tensor.device).manual_seed(seed)
    return tensor * (1 + torch.empty_like(tensor).uniform_(-half_unit, half_unit, generator=generator))


@contextmanager
def unchanged_buffers(model: torch.nn.Module) -> Iterator[None]:
    """What the model writes into its buffers inside is undone: it answers as if it had not been asked before.

    So is what it draws from random generators of its own.
    """
    with _restored(model, model.buffers()):
        yield


@contextmanager
def _restored(model: torch.nn.Module, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """What happens inside to these tensors, and to random generators of the model's own, is undone.

    A buffer that a call replaced is the one it was: another one, made in inference mode, could not be written to again.
    """
    held = [(tensor, tensor.detach().clone()) for tensor in tensors]
    buffers = [(module._buffers, dict(module._buffers.items())) for module in model.modules()]
    rewind = _rewinding(model)
    try:
        yield
    finally:
        rewind()
        for now, then in buffers:  # TorchScript's are no dict, and have no update
            for name, buffer in then.items():
                if name not in now or now[name] is not buffer:
                    now[name] = buffer
        with torch.no_grad():
            for tensor, value in held:
                tensor.copy_(value)


def _rewinding(model: torch.nn.Module) -> Callable[[], None]:
    """Puts the generators that modules hold as attributes back to where they are now."""
    held: list[Callable[[], Any]] = []
    for value in (value for module in model.modules() for value in vars(module).values()):
        if isinstance(value, torch.Generator):
            held.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            held.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, np.random.RandomState):
            held.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            held.append(partial(value.setstate, value.getstate()))

    def rewind() -> None:
        for each in held:
            each()

    return rewind


@contextmanager
def unchanged_afterwards(model: torch.nn.Module) -> Iterator[None]:
    """Whatever happens to weights and statistics inside is undone."""
    try:
        with _restored(model, chain(model.parameters(), model.buffers())):
            yield
    finally:
        model.zero_grad(set_to_none=True)
