"""GPUs, CPU energy and memory of a watched script's processes, looked at from outside."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import psutil

from redline.model.record import TelemetrySample
from redline.system.telemetry import open_all_cards, package_energy_j
from redline.system.telemetry.card import Card, EnergyMeter
from redline.system.telemetry.nvml import describe_process

LOOK_S = 0.5
"""The GPUs are looked at this often."""
WHOLE_S = 2.0
"""The memory of all processes is looked at this often."""


class _Metered:
    """A card with what was seen of it."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.uuid = str(card.facts().get("uuid") or "").removeprefix("GPU-")
        self.energy = EnergyMeter()
        self.looks: list[TelemetrySample] = []
        self.foreign: tuple[str, ...] = ()


class Meters:
    """What was seen so far. A figure that a driver does not give, or stops giving, stays unknown.

    MIG slices and renamed devices are not found by their uuids, and are then unknown.
    """

    def __init__(self, cards: Sequence[Card] | None = None) -> None:
        self._cards = [_Metered(card) for card in (open_all_cards() if cards is None else cards)]
        self._package = EnergyMeter()
        self.resident: list[tuple[float, int]] = []
        """The memory of all processes of the script, and when they held it."""
        self._began = time.monotonic()
        self._next_look = self._next_whole = 0.0

    def look(self, pid: int, *, at_once: bool = False, cards_only: bool = False) -> None:
        """`cards_only` spares the search for processes, which takes milliseconds of the calling program's time."""
        now = time.monotonic()
        if now >= self._next_look or at_once:
            self._next_look = now + LOOK_S
            self._package.read(package_energy_j())
            for seen in self._cards:
                seen.energy.read(seen.card.energy_j())
                look = TelemetrySample(at_s=now - self._began, foreign=seen.foreign, **seen.card.reading())
                seen.looks.append(look)
        if now >= self._next_whole and not cards_only:
            self._next_whole = now + WHOLE_S
            self._look_at_processes(pid)

    def _look_at_processes(self, pid: int) -> None:
        """The memory of the script's processes, and who else is on the cards that they use."""
        try:
            script = psutil.Process(pid)
            family = [script, *script.children(recursive=True)]
            self.resident.append((time.time(), sum(_resident(process) for process in family)))
        except psutil.Error:
            return  # it has ended
        own = {process.pid for process in family}
        for seen in self._cards:
            running = set(seen.card.processes() or ())
            # In a container the driver may speak of the host's process numbers: then nothing can be told apart.
            seen.foreign = tuple(map(describe_process, sorted(running - own))) if running & own else ()

    @property
    def has_cards(self) -> bool:
        return bool(self._cards)

    def _used(self, uuids: set[str]) -> list[_Metered]:
        """The cards that the script computes on."""
        return [seen for seen in self._cards if seen.uuid in uuids]

    def facts(self, uuids: set[str]) -> dict[str, Any]:
        """What is known of the first GPU in use."""
        for seen in self._used(uuids)[:1]:
            return {name: value for name, value in seen.card.facts().items() if value is not None}
        return {}

    def telemetry(self, uuids: set[str]) -> tuple[TelemetrySample, ...]:
        """All looks at the first GPU in use."""
        return tuple(look for seen in self._used(uuids)[:1] for look in seen.looks)

    def latest(self, uuids: set[str]) -> TelemetrySample | None:
        looks = self.telemetry(uuids)
        return looks[-1] if looks else None

    def utilisation(self, uuids: set[str]) -> float | None:
        looks = [look.utilisation for seen in self._used(uuids) for look in seen.looks if look.utilisation is not None]
        return sum(looks) / len(looks) if looks else None

    def energy_j(self, uuids: set[str]) -> float | None:
        """Of the GPUs in use; without one, of the CPU's packages where they can be read."""
        meters = [seen.energy for seen in self._used(uuids)] if uuids else [self._package]
        known = [meter.joules for meter in meters if meter.joules is not None]
        return sum(known) if known and len(known) == len(meters) else None


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
