"""What an operator does, told by its name and tags: kind of work, kind of layer, FLOPs of the cheap ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from redline.bench.count.formulas import FORMULAS, Formula, packed_product
from redline.bench.workload.structure import is_plain, stored
from redline.model.work import LayerKind, OperatorKind

Reads = Literal["all", "gathered", "rows", "not self", "nothing"]
"""Which of its inputs an operator must read: all; as much of the first as it gives out; a row of the first for each entry of
the second; all but the first; none."""

NORM_FLOPS = SOFTMAX_FLOPS = 5
"""Per element: mean, variance, subtract, scale, shift; maximum, subtract, exponentiate, sum, divide."""

_FREE = frozenset((
    "_unsafe_view", "_reshape_alias", "as_strided_", "alias", "detach", "detach_", "lift_fresh", "unsafe_split", "unsafe_chunk",
    "unsafe_split_with_sizes", "set_", "resize_", "resize_as_", "_local_scalar_dense", "item", "is_same_size", "sym_size",
    "sym_stride", "sym_numel", "sym_storage_offset", "empty", "empty_like", "new_empty", "new_empty_strided",
    "empty_strided", "empty_permuted", "_cudnn_init_dropout_state", "_fused_sdp_choice", "_assert_async", "_assert_scalar",
    "_use_cudnn_rnn_flatten_weight", "equal", "requires_grad_", "_version", "record_stream", "t_", "transpose_",
    "unsqueeze_", "squeeze_", "lift", "_assert_tensor_metadata", "_functional_assert_async", "sym_constrain_range",
    "sym_constrain_range_for_size", "dense_dim", "sparse_dim", "is_coalesced", "resize", "_print", "_linalg_check_errors", "is_pinned", "_has_symbolic",
))  # fmt: skip
"""Nothing moves: views by another name, memory that is only set aside, questions."""

_NORM = re.compile(r"(batch|layer|group|instance|rms)_?norm")
_SOFTMAX = re.compile(r"softmax")
_REDUCTION = re.compile(
    r"^_?(foreach_)?(sum|nansum|mean|nanmean|amax|amin|aminmax|max|min|prod|var|std|var_mean|std_mean|logsumexp|cumsum|"
    r"cumprod|logcumsumexp|cummax|cummin|argmax|argmin|topk|sort|argsort|kthvalue|median|mode|any|all|norm|"
    r"linalg_vector_norm|count_nonzero|histc|bincount|trace|segment_reduce|unique\w*|searchsorted|bucketize)(_helper)?$|"
    r"pool|_loss|weight_norm_interface|^nanmedian$|^dist$|_amp_foreach_non_finite"
)
_FILL = frozenset(("zeros", "ones", "full", "arange", "linspace", "eye", "zeros_like", "ones_like", "full_like", "fill_",
                   "new_zeros", "new_ones", "new_full", "scalar_tensor", "zero_", "zero", "fill", "rand", "randn",
                   "randint", "randperm", "rand_like", "randn_like", "normal_", "uniform_", "random_", "bernoulli_",
                   "tril_indices", "triu_indices", "exponential_", "efficientzerotensor"))  # fmt: skip
_GATHER = frozenset(("embedding", "index", "_unsafe_index", "index_select", "gather", "take", "embedding_renorm_",
                     "masked_select", "grid_sampler_2d", "grid_sampler_3d", "multinomial"))  # fmt: skip
_BAGS = frozenset(("_embedding_bag", "_embedding_bag_forward_only"))
"""They give out sums of the rows that they read."""
_PLACES = frozenset(
    ("index_copy_", "index_add_", "index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "scatter_reduce_")
)
_ADDS = frozenset(("index_add_", "scatter_add_", "scatter_reduce_"))
"""Of a tensor that stays where it is they write the places that they are given, and these read them too."""
_COPY = re.compile(
    r"^(clone|_to_copy|to|cat|stack|contiguous|copy|roll|flip|repeat|repeat_interleave|tile|constant_pad_nd|"
    r"\w*_pad\dd|\w*_pad\dd_backward|\w+_scatter|\w+_backward_data_copy|select_backward|slice_backward|diagonal_backward|"
    r"unfold_backward|as_strided_scatter|\w+_copy|im2col|col2im|pixel_(un)?shuffle|channel_shuffle|tril|triu|diag_embed|"
    r"_unsafe_index_put|index_put|_index_put_impl|index_add|index_copy|index_fill|scatter\w*|masked_scatter|"
    r"embedding_dense_backward|embedding_backward|one_hot|nonzero|_pack_padded_sequence|_pad_packed_sequence|"
    r"_cudnn_rnn_flatten_weight|_pin_memory|_nested_\w+|_transform_bias\w*|upsample_nearest\w*|_foreach_copy|"
    r"split_with_sizes_copy|meshgrid|cartesian_prod|rot90|unsqueeze_copy|rename|_reshape_copy|_conj_physical|resolve_\w+)$"
)
_ELEMENTWISE = re.compile(
    r"^_?foreach_|dropout|^_fused_|_thnn_fused|upsample_(bi|tri)?(linear|cubic)|^_upsample|^where$|masked_fill|clamp|"
    r"_backward$|^(hard(swish|tanh|sigmoid|shrink)|leaky_relu|elu|selu|mish|silu|gelu|softplus|softshrink|log_sigmoid\w*|"
    r"relu6?|threshold|_add_relu|abs|eq|ne|ge|gt|le|lt|rsub|addr|xlogy|copysign|gcd|lcm|heaviside|_masked_scale|renorm|"
    r"bernoulli|normal\w*|uniform|cauchy|exponential|geometric|log_normal|poisson|randint_like|affine_grid_generator|"
    r"binary_cross_entropy\w*|_philox_\w+|glu|prelu|_prelu_kernel|celu|rrelu\w*|polar|complex|view_as_complex_copy|lerp|addc(mul|div)|"
    r"quantize\w*|dequantize\w*|_amp_\w+|fake_quantize\w*|logical_\w+|nan_to_num|isin|cross|linalg_cross|floor_divide)$"
)

_BACKWARD_OF_MORE = re.compile(r"(conv|mm|rnn|lstm_cell|attention|linalg|dist|fft|embedding_bag)\w*_backward$")
"""The backward of an activation touches each element once; the backward of these does not."""

_PACKED_PRODUCT = re.compile(r"^(linear|conv[123]d)(_add)?(_relu|_leaky_relu|_tanh)?(_dynamic)?(_fp16)?$")
_SUM_OF_TWO = re.compile(r"^(add|mul)(_scalar)?(_relu)?(_out)?$")


@dataclass(frozen=True)
class Known:
    """All about one operator that does not depend on its arguments."""

    name: str
    kind: OperatorKind | None
    """None: it moves and computes nothing."""
    formula: Formula | None = None
    per_element: int = 0
    """FLOPs per element, where there is no formula."""
    of_input: bool = False
    """Elements of the largest input count, not of the output."""
    reads: Reads = "all"
    counted: bool = True
    takes_packed: bool = False
    """Its weight comes in an object of torch's own."""


