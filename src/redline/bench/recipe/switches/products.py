"""Programs of products in better forms: convolutions over patches as matrix products, linear layers that compute the
activation behind them, and weight gradients of convolutions beside the rest of the backward."""

from __future__ import annotations

import torch

from redline.bench.device.base import Device
from redline.bench.recipe.base import (
    FLAGS,
    INFER,
    REWRITE,
    SWITCHES,
    TRAIN,
    RecipeCode,
    RecipeSwitch,
    must_change,
)
from redline.bench.recipe.overlap import OverlappedGradients, SideStreams, overlap_gradients
from redline.bench.recipe.plain import run_on_graphs
from redline.bench.recipe.products import (
    FusedActivations,
    PatchConv1d,
    PatchConv2d,
    PatchConv3d,
    PatchProduct,
    fuse_activations,
    patch_convolutions,
    patches_as_products,
)
from redline.bench.workload.step import Setup
from redline.model.protocol import SwitchNeed
from redline.model.units import counted
from redline.model.work import Facts

SMALLEST_SHARE = 0.002
"""The smallest share of the forward's time in strict fp32 that activations behind linear layers must take. In half precision their
share is several times as large: 2 % of ViT-B/16's forward on an H200 became 10 %."""
FEWEST_CONVOLUTIONS = 3
"""The first of a model is not moved, and with one more there is little that could run at the same time."""


@SWITCHES.register("patch-products")
class PatchProducts(RecipeSwitch):
    name = "patch-products"
    summary = "convolutions whose patches do not overlap (as ViT begins with) as matrix products"
    stage = REWRITE
    family = "patches"

    def irrelevance(self, model: torch.nn.Module, facts: Facts | None) -> str | None:
        if facts is not None and "convolution" not in facts.layers:
            return "no convolution runs in this model"
        if isinstance(model, torch.jit.ScriptModule) or not patch_convolutions(model):
            return "no convolution of the model has a stride as large as its kernel, and no padding"
        return None

    def apply(self, setup: Setup) -> None:
        count = patches_as_products(setup.workload.model)
        setup.notes[self.name] = f"{counted(count, 'convolution')} as matrix products"

    def write(self, code: RecipeCode) -> None:
        code.bring_in("from typing import Any")
        code.carry(PatchProduct, PatchConv1d, PatchConv2d, PatchConv3d, patch_convolutions, patches_as_products)
        code.model_lines.append("patches_as_products(model)")


@SWITCHES.register("fused-linear")
class FusedLinear(RecipeSwitch):
    name = "fused-linear"
    summary = "ReLU and GELU in the kernel of the linear layer before them (inference, with compile)"
    stage = FLAGS
    tasks = INFER
    # Autocast does not know the joint kernel; torchao's layers have products of their own.
    excludes = frozenset({"amp", "amp-bf16", "int8", "int4", "fp8"})
    needs = (SwitchNeed(wants=("compile",), reason="torch.compile puts the two together; add compile"),)

    def refusal(self, device: Device) -> str | None:
        return None if device.is_accelerator else "the libraries of a CPU have no such kernel in torch"

    def irrelevance(self, model: torch.nn.Module, facts: Facts | None) -> str | None:
        if facts is None or (facts.activated is not None and facts.activated.share >= SMALLEST_SHARE):
            return None
        if facts.activated is None:
            return "no ReLU or GELU stands right behind a linear layer with a bias"
        return f"activations behind linear layers take {facts.activated.share:.2%} of the forward's time"

    def apply(self, setup: Setup) -> None:
        fused = fuse_activations()
        missing = "no ReLU or GELU right behind a linear layer with a bias in one number format"
        must_change(setup, self.name, fused, missing)

        def tell() -> None:
            if fused.changed:
                setup.notes[self.name] = f"{fused.changed} linear layers compute the activation behind them"

        setup.after_first_call.append(tell)

    def write(self, code: RecipeCode) -> None:
        code.bring_in("from typing import Any", "import torch.fx")
        code.carry(run_on_graphs, FusedActivations, fuse_activations)
        code.model_lines.append("fuse_activations()")


@SWITCHES.register("overlap-gradients")
class OverlapGradients(RecipeSwitch):
    name = "overlap-gradients"
    summary = (
        "weight gradients of convolutions on other streams, beside the rest of the backward (training, with compile)"
    )
    stage = FLAGS
    tasks = TRAIN
    needs = (SwitchNeed(wants=("compile",), reason="it changes the program of torch.compile; add compile"),)

    def refusal(self, device: Device) -> str | None:
        return None if device.is_accelerator else "a CPU runs one operator after the other"

    def irrelevance(self, model: torch.nn.Module, facts: Facts | None) -> str | None:
        convolutions = facts.layers.get("convolution") if facts is not None else None
        if facts is None or (convolutions is not None and convolutions.calls >= FEWEST_CONVOLUTIONS):
            return None
        return "no convolution runs in this model" if convolutions is None else "it has too few convolutions"

    def apply(self, setup: Setup) -> None:
        missing = "no convolution with a weight gradient that can be computed apart"
        must_change(setup, self.name, overlap_gradients(), missing)

    def write(self, code: RecipeCode) -> None:
        code.bring_in("from typing import Any", "import itertools", "import operator", "import torch.fx")
        code.carry(run_on_graphs, SideStreams, OverlappedGradients, overlap_gradients)
        code.model_lines.append("overlap_gradients()")
