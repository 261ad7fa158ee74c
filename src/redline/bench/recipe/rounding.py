"""This rounds numbers to what another format would hold, still stored as fp32, and puts models back as they were.

The error of strict fp32 on rounded weights and inputs is the floor by which numerics are judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from redline.bench.recipe.plain import plain_linears

FP32_PERTURBATION = 2.0**-20
"""Weights are moved by up to this share to find the floor of fp32: another sound algorithm, such as Winograd or another order of sums,
differs by about 16 units in the last place."""
TF32_DROPPED_BITS = 13
"""TF32 has 10 bits of the 23 that fp32 keeps behind the point."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""In these formats torch itself rounds, when it casts a tensor."""
QUANTIZED = {"int8": True, "int8-weights": False, "fp8": True, "fp8-weights": False}
"""These are the formats of quantized linear layers, and whether the inputs of such a layer are rounded too."""
HALF_UNITS = {
    "fp32": FP32_PERTURBATION, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 2.0**-8, "fp8": 2.0**-4,
}  # fmt: skip
"""This is half a unit in the last place of each format, relative to the number: as far as rounding moves it at most."""
OWN_FORMATS = {torch.float64: "fp64", torch.complex128: "fp64", **{dtype: name for name, dtype in DTYPES.items()}}
"""Weights of these types have these formats, and all others count as fp32."""


def own_format(model: nn.Module) -> str:
    """Returns the number format of the model's own weights. It is fp32 for most models, and for those without weights."""
    formats = {OWN_FORMATS.get(weight.dtype, "fp32") for weight in model.parameters()}
    if any(type(module).__module__.startswith("torch.ao.nn.quantized") for module in model.modules()):
        formats.add("int8")
    return "/".join(sorted(formats)) or "fp32"


def own_unit(model: nn.Module) -> float:
    """Returns the least floor of a model in half precision, and 0 for others.

    Rounding such weights once more moves nothing, but another order of sums does.
    """
    halves = {weight.dtype for weight in model.parameters()} & set(DTYPES.values())
    return max((torch.finfo(dtype).eps for dtype in halves), default=0.0)


def rounded_tensor(tensor: Tensor, number_format: str) -> Tensor:
    """Returns `tensor` rounded to `number_format` and back. Tensors that are not floating-point stay as they are."""
    if not tensor.is_floating_point() or (tensor.layout != torch.strided and number_format not in DTYPES):
        return tensor  # a sparse or ragged tensor can be cast, and hardly anything else
    tiny = torch.finfo(tensor.dtype).tiny
    if number_format in DTYPES:
        return tensor.to(DTYPES[number_format]).to(tensor.dtype)
    if number_format == "fp32":
        return _moved(tensor, FP32_PERTURBATION)
    if number_format == "tf32":
        half = 1 << (TF32_DROPPED_BITS - 1)
        bits = (tensor.float().view(torch.int32) + half) & -(1 << TF32_DROPPED_BITS)
        # Adding to the bits of a NaN may carry into its sign and make a zero of it.
        return torch.where(torch.isfinite(tensor), bits.view(torch.float32).to(tensor.dtype), tensor)
    if number_format.startswith("fp8"):
        scale = (tensor.abs().amax() / torch.finfo(torch.float8_e4m3fn).max).clamp(min=tiny)
        return (tensor / scale).to(torch.float8_e4m3fn).to(tensor.dtype) * scale
    # int8 has a scale for each row: an output channel of a weight, a token of an activation.
    scale = (tensor.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=tiny)
    return (tensor / scale).round() * scale


def _moved(tensor: Tensor, share: float, generator: torch.Generator | None = None) -> Tensor:
    return tensor * (1 + torch.empty_like(tensor).uniform_(-share, share, generator=generator))


def rounded_inputs(inputs: Any, number_format: str) -> Any:
    if number_format in QUANTIZED:
        return inputs  # they are rounded where a quantized layer takes them, and nowhere else
    return pytree.tree_map_only(Tensor, lambda leaf: rounded_tensor(leaf, number_format), inputs)


@contextmanager
def rounded_weights(model: nn.Module, number_format: str, *, draw: int = 0) -> Iterator[None]:
    """Within the context the model's weights and statistics are rounded.

    In a quantized format only the weights of linear layers are rounded, and the inputs of these layers too if products are in that
    format. With a `draw` above 0, weights are first moved by up to half a unit, differently for each draw, and the outputs of layers
    are rounded. Either of two scores that are nearly the same may then be the largest.
    """

    def round_values(*given: Any) -> Any:
        """This hook rounds what goes into a layer, or what comes out of it."""
        return pytree.tree_map_only(Tensor, lambda leaf: rounded_tensor(leaf, number_format), given[-1])

    tensors: Iterable[Tensor] = chain(model.parameters(), model.buffers())
    with ExitStack() as stack:
        if number_format in QUANTIZED:
            layers = plain_linears(model, number_format)
            tensors = [layer.weight for layer in layers]
            hooks = [layer.register_forward_pre_hook(round_values) for layer in layers if QUANTIZED[number_format]]
        else:
            leaves = [module for module in model.modules() if draw and not any(module.children())]
            hooks = [leaf.register_forward_hook(round_values) for leaf in leaves]
        for hook in hooks:
            stack.callback(hook.remove)
        stack.enter_context(unchanged_afterwards(model))
        with torch.no_grad():
            for number, tensor in enumerate(tensors, draw << 32):
                moved = tensor
                if draw and tensor.is_floating_point():
                    half_unit = HALF_UNITS[number_format.removesuffix("-weights")]
                    moved = _moved(tensor, half_unit, torch.Generator(tensor.device).manual_seed(number))
                tensor.copy_(rounded_tensor(moved, number_format))
        yield


@contextmanager
def unchanged_buffers(model: nn.Module, *besides: Tensor) -> Iterator[None]:
    """This context undoes at its end what the model wrote into its buffers, and into the tensors `besides`. The model then answers as
    if it had not been asked before.

    If a call replaced a buffer, the old one is put back, because one made in inference mode could not be written to again.
    """
    values = [(tensor, tensor.detach().clone()) for tensor in (*model.buffers(), *besides)]
    buffers = [(module._buffers, dict(module._buffers.items())) for module in model.modules()]
    try:
        yield
    finally:
        for now, then in buffers:  # buffers of TorchScript are no dict, and have no update
            for name, buffer in then.items():
                if name not in now or now[name] is not buffer:
                    now[name] = buffer
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)


@contextmanager
def unchanged_afterwards(model: nn.Module) -> Iterator[None]:
    """This context undoes at its end whatever happened to weights and buffers, and leaves no gradients."""
    try:
        with unchanged_buffers(model, *model.parameters()):
            yield
    finally:
        model.zero_grad(set_to_none=True)
