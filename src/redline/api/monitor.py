"""`redline monitor`: every GPU and the CPU, sample by sample, and what they add up to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import psutil
from rich.console import RenderableType

from redline.model.environment import TelemetrySample
from redline.model.errors import UsageError
from redline.model.fields import Frozen, require_seconds
from redline.show.export import JsonDocument, json_document
from redline.show.monitor import monitor_report
from redline.show.notebook import Bars, Shown
from redline.system.telemetry import (
    Card,
    EnergyMeter,
    cpu_name,
    cpu_temperature_c,
    open_all_cards,
    package_energy_j,
)


class DeviceLook(Frozen):
    """One device at one moment. None is unknown, never 0."""

    device: str
    """`cpu`, or `gpu0`."""
    name: str
    at_s: float
    utilisation: float | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    clock_hz: float | None = None
    max_clock_hz: float | None = None
    throttle: tuple[str, ...] | None = None
    pcie_received_per_s: float | None = None
    pcie_sent_per_s: float | None = None
    nvlink_received_per_s: float | None = None
    nvlink_sent_per_s: float | None = None
    processes: dict[int, int | None] | None = None
    """Bytes by process id."""
    energy_j: float | None = None
    """Since the beginning."""


class DeviceTotal(Frozen):
    """One device over the whole time."""

    device: str
    name: str
    seconds: float
    looks: int
    mean_utilisation: float | None = None
    peak_utilisation: float | None = None
    saturated_share: float | None = None
    """Share of the samples with a utilisation of 95 % or more."""
    mean_power_w: float | None = None
    peak_power_w: float | None = None
    peak_memory_bytes: int | None = None
    peak_temperature_c: float | None = None
    mean_clock_hz: float | None = None
    energy_j: float | None = None
    throttled_s: float | None = None


SATURATED = 0.95
LOOKS_KEPT = 100_000


class MonitorResult(Shown):
    def __init__(self, looks: Sequence[DeviceLook]) -> None:
        self.looks = list(looks)
        names = dict.fromkeys(look.device for look in looks)
        self.totals = [total_of([look for look in looks if look.device == name]) for name in names]

    def report(self) -> RenderableType:
        return monitor_report(self.totals)

    def frame_rows(self) -> Sequence[Any]:
        """One for each look at each device."""
        return self.looks

    def bars(self) -> Bars | None:
        used = [(total, total.mean_utilisation) for total in self.totals if total.mean_utilisation is not None]
        return Bars("utilisation", "% on average", [(total.device, 100 * share, None, None) for total, share in used])

    def to_json(self) -> JsonDocument:
        return json_document("monitor", {"totals": self.totals, "looks": self.looks})


class Machine:
    """The devices that are looked at."""

    def __init__(self, cards: Sequence[Card] | None = None, attach: int | None = None) -> None:
        self._cards = list(open_all_cards() if cards is None else cards)
        self._facts = [card.facts() for card in self._cards]
        self._meters = [EnergyMeter() for _ in self._cards]
        self._links: list[tuple[float, float | None, float | None] | None] = [None] * len(self._cards)
        self._package = EnergyMeter()
        self._family = _process(attach) if attach is not None else None
        self._began = time.monotonic()
        psutil.cpu_percent(interval=None)

    def look(self) -> list[DeviceLook]:
        at_s = time.monotonic() - self._began
        gpus = [self._gpu(number, at_s) for number in range(len(self._cards))]
        if self._family is not None:
            members = {one.pid for one in (self._family, *_children(self._family))}
            gpus = [look for look in gpus if _may_use(members, look.processes)]
        return [self._cpu(at_s), *gpus]

    @property
    def is_over(self) -> bool:
        """The process that was attached to has ended."""
        if self._family is None:
            return False
        try:
            return not self._family.is_running() or self._family.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:  # it ended while it was asked
            return True

    def _cpu(self, at_s: float) -> DeviceLook:
        self._package.read(package_energy_j())
        frequency = psutil.cpu_freq()
        look = DeviceLook(
            device="cpu",
            name=cpu_name(),
            at_s=at_s,
            utilisation=psutil.cpu_percent(interval=None) / 100,
            memory_used_bytes=psutil.virtual_memory().used,
            memory_bytes=psutil.virtual_memory().total,
            temperature_c=cpu_temperature_c(),
            clock_hz=frequency.current * 1e6 if frequency and frequency.current else None,
            max_clock_hz=frequency.max * 1e6 if frequency and frequency.max else None,
            energy_j=self._package.joules,
        )
        if self._family is None:
            return look
        family = [self._family, *_children(self._family)]
        used = {one.pid: memory for one in family if (memory := _memory(one)) is not None}
        return msgspec.structs.replace(look, processes=used)

    def _gpu(self, number: int, at_s: float) -> DeviceLook:
        card, facts = self._cards[number], self._facts[number]
        self._meters[number].read(card.energy_j())
        reading = TelemetrySample(at_s=at_s, **card.reading())
        traffic = _ask(card, "traffic") or {}
        received, sent = traffic.get("nvlink_received_total"), traffic.get("nvlink_sent_total")
        rates = self._link_rates(number, at_s, received, sent)
        return DeviceLook(
            device=f"gpu{number}",
            name=_ask(card, "name") or "GPU",
            at_s=at_s,
            utilisation=reading.utilisation,
            memory_used_bytes=reading.memory_used_bytes,
            memory_bytes=_ask(card, "memory_bytes"),
            power_w=reading.power_w,
            power_limit_w=facts.get("power_limit_w"),
            temperature_c=reading.temperature_c,
            clock_hz=reading.clock_hz,
            max_clock_hz=facts.get("max_clock_hz"),
            throttle=_ask(card, "throttle_reasons"),
            pcie_received_per_s=traffic.get("pcie_received"),
            pcie_sent_per_s=traffic.get("pcie_sent"),
            nvlink_received_per_s=rates[0],
            nvlink_sent_per_s=rates[1],
            processes=_ask(card, "processes"),
            energy_j=self._meters[number].joules,
        )

    def _link_rates(
        self, number: int, at_s: float, received: float | None, sent: float | None
    ) -> tuple[float | None, float | None]:
        before, self._links[number] = self._links[number], (at_s, received, sent)
        if before is None or at_s <= before[0]:
            return None, None
        passed = at_s - before[0]
        pairs = ((before[1], received), (before[2], sent))
        rates = [(new - old) / passed if old is not None and new is not None else None for old, new in pairs]
        return rates[0], rates[1]


def _may_use(members: set[int], processes: dict[int, int | None] | None) -> bool:
    """Whether one of these computes on a card. In a container the driver may speak of the host's numbers: who knows."""
    if processes is None or members & processes.keys():
        return True
    return any(not psutil.pid_exists(pid) for pid in processes)


