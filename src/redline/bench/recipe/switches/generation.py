"""Switches for generating text: the cache made once, and kernels for one token."""

from __future__ import annotations

from importlib.util import find_spec
from typing import ClassVar

import torch

from redline.bench.device.base import Device
from redline.bench.recipe.base import ATTENTION, FLAGS, NEEDS_STATIC_CACHE, SWITCHES, RecipeCode, RecipeSwitch
from redline.bench.workload.decoder import Decoder, WholeGenerator
from redline.bench.workload.step import Setup
from redline.model.errors import BenchError, SpecError
from redline.model.questions import SwitchNeed
from redline.model.spec import OptionValue, Task
from redline.model.work import Facts

GENERATE: tuple[Task, ...] = ("generate",)
MOST_SEQUENCES = 4
"""For kernels that read a weight for a few rows; with more of them products on tensor cores are as fast."""
SMALLEST_SHARE = 0.3
"""Of the weights, in linear layers: below it, kernels for them leave most of what a token reads as it was."""
_AS_A_WHOLE = "this model generates as a whole: give it forward(tokens, cache) for more"


class _ForDecoders(RecipeSwitch):
    stage = FLAGS
    tasks: ClassVar[tuple[Task, ...]] = GENERATE

    def decoder(self, setup: Setup) -> Decoder:
        assert isinstance(setup.workload.model, Decoder)
        return setup.workload.model


@SWITCHES.register("static-cache")
class StaticCache(_ForDecoders):
    name = "static-cache"
    summary = (
        "keys and values of the whole length in one place, written in place: what compile and graphs need; "
        "static-cache:length=1024 for a longer one"
    )
    family = "cache"
    relieves = "both"

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
        if isinstance(model, WholeGenerator):
            return _AS_A_WHOLE
        if isinstance(model, Decoder) and not model.can_be_static:
            return "this model makes its own cache; give it make_cache(batch, length) for one made beforehand"
        return None

    def accept_options(self, options: dict[str, OptionValue]) -> None:
        length = options.get("length", 1)
        if set(options) - {"length"} or not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise SpecError("switch static-cache takes a number of positions at most: static-cache:length=1024")

    def apply(self, setup: Setup) -> None:
        decoder, length = self.decoder(setup), self.switch.options.get("length")
        if isinstance(length, int) and length < decoder.length:
            prompt, new_tokens = decoder.prompt.shape[1], decoder.new_tokens
            raise BenchError(
                "unsupported",
                f"static-cache: {length} positions are too few for a prompt of {prompt} and {new_tokens} new tokens; "
                f"{decoder.length} are needed",
            )
        decoder.is_static, decoder.cache_length = True, length if isinstance(length, int) else None

    def write(self, code: RecipeCode) -> None:
        length = self.switch.options.get("length")
        code.cache.is_static, code.cache.length = True, length if isinstance(length, int) else None


@SWITCHES.register("decode-kernels")
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
    needs: ClassVar[dict[Task, tuple[SwitchNeed, ...]]] = {"generate": (NEEDS_STATIC_CACHE,)}

    def accept_options(self, options: dict[str, OptionValue]) -> None:
        ahead = options.get("ahead_mib", 0)
        if set(options) - {"ahead_mib"} or not isinstance(ahead, int) or isinstance(ahead, bool) or ahead < 0:
            raise SpecError("switch decode-kernels takes what is fetched ahead at most: decode-kernels:ahead_mib=8")

    def refusal(self, device: Device, task: Task) -> str | None:
        if not device.is_accelerator:
            return "its kernels are Triton's, and a CPU runs none"
        return None if find_spec("triton") else "its kernels need Triton"

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
        if isinstance(model, WholeGenerator):
            return _AS_A_WHOLE
        if isinstance(model, Decoder) and model.prompt.shape[0] > MOST_SEQUENCES:
            return f"its products are for up to {MOST_SEQUENCES} sequences; for more, tensor cores are as fast"
        linear = {each.weight for each in model.modules() if type(each) is torch.nn.Linear}
        share = sum(each.numel() for each in linear) / max(sum(each.numel() for each in model.parameters()), 1)
        if self.switch.argument != "attention" and share < SMALLEST_SHARE:
            return f"it reads linear layers, and those hold {share:.0%} of the weights"
        return None

    def apply(self, setup: Setup) -> None:
        from redline.bench.recipe import kernels

        decoder, notes = self.decoder(setup), []
        with torch.no_grad():
            decoder.begin()
            if self.switch.argument != "attention":
                ahead = self.switch.options.get("ahead_mib")
                limit = kernels.AHEAD_BYTES if ahead is None else int(ahead) * 2**20
                products = kernels.use_row_products(decoder, lambda: decoder(*setup.args), limit)
                notes.append(f"{sum(products)} linear layers in {len(products)} products")
            if self.switch.argument != "linear":
                attention = kernels.WithOneQueryAttention(decoder)
                attention(*setup.args)
                notes.append(f"{attention.mode.count} attentions of one query")
                if attention.mode.count:
                    setup.model = attention
                elif self.switch.argument == "attention":
                    raise BenchError(
                        "unsupported", "decode-kernels: no attention of this model's decode step is one they can do"
                    )
        setup.notes[self.name] = ", ".join(notes)
        setup.shortens_launches = True

    def write(self, code: RecipeCode) -> None:
        from redline.bench.recipe import kernels

        code.shortens_launches = True
        code.bring_in("import functools", "from collections.abc import Callable", "from typing import Any")
        code.bring_in("import triton", "import triton.language as tl", "from torch.overrides import TorchFunctionMode")
        code.bring_in("from torch.nn.functional import linear, scaled_dot_product_attention")
        code.helpers.append(kernels.source())
        if self.switch.argument != "linear":
            code.model_lines.append("model = WithOneQueryAttention(model)")
        if self.switch.argument != "attention":
            ahead = self.switch.options.get("ahead_mib")
            limit = "" if ahead is None else f", {int(ahead) * 2**20}"
            code.decode_lines.append("begin(prompt.to(device))")
            code.decode_lines.append(f"use_row_products(model, lambda: forward(token, position){limit})")
