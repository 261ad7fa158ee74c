"""What several tables have: headlines, numbers, how far off, what limits it, whether to believe it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

from rich.text import Text

from redline.analyze.summary import RunSummary
from redline.analyze.trust import error_text
from redline.model.conditions import condition_words
from redline.model.record import Numerics
from redline.model.units import (
    counted,
    format_bytes,
    format_count,
    format_rate,
    format_ratio,
    format_seconds,
    format_share,
    significant,
)
from redline.show.terminal import Fitted, make_table

TRUST_STYLE = {"valid": "green", "invalid": "red"}


def error_cell(numerics: Numerics | None, *, with_steps: bool = False) -> Text:
    is_plain = numerics is not None and numerics.is_compared
    style = "red" if numerics is not None and numerics.is_wrong else "" if is_plain else "dim"
    return Text(error_text(numerics, with_steps=with_steps), style=style)


BOUND_STYLE = {"host": "yellow", "unknown": "dim", "device": "dim"}


def bound_cell(row: RunSummary) -> Text:
    return Text(row.bound.label, style=BOUND_STYLE.get(row.bound.label, ""))


def trust_cell(row: RunSummary) -> Text:
    told = ", ".join(row.verdict.labels)
    if row.verdict.labels == ("noisy",) and not row.verdict.doubts("throughput"):
        told = "noisy (latency)"  # the throughput beside it is sound
    if row.verdict.trusted and row.verdict.noted("wide-interval", "spread", "outliers", "others-at-work"):
        told = "valid, noted"  # how wide it scatters stands below the table
    return Text(told, style=TRUST_STYLE.get(row.verdict.labels[0], "yellow"))


def limit_cells(row: RunSummary) -> dict[str, str | Text]:
    if (found := row.roofline) is None:
        return {}
    left = "n/a" if found.headroom is None else f"{found.headroom:.1f}×"
    return {
        "of peak": format_share(found.efficiency),
        "left": Text(f"{left} ✗", style="red") if found.error else Text(left),
    }


def limit_remarks(rows: Sequence[RunSummary]) -> list[Text]:
    """Rows faster than their limit, and once how to measure limits."""
    told = [
        Text(f"  {row.recipe}: {row.roofline.error}", style="red")
        for row in rows
        if row.roofline and row.roofline.error
    ]
    busy = [each for row in rows if row.roofline for each in row.roofline.notes if each.code == "busy-ceilings"]
    told += [Text(f"  {each}", style="yellow") for each in busy[:1]]
    measured = [row for row in rows if row.failure is None]
    if any(row.flops for row in measured) and not any(row.roofline for row in measured):
        threads = next((row.conditions.threads for row in measured if row.device == "cpu"), None)
        of = f" with {counted(threads, 'thread')}" if threads else ""
        option = f" --threads {threads}" if threads else ""
        line = f"  'redline roofline{option}' measures this device's limits{of}; tables then show how close each row is"
        told.append(Text(line, style="dim"))
    return told


def limit_lines(row: RunSummary) -> list[tuple[str, str]]:
    """All about one record."""
    if row.flops is None:
        return []
    lines = [("work", f"{format_count(row.flops)} FLOPs of matrix products and convolutions per step")]
    if (found := row.roofline) is not None:
        left = "" if found.headroom is None else f", {found.headroom:.2f}× less than measured"
        of = "without some products" if found.limited_by is None else found.limited_by
        lines.append(("roofline", f"{format_seconds(found.attainable_s)} ({of}){left}"))
        lines.append(("unfused", f"{format_seconds(found.unfused_s)}, operator by operator"))
        lines += [("error", str(found.error))] if found.error else []
        lines += [("note", str(each)) for each in found.notes]
    return lines


def generation_cells(row: RunSummary) -> dict[str, str]:
    """The first token, the others, and the share of the copy bandwidth that decoding reaches."""
    found, tpot = row.generation, row.tpot_s
    if found is None:
        return {}
    return {
        "TTFT": format_seconds(row.ttft_s),
        "TPOT": format_seconds(tpot.p50 if tpot else None),
        "TPOT p95": format_seconds(tpot.p95 if tpot else None),
        "prefill tok/s": format_rate(found.prefill_tokens_per_s),
        "decode tok/s": format_rate(found.decode_tokens_per_s),
        "of copy": "in cache" if found.reads_from_cache else format_share(found.bandwidth_share),
        "weights": format_bytes(found.weight_bytes),
        "cache": " ".join(part for part in (found.cache, format_bytes(found.cache_bytes)) if part),
    }


def milliseconds(value: float | None, half_width: float | None) -> str:
    return "n/a" if value is None else rounded(value * 1e3, half_width)


def rounded(value: float | None, half_width: float | None) -> str:
    """As many digits as the interval supports, and one more."""
    if value is None:
        return "n/a"
    digits = 3 if half_width is None or half_width > 0.02 else 4
    return significant(value, digits) if value < 10**digits else significant(round(value), len(str(round(value))))


def ratio_cell(row: RunSummary) -> str:
    versus = row.vs_first
    if versus is None:
        return "–" if row.group else ""
    if versus.low is None or versus.high is None:
        return f"{format_ratio(versus.ratio)} (few rounds)"
    return f"{format_ratio(versus.ratio)} ({versus.low:.2f}–{versus.high:.2f})"


def headline(rows: Sequence[RunSummary], *more: str) -> str:
    """What was measured in all of these rows, and where."""
    row = next((row for row in rows if row.device_name), rows[0])
    parts = [
        row.model,
        row.task,
        f"batch {row.batch}"
        if row.batch
        else "batch unknown"
        if row.batch_from == "unknown" and row.task != "step"
        else "",
        *condition_words(row.conditions, row.device).values(),
        *more,
        f"{row.device_name} ({row.device})" if row.device_name else row.device,
    ]
    return " · ".join(part for part in parts if part)


OVERVIEW: dict[str, Literal["left", "right"]] = {
    "model": "left",
    "task": "left",
    "batch": "right",
    "conditions": "left",
    "device": "left",
    "recipe": "left",
    "speed": "right",
    "p50 ms": "right",
    "±": "right",
    "vs first": "right",
    "trust": "left",
}
"""The columns of all workloads together, and how they stand."""
OVERVIEW_EXPENDABLE = ("p50 ms", "vs first", "±", "device", "task")


def overview(groups: Sequence[Sequence[RunSummary]]) -> Fitted:
    """All rows of several workloads in one table, with the conditions in which they differ."""
    words = [condition_words(group[0].conditions, group[0].device) for group in groups]
    names = list(dict.fromkeys(name for each in words for name in each))
    # What broke before its conditions were known says nothing about them.
    known = [each for group, each in zip(groups, words, strict=True) if group[0].device_name]
    apart = [name for name in names if len({each.get(name) for each in known}) > 1]
    rows = [_overview_cells(row, each, apart) for group, each in zip(groups, words, strict=True) for row in group]
    shown = [
        name for name in OVERVIEW if name not in ("task", "conditions", "device") or len({r[name] for r in rows}) > 1
    ]
    table = make_table(Text("all together", style="bold"))
    for name in shown:
        table.add_column(name, justify=OVERVIEW[name], overflow="fold", no_wrap=OVERVIEW[name] == "right")
    for row in rows:
        table.add_row(*(Text(row[name]) for name in shown))
    return Fitted(table, OVERVIEW_EXPENDABLE)


def _overview_cells(row: RunSummary, words: Mapping[str, str], apart: Sequence[str]) -> dict[str, str]:
    half_width = row.throughput_interval.half_width if row.throughput_interval else None
    failed = f"failed: {row.failure.kind} at {row.failure.stage}" if row.failure else None
    return {
        "model": row.model,
        "task": row.task,
        "batch": str(row.batch) if row.batch else "–",
        "conditions": ", ".join(words[name] for name in apart if name in words),
        "device": row.device,
        "recipe": row.recipe,
        "speed": "–" if failed else f"{rounded(row.throughput_per_s, half_width)} {row.item or 'item'}/s",
        "p50 ms": "–" if failed else milliseconds(row.latency_s.p50 if row.latency_s else None, half_width),
        "±": format_share(half_width),
        "vs first": ratio_cell(row) or "–",
        "trust": failed or f"{trust_cell(row)}{', numerics ✗' if row.numerics and row.numerics.is_wrong else ''}",
    }


TOO_SHORT = "too short"


class Metered(Protocol):
    """A row that may tell what its items cost."""

    @property
    def energy_per_item_j(self) -> float | None: ...
    @property
    def energy_too_short(self) -> bool: ...
    @property
    def power_w(self) -> float | None: ...
    @property
    def utilisation(self) -> float | None: ...
    @property
    def cost_per_million(self) -> float | None: ...


def energy_columns(rows: Sequence[Metered], item: str, *, on_gpu: bool) -> dict[str, str]:
    """Energy, power, utilisation and cost, each where any row can tell it."""
    has = {
        "energy": (any(row.energy_per_item_j is not None or row.energy_too_short for row in rows), f"mJ/{item}"),
        "power": (any(row.power_w is not None for row in rows), "W"),
        "utilisation": (on_gpu and any(row.utilisation is not None for row in rows), "GPU busy"),
        "cost": (any(row.cost_per_million is not None for row in rows), f"per million {item}"),
    }
    return {name: header for name, (is_told, header) in has.items() if is_told}


def energy_cells(row: Metered) -> dict[str, str]:
    energy = row.energy_per_item_j
    unknown = TOO_SHORT if row.energy_too_short else "?"
    return {
        "energy": unknown if energy is None else significant(energy * 1e3, 3),
        "power": "?" if row.power_w is None else f"{row.power_w:.0f}",
        "utilisation": "?" if row.utilisation is None else format_share(row.utilisation),
        "cost": "–" if row.cost_per_million is None else significant(row.cost_per_million, 3),
    }


def cheapest(rows: Sequence[RunSummary]) -> Iterator[Text]:
    """Which of several recipes costs least, where a price was given; wrong answers are not cheap."""
    priced = [row for row in rows if row.cost_per_million is not None and not (row.numerics and row.numerics.is_wrong)]
    if len(priced) > 1:
        best = min(priced, key=lambda row: row.cost_per_million or 0.0)
        yield Text(
            f"cheapest: {best.recipe}, {significant(best.cost_per_million or 0.0, 3)} per million {best.item or 'items'}"
        )