@lru_cache(maxsize=10_000)
def known(operator: Any) -> Known:
    """`operator` is what a dispatch mode is handed."""
    if not isinstance(operator, torch._ops.OpOverload):
        return Known(str(operator), "other", counted=False)
    namespace, _, plain = operator._schema.name.partition("::")
    if namespace in ("prim", "profiler") or operator.is_view:
        return Known(plain, None)
    pointwise = torch.Tag.pointwise in operator.tags
    if namespace != "aten":
        name = f"{namespace}::{plain}"
        if name in FORMULAS:
            return Known(name, *FORMULAS[name])
        if namespace == "quantized":
            return _quantized(name, plain)
        # Somebody's own: its name proves nothing.
        return Known(name, "elementwise", per_element=1) if pointwise else Known(name, "other", counted=False)
    if plain in _FREE:
        return Known(plain, None)
    product = FORMULAS.get(plain) or FORMULAS.get(plain.removesuffix("_"))
    if product is not None:
        kind, formula = product
        return Known(plain, kind, formula)
    return _cheap(plain, pointwise)


def _quantized(name: str, plain: str) -> Known:
    if _PACKED_PRODUCT.match(plain):
        kind: OperatorKind = "matmul" if plain.startswith("linear") else "convolution"
        return Known(name, kind, packed_product, takes_packed=True)
    return replace(_cheap(plain, _SUM_OF_TWO.match(plain) is not None), name=name)


def _cheap(name: str, pointwise: bool) -> Known:
    base = name.rstrip("_") or name
    if name in _FILL:
        return Known(name, "copy", reads="nothing")
    if name == "copy_":
        return Known(name, "copy", reads="not self")
    if name in _GATHER:
        return Known(name, "copy", reads="gathered")
    if name in _BAGS:
        return Known(name, "copy", reads="rows")
    if _NORM.search(base):
        return Known(name, "norm", per_element=NORM_FLOPS, of_input=True)
    if _SOFTMAX.search(base):
        return Known(name, "reduction", per_element=SOFTMAX_FLOPS, of_input=True)
    if _COPY.search(base):
        return Known(name, "copy")
    if _REDUCTION.search(base):
        return Known(name, "reduction", per_element=1, of_input=True)
    if pointwise or (_ELEMENTWISE.search(base) and not _BACKWARD_OF_MORE.search(base)):
        return Known(name, "elementwise", per_element=1)
    return Known(name, "other", counted=False)


