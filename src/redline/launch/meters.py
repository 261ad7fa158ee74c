"""GPUs, CPU energy and memory of a watched script's processes, looked at from outside."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import psutil

from redline.model.record import TelemetrySample
from redline.system.telemetry import Card, EnergyMeter, open_all_cards, package_energy_j
from redline.system.telemetry.nvml import describe_process

LOOK_S = 0.5
"""Between two looks at the GPUs."""
WHOLE_S = 2.0
"""Between two looks at the memory of all processes."""


class Meters:
    """What was seen so far. A figure that a driver does not give, or stops giving, stays unknown."""

    def __init__(self, cards: Sequence[Card] | None = None) -> None:
        self._cards = list(open_all_cards() if cards is None else cards)
        self._uuids = [str(card.facts().get("uuid") or "") for card in self._cards]
        self._energy = [EnergyMeter() for _ in self._cards]
        self._package = EnergyMeter()
        self._readings: list[list[TelemetrySample]] = [[] for _ in self._cards]
        self._foreign: list[tuple[str, ...]] = [() for _ in self._cards]
        self.resident: list[tuple[float, int]] = []
        self._began = time.monotonic()
        self._next_look = self._next_whole = 0.0

    def look(self, pid: int, *, at_once: bool = False, cards_only: bool = False) -> None:
        """`cards_only`: without a search for processes, which takes milliseconds of the calling program's time."""
        now = time.monotonic()
        if now >= self._next_look or at_once:
            self._next_look = now + LOOK_S
            self._package.read(package_energy_j())
            for number, card in enumerate(self._cards):
                self._energy[number].read(card.energy_j())
                look = TelemetrySample(at_s=now - self._began, foreign=self._foreign[number], **card.reading())
                self._readings[number].append(look)
        if now >= self._next_whole and not cards_only:
            self._next_whole = now + WHOLE_S
            self._look_at_processes(pid)

    def _look_at_processes(self, pid: int) -> None:
        """The memory of the script's processes, and who else is on the cards that they use."""
        try:
            script = psutil.Process(pid)
            family = [script, *script.children(recursive=True)]
            self.resident.append((time.time(), sum(_resident(one) for one in family)))
        except psutil.Error:
            return  # it has ended
        own = {one.pid for one in family}
        for number, card in enumerate(self._cards):
            running = set(card.processes() or ()) if hasattr(card, "processes") else set()
            # In a container the driver may speak of the host's process numbers: then nothing can be told apart.
            self._foreign[number] = tuple(map(describe_process, sorted(running - own))) if running & own else ()

    @property
    def has_cards(self) -> bool:
        return bool(self._cards)

    def used(self, uuids: set[str]) -> list[int]:
        """The cards that the script computes on; MIG slices and renamed devices are not found, and are then unknown."""
        return [number for number, uuid in enumerate(self._uuids) if uuid.removeprefix("GPU-") in uuids]

    def facts(self, uuids: set[str]) -> dict[str, Any]:
        """What is known of the first GPU in use."""
        for number in self.used(uuids)[:1]:
            return {name: value for name, value in self._cards[number].facts().items() if value is not None}
        return {}

    def telemetry(self, uuids: set[str]) -> tuple[TelemetrySample, ...]:
        numbers = self.used(uuids)
        return tuple(self._readings[numbers[0]]) if numbers else ()

    def latest(self, uuids: set[str]) -> TelemetrySample | None:
        """What the first card in use said last."""
        seen = self.telemetry(uuids)
        return seen[-1] if seen else None

    def utilisation(self, uuids: set[str]) -> float | None:
        seen = [
            each.utilisation
            for number in self.used(uuids)
            for each in self._readings[number]
            if each.utilisation is not None
        ]
        return sum(seen) / len(seen) if seen else None

    def energy_j(self, uuids: set[str]) -> float | None:
        """Of the GPUs in use; without one, of the CPU's packages where they can be read."""
        joules = [self._energy[number].joules for number in self.used(uuids)] if uuids else [self._package.joules]
        known = [each for each in joules if each is not None]
        return sum(known) if known and len(known) == len(joules) else None


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


class BesideProgram:
    """Looks at the GPUs while the program that holds it computes. Without a GPU there is nothing to do, and no thread."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._meters.has_cards:
            self._thread = threading.Thread(target=self._run, name="redline meters", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self._meters.look(os.getpid(), cards_only=True)

    def stop(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
