"""Curves of latency under load: for the terminal, as a picture, and for the dashboard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.load import LoadPoint, LoadSummary, RateRatio, ratios_to_first
from redline.model.units import format_rate, format_seconds, format_share, significant
from redline.show.canvas import COLOURS, check_picture, label_text, new_figure, save_figure
from redline.show.terminal import Fitted, make_table, one_line

BARS = " ▁▂▃▄▅▆▇█"
HEIGHT = 8
COLUMN = 6
"""Characters between two rates of the curve in the terminal."""


def load_report(rows: Sequence[LoadSummary]) -> RenderableType:
    """Each curve with its rates; the sustainable rates beside each other where there are several."""
    parts: list[RenderableType] = []
    for row in rows:
        parts += [points_table(row), *curve_lines(row), *_remarks(row)]
    if len(rows) > 1:
        parts.append(_compared(rows))
    parts.append(Text(_next_step(rows), style="bold"))
    return Group(*parts)


def points_table(row: LoadSummary) -> Fitted:
    table = make_table(Text(_title(row), style="bold"))
    for header in (
        "rate/s",
        "done/s",
        "p50",
        "p95",
        "p99",
        "queue",
        "batching",
        "compute",
        "batch",
        "busy",
        "requests",
    ):
        table.add_column(header, justify="right")
    table.add_column("verdict", min_width=12)
    for point in row.points:
        table.add_row(*_cells(point), Text(_remark(row, point), style="" if point.keeps_target else "red"))
    return Fitted(table, ("batching", "queue", "busy", "compute", "p95", "requests"))


def _cells(point: LoadPoint) -> list[str]:
    times = (point.p50_s, point.p95_s, point.p99_s, point.queue_s, point.batching_s, point.compute_s)
    return [
        format_rate(point.rate),
        format_rate(point.achieved_rate),
        *(format_seconds(seconds) for seconds in times),
        significant(point.mean_batch, 3),
        format_share(point.busy_share),
        str(point.requests),
    ]


def _remark(row: LoadSummary, point: LoadPoint) -> str:
    if point.is_saturated:
        left = f", {point.unfinished} left" if point.unfinished else ""
        return f"falls behind{left}"
    if not point.keeps_target:
        return "above the target"
    marks = ["sustainable" if point.rate == row.sustainable_rate else "", "knee" if point.rate == row.knee_rate else ""]
    return ", ".join(mark for mark in marks if mark)


def curve_lines(row: LoadSummary) -> Iterator[Text]:
    """p99 (or p50 where there is none) over the rate as bars on a logarithmic scale."""
    points = [(point.rate, point.p99_s or point.p50_s, point) for point in row.points]
    if len(points) < 2:
        return
    logs = [math.log(max(seconds, 1e-9)) for _, seconds, _ in points]
    low, high = min(logs), max(logs)
    heights = [1 + round((HEIGHT * 8 - 1) * (each - low) / ((high - low) or 1.0)) for each in logs]
    what = "p99" if all(point.p99_s is not None for point in row.points) else "p99 (p50 where there is no p99)"
    yield Text(
        f"{what} against the rate, {format_seconds(math.exp(low))} to {format_seconds(math.exp(high))}", style="dim"
    )
    for level in reversed(range(HEIGHT)):
        line = Text("  ")
        for height, (_, _, point) in zip(heights, points, strict=True):
            bar = BARS[min(max(height - 8 * level, 0), 8)] * (COLUMN - 2)
            line.append(f"{bar}  ", style="" if point.keeps_target else "red")
        yield line
    yield Text("  " + "".join(f"{_short(rate):<{COLUMN}}" for rate, _, _ in points), style="dim")


def _short(rate: float) -> str:
    return f"{rate / 1000:.3g}k" if rate >= 1000 else f"{rate:.4g}"[: COLUMN - 1]


def _remarks(row: LoadSummary) -> Iterator[Text]:
    if row.failure is not None:
        yield Text(one_line(f"failed: {row.failure.told}"), style="red")
        return
    if row.numerics is not None and row.numerics.is_wrong:
        reason = f": {row.numerics.reason}" if row.numerics.reason else ""
        yield Text(one_line(f"its outputs are too far from fp32{reason}"), style="red")
    yield Text(sustained_sentence(row))
    if row.knee_rate is not None:
        yield Text(f"knee: {format_rate(row.knee_rate)} requests/s; beyond it latency rises faster than throughput")
    for each in row.notes:
        yield Text(str(each), style="dim")


def sustained_sentence(row: LoadSummary) -> str:
    target = (
        f"with p99 within {format_seconds(row.slo_p99_s)}" if row.slo_p99_s is not None else "without falling behind"
    )
    if row.sustainable_rate is None:
        return f"no rate here is sustained {target}"
    if row.is_open_ended:
        return f"sustains {format_rate(row.sustainable_rate)} requests/s or more {target}: the range ends there"
    runs = next(point.runs for point in row.points if point.rate == row.sustainable_rate)
    return f"sustains {format_rate(row.sustainable_rate)} requests/s {target}{' (offered twice)' if runs > 1 else ''}"


def _compared(rows: Sequence[LoadSummary]) -> Fitted:
    table = make_table(Text("sustainable rates", style="bold"))
    table.add_column("recipe")
    for header in ("requests/s", "vs first"):
        table.add_column(header, justify="right")
    for row, ratio in zip(rows, ratios_to_first(rows), strict=True):
        name = row.recipe if len({each.model for each in rows}) == 1 else f"{row.model} {row.recipe}"
        rate = (
            "n/a"
            if row.sustainable_rate is None
            else f"{'≥ ' if row.is_open_ended else ''}{format_rate(row.sustainable_rate)}"
        )
        table.add_row(Text(name), rate, "–" if row is rows[0] else _ratio_text(ratio))
    return Fitted(table)


def _ratio_text(found: RateRatio) -> str:
    if found.ratio is None:
        return "–"
    signs = {"exact": "", "at least": "≥ ", "at most": "≤ "}
    return f"{signs[found.bound]}{found.ratio:.2f}×" if found.bound in signs else "unknown: both sustain every rate"


def _title(row: LoadSummary) -> str:
    parts = [
        row.model,
        row.recipe,
        f"batches up to {row.max_batch}",
        f"wait up to {format_seconds(row.max_wait_s)}",
        f"{row.device_name} ({row.device})" if row.device_name else row.device,
    ]
    return one_line(" · ".join(parts))


def _next_step(rows: Sequence[LoadSummary]) -> str:
    first = next((row for row in rows if row.is_sound), None)
    if first is None:
        return "next: fix the failure above"
    open_ended = [row for row in rows if row.is_open_ended]
    if open_ended:
        return f"next: ask for higher rates than {format_rate(max(row.points[-1].rate for row in open_ended))}"
    if all(row.sustainable_rate is None for row in rows if row.is_sound):
        return f"next: ask for lower rates than {format_rate(first.points[0].rate)}, or for a faster recipe with -r"
    if len(rows) == 1:
        return "next: add the recipe that 'redline tune' finds with -r, and compare the sustainable rates"
    return "next: --plot FILE.png draws the curves, 'redline report' puts them on the dashboard"


def plot_loads(rows: Sequence[LoadSummary], path: Path) -> Path:
    """Latency against the rate, and the batches that formed."""
    check_picture(path)
    figure, (latency, batches) = new_figure(11, 4.2, columns=2)
    for number, row in enumerate(rows):
        colour = COLOURS[number % len(COLOURS)]
        rates = [point.rate for point in row.points]
        if not rates:
            continue
        name = label_text(f"{row.model} {row.recipe}" if len({each.model for each in rows}) > 1 else row.recipe)
        tails = [math.nan if point.p99_s is None else 1e3 * point.p99_s for point in row.points]
        latency.plot(rates, tails, "o-", color=colour, label=f"{name}, p99")
        latency.plot(rates, [1e3 * point.p50_s for point in row.points], "--", color=colour, alpha=0.7)
        batches.plot(rates, [point.mean_batch for point in row.points], "o-", color=colour)
        if row.sustainable_rate is not None:
            latency.axvline(row.sustainable_rate, color=colour, linestyle=":", alpha=0.8)
    slo = next((row.slo_p99_s for row in rows if row.slo_p99_s is not None), None)
    if slo is not None:
        latency.axhline(1e3 * slo, color="0.4", linestyle="-.", label="target for p99")
    for axes in (latency, batches):
        axes.set_xscale("log")
        axes.set_xlabel("requests per second")
    latency.set_yscale("log")
    latency.set_ylabel("ms")
    latency.set_title("latency: p99, p50 dashed; dotted: sustainable rate", fontsize="small")
    latency.legend(fontsize="small")
    batches.set_ylabel("requests per batch")
    batches.set_title("mean batch that formed", fontsize="small")
    return save_figure(figure, path)
