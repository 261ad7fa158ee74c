"""This module has decoders for models that write text: what a generation asks of a decoder, which decoder fits a model,
and the caches of transformers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from redline.bench.workload.called import parameters_of
from redline.bench.workload.inputs import seeded
from redline.bench.workload.structure import named_tensors
from redline.bench.workload.workload import Workload, assemble
from redline.model.errors import BenchError, SpecError
from redline.model.note import Note, note
from redline.model.spec import DEFAULT_NEW_TOKENS, DEFAULT_PROMPT, WorkloadSpec
from redline.model.work import CacheKind


def rotary_frequencies(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Returns where a model keeps the frequencies of rotary positions."""
    return [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]


def cast_weights(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Cast all but the frequencies of rotary positions, without which far positions are lost."""
    kept = rotary_frequencies(model)
    model.to(dtype)
    for module, name, buffer in kept:
        setattr(module, name, buffer)
    return model


@dataclass(frozen=True)
class WriterCode:
    """A snippet must know this of a model that writes."""

    new_tokens: int
    is_hf: bool
    takes_positions: bool = False


class Decoder(nn.Module):
    """This is a model with its prompt and its cache. `forward` returns the logits of the last position, and fills the cache."""

    can_be_static = True
    """The cache can be made once, in its final length, and written in place."""
    cache_length: int | None = None
    """A static cache has this many positions. If it is None, `length` says how many."""
    start: int | None = None
    """While the prompt is read, the tokens that are read next begin here. Later it is None, because only the device knows."""

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
        """Returns the length of the cache. It is one less than the text, because the last token is never read."""
        return self.prompt.shape[1] + self.new_tokens - 1

    @abstractmethod
    def begin(self) -> None:
        """Empties the cache. A static cache keeps its place in memory."""

    def forget(self) -> None:
        """Drops the cache. The next text gets one of the kind and number format that are asked for by then."""
        self._cache, self._has_static = None, False

    @abstractmethod
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor: ...

    def cache_tensors(self) -> Iterator[Tensor]:
        return (tensor for tensor, _ in self.cache_reads())

    def cache_reads(self) -> Iterator[tuple[Tensor, float]]:
        """Yields each tensor of the cache with the share of it that a decode step reads, on average over the text.

        A tensor that has as many positions as the cache is filled bit by bit. Others are read whole.
        """
        length = self.cache_length or self.length
        for _, tensor in named_tensors(self._cache):
            yield tensor, min(self.mean_filled / length, 1.0) if length in tensor.shape else 1.0

    @property
    def cache_kind(self) -> CacheKind:
        return "static" if self.is_static else "own"

    @property
    def mean_filled(self) -> float:
        """Returns the positions that a decode step reads on average, including its own."""
        return self.length - self.new_tokens / 2 + 1 if self.new_tokens > 1 else self.length

    def read_at_once(self, written: Tensor) -> Tensor:
        """Returns the logits after what was written so far, computed without a cache."""
        self.begin()
        text = torch.cat([self.prompt, written], dim=1)
        return self(text, torch.arange(text.shape[1], device=text.device))

    def decoding_parameters(self) -> list[Tensor]:
        """Returns the weights that every decoded token reads. Tables of which only a row is taken are left out, unless they
        are tied to a layer that reads them whole."""
        tables = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        layers = [module for module in self.modules() if not isinstance(module, nn.Embedding)]
        read = {id(weight) for module in layers for weight in module.parameters(recurse=False)}
        return [weight for weight in self.parameters() if id(weight) not in tables - read]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        """Keeps the frequencies of rotary positions in fp32, as transformers does, because rounding them loses far positions.

        Keys and values of a text that was read before are in the old format, or on the old device, so they are dropped.
        """
        self.forget()
        kept = rotary_frequencies(self)
        super()._apply(fn, recurse)
        for module, name, buffer in kept:
            setattr(module, name, buffer.to(getattr(module, name).device))
        return self


class OwnDecoder(Decoder):
    """This calls the user's own `forward(tokens, cache)`, which returns logits and the cache. The first call gets None as its cache.

    With a method `make_cache(batch, length)` the cache can be static: it is made once, and `forward` writes into it.
    """

    def __init__(self, model: nn.Module, prompt: Tensor, new_tokens: int) -> None:
        super().__init__(model, prompt, new_tokens)
        self.can_be_static = callable(getattr(model, "make_cache", None))
        self.takes_positions = "positions" in parameters_of(model.forward)
        self._width = 0

    def begin(self) -> None:
        if not self.is_static:
            self._cache = None
        elif not self._has_static:
            self._has_static = True
            self._cache = self.model.make_cache(self.prompt.shape[0], self.cache_length or self.length)  # type: ignore[operator]

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self.is_static and not self._has_static:
            self.begin()
        named = {"positions": positions} if self.takes_positions else {}
        found = self.model(tokens, self._cache, **named)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Tensor):
            message = type(found).__name__
            raise BenchError("user", f"forward(tokens, cache) must return (logits, cache), got {message}")
        logits, cache = found
        if not self.is_static:
            self._cache = cache
        width = self._width = self._width or logits.shape[-1]
        if logits.ndim not in (2, 3) or (len(logits), logits.shape[-1]) != (len(tokens), width):
            message = f"{'×'.join(map(str, logits.shape))} of {logits.dtype}"
            raise BenchError(
                "user",
                f"the logits of forward(tokens, cache) must be batch × tokens × vocabulary, or those of the last token; got {message}",
            )
        return logits[:, -1] if logits.ndim == 3 else logits


class NextToken(nn.Module):
    """This is a whole decode step: it reads the tokens chosen last, puts the next ones in their place and moves on.

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


def drawn_prompt(spec: WorkloadSpec, batch: int, vocabulary: int, seed: int) -> Tensor:
    with seeded(seed):
        return torch.randint(0, vocabulary, (batch, spec.prompt or DEFAULT_PROMPT))


def generator_workload(decoder: Decoder, *, source: str, identity: str, seed: int, notes: list[Note]) -> Workload:
    """Returns the workload of a decoder. Its step reads one token per sequence, and its items are tokens."""
    batch = decoder.prompt.shape[0]
    tokens = torch.zeros((batch, 1), dtype=torch.long)
    positions = torch.full((1,), decoder.length - decoder.new_tokens + 1, dtype=torch.long)
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
        notes=[*notes, note("prompt", text)],
    )
    workload.items = batch * decoder.new_tokens
    return workload


