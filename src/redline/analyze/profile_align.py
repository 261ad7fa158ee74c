"""Two programs side by side by their structure: the same module, annotation or operator, whatever kernels it runs.

Kernel names differ between makers of GPUs and between eager and compiled programs; modules and operators hardly do.
Where the structure below a node differs altogether, the node itself is the last that is compared.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Literal

from redline.spec import Frozen
from redline.trace.tree import NodeKind, TreeNode

LEAST_SHARE = 0.005
"""Of the longer of both: what takes less is not compared by itself."""
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
    """Of an operator, its name without what only tells who does the work."""
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
