"""An operator's name and tags tell what it does: kind of work and of layer, FLOPs from the shapes of what it gets and
gives, and the bytes that it must move.

A multiplication with its addition is two FLOPs. Where torch's own counter is wrong or silent (grouped convolution
backward, recurrent layers, causal attention, int8 and grouped products, matrix times vector), the formula here is right.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from redline.bench.workload.structure import is_plain, stored
from redline.model.work import PRODUCTS, LayerKind, OperatorKind, attention_flops, convolution_flops

Arguments = dict[str, Any]
"""These are the operator's arguments by the names of its schema."""
Formula = Callable[[Arguments, Any], int]
"""A formula returns the FLOPs of a call from its arguments and its result."""

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
"""In these layouts a tensor stores only some entries, and only stored entries are multiplied."""
LEFT_SIDES = ("mat1", "batch1", "mat", "sparse", "input", "self")
"""Operators give the left side of their product one of these names. The first that a call has counts: `self` of `addmm` is only added."""


def matrix_product(arguments: Arguments, out: Tensor) -> int:
    """Returns 2·M·N·K, whatever the batch dimensions are, because every element of the output sums K products.

    Every entry of a sparse matrix meets one row, or one column, of the other.
    """
    left, right = next(arguments[name] for name in LEFT_SIDES if name in arguments), arguments.get("mat2")
    if left.layout in SPARSE:
        return 2 * stored(left)[0].numel() * int(out.shape[-1] if out.ndim > 1 else 1)
    if right is not None and right.layout in SPARSE:
        return 2 * stored(right)[0].numel() * int(out.shape[-2])
    return 2 * out.numel() * int(left.shape[-1])


def grouped_product(arguments: Arguments, out: Tensor) -> int:
    """Returns the FLOPs where every row belongs to one group. Two flat matrices divide their inner dimension among the groups instead."""
    is_flat = arguments["self"].ndim == arguments["mat2"].ndim == 2
    return matrix_product(arguments, out) // (int(out.shape[0]) if is_flat else 1)


def convolution(arguments: Arguments, out: Tensor) -> int:
    """Returns the FLOPs of a convolution, transposed or not.

    Libraries have operators of their own for transposed convolutions. Only these pad at the output, which is how they are recognised.
    """
    is_transposed = arguments.get("transposed", "output_padding" in arguments)
    positions = arguments["input" if "input" in arguments else "self"] if is_transposed else out
    return convolution_flops(int(positions.numel()), arguments["weight"].shape)


def convolution_backward(arguments: Arguments, out: Tensor) -> int:
    """Returns the FLOPs of the gradients that are wanted: each of input and weight takes as many products as the forward pass."""
    positions = arguments["input"] if arguments["transposed"] else arguments["grad_output"]
    return sum(map(int, arguments["output_mask"][:2])) * convolution_flops(
        int(positions.numel()), arguments["weight"].shape
    )


def packed_product(arguments: Arguments, out: Tensor) -> int:
    """Returns the FLOPs of a quantized linear layer or convolution, whose weight is the first of the tensors that were packed."""
    weight = next(value for value in arguments.values() if isinstance(value, list) and isinstance(value[0], Tensor))[0]
    return convolution_flops(int(out.numel()), weight.shape)


def recurrent(arguments: Arguments, out: Any, *, backward: bool = False) -> int:
    """Returns the FLOPs of recurrent layers: every weight matrix meets every step of every sequence once, and twice in the backward pass.

    The first layer's input is often data, which needs no gradient. Its matrices then meet the steps only once in the backward pass.
    """
    data = arguments["input"]
    if "weight" in arguments:  # cuDNN does all layers in one operator, and both directions of each
        weights, step = arguments["weight"], arguments.get("weight_stride0", 1)
        first = weights[: step * (1 + arguments.get("bidirectional", False)) : step]
    else:  # oneDNN does one layer, whose matrices have other names in the backward pass
        weights = [arguments[name] for name in (("weight1", "weight2") if backward else ("weight0", "weight1"))]
        first = weights[:1]
    matrices = sum(int(weight.numel()) for weight in weights if weight.ndim == 2)
    if backward:
        matrices = 2 * matrices - (0 if arguments["wants_input"] else sum(int(weight.numel()) for weight in first))
    return 2 * data.numel() // data.shape[-1] * matrices


