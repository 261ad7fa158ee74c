"""Everything the page draws, as plain data: one JSON document, so that nothing a name says can become markup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from redline.analyze.blocks import latency_blocks
from redline.analyze.headroom import waterfall
from redline.analyze.knee import SATURATED
from redline.analyze.profile import Profile
from redline.record import RunRecord
from redline.report.contents import Contents
from redline.report.dashboard.rows import columns_of, short
from redline.report.export import COLUMNS

PAYLOAD_SCHEMA = 1

DISTRIBUTIONS = 200
TELEMETRY_RECORDS = 60
PROFILES = 40
"""So many of the newest are in the page: a page of thousands of records must still open at once."""
QUANTILES = 61
TELEMETRY_SAMPLES = 400
KERNELS = 15

TELEMETRY = ("utilisation", "memory_used_bytes", "power_w", "temperature_c", "clock_hz")


def payload_of(contents: Contents) -> dict[str, Any]:
    return {
        "schema": PAYLOAD_SCHEMA,
        "count": len(contents.rows),
        "columns": columns_of(contents),
        "csv_columns": list(COLUMNS),
        "knees": list(_knees(contents)),
        "distributions": list(_distributions(contents.records)),
        "telemetry": list(_telemetry(contents.records)),
        "profiles": list(_profiles(contents)),
        "rooflines": msgspec.to_builtins(contents.rooflines),
        "headrooms": list(_headrooms(contents)),
    }


def as_json(payload: dict[str, Any]) -> str:
    """JSON that may stand inside a script element: nothing in it ends the element or, in older engines, a line."""
    text = msgspec.json.encode(payload).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _knees(contents: Contents) -> Iterator[dict[str, Any]]:
    for curve in contents.curves:
        if curve.knee_batch is not None and curve.limit_per_s is not None:
            yield {
                "subject": str(curve.subject),
                "recipe": curve.recipe,
                "batch": curve.knee_batch,
                "throughput_per_s": short(SATURATED * curve.limit_per_s),
                "limit_per_s": short(curve.limit_per_s),
            }


def _distributions(records: Sequence[RunRecord]) -> Iterator[dict[str, Any]]:
    """The quantile function of each record's latency: it shows two humps where a box would hide them."""
    for number in _newest(records, DISTRIBUTIONS, lambda record: record.failure is None and bool(_latencies(record))):
        samples = _latencies(records[number])
        shares = np.linspace(0, 1, min(QUANTILES, len(samples)))
        yield {"row": number, "n": len(samples), "s": [short(float(each)) for each in np.quantile(samples, shares)]}


def _latencies(record: RunRecord) -> list[float]:
    return list(chain.from_iterable(block.samples for block in latency_blocks(record)))


def _telemetry(records: Sequence[RunRecord]) -> Iterator[dict[str, Any]]:
    """What the device looked like, by seconds since the record's first block."""
    for number in _newest(records, TELEMETRY_RECORDS, _has_telemetry):
        looks = [(block.started_at + look.at_s, look) for block in records[number].blocks for look in block.telemetry]
        looks = looks[:: max(1, len(looks) // TELEMETRY_SAMPLES)]
        start = min(at for at, _ in looks)
        series = {name: [short(getattr(look, name), 4) for _, look in looks] for name in TELEMETRY}
        known = {name: values for name, values in series.items() if any(value is not None for value in values)}
        throttle = [";".join(look.throttle) for _, look in looks]
        yield {
            "row": number,
            "t": [round(at - start, 3) for at, _ in looks],
            "series": known,
            "throttle": throttle if any(throttle) else [],
        }


def _has_telemetry(record: RunRecord) -> bool:
    return any(
        getattr(look, name) is not None for block in record.blocks for look in block.telemetry for name in TELEMETRY
    )


def _profiles(contents: Contents) -> Iterator[dict[str, Any]]:
    numbers = {record.id: number for number, record in enumerate(contents.records)}
    for profile in contents.profiles[-PROFILES:]:
        if profile.capture is not None and profile.capture.record_id in numbers:
            yield {"row": numbers[profile.capture.record_id], **_profile(profile)}


def _profile(profile: Profile) -> dict[str, Any]:
    return {
        "on_device": profile.has_device,
        "busy_share": short(profile.timeline.busy_s / profile.timeline.span_s) if profile.timeline.span_s else None,
        "bound": profile.bound.label,
        "bound_evidence": profile.bound.evidence,
        "unclassified_share": short(profile.unclassified_share),
        "classes": [
            {"name": row.name, "total_s": short(row.total_s), "share": short(row.share), "calls": row.calls}
            for row in profile.classes
        ],
        "phases": [
            {"name": phase.name, "host_s": short(phase.host_s), "device_s": short(phase.device_s)}
            for phase in profile.phases
        ],
        "steps": profile.steps_seen,
        "kernels": [
            {
                "name": row.short_name[:120],
                "class": row.kernel_class,
                "calls": row.calls,
                "total_s": short(row.total_s),
                "mean_s": short(row.mean_s),
                "share": short(row.share),
            }
            for row in profile.kernels[:KERNELS]
        ],
    }


def _headrooms(contents: Contents) -> Iterator[dict[str, Any]]:
    numbers = {record.id: number for number, record in enumerate(contents.records)}
    for found in contents.headrooms:
        bars = msgspec.to_builtins(waterfall(found))
        yield {"row": numbers.get(found.record_id), "title": found.title, "bars": bars}


def _newest(records: Sequence[RunRecord], most: int, fits: Any) -> list[int]:
    """Places of the newest records that fit, in their own order."""
    fitting = [number for number, record in enumerate(records) if fits(record)]
    newest = sorted(fitting, key=lambda number: records[number].created_at)[-most:]
    return sorted(newest)
