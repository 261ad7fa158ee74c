"""The program as a tree: annotations, modules and Python functions around operators, with host and device time.

Ranges at the same place in the program are one node, however often they ran. Backward operators stand under the module
of their forward operator, where the file tells which that is. Only the last step here loops over nodes, and only over
those that matter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from redline.model.fields import Frozen
from redline.trace.columns import UNKNOWN, HostRanges, Ids, Ints, Mask, Trace
from redline.trace.decode import MODULE_FRAME
from redline.trace.intervals import seconds, summed
from redline.trace.links import Links, Nesting, matching
from redline.trace.names import label_of
from redline.trace.tables import forward_rows

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
    """Counts device work launched from it and from everything inside it."""
    device_self_s: float
    backward_s: float = 0.0
    """So much of the device time is in operators of the backward pass."""
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
    """Counts its own work and that of all inside it, forward and backward."""
    device_self_s: float
    """Without the modules inside it."""
    backward_s: float
    share: float
    """Share of all device time; of host time where there is no device."""


def tree_of(links: Sequence[Links], least_share: float = LEAST_SHARE) -> TreeNode | None:
    """The tree of all traces together; None where nothing was recorded on the host."""
    root = _Node("all", "all")
    for each in links:
        if len(each.trace.operators) or len(each.trace.annotations) or len(each.trace.frames):
            _add_trace(each, root, least_share)
    root.values[0] = len(links)
    return root.frozen()[1] if root.children else None


class _Node:
    """A node on its way: calls, and host, device and backward time of its own."""

    def __init__(self, name: str, kind: NodeKind) -> None:
        self.name, self.kind, self.values = name, kind, [0, 0, 0, 0]
        self.children: dict[tuple[str, NodeKind], _Node] = {}

    def child(self, name: str, kind: NodeKind) -> _Node:
        if (name, kind) not in self.children:
            self.children[name, kind] = _Node(name, kind)
        return self.children[name, kind]

    def add(self, values: Sequence[int]) -> None:
        self.values = [one + other for one, other in zip(self.values, values, strict=True)]

    def frozen(self) -> tuple[list[int], TreeNode]:
        """Returns its times with everything inside it, and the node."""
        below = [child.frozen() for child in self.children.values()]
        below.sort(key=lambda one: (-one[0][2], -one[0][1], one[1].name))
        totals = [own + sum(inner[at] for inner, _ in below) for at, own in enumerate(self.values)]
        return totals, TreeNode(
            name=label_of(self.name),
            kind=self.kind,
            calls=self.values[0],
            host_s=seconds(totals[1]),
            host_self_s=seconds(self.values[1]),
            device_s=seconds(totals[2]),
            device_self_s=seconds(self.values[2]),
            backward_s=seconds(totals[3]),
            children=tuple(node for _, node in below),
        )


def _add_trace(links: Links, root: _Node, least_share: float) -> None:
    """Every range is one entry: annotations and frames first, operators from `first_operator` on."""
    trace = links.trace
    marks, frames, operators = trace.annotations, trace.frames, trace.operators
    kept = np.flatnonzero(~matching(trace, marks, _STEP))
    columns = {
        name: np.concatenate((getattr(marks, name)[kept], getattr(frames, name), getattr(operators, name)))
        for name in HostRanges.__dataclass_fields__
    }
    table, first_operator = HostRanges(**columns), len(kept) + len(frames)
    modules = (
        np.where(matching(trace, frames, _MODULE), 1, 2),
        np.where(matching(trace, marks, _OWN_MODULE)[kept], 1, 0),
    )
    kind = np.concatenate((modules[1], modules[0], np.full(len(operators), 3)))
    nesting = Nesting(table.thread, table.start, table.end)
    parent, is_backward = _parents(links, nesting, kind, first_operator)
    own = np.maximum(table.duration - nesting.children_sum(table.duration), 0)
    # The innermost range that each piece of work was launched from.
    where = np.where(links.operator >= 0, links.operator + first_operator, UNKNOWN)
    rest = np.flatnonzero((where < 0) & links.is_launched)
    called = links.call[rest]
    where[rest] = nesting.around(trace.calls.thread[called], trace.calls.start[called])
    known = where >= 0
    device = summed(where[known], trace.work.duration[known], len(own))
    root.add([0, 0, int(trace.work.duration[~known].sum()), 0])
    values = np.stack((np.ones_like(own), own, device, np.where(is_backward, device, 0)), axis=1)
    _add_places(root, trace, table.name, kind, nesting, parent, is_backward, values, least_share)


def _parents(links: Links, nesting: Nesting, kind: Ints, first_operator: int) -> tuple[Ints, Mask]:
    """Returns what each range stands under, and whether it is of the backward pass.

    A backward operator stands under the nearest module or annotation around its forward operator, if there is one.
    """
    parent, moved, is_backward = nesting.parent.copy(), *(np.zeros(len(kind), np.bool_) for _ in range(2))
    backward, forward = forward_rows(links)
    home, rows = forward + first_operator, backward + first_operator
    for _ in range(int(nesting.depth.max(initial=0)) + 1):
        inner = (home >= 0) & (kind[home] >= 2)
        if not inner.any():
            break
        home[inner] = nesting.parent[home[inner]]
    fits = home >= 0
    parent[rows[fits]], moved[rows[fits]], is_backward[rows] = home[fits], True, True
    for level in list(nesting.levels())[1:]:
        above = nesting.parent[level]
        # Inside one that has moved already: it comes along.
        again = moved[level] & is_backward[above]
        parent[level[again]] = above[again]
        is_backward[level] |= is_backward[above]
    return parent, is_backward


def _add_places(
    root: _Node,
    trace: Trace,
    name: Ids,
    kind: Ints,
    nesting: Nesting,
    parent: Ints,
    is_backward: Mask,
    values: Ints,
    least: float,
) -> None:
    """Ranges at the same place in the program become one node. What is too small to be told gives its time to what is around it.

    Places are numbered level by level, forward before backward, so that parents come before their children.
    """
    place, names = np.full(len(parent), UNKNOWN, np.int64), int(name.max(initial=0)) + 1
    made: list[Ints] = []
    batches = [0]
    for wanted in (~is_backward, is_backward):
        for level in nesting.levels():
            rows = level[wanted[level]]
            if len(rows):
                above = np.where(parent[rows] >= 0, place[parent[rows]], UNKNOWN)
                keys, which = np.unique(
                    ((above + 1) * names + name[rows]) * len(_KINDS) + kind[rows], return_inverse=True
                )
                place[rows] = which + batches[-1]
                made.append(keys)
                batches.append(batches[-1] + len(keys))
    above, rest = np.divmod(np.concatenate([np.empty(0, np.int64), *made]), names * len(_KINDS))
    above -= 1
    own = np.stack([summed(place, column, batches[-1]) for column in values.T], axis=1)
    total, depth = own.copy(), np.zeros(batches[-1], np.int64)
    levels = [np.arange(low, high) for low, high in pairwise(batches)]
    for level in reversed(levels):
        inside = level[above[level] >= 0]
        np.add.at(total, above[inside], total[inside])
    for level in levels:
        depth[level] = np.where(above[level] >= 0, depth[above[level]] + 1, 0)
    share = (total[:, 1:3] / np.maximum(own[:, 1:3].sum(axis=0), 1)).max(axis=1)
    if (share >= least).sum() > MOST_NODES:
        least = float(np.sort(share)[-MOST_NODES])
    kept = (share >= least) & (depth < DEEPEST_NODE)
    own[~kept, 0] = 0
    for level in reversed(levels):
        small = level[~kept[level] & (above[level] >= 0)]
        np.add.at(own, above[small], own[small])
    root.add(own[~kept & (above < 0)].sum(axis=0).tolist())
    nodes: dict[int, _Node] = {}
    for row in np.flatnonzero(kept).tolist():
        number, sort = divmod(int(rest[row]), len(_KINDS))
        nodes[row] = nodes.get(int(above[row]), root).child(trace.names[number], _KINDS[sort])
        nodes[row].add(own[row].tolist())


def parts_of(tree: TreeNode | None) -> list[PartRow]:
    """Returns modules by their path, and annotations, longest first. Modules inside modules count in both."""
    if tree is None:
        return []
    sums: dict[tuple[str, Literal["module", "annotation"]], list[float]] = {}

    def add(node: TreeNode, path: tuple[str, ...], marks: frozenset[str]) -> float:
        """Add up what is below a node, and return the device time of the nearest modules there."""
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
            elif child.kind == "annotation":  # the rest of its time is in the one of its name around it
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
    """Returns seconds directly in each module that Redline marked, over all steps: of the device, or of operators without one."""
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
