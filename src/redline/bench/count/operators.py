"""An operator's name and tags tell what it does: kind of work and of layer, FLOPs from the shapes of what it gets and
gives, and the bytes that it must move.

A multiplication with its addition is two FLOPs. Where torch's own counter is wrong or silent (grouped convolution
backward, recurrent layers, causal attention, int8 and grouped products, matrix times vector), the formula here is right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from redline.bench.workload.structure import is_plain, stored
from redline.model.work import LayerKind, OperatorKind, attention_flops, convolution_flops

Arguments = dict[str, Any]
"""These are the operator's arguments by the names of its schema."""
Formula = Callable[[Arguments, Any], int]


SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def matrix_product(first: str) -> Formula:
    """2·M·N·K, whatever the batch dimensions: every element of the output sums K products.

    Every entry of a sparse matrix meets one row, or one column, of the other.
    """

    def flops(arguments: Arguments, out: Any) -> int:
        left, right = arguments[first], arguments.get("mat2")
        if left.layout in SPARSE:
            return 2 * stored(left)[0].numel() * int(out.shape[-1] if out.ndim > 1 else 1)
        if right is not None and right.layout in SPARSE:
            return 2 * stored(right)[0].numel() * int(out.shape[-2])
        return 2 * out.numel() * int(left.shape[-1])

    return flops


def grouped_product(arguments: Arguments, out: Any) -> int:
    """Every row belongs to one group. Two flat matrices share out their inner dimension instead."""
    first, second = arguments["self"], arguments["mat2"]
    groups = int(out.shape[0]) if first.ndim == 2 and second.ndim == 2 else 1
    return 2 * out.numel() * int(first.shape[-1]) // groups


def convolution(arguments: Arguments, out: Any) -> int:
    positions = _data(arguments) if arguments.get("transposed") else out
    return convolution_flops(int(positions.numel()), arguments["weight"].shape)


def _data(arguments: Arguments) -> Any:
    return arguments["input"] if "input" in arguments else arguments["self"]


def convolution_backward(arguments: Arguments, out: Any) -> int:
    """The gradients of the input and of the weight each take as many products as the forward pass, groups or not."""
    positions = arguments["input"] if arguments["transposed"] else arguments["grad_output"]
    wanted = sum(bool(one) for one in arguments["output_mask"][:2])
    return wanted * convolution_flops(int(positions.numel()), arguments["weight"].shape)


def packed_product(arguments: Arguments, out: Any) -> int:
    """A quantized linear layer or convolution, whose weight is the first of what it was packed with."""
    weight = next(value for value in arguments.values() if isinstance(value, list) and isinstance(value[0], Tensor))[0]
    return convolution_flops(int(out.numel()), weight.shape)


def recurrent(*names: str, backward: bool = False) -> Formula:
    """Every weight matrix meets every step of every sequence once, and backward twice. `names` are those of the weights."""

    def flops(arguments: Arguments, out: Any) -> int:
        data, weights = arguments["input"], [arguments[name] for name in names] if names else arguments["weight"]
        tokens = data.numel() // data.shape[-1]
        matrices = sum(int(weight.numel()) for weight in weights if weight.ndim == 2)
        return (4 if backward else 2) * tokens * matrices

    return flops


def attention(*, heads_first: bool, backward: bool) -> Formula:
    def flops(arguments: Arguments, out: Any) -> int:
        query, key, value = (arguments[name].shape for name in ("query", "key", "value"))
        causal = bool(arguments.get("is_causal") or arguments.get("custom_mask_type"))
        return attention_flops(query, key, value, heads_first=heads_first, causal=causal, backward=backward)

    return flops


def fourier(arguments: Arguments, out: Any) -> int:
    """5·N·log₂N of the usual algorithm; half of it if one side is real."""
    data = arguments["self"]
    whole = out if out.numel() > data.numel() else data
    length = math.prod(int(whole.shape[dimension]) for dimension in arguments["dim"])
    flops = 5 * whole.numel() * math.log2(max(length, 2))
    return int(flops if data.is_complex() and out.is_complex() else flops / 2)