def attention(arguments: Arguments, out: Tensor, *, heads_first: bool, backward: bool) -> int:
    """Returns the FLOPs of attention. A causal mask leaves out what it hides, which is about half."""
    query, key, value = (arguments[name].shape for name in ("query", "key", "value"))
    causal = bool(arguments.get("is_causal") or arguments.get("custom_mask_type"))
    return attention_flops(query, key, value, heads_first=heads_first, causal=causal, backward=backward)


def trilinear(arguments: Arguments, out: Tensor) -> int:
    """Returns three FLOPs per combination: two multiplications and an addition. Expanded dimensions count once."""
    shapes: list[list[int]] = []
    for number in "123":
        shape = list(arguments[f"i{number}"].shape)
        for dimension in sorted(arguments[f"expand{number}"]):
            shape.insert(dimension, 1)
        shapes.append(shape)
    return 3 * math.prod(map(max, *shapes))


def per_element(flops: int, *, of_input: bool = False) -> Formula:
    """Returns a formula with this many FLOPs for each element of the largest tensor among the results, or among the inputs."""

    def formula(arguments: Arguments, out: Any) -> int:
        counted = tuple(arguments.values()) if of_input else out
        return flops * max((int(tensor.numel()) for tensor in tensors_in(counted)), default=0)

    return formula


def no_flops(arguments: Arguments, out: Any) -> int:
    """Returns 0: the operator only moves data, which its bytes tell."""
    return 0


_PRODUCTS: list[tuple[str, OperatorKind, Formula]] = [
    ("mm bmm mv addmm baddbmm addmv dot vdot linear mkldnn_linear _addmm_activation _sparse_mm _sparse_addmm _int_mm _scaled_mm "
     "_scaled_mm_v2 _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros",
     "matmul", matrix_product),
    ("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2", "matmul", grouped_product),
    # Many matrix products are added up into one output.
    ("addbmm", "matmul", lambda given, out: 2 * int(given["batch1"].numel()) * int(out.shape[-1])),
    ("convolution _convolution cudnn_convolution mkldnn_convolution miopen_convolution miopen_depthwise_convolution "
     "_slow_conv2d_forward slow_conv3d_forward _conv_depthwise2d conv_depthwise3d cudnn_convolution_relu cudnn_convolution_add_relu "
     "miopen_convolution_relu miopen_convolution_add_relu slow_conv_dilated2d slow_conv_dilated3d cudnn_convolution_transpose "
     "miopen_convolution_transpose slow_conv_transpose2d slow_conv_transpose3d torchvision::deform_conv2d",
     "convolution", convolution),
    ("convolution_backward", "convolution", convolution_backward),
    # One product is for the columns that were sampled, from which input, offsets and mask follow, and one for the weight.
    ("torchvision::_deform_conv2d_backward", "convolution",
     lambda given, out: 2 * convolution_flops(int(given["grad"].numel()), given["weight"].shape)),
    ("_cudnn_rnn miopen_rnn mkldnn_rnn_layer", "matmul", recurrent),
    ("_cudnn_rnn_backward miopen_rnn_backward mkldnn_rnn_layer_backward", "matmul", partial(recurrent, backward=True)),
    ("_trilinear", "matmul", trilinear),
    ("_cdist_forward", "other", lambda given, out: 3 * out.numel() * int(given["x1"].shape[-1])),
    # It is one product, in which two columns beside the data carry the squared lengths of the vectors of either side.
    ("_euclidean_dist", "matmul", lambda given, out: 2 * out.numel() * (int(given["x1"].shape[-1]) + 2)),
    *((f"_{name}_attention_{way}", "attention", partial(attention, heads_first=False, backward=way == "backward"))
      for name in ("flash", "efficient") for way in ("forward", "backward")),
    *((f"_scaled_dot_product_{name}{way}", "attention", partial(attention, heads_first=True, backward=bool(way)))
      for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu",
                   "fused_attention_overrideable") for way in ("", "_backward")),
]  # fmt: skip
FORMULAS = {name: (kind, formula) for names, kind, formula in _PRODUCTS for name in names.split()}
"""These are the formulas of products by the operator's name, without its overload. Names of aten have no namespace."""

Reads = Literal["all", "gathered", "rows", "not self", "nothing", "places", "adds"]
"""This says which inputs an operator must read. `gathered` reads as much of the first as it returns, `rows` a row of the first for
each entry of the second, and `not self` all but the first. With `places` it writes some places of a first input that stays where
it is, and with `adds` it reads these places too."""

