"""Triton kernels for the step that decodes one token: products of a few rows, and attention of one query.

Both only read: weights, or keys and values. What keeps them from the bandwidth of memory are the gaps between kernels, so
a product begins to read its weights before the kernel in front of it has ended. Asking for the first weights of the products
behind it did not pay: on an H200 four layers of a llama took 278 µs a token, and 297 µs with 8 MiB asked for. Nothing here knows
of Redline; snippets contain it unchanged.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

MOST_ROWS = 4
"""Sequences at most: with more of them, products on tensor cores read weights as fast."""
MOST_COUNTERS = 2**16
SPLIT = 64
"""Positions that one program of the attention reads."""


@triton.jit
def rows_kernel(
    x, weight, bias, out, count, rows, K: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum over k of x[m, k] * weight[n, k], for one m and BLOCK_N rows of the weight.

    Programs beside each other read the same rows for all m, so that memory delivers them once. The first part of the
    weight is read before the kernel in front has ended, for no kernel writes weights.
    """
    program = tl.program_id(0)
    row, column = program // count * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)[None, :]
    inside = (row < rows)[:, None]
    at = weight + row.to(tl.int64)[:, None] * K + column
    part = tl.load(at, mask=inside & (column < K), other=0.0, eviction_policy="evict_first")
    if EARLY:
        tl.extra.cuda.gdc_wait()
        # Only now: a kernel behind may read, without waiting, what the one in front of this has written.
        tl.extra.cuda.gdc_launch_dependents()
    x += program % count * K
    sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(BLOCK_K, K, BLOCK_K):
        next_part = tl.load(at + start, mask=inside & (column + start < K), other=0.0, eviction_policy="evict_first")
        given = tl.load(x + (start - BLOCK_K) + column)
        sums += part.to(tl.float32) * given.to(tl.float32)
        part = next_part
    LAST: tl.constexpr = (K - 1) // BLOCK_K * BLOCK_K
    given = tl.load(x + LAST + column, mask=column + LAST < K, other=0.0)
    sums += part.to(tl.float32) * given.to(tl.float32)
    total = tl.sum(sums, axis=1)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + program % count * rows + row, total.to(out.dtype.element_ty), mask=row < rows)


BLOCKS = [(1, 2), (2, 2), (4, 2), (8, 2), (2, 4), (4, 4), (8, 4), (2, 8), (4, 8)]
"""These are rows of the weight per program, and warps. All are tried for each shape at its first call. All threads of a program stand side by
side in a row, 16 bytes each, so that every thread reads the same part of x for all its rows."""

tuned_rows_kernel = triton.autotune(
    configs=[triton.Config({"BLOCK_N": rows, "BLOCK_K": 256 * warps}, num_warps=warps) for rows, warps in BLOCKS],
    key=["rows", "K", "count"],
    do_bench=lambda call, quantiles: triton.testing.do_bench(call, warmup=5, rep=25, quantiles=quantiles),
)(rows_kernel)