def trilinear(arguments: Arguments, out: Any) -> int:
    """Each combination takes two multiplications and an addition; expanded dimensions count once."""
    shapes: list[list[int]] = []
    for name in ("i1", "i2", "i3"):
        shape = list(arguments[name].shape)
        for dimension in sorted(arguments[f"expand{name[1]}"]):
            shape.insert(dimension, 1)
        shapes.append(shape)
    return 3 * math.prod(map(max, *shapes))


FORMULAS: dict[str, tuple[OperatorKind, Formula]] = {
    **dict.fromkeys((
        "mm", "bmm", "mv", "_int_mm", "_scaled_mm", "_scaled_mm_v2", "_weight_int8pack_mm", "_weight_int4pack_mm",
        "_weight_int4pack_mm_for_cpu", "_weight_int4pack_mm_with_scales_and_zeros", "_sparse_mm",
    ), ("matmul", matrix_product("self"))),
    **dict.fromkeys(("addmm", "_addmm_activation", "_sparse_addmm"), ("matmul", matrix_product("mat1"))),
    "baddbmm": ("matmul", matrix_product("batch1")),
    # Many matrix products are added up into one output.
    "addbmm": ("matmul", lambda given, out: 2 * int(given["batch1"].numel()) * int(out.shape[-1])),
    "addmv": ("matmul", matrix_product("mat")),
    **dict.fromkeys(("linear", "mkldnn_linear"), ("matmul", lambda given, out: 2 * out.numel() * int(given["weight"].shape[-1]))),
    **dict.fromkeys(("dot", "vdot"), ("matmul", lambda given, out: 2 * int(given["self"].numel()))),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), ("matmul", grouped_product)),
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "miopen_convolution", "miopen_depthwise_convolution", "_slow_conv2d_forward", "slow_conv3d_forward", "_conv_depthwise2d", "conv_depthwise3d", "cudnn_convolution_relu", "cudnn_convolution_add_relu", "miopen_convolution_relu", "miopen_convolution_add_relu", "slow_conv_dilated2d", "slow_conv_dilated3d"), ("convolution", convolution)),
    **dict.fromkeys(("cudnn_convolution_transpose", "miopen_convolution_transpose", "slow_conv_transpose2d", "slow_conv_transpose3d"), ("convolution", lambda given, out: convolution_flops(int(_data(given).numel()), given["weight"].shape))),
    "convolution_backward": ("convolution", convolution_backward),
    "torchvision::deform_conv2d": ("convolution", convolution),
    # One product is for the columns that were sampled, from which input, offsets and mask follow, and one for the weight.
    "torchvision::_deform_conv2d_backward": (
        "convolution", lambda given, out: 2 * convolution_flops(int(given["grad"].numel()), given["weight"].shape),
    ),
    **dict.fromkeys(("_cudnn_rnn", "miopen_rnn"), ("matmul", recurrent())),
    **dict.fromkeys(("_cudnn_rnn_backward", "miopen_rnn_backward"), ("matmul", recurrent(backward=True))),
    "mkldnn_rnn_layer": ("matmul", recurrent("weight0", "weight1")),
    "mkldnn_rnn_layer_backward": ("matmul", recurrent("weight1", "weight2", backward=True)),
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
    "_cdist_forward": ("other", lambda given, out: 3 * out.numel() * int(given["x1"].shape[-1])),
    # One product: two columns beside the data carry the squared lengths of the vectors of either side.
    "_euclidean_dist": ("matmul", lambda given, out: 2 * out.numel() * (int(given["x1"].shape[-1]) + 2)),
}  # fmt: skip
"""The keys are names of operators without their overload; those of aten have no namespace."""


