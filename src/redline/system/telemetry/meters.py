"""Meters look now and then, from outside, at the GPUs, the CPU energy and the memory of a program's processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from redline.model.record import TelemetrySample
from redline.system.telemetry import open_all_cards, package_energy_j
from redline.system.telemetry.card import Card, EnergyMeter

LOOK_S = 0.5
"""The GPUs are looked at this often."""
WHOLE_S = 2.0
"""The memory of all processes is looked at this often."""


@dataclass
class _Metered:
    """A card with what was seen of it."""

    card: Card
    energy: EnergyMeter = field(default_factory=EnergyMeter)
    looks: list[TelemetrySample] = field(default_factory=list)
    foreign: tuple[str, ...] = ()


class Meters:
    """Meters keep what was seen so far. A figure that a driver does not give, or stops giving, stays unknown.

    MIG slices and renamed devices are not found by their uuids, and are then unknown.
    """

    def __init__(self, cards: Sequence[Card] | None = None) -> None:
        self._cards = {
            str(card.facts().get("uuid") or number).removeprefix("GPU-"): _Metered(card)
            for number, card in enumerate(open_all_cards() if cards is None else cards)
        }
        self._package = EnergyMeter()
        self.resident: list[tuple[float, int]] = []
        """This is the memory of all processes of the script, and when they held it."""
        self._began = time.monotonic()
        self._next_look = self._next_whole = 0.0
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self, pid: int, *, at_once: bool = False, cards_only: bool = False) -> None:
        """`cards_only` spares the search for processes, which takes milliseconds of the calling program's time."""
        now = time.monotonic()
        if now >= self._next_look or at_once:
            self._next_look = now + LOOK_S
            self._package.read(package_energy_j())
            for seen in self._cards.values():
                seen.energy.read(seen.card.energy_j())
                reading = seen.card.reading()
                seen.looks.append(TelemetrySample(at_s=now - self._began, foreign=seen.foreign, **reading))
        if now >= self._next_whole and not cards_only:
            self._next_whole = now + WHOLE_S
            self._look_at_processes(pid)

    def _look_at_processes(self, pid: int) -> None:
        """Notes the memory of the script's processes, and who else is on the cards that they use."""
        try:
            script = psutil.Process(pid)
            family = {process.pid: process.memory_info().rss for process in (script, *script.children(recursive=True))}
        except psutil.Error:
            return  # one of them has just ended
        self.resident.append((time.time(), sum(family.values())))
        for seen in self._cards.values():
            seen.foreign = seen.card.strangers(family)

    def _used(self, uuids: set[str]) -> list[_Metered]:
        """Returns the cards that the script computes on."""
        return [seen for uuid, seen in self._cards.items() if uuid in uuids]

    def facts(self, uuids: set[str]) -> dict[str, Any]:
        """Returns what is known of the first GPU in use."""
        known = next((seen.card.facts() for seen in self._used(uuids)), {})
        return {name: value for name, value in known.items() if value is not None}

    def telemetry(self, uuids: set[str]) -> tuple[TelemetrySample, ...]:
        """Returns all looks at the first GPU in use."""
        return next((tuple(seen.looks) for seen in self._used(uuids)), ())

    def latest(self, uuids: set[str]) -> TelemetrySample | None:
        return next(reversed(self.telemetry(uuids)), None)

    def utilisation(self, uuids: set[str]) -> float | None:
        looks = [look.utilisation for seen in self._used(uuids) for look in seen.looks if look.utilisation is not None]
        return sum(looks) / len(looks) if looks else None

    def energy_j(self, uuids: set[str]) -> float | None:
        """Returns the energy of the GPUs in use. Without one it is that of the CPU's packages, where they can be read."""
        meters = [seen.energy for seen in self._used(uuids)] if uuids else [self._package]
        known = [meter.joules for meter in meters if meter.joules is not None]
        return sum(known) if known and len(known) == len(meters) else None

    # A program that holds its meters can have them look from a thread beside it.

    def begin(self) -> None:
        """Looks at the GPUs while this program computes. Without a GPU there is nothing to do, and no thread."""
        if self._cards:
            self._thread = threading.Thread(target=self._run, name="redline meters", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self.look(os.getpid(), cards_only=True)

    def end(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
