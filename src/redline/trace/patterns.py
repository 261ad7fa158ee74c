"""Work that could be done in another way, found in what a trace recorded: rows of device work, never names alone
where the operators around them are known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from redline.trace.classes import class_of
from redline.trace.columns import Ids, Ints, Mask, Work
from redline.trace.intervals import distinct, summed, union
from redline.trace.links import Links, Nesting, matching, where_name
from redline.trace.window import Recorded, step_borders

_BATCHED_PRODUCT = re.compile(r"^aten::(bmm|baddbmm_?)$")
_SOFTMAX = re.compile(r"^aten::_?(safe_)?softmax")
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function")
_FORWARD_ONLY = re.compile(
    r"^aten::(linear|conv\dd|convolution|layer_norm|native_layer_norm|batch_norm|group_norm|relu_?|gelu|silu|"
    r"scaled_dot_product_attention|embedding|dropout|softmax|matmul|addmm)$"
)
"""No backward formula calls these."""

_NEAR = 10
"""The most kernels (scaling, masking, dropout, copies) between the products of attention and its softmax."""

SEVERAL = 3
"""Times as many kernels as usual in the same operators: they are tried, not used."""
COLD_EXCESS = 0.05
"""A first step whose kernels take so much longer than the same kernels later was not warm."""


def unfused_attention(links: Links) -> Mask:
    """Softmax between batched products, with all that runs between them: attention written out, forward or backward."""
    work = links.trace.work
    found = np.zeros(len(work), np.bool_)
    order = np.lexsort((work.start, work.stream, work.device))
    order = order[work.kind[order] == Work.KERNEL]
    if not len(order):
        return found
    softmax, product = _softmax_and_products(links)
    queue = np.cumsum(np.concatenate(([True], _differs(work.device[order]) | _differs(work.stream[order]))))
    backward = where_name(links.trace, work, _names_backward)[order]
    for first, last in _around_softmax(softmax[order], product[order], queue, backward):
        found[order[first : last + 1]] = True
    return found


def attention_on_host(links: Links) -> Mask:
    """The same among operators, where the host is the device: all that run from the first product to the second."""
    trace, operators, nesting = links.trace, links.trace.operators, links.nesting
    found = np.zeros(len(operators), np.bool_)
    softmax, product = matching(trace, operators, _SOFTMAX), matching(trace, operators, _BATCHED_PRODUCT)
    if not softmax.any() or not product.any():
        return found
    # An operator that only calls another of the same kind is not a second one; views and allocations compute nothing.
    counted = (softmax | product) & ~_have_inside(nesting, softmax | product)
    works = where_name(trace, operators, lambda name: class_of(name) != "other")
    counted |= works & ~softmax & ~product & ~_have_inside(nesting, works)
    order = np.lexsort((operators.start, operators.thread))
    order = order[counted[order]]
    queue = np.cumsum(np.concatenate(([True], _differs(operators.thread[order]))))
    backward = where_name(trace, operators, _names_backward)[order]
    spans = np.array(list(_around_softmax(softmax[order], product[order], queue, backward)), np.int64).reshape(-1, 2)
    first, last = order[spans[:, 0]], order[spans[:, 1]]
    for thread in distinct(operators.thread[first]).tolist():
        mine = operators.thread[first] == thread
        during = union(operators.start[first[mine]], operators.end[last[mine]])
        found |= (operators.thread == thread) & during.holds(operators.start)
    return found


def _have_inside(nesting: Nesting, rows: Mask) -> Mask:
    """Which ranges hold one of these, other than themselves."""
    found: Mask = nesting.with_all_inside(rows.astype(np.int64)) > rows
    return found


def _names_backward(name: str) -> bool:
    return "backward" in name.lower()


def _around_softmax(softmax: Mask, product: Mask, queue: Ints, backward: Mask) -> Iterator[tuple[int, int]]:
    """From the product before each softmax to the one after it, where both are near and in the same queue."""
    at = np.flatnonzero(product)
    for position in np.flatnonzero(softmax).tolist() if len(at) else ():
        right = int(np.searchsorted(at, position))
        before, after = at[max(right - 2, 0) : right], at[right : right + 2]
        if not len(before) or not len(after):
            continue
        first, last = int(before[-1]), int(after[0])
        same_queue = queue[first] == queue[position] == queue[last]
        if not same_queue or position - first > _NEAR or last - position > _NEAR:
            continue
        if backward[position] and len(before) == 2 and first - int(before[0]) <= 2:
            first = int(before[0])
        if backward[position] and len(after) == 2 and int(after[1]) - last <= 2:
            last = int(after[1])
        yield first, last


def _softmax_and_products(links: Links) -> tuple[Mask, Mask]:
    """By operator where there is one; kernels without are told by their names."""
    trace, work = links.trace, links.trace.work
    operators = trace.operators
    by_operator = links.operator >= 0
    softmax = links.are(lambda name: name.is_softmax)
    product = links.is_class("matmul")
    batched = matching(trace, operators, _BATCHED_PRODUCT)
    normal = matching(trace, operators, _SOFTMAX)
    product[by_operator] &= batched[links.operator[by_operator]]
    softmax[by_operator] |= normal[links.operator[by_operator]]
    return softmax & (work.kind == Work.KERNEL), product


def _differs(column: Ints | Ids) -> Mask:
    found: Mask = column[1:] != column[:-1]
    return found


def strict_products(links: Links) -> Mask:
    """Matrix products and convolutions without tensor cores, with all that their operator runs to prepare them.

    A graph replays kernels without operators: there the conversions of layout beside such products count as theirs.
    """
    strict = links.are(lambda name: name.is_strict_fp32)
    known = strict & (links.operator >= 0)
    trace = links.trace
    by_product = np.zeros(len(trace.operators), np.bool_)
    called = distinct(links.operator[known])
    kinds = [class_of(trace.names[number]) for number in trace.operators.name[called].tolist()]
    by_product[called] = np.isin(kinds, ("matmul", "convolution"))
    found = strict.copy()
    has_operator = links.operator >= 0
    found[has_operator] |= by_product[links.operator[has_operator]]
    if (strict & links.by_graph).any():
        found |= links.by_graph & links.are(lambda name: name.converts_layout)
    kernels: Mask = trace.work.kind == Work.KERNEL
    return found & kernels


def recomputed(links: Links) -> Mask:
    """Device work of the forward pass that is done again during the backward pass."""
    found = np.zeros(len(links.trace.work), np.bool_)
    again = recomputed_operators(links)
    known = links.operator >= 0
    found[known] = again[links.operator[known]]
    return found


def recomputed_operators(links: Links) -> Mask:
    """Operators of the forward pass that run again during the backward pass, as activation checkpointing does.

    Operators in the backward pass run without recording a graph; recomputed ones record one, and carry its number.
    """
    trace, operators = links.trace, links.trace.operators
    again = np.zeros(len(operators), np.bool_)
    backward = matching(trace, operators, _BACKWARD)
    if not backward.any():
        return again
    parent = links.nesting.parent
    inside = np.zeros(len(operators), np.bool_)
    numbered = (operators.sequence >= 0) & (operators.forward_thread <= 0)
    for level in list(links.nesting.levels())[1:]:
        inside[level] = inside[parent[level]] | backward[parent[level]]
        again[level] = again[parent[level]] | (inside[level] & numbered[level])
    # With create_graph the backward pass records a graph as well: only what no backward formula calls is proof.
    proven = (again & matching(trace, operators, _FORWARD_ONLY)).any()
    return again if proven else np.zeros(len(operators), np.bool_)


@dataclass(frozen=True)
class Cold:
    """Kernels of the first steps that took longer than the same kernels later, or that only the first steps tried."""

    steps: int
    excess: Ints
    """For each row of device work, how much longer it took than usual; 0 for all others."""
    most: Ints
    """How much longer than in the fastest of the later steps."""
    tried: Mask
    """Kernels of operators that launch several times as many as the same operators later: algorithms are compared."""


def cold_kernels(recorded: Recorded) -> Cold:
    """Compared name by name, and only where a name is called equally often: one kernel serves many shapes."""
    borders, work = step_borders(recorded), recorded.trace.work
    none = np.zeros(len(work), np.int64)
    nothing = Cold(0, none, none, none > 0)
    if borders is None or len(borders) < 4:
        return nothing  # of two steps nobody can say which is the usual one
    count = len(borders) - 1
    step = np.clip(np.searchsorted(borders, work.start, side="right") - 1, 0, count - 1)
    kernels = np.flatnonzero((work.kind == Work.KERNEL) & ~recorded.links.is_class("communication"))
    tried, trials = _trials(recorded.links, kernels, step, count)
    kernels = kernels[~tried]
    name, total, calls = _by_step(work.name[kernels], step[kernels], work.duration[kernels], count)
    usual = np.median(total[:, count // 2 :], axis=1)
    alike = calls == np.median(calls[:, count // 2 :], axis=1)[:, None]
    excess = np.where(alike, total - usual[:, None], 0.0)
    worked = np.bincount(step, work.duration * (work.kind == Work.KERNEL), count)
    more = excess.sum(axis=0) + np.bincount(step, trials, count)
    cold = 0
    while cold < count // 2 and more[cold] > COLD_EXCESS * max(worked[cold], 1):
        cold += 1
    if not cold:
        return nothing

    def spread(more: NDArray[np.float64]) -> Ints:
        """Over the calls of each kernel in each of the cold steps."""
        share = np.where(total > 0, np.maximum(more, 0) / np.maximum(total, 1), 0.0)
        share[:, cold:] = 0.0
        found = np.zeros(len(work), np.int64)
        found[kernels] = (share[name, step[kernels]] * work.duration[kernels]).astype(np.int64)
        return found + np.where(step < cold, trials, 0)

    fastest = total[:, count // 2 :].min(axis=1)
    most = spread(np.where(alike, total - fastest[:, None], 0.0))
    return Cold(cold, spread(excess), most, (trials > 0) & (step < cold))


def _trials(links: Links, kernels: Ints, step: Ints, count: int) -> tuple[Mask, Ints]:
    """Which of these kernels belong to operators that try several algorithms, as cuDNN's benchmark does; and, for each row
    of device work, its share of the time beyond what the same operators take later."""
    work, operators = links.trace.work, links.trace.operators
    tried, beyond = np.zeros(len(kernels), np.bool_), np.zeros(len(work), np.int64)
    known = np.flatnonzero(links.operator[kernels] >= 0)
    if not len(known):
        return tried, beyond
    rows = kernels[known]
    name, total, launched = _by_step(operators.name[links.operator[rows]], step[rows], work.duration[rows], count)
    _, first = np.unique(links.operator[rows], return_index=True)
    called = np.zeros_like(launched)
    np.add.at(called, (name[first], step[rows[first]]), 1)
    later = slice(count // 2, None)
    usual, usual_called = np.median(launched[:, later], axis=1), np.median(called[:, later], axis=1)
    several = (called == usual_called[:, None]) & (usual > 0)[:, None] & (launched >= SEVERAL * usual[:, None])
    share = np.where(several, np.maximum(1 - np.median(total[:, later], axis=1)[:, None] / np.maximum(total, 1), 0), 0)
    mine = share[name, step[rows]]
    tried[known] = mine > 0
    beyond[rows] = (mine * work.duration[rows]).astype(np.int64)
    return tried, beyond


def _by_step(names: Ids, step: Ints, duration: Ints, count: int) -> tuple[Ints, Ints, Ints]:
    """For each row which name it has; for each name and step the time and the number of its rows."""
    found, name = np.unique(names, return_inverse=True)
    at, cells = name * count + step, len(found) * count
    total, calls = summed(at, duration, cells), summed(at, 1, cells)
    return name, total.reshape(-1, count), calls.reshape(-1, count)
