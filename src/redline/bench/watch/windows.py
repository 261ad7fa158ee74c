"""Captures a few steps with torch's profiler in the middle of a watched run."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch

from .recorder import Recorder
from .spool import BACKWARD, BACKWARD_ENDED, FORWARD, FORWARD_ENDED, KINDS

PREFIX = "redline/"
"""Names of phases in a captured window begin with this."""


class Windows:
    """Captures `steps` steps, from step `after` on."""

    def __init__(self, log: Recorder, settings: str) -> None:
        asked: dict[str, Any] = json.loads(settings) if settings else {}
        self._log = log
        self._steps, self.after = int(asked.get("steps", 0)), int(asked.get("after", 0))
        self._left = 0
        self._profiler: Any = None
        self._ranges: list[Any] = []

    def after_step(self) -> None:
        if self._profiler is not None:
            self._advance()
        elif self._steps and self._log.steps >= self.after:
            self._open()

    def _open(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._path = self._log.spool.path(".trace.json")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler = torch.profiler.profile(
                activities=activities,
                schedule=torch.profiler.schedule(wait=0, warmup=1, active=self._steps, repeat=1),
                on_trace_ready=lambda profiler: profiler.export_chrome_trace(self._path),
                record_shapes=True,
            )
            self._profiler.start()
        self._left = self._steps + 1
        self._log.is_profiled, self._log.on_row = True, self._mark

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
        if self._left == 0:
            self._profiler, self._log.is_profiled, self._log.on_row = None, False, None
            self._log.spool.fact("window", path=self._path, steps=self._steps, ended_with=self._log.steps)
            self._steps = 0

    def _mark(self, kind: float) -> None:
        """Ranges in the trace say which pass its operators belong to. Loaders and optimizers have ranges of torch's own."""
        if kind in (FORWARD, BACKWARD):
            self._ranges.append(torch.profiler.record_function(PREFIX + KINDS[int(kind)]))
            self._ranges[-1].__enter__()
        elif kind in (FORWARD_ENDED, BACKWARD_ENDED) and self._ranges:
            self._ranges.pop().__exit__(None, None, None)

    def _close_ranges(self) -> None:
        while self._ranges:
            self._ranges.pop().__exit__(None, None, None)

    def close(self) -> None:
        """The script ends inside a window: what was captured of it is dropped."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            self._log.is_profiled, self._log.on_row = False, None
            self._close_ranges()
            profiler.on_trace_ready = None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                profiler.stop()
