"""Models that write text, each in its own way: with a cache of its own, with one made beforehand, without."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH = 64, 32


class Summing(nn.Module):
    """Keeps the sum of what it has read: the smallest cache there is."""

    vocab_size = VOCABULARY

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, cache: Tensor | None) -> tuple[Tensor, Tensor]:
        read = self.table(tokens).cumsum(dim=1)
        if cache is not None:
            read = read + cache[:, None]
        return self.head(torch.tanh(read)), read[:, -1]


class Placed(Summing):
    """Writes what it has read into a cache that was made beforehand."""

    def make_cache(self, batch: int, length: int) -> Tensor:
        return torch.zeros(batch, WIDTH, device=self.head.weight.device, dtype=self.head.weight.dtype)

    def forward(self, tokens: Tensor, cache: Tensor | None, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert positions is not None
        held = None if cache is None else cache * (positions[0] > 0)  # the first call of a text begins anew
        logits, kept = super().forward(tokens, held)
        if cache is None:
            return logits, kept
        return logits, cache.copy_(kept)


class Short(Summing):
    """Knows twelve positions, and does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(12, WIDTH)

    def forward(self, tokens: Tensor, cache: Tensor | None, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits, kept = super().forward(tokens, cache)
        return logits + self.places(positions).sum(), kept


class Cacheless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class Small(Summing):
    """Its cache has room for three positions, whatever it is asked for."""

    def make_cache(self, batch: int, length: int) -> Tensor:
        return torch.zeros(batch, 3, WIDTH)

    def forward(self, tokens: Tensor, cache: Tensor | None, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        read = self.table(tokens)
        if cache is None:
            return self.head(read), read
        assert positions is not None
        cache.index_copy_(1, positions, read)
        return self.head(cache.sum(dim=1, keepdim=True)), cache


summing, placed, short, cacheless, small = Summing, Placed, Short, Cacheless, Small
