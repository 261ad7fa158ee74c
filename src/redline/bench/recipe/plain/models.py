"""Parts of a model that a switch is about, and other ways to call a model."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten

SIDES = {"int8": 8, "int8-weights": 8, "fp8": 16, "fp8-weights": 16, "int4": 128, "int4-weights": 128}
"""Of which number both sides of a weight must be a multiple, for the GPU's product in that format."""


def is_plain_linear(module: torch.nn.Module, sides: int) -> bool:
    """A layer whose weight nobody reads past it (as MultiheadAttention does), with sides of multiples of `sides`."""
    return type(module) is torch.nn.Linear and all(side % sides == 0 for side in module.weight.shape)


def plain_linears(model: torch.nn.Module, number_format: str) -> list[torch.nn.Linear]:
    """All that would be quantized."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return [layer for layer in layers if is_plain_linear(layer, SIDES[number_format])]


def repeated_blocks(model: torch.nn.Module) -> list[str]:
    """Names of the blocks a network is made of: modules of one class, none inside another, with most of the weights.

    Of classes that hold about the same share of the weights, the one with more instances: the layers, not the stages.
    """
    whole = max(sum(weight.numel() for weight in model.parameters()), 1)
    names: dict[type, list[str]] = {}
    for name, module in model.named_modules():
        containers = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
        if not name or isinstance(module, containers) or not any(True for _ in module.children()):
            continue
        others = names.setdefault(type(module), [])
        if not any(name.startswith(f"{other}.") for other in others):
            others.append(name)
    shares = {
        kind: sum(weight.numel() for name in found for weight in model.get_submodule(name).parameters()) / whole
        for kind, found in names.items()
        if len(found) > 1
    }
    most = max(shares.values(), default=0.0)
    near = [kind for kind, share in shares.items() if share >= max(0.9 * most, 0.3)]
    return names[max(near, key=lambda kind: (len(names[kind]), shares[kind]))] if near else []


def kinds_of_blocks(model: torch.nn.Module, names: list[str]) -> int:
    """How many of these blocks differ in the shapes of their weights."""
    return len(
        {
            tuple((name, tuple(weight.shape)) for name, weight in model.get_submodule(block).named_parameters())
            for block in names
        }
    )


def compile_blocks(model: torch.nn.Module, **settings: Any) -> list[str]:
    """Compile every repeated block by itself, in place: blocks that are alike share one compiled program."""
    names = repeated_blocks(model)
    # Blocks of a class share their code, and beyond this many versions of it torch would run the rest uncompiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, len(names))
    for name in names:
        model.get_submodule(name).compile(**settings)
    return names


def store_inputs(model: torch.nn.Module) -> None:
    """Have a compiler store what each linear layer reads, in place.

    Where a product of one row becomes a reduction, the compiler would compute that row anew for every row of the
    weight: the exponentials of a gated layer cost as much time there as reading the weight.
    """

    def stored(layer: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not torch.compiler.is_compiling():
            return None
        # Inductor must have stored what it is asked to see with other strides; the view itself costs nothing.
        return (inputs[0].as_strided(inputs[0].shape, inputs[0].stride()), *inputs[1:])

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(stored)


def recompute_blocks(model: torch.nn.Module) -> list[str]:
    """Let every repeated block keep its inputs only, in place: the backward computes its insides again."""
    names = repeated_blocks(model)
    for name in names:
        block: Any = model.get_submodule(name)
        block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
    return names


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Of scaled_dot_product_attention."""


class CallForm:
    """How the example was called. Later calls may write their keywords, and the keys of dicts, in any order; what went in
    by place goes in by place again, and what went in by name by name."""

    def __init__(self, args: tuple, kwargs: dict) -> None:
        leaves, self.structure = tree_flatten((args, kwargs))
        self.count, self.names = len(args), list(kwargs)
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        plain = (bool, int, float, str, type(None))
        self.fixed = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, plain)}

    def tensors(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        """The tensors of a call in the order of the example's."""
        if len(args) != self.count or kwargs.keys() != set(self.names):
            raise TypeError(
                f"made for {self.count} positional inputs and the keywords {self.names}, "
                f"called with {len(args)} and {list(kwargs)}"
            )
        leaves = self.structure.flatten_up_to((args, kwargs))
        for place, value in self.fixed.items():
            # By their words: nan is not equal to itself.
            if type(leaves[place]) is not type(value) or repr(leaves[place]) != repr(value):
                raise ValueError(f"made for an input that is {value!r}, which a later call cannot change")
        return [leaves[place] for place in self.places]


class WithAttention(torch.nn.Module):
    """The model, with every scaled_dot_product_attention in it done by one backend."""

    def __init__(self, model: torch.nn.Module, backend: SDPBackend) -> None:
        super().__init__()
        self.model, self.backend = model, backend

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(self.backend):
            return self.model(*args, **kwargs)
