"""This module captures a few steps with torch's profiler in the middle of a watched run."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .recorder import Recorder
from .spool import BACKWARD, FORWARD, KINDS

PREFIX = "redline/"
"""The names of phases in a captured window begin with this."""
AFTER, STEPS = 10, 5
"""After the first `AFTER` steps, `STEPS` steps are captured. By then the script runs at its usual pace."""


class Window:
    """It captures steps once the script has warmed up."""

    def __init__(self, log: Recorder) -> None:
        self._log, self._path = log, log.spool.path(".trace.json")
        self._left = STEPS + 1
        self._profiler: Any = None
        self._ranges: list[Any] = []

    def after_step(self) -> None:
        if self._profiler is None:
            if self._left and self._log.steps >= AFTER:
                self._open()
            return
        self._left -= 1
        if self._left in (0, STEPS) and torch.cuda.is_initialized():
            # The device must be idle here, so that no work appears in the trace without its launch.
            torch.cuda.synchronize()
        while self._ranges:
            self._ranges.pop().__exit__(None, None, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler.step()
        if self._left == 0:
            self.close()
            self._log.spool.fact("window", path=self._path, steps=STEPS, ended_with=self._log.steps)

    def _open(self) -> None:
        kinds = torch.profiler.ProfilerActivity
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler = torch.profiler.profile(
                activities=[kinds.CPU, *([kinds.CUDA] if torch.cuda.is_initialized() else [])],
                schedule=torch.profiler.schedule(wait=0, warmup=1, active=STEPS, repeat=1),
                on_trace_ready=lambda profiler: profiler.export_chrome_trace(self._path) if not self._left else None,
                record_shapes=True,
            )
            self._profiler.start()
        self._log.is_profiled, self._log.on_row = True, self._mark

    def _mark(self, kind: float) -> None:
        """Sets ranges in the trace that say which pass its operators belong to. Loaders and optimizers have ranges of torch's own."""
        if kind in (FORWARD, BACKWARD):
            self._ranges.append(torch.profiler.record_function(PREFIX + KINDS[int(kind)]))
            self._ranges[-1].__enter__()
        elif kind in (FORWARD + 1, BACKWARD + 1) and self._ranges:
            self._ranges.pop().__exit__(None, None, None)

    def close(self) -> None:
        """Ends the profiler. If the script ends before the window does, what was captured of it is dropped."""
        if self._profiler is not None:
            self._log.is_profiled, self._log.on_row = False, None
            while self._ranges:
                self._ranges.pop().__exit__(None, None, None)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._profiler.stop()
            self._profiler = None
