"""How much work an operator did, from the shapes that the profiler recorded with it.

FLOPs are those of products: a multiplication with its addition is two. Bytes are every input and output once, as if
nothing were cached: what the operator must move at least. The conventions are those of `redline flops`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

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
_MOST_TENSORS = 4096


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
    """It computes in fp32, fp16, bf16, fp8 …"""
    flops: int
    """Products; 0 where it makes none."""
    bytes: int


def _plain(dtype: str) -> str:
    return re.sub(r"[^a-z0-9]", "", dtype.lower().rpartition("::")[2])


def bytes_of_type(dtype: str) -> int | None:
    """The bytes of one element, by the name that torch or a process group gives its type; None if it is not known."""
    return _SIZES.get(_plain(dtype))


def number_format(dtype: str) -> str:
    plain = _plain(dtype)
    return "fp8" if plain.startswith("float8") else _FORMATS.get(plain, "int8" if bytes_of_type(dtype) == 1 else plain)


def tensors_of(shape: Shape) -> list[Tensor]:
    """Returns the tensors among the inputs, those of lists one by one. Inputs that are no tensors have no dimensions."""
    return [tensor for one in _inputs(shape) for tensor in one]


@lru_cache(maxsize=65536)
def _inputs(shape: Shape) -> tuple[tuple[Tensor, ...], ...]:
    """For each argument its tensors; none for other arguments."""
    try:
        dims = msgspec.json.decode(shape.dims.encode(), type=list[Any])
        types = msgspec.json.decode(shape.types.encode(), type=list[Any])
    except (msgspec.DecodeError, RecursionError):
        return ()
    found: list[tuple[Tensor, ...]] = []
    for number, one in enumerate(dims[:_MOST_TENSORS]):
        dtype = types[number] if number < len(types) and isinstance(types[number], str) else ""
        if _is_dims(one) and bytes_of_type(dtype):
            found.append((Tensor(tuple(one), dtype),) if one else ())
        elif isinstance(one, list) and dtype == "TensorList":
            listed = [each for each in one[:_MOST_TENSORS] if _is_dims(each) and each]
            # A list says nothing of its elements' types; optimizers keep weights and their state in fp32.
            found.append(tuple(Tensor(tuple(each), "float") for each in listed))
        else:
            found.append(())
    return tuple(found)


def _is_dims(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= LARGEST_DIMENSION for size in value
    )


@lru_cache(maxsize=65536)
def _values(shape: Shape) -> tuple[str, ...]:
    try:
        return tuple(msgspec.json.decode(shape.values.encode(), type=list[str])) if shape.values else ()
    except (msgspec.DecodeError, RecursionError):
        return ()


Inputs = Sequence[Sequence[Tensor]]
Values = Sequence[str]
Formula = Callable[[Inputs, Values], tuple[int, int]]
"""It maps an operator's inputs to its FLOPs and the elements of its output."""


def work_of(name: str, shape: Shape) -> OperatorWork | None:
    """None where the shapes do not tell: no tensors among the inputs, or an operator whose output is not known."""
    inputs = _inputs(shape)
    tensors = [tensor for one in inputs for tensor in one]
    if not tensors:
        return None
    kind, formula = _formula(name)
    if formula is None:
        return None
    try:
        flops, output = formula(inputs, _values(shape))
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    first = next((tensor for tensor in tensors if number_format(tensor.dtype).startswith(("fp", "bf"))), tensors[0])
    read = _read(name, kind, tensors)
    return OperatorWork(
        kind=kind,
        number_format=number_format(first.dtype),
        flops=flops,
        bytes=read + output * (bytes_of_type(first.dtype) or 0),
    )


def _read(name: str, kind: KernelClass, tensors: list[Tensor]) -> int:
    """Only those rows of an embedding table that are looked up are read."""
    if kind == "embedding" and len(tensors) > 1 and len(tensors[0].dims) == 2:
        rows = tensors[1].elements
        return tensors[1].bytes + rows * tensors[0].dims[1] * (bytes_of_type(tensors[0].dtype) or 0)
    if name.rstrip("_").endswith("copy") and len(tensors) > 1:
        return tensors[1].bytes  # the first is what is written
    return sum(tensor.bytes for tensor in tensors)


def _formula(name: str) -> tuple[KernelClass, Formula | None]:
    plain = name.rpartition("::")[2].rstrip("_")
    for kind, rule, formula in _FORMULAS:
        if rule.search(plain):
            return kind, formula
    kind = class_of(name)
    if name.startswith("triton_"):
        return kind, _everything_once
    return kind, _BY_CLASS.get(kind)


def _matmul(first: int, second: int, added: bool = False) -> Formula:
    def formula(inputs: Inputs, values: Values) -> tuple[int, int]:
        left, right = inputs[first][0].dims, inputs[second][0].dims
        if left[-1] != right[-2 if len(right) > 1 else 0]:
            raise ValueError("these do not multiply")
        output = math.prod(left[:-1]) * (right[-1] if len(right) > 1 else 1)
        return 2 * output * left[-1] + (output if added else 0), output

    return formula


