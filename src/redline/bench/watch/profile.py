"""Short captures with torch's profiler in the middle of a run: once, or again and again."""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import torch

from .clock import Clock
from .spool import PHASES

PREFIX = "redline/"


class Windows:
    """Captures `steps` steps from step `after` on, and with `every_s` again whenever so much time has passed."""

    def __init__(self, clock: Clock, settings: str) -> None:
        asked: dict[str, Any] = json.loads(settings) if settings else {}
        self._clock = clock
        self._steps = int(asked.get("steps", 0))
        self.after = int(asked.get("after", 0))
        self._every_s: float | None = asked.get("every_s")
        self._taken = 0
        self._next_at = time.monotonic()
        self._profiler: Any = None
        self._left = 0
        self._ranges: list[Any] = []

    def after_step(self) -> None:
        if self._profiler is not None:
            self._advance()
        elif self._is_due():
            self._open()

    def _is_due(self) -> bool:
        if not self._steps or self._clock.steps < self.after or time.monotonic() < self._next_at:
            return False
        return self._taken == 0 or self._every_s is not None

    def _open(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        path = self._clock.spool.path(f"-{self._taken}.trace.json")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler = torch.profiler.profile(
                activities=activities,
                schedule=torch.profiler.schedule(wait=0, warmup=1, active=self._steps, repeat=1),
                on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
                record_shapes=True,
            )
            self._profiler.start()
        self._left = self._steps + 1
        self._path = path
        self._clock.profiled = True
        self._clock.on_phase = self._phase

    def _advance(self) -> None:
        self._left -= 1
        if self._left in (0, self._steps) and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # no work without its launch in the trace
        self._close_ranges()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler.step()
            if self._left == 0:
                self._profiler.stop()
                self._finish()

    def _finish(self) -> None:
        self._profiler = None
        self._clock.profiled, self._clock.on_phase = False, None
        self._clock.spool.fact("window", path=self._path, steps=self._steps, ended_with=self._clock.steps)
        self._taken += 1
        if self._every_s is not None:
            self._next_at = time.monotonic() + self._every_s

    def _phase(self, phase: int | None) -> None:
        if phase is None:
            if self._ranges:
                self._ranges.pop().__exit__(None, None, None)
            return
        mark = torch.profiler.record_function(PREFIX + PHASES[phase])
        mark.__enter__()
        self._ranges.append(mark)

    def _close_ranges(self) -> None:
        while self._ranges:
            self._ranges.pop().__exit__(None, None, None)

    def close(self) -> None:
        """The script ends inside a window: what was captured of it is dropped."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            self._clock.profiled, self._clock.on_phase = False, None
            self._close_ranges()
            profiler.on_trace_ready = None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                profiler.stop()
