"""Throughput, latency and memory against the batch, as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from redline.analyze.batch import BatchFinding, BatchTrial, curve_of
from redline.errors import SpecError

KINDS = (".png", ".svg", ".pdf")


def check_place(path: Path) -> None:
    """Whether a plot could be written there: asked before the long search, not after it."""
    if path.suffix.lower() not in KINDS:
        raise SpecError(f"plot must end in {', '.join(KINDS)}, got {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"cannot write the plot to {path}: {error.strerror}") from None


def plot_batches(findings: Sequence[BatchFinding], path: Path) -> Path:
    check_place(path)
    # The figure is made without pyplot: no window system is asked for, and a notebook's own state stays untouched.
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(13, 4.2), layout="constrained")
    speed, latency, memory = figure.subplots(1, 3)
    for number, found in enumerate(findings):
        fitting = sorted((trial for trial in found.trials if trial.fits), key=lambda trial: trial.batch)
        if fitting:
            _draw(found, fitting, f"C{number % 10}", speed, latency, memory)
    first = findings[0]
    item = first.item or "items"
    _label(speed, f"{item}/s", "throughput; dashed: a + c·b, dot: knee")
    _label(latency, "ms per step", "median latency")
    _label(memory, "GiB", "memory needed; crosses: did not fit")
    if first.limit_bytes:
        memory.axhline(first.limit_bytes / 2**30, color="0.4", linestyle=":")
    if first.slo_p95_s is not None:
        latency.axhline(first.slo_p95_s * 1e3, color="0.4", linestyle=":")
    speed.legend(fontsize="small")
    figure.suptitle(" · ".join(part for part in (first.model, first.task, first.device_name or first.device) if part))
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise SpecError(f"cannot write the plot to {path}: {error.strerror}") from None
    return path


def _draw(
    found: BatchFinding, fitting: Sequence[BatchTrial], colour: str, speed: Any, latency: Any, memory: Any
) -> None:
    batches = [trial.batch for trial in fitting]
    speed.plot(batches, [trial.throughput_per_s for trial in fitting], "o-", color=colour, label=found.recipe)
    latency.plot(batches, [(trial.latency_p50_s or np.nan) * 1e3 for trial in fitting], "o-", color=colour)
    needed = [trial.needed_bytes / 2**30 if trial.needed_bytes else np.nan for trial in fitting]
    memory.plot(batches, needed, "o-", color=colour)
    failed = [trial.batch for trial in found.trials if trial.is_oom]
    if failed and found.limit_bytes:
        memory.plot(failed, [found.limit_bytes / 2**30] * len(failed), "x", color=colour)
    if (curve := curve_of(found.trials)) is not None:
        grid = np.geomspace(batches[0], batches[-1], 100)
        speed.plot(grid, [batch / curve.seconds(batch) for batch in grid], "--", color=colour, alpha=0.6)
        if found.knee_batch is not None:
            at_knee = found.knee_batch / curve.seconds(found.knee_batch)
            speed.plot([found.knee_batch], [at_knee], "o", color=colour, markersize=10, alpha=0.5)


def _label(axes: Any, what: str, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch")
    axes.set_ylabel(what)
    axes.set_title(title, fontsize="small")
    axes.grid(alpha=0.3)