LAYERS: tuple[tuple[LayerKind, re.Pattern[str], OperatorKind], ...] = (
    ("linear", re.compile(r"linear$"), "matmul"),
    ("attention", re.compile(r"scaled_dot_product_attention$"), "attention"),
    ("convolution", re.compile(r"_?conv(olution|_transpose)?\dd$|_?convolution$"), "convolution"),
    ("batch-norm", re.compile(r"batch_norm$"), "norm"),
    ("norm", re.compile(r"(layer|group|instance|rms)_norm$"), "norm"),
    ("recurrent", re.compile(r"(lstm|gru|rnn_tanh|rnn_relu)(_cell)?$"), "matmul"),
    ("embedding", re.compile(r"embedding(_bag)?$"), "copy"),
    ("max-pooling", re.compile(r"max_pool2d(_with_indices)?$"), "reduction"),
)
"""Operators by which layers of a kind are known; each is timed as a whole."""


@lru_cache(maxsize=10_000)
def described(func: Any) -> tuple[str, LayerKind | None, OperatorKind | None]:
    """An operator's name, the kind of layer it makes up by itself, and what it does; None: it does no work."""
    about = known(func)
    if isinstance(func, torch._ops.OpOverload) and func.namespace == "aten":
        for layer, pattern, kind in LAYERS:
            if pattern.fullmatch(about.name):
                return about.name, layer, kind
    return about.name, None, about.kind


Region = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Which part of which storage a tensor shows."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """An operator's arguments are tensors, or lists of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def tensor_bytes(tensor: Tensor) -> int:
    if not is_plain(tensor):
        return sum(map(tensor_bytes, stored(tensor)))
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            elements *= int(size)
        elif size == 0:
            return 0
    return elements * tensor.element_size()


def region_of(tensor: Tensor) -> Region | None:
    if not is_plain(tensor):
        return region_of(stored(tensor)[0])
    try:
        storage = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a subclass without a storage of its own
        return None
    return storage, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def distinct(tensors: Iterable[Tensor]) -> list[tuple[Region | None, Tensor]]:
    found: dict[Any, tuple[Region | None, Tensor]] = {}
    for tensor in tensors:
        region = region_of(tensor)
        found.setdefault(region if region is not None else id(tensor), (region, tensor))
    return list(found.values())


def read_bytes(inputs: list[tuple[Region | None, Tensor]], reads: Reads, written: int) -> list[int]:
    """What must be read of each distinct input."""
    sizes = [tensor_bytes(tensor) for _, tensor in inputs]
    if reads == "nothing":
        return [0] * len(sizes)
    if reads == "not self" and sizes:
        return [0, *sizes[1:]]
    if reads == "gathered" and sizes:
        return [min(sizes[0], written), *sizes[1:]]
    if reads == "rows" and len(inputs) > 1:
        table, places = inputs[0][1], inputs[1][1]
        return [min(sizes[0], places.numel() * math.prod(table.shape[1:]) * table.element_size()), *sizes[1:]]
    return sizes


def placed_bytes(name: str, inputs: list[tuple[Region | None, Tensor]]) -> tuple[int, int] | None:
    """What is read and written of the first input, of which only some places change; None for any other operator."""
    if name not in _PLACES or len(inputs) < 3:
        return None
    (_, target), (_, places), *_, (_, source) = inputs
    if source.dtype != target.dtype or source.numel() < 2:  # one value for many places: how many is not told
        return None
    size = tensor_bytes(source)
    if name.startswith("scatter"):
        size = min(size, places.numel() * target.element_size())
    return (size if name in _ADDS else 0), size


class Touched:
    """How much of each weight, buffer and input of the model some operator looks at."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._held: list[Tensor] = []  # kept alive, so that no later tensor takes the place of one of them
        self._sizes: dict[int, int] = {}
        self._parts: dict[int, dict[Region, int]] = {}
        self.hold(leaves)

    def hold(self, leaves: Iterable[Tensor]) -> None:
        """Count these among what belongs to the model."""
        found = list(leaves)
        self._held += found
        for leaf in found:
            region = region_of(leaf)
            if region is not None:
                size = leaf.untyped_storage().nbytes() if is_plain(leaf) else tensor_bytes(leaf)
                self._sizes[region[0]] = max(self._sizes.get(region[0], 0), size)

    def look(self, region: Region | None, size: int) -> None:
        if region is not None and region[0] in self._sizes and size:
            parts = self._parts.setdefault(region[0], {})
            parts[region] = max(parts.get(region, 0), size)

    def owns(self, tensor: Tensor) -> bool:
        region = region_of(tensor)
        return region is not None and region[0] in self._sizes

    def bytes(self) -> int:
        return sum(min(self._sizes[storage], sum(parts.values())) for storage, parts in self._parts.items())