ENCODER = "--task generate measures causal models; time its own generate as a function (--task step)"
SEEN_TOKENS = 8
"""This many tokens of the prompt are enough to see whether a later one changes an earlier logit."""
SEEING = 1e-5
"""In a causal model an earlier logit may change by this share of the largest one, because sums are taken in another order."""


def written_in_place(cache: Any, cursor: dict[str, Any], length: int) -> Any:
    """Returns a static cache whose attention layers write where `cursor["positions"]` says, a tensor on the device.

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
            self.keys.index_copy_(2, cursor["positions"], keys.to(self.keys.dtype))
            self.values.index_copy_(2, cursor["positions"], values.to(self.values.dtype))
            return self.keys, self.values

        def get_seq_length(self) -> Any:
            start = cursor.get("start")
            return cursor["positions"][0] if start is None else start

    cache.layers = [Placed(max_cache_len=length) if own(layer) else layer for layer in cache.layers]
    return cache


def asks_the_host(step: Callable[[], Any]) -> bool:
    """Returns whether a step needs a value of the device on the host: it waits there, and no graph can be recorded of it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    asked = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.add(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        step()
    return torch.ops.aten._local_scalar_dense.default in asked


def cache_argument(model: nn.Module) -> str | None:
    """Returns the name under which the forward of a model of transformers takes its cache. State-space models use another name."""
    takes = parameters_of(model.forward)
    return next((name for name in ("past_key_values", "cache_params") if name in takes), None)


class HfDecoder(Decoder):
    """This is a causal model of transformers."""

    def __init__(self, model: nn.Module, prompt: Tensor, new_tokens: int) -> None:
        super().__init__(model, prompt, new_tokens)
        self._config: Any = model.config
        self._takes = parameters_of(model.forward)
        self._cache_argument = cache_argument(model) or "past_key_values"
        self._mask: Tensor | None = None
        self._cursor: dict[str, Any] = {}

    def begin(self) -> None:
        from transformers import DynamicCache, StaticCache

        if not self.is_static:
            self._cache = DynamicCache(config=self._config)
        elif self._has_static:
            self._cache.reset()
        else:
            length, self._mask, self._has_static = self.cache_length or self.length, None, True
            whole = StaticCache(config=self._config, max_cache_len=length)
            self._cache = written_in_place(whole, self._cursor, length)
            # Some models make a mask of as many positions as are filled. Only the device knows that number.
            token, position = self.prompt[:, :1], torch.zeros(1, dtype=torch.long, device=self.prompt.device)
            if "attention_mask" in self._takes and asks_the_host(lambda: self(token, position)):
                self._mask = torch.ones((len(token), length), dtype=torch.long, device=token.device)
            self._cache.reset()

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self._cache is None:
            self.begin()
        self._cursor |= {"positions": positions, "start": self.start}
        named: dict[str, Any] = {"input_ids": tokens, self._cache_argument: self._cache, "use_cache": True}
        if self._mask is not None and self.start is None:
            named["attention_mask"] = self._mask
        # `cache_position` is taken only by versions whose caches do not count by themselves.
        more = {"cache_position": positions, "position_ids": positions.unsqueeze(0), "logits_to_keep": 1}
        named |= {name: value for name, value in more.items() if name in self._takes}
        logits: Tensor = self.model(**named).logits
        return logits[:, -1]

    def cache_reads(self) -> Iterator[tuple[Tensor, float]]:
        """Yields each tensor with the share that is read. Keys and values are read as far as the text goes, other states whole."""
        for layer in getattr(self._cache, "layers", ()):
            for name, value in vars(layer).items():
                # The states of a layer that is not attention stand in a dict.
                for tensor in tree_leaves(value):
                    if isinstance(tensor, Tensor) and tensor.ndim > 1:
                        grows = name in ("keys", "values")
                        yield tensor, min(self.mean_filled / max(tensor.shape[-2], 1), 1.0) if grows else 1.0

    def sees_ahead(self) -> bool:
        """Returns whether another last token changes the logits of the first, as happens when attention goes both ways."""
        if self.prompt.shape[1] < 2:
            return False
        text = self.prompt[:, :SEEN_TOKENS]
        other = text.clone()
        other[:, -1] = (other[:, -1] + 1) % self.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        one, another = (self.model(input_ids=tokens, use_cache=False).logits[:, 0] for tokens in (text, other))
        return bool((one - another).abs().max() > SEEING * one.abs().max())

    @property
    def cache_kind(self) -> CacheKind:
        """Returns `state` if no layer keeps keys and values after one token."""
        if self._cache is None:
            with torch.no_grad():
                self(self.prompt[:, :1], torch.zeros(1, dtype=torch.long, device=self.prompt.device))
        if not any(isinstance(getattr(layer, "keys", None), Tensor) for layer in getattr(self._cache, "layers", ())):
            return "state"
        return "static" if self.is_static else "growing"


def writer_code(decoder: Decoder) -> WriterCode:
    """Returns what a snippet needs to write text with a model that was built."""
    takes_positions = isinstance(decoder, OwnDecoder) and decoder.takes_positions
    return WriterCode(decoder.new_tokens, isinstance(decoder, HfDecoder), takes_positions)


def own_decoder(model: nn.Module, spec: WorkloadSpec, batch: int, seed: int, whose: str) -> Decoder:
    """Returns the decoder that the model's forward allows: one that takes the user's own cache, or that of
    transformers. Another model is refused."""
    prompt = drawn_prompt(spec, batch, _vocabulary(model, whose), seed)
    new_tokens, takes = spec.new_tokens or DEFAULT_NEW_TOKENS, parameters_of(model.forward)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise SpecError(f"{whose} has an encoder: {ENCODER}")
    if cache_argument(model) is not None and hasattr(model, "config"):
        return HfDecoder(model, prompt, new_tokens)
    if "cache" in takes:
        return OwnDecoder(model, prompt, new_tokens)
    raise SpecError(
        f"{whose} has no cache: give it forward(tokens, cache) that returns (logits, cache), or time its own generate as a "
        "function (--task step)"
    )


def _vocabulary(model: nn.Module, whose: str) -> int:
    """Returns the module's `vocab_size`, the one in its config, or the size of its first embedding."""
    said = [getattr(part, "vocab_size", None) for part in (model, getattr(model, "config", None))]
    tables = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)]
    found = next((size for size in (*said, *tables) if isinstance(size, int)), None)
    if found is None:
        raise SpecError(f"{whose}: the model has no vocab_size, so that no prompt can be drawn")
    return found
