"""Two profiles side by side: which kernels and operators got faster or slower, appeared or vanished.

Programs are aligned by their structure: the same module, annotation or operator, whatever kernels it runs. Kernel names
differ between makers of GPUs and between eager and compiled programs; modules and operators hardly do. Where the
structure below a node differs altogether, the node itself is the last that is compared.

Times are per step where both profiles know their steps; else over the whole trace, and the comparison says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Literal

from redline.analyze.profile import Profile
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.trace.names import short_name
from redline.trace.tree import TreeNode

BAND = 0.03
"""Times that differ by less are the same: two runs of one program differ by so much."""

Change = Literal["faster", "slower", "same", "appeared", "vanished"]


class Changed(Frozen):
    """One row of a comparison: a kernel, an operator or a node of the tree, before and after."""

    name: str
    short_name: str
    """For a node, its path."""
    change: Change
    before_s: float
    after_s: float
    difference_s: float
    ratio: float | None
    """Before over after: above 1 is faster. None where one of them is nothing."""
    calls_before: float
    calls_after: float


class ProfileDiff(Frozen):
    unit: Literal["step", "trace"]
    """All times and calls are those of one step, or of the whole trace."""
    before: str
    after: str
    answer: str
    """How much faster, by which clock."""
    step: Changed
    """This is the step without the profiler where both profiles know it, else the span of the trace."""
    busy: Changed
    classes: tuple[Changed, ...]
    kernels: tuple[Changed, ...]
    """Those that changed most come first, here and below."""
    operators: tuple[Changed, ...]
    aligned: tuple[Changed, ...]
    """Compares modules, annotations and operators, wherever they stand in both programs."""
    findings_gone: tuple[str, ...]
    findings_new: tuple[str, ...]
    notes: tuple[Note, ...] = ()


Times = dict[str, tuple[float, float]]
"""It maps each name to its seconds and calls."""

UNMARKED = note("steps-not-marked", "one of the traces has no step marks: times are of the whole traces")


def diff_profiles(before: Profile, after: Profile) -> ProfileDiff:
    sides = (before, after)
    by_step = bool(before.steps_seen and after.steps_seen)
    parts = [(side.steps_seen or 1) if by_step else 1 for side in sides]
    has_device = before.has_device or after.has_device
    plain = [side.capture.step_s if side.capture is not None else None for side in sides]
    profiled = not by_step or None in plain
    walls = [
        side.wall_s / part if profiled else plain[at] or 0.0
        for at, (side, part) in enumerate(zip(sides, parts, strict=True))
    ]
    step = _changed("time", (walls[0], 1), (walls[1], 1))
    classes, kernels, operators = [], [], []
    for side, part in zip(sides, parts, strict=True):
        classes.append(_summed(((row.name, row.total_s, row.calls) for row in side.classes), part))
        kernels.append(_summed(((row.name, row.total_s, row.calls) for row in side.kernels), part))
        # Where there is a device its time is compared: host time then is mostly waiting.
        timed = ((row.name, row.device_self_s if has_device else row.cpu_self_s, row.calls) for row in side.operators)
        operators.append(_summed(timed, part))
    codes = [{finding.code for finding in side.findings} for side in sides]
    return ProfileDiff(
        answer=_answer(step, profiled),
        unit="step" if by_step else "trace",
        before=_label(before),
        after=_label(after),
        step=step,
        busy=_changed("busy", (before.timeline.busy_s / parts[0], 1), (after.timeline.busy_s / parts[1], 1)),
        classes=_table(*classes),
        kernels=_table(_joined(kernels[0], kernels[1]), _joined(kernels[1], kernels[0])),
        operators=_table(*operators),
        aligned=tuple(aligned(before.tree, after.tree, parts)),
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


def _joined(own: Times, other: Times) -> Times:
    """Kernels that only one side has, under their short names where the other side has one of that name too.

    Otherwise a reader would see one name both vanish and appear.
    """
    there = {short_name(name) for name in other if name not in own}
    renamed = (
        (short_name(name) if name not in other and short_name(name) in there else name, *times)
        for name, times in own.items()
    )
    found: Times = {}
    for name, seconds, calls in renamed:
        before = found.get(name, (0.0, 0.0))
        found[name] = (before[0] + seconds, before[1] + calls)
    return found


def _table(before: Times, after: Times) -> tuple[Changed, ...]:
    rows = [_changed(name, before.get(name), after.get(name)) for name in dict.fromkeys((*before, *after))]
    return tuple(sorted((row for row in rows if row.before_s or row.after_s), key=_by_change))


def _by_change(row: Changed) -> tuple[float, str]:
    return -abs(row.difference_s), row.name


def _changed(
    name: str, before: tuple[float, float] | None, after: tuple[float, float] | None, short: str = ""
) -> Changed:
    (before_s, calls_before), (after_s, calls_after) = before or (0.0, 0.0), after or (0.0, 0.0)
    ratio = before_s / after_s if before_s and after_s else None
    change: Change = "same" if ratio is None or abs(ratio - 1) <= BAND else "faster" if ratio > 1 else "slower"
    return Changed(
        name=name,
        short_name=short or short_name(name),
        change="appeared" if before is None else "vanished" if after is None else change,
        before_s=before_s,
        after_s=after_s,
        difference_s=round(after_s - before_s, 12),  # what is less than a picosecond comes from adding floats
        ratio=ratio,
        calls_before=calls_before,
        calls_after=calls_after,
    )


LEAST_SHARE = 0.005
"""Share of the longer of the two: what takes less is not compared by itself."""
NEARLY_ALL = 0.97
"""A child with so much of its parent's time says the same as the parent, and more exactly."""

_VENDOR = re.compile(r"^_?(cudnn|miopen|mkldnn|mkl|native|thnn|mps|xpu|fused|efficientzerotensor)_")
_FLAVOUR = re.compile(r"(_scaled_dot_product_|_)(flash|efficient|cudnn|math|fused|overrideable|mem_eff)_attention")
_NODE = re.compile(r"^autograd::engine::evaluate_function: ")
_NUMBERED = re.compile(r"^(.*?)_(\d{1,9})$")
_COMPILED = re.compile(r"^(## )?Call CompiledFxGraph\b|^Torch-Compiled Region\b|^CompiledFunction\b")

Nodes = list[TreeNode]
MOST_WRAPPERS = 8
"""Wrappers that only one program has, one inside the other, that are looked through."""


def aligned(before: TreeNode | None, after: TreeNode | None, parts: Sequence[int]) -> list[Changed]:
    """Compare both trees, what changed most first: by device time where both have some, else by host time."""
    if before is None or after is None:
        return []
    side: Literal["device", "host"] = "device" if before.device_s and after.device_s else "host"

    def seconds(group: tuple[Nodes, Nodes]) -> list[float]:
        return [sum(node.seconds(side) for node in nodes) / part for nodes, part in zip(group, parts, strict=True)]

    least = LEAST_SHARE * max(seconds(([before], [after])))

    def pairs(
        group: tuple[Nodes, Nodes], path: tuple[str, ...]
    ) -> Iterator[tuple[tuple[str, ...], tuple[Nodes, Nodes]]]:
        """Yield the nodes below this one that are worth comparing, each with its path."""
        both = _matched(*group)
        for name, pair in both.items() if any(all(pair) for pair in both.values()) else ():
            times = seconds(pair)
            if max(times) < least:
                continue
            own = (*path, name)
            below = list(pairs(pair, own)) if all(pair) else []
            is_said_below = any(
                len(inner) == len(own) + 1
                and all(part >= NEARLY_ALL * whole for part, whole in zip(seconds(one), times, strict=True))
                for inner, one in below
            )
            if not is_said_below:
                yield own, pair
            yield from below

    rows = []
    for path, group in pairs(([before], [after]), ()):
        calls = [sum(node.calls for node in nodes) / part for nodes, part in zip(group, parts, strict=True)]
        times = [one if one[0] else None for one in zip(seconds(group), calls, strict=True)]
        rows.append(_changed(" / ".join(path), times[0], times[1], short=" / ".join(path)))
    return sorted(rows, key=_by_change)


def _matched(before: Nodes, after: Nodes) -> dict[str, tuple[Nodes, Nodes]]:
    """The children of both by a name that both have; a wrapper that only one of them has is looked through."""
    one, other = _children(before), _children(after)
    for _ in range(MOST_WRAPPERS):
        if not one or not other or _kinds(one) & _kinds(other):
            break
        inner = [(_children(one), other), (one, _children(other))]
        fits = [pair for pair in inner if _kinds(pair[0]) & _kinds(pair[1])]
        if not fits:
            break
        one, other = fits[0]
    first, second = _by_name(one), _by_name(other)
    # Instances that no name joins are joined in their order: `Linear_7` of one process is `Linear_9` of another.
    alone = (
        _numbered(name for name in first if name not in second),
        _numbered(name for name in second if name not in first),
    )
    for kind in alone[0].keys() & alone[1].keys():
        for own, its in zip_longest(alone[0][kind], alone[1][kind]):
            if own is not None and its is not None:
                second[own] = second.pop(its)
    return {name: (first.get(name, []), second.get(name, [])) for name in dict.fromkeys((*first, *second))}


def _children(nodes: Nodes) -> Nodes:
    """Python functions are looked through: another script has others around the same modules."""
    found: Nodes = []
    for node in nodes:
        for child in node.children:
            found += _children([child]) if child.kind == "function" else [child]
    return found


def _by_name(nodes: Nodes) -> dict[str, Nodes]:
    found: defaultdict[str, Nodes] = defaultdict(list)
    for node in nodes:
        found[_canonical(node)].append(node)
    return dict(found)


def _numbered(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the names that end in a number by what stands before it, in the order of their numbers."""
    found: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for name in names:
        if parts := _NUMBERED.match(name):
            found[parts.group(1)].append((int(parts.group(2)), name))
    return {kind: [name for _, name in sorted(several)] for kind, several in found.items()}


def _kinds(nodes: Nodes) -> set[str]:
    """Returns the names of nodes without the numbers of instances."""
    return {_NUMBERED.sub(r"\1", _canonical(node)) for node in nodes}


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
