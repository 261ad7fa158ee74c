"""`redline monitor`: every GPU and the CPU, look by look, and what the looks add up to."""

from __future__ import annotations

import csv as tables
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import psutil
from rich.live import Live

from redline.model.errors import MissingExtra, UsageError
from redline.model.fields import seconds_of
from redline.model.metrics import Fact, Figure, Headline, Row, Table
from redline.model.settings import OUTPUT, setting
from redline.model.units import format_seconds
from redline.show.result import Result, terminal_table
from redline.show.terminal import make_console
from redline.system.telemetry import cpu_name, cpu_temperature_c, open_all_cards, package_energy_j
from redline.system.telemetry.card import Card, EnergyMeter
from redline.verbs.verb import target, verb

Look = Mapping[str, Any]
"""A look is one device at one moment. None is unknown, never 0."""

SATURATED = 0.95
"""A device that was busy for this share of the time between two looks has nothing to give any more."""
LOOKS_KEPT = 100_000
"""Only so many of the latest looks are kept, so that a monitor that runs for days does not fill the memory."""
FIGURES = {
    name: Figure(name=name, unit=unit, header=header)
    for name, unit, header in (
        ("utilisation", "share", "busy"),
        ("memory_used_bytes", "B", "memory"),
        ("memory_bytes", "B", "of"),
        ("power_w", "W", "power"),
        ("power_limit_w", "W", "limit"),
        ("temperature_c", "°C", "temperature"),
        ("clock_hz", "Hz", "clock"),
        ("max_clock_hz", "Hz", "highest clock"),
        ("energy_j", "J", "energy"),
    )
}
SHOWN = ("device", "utilisation", "memory_used_bytes", "power_w", "temperature_c", "clock_hz", "throttle", "processes")
TOTALS: tuple[tuple[str, str, str, str, Callable[[Sequence[float]], float | None]], ...] = (
    ("mean_utilisation", "share", "busy", "utilisation", fmean),
    ("peak_utilisation", "share", "peak", "utilisation", max),
    (
        "saturated_share",
        "share",
        "saturated",
        "utilisation",
        lambda values: fmean(value >= SATURATED for value in values),
    ),
    ("mean_power_w", "W", "power", "power_w", fmean),
    ("peak_power_w", "W", "peak power", "power_w", max),
    ("energy_j", "J", "energy", "energy_j", lambda values: values[-1] - values[0] if len(values) > 1 else None),
    ("peak_memory_bytes", "B", "memory", "memory_used_bytes", max),
    ("peak_temperature_c", "°C", "hottest", "temperature_c", max),
    ("mean_clock_hz", "Hz", "clock", "clock_hz", fmean),
)
"""The looks add up to these: each has the name, unit and header of a figure, the figure of a look that it is made of, and how."""
THROTTLED = Figure(name="throttled_s", unit="s", header="throttled")
TOTAL_COLUMNS = ("device", "mean_utilisation", "energy_j", "mean_power_w", "peak_memory_bytes", "throttled_s")


@verb(
    examples=(
        "redline monitor",
        "redline monitor --duration 10m --csv gpus.csv",
        "redline monitor --openmetrics :9400",
    )
)
def monitor(
    *,
    interval: Annotated[
        Any, setting("Time between two looks, such as 1 or 500ms.", kind=str, shape="TIME", read=seconds_of)
    ] = 1.0,
    duration: Annotated[Any, target("Stop after this long. Default: at Ctrl-C.")] = None,
    csv: Annotated[Any, setting("Log every look as a row.", group=OUTPUT, kind=Path, shape="FILE")] = None,
    openmetrics: Annotated[
        str | None, setting("Also serve the figures to Prometheus, such as :9400.", group=OUTPUT, shape="[HOST]:PORT")
    ] = None,
    machine: Any = None,
) -> Result:
    """Show every GPU and the CPU live: load, memory, power, clocks.

    Throttling and processes are shown too. Ctrl-C ends it with a summary. What a driver does not report is shown as unknown.
    """
    machine = machine or Machine()
    kept: list[Look] = []
    with ExitStack() as stack:
        hearers = [serve_metrics(openmetrics)] if openmetrics is not None else []
        if csv is not None:
            try:
                hearers.append(log_looks(stack.enter_context(Path(csv).open("w", encoding="utf-8"))))
            except OSError as error:
                raise UsageError(f"cannot write {csv}: {error.strerror}") from None
        if sys.stderr.isatty():
            live = stack.enter_context(Live(console=make_console(stderr=True), transient=True, auto_refresh=False))
            hearers.append(lambda looks: live.update(terminal_table(looks_table(looks)), refresh=True))
        try:
            for looks in _series(machine, duration, interval):
                kept += looks
                del kept[:-LOOKS_KEPT]
                for hear in hearers:
                    hear(looks)
        except KeyboardInterrupt:
            pass
    return result_of(kept)


def _series(machine: Machine, seconds: float | None, interval_s: float) -> Iterator[list[Look]]:
    """Looks until the time is over or Ctrl-C comes."""
    ends = None if seconds is None else time.monotonic() + seconds
    while True:
        time.sleep(interval_s if ends is None else max(min(interval_s, ends - time.monotonic()), 0.0))
        yield machine.look()
        if ends is not None and time.monotonic() >= ends:
            return


class Machine:
    """A machine has the devices that are looked at."""

    def __init__(self, cards: Sequence[Card] | None = None) -> None:
        self._cards = [(card, EnergyMeter(), card.facts()) for card in (open_all_cards() if cards is None else cards)]
        self._package = EnergyMeter()
        self._began = time.monotonic()
        psutil.cpu_percent(interval=None)

    def look(self) -> list[Look]:
        at_s = time.monotonic() - self._began
        self._package.read(package_energy_j())
        frequency, memory = psutil.cpu_freq(), psutil.virtual_memory()
        cpu: Look = {
            "device": "cpu",
            "name": cpu_name(),
            "at_s": at_s,
            "throttle": None,
            "processes": None,
            "utilisation": psutil.cpu_percent(interval=None) / 100,
            "memory_used_bytes": memory.used,
            "memory_bytes": memory.total,
            "temperature_c": cpu_temperature_c(),
            "clock_hz": frequency.current * 1e6 if frequency and frequency.current else None,
            "max_clock_hz": frequency.max * 1e6 if frequency and frequency.max else None,
            "energy_j": self._package.joules,
        }
        return [cpu, *(self._gpu(number, at_s) for number in range(len(self._cards)))]

    def _gpu(self, number: int, at_s: float) -> Look:
        card, meter, facts = self._cards[number]
        meter.read(card.energy_j())
        known = {**facts, **card.reading(), "memory_bytes": card.memory_bytes(), "energy_j": meter.joules}
        return {
            **{name: known.get(name) for name in FIGURES},
            "device": f"gpu{number}",
            "name": card.name() or "GPU",
            "at_s": at_s,
            "throttle": card.throttle_reasons(),
            "processes": card.processes(),
        }


# Where the looks go


def log_looks(file: Any) -> Callable[[Sequence[Look]], None]:
    """Returns a hearer that writes looks as rows of a CSV file; an empty cell is unknown."""
    names = ("device", "name", "at_s", *FIGURES, "throttle", "processes")
    writer = tables.writer(file, lineterminator="\n")
    writer.writerow(names)

    def hear(looks: Sequence[Look]) -> None:
        for look in looks:
            writer.writerow("" if look.get(name) is None else _text(look[name]) for name in names)
        file.flush()

    return hear


def _text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ";".join(f"{pid}:{'' if used is None else used}" for pid, used in value.items())
    return ";".join(value) if isinstance(value, tuple) else value


def serve_metrics(address: str) -> Callable[[Sequence[Look]], None]:
    """Serves a page for Prometheus with the latest look at each device. What is unknown has no value there."""
    try:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server
    except ImportError:
        raise MissingExtra("--openmetrics", "prometheus_client", "prometheus") from None
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or len(port) > 5:
        raise UsageError(f"--openmetrics needs a port, such as :9400 or 0.0.0.0:9400, got {address[:80]!r}")
    registry = CollectorRegistry()
    gauges = {name: Gauge(f"redline_{name}", figure.doc or figure.header, ["device", "name"], registry=registry) for name, figure in FIGURES.items()}  # fmt: skip
    try:
        start_http_server(int(port), addr=host or "127.0.0.1", registry=registry)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot serve on {address}: {error}") from None

    def hear(looks: Sequence[Look]) -> None:
        for gauge in gauges.values():
            gauge.clear()
        for look in looks:
            for name, gauge in gauges.items():
                if look.get(name) is not None:
                    gauge.labels(look["device"], look["name"]).set(look[name])

    return hear


# What it shows


def look_row(look: Look) -> Row:
    throttle, processes = look["throttle"], look["processes"]
    facts: dict[str, Fact] = {
        "device": f"{look['device']} {look['name']}",
        "at_s": look["at_s"],
        "throttle": None if throttle is None else ", ".join(throttle) or "no",
        "processes": None if processes is None else len(processes),
    }
    return Row(facts=facts, metrics=tuple(figure(look.get(name)) for name, figure in FIGURES.items()))


def looks_table(looks: Sequence[Look]) -> Table:
    """Returns a table of every device at this moment."""
    return Table(
        name="looks", title=f"after {format_seconds(looks[0]['at_s'])}", rows=tuple(map(look_row, looks)), columns=SHOWN
    )


def total_row(looks: Sequence[Look]) -> Row:
    """Each figure over the looks that have it; unknown where no look has it."""
    metrics = []
    for name, unit, header, of, summed in TOTALS:
        known = [value for look in looks if (value := look.get(of)) is not None]
        metrics.append(Figure(name=name, unit=unit, header=header)(summed(known) if known else None))
    known = [look for look in looks if look["throttle"] is not None]
    throttled_s = sum(later["at_s"] - earlier["at_s"] for earlier, later in pairwise(known) if later["throttle"])
    facts: dict[str, Fact] = {"device": f"{looks[0]['device']} {looks[0]['name']}", "looks": len(looks)}
    facts["seconds"] = looks[-1]["at_s"] - looks[0]["at_s"]
    return Row(facts=facts, metrics=(*metrics, THROTTLED(throttled_s if known else None)))


def result_of(looks: Sequence[Look]) -> Result:
    devices = dict.fromkeys(look["device"] for look in looks)
    rows = tuple(total_row([look for look in looks if look["device"] == device]) for device in devices)
    known = [row for row in rows if row["mean_utilisation"].value is not None]  # type: ignore[union-attr]
    busiest = max(known, key=lambda row: row.value("mean_utilisation"), default=None)
    figures = {} if busiest is None else {"device": busiest["device"], "busy": busiest["mean_utilisation"]}
    return Result(
        verb="monitor",
        headline=Headline(template="{device} was busiest: {busy} of the time.", figures=figures) if figures else None,
        tables=(
            Table(name="devices", title="over the whole time", rows=rows, columns=TOTAL_COLUMNS),
            Table(name="looks", rows=tuple(map(look_row, looks)), is_detail=True),
        ),
    )
