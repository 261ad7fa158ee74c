"""Timers by hand, as a careful person would put them into a training script."""

from __future__ import annotations

import json
import time


class Own:
    def __init__(self) -> None:
        self.steps = self.samples = 0
        self.skipped = 0
        """Steps before the first that was timed: they compile."""
        self.waited = self.trained = 0.0
        self.validated = self.acted = 0.0
        """Seconds of the whole run; acting is part of the training."""

    def begin(self) -> None:
        self._began = self._mark = time.perf_counter()

    def got(self) -> None:
        """The batch is there."""
        self.waited += time.perf_counter() - self._mark

    def wants(self) -> None:
        """The next batch is asked for."""
        self._mark = time.perf_counter()

    def step(self, samples: int) -> None:
        self.steps, self.samples = self.steps + 1, self.samples + samples
        self._mark = time.perf_counter()

    def end(self) -> None:
        self.trained += time.perf_counter() - self._began

    def tell(self, ranks: int = 1) -> None:
        rates = {"steps_per_s": self.steps / self.trained, "samples_per_s": ranks * self.samples / self.trained}
        data = self.waited / self.trained if self.waited else None
        phases = {"data": data, "validation": self.validated or None, "acting": self.acted or None}
        print("\n" + json.dumps({"steps": self.steps + self.skipped, **rates, **phases}), flush=True)
