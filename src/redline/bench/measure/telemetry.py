"""A look at the device every tenth of a second while a block runs, from a thread that is otherwise asleep."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from redline.bench.device.base import Device
from redline.record import TelemetrySample

PERIOD_S = 0.1


class Sampling:
    """Context manager: `samples` and `energy_j` are there once it has been left."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="redline-telemetry", daemon=True)
        self._samples: list[TelemetrySample] = []
        self.energy_j: float | None = None

    @property
    def samples(self) -> tuple[TelemetrySample, ...]:
        return tuple(self._samples)

    def __enter__(self) -> Sampling:
        self._started = time.perf_counter()
        self._energy_before = self._device.energy_j()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._samples.append(self._device.look(time.perf_counter() - self._started, neighbours=True))
        after = self._device.energy_j()
        if after is not None and self._energy_before is not None and after > self._energy_before:
            self.energy_j = after - self._energy_before  # a window shorter than the counter's period reads 0

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self._samples.append(self._device.look(time.perf_counter() - self._started))
