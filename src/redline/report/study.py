"""The study of precision and compilation: one table, two pictures with all models, and why one gains more than the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.recommend import is_surely_faster
from redline.analyze.summary import RunSummary
from redline.report.canvas import COLOURS, label_text, new_figure, save_figure
from redline.report.cells import milliseconds, ratio_cell, rounded
from redline.report.run import remarks
from redline.report.terminal import Fitted, cell, make_table, table
from redline.units import format_share

HEADERS = (
    "model",
    "recipe",
    "batch",
    "items/s",
    "mean ms",
    "p50 ms",
    "p95 ms",
    "p99 ms",
    "speed-up",
    "memory change",
    "trust",
)
MARKERS = "osD^vP"


def study_report(rows: Sequence[RunSummary]) -> RenderableType:
    shown = make_table(Text("precision and compilation", style="bold"))
    for header in HEADERS:
        left = header in ("model", "recipe", "trust")
        shown.add_column(header, justify="left" if left else "right", no_wrap=not left)
    for row in rows:
        shown.add_row(*map(Text, study_cells(row)))
    hidden = ("p99 ms", "p95 ms", "trust", "memory change", "p50 ms", "mean ms", "batch")
    return Group(Fitted(shown, hidden), *remarks(rows), Text(why(rows), style="bold"))


def study_cells(row: RunSummary) -> list[str]:
    batch = str(row.batch) if row.batch else "–"
    if row.failure is not None:
        return [row.model, row.recipe, batch, *["–"] * 7, f"failed: {row.failure.kind} at {row.failure.stage}"]
    latency, versus = row.latency_s, row.vs_first
    times = (latency.mean, latency.p50, latency.p95, latency.p99) if latency else (None,) * 4
    change = versus.memory_change if versus else None
    return [
        row.model,
        row.recipe,
        batch,
        rounded(row.throughput_per_s, None),
        *(milliseconds(each, None) for each in times),
        ratio_cell(row) or "–",
        "–" if change is None else f"{change:+.0%}",
        ", ".join(row.verdict.labels),
    ]


def study_markdown(rows: Sequence[RunSummary]) -> str:
    lines = table(list(HEADERS), [[cell(each) for each in study_cells(row)] for row in rows], left=2)
    pictures = ["![Latency against batch](latency.png)", "![Throughput against batch](throughput.png)"]
    return "\n".join(["# Precision and compilation", "", f"**{why(rows)}**", "", *pictures, "", *lines, ""])


def why(rows: Sequence[RunSummary]) -> str:
    """Which model gains more from its best recipe, and what its roofline says about the reason."""
    best: dict[str, RunSummary] = {}
    # At the largest batch: at a small one the host decides, whatever the model.
    largest = max((row.batch or 0 for row in rows if is_surely_faster(row)), default=0)
    for row in (row for row in rows if is_surely_faster(row) and (row.batch or 0) == largest):
        known = best.get(row.model)
        if known is None or _ratio(row) > _ratio(known):
            best[row.model] = row
    if not best:
        return "no recipe is proven faster than the baseline here"
    ordered = sorted(best.values(), key=_ratio, reverse=True)
    told = [f"{row.model} gains {_ratio(row):.2f}× with {row.recipe} at batch {row.batch}" for row in ordered]
    reasons = [reason for row in ordered if (reason := _reason(row, rows))]
    return "; ".join(told) + (f": {'; '.join(reasons)}" if reasons else "")


def _ratio(row: RunSummary) -> float:
    return row.vs_first.ratio if row.vs_first else 1.0


def _reason(row: RunSummary, rows: Sequence[RunSummary]) -> str:
    """How much of the baseline's step its products need at their peak, and how much the recipe leaves of them."""
    same = (each for each in rows if each.model == row.model and each.batch == row.batch)
    first = next((each for each in same if row.vs_first and each.recipe == row.vs_first.recipe), None)
    if first is None or first.roofline is None or row.roofline is None:
        return ""
    before, after = first.roofline, row.roofline
    return (
        f"by their rooflines the products of {row.model} need {format_share(before.efficiency)} of the baseline's step at the "
        f"device's peak, and memory traffic is {format_share(1 - _products(first))} of what its unfused operators need at least: "
        f"smaller formats speed up the first, fusing the second; {after.headroom or 0:.1f}× are left"
    )


def _products(row: RunSummary) -> float:
    """The share of the unfused time in operators that the matrix units limit."""
    found = row.roofline
    if found is None or not found.unfused_s:
        return 0.0
    return sum(one.attainable_s for one in found.classes if one.limited_by == "compute") / found.unfused_s


def draw_study(rows: Sequence[RunSummary], folder: Path) -> list[Path]:
    """One picture of latency and one of throughput, with all models side by side."""
    latency = _drawn(rows, "ms per step", lambda row: row.latency_s.p50 * 1e3 if row.latency_s else None, log=True)
    speed = _drawn(rows, "items per second", lambda row: row.throughput_per_s, log=False)
    return [save_figure(latency, folder / "latency.png"), save_figure(speed, folder / "throughput.png")]


def _drawn(rows: Sequence[RunSummary], unit: str, value: Any, *, log: bool) -> Any:
    models = list(dict.fromkeys(row.model for row in rows))
    recipes = list(dict.fromkeys(row.recipe for row in rows))
    figure, made = new_figure(4.6 * len(models), 4.4, columns=len(models))
    for model, axes in zip(models, made if len(models) > 1 else (made,), strict=True):
        for number, recipe in enumerate(recipes):
            own = [row for row in rows if (row.model, row.recipe) == (model, recipe) and value(row) is not None]
            look = {"marker": MARKERS[number % len(MARKERS)], "color": COLOURS[number % len(COLOURS)]}
            label = label_text(recipe) if model == models[0] else None
            axes.plot([row.batch for row in own], [value(row) for row in own], label=label, **look)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xticks(sorted({row.batch for row in rows if row.model == model and row.batch}))
        axes.set_yscale("log" if log else "linear")
        if not log:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("batch")
        axes.set_ylabel(unit)
        axes.set_title(label_text(model), fontsize=10.5, loc="left")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure
