"""Two profiles side by side: which kernels and operators got faster or slower, appeared or vanished.

Programs are aligned by their structure: the same module, annotation or operator, whatever kernels it runs. Kernel names
differ between makers of GPUs and between eager and compiled programs; modules and operators hardly do. Where the
structure below a node differs altogether, the node itself is the last that is compared.

Times are per step where both profiles know their steps; else over the whole trace, and the comparison says so.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Literal

from redline.analyze.profile import Profile
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.trace.classes import KernelClass, class_of
from redline.trace.names import short_name
from redline.trace.tree import NodeKind, TreeNode

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


LEAST_SHARE = 0.005
"""Share of the longer of the two: what takes less is not compared by itself."""
NEARLY_ALL = 0.97
"""A child with so much of its parent's time says the same as the parent, and more exactly."""

_VENDOR = re.compile(r"^_?(cudnn|miopen|mkldnn|mkl|native|thnn|mps|xpu|fused|efficientzerotensor)_")
_FLAVOUR = re.compile(r"(_scaled_dot_product_|_)(flash|efficient|cudnn|math|fused|overrideable|mem_eff)_attention")
_NODE = re.compile(r"^autograd::engine::evaluate_function: ")
_NUMBERED = re.compile(r"^(.*?)_(\d+)$")
_COMPILED = re.compile(r"^(## )?Call CompiledFxGraph\b|^Torch-Compiled Region\b|^CompiledFunction\b")


class Aligned(Frozen):
    """One node in both programs. Times are per step, or of whole traces, like all in the comparison."""

    path: str
    kind: NodeKind
    change: Literal["faster", "slower", "same", "appeared", "vanished"]
    before_s: float
    after_s: float
    ratio: float | None
    """Before over after: above 1 is faster."""
    share: float
    """The difference over the whole time before."""


Nodes = list[TreeNode]


def aligned(before: TreeNode | None, after: TreeNode | None, parts: tuple[int, int], band: float) -> list[Aligned]:
    """What changed most first. By device time where both have some, else by host time."""
    if before is None or after is None:
        return []
    on_device = bool(before.device_s and after.device_s)
    times = [
        (node.device_s if on_device else node.host_s) / part for node, part in zip((before, after), parts, strict=True)
    ]
    rows = [
        _row(path, group, parts, on_device, times[0], band)
        for path, group in _pairs(([before], [after]), parts, on_device, LEAST_SHARE * max(times), ())
    ]
    return sorted(rows, key=lambda row: (-abs(row.after_s - row.before_s), row.path))


def _time(nodes: Nodes, part: int, on_device: bool) -> float:
    return sum(node.device_s if on_device else node.host_s for node in nodes) / part


def _row(
    path: tuple[str, ...],
    group: tuple[Nodes, Nodes],
    parts: tuple[int, int],
    on_device: bool,
    whole: float,
    band: float,
) -> Aligned:
    before_s, after_s = (_time(nodes, part, on_device) for nodes, part in zip(group, parts, strict=True))
    ratio = before_s / after_s if before_s and after_s else None
    change: Literal["faster", "slower", "same", "appeared", "vanished"]
    if ratio is None:
        change = "vanished" if before_s else "appeared"
    else:
        change = "same" if abs(ratio - 1) <= band else "faster" if ratio > 1 else "slower"
    return Aligned(
        path=" / ".join(path),
        kind=(group[0] or group[1])[0].kind,
        change=change,
        before_s=before_s,
        after_s=after_s,
        ratio=ratio,
        share=(after_s - before_s) / whole if whole else 0.0,
    )


def _pairs(
    group: tuple[Nodes, Nodes], parts: tuple[int, int], on_device: bool, least: float, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], tuple[Nodes, Nodes]]]:
    """The nodes worth comparing below this one, each with its path."""
    both = _matched(group[0], group[1])
    have_both = [name for name, (one, other) in both.items() if one and other]
    if not have_both:
        return
    for name, pair in both.items():
        times = [_time(nodes, part, on_device) for nodes, part in zip(pair, parts, strict=True)]
        if max(times) < least:
            continue
        own = (*path, name)
        below = list(_pairs(pair, parts, on_device, least, own)) if all(pair) else []
        told_below = any(
            len(inner) == len(own) + 1
            and all(_time(nodes, part, on_device) >= NEARLY_ALL * whole
                    for nodes, part, whole in zip(one, parts, times, strict=True))
            for inner, one in below
        )  # fmt: skip
        if not told_below:
            yield own, pair
        yield from below


def _matched(before: Nodes, after: Nodes) -> dict[str, tuple[Nodes, Nodes]]:
    """The children of both by a name that both have; a wrapper that only one of them has is looked through."""
    one, other = _children(before), _children(after)
    for _ in range(8):
        if not one or not other or _keys(one) & _keys(other):
            break
        inner = [(_children(one), other), (one, _children(other))]
        fits = [pair for pair in inner if _keys(pair[0]) & _keys(pair[1])]
        if not fits:
            break
        one, other = fits[0]
    first, second = _named(one), _named(other)
    _renumber(first, second)
    return {name: (first.get(name, []), second.get(name, [])) for name in dict.fromkeys((*first, *second))}


def _keys(nodes: Nodes) -> set[str]:
    return {_class_of(_canonical(node)) for node in nodes}


def _children(nodes: Nodes) -> Nodes:
    """Python functions are looked through: another script has others around the same modules."""
    found: Nodes = []
    for node in nodes:
        for child in node.children:
            found += _children([child]) if child.kind == "function" else [child]
    return found


def _named(nodes: Nodes) -> dict[str, Nodes]:
    found: defaultdict[str, Nodes] = defaultdict(list)
    for node in nodes:
        found[_canonical(node)].append(node)
    return dict(found)


def _renumber(one: dict[str, Nodes], other: dict[str, Nodes]) -> None:
    """Instances that no name joins are joined in their order: `Linear_7` of one process is `Linear_9` of another."""
    alone = (
        _by_class([name for name in one if name not in other]),
        _by_class([name for name in other if name not in one]),
    )
    for kind in alone[0].keys() & alone[1].keys():
        for name, its in zip_longest(alone[0][kind], alone[1][kind]):
            if name is not None and its is not None:
                other[name] = other.pop(its)


def _by_class(names: Sequence[str]) -> dict[str, list[str]]:
    found: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for name in names:
        numbered = _NUMBERED.match(name)
        if numbered:
            found[numbered.group(1)].append((int(numbered.group(2)[:9]), name))
    return {kind: [name for _, name in sorted(several)] for kind, several in found.items()}


def _class_of(name: str) -> str:
    numbered = _NUMBERED.match(name)
    return numbered.group(1) if numbered else name


def _canonical(node: TreeNode) -> str:
    """The name of an operator without the parts that only say which library does the work."""
    if node.kind != "operator":
        return node.plain_name
    name = _NODE.sub("", node.name)
    if _COMPILED.match(name):
        return "compiled graph"
    space, _, plain = name.rpartition("::")
    if space not in ("aten", ""):
        return name
    plain = _FLAVOUR.sub("scaled_dot_product_attention", plain)
    return _VENDOR.sub("", plain).strip("_") or name