Reads = Literal["all", "gathered", "rows", "not self", "nothing", "places", "adds"]
"""The inputs that an operator must read: all; as much of the first as it returns; a row of the first for each entry of the
second; all but the first; none. With `places` it writes some places of a first input that stays where it is, and with `adds` it
reads these places too."""

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
_PLACES = frozenset(("index_copy_", "index_put_", "_index_put_impl_", "scatter_"))
_ADDS = frozenset(("index_add_", "scatter_add_", "scatter_reduce_"))
_COPIES: dict[Reads, frozenset[str]] = {
    "nothing": _FILL, "not self": frozenset({"copy_"}), "gathered": _GATHER, "rows": _BAGS, "places": _PLACES, "adds": _ADDS,
}  # fmt: skip
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
    """True if elements of the largest input count, not those of the output."""
    reads: Reads = "all"
    counted: bool = True
    takes_packed: bool = False
    """True if its weight comes in an object of torch's own."""


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
    for reads, names in _COPIES.items():
        if name in names:
            return Known(name, "copy", reads=reads)
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
    """Returns an operator's name, the kind of layer it makes up by itself, and what it does; None: it does no work."""
    about = known(func)
    if isinstance(func, torch._ops.OpOverload) and func.namespace == "aten":
        for layer, pattern, kind in LAYERS:
            if pattern.fullmatch(about.name):
                return about.name, layer, kind
    return about.name, None, about.kind


Region = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""A region is the part of a storage that a tensor shows: storage, offset, shape and strides."""
Placed = tuple[Region | None, Tensor]


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


def distinct(tensors: Iterable[Tensor]) -> list[Placed]:
    found: dict[Any, Placed] = {}
    for tensor in tensors:
        region = region_of(tensor)
        found.setdefault(region if region is not None else id(tensor), (region, tensor))
    return list(found.values())


def moved_bytes(about: Known, inputs: Sequence[Placed], written: int) -> tuple[list[int], int]:
    """Returns the bytes that must be read of each distinct input, and those that are written. `written` is the size of the outputs."""
    sizes = [tensor_bytes(tensor) for _, tensor in inputs]
    if not sizes or about.reads == "nothing":
        return [0] * len(sizes), written
    first, last = inputs[0][1], inputs[-1][1]
    if about.reads == "not self":
        sizes[0] = 0
    elif about.reads == "gathered":
        sizes[0] = min(sizes[0], written)
    elif about.reads == "rows" and len(inputs) > 1:
        sizes[0] = min(sizes[0], inputs[1][1].numel() * math.prod(first.shape[1:]) * first.element_size())
    elif about.reads in ("places", "adds") and len(inputs) > 2 and last.dtype == first.dtype and last.numel() > 1:
        # One value for many places does not say how many there are.
        is_scatter = about.name.startswith("scatter")
        written = min(sizes[-1], inputs[1][1].numel() * first.element_size()) if is_scatter else sizes[-1]
        sizes[0] = written if about.reads == "adds" else 0
    return sizes, written


class Touched:
    """This knows how much of each weight, buffer and input of the model the operators read."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._held: list[Tensor] = []  # kept alive, so that no later tensor takes the place of one of them
        self._sizes: dict[int, int] = {}
        self._parts: dict[int, dict[Region, int]] = {}
        self.hold(leaves)

    def hold(self, leaves: Iterable[Tensor]) -> None:
        """Count these among what belongs to the model."""
        for leaf in leaves:
            self._held.append(leaf)
            if (region := region_of(leaf)) is not None:
                size = leaf.untyped_storage().nbytes() if is_plain(leaf) else tensor_bytes(leaf)
                self._sizes[region[0]] = max(self._sizes.get(region[0], 0), size)

    def look(self, region: Region | None, size: int) -> None:
        if region is not None and self.owns(region) and size:
            parts = self._parts.setdefault(region[0], {})
            parts[region] = max(parts.get(region, 0), size)

    def owns(self, region: Region | None) -> bool:
        return region is not None and region[0] in self._sizes

    def bytes(self) -> int:
        return sum(min(self._sizes[storage], sum(parts.values())) for storage, parts in self._parts.items())
