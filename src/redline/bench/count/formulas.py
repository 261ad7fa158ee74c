"""How many FLOPs an operator takes, from the shapes of what it gets and gives.

A multiplication with its addition is two FLOPs. Where torch's own counter is wrong or silent (grouped convolution
backward, recurrent layers, causal attention, int8 and grouped products, matrix times vector), the formula here is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from redline.bench.workload.structure import stored
from redline.model.formulas import attention_flops, convolution_flops
from redline.model.work import OperatorKind

Arguments = dict[str, Any]
"""The operator's arguments by the names of its schema."""
Formula = Callable[[Arguments, Any], int]


def matrix_product(first: str) -> Formula:
    """2·M·N·K, whatever the batch dimensions: every element of the output sums K products.

    Every entry of a sparse matrix meets one row, or one column, of the other.
    """

    def flops(arguments: Arguments, out: Any) -> int:
        left, right = arguments[first], arguments.get("mat2")
        if left.layout in SPARSE:
            return 2 * entries(left) * int(out.shape[-1] if out.ndim > 1 else 1)
        if right is not None and right.layout in SPARSE:
            return 2 * entries(right) * int(out.shape[-2])
        return 2 * out.numel() * int(left.shape[-1])

    return flops


SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def entries(matrix: Tensor) -> int:
    return int(stored(matrix)[0].numel())


def summed_products(arguments: Arguments, out: Any) -> int:
    """Many matrix products into one output."""
    return 2 * int(arguments["batch1"].numel()) * int(out.shape[-1])


def linear(arguments: Arguments, out: Any) -> int:
    return 2 * out.numel() * int(arguments["weight"].shape[-1])


def dot(arguments: Arguments, out: Any) -> int:
    return 2 * int(arguments["self"].numel())


def grouped_product(arguments: Arguments, out: Any) -> int:
    """Every row belongs to one group. Two flat matrices share out their inner dimension instead."""
    first, second = arguments["self"], arguments["mat2"]
    groups = int(out.shape[0]) if first.ndim == 2 and second.ndim == 2 else 1
    return 2 * out.numel() * int(first.shape[-1]) // groups


def convolution(arguments: Arguments, out: Any) -> int:
    data = arguments.get("input", arguments.get("self"))
    assert data is not None
    positions = data if arguments.get("transposed") else out
    return convolution_flops(int(positions.numel()), arguments["weight"].shape)


def transposed_convolution(arguments: Arguments, out: Any) -> int:
    data = arguments.get("input", arguments.get("self"))
    assert data is not None
    return convolution_flops(int(data.numel()), arguments["weight"].shape)


def convolution_backward(arguments: Arguments, out: Any) -> int:
    """The gradients of the input and of the weight each take as many products as the forward pass, groups or not."""
    positions = arguments["input"] if arguments["transposed"] else arguments["grad_output"]
    wanted = sum(bool(one) for one in arguments["output_mask"][:2])
    return wanted * convolution_flops(int(positions.numel()), arguments["weight"].shape)


def deformable_convolution_backward(arguments: Arguments, out: Any) -> int:
    """One product for the columns that were sampled, from which input, offsets and mask follow, and one for the weight."""
    return 2 * convolution_flops(int(arguments["grad"].numel()), arguments["weight"].shape)


def packed_product(arguments: Arguments, out: Any) -> int:
    """A quantized linear layer or convolution, whose weight is the first of what it was packed with."""
    weight = next(value for value in arguments.values() if isinstance(value, list) and isinstance(value[0], Tensor))[0]
    return convolution_flops(int(out.numel()), weight.shape)


def _recurrent(data: Tensor, weights: list[Tensor]) -> int:
    """Every weight matrix meets every step of every sequence once."""
    tokens = data.numel() // data.shape[-1]
    return 2 * tokens * sum(int(weight.numel()) for weight in weights if weight.ndim == 2)


def recurrent(arguments: Arguments, out: Any) -> int:
    return _recurrent(arguments["input"], arguments["weight"])


def recurrent_backward(arguments: Arguments, out: Any) -> int:
    return 2 * recurrent(arguments, out)


def recurrent_layer(arguments: Arguments, out: Any) -> int:
    return _recurrent(arguments["input"], [arguments["weight0"], arguments["weight1"]])


def recurrent_layer_backward(arguments: Arguments, out: Any) -> int:
    return 2 * _recurrent(arguments["input"], [arguments["weight1"], arguments["weight2"]])


def attention(*, heads_first: bool, backward: bool) -> Formula:
    def flops(arguments: Arguments, out: Any) -> int:
        query, key, value = (arguments[name].shape for name in ("query", "key", "value"))
        causal = bool(arguments.get("is_causal") or arguments.get("custom_mask_type"))
        return attention_flops(query, key, value, heads_first=heads_first, causal=causal, backward=backward)

    return flops


def fourier(arguments: Arguments, out: Any) -> int:
    """5·N·log₂N of the usual algorithm; half of it where one side is real."""
    data = arguments["self"]
    whole = out if out.numel() > data.numel() else data
    length = math.prod(int(whole.shape[dimension]) for dimension in arguments["dim"])
    flops = 5 * whole.numel() * math.log2(max(length, 2))
    return int(flops if data.is_complex() and out.is_complex() else flops / 2)


def distances(arguments: Arguments, out: Any) -> int:
    return 3 * out.numel() * int(arguments["x1"].shape[-1])


def euclidean_distances(arguments: Arguments, out: Any) -> int:
    """One product: two columns beside the data carry the squared lengths of the vectors of either side."""
    return 2 * out.numel() * (int(arguments["x1"].shape[-1]) + 2)


def trilinear(arguments: Arguments, out: Any) -> int:
    """Two multiplications and an addition for each combination; expanded dimensions count once."""
    sizes: list[int] = []
    for name in ("i1", "i2", "i3"):
        shape = list(arguments[name].shape)
        for dimension in sorted(arguments[f"expand{name[1]}"]):
            shape.insert(dimension, 1)
        sizes = shape if not sizes else [max(a, b) for a, b in zip(sizes, shape, strict=True)]
    return 3 * math.prod(sizes)


FORMULAS: dict[str, tuple[OperatorKind, Formula]] = {
    **{name: ("matmul", matrix_product("self")) for name in (
        "mm", "bmm", "mv", "_int_mm", "_scaled_mm", "_scaled_mm_v2", "_weight_int8pack_mm", "_weight_int4pack_mm",
        "_weight_int4pack_mm_for_cpu", "_weight_int4pack_mm_with_scales_and_zeros", "_sparse_mm",
    )},
    **{name: ("matmul", matrix_product("mat1")) for name in ("addmm", "_addmm_activation", "_sparse_addmm")},
    "baddbmm": ("matmul", matrix_product("batch1")),
    "addbmm": ("matmul", summed_products),
    "addmv": ("matmul", matrix_product("mat")),
    "linear": ("matmul", linear),
    "mkldnn_linear": ("matmul", linear),
    "dot": ("matmul", dot),
    "vdot": ("matmul", dot),
    "_grouped_mm": ("matmul", grouped_product),
    "_scaled_grouped_mm": ("matmul", grouped_product),
    "_scaled_grouped_mm_v2": ("matmul", grouped_product),
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "miopen_convolution", "miopen_depthwise_convolution", "_slow_conv2d_forward", "slow_conv3d_forward", "_conv_depthwise2d", "conv_depthwise3d", "cudnn_convolution_relu", "cudnn_convolution_add_relu", "miopen_convolution_relu", "miopen_convolution_add_relu", "slow_conv_dilated2d", "slow_conv_dilated3d"), ("convolution", convolution)),
    **dict.fromkeys(("cudnn_convolution_transpose", "miopen_convolution_transpose", "slow_conv_transpose2d", "slow_conv_transpose3d"), ("convolution", transposed_convolution)),
    "convolution_backward": ("convolution", convolution_backward),
    "torchvision::deform_conv2d": ("convolution", convolution),
    "torchvision::_deform_conv2d_backward": ("convolution", deformable_convolution_backward),
    "_cudnn_rnn": ("matmul", recurrent),
    "miopen_rnn": ("matmul", recurrent),
    "_cudnn_rnn_backward": ("matmul", recurrent_backward),
    "miopen_rnn_backward": ("matmul", recurrent_backward),
    "mkldnn_rnn_layer": ("matmul", recurrent_layer),
    "mkldnn_rnn_layer_backward": ("matmul", recurrent_layer_backward),
    **{
        f"_scaled_dot_product_{name}{direction}": ("attention", attention(heads_first=True, backward=bool(direction)))
        for name in (
            "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu",
            "fused_attention_overrideable",
        )
        for direction in ("", "_backward")
    },
    **{
        f"_{name}_attention_{direction}": ("attention", attention(heads_first=False, backward=direction == "backward"))
        for name in ("flash", "efficient")
        for direction in ("forward", "backward")
    },
    "_trilinear": ("matmul", trilinear),
    **dict.fromkeys(("_fft_c2c", "_fft_r2c", "_fft_c2r"), ("other", fourier)),
    "_cdist_forward": ("other", distances),
    "_euclidean_dist": ("matmul", euclidean_distances),
}  # fmt: skip
"""By the name of an operator without its overload; those of aten without their namespace."""


def is_ragged(arguments: Arguments) -> bool:
    """Sequences of different lengths in one flat tensor: how long each is stands in data, so they are not counted."""
    return any(arguments.get(name) is not None for name in ("cum_seq_q", "cu_seqlens_q"))