NORM_FLOPS = SOFTMAX_FLOPS = 5
"""A norm or a softmax takes these FLOPs per element. A norm has mean, variance, subtraction, scale and shift; a softmax has maximum,
subtraction, exponential, sum and division."""

_GROUPS: dict[Reads | Literal["free"], str] = {
    # These move nothing: they are views by another name, memory that is only set aside, and questions.
    "free": "_unsafe_view _reshape_alias as_strided_ alias detach detach_ lift_fresh unsafe_split unsafe_chunk unsafe_split_with_sizes set_ "
    "resize_ resize_as_ _local_scalar_dense item is_same_size sym_size sym_stride sym_numel sym_storage_offset empty empty_like "
    "new_empty new_empty_strided empty_strided empty_permuted _cudnn_init_dropout_state _fused_sdp_choice _assert_async "
    "_assert_scalar _use_cudnn_rnn_flatten_weight equal requires_grad_ _version record_stream t_ transpose_ unsqueeze_ squeeze_ lift "
    "_assert_tensor_metadata _functional_assert_async sym_constrain_range sym_constrain_range_for_size dense_dim sparse_dim "
    "is_coalesced resize _print _linalg_check_errors is_pinned _has_symbolic",
    "nothing": "zeros ones full arange linspace eye zeros_like ones_like full_like fill_ new_zeros new_ones new_full scalar_tensor "
    "zero_ zero fill rand randn randint randperm rand_like randn_like normal_ uniform_ random_ bernoulli_ tril_indices "
    "triu_indices exponential_ efficientzerotensor",
    "not self": "copy_",
    "gathered": "embedding index _unsafe_index index_select gather take embedding_renorm_ masked_select grid_sampler_2d "
    "grid_sampler_3d multinomial",
    "rows": "_embedding_bag _embedding_bag_forward_only",  # they give out sums of the rows that they read
    "places": "index_copy_ index_put_ _index_put_impl_ scatter_",
    "adds": "index_add_ scatter_add_ scatter_reduce_",
}
"""These operators compute nothing. They are grouped by what they must read."""
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names.split()}

_BY_NAME: list[tuple[str, OperatorKind, Formula | None]] = [
    (r"(batch|layer|group|instance|rms)_?norm", "norm", per_element(NORM_FLOPS, of_input=True)),
    (r"softmax", "reduction", per_element(SOFTMAX_FLOPS, of_input=True)),
    (
        r"^(clone|_to_copy|to|cat|stack|contiguous|copy|roll|flip|repeat|repeat_interleave|tile|constant_pad_nd|"
        r"\w*_pad\dd|\w*_pad\dd_backward|\w+_scatter|\w+_backward_data_copy|select_backward|slice_backward|diagonal_backward|"
        r"unfold_backward|as_strided_scatter|\w+_copy|im2col|col2im|pixel_(un)?shuffle|channel_shuffle|tril|triu|diag_embed|"
        r"_unsafe_index_put|index_put|_index_put_impl|index_add|index_copy|index_fill|scatter\w*|masked_scatter|"
        r"embedding_dense_backward|embedding_backward|one_hot|nonzero|_pack_padded_sequence|_pad_packed_sequence|"
        r"_cudnn_rnn_flatten_weight|_pin_memory|_nested_\w+|_transform_bias\w*|upsample_nearest\w*|_foreach_copy|"
        r"split_with_sizes_copy|meshgrid|cartesian_prod|rot90|unsqueeze_copy|rename|_reshape_copy|_conj_physical|resolve_\w+)$", "copy", no_flops
    ),
    (
        r"^_?(foreach_)?(sum|nansum|mean|nanmean|amax|amin|aminmax|max|min|prod|var|std|var_mean|std_mean|logsumexp|cumsum|"
        r"cumprod|logcumsumexp|cummax|cummin|argmax|argmin|topk|sort|argsort|kthvalue|median|mode|any|all|norm|"
        r"linalg_vector_norm|count_nonzero|histc|bincount|trace|segment_reduce|unique\w*|searchsorted|bucketize)(_helper)?$|"
        r"pool|_loss|weight_norm_interface|^nanmedian$|^dist$|_amp_foreach_non_finite", "reduction", per_element(1, of_input=True)
    ),
    # The backward of an activation touches each element once. The backward of the operators here does more, so it stays uncounted.
    (r"(conv|mm|rnn|lstm_cell|attention|linalg|dist|fft|embedding_bag)\w*_backward$", "other", None),
    (
        r"^_?foreach_|dropout|^_fused_|_thnn_fused|upsample_(bi|tri)?(linear|cubic)|^_upsample|^where$|masked_fill|clamp|"
        r"_backward$|^(hard(swish|tanh|sigmoid|shrink)|leaky_relu|elu|selu|mish|silu|gelu|softplus|softshrink|log_sigmoid\w*|"
        r"relu6?|threshold|_add_relu|abs|eq|ne|ge|gt|le|lt|rsub|addr|xlogy|copysign|gcd|lcm|heaviside|_masked_scale|renorm|"
        r"bernoulli|normal\w*|uniform|cauchy|exponential|geometric|log_normal|poisson|randint_like|affine_grid_generator|"
        r"binary_cross_entropy\w*|_philox_\w+|glu|prelu|_prelu_kernel|celu|rrelu\w*|polar|complex|view_as_complex_copy|lerp|addc(mul|div)|"
        r"quantize\w*|dequantize\w*|_amp_\w+|fake_quantize\w*|logical_\w+|nan_to_num|isin|cross|linalg_cross|floor_divide)$", "elementwise", per_element(1)
    ),
]  # fmt: skip
"""Cheap operators are known by their names, without a trailing underscore. The first pattern that is found decides."""
_PACKED_PRODUCT = re.compile(r"^(linear|conv[123]d)(_add)?(_relu|_leaky_relu|_tanh)?(_dynamic)?(_fp16)?$")
"""Operators of torch's `quantized` namespace with these names are products whose weight is packed."""

