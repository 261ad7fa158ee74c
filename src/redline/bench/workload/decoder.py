"""Models that generate text token by token: one forward that reads tokens and keeps a cache, whoever wrote the model."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from redline.bench.workload.inputs import seeded
from redline.bench.workload.workload import Workload, assemble
from redline.errors import BenchError, SpecError
from redline.note import Note, note
from redline.spec import DEFAULT_NEW_TOKENS, DEFAULT_PROMPT, WorkloadSpec


def rotary_frequencies(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Where a model keeps the frequencies of rotary positions."""
    return [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]


def cast_weights(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """In another number format, all but the frequencies of rotary positions: rounded, far positions are lost."""
    kept = rotary_frequencies(model)
    model.to(dtype)
    for module, name, buffer in kept:
        setattr(module, name, buffer)
    return model


def casting(kind: Any, dtype: torch.dtype) -> Any:
    """A kind of cache that keeps keys and values in `dtype` and gives them back in the model's."""

    class Casting(kind):
        def update(self, keys: Any, values: Any, *args: Any, **named: Any) -> Any:
            kept = super().update(keys.to(dtype), values.to(dtype), *args, **named)
            return kept[0].to(keys.dtype), kept[1].to(values.dtype)

    return Casting


def written_in_place(cache: Any, place: dict[str, Any], length: int) -> Any:
    """A static cache whose attention layers write where `place["positions"]` says, a tensor on the device.

    Layers of transformers count for themselves instead, with a kernel each for every token. Those of a sliding window
    count on the host, so that a compiler compiles every token anew and a recorded step never slides: they get all
    positions here, and the mask hides what lies outside of the window. Other layers, and versions of transformers
    whose forward takes `cache_position`, stay as they are.
    """
    from transformers import cache_utils

    def own(layer: Any) -> bool:
        kinds = (cache_utils.StaticLayer, getattr(cache_utils, "StaticSlidingWindowLayer", None))
        return type(layer) in kinds and hasattr(layer, "cumulative_length")

    class Placed(cache_utils.StaticLayer):
        def update(self, keys: Any, values: Any, *args: Any, **named: Any) -> Any:
            if not self.is_initialized:
                self.lazy_initialization(keys, values)
            # Under autocast keys may be fp32, by their rotation, and values not; a layer has one number format.
            self.keys.index_copy_(2, place["positions"], keys.to(self.keys.dtype))
            self.values.index_copy_(2, place["positions"], values.to(self.values.dtype))
            return self.keys, self.values

        def get_seq_length(self) -> Any:
            return place["positions"][0]

    cache.layers = [Placed(max_cache_len=length) if own(layer) else layer for layer in cache.layers]
    return cache


WriterKind = Literal["causal", "encoder-decoder", "own", "whole"]


@dataclass(frozen=True)
class WriterCode:
    """What a snippet must know of a model that writes."""

    kind: WriterKind
    new_tokens: int
    start: int = 0
    """The token with which the decoder behind an encoder begins."""
    takes_positions: bool = False

    @property
    def is_hf(self) -> bool:
        return self.kind in ("causal", "encoder-decoder")


class Decoder(nn.Module):
    """A model with its prompt and its cache. `forward` gives the logits of the last position, and fills the cache."""

    can_be_static = True
    """Whether its cache can be made once, as long as it will get, and written in place."""
    chunk: int | None = None
    """Prompt tokens per forward of the prefill; None: all at once."""
    cache_length: int | None = None
    """Positions of a static cache; None: as many as the text has."""
    cache_dtype: torch.dtype | None = None
    """In which keys and values are kept; None: in the model's."""

    def __init__(self, model: nn.Module, prompt: Tensor, new_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.new_tokens = new_tokens
        self.is_static = False
        self._cache: Any = None
        self._has_static = False
        self.register_buffer("prompt", prompt, persistent=False)

    prompt: Tensor

    @property
    def length(self) -> int:
        """Of the cache: the last token is never read."""
        return self.prompt.shape[1] + self.new_tokens - 1

    @abstractmethod
    def begin(self) -> None:
        """Empty the cache; a static one stays where it is."""

    def forget(self) -> None:
        """Drop the cache: the next text gets one of the kind and number format that are asked for by then."""
        self._cache, self._has_static = None, False

    @abstractmethod
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor: ...

    @abstractmethod
    def cache_tensors(self) -> Iterator[Tensor]: ...

    def cache_reads(self) -> Iterator[tuple[Tensor, float]]:
        """Each tensor of the cache with the share of it that a decode step reads, on average over the text.

        A tensor that has as many positions as the cache is filled bit by bit; others are read whole.
        """
        length = self.cache_length or self.length
        for tensor in self.cache_tensors():
            yield tensor, min(self.mean_filled / length, 1.0) if length in tensor.shape else 1.0

    @property
    def mean_filled(self) -> float:
        """Positions that a decode step reads on average, its own included."""
        return self.length - self.new_tokens / 2 + 1 if self.new_tokens > 1 else self.length

    def first_tokens(self) -> Tensor:
        """What the first forward reads, once `begin` was called."""
        return self.prompt

    def read_at_once(self, written: Tensor) -> Tensor:
        """The logits after what was written so far, without the help of a cache."""
        self.begin()
        text = torch.cat([self.first_tokens(), written], dim=1)
        return self(text, torch.arange(text.shape[1], device=text.device))

    def decoding_parameters(self) -> list[Tensor]:
        """Weights that every decoded token reads: all but tables of which a row is taken, unless they are tied to a
        layer that reads them whole."""
        tables = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        read = {
            id(weight)
            for module in self.modules()
            if not isinstance(module, nn.Embedding)
            for weight in module.parameters(recurse=False)
        }
        return [weight for weight in self.parameters() if id(weight) not in tables or id(weight) in read]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        """Frequencies of rotary positions stay in fp32, as transformers keeps them: rounded, far positions are lost.

        Keys and values of a text that was read before are in the old format, or on the old device.
        """
        self.forget()
        kept = rotary_frequencies(self)
        super()._apply(fn, recurse)
        for module, name, buffer in kept:
            setattr(module, name, buffer.to(getattr(module, name).device))
        return self


def cache_argument(model: nn.Module) -> str | None:
    """What the forward of a model of transformers calls its cache; those of state-space models call it otherwise."""
    takes = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache_params") if name in takes), None)


class HfDecoder(Decoder):
    """A causal or encoder–decoder model of transformers."""

    def __init__(self, model: nn.Module, prompt: Tensor, new_tokens: int) -> None:
        super().__init__(model, prompt, new_tokens)
        self._config: Any = model.config
        self._takes = set(inspect.signature(model.forward).parameters)
        self._cache_argument = cache_argument(model) or "past_key_values"
        self.has_encoder = bool(getattr(self._config, "is_encoder_decoder", False))
        self._encoded: Any = None
        self._place: dict[str, Tensor] = {}

    @property
    def length(self) -> int:
        return self.new_tokens if self.has_encoder else super().length

    def begin(self) -> None:
        if self.is_static and self._has_static:
            self._cache.reset()
        else:
            self._cache, self._encoded, self._has_static = self._new_cache(), None, self.is_static
        if self.has_encoder:
            encoded = self.model.get_encoder()(input_ids=self.prompt)  # type: ignore[operator]
            if self._encoded is not None:
                self._encoded[0].copy_(encoded[0])  # where a recorded graph reads it
            else:
                self._encoded = encoded

    def _new_cache(self) -> Any:
        from transformers import DynamicCache, EncoderDecoderCache, StaticCache

        def cache(length: int) -> Any:
            kind = StaticCache if self.is_static else DynamicCache
            kind = kind if self.cache_dtype is None else casting(kind, self.cache_dtype)
            return kind(config=self._config, max_cache_len=length) if self.is_static else kind(config=self._config)

        length = self.cache_length or self.length
        own = written_in_place(cache(length), self._place, length) if self.is_static else cache(length)
        # What is kept of the encoder's output is written once, as long as that is.
        return EncoderDecoderCache(own, cache(self.prompt.shape[1])) if self.has_encoder else own

    def first_tokens(self) -> Tensor:
        if not self.has_encoder:
            return self.prompt
        start = start_token(self._config)
        return torch.full((self.prompt.shape[0], 1), start, device=self.prompt.device)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self._cache is None:
            self.begin()
        self._place["positions"] = positions
        named: dict[str, Any] = {self._cache_argument: self._cache, "use_cache": True}
        if "cache_position" in self._takes:  # versions whose caches do not count by themselves
            named["cache_position"] = positions
        if self.has_encoder:
            named |= {"decoder_input_ids": tokens, "encoder_outputs": self._encoded}
        else:
            named["input_ids"] = tokens
            if "position_ids" in self._takes:
                named["position_ids"] = positions.unsqueeze(0)
            if "logits_to_keep" in self._takes:
                named["logits_to_keep"] = 1
        logits: Tensor = self.model(**named).logits
        return logits[:, -1]

    def cache_tensors(self) -> Iterator[Tensor]:
        return (tensor for tensor, _ in self.cache_reads())

    def cache_reads(self) -> Iterator[tuple[Tensor, float]]:
        """Keys and values of the text so far; what else a layer keeps, and what it keeps of the encoder, is read whole."""
        whole = self.has_encoder and self._cache is not None
        own = self._cache.self_attention_cache if whole else self._cache
        others = getattr(self._cache.cross_attention_cache, "layers", ()) if whole else ()
        for layer in (*getattr(own, "layers", ()), *others):
            for name, value in vars(layer).items():
                grows = name in ("keys", "values") and not any(layer is other for other in others)
                for tensor in tree_leaves(value):  # states of a layer that is no attention stand in a dict
                    if isinstance(tensor, Tensor) and tensor.ndim > 1:
                        yield tensor, min(self.mean_filled / max(tensor.shape[-2], 1), 1.0) if grows else 1.0

    def decoding_parameters(self) -> list[Tensor]:
        weights = super().decoding_parameters()
        if not self.has_encoder:
            return weights
        inside = {id(weight) for weight in self.model.get_encoder().parameters()}  # type: ignore[operator]
        shared = {id(weight) for weight in self.model.get_decoder().parameters()}  # type: ignore[operator]
        return [weight for weight in weights if id(weight) not in inside or id(weight) in shared]


class OwnDecoder(Decoder):
    """The user's own `forward(tokens, cache)`, which returns logits and the cache; the first call gets None.

    With a method `make_cache(batch, length)` the cache can be static: it is made once, and `forward` writes into it.
    """

    def __init__(self, model: nn.Module, prompt: Tensor, new_tokens: int) -> None:
        super().__init__(model, prompt, new_tokens)
        self.can_be_static = callable(getattr(model, "make_cache", None))
        self.takes_positions = "positions" in inspect.signature(model.forward).parameters

    def begin(self) -> None:
        if not self.is_static:
            self._cache = None
        elif not self._has_static:
            self._cache = self.model.make_cache(self.prompt.shape[0], self.cache_length or self.length)  # type: ignore[operator]
            self._has_static = True

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self.is_static and not self._has_static:
            self.begin()
        named = {"positions": positions} if self.takes_positions else {}
        found = self.model(tokens, self._cache, **named)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Tensor):
            told = type(found).__name__
            raise BenchError("user", f"forward(tokens, cache) must return (logits, cache), got {told}")
        logits, cache = found
        if not self.is_static:
            self._cache = cache
        return logits[:, -1] if logits.ndim == 3 else logits

    def cache_tensors(self) -> Iterator[Tensor]:
        from redline.bench.workload.structure import named_tensors

        for _, tensor in named_tensors(self._cache):
            yield tensor


class WholeGenerator(Decoder):
    """A model that only generates as a whole: `generate(tokens, max_new_tokens=n)`."""

    can_be_static = False

    def begin(self) -> None:
        """It keeps no cache that could be seen."""

    def generate(self, new_tokens: int) -> Tensor:
        made: Tensor = self.model.generate(self.prompt, max_new_tokens=new_tokens)  # type: ignore[operator]
        if not isinstance(made, Tensor) or made.ndim != 2 or made.shape[1] < new_tokens:
            told = "×".join(map(str, made.shape)) if isinstance(made, Tensor) else type(made).__name__
            asked = f"{self.prompt.shape[0]}×{new_tokens} or longer"
            raise BenchError("user", f"generate(tokens, max_new_tokens={new_tokens}) must return {asked}, got {told}")
        return made[:, -new_tokens:]

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        raise BenchError("unsupported", "this model generates as a whole: its forward with a cache is not known")

    def cache_tensors(self) -> Iterator[Tensor]:
        return iter(())


class NextToken(nn.Module):
    """A decode step as a whole: reads the tokens chosen last, puts the next ones in their place and moves on.

    One program, so that a compiler sees the choice and the counting too.
    """

    def __init__(self, model: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits = self.model(tokens, positions)
        tokens.copy_(logits.argmax(dim=-1, keepdim=True))
        positions.add_(1)
        return logits


def start_token(config: Any) -> int:
    return getattr(config, "decoder_start_token_id", None) or 0


def writer_code(decoder: Decoder) -> WriterCode:
    """Of a model that was built."""
    if isinstance(decoder, WholeGenerator):
        return WriterCode("whole", decoder.new_tokens)
    if isinstance(decoder, OwnDecoder):
        return WriterCode("own", decoder.new_tokens, takes_positions=decoder.takes_positions)
    assert isinstance(decoder, HfDecoder)
    return hf_writer(decoder.model.config, decoder.new_tokens)


def hf_writer(config: Any, new_tokens: int) -> WriterCode:
    has_encoder = bool(getattr(config, "is_encoder_decoder", False))
    return WriterCode("encoder-decoder" if has_encoder else "causal", new_tokens, start_token(config))


def own_decoder(model: nn.Module, spec: WorkloadSpec, batch: int, seed: int, whose: str) -> Decoder:
    """By what the model can do: a forward that takes a cache, its own or transformers', else a `generate`."""
    prompt = drawn_prompt(spec, batch, _vocabulary(model, whose), seed)
    new_tokens = spec.new_tokens or DEFAULT_NEW_TOKENS
    try:
        parameters = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        parameters = []
    if {"past_key_values", "cache_params"} & set(parameters) and hasattr(model, "config"):
        return HfDecoder(model, prompt, new_tokens)
    if "cache" in parameters:
        return OwnDecoder(model, prompt, new_tokens)
    if callable(getattr(model, "generate", None)):
        return WholeGenerator(model, prompt, new_tokens)
    raise SpecError(
        f"{whose} has no cache: give it forward(tokens, cache) that returns (logits, cache), or generate(tokens, "
        f"max_new_tokens)"
    )


def _vocabulary(model: nn.Module, whose: str) -> int:
    """By the module's `vocab_size`, its config's, or the size of its first embedding."""
    said = [getattr(part, "vocab_size", None) for part in (model, getattr(model, "config", None))]
    tables = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)]
    found = next((size for size in (*said, *tables) if isinstance(size, int)), None)
    if found is None:
        raise SpecError(f"{whose}: the model has no vocab_size, so that no prompt can be drawn")
    return found


def drawn_prompt(spec: WorkloadSpec, batch: int, vocabulary: int, seed: int) -> Tensor:
    with seeded(seed):
        return torch.randint(0, vocabulary, (batch, spec.prompt or DEFAULT_PROMPT))


def generator_workload(decoder: Decoder, *, source: str, identity: str, seed: int, notes: list[Note]) -> Workload:
    """The workload of a decoder: its step reads one token per sequence; its items are tokens."""
    batch = decoder.prompt.shape[0]
    tokens = torch.zeros((batch, 1), dtype=torch.long)
    positions = torch.full((1,), decoder.prompt.shape[1], dtype=torch.long)
    text = f"prompt of {decoder.prompt.shape[1]} tokens, {decoder.new_tokens} new ones"
    workload = assemble(
        decoder.eval(),
        ((tokens, positions), {}),
        task="generate",
        source=source,
        identity=f"{identity} {tuple(decoder.prompt.shape)} {decoder.new_tokens}",
        seed=seed,
        batch=batch,
        item="tok",
        notes=[*notes, note("model", text)],
    )
    workload.items = batch * decoder.new_tokens
    return workload
