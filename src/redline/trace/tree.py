"""This module lays out the program as a tree: annotations, modules and Python functions around operators, with host and device time.

Ranges at the same place in the program are one node, however often they ran. Backward operators stand under the module of their
forward operator, where the file tells which that is. Only the last step here loops over nodes, and only over those that matter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from redline.model.fields import Frozen
from redline.trace.columns import UNKNOWN, Ints, Mask
from redline.trace.decode import MODULE_FRAME
from redline.trace.host import STEP, joined_ranges, picked
from redline.trace.intervals import seconds, summed
from redline.trace.links import Links, Nesting, matching
from redline.trace.names import label_of
from redline.trace.tables import forward_rows

MODULE_PREFIX = "redline-module/"
"""Redline puts this mark around each module if it was asked to."""

NodeKind = Literal["annotation", "module", "function", "operator", "all"]
_KINDS: tuple[NodeKind, ...] = ("annotation", "module", "function", "operator")
_MODULE = re.compile(f"^({MODULE_FRAME}|{MODULE_PREFIX})")

LEAST_SHARE = 0.001
"""What takes less than this share of both host and device time is left out of the tree. Its time stays in what is around it."""
MOST_NODES = 5000
"""The tree keeps this many of a trace's nodes. The smaller ones give their time to what is around them."""
DEEPEST_NODE = 120
"""Deeper than this in the program, nodes are left out too, and their time stays in what is around them."""


class TreeNode(Frozen):
    """This is one place in the program. For several traces the figures are sums."""

    name: str
    kind: NodeKind
    calls: int
    host_s: float
    """This includes everything inside it."""
    host_self_s: float
    device_s: float
    """This counts device work launched from it and from everything inside it."""
    device_self_s: float
    backward_s: float = 0.0
    """This much of the device time is in operators of the backward pass."""
    children: tuple[TreeNode, ...] = ()
    """The longest come first."""

    def seconds(self, side: Literal["device", "host"]) -> float:
        return self.device_s if side == "device" else self.host_s

    @property
    def plain_name(self) -> str:
        return self.name.removeprefix(MODULE_FRAME).removeprefix(MODULE_PREFIX)


class PartRow(Frozen):
    """This is a module or an annotation, wherever it was called from."""

    path: str
    """It names the modules around it, from the outermost on."""
    kind: Literal["module", "annotation"]
    calls: int
    host_s: float
    device_s: float
    """This counts its own work and that of all inside it, forward and backward."""
    device_self_s: float
    """This leaves out the modules inside it."""
    backward_s: float
    share: float
    """This is its share of all device time. Without a device it is the share of host time."""


def tree_of(links: Sequence[Links], least_share: float = LEAST_SHARE) -> TreeNode | None:
    """Returns the tree of all traces together. Returns None if nothing was recorded on the host."""
    root = _Node("all", "all")
    for one in links:
        if len(one.trace.operators) or len(one.trace.annotations) or len(one.trace.frames):
            _add_trace(one, root, least_share)
    root.values[0] = len(links)
    return root.frozen()[1] if root.children else None


class _Node:
    """This is a node while the tree is built. It has its own calls, and host, device and backward time."""

    def __init__(self, name: str, kind: NodeKind) -> None:
        self.name, self.kind, self.values = name, kind, np.zeros(4, np.int64)
        self.children: dict[tuple[str, NodeKind], _Node] = {}

    def child(self, name: str, kind: NodeKind) -> _Node:
        return self.children.setdefault((name, kind), _Node(name, kind))

    def frozen(self) -> tuple[list[int], TreeNode]:
        """Returns its times with everything inside it, and the node."""
        below = sorted(
            (child.frozen() for child in self.children.values()), key=lambda one: (-one[0][2], -one[0][1], one[1].name)
        )
        totals = (self.values + np.sum([total for total, _ in below], axis=0, dtype=np.int64)).tolist()
        return totals, TreeNode(
            name=label_of(self.name),
            kind=self.kind,
            calls=int(self.values[0]),
            host_s=seconds(totals[1]),
            host_self_s=seconds(int(self.values[1])),
            device_s=seconds(totals[2]),
            device_self_s=seconds(int(self.values[2])),
            backward_s=seconds(totals[3]),
            children=tuple(node for _, node in below),
        )