LAYERS: list[tuple[str, LayerKind, OperatorKind]] = [
    (r"linear$", "linear", "matmul"),
    (r"scaled_dot_product_attention$", "attention", "attention"),
    (r"_?conv(olution|_transpose)?\dd$|_?convolution$", "convolution", "convolution"),
    (r"batch_norm$", "batch-norm", "norm"),
    (r"(layer|group|instance|rms)_norm$", "norm", "norm"),
    (r"(lstm|gru|rnn_tanh|rnn_relu)(_cell)?$", "recurrent", "matmul"),
    (r"embedding(_bag)?$", "embedding", "copy"),
    (r"max_pool2d(_with_indices)?$", "max-pooling", "reduction"),
]
"""Layers of a kind are known by these operators; each is timed as a whole."""


@dataclass(frozen=True)
class Known:
    """This holds what is known about an operator whatever its arguments are."""

    name: str
    kind: OperatorKind | None
    """The operator does this kind of work. If it is None, it moves and computes nothing."""
    formula: Formula | None = None
    """This returns its FLOPs. If it is None, nobody knows how many it has."""
    reads: Reads = "all"
    layer: LayerKind | None = None
    """It is a layer of this kind by itself. It is None if the operator is only a part of one."""
    takes_packed: bool = False
    """True if its weight is packed into an object of torch's own."""


@lru_cache(maxsize=10_000)
def known(operator: Any) -> Known:
    """Returns what is known about an operator, as a dispatch mode is handed it."""
    if not isinstance(operator, torch._ops.OpOverload):
        return Known(str(operator), "other")
    namespace, _, plain = operator._schema.name.partition("::")
    name = plain if namespace == "aten" else f"{namespace}::{plain}"
    pointwise = torch.Tag.pointwise in operator.tags
    if namespace in ("prim", "profiler") or operator.is_view or _GROUP_OF.get(name) == "free":
        return Known(name, None)
    if product := FORMULAS.get(name) or FORMULAS.get(name.removesuffix("_")):
        return replace(_layer(name), kind=product[0], formula=product[1])
    if namespace == "quantized" and _PACKED_PRODUCT.match(plain):
        kind: OperatorKind = "matmul" if plain.startswith("linear") else "convolution"
        return Known(name, kind, packed_product, takes_packed=True)
    if namespace != "aten":  # it is somebody's own, so its name proves nothing
        return Known(name, "elementwise", per_element(1)) if pointwise else Known(name, "other")
    cheap, layer = _cheap(plain, pointwise), _layer(plain)
    return replace(cheap, kind=layer.kind or cheap.kind, layer=layer.layer)


def _layer(name: str) -> Known:
    found = next((rule for rule in LAYERS if re.fullmatch(rule[0], name)), (None, None, None))
    return Known(name, found[2], layer=found[1])