def _convolution(order: str) -> Formula:
    """`order`: the lists among its arguments as they follow each other, which differs from backend to backend."""

    def formula(inputs: Inputs, values: Values) -> tuple[int, int]:
        data, weight = inputs[0][0].dims, inputs[1][0].dims
        spatial, lists = len(weight) - 2, [index for index, value in enumerate(values) if value.startswith("[")]
        if spatial < 1 or len(data) != len(weight) or not lists:
            raise ValueError("strides are not known")
        given = {name: re.findall(r"-?\d+", values[index]) for name, index in zip(order.split(), lists, strict=False)}
        options = []
        for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0)):
            numbers = [int(number) for number in given.get(name, [])]
            options.append(numbers if len(numbers) == spatial else (numbers or [usual]) * spatial)
        along = list(zip(data[2:], weight[2:], *options, strict=True))
        if "True" not in values[: lists[-1]] and not order.startswith("padding output_padding"):
            sizes = [(size + 2 * pad - dil * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, dil, _ in along]
            output = data[0] * weight[0] * math.prod(sizes)
            return convolution_flops(output, weight), output
        # It is transposed: every input value meets every weight of its channel.
        sizes = [
            (size - 1) * step - 2 * pad + dil * (kernel - 1) + more + 1 for size, kernel, step, pad, dil, more in along
        ]
        groups = next((int(value) for value in values[lists[-1] + 1 :] if value.isdigit()), 1)
        return convolution_flops(math.prod(data), weight), data[0] * weight[1] * groups * math.prod(sizes)

    return formula


def _convolution_backward(inputs: Inputs, values: Values) -> tuple[int, int]:
    """Counts as many products for each gradient that is wanted as there are forward."""
    gradient, data, weight = (inputs[index][0].dims for index in range(3))
    wanted = re.findall(r"True|False", values[10]) if len(values) > 10 else ["True", "True"]
    is_transposed = len(values) > 7 and values[7] == "True"
    once = convolution_flops(math.prod(data if is_transposed else gradient), weight)
    gradients = (("True" in wanted[:1]) * math.prod(data), ("True" in wanted[1:2]) * math.prod(weight))
    return once * sum(1 for size in gradients if size), sum(gradients)


def _attention(first: int, *, heads_first: bool, causal: int, backward: bool = False) -> Formula:
    def formula(inputs: Inputs, values: Values) -> tuple[int, int]:
        query, key, value = (inputs[first + index][0].dims for index in range(3))
        is_causal = causal < len(values) and values[causal] in ("True", "1", "2")
        outputs = sum(map(math.prod, (query, key, value) if backward else (query,)))
        return attention_flops(query, key, value, heads_first=heads_first, causal=is_causal, backward=backward), outputs

    return formula


def _like_largest(inputs: Inputs, values: Values) -> tuple[int, int]:
    """Elementwise, also where one input is broadcast: the output is as large as the largest input."""
    return 0, max(tensor.elements for one in inputs for tensor in one)


def _like_first(inputs: Inputs, values: Values) -> tuple[int, int]:
    return 0, next(tensor.elements for one in inputs for tensor in one)


def _like_all(inputs: Inputs, values: Values) -> tuple[int, int]:
    return 0, sum(tensor.elements for one in inputs for tensor in one)


def _everything_once(inputs: Inputs, values: Values) -> tuple[int, int]:
    """A compiled kernel names its outputs among its inputs."""
    return 0, 0


def _looked_up(inputs: Inputs, values: Values) -> tuple[int, int]:
    table, indices = inputs[0][0], next(one[0] for one in inputs[1:] if one)
    return 0, indices.elements * table.dims[-1]


_RULES: tuple[tuple[KernelClass, str, Formula], ...] = (
    ("matmul", r"^(mm|bmm|mv|_scaled_mm|dot)$", _matmul(0, 1)),
    ("matmul", r"^(addmm|baddbmm|_addmm_activation|addmv)$", _matmul(1, 2, added=True)),
    ("convolution", r"^_?convolution(_overrideable)?$", _convolution("stride padding dilation output_padding")),
    ("convolution", r"^(cudnn|miopen|mkldnn)_(depthwise_)?convolution$", _convolution("padding stride dilation")),
    ("convolution", r"_convolution_transpose$", _convolution("padding output_padding stride dilation")),
    (
        "convolution",
        r"^(_slow_conv\dd_forward|thnn_conv2d|slow_conv3d_forward|_conv_depthwise2d)$",
        _convolution("kernel stride padding dilation"),
    ),
    ("convolution", r"^convolution_backward(_overrideable)?$", _convolution_backward),
    ("attention", r"^_?flash_att(n|ention)_forward$", _attention(0, heads_first=False, causal=8)),
    ("attention", r"^_?flash_att(n|ention)_backward$", _attention(1, heads_first=False, causal=11, backward=True)),
    ("attention", r"^_efficient_attention_forward$", _attention(0, heads_first=False, causal=9)),
    ("attention", r"^_efficient_attention_backward$", _attention(1, heads_first=False, causal=14, backward=True)),
    ("attention", r"^_cudnn_attention_forward$", _attention(0, heads_first=True, causal=10)),
    ("attention", r"_cudnn_attention_backward$", _attention(1, heads_first=True, causal=14, backward=True)),
    ("attention", r"^_scaled_dot_product_(efficient|cudnn)_attention$", _attention(0, heads_first=True, causal=6)),
    ("attention", r"^_scaled_dot_product_flash_attention$", _attention(0, heads_first=True, causal=4)),
    (
        "attention",
        r"^_scaled_dot_product_(flash|efficient)_attention_backward$",
        _attention(1, heads_first=True, causal=11, backward=True),
    ),
    ("norm", r"(layer|batch|group|rms)_norm\w*backward", _like_first),
    ("norm", r"(layer|batch|group|rms)_norm", _like_first),
    ("embedding", r"^(embedding|index_select)$", _looked_up),
    ("copy", r"^cat$", _like_all),
    ("copy", r"^(copy|clone|_to_copy|contiguous)$", _like_first),
    ("reduction", r"softmax", _like_first),
)
_FORMULAS = tuple((kind, re.compile(rule), formula) for kind, rule, formula in _RULES)
_BY_CLASS: dict[KernelClass, Formula] = {
    "elementwise": _like_largest,
    "norm": _like_first,
    "copy": _like_first,
    "reduction": _everything_once,
}
"""A reduction's output is small beside its input."""
