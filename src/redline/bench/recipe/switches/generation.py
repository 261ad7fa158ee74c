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
from redline.bench.workload.decoder import Decoder, WholeGenerator
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

    def irrelevance(self, model: torch.nn.Module, facts: Facts | None) -> str | None:
        if isinstance(model, WholeGenerator):
            return "this model generates as a whole: give it forward(tokens, cache) for more"
        return self.unsuited(model) if isinstance(model, Decoder) else None

    def unsuited(self, model: Decoder) -> str | None:
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

    def unsuited(self, model: Decoder) -> str | None:
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
        "Triton kernels for a decode step of up to 4 sequences: linear layers that read the same tensor as one product, "
        "which begins to read before the kernel in front has ended, and attention of one query"
    )
    stage = ATTENTION
    family = "attention"
    arguments = ("linear", "attention")
    # Each of these computes the same layers in a way of its own.
    excludes = frozenset({"sdpa", "amp", "amp-bf16", "int8", "int4", "fp8"})
    needs = (NEEDS_STATIC_CACHE,)
    needs_gpu = "its kernels are Triton's, and a CPU runs none"

    def refusal(self, device: Device) -> str | None:
        return super().refusal(device) or (None if find_spec("triton") else "its kernels need Triton")

    def unsuited(self, model: Decoder) -> str | None:
        if model.prompt.shape[0] > MOST_SEQUENCES:
            return f"its products are for up to {MOST_SEQUENCES} sequences; for more, tensor cores are as fast"
        linear = {module.weight for module in model.modules() if type(module) is torch.nn.Linear}
        whole = sum(weight.numel() for weight in model.parameters())
        share = sum(weight.numel() for weight in linear) / max(whole, 1)
        if self.argument != "attention" and share < SMALLEST_SHARE:
            return f"it reads linear layers, and those hold {share:.0%} of the weights"
        return None

    def apply(self, setup: Setup) -> None:
        from redline.bench.recipe import kernels

        decoder, notes = setup.workload.model, []
        assert isinstance(decoder, Decoder)
        with torch.no_grad():
            decoder.begin()
            if self.argument != "attention":
                products = kernels.use_row_products(decoder, lambda: decoder(*setup.args))
                notes.append(f"{sum(products)} linear layers in {len(products)} products")
            if self.argument != "linear":
                attention = kernels.WithOneQueryAttention(decoder)
                attention(*setup.args)
                notes.append(f"{attention.mode.count} attentions of one query")
                if attention.mode.count:
                    setup.model = attention
                elif self.argument == "attention":
                    why = "decode-kernels: no attention of this model's decode step is one they can do"
                    raise BenchError("unsupported", why)
        setup.notes[self.name] = ", ".join(notes)
        setup.shortens_launches = True

    def write(self, code: RecipeCode) -> None:
        from redline.bench.recipe import kernels

        code.shortens_launches = True
        source = inspect.getsource(kernels)
        code.bring_in(*imports_of(kernels))
        code.helpers.append(source[source.index("MOST_ROWS =") :].rstrip())
        if self.argument != "linear":
            code.model_lines.append("model = WithOneQueryAttention(model)")
        if self.argument != "attention":
            code.decode_lines.append("begin(prompt.to(device))")
            code.decode_lines.append("use_row_products(model, lambda: forward(token, position))")
