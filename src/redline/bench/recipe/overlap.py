"""Weight gradients of convolutions beside the rest of the backward, as plain PyTorch that a switch applies and snippets contain,
unchanged.

As in `plain.py`, nothing here knows of Redline but for other such code.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
import torch.fx

from redline.bench.recipe.plain import run_on_graphs


class SideStreams:
    """Two operators for compiled programs: one begins a weight gradient on another stream, the other waits for some of them."""

    STREAMS = 3
    """They take turns."""

    def __init__(self, namespace: str) -> None:
        self.library = torch.library.Library(namespace, "DEF")
        self.turns: dict[torch.device, Any] = {}
        tags = (torch.Tag.needs_fixed_stride_order,)
        geometry = (
            "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] outer, SymInt groups"
        )
        self.library.define(f"begin(Tensor gradient, Tensor input, Tensor weight, {geometry}) -> Tensor", tags=tags)
        # Tensors that are read on another stream go in as well, so that their memory is not given away before.
        self.library.define("finish(Tensor[] begun, Tensor[] read, Tensor[] weights) -> Tensor[]", tags=tags)
        for name, work, shaped in (("begin", self.begin, self.ticket), ("finish", self.finish, self.gradients)):
            self.library.impl(name, work, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{namespace}::{name}", shaped, lib=self.library)

    def begin(self, gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *geometry: Any) -> torch.Tensor:
        """A ticket, which will hold the weight's gradient."""
        ticket: Any = self.ticket(gradient)
        side = self.next_stream(gradient.device)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(side):
            backward, wanted = torch.ops.aten.convolution_backward, (False, True, False)
            ticket.gradient = backward(gradient, inputs, weight, (0,), *geometry, wanted)[1]
            ticket.done = side.record_event() if side is not None else None
        return ticket

    def finish(self, begun: list[Any], read: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
        for ticket in begun:
            if ticket.done is not None:
                torch.cuda.current_stream(ticket.device).wait_event(ticket.done)
        return [vars(ticket).pop("gradient") for ticket in begun]

    def next_stream(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return None
        if device not in self.turns:
            self.turns[device] = itertools.cycle([torch.cuda.Stream(device) for _ in range(self.STREAMS)])
        return next(self.turns[device])

    @staticmethod
    def ticket(gradient: torch.Tensor, *_: Any) -> torch.Tensor:
        return gradient.new_empty(1)

    @staticmethod
    def gradients(begun: Any, read: Any, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.empty_like(weight) for weight in weights]


class OverlappedGradients:
    """A pass over graphs that torch.compile has made: weight gradients of convolutions are computed on streams of their own.

    Nothing in the backward waits for them, while the gradients of activations are a chain in which each kernel waits for the
    one before it. Kernels that do not fill the device then run at the same time.
    """

    HELD = 2**30
    """Bytes that the weight gradients of one group read. They stay in memory until the next group has begun."""
    NAMESPACE = "overlapped_gradients"
    VERSION = f"weight gradients on {SideStreams.STREAMS} streams that hold {HELD} bytes, 1"
    changed = graphs = 0
    """Counts so far; no graph is looked at when the compiled program is found in a cache."""

    @property
    def operators(self) -> Any:
        found = getattr(torch.ops, self.NAMESPACE)
        if not hasattr(found, "begin"):
            found.side_streams = SideStreams(self.NAMESPACE)
        return found

    def change(self, graph: torch.fx.Graph) -> None:
        backward = torch.ops.aten.convolution_backward.default
        every = [node for node in graph.nodes if node.target is backward]
        nodes = [node for node in every if self._is_suited(node) and not self._is_awaited(node, every)]
        groups = self._groups_of(nodes)
        for group, later in zip(groups, [*groups[1:], [list(graph.nodes)[-1]]], strict=True) if groups else ():
            self._move(graph, group, end=later[-1])
        if nodes:
            from torch._inductor.pattern_matcher import stable_topological_sort

            stable_topological_sort(graph)  # what takes a weight's gradient now stands behind the end of its group
        self.changed += len(nodes)

    @staticmethod
    def _is_suited(node: Any) -> bool:
        """Both gradients are wanted, and the weight's is to lie in memory as the weight does."""
        weight, wanted = node.args[2].meta["val"], node.args[10]
        given = node.meta["val"][1]
        like_weight = torch.empty_like(weight)
        return wanted[0] and wanted[1] and (like_weight.stride(), weight.dtype) == (given.stride(), given.dtype)

    @staticmethod
    def _is_awaited(node: Any, others: list[Any]) -> bool:
        """True if another convolution's backward needs the weight's gradient, as where a network makes the weight."""
        ahead = [user for user in node.users if user.args[1] == 1]
        seen = set(ahead)
        while ahead:
            new = [user for user in ahead.pop().users if user not in seen]
            ahead += new
            seen.update(new)
        return not seen.isdisjoint(others)

    def _groups_of(self, nodes: list[Any]) -> list[list[Any]]:
        groups: list[list[Any]] = []
        held = self.HELD
        for node in nodes:
            size = sum(each.meta["val"].numel() * each.meta["val"].element_size() for each in node.args[:2])
            if held + size > self.HELD:
                groups.append([])
                held = 0
            groups[-1].append(node)
            held += size
        return groups

    def _move(self, graph: torch.fx.Graph, nodes: list[Any], end: Any) -> None:
        """Begin each weight gradient where it is computed now, and wait for all of them before `end`."""
        begun = []
        for node in nodes:
            gradient, inputs, weight, _, *geometry, wanted = node.args
            with graph.inserting_before(node):
                begun.append(graph.call_function(self.operators.begin.default, (gradient, inputs, weight, *geometry)))
            begun[-1].meta["val"] = SideStreams.ticket(gradient.meta["val"])
            node.args = (*node.args[:10], [True, False, wanted[2]])
        read, weights = [each for node in nodes for each in node.args[:2]], [node.args[2] for node in nodes]
        with graph.inserting_before(end):
            finished = graph.call_function(self.operators.finish.default, (begun, read, weights))
            finished.meta["val"] = [node.meta["val"][1] for node in nodes]
            for index, node in enumerate(nodes):
                made = graph.call_function(operator.getitem, (finished, index))
                made.meta["val"] = node.meta["val"][1]
                node.meta["val"] = (node.meta["val"][0], None, node.meta["val"][2])
                for user in [user for user in node.users if user.args[1] == 1]:
                    user.replace_all_uses_with(made)
                    graph.erase_node(user)


def overlap_gradients() -> Any:
    """Let torch.compile do so in everything that it compiles from now on."""
    import torch._inductor.config as settings

    overlapped = OverlappedGradients()
    _ = overlapped.operators  # needed for programs that are found in a cache, too
    settings.reorder_for_peak_memory = False  # otherwise it may move the waiting to where it has just begun
    return run_on_graphs("post_grad_custom_post_pass", overlapped)
