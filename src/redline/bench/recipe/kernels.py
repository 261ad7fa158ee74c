"""A Triton kernel for the step that decodes one token: products of a few rows, which only read weights.

What keeps them from the bandwidth of memory are the gaps between kernels, so a product begins to read its weights before the
kernel in front of it has ended. Asking for the first weights of the products
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
from torch import Tensor, nn
from torch.nn.functional import linear

MOST_ROWS = 4
"""Sequences at most: with more of them, products on tensor cores read weights as fast."""


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


class JoinedLayers:
    """Linear layers that read the same tensor, as one product. Their weights stay where the layers look for them."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        self.weight, self.bias = (
            self.joined([getattr(layer, name) for layer in layers]) for name in ("weight", "bias")
        )
        torch._dynamo.mark_static_address(self.weight)
        self.given: Tensor | None = None
        self.parts: list[Tensor] = []
        for index, layer in enumerate(layers):
            layer.forward = functools.partial(self.product, layer, index)  # type: ignore[method-assign]

    def joined(self, parts: list[Any]) -> Any:
        """Returns one tensor, which the parameters share from now on; they all have one, or none has."""
        if len(parts) == 1 or parts[0] is None:
            return None if parts[0] is None else parts[0].data
        whole = torch.cat([part.data for part in parts])
        for part, own in zip(parts, whole.split(self.sizes), strict=True):
            part.data = own
        return whole

    def product(self, layer: nn.Linear, index: int, x: Tensor) -> Tensor:
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


def use_row_products(model: nn.Module, step: Callable[[], Any]) -> list[int]:
    """Have the kernel above do the linear layers that `step` calls with few rows, in place.

    The running model tells which layers read the same tensor. Returns how many layers each product computes.
    """
    calls: list[tuple[nn.Linear, Tensor]] = []
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear and "forward" not in vars(layer)]
    watches = [
        layer.register_forward_pre_hook(lambda layer, inputs: calls.append((layer, inputs[0]))) for layer in layers
    ]
    with torch.no_grad():
        step()
    for watch in watches:
        watch.remove()
    called = [id(layer) for layer, _ in calls]
    weights = [id(weight) for part in model.modules() for weight in part.parameters(recurse=False)]
    groups: dict[Any, list[nn.Linear]] = {}
    for layer, x in calls:
        plain = type(layer.weight.data) is Tensor and layer.weight.is_contiguous()
        if plain and x.dtype == layer.weight.dtype and x.numel() // x.shape[-1] <= MOST_ROWS:
            # What is called twice, or shares its weight, stands alone.
            alone = called.count(id(layer)) > 1 or weights.count(id(layer.weight)) > 1
            group = groups.setdefault(id(layer) if alone else (id(x), layer.bias is None), [])
            group += [layer] if layer not in group else []
    for group in groups.values():
        JoinedLayers(group)
    return [len(group) for group in groups.values()]
