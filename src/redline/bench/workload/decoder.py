"""Models that generate text token by token: one forward that reads tokens and keeps a cache, whoever wrote the model."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from redline.bench.workload.called import parameters_of
from redline.bench.workload.inputs import seeded
from redline.bench.workload.structure import named_tensors
from redline.bench.workload.workload import Workload, assemble
from redline.model.errors import BenchError
from redline.model.note import Note, note
from redline.model.spec import DEFAULT_PROMPT, WorkloadSpec
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
    """Its cache can be made once, as long as it will get, and written in place."""
    cache_length: int | None = None
    """The positions of a static cache, if not as many as the text has."""
    start: int | None = None
    """Where the tokens that are read next begin, while the prompt is read. Later only the device knows (None)."""

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
        """The length of the cache: the last token is never read."""
        return self.prompt.shape[1] + self.new_tokens - 1

    @abstractmethod
    def begin(self) -> None:
        """Empty the cache; a static one stays where it is."""

    def forget(self) -> None:
        """Drop the cache: the next text gets one of the kind and number format that are asked for by then."""
        self._cache, self._has_static = None, False

    @abstractmethod
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor: ...

    def cache_tensors(self) -> Iterator[Tensor]:
        return (tensor for tensor, _ in self.cache_reads())

    def cache_reads(self) -> Iterator[tuple[Tensor, float]]:
        """Returns each tensor of the cache with the share of it that a decode step reads, on average over the text.

        A tensor that has as many positions as the cache is filled bit by bit; others are read whole.
        """
        length = self.cache_length or self.length
        for _, tensor in named_tensors(self._cache):
            yield tensor, min(self.mean_filled / length, 1.0) if length in tensor.shape else 1.0

    @property
    def cache_kind(self) -> CacheKind:
        return "static" if self.is_static else "own"

    @property
    def mean_filled(self) -> float:
        """The positions that a decode step reads on average, its own included."""
        return self.length - self.new_tokens / 2 + 1 if self.new_tokens > 1 else self.length

    def first_tokens(self) -> Tensor:
        """Returns what the first forward reads, once `begin` was called."""
        return self.prompt

    def read_at_once(self, written: Tensor) -> Tensor:
        """Returns the logits after what was written so far, without the help of a cache."""
        self.begin()
        text = torch.cat([self.first_tokens(), written], dim=1)
        return self(text, torch.arange(text.shape[1], device=text.device))

    def decoding_parameters(self) -> list[Tensor]:
        """Returns the weights that every decoded token reads: all but tables of which a row is taken, unless they are tied
        to a layer that reads them whole."""
        tables = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        layers = [module for module in self.modules() if not isinstance(module, nn.Embedding)]
        read = {id(weight) for module in layers for weight in module.parameters(recurse=False)}
        return [weight for weight in self.parameters() if id(weight) not in tables - read]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        """Frequencies of rotary positions stay in fp32, as transformers keeps them: rounded, far positions are lost.

        Keys and values of a text that was read before are in the old format, or on the old device: they are dropped.
        """
        self.forget()
        kept = rotary_frequencies(self)
        super()._apply(fn, recurse)
        for module, name, buffer in kept:
            setattr(module, name, buffer.to(getattr(module, name).device))
        return self


class OwnDecoder(Decoder):
    """The user's own `forward(tokens, cache)`, which returns logits and the cache; the first call gets None.

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
            told = type(found).__name__
            raise BenchError("user", f"forward(tokens, cache) must return (logits, cache), got {told}")
        logits, cache = found
        if not self.is_static:
            self._cache = cache
        width = self._width = self._width or logits.shape[-1]
        if logits.ndim not in (2, 3) or (len(logits), logits.shape[-1]) != (len(tokens), width):
            told = f"{'×'.join(map(str, logits.shape))} of {logits.dtype}"
            raise BenchError(
                "user",
                f"the logits of forward(tokens, cache) must be batch × tokens × vocabulary, or those of the last token; got {told}",
            )
        return logits[:, -1] if logits.ndim == 3 else logits


class WholeGenerator(Decoder):
    """A model that only generates as a whole: `generate(tokens, max_new_tokens)`.

    It returns the tokens of all sequences, alone or as `sequences`, or yields those of one position after the other.
    """

    can_be_static = False

    def begin(self) -> None:
        """It keeps no cache that could be seen."""

    def asked(self, new_tokens: int) -> Any:
        """Returns what its `generate` does."""
        generate: Callable[..., Any] = self.model.generate  # type: ignore[assignment]
        takes = parameters_of(generate)
        by_name = "max_new_tokens" in takes or any(one.kind is one.VAR_KEYWORD for one in takes.values())
        return generate(self.prompt, max_new_tokens=new_tokens) if by_name else generate(self.prompt, new_tokens)

    def generate(self, new_tokens: int) -> Tensor:
        made, length = self.asked(new_tokens), self.prompt.shape[1]
        if inspect.isgenerator(made):
            made = torch.stack([torch.as_tensor(part).reshape(-1) for part in made], dim=1)
        made = made.get("sequences", made) if isinstance(made, dict) else getattr(made, "sequences", made)
        with suppress(TypeError, ValueError, RuntimeError):  # ragged, or no numbers
            made = torch.as_tensor(made).to(self.prompt)
        is_text = isinstance(made, Tensor) and made.ndim == 2 and len(made) == len(self.prompt)
        # transformers returns the text with the prompt in front.
        after = is_text and made.shape[1] > length and torch.equal(made[:, :length], self.prompt)
        made = made[:, length:] if after else made
        if not is_text or made.shape[1] < new_tokens:
            told = "×".join(map(str, made.shape)) if isinstance(made, Tensor) else type(made).__name__
            why = f"{' after the prompt' if after else ''}{'; no text may end early' if is_text else ''}"
            called = f"generate(tokens, max_new_tokens={new_tokens})"
            raise BenchError(
                "user", f"{called} must return {self.prompt.shape[0]}×{new_tokens} or longer, got {told}{why}"
            )
        return made[:, -new_tokens:]

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        raise BenchError("unsupported", "this model generates as a whole: its forward with a cache is not known")

    @property
    def cache_kind(self) -> CacheKind:
        return "unseen"


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


def drawn_prompt(spec: WorkloadSpec, batch: int, vocabulary: int, seed: int) -> Tensor:
    with seeded(seed):
        return torch.randint(0, vocabulary, (batch, spec.prompt or DEFAULT_PROMPT))


def generator_workload(decoder: Decoder, *, source: str, identity: str, seed: int, notes: list[Note]) -> Workload:
    """Returns the workload of a decoder: its step reads one token per sequence; its items are tokens."""
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
