"""This module draws the pictures of a report: curves over the batch, recipes side by side, trainings, loads and captured steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import msgspec

from redline.analyze.load import LoadSummary
from redline.analyze.train import TrainingSummary
from redline.model.metrics import Row
from redline.model.units import format_bytes, format_rate
from redline.show.canvas import COLOURS, label_text, new_figure, save_figure
from redline.show.charts import Star, bar_figure, curve_figure
from redline.show.contents import Contents, Section
from redline.show.profile import step_figure


def draw_pictures(contents: Contents, folder: Path) -> dict[str, Path]:
    """Draws the pictures that have something to show, and returns their files by their titles."""
    drawn: dict[str, Path | None] = {}
    for name, figure, title in (
        ("throughput", "throughput", "Throughput against batch"),
        ("latency", "latency_p50", "Median latency against batch"),
    ):
        if curves := [row for row in _curves(contents) if figure in row]:
            stars = _stars(contents) if figure == "throughput" else ()
            drawn[title] = save_figure(curve_figure(curves, figure, stars), folder / f"{name}.png")
    if contents.trainings:
        drawn["Trainings"] = save_figure(training_figure(contents.trainings), folder / "training.png")
    if contents.loads:
        drawn["Latency under load"] = save_figure(load_figure(contents.loads), folder / "load.png")
    if (section := next(filter(_bars, contents.sections), None)) is not None:
        table = msgspec.structs.replace(section.table, rows=tuple(_bars(section)))
        drawn["Recipes compared"] = save_figure(bar_figure(table), folder / "recipes.png")
    drawn |= _steps(contents, folder)
    return {title: path for title, path in drawn.items() if path is not None}


def _curves(contents: Contents) -> list[Row]:
    """Returns the rows of the first task and setting of each model in which a recipe was measured at several batches."""
    chosen: dict[str, Section] = {}
    for section in contents.sections:
        of_recipe = Counter(row["recipe"] for row in section.table.rows if "throughput" in row and row.get("batch"))
        if max(of_recipe.values(), default=0) > 1:
            chosen.setdefault(section.subject.model, section)
    return [row for section in chosen.values() for row in section.table.rows if row.get("kind") != "profile"]


def _stars(contents: Contents) -> list[Star]:
    return [
        Star(curve.subject.model, curve.recipe, curve.knee.batch, curve.knee.throughput_per_s)
        for curve in contents.curves
        if curve.knee is not None
    ]


def _bars(section: Section) -> list[Row]:
    """Returns the rows of the batch at which most recipes were measured; none if nothing was timed."""
    timed = [row for row in section.table.rows if "throughput" in row and row.get("kind") != "profile"]
    timed = timed or [row for row in section.table.rows if "throughput" in row]
    (batch, _), *_ = Counter(row.get("batch") for row in timed).most_common(1) or [(None, 0)]
    return [row for row in timed if row.get("batch") == batch]


def load_figure(rows: Sequence[LoadSummary]) -> Any:
    """Returns a figure that has latency over the rate of requests, and the batches that formed."""
    figure, (latency, batches) = new_figure(11, 4.2, columns=2)
    several = len({row.model for row in rows}) > 1
    for colour, row in zip(cycle(COLOURS), (row for row in rows if row.points), strict=False):
        rates = [point.rate for point in row.points]
        tails = [math.nan if point.p99_s is None else 1e3 * point.p99_s for point in row.points]
        name = label_text(f"{row.model} {row.recipe}" if several else row.recipe)
        latency.plot(rates, tails, "o-", color=colour, label=f"{name}, p99")
        latency.plot(rates, [1e3 * point.p50_s for point in row.points], "--", color=colour, alpha=0.7)
        batches.plot(rates, [point.mean_batch for point in row.points], "o-", color=colour)
        if row.sustainable_rate is not None:
            latency.axvline(row.sustainable_rate, color=colour, linestyle=":", alpha=0.8)
    slo = next((row.load.slo_p99_s for row in rows if row.load.slo_p99_s is not None), None)
    if slo is not None:
        latency.axhline(1e3 * slo, color="0.4", linestyle="-.", label="target for p99")
    for axes in (latency, batches):
        axes.set_xscale("log")
        axes.set_xlabel("requests per second")
    latency.set_yscale("log")
    latency.set_ylabel("ms")
    latency.set_title("latency: p99, p50 dashed; dotted: sustained rate", fontsize="small")
    latency.legend(fontsize="small")
    batches.set_ylabel("requests per batch")
    batches.set_title("mean batch that formed", fontsize="small")
    return figure


def training_figure(trainings: Sequence[TrainingSummary]) -> Any:
    """Returns a figure that has, side by side, accuracy over the time of training and the speed of each training."""
    figure, (left, right) = new_figure(10.5, 4.4, columns=2)
    several = len({training.recipe for training in trainings}) > 1
    names = [label_text(f"{each.model} · {each.recipe}" if several else each.model, 40) for each in trainings]
    for number, (training, name) in enumerate(zip(trainings, names, strict=True)):
        colour, speed = COLOURS[number % len(COLOURS)], training.samples_per_s or 0.0
        ends = accumulate(epoch.seconds for epoch in training.epochs)
        known = [
            (at, 100 * epoch.val_accuracy)
            for at, epoch in zip(ends, training.epochs, strict=True)
            if epoch.val_accuracy is not None
        ]
        if known:
            left.plot(*zip(*known, strict=True), marker="o", color=colour, label=name, markersize=4)
        right.barh(number, speed, color=colour, height=0.6)
        label = f"  {format_rate(speed)}  {format_bytes(training.peak_bytes)}  {'failed' if training.failure else ''}"
        right.annotate(label, (speed, number), va="center", fontsize=8)
    left.set_xlabel("seconds of training and validation")
    left.set_ylabel("held-out accuracy, %")
    left.set_ylim(0, 100)
    right.set_yticks(range(len(names)), names, fontsize=8.5)
    right.invert_yaxis()
    right.margins(x=0.5)
    right.set_xlabel("samples per second, memory")
    figure.legend(loc="outside lower center", ncols=min(4, len(names)), fontsize=8, frameon=False)
    return figure


def _steps(contents: Contents, folder: Path) -> dict[str, Path]:
    """Draws one picture for each profile whose steps are known."""
    captures = {each.capture.record_id: each.capture for each in contents.profiles if each.capture is not None}
    drawn = {}
    for number, (record_id, lanes) in enumerate(contents.lanes.items(), 1):
        capture = captures[record_id]
        batch = f" · batch {capture.batch}" if capture.batch else ""
        title = f"The captured step: {capture.model} · {capture.task} · {capture.recipe}{batch}"
        drawn[title] = save_figure(
            step_figure(lanes, title), folder / ("step.png" if number == 1 else f"step-{number}.png")
        )
    return drawn
