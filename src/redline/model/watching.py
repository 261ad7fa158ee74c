"""What watching a training script leaves behind."""

from __future__ import annotations

from redline.model.fields import Count, Figure, Frozen, Moment, Seconds

PHASES = ("data", "copy", "forward", "backward", "optimizer", "acting", "saving", "other")
"""What the time of a watched step is split into; together they are all of it."""


class WatchFinding(Frozen):
    """Something that costs time or memory in a watched script, and what to change about it."""

    code: str
    text: str
    change: str
    """In the script."""
    gain_bound: Figure
    """How many times faster the steps can become at most; 1 where it is not about speed."""


class Window(Frozen):
    """A few steps that were profiled while the script ran."""

    at_s: Seconds
    """Since the first step."""
    step: Count
    steps: Count
    step_s: Seconds | None = None
    """Median of the steps around it, without the profiler."""
    trace: str = ""
    """Relative to the history's folder; empty where it was not kept."""
    top: tuple[str, ...] = ()
    """The codes of its findings, the most costly first."""


class Watched(Frozen):
    """A training script that ran under `redline watch`, or a loop inside `redline.watch()`."""

    command: tuple[str, ...] = ()
    exit_code: int | None = None
    """Minus the signal's number where a signal ended it; None within a program that goes on."""
    started_at: Moment = 0.0
    seconds: Seconds = 0.0
    """From the first step's beginning to the last one's end."""
    steps: Count = 0
    samples: Figure = 0.0
    """Over all ranks."""
    ranks: Count = 1
    steps_per_s: Figure | None = None
    """Of the steps that count."""
    whole_steps_per_s: Figure | None = None
    """Of all steps, over the whole run."""
    samples_per_s: Figure | None = None
    shares: dict[str, Figure] = {}
    """Of the time of the steps that count."""
    run_s: dict[str, Figure] = {}
    """Seconds of the whole run: by phase for the steps that count, with validation, first steps and profiling."""
    device_clock: bool = False
    """The shares are of the device's time, not of the host's."""
    paused_s: Seconds = 0.0
    """Evaluation between steps, and what profiling took."""
    first_step_s: Seconds | None = None
    first_steps: Count = 0
    """Leading steps that are left out of the rate."""
    outliers: Count = 0
    """Steps of more than twice the median."""
    outlier_share: Figure | None = None
    """Share of the time that they took beyond the median."""
    loss: Figure | None = None
    """The last one seen."""
    gpu_utilisation: Figure | None = None
    energy_j: Figure | None = None
    power_w: Figure | None = None
    peak_bytes: Count | None = None
    """Reserved on a GPU; on a CPU the resident memory of all its processes."""
    findings: tuple[WatchFinding, ...] = ()
    windows: tuple[Window, ...] = ()
