"""Two profiles side by side: which kernels and operators got faster or slower, appeared or vanished.

Times are per step where both profiles know their steps; else over the whole trace, and the comparison says so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from redline.analyze.profile import Profile
from redline.analyze.profile_align import Aligned, aligned
from redline.note import Note, note
from redline.spec import Frozen
from redline.trace.classes import KernelClass, class_of
from redline.trace.names import short_name

BAND = 0.03
"""Less than this is the same: measurement.md's band for times."""

Change = Literal["faster", "slower", "same", "appeared", "vanished"]


class Changed(Frozen, rename={"kernel_class": "class"}):
    name: str
    short_name: str
    kernel_class: KernelClass | None
    change: Change
    before_s: float
    after_s: float
    ratio: float | None
    """Before over after: above 1 is faster. None where one of them is nothing."""
    calls_before: float
    calls_after: float


class ProfileDiff(Frozen):
    unit: Literal["step", "trace"]
    """What all times and calls are per."""
    before: str
    after: str
    answer: str
    """The first line: how much faster, by which clock."""
    profiled: bool
    """Whether the times of the step were taken under the profiler, for want of others."""
    step: Changed
    """Of the step without the profiler, where both know it; else of the span."""
    busy: Changed
    classes: tuple[Changed, ...]
    kernels: tuple[Changed, ...]
    """Those that changed most first."""
    operators: tuple[Changed, ...]
    aligned: tuple[Aligned, ...]
    """By module, annotation and operator, wherever they stand in both programs; those that changed most first."""
    findings_gone: tuple[str, ...]
    findings_new: tuple[str, ...]
    notes: tuple[Note, ...] = ()


Row = tuple[str, float, float]
"""Name, seconds, calls."""


UNMARKED = note("steps-not-marked", "one of the traces has no step marks: times are of the whole traces")


def diff_profiles(before: Profile, after: Profile) -> ProfileDiff:
    by_step = bool(before.steps_seen and after.steps_seen)
    parts = (before.steps_seen or 1, after.steps_seen or 1) if by_step else (1, 1)
    codes_before, codes_after = ({finding.code for finding in each.findings} for each in (before, after))
    has_device = before.has_device or after.has_device
    plain = [each.capture.step_s if each.capture is not None else None for each in (before, after)]
    profiled = not by_step or None in plain
    times = (before.wall_s / parts[0], after.wall_s / parts[1]) if profiled else (plain[0] or 0.0, plain[1] or 0.0)
    step = _changed("time", (times[0], 1), (times[1], 1), None)
    return ProfileDiff(
        answer=_answer(step, profiled),
        profiled=profiled,
        unit="step" if by_step else "trace",
        before=_label(before),
        after=_label(after),
        step=step,
        busy=_changed("busy", (before.timeline.busy_s / parts[0], 1), (after.timeline.busy_s / parts[1], 1), None),
        classes=_table(_classes(before), _classes(after), parts, with_class=False),
        kernels=_table(_kernels(before), _kernels(after), parts, with_class=True),
        operators=_table(_operators(before, has_device), _operators(after, has_device), parts, with_class=False),
        aligned=tuple(aligned(before.tree, after.tree, parts, BAND)),
        findings_gone=tuple(sorted(codes_before - codes_after)),
        findings_new=tuple(sorted(codes_after - codes_before)),
        notes=() if by_step else (UNMARKED,),
    )


def _answer(step: Changed, profiled: bool) -> str:
    if step.ratio is None:
        return "the time of a step is not known on both sides"
    told = "as long" if step.change == "same" else f"{step.ratio:.2f}× as fast"
    if profiled:
        return f"the step takes {told} under the profiler, which slows short kernels most: times without it are not known here"
    return f"the step is {told}, timed without the profiler; kernels and operators below are as the profiler saw them"


def _kernels(profile: Profile) -> list[Row]:
    return [(row.name, row.total_s, row.calls) for row in profile.kernels]


def _classes(profile: Profile) -> list[Row]:
    return [(row.name, row.total_s, row.calls) for row in profile.classes]


def _operators(profile: Profile, has_device: bool) -> list[Row]:
    """By device time where there is a device: host time then is mostly waiting."""
    return [(row.name, row.device_self_s if has_device else row.cpu_self_s, row.calls) for row in profile.operators]


def _table(
    before: Iterable[Row], after: Iterable[Row], parts: tuple[int, int], *, with_class: bool
) -> tuple[Changed, ...]:
    earlier, later = _summed(before, parts[0]), _summed(after, parts[1])
    if with_class:
        earlier, later = _by_short_name(earlier, later), _by_short_name(later, earlier)
    rows = [
        _changed(name, earlier.get(name), later.get(name), class_of(name) if with_class else None)
        for name in dict.fromkeys((*earlier, *later))
    ]
    shown = [row for row in rows if row.before_s or row.after_s]
    return tuple(sorted(shown, key=lambda row: (-abs(row.after_s - row.before_s), row.name)))


def _by_short_name(
    own: dict[str, tuple[float, float]], other: dict[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Kernels that only one side has, under their short names where the other side has one of that name too.

    Otherwise a reader would see one name both vanish and appear.
    """
    found: dict[str, tuple[float, float]] = {}
    there = {short_name(name) for name in other if name not in own}
    for name, (seconds, calls) in own.items():
        short = short_name(name)
        key = short if name not in other and short in there else name
        before = found.get(key, (0.0, 0.0))
        found[key] = (before[0] + seconds, before[1] + calls)
    return found


def _summed(rows: Iterable[Row], parts: int) -> dict[str, tuple[float, float]]:
    """A table by shape has several rows of one name."""
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for name, time, count in rows:
        seconds[name] += time
        calls[name] += int(count)
    return {name: (seconds[name] / parts, calls[name] / parts) for name in seconds}


def _changed(
    name: str,
    before: tuple[float, float] | None,
    after: tuple[float, float] | None,
    kernel_class: KernelClass | None,
) -> Changed:
    before_s, calls_before = before or (0.0, 0.0)
    after_s, calls_after = after or (0.0, 0.0)
    ratio = before_s / after_s if before_s and after_s else None
    return Changed(
        name=name,
        short_name=short_name(name),
        kernel_class=kernel_class,
        change=_change(before, after, ratio),
        before_s=before_s,
        after_s=after_s,
        ratio=ratio,
        calls_before=calls_before,
        calls_after=calls_after,
    )


def _change(before: tuple[float, float] | None, after: tuple[float, float] | None, ratio: float | None) -> Change:
    if before is None:
        return "appeared"
    if after is None:
        return "vanished"
    if ratio is None or abs(ratio - 1) <= BAND:
        return "same"
    return "faster" if ratio > 1 else "slower"


def _label(profile: Profile) -> str:
    if profile.capture is None:
        return ", ".join(profile.sources)
    capture = profile.capture
    return f"{capture.model} {capture.recipe} batch {capture.batch} ({capture.record_id[:13]})"


def counts(rows: Sequence[Changed]) -> dict[Change, int]:
    return dict(Counter(row.change for row in rows))
