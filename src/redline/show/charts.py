"""These pictures show one figure of a table's rows: as bars, which may be made of letters for a terminal, or as curves over the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from redline.model.metrics import Metric, Row, Table
from redline.show.canvas import COLOURS, batch_ticks, label_text, log_ticks, new_figure

MOST_BARS = 24
"""A picture shows at most this many rows as bars."""
MARKERS = "osD^vP"
WIDTH = 80
"""A line in a terminal has at most this many characters: the name, the bar and the number."""


def bars_of(table: Table, name: str) -> Iterator[tuple[str, Metric]]:
    """Yields what is drawn: the rows whose number can be used."""
    for row in table.rows:
        metric = row.metric(name)
        if metric is not None and metric.value is not None and not metric.is_too_noisy:
            yield table.called(row) or name, metric


def bar_figure(table: Table, name: str = "throughput") -> Any:
    """Returns a matplotlib figure that has one bar for each row, with its interval."""
    bars = list(bars_of(table, name))[:MOST_BARS]
    figure, axes = new_figure(7.6, 1.2 + 0.36 * len(bars))
    for index, (_, metric) in enumerate(bars):
        value = metric.value or 0.0
        low, high = (value if end is None else end for end in (metric.low, metric.high))
        reach = [[max(0.0, value - low)], [max(0.0, high - value)]] if metric.has_interval else None
        axes.barh(index, value, xerr=reach, color=COLOURS[0] if index else "#5c6573", error_kw={"capsize": 3})
    axes.set_yticks(range(len(bars)), [label_text(called) for called, _ in bars], fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(label_text(bars[0][1].header if bars else name))
    axes.set_title(label_text(table.title, 90), fontsize=10.5, loc="left")
    return figure


def bar_text(table: Table, name: str = "throughput") -> str:
    """Returns the same bars as text for a terminal."""
    bars = list(bars_of(table, name))
    most = max((metric.value or 0.0 for _, metric in bars), default=0.0) or 1.0
    room = max((len(called) for called, _ in bars), default=0)
    longest = max(10, WIDTH - room - max((len(metric.in_words) for _, metric in bars), default=0) - 3)
    return "\n".join(
        f"{called:<{room}}  {'█' * max(1, round(longest * (metric.value or 0.0) / most))} {metric.in_words}"
        for called, metric in bars
    )


class Star(NamedTuple):
    """This point of a curve is marked with a star, such as its knee."""

    model: str
    recipe: str
    batch: float
    value: float


def curve_figure(rows: Sequence[Row], name: str, stars: Sequence[Star] = ()) -> Any:
    """Returns the figure against the batch: each recipe is a line, and each model has a part of the picture."""
    rows = [row for row in rows if (metric := row.metric(name)) and not metric.is_too_noisy and row.get("batch")]
    models, recipes = (list(dict.fromkeys(str(row[fact]) for row in rows)) for fact in ("model", "recipe"))
    in_seconds = any((metric := row.metric(name)) and metric.unit == "s" for row in rows)
    figure, made = new_figure(4.6 * len(models), 4.4, columns=len(models))
    for model, axes in zip(models, made if len(models) > 1 else (made,), strict=True):
        own = [row for row in rows if row["model"] == model]
        for number, recipe in enumerate(recipes):
            points = [(int(str(row["batch"])), row.metric(name)) for row in own if row["recipe"] == recipe]
            scale = 1e3 if in_seconds else 1.0
            ends = [(metric.value or 0.0, metric.low, metric.high) for _, metric in points if metric]
            axes.errorbar(
                [batch for batch, _ in points],
                [scale * value for value, *_ in ends],
                yerr=[
                    [scale * max(0.0, value - (value if low is None else low)) for value, low, _ in ends],
                    [scale * max(0.0, (value if high is None else high) - value) for value, _, high in ends],
                ],
                marker=MARKERS[number % len(MARKERS)],
                color=COLOURS[number % len(COLOURS)],
                label=label_text(recipe) if model == models[0] else None,
                capsize=3,
            )
        for star in (star for star in stars if star.model == model and star.recipe in recipes):
            colour = COLOURS[recipes.index(star.recipe) % len(COLOURS)]
            axes.plot([star.batch], [star.value], "*", color=colour, markersize=15, mec="black")
        batch_ticks(axes, {int(str(row["batch"])) for row in own})
        if in_seconds:
            log_ticks(axes)
        else:
            axes.set_ylim(bottom=0)
        axes.set_ylabel("median ms per step" if in_seconds else "items per second")
        axes.set_title(label_text(model), fontsize=10.5, loc="left")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure
