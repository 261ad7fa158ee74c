"""This module finds how much work an operator did, from the shapes that the profiler recorded with it.

FLOPs are those of products: a multiplication with its addition counts as two. Bytes are every input and output once, as if
nothing were cached, which is the least that the operator must move. The conventions are those of `redline flops`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any, TypeGuard

import msgspec

from redline.model.work import attention_flops, convolution_flops
from redline.trace.columns import Shape
from redline.trace.names import KernelClass, class_of

_SIZES = {
    "double": 8, "complexfloat": 8, "long": 8, "longint": 8, "int64": 8, "uint64": 8, "float64": 8,
    "float": 4, "float32": 4, "int": 4, "int32": 4, "uint32": 4, "tf32": 4,
    "half": 2, "bfloat16": 2, "float16": 2, "short": 2, "shortint": 2, "int16": 2, "uint16": 2,
    "char": 1, "signedchar": 1, "unsignedchar": 1, "byte": 1, "bool": 1, "int8": 1, "uint8": 1,
    "float8e4m3fn": 1, "float8e5m2": 1, "float8e4m3fnuz": 1, "float8e5m2fnuz": 1, "float8e8m0fnu": 1,
}  # fmt: skip
_FORMATS = {"double": "fp64", "float": "fp32", "half": "fp16", "float16": "fp16", "bfloat16": "bf16"}
LARGEST_DIMENSION = 2**40
"""No tensor has a dimension larger than this, so a larger number is damaged."""
_MOST_TENSORS = 4096
"""Only this many arguments of an operator, and tensors of a list, are read, because anyone may write a trace."""


@dataclass(frozen=True)
class Tensor:
    dims: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return self.elements * (bytes_of_type(self.dtype) or 0)


@dataclass(frozen=True)
class OperatorWork:
    """This is the work of one call of an operator."""

    kind: KernelClass
    number_format: str
    """It computes in this format, such as fp32, fp16, bf16 or fp8."""
    flops: int
    """It counts the FLOPs of products. It is 0 if the operator makes none."""
    bytes: int


def _plain(dtype: str) -> str:
    return re.sub(r"[^a-z0-9]", "", dtype.lower().rpartition("::")[2])


def bytes_of_type(dtype: str) -> int | None:
    """Returns the bytes of one element, by the name that torch or a process group gives its type. Returns None if it is not known."""
    return _SIZES.get(_plain(dtype))


def number_format(dtype: str) -> str:
    plain = _plain(dtype)
    return "fp8" if plain.startswith("float8") else _FORMATS.get(plain, "int8" if bytes_of_type(dtype) == 1 else plain)


def tensors_of(shape: Shape) -> list[Tensor]:
    """Returns the tensors among the inputs, with those of lists one by one. Inputs that are no tensors have no dimensions."""
    return [tensor for one in _inputs(shape) for tensor in one]


@lru_cache(maxsize=65536)
def _inputs(shape: Shape) -> tuple[tuple[Tensor, ...], ...]:
    """Returns the tensors of each argument. An argument that is no tensor has none."""
    dims, types = _list(shape.dims, Any), _list(shape.types, Any)
    found: list[tuple[Tensor, ...]] = []
    for one, dtype in zip_longest(dims[:_MOST_TENSORS], types[: len(dims)], fillvalue=""):
        # A list says nothing of its elements' types. We take fp32, because optimizers keep weights and their state in it.
        is_list = isinstance(one, list) and dtype == "TensorList"
        known = "float" if is_list else dtype if isinstance(dtype, str) and bytes_of_type(dtype) else ""
        listed = [sizes for sizes in (one[:_MOST_TENSORS] if is_list else [one]) if known and _is_dims(sizes)]
        found.append(tuple(Tensor(tuple(sizes), known) for sizes in listed))
    return tuple(found)


def _list(text: str, kind: Any) -> list[Any]:
    try:
        return msgspec.json.decode(text.encode(), type=list[kind]) if text else []
    except (msgspec.DecodeError, RecursionError):
        return []


def _is_dims(value: Any) -> TypeGuard[list[int]]:
    """Returns True for the sizes of a tensor. A number has none."""
    sizes = value if isinstance(value, list) else []
    return bool(sizes) and all(type(size) is int and 0 <= size <= LARGEST_DIMENSION for size in sizes)


Inputs = Sequence[Sequence[Tensor]]
Values = Sequence[str]
Formula = Callable[[Inputs, Values], tuple[int, int]]
"""It maps an operator's inputs to its FLOPs and the elements of its output."""


