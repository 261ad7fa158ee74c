"""This module has the timed step of generation: the prompt is read, then tokens are decoded one after the other, greedily."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from redline.bench.workload.decoder import Decoder, NextToken
from redline.bench.workload.step import Mark, Setup, no_mark
from redline.bench.workload.workload import Workload
from redline.model.errors import BenchError

RECORD_WARMUPS = 3
"""This many decode steps run before one is recorded, because first calls may allocate memory and load kernels."""


@dataclass(frozen=True)
class Timing:
    """These are the seconds of one generation."""

    first_s: float
    """This is the time to the first token."""
    whole_s: float
    issue_s: float
    """The host needs this long to issue the prefill and all decode steps, if each takes as long as the first."""
    token_issue_s: float
    """It takes this long to issue the first decode step. Later ones may wait until the device's queue has room."""
    token_s: Sequence[float]
    """These are the times from each token to the next."""


class GenerateStep:
    """One call is one generation: a prefill, then a decode step per further token."""

    phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")

    def __init__(self, setup: Setup) -> None:
        assert isinstance(setup.workload.model, Decoder)
        self._setup = setup
        self.decoder: Decoder = setup.workload.model
        # The reference and the checks of switches have left a cache in their own number format.
        self.decoder.forget()
        device = self.decoder.prompt.device
        self._tokens = torch.zeros((self.decoder.prompt.shape[0], 1), dtype=torch.long, device=device)
        self._positions = torch.zeros(1, dtype=torch.long, device=device)
        if setup.capabilities.compiles:
            # The tokens and positions keep their addresses, so that a graph of the compiler's own may write into them.
            for tensor in (self._tokens, self._positions):
                torch._dynamo.mark_static_address(tensor)
        self._next = NextToken(setup.model) if setup.decode is None else setup.decode
        self._logits: Tensor | None = None
        self._recorded_logits: Tensor | None = None
        self._replay: Any = None

    @property
    def workload(self) -> Workload:
        return self._setup.workload

    def context(self) -> AbstractContextManager[Any]:
        # Under inference mode the cache would consist of tensors that a compiled program may not write into later.
        return torch.no_grad()

    def recover(self) -> None:
        """Does nothing, because every generation begins with an empty cache."""

    def __call__(self, mark: Mark = no_mark) -> Tensor:
        return self.write(self.decoder.new_tokens, mark)

    def plain(self, mark: Mark = no_mark) -> Callable[[], Any]:
        return partial(self, mark)

    def write(self, count: int, mark: Mark = no_mark) -> Tensor:
        """Writes `count` tokens, chosen greedily."""
        self.prefill()
        mark()
        tokens = [self._tokens.clone()]
        for _ in range(count - 1):
            self.decode()
            tokens.append(self._tokens.clone())
        mark()
        return torch.cat(tokens, dim=1)

    def prefill(self) -> None:
        """Reads the prompt and chooses the first token."""
        decoder, model = self.decoder, self._setup.model
        with self._setup.autocast():
            decoder.begin()
            read = decoder.prompt
            decoder.start = 0
            logits = model(read, torch.arange(read.shape[1], device=read.device))
        decoder.start, self._logits = None, logits
        self._tokens.copy_(logits.argmax(dim=-1, keepdim=True))
        self._positions.fill_(read.shape[1])

    def decode(self) -> None:
        """Reads the token chosen last and chooses the next."""
        if not self._setup.records_decode:
            self._decode()
            return
        if self._replay is None:
            self._record()
        self._replay()
        self._logits = self._recorded_logits

    def decode_eagerly(self) -> None:
        """Takes a decode step as the model's own code does, without compiler or graph."""
        with self._setup.autocast():
            NextToken(self._setup.model)(self._tokens, self._positions)

    def _decode(self) -> None:
        for prepare in self._setup.before_step:
            prepare()
        with self._setup.autocast():
            self._logits = self._next(self._tokens, self._positions)

    def _record(self) -> None:
        """Records a decode step as a graph, right after a prefill. The prefill is repeated afterwards, because
        recording writes into the cache."""
        if self.decoder.length < RECORD_WARMUPS + 2:
            raise BenchError("unsupported", f"graphs: {self.decoder.length} positions are too few to record a step")
        token, position = self._tokens.clone(), self._positions.clone()
        self.decoder.begin()
        # The positions begin at zero, so that the steps before recording stay within the cache.
        self._positions.zero_()
        self._replay, _ = self._setup.device.record_graph(self._decode, RECORD_WARMUPS)
        self._recorded_logits = self._logits
        self.prefill()
        self._tokens.copy_(token)
        self._positions.copy_(position)

    def forced(self, tokens: Tensor) -> list[Tensor]:
        """Returns the logits of each step when the tokens are given instead of chosen."""
        found = []
        self.prefill()
        for step in range(tokens.shape[1]):
            assert self._logits is not None
            found.append(self._logits.detach().float().clone())
            if step + 1 < tokens.shape[1]:
                self._tokens.copy_(tokens[:, step : step + 1])
                self.decode()
        return found

    def timed(self) -> Timing:
        """Runs one generation, begun on an idle device. Nothing waits for the device between two tokens."""
        device, clock = self._setup.device, time.perf_counter
        started = clock()
        self.prefill()
        issued = clock()
        device.synchronize()
        first_at = clock()
        marks, token_issue_s = [device.mark()], 0.0
        for number in range(self.decoder.new_tokens - 1):
            self.decode()
            if number == 0:
                token_issue_s = clock() - first_at
            marks.append(device.mark())
        device.synchronize()
        whole_s = clock() - started
        issue_s = issued - started + (len(marks) - 1) * token_issue_s
        return Timing(first_at - started, whole_s, issue_s, token_issue_s, device.seconds_between(marks))
