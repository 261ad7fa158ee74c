"""Switches for generating text: the cache made once, its number format, the prompt in chunks, int4 weights."""

from __future__ import annotations

from typing import ClassVar

import torch

from redline.bench.recipe.base import FLAGS, SWITCHES, RecipeCode, RecipeSwitch
from redline.bench.workload.decoder import Decoder, WholeGenerator
from redline.bench.workload.hf_decoder import HfDecoder, casting
from redline.bench.workload.step import Setup
from redline.errors import BenchError, SpecError
from redline.spec import OptionValue, Switch, Task
from redline.work import Facts

GENERATE: tuple[Task, ...] = ("generate",)
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


@SWITCHES.register("cache-dtype")
class CacheDtype(_ForDecoders):
    name = "cache-dtype"
    summary = "keys and values kept in another number format: cache-dtype:bf16, cache-dtype:fp16, cache-dtype:fp8"
    arguments = ("bf16", "fp16", "fp8")
    offered = ()

    _DTYPES: ClassVar[dict[str, torch.dtype]] = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp8": torch.float8_e4m3fn,
    }

    def __init__(self, switch: Switch) -> None:
        super().__init__(switch)
        if switch.argument is None:
            raise SpecError(
                f"switch cache-dtype needs a format: {', '.join(f'cache-dtype:{name}' for name in self.arguments)}"
            )

    def computes_in(self) -> str | None:
        return self.switch.argument

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
        if isinstance(model, HfDecoder) and model.has_encoder:
            return (
                "attention over the encoder's output reads its keys as they are kept, so that they cannot be cast back"
            )
        if not isinstance(model, HfDecoder):
            return "this model makes its own cache"
        return None if model.keeps_keys else "this model keeps a state and neither keys nor values"

    def apply(self, setup: Setup) -> None:
        decoder = self.decoder(setup)
        assert isinstance(decoder, HfDecoder)
        decoder.cache_dtype = self._DTYPES[self.switch.argument or "bf16"]

    def write(self, code: RecipeCode) -> None:
        code.cache.dtype = str(self._DTYPES[self.switch.argument or "bf16"])
        code.bring_in("from typing import Any")
        code.carry(casting)


@SWITCHES.register("prefill-chunk")
class PrefillChunk(_ForDecoders):
    name = "prefill-chunk"
    summary = "the prompt read in parts, which takes less memory: prefill-chunk:tokens=256"
    relieves = "memory"
    offered = ()

    def accept_options(self, options: dict[str, OptionValue]) -> None:
        tokens = options.get("tokens")
        if set(options) != {"tokens"} or not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise SpecError("switch prefill-chunk needs a number of tokens: prefill-chunk:tokens=256")

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
        if isinstance(model, HfDecoder) and model.has_encoder:
            return "an encoder reads the prompt at once, and the decoder begins with one token"
        return _AS_A_WHOLE if isinstance(model, WholeGenerator) else None

    def apply(self, setup: Setup) -> None:
        tokens = self.switch.options["tokens"]
        assert isinstance(tokens, int)
        self.decoder(setup).chunk = tokens

    def write(self, code: RecipeCode) -> None:
        tokens = self.switch.options["tokens"]
        assert isinstance(tokens, int)
        code.cache.chunk = tokens