def _cheap(name: str, pointwise: bool) -> Known:
    if (group := _GROUP_OF.get(name)) is not None and group != "free":
        return Known(name, "copy", no_flops, reads=group)
    for pattern, kind, formula in _BY_NAME:
        if pointwise and kind == "other":
            break
        if re.search(pattern, name.rstrip("_") or name):
            return Known(name, kind, formula)
    return Known(name, "elementwise", per_element(1)) if pointwise else Known(name, "other")


def is_composite(operator: Any, about: Known) -> bool:
    """Returns whether an operator is made of others and is no product. Under inference mode it arrives whole and must be taken apart."""
    if about.formula is not None and about.kind in PRODUCTS:
        return False
    has: Callable[..., bool] | None = getattr(operator, "has_kernel_for_dispatch_key", None)
    return has is not None and has(torch._C.DispatchKey.CompositeImplicitAutograd)


Region = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""A region is the part of a storage that a tensor shows: storage, offset, shape and strides."""
Placed = dict[Any, Tensor]
"""This holds each tensor once, by its region. A tensor without a storage of its own stands under its identity."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors among an operator's arguments or results, which are tensors or lists of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def tensor_bytes(tensor: Tensor) -> int:
    """Returns the bytes that a tensor occupies. An expanded dimension repeats the same bytes, so it counts once."""
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
    """Returns the region of a tensor, or None if it has no storage of its own."""
    if not is_plain(tensor):
        return region_of(stored(tensor)[0])
    try:
        storage = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # this is a subclass without a storage of its own
        return None
    return storage, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def distinct(tensors: Iterable[Tensor]) -> Placed:
    """Returns each region once, because an operator that is given the same tensor twice reads it once."""
    found: Placed = {}
    for tensor in tensors:
        found.setdefault(region_of(tensor) or id(tensor), tensor)
    return found


def moved_bytes(about: Known, inputs: Sequence[Tensor], written: int) -> tuple[list[int], int]:
    """Returns the bytes that must be read of each distinct input, and those that are written. `written` is the size of the outputs."""
    sizes = list(map(tensor_bytes, inputs))
    if not sizes or about.reads == "nothing":
        return [0] * len(sizes), written
    first, last, several = inputs[0], inputs[-1], len(inputs) > 1
    row = first.element_size()
    if about.reads == "not self":
        sizes[0] = 0
    elif about.reads == "gathered":
        sizes[0] = min(sizes[0], written)
    elif about.reads == "rows" and several:
        sizes[0] = min(sizes[0], inputs[1].numel() * math.prod(first.shape[1:]) * row)
    elif about.reads in ("places", "adds") and len(inputs) > 2 and last.dtype == first.dtype and last.numel() > 1:
        # One value for many places does not say how many there are.
        written = min(sizes[-1], inputs[1].numel() * row) if about.name.startswith("scatter") else sizes[-1]
        sizes[0] = written if about.reads == "adds" else 0
    return sizes, written


Moved = Callable[[Known, Sequence[Tensor], int], tuple[list[int], int]]
"""Such a function tells, as `moved_bytes` does, which bytes an operator reads and writes."""


class Touched:
    """This knows how much of each weight, buffer and input of the model the operators read."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._held: list[Tensor] = []  # these are kept alive, so that no later tensor takes the place of one
        self._sizes: dict[int, int] = {}
        self._parts: dict[Region, int] = {}
        self.hold(leaves)

    def hold(self, leaves: Iterable[Tensor]) -> None:
        """Counts these tensors among those that belong to the model."""
        for leaf in leaves:
            self._held.append(leaf)
            if (region := region_of(leaf)) is not None:
                size = leaf.untyped_storage().nbytes() if is_plain(leaf) else tensor_bytes(leaf)
                self._sizes[region[0]] = max(self._sizes.get(region[0], 0), size)

    def look(self, region: Any, size: int) -> None:
        """Notes that an operator read this many bytes of a region. If several read it, the largest read counts."""
        if self.owns(region):
            self._parts[region] = max(self._parts.get(region, 0), size)

    def owns(self, region: Any) -> bool:
        return isinstance(region, tuple) and region[0] in self._sizes

    def bytes(self) -> int:
        """Returns the bytes that were read of all storages. Of none can it be more than the storage holds."""
        sums = Counter[int]()
        for region, size in self._parts.items():
            sums[region[0]] += size
        return sum(min(self._sizes[storage], size) for storage, size in sums.items())
