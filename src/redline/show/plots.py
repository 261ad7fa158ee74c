"""The pictures of a report: throughput and median latency against the batch, recipes side by side."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any, NamedTuple

from redline.analyze.batch import BatchSummary
from redline.analyze.load import LoadSummary
from redline.analyze.profile import Profile
from redline.analyze.recommend.evidence import Curve
from redline.analyze.summary import RunSummary
from redline.analyze.train import TrainingSummary
from redline.model.identity import Subject
from redline.model.spec import BASELINE
from redline.model.units import format_bytes, format_rate, format_ratio
from redline.show.canvas import COLOURS, LABEL, batch_ticks, label_text, log_ticks, new_figure, save_figure
from redline.show.contents import Contents
from redline.show.profile import step_figure
from redline.show.terminal import one_line

MARKERS = "osD^Pvhp"
MOST_LINES = 12
MOST_BARS = 24
BASELINE_COLOUR = "#5c6573"


def draw_pictures(contents: Contents, folder: Path) -> dict[str, Path]:
    """Those that have something to show, by their titles."""
    drawn = {
        "Throughput against batch": _against_batch(
            contents.curves, folder / "throughput.png", throughput_of, "items per second", "throughput", knee=True
        ),
        "Median latency against batch": _against_batch(
            contents.curves, folder / "latency.png", latency_ms_of, "ms per step", "median latency"
        ),
        "Trainings": save_figure(training_figure(contents.trainings), folder / "training.png")
        if contents.trainings
        else None,
        "Latency under load": _saved(load_figure, contents.loads, folder / "load.png"),
        "Recipes compared": _recipes(contents, folder / "recipes.png"),
        **_steps(contents, folder),
    }
    return {title: path for title, path in drawn.items() if path is not None}


def _saved(draw: Callable[[Any], Any], rows: Sequence[Any], path: Path) -> Path | None:
    return save_figure(draw(rows), path) if rows else None


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


def _against_batch(
    curves: Sequence[Curve],
    path: Path,
    value: Callable[[RunSummary], Measured | None],
    unit: str,
    title: str,
    *,
    knee: bool = False,
) -> Path | None:
    lines = [curve for curve in curves if sum(value(row) is not None for row in curve.rows) > 1]
    if not lines:
        return None
    shown = sorted(lines, key=lambda curve: -len(curve.points))[:MOST_LINES]
    shown += _single_points(curves, shown)
    figure, axes = new_figure(8.4, 4.9)
    apart = _what_differs([curve.subject for curve in shown])
    for number, curve in enumerate(shown):
        points = [(row.batch, each) for row in curve.rows if (each := value(row)) is not None]
        colour, marker = _look(number)
        wrong = any(row.numerics and row.numerics.is_wrong for row in curve.rows)
        name = f"{curve.recipe} (numerics ✗)" if wrong else curve.recipe
        label = " · ".join([*apart[curve.subject], name])
        axes.errorbar(
            [batch for batch, _ in points],
            [each.value for _, each in points],
            yerr=[[each.below for _, each in points], [each.above for _, each in points]],
            marker=marker,
            color=colour,
            label=label_text(label),
            markersize=5,
            capsize=3,
        )
        if knee and curve.knee is not None:
            axes.plot([curve.knee.batch], [curve.knee.throughput_per_s], "*", color=colour, markersize=15, mec="black")
    batch_ticks(axes, {row.batch for curve in shown for row in curve.measured if row.batch})
    if knee:
        axes.set_ylim(bottom=0)
    else:
        log_ticks(axes)
    axes.set_ylabel(unit)
    more = f"; {len(lines) - MOST_LINES} more curves are not shown" if len(lines) > MOST_LINES else ""
    starred = "; a star marks the knee" if knee and any(curve.knee for curve in shown) else ""
    common = [part for part in _parts(shown[0].subject) if part not in apart[shown[0].subject]]
    where = f"{label_text(' · '.join(common), 70)}: " if common else ""
    axes.set_title(f"{where}{title}, 95 % intervals{starred}{more}", fontsize=10.5, loc="left")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return save_figure(figure, path)


def _single_points(curves: Sequence[Curve], shown: Sequence[Curve]) -> list[Curve]:
    """The fastest recipe of each subject shown, where it was measured at one batch only: a winner must not be missing."""
    found = []
    for subject in dict.fromkeys(curve.subject for curve in shown):
        own = [curve for curve in curves if curve.subject == subject and any(row.batch for row in curve.measured)]
        best = max(own, key=lambda curve: max(row.throughput_per_s or 0.0 for row in curve.measured), default=None)
        if best is not None and best not in shown:
            found.append(best)
    return found


def _look(number: int) -> tuple[str, str]:
    """A colour and a symbol that no other of 64 lines has together."""
    turn, index = divmod(number, len(COLOURS))
    return COLOURS[index], MARKERS[(index + turn) % len(MARKERS)]


def _parts(subject: Subject) -> list[str]:
    return [part for part in (subject.model, subject.task, subject.setting, subject.device) if part]


def _what_differs(subjects: Sequence[Subject]) -> dict[Subject, list[str]]:
    """For each subject, the parts that not all have."""
    common = set.intersection(*(set(_parts(subject)) for subject in subjects))
    return {subject: [part for part in _parts(subject) if part not in common] for subject in subjects}


def bars_of(contents: Contents) -> tuple[Subject, int | None, list[RunSummary]] | None:
    """What the picture of recipes shows: the subject and batch with the most recipes, interleaved ones before others."""
    groups: dict[tuple[Subject, int | None], dict[str, RunSummary]] = {}
    # Records of a profile come after those that were measured thoroughly.
    for line in sorted(contents.lines, key=lambda line: not line.is_capture):
        if line.row.throughput_per_s is not None:
            groups.setdefault((line.subject, line.row.batch), {})[line.row.recipe] = line.row
    if not groups:
        return None
    (subject, batch), rows = max(groups.items(), key=lambda item: (_in_turns(item[1].values()), len(item[1])))
    return subject, batch, sorted(rows.values(), key=lambda row: row.throughput_per_s or 0.0)[-MOST_BARS:]


def _recipes(contents: Contents, path: Path) -> Path | None:
    found = bars_of(contents)
    if found is None:
        return None
    subject, batch, bars = found
    figure, axes = new_figure(8.4, 1.7 + 0.42 * len(bars))
    for number, row in enumerate(bars):
        assert row.throughput_per_s is not None
        sound = row.verdict.trusted and not (row.numerics is not None and row.numerics.is_wrong)
        axes.barh(
            number,
            row.throughput_per_s,
            xerr=_error_bars(row),
            color="#b9c4cf" if not sound else BASELINE_COLOUR if row.recipe == BASELINE else COLOURS[0],
            hatch=None if sound else "//",
            edgecolor="white",
            error_kw={"capsize": 3, "elinewidth": 1},
        )
        axes.annotate(
            _bar_text(row), (_bar_end(row), number), (6, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(range(len(bars)), [_in_two_lines(row.recipe) for row in bars], fontsize=8.5)
    axes.margins(x=0.3)
    axes.set_xlim(left=0)
    first = next((row.vs_first.recipe for row in bars if row.vs_first is not None), None)
    against = f"; × against {label_text(first, 40)}" if first is not None else ""
    axes.set_xlabel(
        f"{label_text(bars[0].item or 'items')} per second, 95 % interval{against}\nhatched: not to be relied on"
    )
    axes.set_title(label_text(f"{subject}{f' · batch {batch}' if batch else ''}", 90), fontsize=10.5, loc="left")
    return save_figure(figure, path)


def _in_turns(rows: Iterable[RunSummary]) -> bool:
    return any(row.vs_first is not None and row.vs_first.low is not None for row in rows)


def _error_bars(row: RunSummary) -> list[list[float]] | None:
    interval, speed = row.throughput_interval, row.throughput_per_s
    if interval is None or speed is None:
        return None
    below, above = _reach(speed, interval.low, interval.high)
    return [[below], [above]]


def _bar_end(row: RunSummary) -> float:
    """Where the error bar ends, so that no text lies on it."""
    high = row.throughput_interval.high if row.throughput_interval is not None else 0.0
    return max(row.throughput_per_s or 0.0, high)


def _bar_text(row: RunSummary) -> str:
    ratio = format_ratio(row.vs_first.ratio) if row.vs_first is not None else ""
    doubt = "" if row.verdict.trusted else ", ".join(row.verdict.labels)
    wrong = "numerics ✗" if row.numerics is not None and row.numerics.is_wrong else ""
    return "  ".join(part for part in (f"{row.throughput_per_s:,.0f}", ratio, doubt, wrong) if part)


class Measured(NamedTuple):
    """A value with how far its interval reaches below and above it."""

    value: float
    below: float = 0.0
    above: float = 0.0


def throughput_of(row: RunSummary) -> Measured | None:
    speed, interval = row.throughput_per_s, row.throughput_interval
    if speed is None or not row.batch:
        return None
    return Measured(speed, *_reach(speed, interval.low, interval.high)) if interval else Measured(speed)


def latency_ms_of(row: RunSummary) -> Measured | None:
    latency = row.latency_s
    if latency is None or not row.batch:
        return None
    if latency.low is None or latency.high is None:
        return Measured(latency.p50 * 1e3)
    below, above = _reach(latency.p50, latency.low, latency.high)
    return Measured(latency.p50 * 1e3, below * 1e3, above * 1e3)


def _reach(value: float, low: float, high: float) -> tuple[float, float]:
    return max(0.0, value - low), max(0.0, high - value)


def _in_two_lines(recipe: str) -> str:
    """Wrapped between two switches: long recipes may differ in any of them."""
    cut = recipe.rfind("+", 0, LABEL) + 1
    if len(recipe) <= LABEL or not cut:
        return label_text(recipe)
    return f"{label_text(recipe[:cut])}\n{label_text(recipe[cut:])}"


KERNELS = 15


def batch_figure(found: BatchSummary) -> Any:
    """Throughput against the batch, with the knee; None where fewer than two batches ran."""
    fitting = sorted((trial for trial in found.trials if trial.fits), key=lambda trial: trial.batch)
    if len(fitting) < 2:
        return None
    figure = _blank_figure(f"{found.model}: throughput against batch", "batch", f"{found.item or 'items'} per second")
    batches, speeds = [trial.batch for trial in fitting], [trial.throughput_per_s for trial in fitting]
    figure.add_scatter(x=batches, y=speeds, mode="lines+markers", name=_text(found.recipe), line_color=COLOURS[0])
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
