"""Trainings for the terminal: a row per epoch, several trainings side by side, and what the loader has to do with it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.train import DATA_BOUND_SHARE, LoaderSummary, TrainingSummary
from redline.model.training import Epoch
from redline.model.units import counted, format_bytes, format_count, format_seconds, format_share, significant
from redline.show.canvas import COLOURS, new_figure, save_figure
from redline.show.terminal import Fitted, make_table, one_line

TOLD = 0.01
"""Of the training time: less between epochs is not worth a word."""


def train_report(rows: Sequence[TrainingSummary]) -> RenderableType:
    """Each training with its epochs; beside each other where there are several."""
    parts: list[RenderableType] = []
    for row in rows:
        parts += [epoch_table(row), *_remarks(row)]
    if len(rows) > 1:
        parts += [models_table(rows), *(remark for row in rows for remark in _failure(row, named=True))]
        parts += [Text(each, style="dim") for each in accuracy_remarks(rows)]
    parts.append(Text(next_step(rows), style="bold"))
    return Group(*parts)


def epoch_table(row: TrainingSummary) -> Fitted:
    table = make_table(Text(title_of(row), style="bold"))
    for header in epoch_headers(row):
        table.add_column(header, justify="right")
    for cells in epoch_cells(row):
        table.add_row(*cells)
    return Fitted(table)


def epoch_headers(row: TrainingSummary) -> list[str]:
    speed = f"{row.item or 'items'}/s"
    learned = ["loss", "val. loss", "accuracy"]
    return ["epoch", "time", speed, "with validation", *learned, "data wait", "memory", "utilisation"]


def epoch_cells(row: TrainingSummary) -> list[list[str]]:
    """One row per epoch, in the order of the headers."""
    return [
        [
            f"{epoch.epoch} (cut)" if epoch.is_cut else str(epoch.epoch),
            format_seconds(epoch.seconds),
            rate(epoch.samples_per_s),
            rate(epoch.samples_per_s_with_validation),
            figure(epoch.train_loss),
            figure(epoch.val_loss),
            format_share(epoch.val_accuracy),
            format_share(epoch.data_wait_share),
            format_bytes(epoch.peak_bytes),
            format_share(epoch.utilisation),
        ]
        for epoch in row.epochs
    ]


def title_of(row: TrainingSummary) -> str:
    parts = [
        row.model,
        f"{row.stem} stem" if row.stem else "",
        row.data,
        row.recipe,
        f"batch {row.batch}" if row.batch else "",
        f"{row.device_name or row.device} ({row.device})" if row.device_name else row.device,
    ]
    return one_line(" · ".join(part for part in parts if part))


def models_table(rows: Sequence[TrainingSummary]) -> Fitted:
    """Across models: what they are, how fast, how good after as many epochs, and what is in the way."""
    table = make_table(Text("side by side", style="bold"))
    headers = ["model", "recipe", "batch", "parameters", "GFLOPs/item", "items/s", "epoch", "memory", "epochs"]
    for header in headers:
        table.add_column(header, justify="left" if header in ("model", "recipe") else "right", overflow="fold")
    for header in ("accuracy", "best", "data wait", "bottleneck"):
        table.add_column(header, justify="left" if header == "bottleneck" else "right")
    for row in rows:
        table.add_row(
            one_line(row.model, 40),
            one_line(row.recipe, 40),
            str(row.batch or "–"),
            format_count(row.parameters),
            figure(row.flops / row.batch / 1e9) if row.flops and row.batch else "n/a",
            rate(row.samples_per_s),
            format_seconds(row.epoch_s),
            format_bytes(row.peak_bytes),
            str(len(row.epochs)),
            format_share(row.accuracy),
            format_share(row.best_accuracy),
            format_share(row.data_wait_share),
            "failed" if row.failure else bottleneck(row),
        )
    return Fitted(table)


def accuracy_remarks(rows: Sequence[TrainingSummary]) -> list[str]:
    """Of each recipe and seed, whether its accuracy differs from that of the first training of the same model on the same
    data by more than so few held-out samples can show."""
    told: list[str] = []
    firsts: dict[tuple[object, ...], TrainingSummary] = {}
    for row in rows:
        if row.accuracy is None or not row.judged or row.state != "done":
            continue
        first = firsts.setdefault((row.model, row.data, row.batch, len(row.epochs), row.judged), row)
        if first is row or first.accuracy is None:
            continue
        names = [_named(each, first, row) for each in (row, first)]
        apart = 100 * (row.accuracy - first.accuracy)
        chance = 200 * math.sqrt(
            sum(max(p * (1 - p), 1 / row.judged) for p in (row.accuracy, first.accuracy)) / row.judged
        )
        of = f"{counted(row.judged, 'held-out sample')} (±{significant(chance, 2)} points)"
        if abs(apart) <= chance:
            told.append(f"accuracy of {names[0]} and {names[1]}: no difference that {of} can show")
            continue
        where = f"{significant(abs(apart), 2)} points {'above' if apart > 0 else 'below'} that of {names[1]}"
        told.append(
            f"accuracy of {names[0]}: {where}, more than chance among {of}; one training each: other seeds (--seed) tell "
            "whether the recipe is the reason"
        )
    return told


def _named(row: TrainingSummary, *beside: TrainingSummary) -> str:
    """By its recipe, and by its seed where that is what differs."""
    with_seed = len({each.seed for each in beside}) > 1
    return f"{row.recipe} with seed {row.seed}" if with_seed else row.recipe


def bottleneck(row: TrainingSummary) -> str:
    """What limits it where that is known, else the longest phase."""
    if row.bound.label not in ("unknown", "device"):
        return row.bound.label
    longest = max(row.phase_shares, key=lambda name: row.phase_shares[name], default=None)
    return f"{longest} {format_share(row.phase_shares[longest])}" if longest else "unknown"


def loader_report(found: LoaderSummary) -> RenderableType:
    return Group(loader_table(found), *loader_remarks(found), Text(f"next: {found.next}", style="bold"))


def loader_table(found: LoaderSummary) -> Fitted:
    table = make_table(Text("loader and model", style="bold"))
    for header in ("part", "workers", "prefetch", "items/s", "data wait"):
        table.add_column(header, justify="left" if header == "part" else "right")
    names = {"loader": "loader alone", "model": "model alone", "together": "together"}
    for trial in found.trials:
        counts = trial.part != "model"
        table.add_row(
            names[trial.part],
            str(trial.workers) if counts else "–",
            ("on" if trial.prefetch else "off") if trial.part == "together" else "–",
            rate(trial.per_s),
            format_share(trial.data_wait_share) if trial.data_wait_share is not None else "–",
        )
    return Fitted(table)


def loader_remarks(found: LoaderSummary) -> Iterator[Text]:
    yield Text(loader_sentence(found), style="yellow" if found.verdict == "data-bound" else "green")


def loader_sentence(found: LoaderSummary) -> str:
    share = format_share(found.data_wait_share)
    told = f"{found.verdict}: {share} of the time is spent waiting for batches with {counted(found.workers, 'loader worker')}"
    if found.without_prefetch_per_s and found.together_per_s:
        told += f"; prefetching brings {found.together_per_s / found.without_prefetch_per_s:.2f}×"
    if found.verdict == "not data-bound" and found.data_wait_share > DATA_BOUND_SHARE:
        most = format_share(found.loading_share)
        return f"{told}; loading takes {most} at most, so it is the hand-over: loader and model share the processor"
    if found.verdict == "not data-bound" or found.best_workers is None:
        return told
    if found.ends_it:
        return f"{told}; {counted(found.best_workers, 'worker')} {'ends' if found.best_workers == 1 else 'end'} it"
    if found.best_workers == found.workers:
        return f"{told}; no number of workers up to the number of cores makes the training faster"
    return f"{told}; no number of workers up to the number of cores ends it, {found.best_workers} are the fastest"


def _remarks(row: TrainingSummary) -> Iterator[Text]:
    if row.loss and ":" in row.data:
        yield Text(f"loss: {one_line(row.loss)}", style="dim")
    if told := where_time_goes(row):
        yield Text(f"where the time goes: {told}", style="dim")
    if row.target_accuracy is not None:
        measured = "not reached" if row.best_accuracy is not None or not row.epochs else "no accuracy is measured here"
        reached = f"reached after {format_seconds(row.time_to_target_s)}" if row.time_to_target_s else measured
        yield Text(f"accuracy {format_share(row.target_accuracy)}: {reached}")
    if row.energy_per_sample_j:
        yield Text(f"energy: {significant(row.energy_per_sample_j * 1e3, 3)} mJ per {row.item or 'item'}", style="dim")
    if row.cost_per_million is not None:
        yield Text(f"cost: {significant(row.cost_per_million, 3)} per million {row.item or 'items'}")
    for each in row.notes:
        yield Text(f"note: {one_line(str(each))}", style="dim")
    for each in row.doubts:
        yield Text(f"its speed is not to be relied on: {one_line(str(each))}", style="yellow")
    yield from _failure(row)


def where_time_goes(row: TrainingSummary) -> str:
    """Empty where no step was timed."""
    shares = ", ".join(f"{name} {format_share(share)}" for name, share in row.phase_shares.items())
    between = row.between_share or 0.0
    return f"{shares}; starting and ending epochs adds {format_share(between)}" if shares and between > TOLD else shares


def _failure(row: TrainingSummary, *, named: bool = False) -> Iterator[Text]:
    if row.failure is not None:
        whose = f"{row.model} with {row.recipe}: " if named else ""
        yield Text(f"{whose}failed: {one_line(row.failure)}", style="red")


def next_step(rows: Sequence[TrainingSummary]) -> str:
    unfinished = next((row for row in rows if row.state in ("interrupted", "failed") and row.epochs), None)
    if unfinished is not None:
        done = f"{len(unfinished.epochs)} of {unfinished.planned_epochs} epochs are kept"
        return f"next: {done}; the same command with --resume continues after them"
    if any(row.failure for row in rows):
        return "next: fix what failed and run the same command again"
    waiting = next((row for row in rows if row.bound.label == "data"), None)
    if waiting is not None:
        search = f"'{waiting.fed_by}'" if waiting.fed_by else "redline.find_workers(model) with the same settings"
        brings = "measures what loading costs" if ":" in waiting.data else "finds the workers it needs"
        return f"next: {waiting.model} waits for its data; {search} {brings}"
    told = "next: 'redline report' draws losses, accuracy and times"
    faster = next((row.tuned_by for row in rows if row.tuned_by), None)
    return f"{told}; '{faster}' looks for a faster recipe" if faster else told


def epoch_line(epoch: Epoch, of: int, item: str) -> str:
    """One epoch on one line, as it is done."""
    parts = [
        f"epoch {epoch.number}/{of}: {format_seconds(epoch.seconds)}",
        f"{rate(epoch.samples_per_s)} {item}/s",
        f"loss {figure(epoch.train_loss)}",
        f"val. loss {figure(epoch.val_loss)}" if epoch.val_loss is not None else "",
        f"accuracy {format_share(epoch.val_accuracy)}" if epoch.val_accuracy is not None else "",
        f"data wait {format_share(epoch.data_wait_share)}" if epoch.data_wait_share is not None else "",
    ]
    return ", ".join(part for part in parts if part)


def draw_trainings(rows: Sequence[TrainingSummary], path: Path) -> Path:
    """Accuracy over the time of training, and the speed of each, side by side."""
    figure, (left, right) = new_figure(10.5, 4.4, columns=2)
    names = [_short(row, rows) for row in rows]
    for number, (row, name) in enumerate(zip(rows, names, strict=True)):
        colour, seconds = COLOURS[number % len(COLOURS)], 0.0
        points = [(seconds := seconds + epoch.seconds, epoch.val_accuracy) for epoch in row.epochs]
        known = [(at, 100 * accuracy) for at, accuracy in points if accuracy is not None]
        if known:
            left.plot(*zip(*known, strict=True), marker="o", color=colour, label=name, markersize=4)
        right.barh(number, row.samples_per_s or 0.0, color=colour, height=0.6)
        told = f"  {rate(row.samples_per_s)}  {format_bytes(row.peak_bytes)}  {'failed' if row.failure else bottleneck(row)}"
        right.annotate(told, (row.samples_per_s or 0.0, number), va="center", fontsize=8)
    left.set_xlabel("seconds of training and validation")
    left.set_ylabel("held-out accuracy, %")
    left.set_ylim(0, 100)
    right.set_yticks(range(len(rows)), names, fontsize=8.5)
    right.invert_yaxis()
    right.margins(x=0.5)
    right.set_xlabel("samples per second, memory, bottleneck")
    figure.legend(loc="outside lower center", ncols=min(4, len(rows)), fontsize=8, frameon=False)
    return save_figure(figure, path)


def _short(row: TrainingSummary, rows: Sequence[TrainingSummary]) -> str:
    """What tells it from the others."""
    parts = [row.model] + ([row.recipe] if len({each.recipe for each in rows}) > 1 else [])
    return one_line(" · ".join(parts), 40).replace("$", r"\$")


def rate(value: float | None) -> str:
    return "n/a" if value is None else significant(value, max(3, len(str(round(value)))))


def figure(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4g}"
