"""This module sets two profiles side by side and tells which kernels, operators and modules got faster or slower, appeared or vanished.

Times are per step where both profiles know their steps; else over the whole trace, and the comparison says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from redline.analyze.profile import Profile
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.trace.names import short_name

BAND = 0.03
"""If times differ by less, they count as the same, because two runs of one program differ by so much."""

Change = Literal["faster", "slower", "same", "appeared", "vanished"]


class Changed(Frozen):
    """This is one row of a comparison: a class, a kernel, an operator or a module, before and after."""

    name: str
    short_name: str
    change: Change
    before_s: float
    after_s: float
    difference_s: float
    ratio: float | None
    """This is before over after: above 1 is faster. It is None where one of them is nothing."""
    calls_before: float
    calls_after: float


class ProfileDiff(Frozen):
    unit: Literal["step", "trace"]
    """All times and calls are those of one step, or of the whole trace."""
    before: str
    after: str
    answer: str
    """It says how much faster it got, and by which clock."""
    step: Changed
    """This is the step without the profiler where both profiles know it, else the span of the trace."""
    busy: Changed
    classes: tuple[Changed, ...]
    kernels: tuple[Changed, ...]
    """Those that changed most come first, here and below."""
    operators: tuple[Changed, ...]
    parts: tuple[Changed, ...]
    """Modules and annotations, whatever kernels they run."""
    findings_gone: tuple[str, ...]
    findings_new: tuple[str, ...]
    notes: tuple[Note, ...] = ()


Times = dict[str, tuple[float, float]]
"""This maps each name to its seconds and calls."""

UNMARKED = note("steps-not-marked", "one of the traces has no step marks: times are of the whole traces")


def diff_profiles(before: Profile, after: Profile) -> ProfileDiff:
    sides, by_step = (before, after), bool(before.steps_seen and after.steps_seen)
    parts = [(side.steps_seen or 1) if by_step else 1 for side in sides]
    has_device = before.has_device or after.has_device
    plain = [side.capture.step_s if side.capture is not None else None for side in sides]
    profiled = not by_step or None in plain
    walls = [
        side.wall_s / part if profiled else step_s or 0.0
        for side, part, step_s in zip(sides, parts, plain, strict=True)
    ]
    step = _changed("time", (walls[0], 1), (walls[1], 1))

    def table(name: str, seconds: str, key: str = "name") -> tuple[Changed, ...]:
        return _table(
            *(
                _summed(((getattr(row, key), getattr(row, seconds), row.calls) for row in getattr(side, name)), part)
                for side, part in zip(sides, parts, strict=True)
            )
        )

    codes = [{finding.code for finding in side.findings} for side in sides]
    return ProfileDiff(
        answer=_answer(step, profiled),
        unit="step" if by_step else "trace",
        before=_label(before),
        after=_label(after),
        step=step,
        busy=_changed("busy", (before.timeline.busy_s / parts[0], 1), (after.timeline.busy_s / parts[1], 1)),
        classes=table("classes", "total_s"),
        kernels=table("kernels", "total_s"),
        # If there is a device, its time is compared, because the host then mostly waits.
        operators=table("operators", "device_self_s" if has_device else "cpu_self_s"),
        parts=table("parts", "device_s" if has_device else "host_s", "path"),
        findings_gone=tuple(sorted(codes[0] - codes[1])),
        findings_new=tuple(sorted(codes[1] - codes[0])),
        notes=() if by_step else (UNMARKED,),
    )


def _answer(step: Changed, profiled: bool) -> str:
    if step.ratio is None:
        return "the time of a step is not known on both sides"
    speed = "as long" if step.change == "same" else f"{step.ratio:.2f}× as fast"
    if profiled:
        return f"the step takes {speed} under the profiler, which slows short kernels most: times without it are not known here"
    return f"the step is {speed}, timed without the profiler; kernels and operators below are as the profiler saw them"


def _label(profile: Profile) -> str:
    if (capture := profile.capture) is None:
        return ", ".join(profile.sources)
    return f"{capture.model} {capture.recipe} batch {capture.batch} ({capture.record_id[:13]})"


def _summed(rows: Iterable[tuple[str, float, int]], part: int) -> Times:
    """A table by shape has several rows of one name."""
    found: Times = {}
    for name, seconds, calls in rows:
        before = found.get(name, (0.0, 0.0))
        found[name] = (before[0] + seconds / part, before[1] + calls / part)
    return found


def _table(before: Times, after: Times) -> tuple[Changed, ...]:
    rows = [_changed(name, before.get(name), after.get(name)) for name in dict.fromkeys((*before, *after))]
    worth = (row for row in rows if row.before_s or row.after_s)
    return tuple(sorted(worth, key=lambda row: (-abs(row.difference_s), row.name)))


def _changed(name: str, before: tuple[float, float] | None, after: tuple[float, float] | None) -> Changed:
    (before_s, calls_before), (after_s, calls_after) = before or (0.0, 0.0), after or (0.0, 0.0)
    ratio = before_s / after_s if before_s and after_s else None
    change: Change = "same" if ratio is None or abs(ratio - 1) <= BAND else "faster" if ratio > 1 else "slower"
    return Changed(
        name=name,
        short_name=short_name(name),
        change="appeared" if before is None else "vanished" if after is None else change,
        before_s=before_s,
        after_s=after_s,
        difference_s=round(after_s - before_s, 12),  # what is less than a picosecond comes from adding floats
        ratio=ratio,
        calls_before=calls_before,
        calls_after=calls_after,
    )
