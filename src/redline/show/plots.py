"""The pictures of a report: curves against the batch, recipes side by side, trainings, loads and captured steps."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import msgspec

from redline.analyze.batch import BatchSummary
from redline.analyze.load import LoadSummary
from redline.analyze.profile import Profile
from redline.analyze.train import TrainingSummary
from redline.model.metrics import Row
from redline.model.units import format_bytes, format_rate
from redline.show.canvas import COLOURS, label_text, new_figure, save_figure
from redline.show.charts import Star, bar_figure, curve_figure
from redline.show.contents import Contents, Section
from redline.show.profile import step_figure
from redline.show.terminal import one_line


def draw_pictures(contents: Contents, folder: Path) -> dict[str, Path]:
    """The pictures that have something to show, by their titles."""
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
    """Rows of the first task and setting of each model in which a recipe was measured at several batches."""
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
    """The rows of the batch at which most recipes were measured; none if nothing was timed."""
    timed = [row for row in section.table.rows if "throughput" in row and row.get("kind") != "profile"]
    timed = timed or [row for row in section.table.rows if "throughput" in row]
    (batch, _), *_ = Counter(row.get("batch") for row in timed).most_common(1) or [(None, 0)]
    return [row for row in timed if row.get("batch") == batch]


def load_figure(rows: Sequence[LoadSummary]) -> Any:
    """Latency against the rate of requests, and the batches that formed."""
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
    slo = next((row.slo_p99_s for row in rows if row.slo_p99_s is not None), None)
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
    """Accuracy over the time of training, and the speed of each, side by side."""
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
    """One picture for each profile whose steps are known."""
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


KERNELS = 15


def batch_figure(found: BatchSummary) -> Any:
    """Throughput against the batch, with the knee; None where fewer than two batches ran."""
    fitting = sorted((trial for trial in found.trials if trial.fits), key=lambda trial: trial.batch)
    if len(fitting) < 2:
        return None
    figure = _blank_figure(
        f"{found.row.model}: throughput against batch", "batch", f"{found.row.item or 'items'} per second"
    )
    batches, speeds = [trial.batch for trial in fitting], [trial.throughput_per_s for trial in fitting]
    figure.add_scatter(x=batches, y=speeds, mode="lines+markers", name=_text(found.row.recipe), line_color=COLOURS[0])
    if (knee := found.knee) is not None:
        star = {"symbol": "star", "size": 15, "color": COLOURS[1]}
        figure.add_scatter(x=[knee.batch], y=[knee.throughput_per_s], mode="markers", name="knee", marker=star)
    figure.update_xaxes(type="log", tickvals=batches, ticktext=[str(batch) for batch in batches])
    figure.update_yaxes(rangemode="tozero")
    return figure


def epoch_figure(training: TrainingSummary) -> Any:
    """Losses and accuracy by epoch; None before the first is done."""
    if not training.epochs:
        return None
    figure = _blank_figure(f"{training.model}: losses and accuracy", "epoch", "loss")
    numbers = [epoch.number for epoch in training.epochs]
    for number, (name, field) in enumerate((("training loss", "train_loss"), ("held-out loss", "val_loss"))):
        values = [getattr(epoch, field) for epoch in training.epochs]
        figure.add_scatter(x=numbers, y=values, mode="lines+markers", name=name, line_color=COLOURS[number])
    accuracy = [None if epoch.val_accuracy is None else 100 * epoch.val_accuracy for epoch in training.epochs]
    figure.add_scatter(
        x=numbers, y=accuracy, mode="lines+markers", name="accuracy, %", yaxis="y2", line_color=COLOURS[2]
    )
    figure.update_layout(yaxis2={"overlaying": "y", "side": "right", "range": [0, 100], "title": "accuracy, %"})
    figure.update_xaxes(dtick=1)
    return figure


def phase_figure(profile: Profile) -> Any:
    """Host and device seconds of each phase, per step; None for inference, which has one."""
    if len(profile.phases) < 2:
        return None
    steps = profile.steps_seen or 1
    figure = _blank_figure("phases of a step", "", "ms per step")
    names = [phase.name for phase in profile.phases]
    sides: list[tuple[str, Sequence[float]]] = [("host", [phase.host_s for phase in profile.phases])]
    if profile.has_device:
        sides.append(("device", [phase.device_s for phase in profile.phases]))
    for number, (side, seconds) in enumerate(sides):
        figure.add_bar(x=names, y=[1e3 * each / steps for each in seconds], name=side, marker_color=COLOURS[number])
    return figure


def class_figure(profile: Profile) -> Any:
    """Where the busy time goes."""
    if not profile.classes:
        return None
    rows = [row for row in profile.classes if row.total_s > 0]
    title = "time by kernel class" if profile.has_device else "time by operator class"
    hints = [f"{row.total_s * 1e3:.3f} ms in {row.calls} calls" for row in rows]
    shares: dict[str, float] = {row.name: 100 * row.share for row in rows}
    return _ranking_figure(title, "% of the busy time", shares, hints, COLOURS[0])


def kernel_figure(profile: Profile) -> Any:
    """The longest kernels; None where the host is the device."""
    if not profile.kernels:
        return None
    rows = profile.kernels[:KERNELS]
    times = {_text(f"{rank}. {row.short_name[:60]}"): 1e3 * row.total_s for rank, row in enumerate(rows, start=1)}
    hints = [f"{row.kernel_class}, {row.calls} calls, {row.share:.1%}" for row in rows]
    return _ranking_figure("longest kernels", "ms in all captured steps", times, hints, COLOURS[2])


def _ranking_figure(title: str, unit: str, bars: dict[str, float], hints: list[str], colour: str) -> Any:
    """Horizontal bars, the first on top."""
    figure = _blank_figure(title, unit, "")
    figure.add_bar(y=list(bars), x=list(bars.values()), orientation="h", marker_color=colour, hovertext=hints)
    figure.update_yaxes(autorange="reversed")
    return figure


def _blank_figure(title: str, x: str, y: str) -> Any:
    from plotly.graph_objects import Figure

    figure = Figure()
    figure.update_layout(
        title=_text(title), xaxis_title=_text(x), yaxis_title=_text(y), template="plotly_white", height=380
    )
    return figure


def _text(text: str) -> str:
    """plotly reads a few tags in any text."""
    return html.escape(one_line(text, 120), quote=False)
