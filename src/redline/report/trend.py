"""Benchmarks over time: a table with sparklines, a document, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.trend import Drift, sparkline
from redline.identity import Benchmark
from redline.report.export import JsonDocument, json_document
from redline.report.terminal import Fitted, make_table, one_line
from redline.spec import Frozen
from redline.units import format_seconds


class TrendPoint(Frozen):
    """One record of a series."""

    record_id: str
    at: float
    """Seconds since the epoch."""
    step_s: float
    per_s: float
    """Items per second."""
    commit: str | None = None
    torch: str | None = None
    driver: str | None = None
    tags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class TrendChange(Frozen):
    """A step. `ratio` is time before over time after: below 1 it got slower."""

    at: float
    ratio: float
    low: float
    high: float
    record_id: str
    """The first record after it."""
    commit_before: str | None = None
    commit: str | None = None
    torch_before: str | None = None
    torch: str | None = None
    driver_before: str | None = None
    driver: str | None = None


class SeriesTrend(Frozen):
    """One benchmark on one device, over time."""

    benchmark: str
    key: str
    device_name: str
    identity: Benchmark
    points: tuple[TrendPoint, ...]
    changes: tuple[TrendChange, ...] = ()
    drift: Drift | None = None


def history_json(series: Sequence[SeriesTrend], *, left_out: int) -> JsonDocument:
    return json_document("history", {"series": msgspec.to_builtins(series), "left_out": left_out})


TEXTS = ("benchmark", "device", "last change")


def history_report(series: Sequence[SeriesTrend], *, left_out: int) -> RenderableType:
    table = make_table(Text("benchmarks over time; the line shows speed, higher is faster", style="bold"))
    for header in ("benchmark", "device", "records", "first", "latest", "step", "trend", "last change"):
        is_text = header in (*TEXTS, "trend")
        table.add_column(header, justify="left" if is_text else "right", overflow="fold", no_wrap=header not in TEXTS)
    for each in series:
        table.add_row(*(Text(one_line(cell)) for cell in _cells(each)))
    shown = Fitted(table, ("first", "device", "records", "latest", "step", "last change"))
    told = [Text(f"  {one_line(line)}", style="dim") for each in series for line in _change_lines(each)]
    more = [Text(f"  {left_out} more series: name a model, or raise --limit", style="dim")] if left_out else []
    return Group(shown, *told, *more)


def _cells(each: SeriesTrend) -> list[str]:
    steps = [point.step_s for point in each.points]
    last = each.changes[-1] if each.changes else None
    return [
        each.benchmark,
        each.device_name,
        str(len(steps)),
        _day(each.points[0].at),
        _day(each.points[-1].at),
        format_seconds(steps[-1]),
        sparkline(steps),
        "none found" if last is None else f"{1 / last.ratio - 1:+.1%} on {_day(last.at)}",
    ]


def _change_lines(each: SeriesTrend) -> list[str]:
    found = []
    for change in each.changes:
        pairs = (
            ("commit", change.commit_before, change.commit),
            ("torch", change.torch_before, change.torch),
            ("driver", change.driver_before, change.driver),
        )
        told = [f"{name} {_short(before)} → {_short(after)}" for name, before, after in pairs if before != after]
        bounds = f"{1 / change.high - 1:+.1%} to {1 / change.low - 1:+.1%}"
        by = f" ({', '.join(told)})" if told else " (same commit, torch and driver)"
        found.append(f"{each.benchmark}: time {1 / change.ratio - 1:+.1%} ({bounds}) from {_day(change.at)} on{by}")
    if each.drift is not None:
        found.append(
            f"{each.benchmark}: drifts, time {1 / each.drift.ratio - 1:+.1%} "
            f"({1 / each.drift.high - 1:+.1%} to {1 / each.drift.low - 1:+.1%}) from the first record to the last"
        )
    marked = [point for point in each.points if point.tags or point.notes]
    for point in marked[-5:]:
        words = ", ".join((*(f"tag {tag}" for tag in point.tags), *(f"note: {note}" for note in point.notes)))
        found.append(f"{each.benchmark}: {_day(point.at)} {point.record_id[:13]} {words}")
    return found


def plot_history(series: Sequence[SeriesTrend], path: Path) -> None:
    """A picture with one panel per series: throughput over time, changes as vertical lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(series), 1, figsize=(9, 2.4 * len(series)), squeeze=False, layout="constrained")
    for axis, each in zip(axes[:, 0], series, strict=True):
        times = [datetime.fromtimestamp(point.at) for point in each.points]
        axis.plot(times, [point.per_s for point in each.points], ".-", linewidth=0.8)
        for change in each.changes:
            colour = "tab:red" if change.ratio < 1 else "tab:green"
            axis.axvline(datetime.fromtimestamp(change.at), color=colour, linestyle="--")
        axis.set_title(
            one_line(f"{each.benchmark} ({each.device_name})", 110).replace("$", r"\$"), fontsize=8, loc="left"
        )
        axis.set_ylabel("per second", fontsize=8)
        axis.tick_params(labelsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _day(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")


def _short(value: str | None) -> str:
    return "unknown" if value is None else value[:12]
