"""The backward of max pooling in compiled programs, as plain PyTorch that a switch applies and snippets contain, unchanged.

As in `plain.py`, nothing here knows of Redline but for other such code.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from redline.bench.recipe.plain import add_pass


class PooledGradients:
    """A pass over graphs that torch.compile has made: the backward of max pooling asks where in its window each maximum stood.

    Just that is kept by the forward. The compiler works out the place in the whole image from it, with several divisions for every
    window that an element is part of, and compares that with the element's own. On a GPU these take longer than the memory traffic.
    """

    NAMESPACE = "pooled_gradients"

    changed = graphs = 0
    """So far; no graph is looked at where the compiled program is found in a cache."""

    @property
    def operator(self) -> Any:
        found = getattr(torch.ops, self.NAMESPACE)
        if not hasattr(found, "spread"):
            from torch._inductor.lowering import register_lowering

            found.library = torch.library.Library(self.NAMESPACE, "DEF")
            geometry = "int[] size, int[] layout, int[] kernel, int[] stride, int[] padding"
            found.library.define(f"spread(Tensor gradient, Tensor offsets, {geometry}) -> Tensor")
            torch.library.register_fake(f"{self.NAMESPACE}::spread", self.shaped, lib=found.library)
            register_lowering(found.spread.default, type_promotion_kind=None)(self.lowered)
        return found.spread.default

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs += 1
        backward = torch.ops.aten.max_pool2d_with_indices_backward.default
        for node in [node for node in graph.nodes if node.target is backward and self._is_suited(node)]:
            gradient, _, kernel, stride, padding, _, _, indices = node.args
            geometry = [list(each) * (2 // len(each)) for each in (kernel, stride or kernel, padding)]
            value = node.meta["val"]
            with graph.inserting_before(node):
                given = (gradient, indices.args[0], list(value.shape), list(value.stride()), *geometry)
                made = graph.call_function(self.operator, given)
            made.meta.update(node.meta)
            node.replace_all_uses_with(made)
            for unused in (node, indices):
                if not unused.users:
                    graph.erase_node(unused)
            self.changed += 1

    @staticmethod
    def _is_suited(node: Any) -> bool:
        """Its maxima are kept as places in their windows, sizes are known, and windows have no gaps."""
        gradient, inputs, *_, dilation, _, indices = node.args
        kept = isinstance(indices, torch.fx.Node) and str(indices.target).startswith("prims._low_memory_max_pool")
        sizes = (*gradient.meta["val"].shape, *inputs.meta["val"].shape)
        return kept and all(type(size) is int for size in sizes) and all(step == 1 for step in dilation)

    @staticmethod
    def shaped(
        gradient: torch.Tensor, offsets: torch.Tensor, size: list[int], layout: list[int], *geometry: Any
    ) -> torch.Tensor:
        return gradient.new_empty_strided(size, layout)

    @staticmethod
    def lowered(gradient: Any, offsets: Any, size: Any, layout: Any, kernel: Any, stride: Any, padding: Any) -> Any:
        """Each element gets the gradients of those windows around it whose maximum stood at its place."""
        import torch._inductor.ir as ir
        from torch._inductor.virtualized import ops
        from torch.utils._sympy.functions import FloorDiv, ModularIndexing

        gradient.realize_hint()  # it is read once for each window
        gradient_at, offset_at, dtype = gradient.make_loader(), offsets.make_loader(), gradient.get_dtype()

        def number(expression: Any) -> Any:
            return ops.index_expr(expression, torch.int32)

        def windows(at: Any, axis: int) -> Iterator[Any]:
            """Of the windows around an element: which they are, at which of their places it stands, and what must hold for that."""
            steps, taps, before = stride[axis], kernel[axis], padding[axis]
            count = int(gradient.get_size()[axis - 2])
            for back in range(-(-taps // steps)):
                window = FloorDiv(at + before, steps) - back
                place = ModularIndexing(at + before, 1, steps) + back * steps
                limits = []
                if before // steps < back:
                    limits.append(ops.ge(number(window), ops.constant(0, torch.int32)))
                if (int(size[axis - 2]) - 1 + before) // steps - back >= count:
                    limits.append(ops.lt(number(window), ops.constant(count, torch.int32)))
                if (back + 1) * steps > taps:
                    limits.append(ops.lt(number(place), ops.constant(taps, torch.int32)))
                yield window, place, limits

        def value(index: Any) -> Any:
            *outer, row, column = index
            total = ops.constant(0.0, dtype)
            for down, across in itertools.product(windows(row, 0), windows(column, 1)):
                window = [*outer, down[0], across[0]]
                limits = [*down[2], *across[2]]

                def stood(window: Any = window) -> Any:
                    return ops.to_dtype(offset_at(window), torch.int32)

                def part(window: Any = window) -> Any:
                    return gradient_at(window)

                if limits:
                    inside = functools.reduce(ops.and_, limits)
                    place, given = ops.masked(inside, stood, -1), ops.masked(inside, part, 0.0)
                else:
                    place, given = stood(), part()
                is_here = ops.eq(place, number(down[1] * kernel[1] + across[1]))
                total = ops.add(total, ops.where(is_here, given, ops.constant(0.0, dtype)))
            return total

        made: Any = ir.Pointwise.create(device=gradient.get_device(), dtype=dtype, inner_fn=value, ranges=list(size))
        made.realize()  # else each of its readers would compute it again
        return ir.ExternKernel.require_stride_order(made, ir.get_stride_order(layout))

    def uuid(self) -> str:
        return "max pooling's backward by places in windows, 1"


def pool_by_places() -> PooledGradients:
    """Have torch.compile do so in all that it compiles from now on."""
    from torch._inductor import decomposition

    pooled = PooledGradients()
    _ = pooled.operator  # also for programs that are found in a cache
    # Newer versions of torch take it apart before any pass could see it.
    decomposition.decompositions.pop(torch.ops.aten.max_pool2d_with_indices_backward.default, None)
    decomposition.fast_random_decomps.cache_clear()
    add_pass(pooled)
    return pooled


def take_pooling_apart() -> None:
    """As torch does by itself, where it does. Loads nothing: what is not loaded yet is as it was."""
    loaded: Any = sys.modules.get("torch._inductor.decomposition")
    name = torch.ops.aten.max_pool2d_with_indices_backward.default
    if loaded is not None and name in loaded.inductor_decompositions and name not in loaded.decompositions:
        loaded.decompositions[name] = loaded.inductor_decompositions[name]
        loaded.fast_random_decomps.cache_clear()