@lru_cache(maxsize=65536)
def work_of(name: str, shape: Shape) -> OperatorWork | None:
    """Returns the work of one call. Returns None if the shapes do not tell: there is no tensor among the inputs, or the
    operator's output is not known."""
    inputs, tensors = _inputs(shape), tensors_of(shape)
    plain = name.rpartition("::")[2].rstrip("_")
    kind = class_of(name)
    if (known := _FORMULAS.get(plain)) is not None:
        kind, formula = known
    elif name.startswith("triton_"):
        formula = _everything_once
    elif "softmax" in plain:
        formula = _like_first
    elif (by_class := _BY_CLASS.get(kind)) is not None and not _ORDERS.search(plain):
        formula = by_class
    else:
        return None
    try:
        flops, output = formula(inputs, _list(shape.values, str))
        first = next((one for one in tensors if number_format(one.dtype).startswith(("fp", "bf"))), tensors[0])
    except (IndexError, ValueError, ZeroDivisionError, StopIteration):
        return None
    read = sum(tensor.bytes for tensor in tensors)
    if kind == "embedding" and len(tensors) > 1 and len(tensors[0].dims) == 2:
        # Only those rows of the table that are looked up are read.
        read += tensors[1].elements * tensors[0].bytes // max(tensors[0].dims[0], 1) - tensors[0].bytes
    elif plain.endswith("copy") and len(tensors) > 1:
        read = tensors[1].bytes  # the first tensor is written, not read
    moved = read + output * (bytes_of_type(first.dtype) or 0)
    return OperatorWork(kind=kind, number_format=number_format(first.dtype), flops=flops, bytes=moved)


def _matmul(first: int, second: int, added: bool = False) -> Formula:
    def formula(inputs: Inputs, values: Values) -> tuple[int, int]:
        left, right = inputs[first][0].dims, inputs[second][0].dims
        if left[-1] != right[-2 if len(right) > 1 else 0]:
            raise ValueError("these do not multiply")
        output = math.prod(left[:-1]) * (right[-1] if len(right) > 1 else 1)
        return 2 * output * left[-1] + (output if added else 0), output

    return formula


