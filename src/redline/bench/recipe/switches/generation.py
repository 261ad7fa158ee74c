"""Switches for generating text: the cache made once, and kernels for one token."""

from __future__ import annotations

import inspect
from importlib.util import find_spec

import torch

from redline.bench.device.base import Device
from redline.bench.recipe.base import (
    ATTENTION,
    FLAGS,
    NEEDS_STATIC_CACHE,
    RecipeCode,
    RecipeSwitch,
    imports_of,
    registered,
)
from redline.bench.workload.decoder import Decoder
from redline.bench.workload.step import Setup
from redline.model.errors import BenchError
from redline.model.work import Facts

MOST_SEQUENCES = 4
"""Kernels that read a weight for a few rows pay up to here; with more rows, products on tensor cores are as fast."""
SMALLEST_SHARE = 0.3
"""With a smaller share of the weights in linear layers, kernels for them leave most of what a token reads as it was."""


class _ForDecoders(RecipeSwitch):
    stage = FLAGS
    tasks = ("generate",)

    def unsuited(self, model: torch.nn.Module, facts: Facts | None) -> str | None:
        return self.unsuited_to(model) if isinstance(model, Decoder) else None

    def unsuited_to(self, model: Decoder) -> str | None:
        """Why it would change nothing about this model, or None."""
        raise NotImplementedError


@registered
class StaticCache(_ForDecoders):
    name = "static-cache"
    summary = (
        "keys and values of the whole length in one place, written in place: what compile and graphs need; "
        "static-cache:length=1024 for a longer one"
    )
    family = "cache"
    relieves = "both"
    option = "length"

    @property
    def length(self) -> int | None:
        length = self.switch.options.get("length")
        return None if length is None else int(length)

    def unsuited_to(self, model: Decoder) -> str | None:
        own = "this model makes its own cache; give it make_cache(batch, length) for one made beforehand"
        return None if model.can_be_static else own

    def apply(self, setup: Setup) -> None:
        decoder = setup.workload.model
        assert isinstance(decoder, Decoder)
        if self.length is not None and self.length < decoder.length:
            few = f"static-cache: {self.length} positions are too few for a prompt of {decoder.prompt.shape[1]}"
            needed = f"{decoder.new_tokens} new tokens; {decoder.length} are needed"
            raise BenchError("unsupported", f"{few} and {needed}")
        decoder.is_static, decoder.cache_length = True, self.length

    def write(self, code: RecipeCode) -> None:
        code.is_static, code.cache_length = True, self.length


@registered
class DecodeKernels(_ForDecoders):
    name = "decode-kernels"
    summary = (
        "a Triton kernel for a decode step of up to 4 sequences: linear layers that read the same tensor as one product, "
        "which begins to read before the kernel in front has ended"
    )
    stage = ATTENTION
    # Each of these computes the same layers in a way of its own.
    excludes = frozenset({"amp", "amp-bf16", "int8", "fp8"})
    needs = (NEEDS_STATIC_CACHE,)
    needs_gpu = "its kernel is Triton's, and a CPU runs none"

    def refused_by(self, device: Device) -> str | None:
        return None if find_spec("triton") else "its kernel needs Triton"

    def unsuited_to(self, model: Decoder) -> str | None:
        if model.prompt.shape[0] > MOST_SEQUENCES:
            return f"its products are for up to {MOST_SEQUENCES} sequences; for more, tensor cores are as fast"
        linear = {module.weight for module in model.modules() if type(module) is torch.nn.Linear}
        whole = sum(weight.numel() for weight in model.parameters())
        share = sum(weight.numel() for weight in linear) / max(whole, 1)
        if share < SMALLEST_SHARE:
            return f"it reads linear layers, and those hold {share:.0%} of the weights"
        return None

    def apply(self, setup: Setup) -> None:
        from redline.bench.recipe import kernels

        decoder = setup.workload.model
        assert isinstance(decoder, Decoder)
        with torch.no_grad():
            decoder.begin()
            products = kernels.use_row_products(decoder, lambda: decoder(*setup.args))
        setup.notes[self.name] = f"{sum(products)} linear layers in {len(products)} products"
        setup.shortens_launches = True

    def write(self, code: RecipeCode) -> None:
        from redline.bench.recipe import kernels

        code.shortens_launches = True
        source = inspect.getsource(kernels)
        code.bring_in(*imports_of(kernels))
        code.helpers.append(source[source.index("MOST_ROWS =") :].rstrip())
        code.decode_lines += ["begin(prompt.to(device))", "use_row_products(model, lambda: forward(token, position))"]