def _ask(card: Card, what: str) -> Any:
    """A figure that not every vendor's library has."""
    call = getattr(card, what, None)
    return call() if call is not None else None


def _process(pid: int) -> psutil.Process:
    try:
        return psutil.Process(pid)
    except (psutil.NoSuchProcess, ValueError):
        raise UsageError(f"there is no process {pid} to attach to") from None


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _memory(process: psutil.Process) -> int | None:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return None


def monitor(
    *,
    seconds: float | None = None,
    interval_s: float = 1.0,
    attach: int | None = None,
    on_looks: Callable[[list[DeviceLook]], None] = lambda looks: None,
    machine: Machine | None = None,
) -> MonitorResult:
    """Look at every device until the time is over, the attached process ends or Ctrl-C comes; then add it up."""
    require_seconds("interval", interval_s)
    machine = machine or Machine(attach=attach)
    kept: list[DeviceLook] = []
    try:
        for looks in _series(machine, seconds, interval_s):
            kept += looks
            del kept[:-LOOKS_KEPT]
            on_looks(looks)
    except KeyboardInterrupt:
        pass
    return MonitorResult(kept)


def _series(machine: Machine, seconds: float | None, interval_s: float) -> Iterator[list[DeviceLook]]:
    ends = None if seconds is None else time.monotonic() + seconds
    while True:
        time.sleep(interval_s if ends is None else max(min(interval_s, ends - time.monotonic()), 0.0))
        yield machine.look()
        if machine.is_over or (ends is not None and time.monotonic() >= ends):
            return


def total_of(looks: Sequence[DeviceLook]) -> DeviceTotal:
    """Each figure over the samples that have it; unknown where no sample has it."""

    def known(name: str) -> list[float]:
        return [value for look in looks if (value := getattr(look, name)) is not None]

    busy, power, clocks, joules = known("utilisation"), known("power_w"), known("clock_hz"), known("energy_j")
    told = [look for look in looks if look.throttle is not None]
    passed = [later.at_s - earlier.at_s for earlier, later in pairwise(told)]
    throttled = sum(span for span, look in zip(passed, told[1:], strict=True) if look.throttle)
    memory = known("memory_used_bytes")
    return DeviceTotal(
        device=looks[0].device,
        name=looks[0].name,
        seconds=looks[-1].at_s - looks[0].at_s,
        looks=len(looks),
        mean_utilisation=_mean(busy),
        peak_utilisation=max(busy, default=None),
        saturated_share=sum(value >= SATURATED for value in busy) / len(busy) if busy else None,
        mean_power_w=_mean(power),
        peak_power_w=max(power, default=None),
        peak_memory_bytes=int(max(memory)) if memory else None,
        peak_temperature_c=max(known("temperature_c"), default=None),
        mean_clock_hz=_mean(clocks),
        energy_j=joules[-1] - joules[0] if len(joules) > 1 else None,
        throttled_s=throttled if told else None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
