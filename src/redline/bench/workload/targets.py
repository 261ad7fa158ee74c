"""Random targets for outputs that come without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Targets:
    """Random targets, drawn once per output and kept on its device."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: dict[tuple[Any, ...], Tensor] = {}
        self.part: tuple[Sequence[int], int] | None = None
        """For a rank: its rows, and the size of the global batch they are drawn for."""

    def classes(self, name: str, logits: Tensor) -> Tensor:
        """One class per item, per position (N, T, V) or per pixel (N, C, H, W)."""
        axis = 2 if logits.ndim == 3 else 1
        shape = tuple(size for dimension, size in enumerate(logits.shape) if dimension != axis)

        def draw(generator: torch.Generator) -> Tensor:
            return self._part_of(shape, lambda whole: torch.randint(0, logits.shape[axis], whole, generator=generator))

        return self._keep(("classes", name, *logits.shape), logits, draw)

    def values(self, name: str, logits: Tensor) -> Tensor:
        """Values of the output's shape between 0 and 1, which suit regression and binary cross-entropy alike."""

        def draw(generator: torch.Generator) -> Tensor:
            return self._part_of(tuple(logits.shape), lambda whole: torch.rand(whole, generator=generator)).to(
                logits.dtype
            )

        return self._keep(("values", name, str(logits.dtype), *logits.shape), logits, draw)

    def _part_of(self, shape: tuple[int, ...], draw: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """Targets of this shape: a rank draws those of the global batch, and keeps its own."""
        if self.part is None or not shape or shape[0] != len(self.part[0]):
            return draw(shape)
        rows, size = self.part
        return draw((size, *shape[1:])).index_select(0, torch.tensor(rows))

    def _keep(self, what: tuple[Any, ...], like: Tensor, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
        key = (*what, str(like.device))
        # What a fake tensor mode draws must not outlive it, and what is kept must not enter it.
        fake = isinstance(like, FakeTensor)
        if not fake and key in self._kept:
            return self._kept[key]
        # inference_mode(False): a tensor made under inference mode could never take part in autograd.
        with torch.inference_mode(False):
            targets = draw(torch.Generator().manual_seed(self._seed)).to(like.device)
        if not fake:
            self._kept[key] = targets
        return targets
