"""The program as a tree: annotations, modules and Python functions around operators, with host and device time.

Ranges at the same place in the program are one node, however often they ran. Backward operators stand under the module
of their forward operator, where the file tells which that is. Only the last step here loops over nodes, and only over
those that matter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from redline.model.fields import Frozen
from redline.trace.building import MODULE_FRAME
from redline.trace.columns import UNKNOWN, HostRanges, Ids, Ints, Mask, Trace
from redline.trace.intervals import seconds
from redline.trace.links import Links, Nesting, matching
from redline.trace.names import label_of
from redline.trace.operators import forward_rows

MODULE_PREFIX = "redline-module/"
"""The mark that Redline puts around each module where it was asked to."""

NodeKind = Literal["annotation", "module", "function", "operator", "all"]
_KINDS: tuple[NodeKind, ...] = ("annotation", "module", "function", "operator")
_STEP = re.compile(r"^ProfilerStep\s*#\d+$")
_MODULE = re.compile(f"^{MODULE_FRAME}")
_OWN_MODULE = re.compile(f"^{MODULE_PREFIX}")

LEAST_SHARE = 0.001
"""Share of host and device time: what takes less of both is left out of the tree; its time stays in what is around it."""
MOST_NODES = 5000
DEEPEST_NODE = 120
"""Deeper in the program, too, time stays in what is around it."""


class TreeNode(Frozen):
    """One place in the program; of several traces, sums."""

    name: str
    kind: NodeKind
    calls: int
    host_s: float
    """With everything inside it."""
    host_self_s: float
    device_s: float
    """Device work launched from it and from everything inside it."""
    device_self_s: float
    backward_s: float = 0.0
    """Of the device time, in operators of the backward pass."""
    children: tuple[TreeNode, ...] = ()
    """The longest first."""

    def seconds(self, side: Literal["device", "host"]) -> float:
        return self.device_s if side == "device" else self.host_s

    @property
    def plain_name(self) -> str:
        return self.name.removeprefix(MODULE_FRAME).removeprefix(MODULE_PREFIX)


class PartRow(Frozen):
    """A module or an annotation, wherever it was called from."""

    path: str
    """Modules around it, from the outermost on."""
    kind: Literal["module", "annotation"]
    calls: int
    host_s: float
    device_s: float
    """Of it and all inside it, forward and backward."""
    device_self_s: float
    """Without the modules inside it."""
    backward_s: float
    share: float
    """Share of all device time; of host time where there is no device."""


@dataclass
class _Node:
    name: str
    kind: NodeKind
    values: list[int]
    """Calls; host, device and backward time of its own."""
    children: dict[tuple[str, NodeKind], _Node] = field(default_factory=dict)
    totals: list[int] = field(default_factory=list)

    def add_up(self) -> list[int]:
        self.totals = list(self.values)
        for child in self.children.values():
            for index, value in enumerate(child.add_up()):
                self.totals[index] += value if index else 0
        return self.totals

    def frozen(self) -> TreeNode:
        below = sorted(self.children.values(), key=lambda node: (-node.totals[2], -node.totals[1], node.name))
        return TreeNode(
            name=label_of(self.name),
            kind=self.kind,
            calls=self.values[0],
            host_s=seconds(self.totals[1]),
            host_self_s=seconds(self.values[1]),
            device_s=seconds(self.totals[2]),
            device_self_s=seconds(self.values[2]),
            backward_s=seconds(self.totals[3]),
            children=tuple(child.frozen() for child in below),
        )


def tree_of(links: Sequence[Links], least_share: float = LEAST_SHARE) -> TreeNode | None:
    """The tree of all traces together; None where nothing was recorded on the host."""
    root = _Node("all", "all", [0, 0, 0, 0])
    for each in links:
        if len(each.trace.operators) or len(each.trace.annotations) or len(each.trace.frames):
            _add_trace(each, root, least_share)
    root.values[0] = len(links)
    root.add_up()
    return root.frozen() if root.children else None


@dataclass(frozen=True)
class _Ranges:
    """Everything that may stand around work, in one table."""

    table: HostRanges
    kind: Ids
    nesting: Nesting
    first_operator: int


def _ranges(trace: Trace) -> _Ranges:
    marks, frames, operators = trace.annotations, trace.frames, trace.operators
    kept = np.flatnonzero(~matching(trace, marks, _STEP))
    own_modules = matching(trace, marks, _OWN_MODULE)[kept]
    modules = matching(trace, frames, _MODULE)
    columns = {
        name: np.concatenate((getattr(marks, name)[kept], getattr(frames, name), getattr(operators, name)))
        for name in HostRanges.__dataclass_fields__
    }
    table = HostRanges(**columns)
    kind = np.concatenate((np.where(own_modules, 1, 0), np.where(modules, 1, 2), np.full(len(operators), 3))).astype(
        np.int32
    )
    nesting = Nesting(table.thread, table.start, table.end)
    return _Ranges(table, kind, nesting, len(kept) + len(frames))


def _add_trace(links: Links, root: _Node, least_share: float) -> None:
    trace = links.trace
    ranges = _ranges(trace)
    parent, is_backward = _parents(links, ranges)
    paths = _Paths.of(ranges, parent, is_backward)
    own = np.maximum(ranges.table.duration - ranges.nesting.children_sum(ranges.table.duration), 0)
    where = _places_of_work(links, ranges)
    known = where >= 0
    device, backward = np.zeros(len(own), np.int64), np.zeros(len(own), np.int64)
    np.add.at(device, where[known], trace.work.duration[known])
    backward[is_backward] = device[is_backward]
    root.values[2] += int(trace.work.duration[~known].sum())
    paths.add_to(
        root, trace, [paths.summed(column) for column in (np.ones_like(own), own, device, backward)], least_share
    )


def _places_of_work(links: Links, ranges: _Ranges) -> Ints:
    """The innermost range that each piece of work was launched from."""
    calls = links.trace.calls
    found = np.where(links.operator >= 0, links.operator + ranges.first_operator, UNKNOWN)
    rest = np.flatnonzero((found < 0) & links.is_launched)
    called = links.call[rest]
    found[rest] = ranges.nesting.around(calls.thread[called], calls.start[called])
    return found


def _parents(links: Links, ranges: _Ranges) -> tuple[Ints, Mask]:
    """What each range stands under, and whether it is of the backward pass.

    A backward operator stands under the nearest module or annotation around its forward operator, if there is one.
    """
    nesting, kind = ranges.nesting, ranges.kind
    parent = nesting.parent.copy()
    moved = np.zeros(len(parent), np.bool_)
    backward, forward = forward_rows(links)
    home = forward + ranges.first_operator
    for _ in range(int(nesting.depth.max(initial=0)) + 1):
        inner = (home >= 0) & (kind[home] >= 2)
        if not inner.any():
            break
        home[inner] = nesting.parent[home[inner]]
    rows = backward + ranges.first_operator
    fits = home >= 0
    parent[rows[fits]], moved[rows[fits]] = home[fits], True
    is_backward = np.zeros(len(parent), np.bool_)
    is_backward[rows] = True
    for level in list(nesting.levels())[1:]:
        above = nesting.parent[level]
        # Inside one that has moved already: it comes along.
        again = moved[level] & is_backward[above]
        parent[level[again]] = above[again]
        is_backward[level] |= is_backward[above]
    return parent, is_backward


@dataclass(frozen=True)
class _Paths:
    """The nodes: each range's own, and for each node its parent, name and kind. Parents come before their children."""

    node: Ints
    parent: Ints
    name: Ints
    kind: Ints
    batches: list[tuple[int, int]]

    @classmethod
    def of(cls, ranges: _Ranges, parent: Ints, is_backward: Mask) -> _Paths:
        node = np.full(len(parent), UNKNOWN, np.int64)
        names = int(ranges.table.name.max(initial=0)) + 1
        made: list[Ints] = []
        batches = []
        count = 0
        for wanted in (~is_backward, is_backward):
            for level in ranges.nesting.levels():
                rows = level[wanted[level]]
                if not len(rows):
                    continue
                above = np.where(parent[rows] >= 0, node[parent[rows]], UNKNOWN)
                key = ((above + 1) * names + ranges.table.name[rows]) * len(_KINDS) + ranges.kind[rows]
                keys, which = np.unique(key, return_inverse=True)
                node[rows] = which + count
                made.append(keys)
                batches.append((count, count + len(keys)))
                count += len(keys)
        keys = np.concatenate(made) if made else np.empty(0, np.int64)
        above, rest = np.divmod(keys, names * len(_KINDS))
        return cls(node, above - 1, rest // len(_KINDS), rest % len(_KINDS), batches)

    def summed(self, values: Ints) -> Ints:
        total = np.zeros(len(self.parent), np.int64)
        np.add.at(total, self.node, values)
        return total

    def with_all_inside(self, values: Ints) -> Ints:
        total = values.copy()
        for low, high in reversed(self.batches):
            inside = np.arange(low, high)[self.parent[low:high] >= 0]
            np.add.at(total, self.parent[inside], total[inside])
        return total

    def _depths(self) -> Ints:
        depth = np.zeros(len(self.parent), np.int64)
        for low, high in self.batches:
            above = self.parent[low:high]
            depth[low:high] = np.where(above >= 0, depth[above] + 1, 0)
        return depth

    def add_to(self, root: _Node, trace: Trace, columns: list[Ints], least: float) -> None:
        """What is too small to be told gives its time to what is around it."""
        host, device = self.with_all_inside(columns[1]), self.with_all_inside(columns[2])
        share = np.maximum(host / max(int(columns[1].sum()), 1), device / max(int(columns[2].sum()), 1))
        if (share >= least).sum() > MOST_NODES:
            least = float(np.sort(share)[-MOST_NODES])
        kept = (share >= least) & (self._depths() < DEEPEST_NODE)
        for low, high in reversed(self.batches):
            small = np.arange(low, high)[~kept[low:high] & (self.parent[low:high] >= 0)]
            for column in columns[1:]:
                np.add.at(column, self.parent[small], column[small])
        lost = ~kept & (self.parent < 0)
        for index, column in enumerate(columns[1:], start=1):
            root.values[index] += int(column[lost].sum())
        nodes: dict[int, _Node] = {}
        for row in np.flatnonzero(kept).tolist():
            above = nodes[int(self.parent[row])] if self.parent[row] >= 0 else root
            key = (trace.names[int(self.name[row])], _KINDS[int(self.kind[row])])
            found = above.children.setdefault(key, _Node(*key, [0, 0, 0, 0]))
            found.values = [one + int(column[row]) for one, column in zip(found.values, columns, strict=True)]
            nodes[row] = found


def parts_of(tree: TreeNode | None) -> list[PartRow]:
    """Modules by their path, and annotations, longest first. Modules inside modules count in both."""
    if tree is None:
        return []
    sums: dict[tuple[str, Literal["module", "annotation"]], list[float]] = {}
    whole = tree.device_s or tree.host_s
    for path, node, is_repeated in _walked(tree, (), frozenset()):
        if node.kind not in ("module", "annotation"):
            continue
        kind: Literal["module", "annotation"] = "module" if node.kind == "module" else "annotation"
        own = node.device_s - sum(inner.device_s for inner in _modules_inside(node)) if kind == "module" else 0.0
        values = (node.calls, node.host_s, node.device_s, own or node.device_self_s, node.backward_s)
        if is_repeated:  # its time is in the one around it
            values = (node.calls, 0.0, 0.0, node.device_self_s, 0.0)
        found = sums.setdefault(("/".join(path) if kind == "module" else node.plain_name, kind), [0.0] * 5)
        for index, value in enumerate(values):
            found[index] += value
    rows = [
        PartRow(
            path=path,
            kind=kind,
            calls=int(calls),
            host_s=host,
            device_s=device,
            device_self_s=max(own, 0.0),
            backward_s=backward,
            share=min((device if tree.device_s else host) / whole, 1.0) if whole else 0.0,
        )
        for (path, kind), (calls, host, device, own, backward) in sums.items()
    ]
    return sorted(rows, key=lambda row: (-row.device_s, -row.host_s, row.path))


def _walked(
    node: TreeNode, path: tuple[str, ...], marks: frozenset[str]
) -> Iterator[tuple[tuple[str, ...], TreeNode, bool]]:
    """Each node with the modules around it, and whether it is an annotation inside one of the same name."""
    for child in node.children:
        own = (*path, child.plain_name) if child.kind == "module" else path
        is_mark = child.kind == "annotation"
        yield own, child, is_mark and child.plain_name in marks
        yield from _walked(child, own, marks | {child.plain_name} if is_mark else marks)


def _modules_inside(node: TreeNode) -> Iterator[TreeNode]:
    """The nearest modules below, through whatever lies between."""
    for child in node.children:
        if child.kind == "module":
            yield child
        else:
            yield from _modules_inside(child)


def module_times(links: Links) -> dict[str, float]:
    """Seconds directly in each module that Redline marked, over all steps: of the device, or of operators without one."""
    found: defaultdict[str, float] = defaultdict(float)

    def collect(node: TreeNode, module: str | None) -> None:
        module = node.plain_name if node.name.startswith(MODULE_PREFIX) else module
        if module is not None:
            on_host = node.host_self_s if node.kind == "operator" else 0.0
            found[module] += node.device_self_s if links.trace.has_device else on_host
        for child in node.children:
            collect(child, module)

    if (tree := tree_of([links], least_share=0.0)) is not None:
        collect(tree, None)
    return dict(found)
