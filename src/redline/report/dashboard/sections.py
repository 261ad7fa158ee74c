"""The charts of the dashboard: what each shows and when there is something to show. One without data does not appear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Payload = dict[str, Any]


@dataclass(frozen=True)
class Section:
    id: str
    """The name of its drawing function in charts.js."""
    title: str
    about: str
    has_data: Callable[[Payload], bool]
    wide: bool = False


def _has(*columns: str) -> Callable[[Payload], bool]:
    return lambda payload: any(column in payload["columns"] for column in columns)


def _filled(part: str) -> Callable[[Payload], bool]:
    return lambda payload: bool(payload[part])


def _several_batches(payload: Payload) -> bool:
    batches = payload["columns"].get("batch", [])
    return "throughput_per_s" in payload["columns"] and len({batch for batch in batches if batch is not None}) > 1


def _memory_by_batch(payload: Payload) -> bool:
    return _several_batches(payload) and _has("peak_reserved_bytes", "peak_rss_bytes")(payload)


def _phases(payload: Payload) -> bool:
    return _has("forward_s")(payload) or any(profile["phases"] for profile in payload["profiles"])


SECTIONS = (
    Section(
        "headroom",
        "Headroom",
        "From the baseline to the fastest recipe, what each step took off, and what is left to the roofline.",
        _filled("headrooms"),
        wide=True,
    ),
    Section(
        "recipes",
        "Recipes compared",
        "Throughput with its 95 % interval. Hatched bars are not to be relied on; point at one to see why.",
        _has("throughput_per_s"),
        wide=True,
    ),
    Section(
        "throughput",
        "Throughput against batch",
        "Items per second with intervals. A star marks the knee: 90 % of what larger batches near.",
        _several_batches,
    ),
    Section(
        "latency",
        "Latency against batch",
        "Median of a step, and p95 dotted where there were samples enough.",
        _several_batches,
    ),
    Section(
        "memory",
        "Memory against batch",
        "What must fit: reserved by the allocator, on a CPU the worker's resident memory. Crosses did not run.",
        _memory_by_batch,
    ),
    Section(
        "distribution",
        "Latency distribution",
        "The share of steps that took no longer. A steep line is steady; a stair is two speeds in one run.",
        _filled("distributions"),
    ),
    Section(
        "cold",
        "Cold start and compiling",
        "What passes before the first steady step, apart from importing torch.",
        _has("build_s", "first_call_s"),
    ),
    Section("phases", "Phases of a step", "Median seconds of a training step, phase by phase.", _phases),
    Section(
        "kernels",
        "Time by kernel class",
        "From the profiles: where the device's busy time goes; on a CPU, operators by class.",
        _filled("profiles"),
        wide=True,
    ),
    Section(
        "roofline",
        "Roofline",
        "Runs below the device's ceilings. The distance upwards is headroom.",
        _filled("rooflines"),
        wide=True,
    ),
    Section(
        "telemetry",
        "Telemetry over time",
        "The device while the timed blocks ran, by seconds since the first of them.",
        _filled("telemetry"),
        wide=True,
    ),
)


def sections_of(payload: Payload) -> list[Section]:
    return [section for section in SECTIONS if section.has_data(payload)]