def _convolution(order: str, *, transposed: bool = False) -> Formula:
    """Returns the formula of a convolution. `order` names the lists among its arguments in their order, which differs from
    backend to backend."""

    def formula(inputs: Inputs, values: Values) -> tuple[int, int]:
        data, weight = inputs[0][0].dims, inputs[1][0].dims
        spatial, lists = len(weight) - 2, [index for index, value in enumerate(values) if value.startswith("[")]
        if spatial < 1 or len(data) != len(weight) or not lists:
            raise ValueError("strides are not known")
        given = dict(
            zip(order.split(), ([int(size) for size in re.findall(r"-?\d+", values[at])] for at in lists), strict=False)
        )
        options = []
        for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0)):
            sizes = given.get(name) or [usual]
            options.append(sizes if len(sizes) == spatial else sizes[:1] * spatial)
        along = list(zip(data[2:], weight[2:], *options, strict=True))
        if not transposed and "True" not in values[: lists[-1]]:
            sizes = [(size + 2 * pad - dil * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, dil, _ in along]
            output = data[0] * weight[0] * math.prod(sizes)
            return convolution_flops(output, weight), output
        # Every input value meets every weight of its channel.
        sizes = [
            (size - 1) * step - 2 * pad + dil * (kernel - 1) + more + 1 for size, kernel, step, pad, dil, more in along
        ]
        groups = next((int(value) for value in values[lists[-1] + 1 :] if value.isdigit()), 1)
        return convolution_flops(math.prod(data), weight), data[0] * weight[1] * groups * math.prod(sizes)

    return formula


def _convolution_backward(inputs: Inputs, values: Values) -> tuple[int, int]:
    """Counts, for each gradient that is wanted, as many products as the forward pass has."""
    gradient, data, weight = (inputs[index][0].dims for index in range(3))
    wanted = re.findall(r"True|False", values[10]) if len(values) > 10 else ["True", "True"]
    once = convolution_flops(math.prod(data if values[7:8] == ["True"] else gradient), weight)
    gradients = [math.prod(sizes) for sizes, asked in zip((data, weight), wanted, strict=False) if asked == "True"]
    return once * len(gradients), sum(gradients)


def _attention(first: int, *, heads_first: bool, causal: int, backward: bool = False) -> Formula:
    def formula(inputs: Inputs, values: Values) -> tuple[int, int]:
        query, key, value = (inputs[first + index][0].dims for index in range(3))
        is_causal = values[causal : causal + 1] in (["True"], ["1"], ["2"])
        outputs = sum(map(math.prod, (query, key, value) if backward else (query,)))
        return attention_flops(query, key, value, heads_first=heads_first, causal=is_causal, backward=backward), outputs

    return formula


def _like_largest(inputs: Inputs, values: Values) -> tuple[int, int]:
    """Returns no FLOPs, and the elements of an output that is as large as the largest input, because inputs may be broadcast."""
    return 0, max(tensor.elements for one in inputs for tensor in one)


def _like_first(inputs: Inputs, values: Values) -> tuple[int, int]:
    return 0, next(tensor.elements for one in inputs for tensor in one)


def _like_all(inputs: Inputs, values: Values) -> tuple[int, int]:
    return 0, sum(tensor.elements for one in inputs for tensor in one)


def _everything_once(inputs: Inputs, values: Values) -> tuple[int, int]:
    """Returns neither FLOPs nor elements of an output, because a compiled kernel names its outputs among its inputs."""
    return 0, 0


def _looked_up(inputs: Inputs, values: Values) -> tuple[int, int]:
    table, indices = inputs[0][0], next(one[0] for one in inputs[1:] if one)
    return 0, indices.elements * table.dims[-1]


_BY_NAMES: dict[str, tuple[KernelClass, Formula]] = {
    "mm bmm mv _scaled_mm dot": ("matmul", _matmul(0, 1)),
    "addmm baddbmm _addmm_activation addmv": ("matmul", _matmul(1, 2, added=True)),
    "convolution _convolution convolution_overrideable": (
        "convolution", _convolution("stride padding dilation output_padding"),
    ),
    "cudnn_convolution miopen_convolution miopen_depthwise_convolution mkldnn_convolution": (
        "convolution", _convolution("padding stride dilation"),
    ),
    "cudnn_convolution_transpose miopen_convolution_transpose": (
        "convolution", _convolution("padding output_padding stride dilation", transposed=True),
    ),
    "_slow_conv2d_forward thnn_conv2d slow_conv3d_forward _conv_depthwise2d": (
        "convolution", _convolution("kernel stride padding dilation"),
    ),
    "convolution_backward convolution_backward_overrideable": ("convolution", _convolution_backward),
    "_flash_attention_forward": ("attention", _attention(0, heads_first=False, causal=8)),
    "_flash_attention_backward": ("attention", _attention(1, heads_first=False, causal=11, backward=True)),
    "_efficient_attention_forward": ("attention", _attention(0, heads_first=False, causal=9)),
    "_efficient_attention_backward": ("attention", _attention(1, heads_first=False, causal=14, backward=True)),
    "_cudnn_attention_forward": ("attention", _attention(0, heads_first=True, causal=10)),
    "_cudnn_attention_backward _scaled_dot_product_cudnn_attention_backward": (
        "attention", _attention(1, heads_first=True, causal=14, backward=True),
    ),
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention": (
        "attention", _attention(0, heads_first=True, causal=6),
    ),
    "_scaled_dot_product_flash_attention": ("attention", _attention(0, heads_first=True, causal=4)),
    "_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward": (
        "attention", _attention(1, heads_first=True, causal=11, backward=True),
    ),
    "embedding index_select": ("embedding", _looked_up),
    "cat": ("copy", _like_all),
    "copy clone _to_copy contiguous": ("copy", _like_first),
}  # fmt: skip
_FORMULAS = {name: known for names, known in _BY_NAMES.items() for name in names.split()}
_BY_CLASS: dict[KernelClass, Formula] = {
    "elementwise": _like_largest,
    "norm": _like_first,
    "copy": _like_first,
    "reduction": _everything_once,
}
"""The output of a reduction is small beside its input."""
_ORDERS = re.compile(r"sort|topk|unique|multinomial|kthvalue|median|mode$|nonzero")
"""Operators that bring values into an order look at each of them many times, so reading them once is not a measure of their work."""