def _add_trace(links: Links, root: _Node, least: float) -> None:
    """Adds a trace to the tree. Every range is one entry: annotations and frames come first, then operators. Ranges at the
    same place in the program become one node. A range that is too small to be shown gives its time to what is around it."""
    trace, calls = links.trace, links.trace.calls
    marks = picked(trace.annotations, ~matching(trace, trace.annotations, STEP))
    table, operators = joined_ranges(marks, trace.frames, trace.operators), len(marks) + len(trace.frames)
    kind = np.full(len(table), _KINDS.index("operator"))
    kind[:operators] = _KINDS.index("annotation")
    kind[len(marks) : operators] = _KINDS.index("function")
    kind[matching(trace, table, _MODULE) & (kind < _KINDS.index("operator"))] = _KINDS.index("module")
    nesting = Nesting(table)
    parent, is_backward = _parents(links, nesting, kind, operators)
    own = np.maximum(table.duration - nesting.children_sum(table.duration), 0)
    # This is the innermost range that each piece of work was launched from.
    where = np.where(links.operator >= 0, links.operator + operators, UNKNOWN)
    rest = np.flatnonzero((where < 0) & links.is_launched)
    where[rest] = nesting.around(calls.thread[links.call[rest]], calls.start[links.call[rest]])
    known = where >= 0
    device = summed(where[known], trace.work.duration[known], len(own))
    root.values[2] += int(trace.work.duration[~known].sum())
    # Places are numbered level by level, forward before backward, so that parents come before their children.
    place, names = np.full(len(table) + 1, UNKNOWN, np.int64), int(table.name.max(initial=0)) + 1
    made, batches = [np.empty(0, np.int64)], [0]
    for level in (level[side[level]] for side in (~is_backward, is_backward) for level in nesting.levels()):
        keys = ((place[parent[level]] + 1) * names + table.name[level]) * len(_KINDS) + kind[level]
        keys, which = np.unique(keys, return_inverse=True)
        place[level] = which + batches[-1]
        made.append(keys)
        batches.append(batches[-1] + len(keys))
    above, rest = np.divmod(np.concatenate(made), names * len(_KINDS))
    above -= 1
    columns = (np.ones_like(own), own, device, np.where(is_backward, device, 0))
    values = np.stack([summed(place[:-1], column, batches[-1]) for column in columns], axis=1)
    total, depth = values.copy(), np.zeros(batches[-1] + 1, np.int64)
    levels = [np.arange(low, high) for low, high in pairwise(batches)]
    for level in reversed(levels):
        np.add.at(total, above[level[above[level] >= 0]], total[level[above[level] >= 0]])
    for level in levels:
        depth[level] = np.where(above[level] >= 0, depth[above[level]] + 1, 0)
    share = (total[:, 1:3] / np.maximum(values[:, 1:3].sum(axis=0), 1)).max(axis=1, initial=0)
    least = max(least, float(np.sort(share)[-MOST_NODES])) if len(share) > MOST_NODES else least
    kept = (share >= least) & (depth[:-1] < DEEPEST_NODE)
    values[~kept, 0] = 0
    for level in reversed(levels):
        small = level[~kept[level] & (above[level] >= 0)]
        np.add.at(values, above[small], values[small])
    root.values += values[~kept & (above < 0)].sum(axis=0)
    nodes = {UNKNOWN: root}
    for row in np.flatnonzero(kept).tolist():
        number, sort = divmod(int(rest[row]), len(_KINDS))
        nodes[row] = nodes.get(int(above[row]), root).child(trace.names[number], _KINDS[sort])
        nodes[row].values += values[row]


def _parents(links: Links, nesting: Nesting, kind: Ints, operators: int) -> tuple[Ints, Mask]:
    """Returns what each range stands under, and whether it is part of the backward pass.

    A backward operator stands under the nearest module or annotation around its forward operator, if there is one.
    """
    parent, moved, is_backward = nesting.parent.copy(), *(np.zeros(len(kind), np.bool_) for _ in range(2))
    backward, home = (rows + operators for rows in forward_rows(links))
    home[home < operators] = UNKNOWN
    while (inner := (home >= 0) & (kind[home] >= _KINDS.index("function"))).any():
        home[inner] = nesting.parent[home[inner]]
    fits = home >= 0
    parent[backward[fits]], moved[backward[fits]], is_backward[backward] = home[fits], True, True
    for level in nesting.levels()[1:]:
        above = nesting.parent[level]
        # An operator inside one that has moved already moves with it.
        again = moved[level] & is_backward[above]
        parent[level[again]] = above[again]
        is_backward[level] |= is_backward[above]
    return parent, is_backward


def parts_of(tree: TreeNode | None) -> list[PartRow]:
    """Returns modules by their path, and annotations, the longest first. Modules inside modules count in both."""
    if tree is None:
        return []
    sums: dict[tuple[str, Literal["module", "annotation"]], list[float]] = {}

    def add(node: TreeNode, path: tuple[str, ...], marks: frozenset[str]) -> float:
        """Adds up what is below a node, and returns the device time of the nearest modules there."""
        in_modules = 0.0
        for child in node.children:
            name, device = child.plain_name, child.device_s
            own = (*path, name) if child.kind == "module" else path
            inside = add(child, own, marks | {name} if child.kind == "annotation" else marks)
            in_modules += device if child.kind == "module" else inside
            if child.kind == "module":
                values = (child.calls, child.host_s, device, device - inside, child.backward_s)
            elif child.kind == "annotation" and name not in marks:
                values = (child.calls, child.host_s, device, child.device_self_s, child.backward_s)
            # If an annotation is inside another of the same name, the rest of its time is counted in that one.
            elif child.kind == "annotation":
                values = (child.calls, 0.0, 0.0, child.device_self_s, 0.0)
            else:
                continue
            key = ("/".join(own) if child.kind == "module" else name, child.kind)
            sums[key] = [total + value for total, value in zip(sums.get(key, [0.0] * 5), values, strict=True)]
        return in_modules

    add(tree, (), frozenset())
    whole = tree.device_s or tree.host_s
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


def module_times(links: Links) -> dict[str, float]:
    """Returns seconds directly in each module that Redline marked, over all steps. They are device time, or operators' time
    without a device."""
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