@triton.jit
def attend_kernel(
    query, keys, values, mask, partial, statistics, counters, out, length, scale,
    query_batch, query_head, key_batch, key_head, key_position, value_batch, value_head, value_position,
    mask_batch, mask_head, out_head, heads, SHARED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_L: tl.constexpr, MASK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Computes the attention of one query over the positions of one split; the split that ends last joins those of its head.

    MASK: 0 none, 1 what may be seen, 2 what is added to the scores.
    """
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    split, column, end = tl.program_id(1), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    asked = tl.load(query + sequence * query_batch + head * query_head + column, mask=column < WIDTH, other=0.0)
    asked = asked.to(tl.float32) * scale
    keys += sequence * key_batch + head // SHARED * key_head
    values += sequence * value_batch + head // SHARED * value_head
    largest, weights = float("-inf"), 0.0
    found = tl.zeros([BLOCK_E], dtype=tl.float32)
    for step in range(STEPS):
        position = (split * STEPS + step) * BLOCK_L + tl.arange(0, BLOCK_L)
        inside = position < length
        at = keys + position[:, None] * key_position + column[None, :]
        key = tl.load(at, mask=inside[:, None] & (column[None, :] < WIDTH), other=0.0)
        at = values + position[:, None] * value_position + end[None, :]
        value = tl.load(at, mask=inside[:, None] & (end[None, :] < VALUE_WIDTH), other=0.0)
        score = tl.sum(key.to(tl.float32) * asked[None, :], axis=1)
        if MASK == 1:
            seen = tl.load(mask + sequence * mask_batch + head * mask_head + position, mask=inside, other=0)
            inside = inside & (seen != 0)
        if MASK == 2:
            score += tl.load(mask + sequence * mask_batch + head * mask_head + position, mask=inside, other=0.0).to(
                tl.float32
            )
        score = tl.where(inside, score, float("-inf"))
        highest = tl.maximum(largest, tl.max(score, axis=0))
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        share, kept = tl.exp(score - safe), tl.exp(largest - safe)
        weights = weights * kept + tl.sum(share, axis=0)
        found = found * kept + tl.sum(share[:, None] * value.to(tl.float32), axis=0)
        largest = highest
    if SPLITS == 1:
        at = out + tl.program_id(0) * out_head + end
        whole = found / tl.where(weights == 0.0, 1.0, weights)  # zero where the mask hides every position
        tl.store(at, whole.to(out.dtype.element_ty), mask=end < VALUE_WIDTH)
    else:
        slot = tl.program_id(0) * SPLITS + split
        tl.store(partial + slot * VALUE_WIDTH + end, found, mask=end < VALUE_WIDTH)
        tl.store(statistics + slot * 2, largest)
        tl.store(statistics + slot * 2 + 1, weights)
        tl.debug_barrier()  # all threads have written before one of them says so
        arrived = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            tl.store(counters + tl.program_id(0), 0)  # for the next call
            other = tl.arange(0, BLOCK_S)
            known, slots = other < SPLITS, tl.program_id(0) * SPLITS + other
            tops = tl.load(statistics + slots * 2, mask=known, other=float("-inf"), cache_modifier=".cg")
            sums = tl.load(statistics + slots * 2 + 1, mask=known, other=0.0, cache_modifier=".cg")
            parts = tl.load(
                partial + slots[:, None] * VALUE_WIDTH + end[None, :],
                mask=known[:, None] & (end[None, :] < VALUE_WIDTH),
                other=0.0,
                cache_modifier=".cg",
            )
            top = tl.max(tops, axis=0)
            shares = tl.exp(tops - tl.where(top == float("-inf"), 0.0, top))
            total = tl.sum(sums * shares, axis=0)
            joined = tl.sum(parts * shares[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
            target = out + tl.program_id(0) * out_head + end
            tl.store(target, joined.to(out.dtype.element_ty), mask=end < VALUE_WIDTH)


@functools.cache
def arrival_counters(device: torch.device) -> torch.Tensor:
    """Zeros, which every attention leaves as zeros: one per head and sequence."""
    return torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)


def starts_early(device: torch.device) -> bool:
    """True if a kernel may begin while the one in front of it ends: NVIDIA Hopper and later."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


@torch.library.custom_op(
    "decode_step::rows",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
)
def rows_product(x, weight, bias):
    """x @ weight.T + bias for a few rows."""
    if x.device.type != "cuda":
        return linear(x, weight, bias)
    (rows, width), given, early = weight.shape, x.reshape(-1, weight.shape[1]).contiguous(), starts_early(x.device)
    out = torch.empty((len(given), rows), dtype=x.dtype, device=x.device)
    settings = {"launch_pdl": True} if early else {}
    tuned_rows_kernel[lambda chosen: (len(given) * triton.cdiv(rows, chosen["BLOCK_N"]),)](
        given, weight, weight if bias is None else bias, out, len(given), rows, K=width, HAS_BIAS=bias is not None, EARLY=early,
        **settings,
    )  # fmt: skip
    return out.view(*x.shape[:-1], rows)


@rows_product.register_fake
def _rows_product_shape(x, weight, bias):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op(
    "decode_step::attend",
    mutates_args=(),
    schema="(Tensor query, Tensor keys, Tensor values, Tensor? mask, float scale) -> Tensor",
)
def attend(query, keys, values, mask, scale):
    """scaled_dot_product_attention of one query per head."""
    if query.device.type != "cuda":
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != keys.shape[1]
        )
    (batch, heads, _, width), (length, value_width) = query.shape, values.shape[2:]
    out = torch.empty((batch, heads, 1, value_width), dtype=query.dtype, device=query.device)
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    blocks = triton.cdiv(length, SPLIT)
    steps = triton.cdiv(blocks, min(blocks, max(1, 4 * processors // (batch * heads))))
    splits = triton.cdiv(blocks, steps)
    partial = torch.empty((batch * heads, splits, value_width), dtype=torch.float32, device=query.device)
    statistics = torch.empty((batch * heads, splits, 2), dtype=torch.float32, device=query.device)
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    seen = None if mask is None else mask.expand(batch, heads, 1, length)
    if seen is not None and kind == 1:
        seen = seen.view(torch.uint8)
    early = starts_early(query.device)
    settings = {"launch_pdl": True} if early else {}
    attend_kernel[(batch * heads, splits)](
        query, keys, values, query if seen is None else seen, partial, statistics, arrival_counters(query.device), out,
        length, scale,
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *((0, 0) if seen is None else seen.stride()[:2]),
        value_width, heads, SHARED=heads // keys.shape[1], WIDTH=width, BLOCK_D=triton.next_power_of_2(width),
        VALUE_WIDTH=value_width, BLOCK_E=triton.next_power_of_2(value_width), SPLITS=splits,
        BLOCK_S=triton.next_power_of_2(splits), STEPS=steps, BLOCK_L=SPLIT, MASK=kind, EARLY=early, num_warps=4,
        **settings,
    )  # fmt: skip
    return out


@attend.register_fake
def _attend_shape(query, keys, values, mask, scale):
    return query.new_empty((*query.shape[:3], values.shape[3]))


class JoinedLayers:
    """Linear layers that read the same tensor, as one product. Their weights stay where the layers look for them."""

    def __init__(self, layers: list[torch.nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        self.weight, self.bias = layers[0].weight.data, None if layers[0].bias is None else layers[0].bias.data
        if len(layers) > 1:
            self.weight = torch.cat([layer.weight.data for layer in layers])
            for layer, weight in zip(layers, self.weight.split(self.sizes), strict=True):
                layer.weight.data = weight
        if len(layers) > 1 and self.bias is not None:
            self.bias = torch.cat([layer.bias.data for layer in layers])
            for layer, bias in zip(layers, self.bias.split(self.sizes), strict=True):
                layer.bias.data = bias
        torch._dynamo.mark_static_address(self.weight)
        self.given: torch.Tensor | None = None
        self.parts: list[torch.Tensor] = []
        for index, layer in enumerate(layers):
            layer.forward = functools.partial(self.product, layer, index)  # type: ignore[method-assign]

    def product(self, layer: torch.nn.Linear, index: int, x: torch.Tensor) -> torch.Tensor:
        if x.numel() // x.shape[-1] > MOST_ROWS or (torch.is_grad_enabled() and x.requires_grad):
            return linear(x, layer.weight, layer.bias)
        if self.given is not x or not self.parts:
            found = rows_product(x, self.weight, self.bias)
            if len(self.sizes) == 1:
                return found
            self.given, self.parts = x, list(found.split(self.sizes, dim=-1))
        part = self.parts[index]
        if index == len(self.sizes) - 1:
            self.given, self.parts = None, []
        return part


def use_row_products(model: torch.nn.Module, step: Callable[[], Any]) -> list[int]:
    """Have the kernel above do the linear layers that `step` calls with few rows, in place.

    The running model tells which layers read the same tensor. Returns how many layers each product computes.
    """
    calls: list[tuple[torch.nn.Linear, torch.Tensor]] = []
    layers = [layer for layer in model.modules() if type(layer) is torch.nn.Linear and "forward" not in vars(layer)]
    watches = [
        layer.register_forward_pre_hook(lambda layer, inputs: calls.append((layer, inputs[0]))) for layer in layers
    ]
    with torch.no_grad():
        step()
    for watch in watches:
        watch.remove()
    weights = [id(weight) for part in model.modules() for weight in part.parameters(recurse=False)]
    counts = {id(layer): sum(layer is other for other, _ in calls) for layer, _ in calls}
    groups: list[tuple[torch.Tensor | None, list[torch.nn.Linear]]] = []
    for layer, x in calls:
        plain = type(layer.weight.data) is torch.Tensor and layer.weight.is_contiguous()
        is_few = x.dtype == layer.weight.dtype and x.numel() // x.shape[-1] <= MOST_ROWS
        if not (plain and is_few) or any(layer is known for _, group in groups for known in group):
            continue
        alone = counts[id(layer)] > 1 or weights.count(id(layer.weight)) > 1
        has_bias = layer.bias is not None
        kin = [group for given, group in groups if given is x and not alone and (group[0].bias is not None) == has_bias]
        if kin:
            kin[0].append(layer)
        else:
            groups.append((None if alone else x, [layer]))
    for _, group in groups:
        JoinedLayers(group)
    return [len(group) for _, group in groups]


def is_one_query(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """True if the kernel above can do this attention: of one query for each head, or of some with one mask for all."""
    tensors = (query, key, value)
    if any(tensor.ndim != 4 or tensor.dtype != query.dtype or tensor.stride(-1) != 1 for tensor in tensors):
        return False
    if query.shape[0] * query.shape[1] * query.shape[2] > MOST_COUNTERS:
        return False
    if query.shape[3] > 256 or value.shape[3] > 256 or dropout_p or is_causal:
        return False
    if query.shape[2] != 1 and (attn_mask is None or attn_mask.shape[1] != 1):
        return False
    if query.shape[1] % key.shape[1] or (query.shape[1] != key.shape[1] and not enable_gqa):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return attn_mask is None or (attn_mask.ndim == 4 and attn_mask.shape[2] == 1 and attn_mask.stride(-1) == 1)


def attended(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Queries of a head with one mask are further heads: so transformers packs the heads that share a key, from 5.23 on."""
    batch, heads, queries, size = query.shape
    query = query.reshape(batch, heads * queries, 1, size)
    found = attend(query, key, value, attn_mask, size**-0.5 if scale is None else scale)
    return found.reshape(batch, heads, queries, value.shape[-1])


class OneQueryAttention(TorchFunctionMode):
    """Within this mode every scaled_dot_product_attention of one query is done by the kernel above."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        named = kwargs or {}
        if func is scaled_dot_product_attention and is_one_query(*args, **named):
            if not torch.compiler.is_compiling():
                self.count += 1
            return attended(*args, **named)
        return func(*args, **named)


class WithOneQueryAttention(torch.nn.Module):
    """The model, with the kernel above for attention where one token per sequence is read."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.mode = model, OneQueryAttention()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        read = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        if read.shape[-1] != 1:  # the prompt
            return self.model(*args, **kwargs)
        with self.mode:
            return self.model(*args, **kwargs)
