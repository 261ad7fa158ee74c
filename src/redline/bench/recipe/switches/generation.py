"""These switches are for generating text: a cache that is made once, and kernels for one token."""

from __future__ import annotations

import inspect
from importlib.util import find_spec

import torch
from torch import nn

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
from redline.model.errors import BenchError, SpecError
from redline.model.spec import OptionValue
from redline.model.work import Facts

MOST_SEQUENCES = 4
"""Kernels that read a weight for a few rows pay up to this many. With more rows, products on tensor cores are as fast."""
MOST_POSITIONS = 1_000_000
"""A static cache may have at most this many positions."""


@registered
class StaticCache(RecipeSwitch):
    name = "static-cache"
    summary = (
        "keys and values of the whole length in one place, written in place: what compile and graphs need; "
        "static-cache:length=1024 for a longer one"
    )
    stage = FLAGS
    tasks = ("generate",)
    family = "cache"
    relieves = "both"
    length: int | None = None

    def accept_options(self, options: dict[str, OptionValue]) -> None:
        super().accept_options({name: value for name, value in options.items() if name != "length"})
        length = options.get("length", 1)
        if type(length) is not int or not 0 < length <= MOST_POSITIONS:
            raise SpecError(f"static-cache: length must be from 1 to {MOST_POSITIONS}, got {length!r}")
        self.length = length if options else None

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        own = "this model makes its own cache; give it make_cache(batch, length) for one made beforehand"
        return own if isinstance(model, Decoder) and not model.can_be_static else None

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
class DecodeKernels(RecipeSwitch):
    name = "decode-kernels"
    summary = (
        "a Triton kernel for a decode step of up to 4 sequences: linear layers that read the same tensor as one product, "
        "which begins to read before the kernel in front has ended"
    )
    stage = ATTENTION
    tasks = ("generate",)
    # Each of these switches computes the same layers in a way of its own.
    excludes = frozenset({"amp", "amp-bf16", "int8", "fp8"})
    needs = (NEEDS_STATIC_CACHE,)
    needs_gpu = "its kernel is Triton's, and a CPU runs none"

    def refused_by(self, device: Device) -> str | None:
        return None if find_spec("triton") else "its kernel needs Triton"

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        if isinstance(model, Decoder) and model.prompt.shape[0] > MOST_SEQUENCES:
            return f"its products are for up to {MOST_SEQUENCES} sequences; for more, tensor cores are as fast"
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
