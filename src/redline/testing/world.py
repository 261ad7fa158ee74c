"""`FakeWorld`: one machine in virtual time, for all fake workers on it."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from redline.model.record import Epoch

Floats = NDArray[np.float64]


class FakeWorld:
    """What all sessions of a door share: the clock, the drift and the device, which one of them ran on last."""

    def __init__(self, drift_sigma: float, seed: int) -> None:
        self.clock_s = 0.0
        self.preparing_until_s: list[float] = []
        """When each of those that are being prepared will be ready."""
        self.helping: Counter[str] = Counter()
        """Workers that help to compile a recipe."""
        self.ran_last: object = None
        self.log_drift = 0.0
        self.checkpoints: dict[str, list[Epoch]] = {}
        self._sigma = drift_sigma
        self._random = np.random.default_rng([seed, 0])

    def advance(self, seconds: float) -> None:
        self.clock_s += seconds
        if self._sigma:
            self.log_drift += self._sigma * math.sqrt(seconds) * float(self._random.standard_normal())

    def walk(self, count: int, step_s: float) -> Floats:
        """The drift during `count` steps of about so long; the caller moves the clock once it knows how long exactly."""
        if not self._sigma:
            return np.zeros(count)
        strides = self._sigma * math.sqrt(step_s) * self._random.standard_normal(count)
        path: Floats = self.log_drift + np.cumsum(strides)
        self.log_drift = float(path[-1])
        return path
