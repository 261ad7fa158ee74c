"""Matrix products in better forms, as plain PyTorch that switches apply and snippets contain, unchanged: convolutions over
patches that are products, and linear layers whose product does the activation behind them.

As in `plain.py`, nothing here knows of Redline, except where other such code is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from redline.bench.recipe.plain import run_on_graphs


class PatchProduct(torch.nn.Module):
    """A convolution whose patches lie side by side, as one matrix product over the patches."""

    kernel_size: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        sizes, weight = self.kernel_size, self.weight
        if images.dim() != len(sizes) + 2:  # one item without a batch
            return super().forward(images)
        counts = [side // size for side, size in zip(images.shape[2:], sizes, strict=True)]
        for axis in range(len(sizes) + 1, 1, -1):
            count, size = counts[axis - 2], sizes[axis - 2]
            # A convolution leaves out what fills no patch, too.
            images = images.narrow(axis, 0, count * size).unflatten(axis, (count, size))
        across, within = range(2, images.dim(), 2), range(3, images.dim(), 2)
        # In the order in which the weight lies in memory, so that it need not be copied.
        is_channels_last = weight.stride(1) == 1
        inside = [*within, 1] if is_channels_last else [1, *within]
        rows = weight.movedim(1, -1) if is_channels_last else weight
        patches = images.permute(0, *across, *inside).reshape(-1, weight[0].numel())
        product = torch.nn.functional.linear(patches, rows.reshape(len(weight), -1), self.bias)
        output = product.view(len(images), *counts, len(weight)).movedim(-1, 1)
        return output if is_channels_last else output.contiguous()


class PatchConv1d(PatchProduct, torch.nn.Conv1d):
    pass


class PatchConv2d(PatchProduct, torch.nn.Conv2d):
    pass


class PatchConv3d(PatchProduct, torch.nn.Conv3d):
    pass


def patch_convolutions(model: torch.nn.Module) -> list[Any]:
    """Convolutions whose patches neither overlap nor leave a gap: each is a product, which libraries do better."""
    kinds = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    convolutions: list[Any] = [module for module in model.modules() if type(module) in kinds]
    return [
        layer
        for layer in convolutions
        if layer.kernel_size == layer.stride
        and layer.groups == 1
        and layer.weight[0, 0].numel() > 1
        and set(layer.dilation) == {1}
        and layer.padding in ("valid", (0,) * len(layer.kernel_size))
    ]


def patches_as_products(model: torch.nn.Module) -> int:
    """Compute each of them as a product, in place; how many there are. Weights and their names stay."""
    layers = patch_convolutions(model)
    for layer in layers:
        layer.__class__ = {1: PatchConv1d, 2: PatchConv2d, 3: PatchConv3d}[len(layer.kernel_size)]
    return len(layers)


class FusedActivations:
    """A pass over graphs that torch.compile has traced: a linear layer's product does the ReLU or GELU behind it as well.

    By itself inductor leaves the product to a library and writes a kernel for the activation, which reads and writes the
    largest tensor of a transformer once more. GELU becomes its tanh form, which is what libraries have.
    """

    VERSION = "linear layers with their activations, 1"
    changed = graphs = 0
    """Counts so far; no graph is looked at when the compiled program is found in a cache."""

    def change(self, graph: torch.fx.Graph) -> None:
        functional = torch.nn.functional
        uses_gelu = {functional.gelu: True, functional.relu: False, torch.relu: False, torch.relu_: False}
        for node in list(graph.nodes):
            target = getattr(torch, node.target, None) if node.op == "call_method" else node.target
            if node.op not in ("call_function", "call_method") or target not in uses_gelu:
                continue
            linear = node.args[0] if node.args else node.kwargs.get("input")
            if isinstance(linear, torch.fx.Node) and self._is_suited(linear):
                self._fuse(graph, node, linear, uses_gelu[target])
                self.changed += 1

    @staticmethod
    def _operands(linear: torch.fx.Node) -> list[Any]:
        given = dict(zip(("input", "weight", "bias"), linear.args, strict=False)) | linear.kwargs
        return [given.get(name) for name in ("input", "weight", "bias")]

    def _is_suited(self, linear: torch.fx.Node) -> bool:
        if linear.op != "call_function" or linear.target is not torch.nn.functional.linear or len(linear.users) != 1:
            return False
        nodes = (*self._operands(linear), linear)
        tensors: list[Any] = [getattr(each, "meta", {}).get("example_value") for each in nodes]
        # Autocast casts what goes into a linear layer, and would leave the joint kernel in the format it finds.
        is_plain = all(isinstance(each, torch.Tensor) and each.dtype == tensors[0].dtype for each in tensors)
        return is_plain and tensors[0].dim() > 1 and all(type(side) is int for side in tensors[0].shape)

    def _fuse(self, graph: torch.fx.Graph, node: torch.fx.Node, linear: torch.fx.Node, use_gelu: bool) -> None:
        inputs, weight, bias = self._operands(linear)
        shape = tuple(linear.meta["example_value"].shape)
        with graph.inserting_before(node):
            rows = graph.call_method("reshape", (inputs, (-1, inputs.meta["example_value"].shape[-1])))
            columns = graph.call_method("t", (weight,))
            product = graph.call_function(torch._addmm_activation, (bias, rows, columns), {"use_gelu": use_gelu})
            output = graph.call_method("reshape", (product, shape))
        output.meta["example_value"] = node.meta.get("example_value")
        node.replace_all_uses_with(output)
        graph.erase_node(node)
        graph.erase_node(linear)


def fuse_activations() -> Any:
    """Let torch.compile fuse them in everything that it compiles from now on."""
    return run_on_graphs("pre_grad_custom_pass", FusedActivations())
