"""A study as a page with pictures, and why one model gains more than another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from redline.analyze.grid import GridSummary, Rung
from redline.analyze.recommend import is_surely_faster
from redline.analyze.summary import RunSummary
from redline.model.units import format_share
from redline.show.canvas import COLOURS, label_text, log_ticks, new_figure, save_figure
from redline.show.cells import ratio_cell
from redline.show.grid import plain_table
from redline.show.plots import Measured, batch_ticks, latency_ms_of, throughput_of
from redline.show.terminal import markdown_line, markdown_table

MARKERS = "osD^vP"


def study_markdown(
    title: str,
    sentences: Sequence[str],
    pictures: Sequence[Path],
    summary: GridSummary,
    rows: Sequence[RunSummary],
    rungs: Sequence[Rung],
    columns: Sequence[str],
) -> str:
    """The page of a study: its question, its pictures and its table."""
    headers, cells = plain_table(summary, rows, rungs, columns)
    lines = markdown_table(headers, cells, left=2)
    told = (markdown_line("{}\n", sentence) for sentence in sentences if sentence)
    shown = [f"![{path.stem}]({path.name})" for path in pictures]
    return "\n".join([markdown_line("# {}", title), "", *told, *shown, "", *lines, ""])


def why(rows: Sequence[RunSummary]) -> str:
    """Which model gains more from its best recipe, and why, as their rooflines tell it: one sentence."""
    best = _best_of_each(rows)
    if not best:
        return f"No recipe is proven faster than {_reference(rows)} here."
    ordered = sorted(best, key=_ratio, reverse=True)
    told = ", ".join(f"{row.model} gains {ratio_cell(row)} with {row.recipe}" for row in ordered)
    if len(ordered) == 1:
        return f"At batch {ordered[0].batch} {told}."
    if not _surely_more(ordered[0], ordered[-1]):
        return f"At batch {ordered[0].batch} {told}; which of them gains most is not decided."
    return f"At batch {ordered[0].batch} {told} {_reason(ordered[0], ordered[-1], rows)}."


def _reference(rows: Sequence[RunSummary]) -> str:
    """What all were set against: the first recipe, whatever was asked for."""
    recipe = next((row.vs_first.recipe for row in rows if row.vs_first), "baseline")
    return "the baseline" if recipe == "baseline" else recipe


def _surely_more(more: RunSummary, less: RunSummary) -> bool:
    """Gains whose intervals overlap may be the same: there is no difference to explain."""
    first, second = more.vs_first, less.vs_first
    ends = (first.low if first else None, second.high if second else None)
    return ends[0] is not None and ends[1] is not None and ends[0] > ends[1]


def _best_of_each(rows: Sequence[RunSummary]) -> list[RunSummary]:
    """The largest proven gain of each model, at the largest batch at which any is proven: at a small one the host decides."""
    proven = [row for row in rows if is_surely_faster(row)]
    largest = max((row.batch or 0 for row in proven), default=0)
    best: dict[str, RunSummary] = {}
    for row in (row for row in proven if (row.batch or 0) == largest):
        if row.model not in best or _ratio(row) > _ratio(best[row.model]):
            best[row.model] = row
    return list(best.values())


def _ratio(row: RunSummary) -> float:
    return row.vs_first.ratio if row.vs_first else 1.0


CLEARLY = 0.02
"""Shares that differ by less explain nothing."""


def _reason(more: RunSummary, less: RunSummary, rows: Sequence[RunSummary]) -> str:
    """What sets the two apart, the plainest first."""
    if less.bound.label == "host" and more.bound.label != "host":
        return f"because {less.model}'s fastest step still waits for the host, which no number format makes faster"
    before = [_first_of(row, rows) for row in (more, less)]
    limits = [row.roofline if row is not None else None for row in (*before, more, less)]
    if any(found is None or found.error is not None or found.headroom is None for found in limits):
        return "(their rooflines, which would say why, are not known: redline roofline)"
    products = [_products(row) for row in before if row is not None]
    if products[0] > products[1] + CLEARLY and _has_faster_products(more, before[0]):
        under = "fp32 operators" if _reference(rows) == "the baseline" else f"operators under {_reference(rows)}"
        return (
            f"because by their rooflines matrix products are {format_share(products[0])} of the least time of {more.model}'s "
            f"{under} and {format_share(products[1])} of {less.model}'s, and smaller formats speed up products far more "
            "than the memory traffic that is the rest"
        )
    headrooms = [found.headroom or 0.0 for found in limits if found is not None]
    if headrooms[0] > headrooms[1] * (1 + CLEARLY):
        return (
            f"because {more.model}'s baseline takes {headrooms[0]:.1f} times its roofline and {less.model}'s {headrooms[1]:.1f} "
            "times: it had more to gain"
        )
    if headrooms[3] > headrooms[2] * (1 + CLEARLY):
        return (
            f"because {more.model}'s fastest recipe comes within {headrooms[2]:.1f} times its roofline and {less.model}'s within "
            f"{headrooms[3]:.1f} times"
        )
    return "and their rooflines do not explain the difference"


def _has_faster_products(row: RunSummary, before: RunSummary | None) -> bool:
    """Whether the recipe computes in formats that the device is faster in; compiling alone does not."""
    limits = (row.roofline, before.roofline if before is not None else None)
    return limits[0] is not None and limits[1] is not None and limits[0].compute_s < limits[1].compute_s


def _first_of(row: RunSummary, rows: Sequence[RunSummary]) -> RunSummary | None:
    """What it was set against."""
    same = (each for each in rows if each.model == row.model and each.batch == row.batch)
    return next((each for each in same if row.vs_first and each.recipe == row.vs_first.recipe), None)


def _products(row: RunSummary) -> float:
    """The share of the unfused time in operators that the matrix units limit."""
    found = row.roofline
    if found is None or not found.unfused_s:
        return 0.0
    return sum(one.attainable_s for one in found.classes if one.limited_by == "compute") / found.unfused_s


def draw_study(rows: Sequence[RunSummary], folder: Path) -> list[Path]:
    """One picture of latency and one of throughput against the batch, with all models side by side; none for one batch."""
    rows = [row for row in rows if row.training is None]
    if len({row.batch for row in rows if row.batch}) < 2:
        return []
    latency = _drawn(rows, "median ms per step", latency_ms_of, log=True)
    speed = _drawn(rows, "items per second", throughput_of, log=False)
    return [save_figure(latency, folder / "latency.png"), save_figure(speed, folder / "throughput.png")]


def _drawn(rows: Sequence[RunSummary], unit: str, value: Callable[[RunSummary], Measured | None], *, log: bool) -> Any:
    models = list(dict.fromkeys(row.model for row in rows))
    recipes = list(dict.fromkeys(row.recipe for row in rows))
    figure, made = new_figure(4.6 * len(models), 4.4, columns=len(models))
    for model, axes in zip(models, made if len(models) > 1 else (made,), strict=True):
        for number, recipe in enumerate(recipes):
            own = [row for row in rows if (row.model, row.recipe) == (model, recipe)]
            points = [(row.batch, each) for row in own if (each := value(row)) is not None]
            axes.errorbar(
                [batch for batch, _ in points],
                [each.value for _, each in points],
                yerr=[[each.below for _, each in points], [each.above for _, each in points]],
                marker=MARKERS[number % len(MARKERS)],
                color=COLOURS[number % len(COLOURS)],
                label=label_text(recipe) if model == models[0] else None,
                capsize=3,
            )
        batch_ticks(axes, {row.batch for row in rows if row.model == model and row.batch})
        if log:
            log_ticks(axes)
        else:
            axes.set_ylim(bottom=0)
        axes.set_ylabel(unit)
        axes.set_title(label_text(model), fontsize=10.5, loc="left")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure
