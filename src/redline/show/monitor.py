"""GPUs and CPU as tables: now, and over the whole time."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import IO, Any

from rich.console import RenderableType

from redline.model.units import format_bytes, format_seconds, format_share
from redline.show.terminal import Fitted, plain_table

UNKNOWN = "?"


def _cell(value: Any, say: Any) -> str:
    return UNKNOWN if value is None else str(say(value))


def _of(used: Any, whole: Any, say: Any) -> str:
    return _cell(used, say) if whole is None else f"{_cell(used, say)} / {say(whole)}"


def _watts(value: float) -> str:
    return f"{value:.0f} W"


def _megahertz(value: float) -> str:
    return f"{value / 1e6:.0f} MHz"


def looks_table(looks: Sequence[Any]) -> RenderableType:
    """Every device at this moment; `?` is unknown."""
    table = plain_table(f"after {format_seconds(looks[0].at_s)}" if looks else "nothing to look at")
    for name in (
        "device",
        "busy",
        "memory",
        "power",
        "temperature",
        "clock",
        "throttled by",
        "PCIe in / out",
        "processes",
    ):
        text = name in ("device", "throttled by")
        table.add_column(name, justify="left" if text else "right", no_wrap=not text)
    for look in looks:
        throttle = UNKNOWN if look.throttle is None else ", ".join(look.throttle) or "–"
        table.add_row(
            f"{look.device} {look.name}",
            _cell(look.utilisation, format_share),
            _of(look.memory_used_bytes, look.memory_bytes, format_bytes),
            _of(look.power_w, look.power_limit_w, _watts),
            _cell(look.temperature_c, lambda value: f"{value:.0f} °C"),
            _of(look.clock_hz, look.max_clock_hz, _megahertz),
            "–" if look.device == "cpu" else throttle,
            f"{_cell(look.pcie_received_per_s, format_bytes)} / {_cell(look.pcie_sent_per_s, format_bytes)}"
            if look.device != "cpu"
            else "–",
            UNKNOWN if look.processes is None else str(len(look.processes)),
        )
    return Fitted(table, ("processes", "PCIe in / out", "clock", "throttled by", "temperature", "power", "memory"))


def monitor_report(totals: Sequence[Any]) -> RenderableType:
    """Mean, peak, energy and throttled time of each device."""
    table = plain_table("over the whole time")
    for name in (
        "device",
        "looks",
        "busy",
        "saturated",
        "power",
        "peak",
        "energy",
        "memory",
        "hottest",
        "clock",
        "throttled",
    ):
        table.add_column(name, justify="left" if name == "device" else "right", no_wrap=name != "device")
    for total in totals:
        table.add_row(
            f"{total.device} {total.name}",
            str(total.looks),
            _cell(total.mean_utilisation, format_share),
            _cell(total.saturated_share, format_share),
            _cell(total.mean_power_w, _watts),
            _cell(total.peak_power_w, _watts),
            _cell(total.energy_j, lambda value: f"{value:.0f} J"),
            _cell(total.peak_memory_bytes, format_bytes),
            _cell(total.peak_temperature_c, lambda value: f"{value:.0f} °C"),
            _cell(total.mean_clock_hz, _megahertz),
            _cell(total.throttled_s, format_seconds),
        )
    hidden = ("looks", "clock", "hottest", "saturated", "peak", "throttled", "memory", "power", "energy")
    return Fitted(table, hidden)


def write_looks(file: IO[str], looks: Sequence[Any], *, with_header: bool) -> None:
    """Rows of a CSV log; an empty cell is unknown."""
    writer = csv.writer(file, lineterminator="\n")
    for look in looks:
        names = look.__struct_fields__
        if with_header:
            writer.writerow(names)
            with_header = False
        writer.writerow(_log_cell(getattr(look, name)) for name in names)
    file.flush()


def _log_cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ";".join(f"{pid}:{'' if used is None else used}" for pid, used in value.items())
    return ";".join(value) if isinstance(value, tuple) else value
