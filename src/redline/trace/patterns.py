"""This module finds work in a trace that could be done in another way. It looks at rows of device work, and never at names alone
where the operators around them are known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from redline.trace.columns import DeviceWork, HostRanges, Ids, Ints, Mask, Trace, Work
from redline.trace.intervals import distinct, summed, union
from redline.trace.links import Links, Nesting, matching, where_name
from redline.trace.names import class_of
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
"""There are no more kernels (scaling, masking, dropout, copies) than this between the products of attention and its softmax."""

SEVERAL = 3
"""Operators with so many times as many kernels as usual are trying them, not using them."""
COLD_EXCESS = 0.05
"""A first step whose kernels take so much longer than the same kernels later was not warm."""


def unfused_attention(links: Links) -> Mask:
    """Returns true for attention that is written out, forward or backward: softmax between batched products, and all between them."""
    work = links.trace.work
    found, kernels = np.zeros(len(work), np.bool_), np.flatnonzero(work.kind == Work.KERNEL)
    softmax, product = _softmax_and_products(links)
    for rows in _written_out(links.trace, work, kernels, (work.stream, work.device), softmax, product):
        found[rows] = True
    return found


def attention_on_host(links: Links) -> Mask:
    """The same among operators, where the host is the device: all that run from the first product to the second."""
    trace, operators, nesting = links.trace, links.trace.operators, links.nesting
    found = np.zeros(len(operators), np.bool_)
    softmax, product = matching(trace, operators, _SOFTMAX), matching(trace, operators, _BATCHED_PRODUCT)
    # An operator that only calls another of the same kind is not a second one; views and allocations compute nothing.
    counted = (softmax | product) & ~_have_inside(nesting, softmax | product)
    works = where_name(trace, operators, lambda name: class_of(name) != "other")
    counted |= works & ~softmax & ~product & ~_have_inside(nesting, works)
    spans = list(_written_out(trace, operators, np.flatnonzero(counted), (operators.thread,), softmax, product))
    ends = np.array([(rows[0], rows[-1]) for rows in spans], np.int64).reshape(-1, 2)
    for thread in distinct(operators.thread[ends[:, 0]]).tolist():
        first, last = ends[operators.thread[ends[:, 0]] == thread].T
        during = union(operators.start[first], operators.end[last])
        found |= (operators.thread == thread) & during.holds(operators.start)
    return found


def _written_out(
    trace: Trace,
    table: HostRanges | DeviceWork,
    rows: Ints,
    queues: tuple[Ids | Ints, ...],
    softmax: Mask,
    product: Mask,
) -> Iterator[Ints]:
    """Yields the rows from the product before each softmax to the one after it, if both are near and in the same queue."""
    keys: list[Ids | Ints] = [table.start[rows], *(queue[rows] for queue in queues)]
    order = rows[np.lexsort(keys)]
    backward = where_name(trace, table, lambda name: "backward" in name.lower())[order]
    at = np.flatnonzero(product[order])
    for position in np.flatnonzero(softmax[order]).tolist():
        right = int(np.searchsorted(at, position))
        before, after = at[max(right - 2, 0) : right].tolist(), at[right : right + 2].tolist()
        if not before or not after or position - before[-1] > _NEAR or after[0] - position > _NEAR:
            continue
        first, last = before[-1], after[0]
        if any((queue[order[[first, last]]] != queue[order[position]]).any() for queue in queues):
            continue
        if backward[position]:  # there, two products are on either side
            first = before[0] if first - before[0] <= 2 else first
            last = after[-1] if after[-1] - last <= 2 else last
        yield order[first : last + 1]


def _have_inside(nesting: Nesting, rows: Mask) -> Mask:
    """Returns true for ranges that hold one of these, other than themselves."""
    found: Mask = nesting.with_all_inside(rows.astype(np.int64)) > rows
    return found


def _softmax_and_products(links: Links) -> tuple[Mask, Mask]:
    """Returns them by operator where there is one; kernels without are told by their names."""
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


def strict_products(links: Links) -> Mask:
    """Returns true for matrix products and convolutions without tensor cores, and for all that their operator does to prepare them.

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
    # The backward pass may record a graph as well (create_graph): only what no backward formula calls is proof.
    proven = (again & matching(trace, operators, _FORWARD_ONLY)).any()
    return again if proven else np.zeros(len(operators), np.bool_)


@dataclass(frozen=True)
class Cold:
    """These are kernels of the first steps that took longer than those of the same operators later, or that only the first steps tried."""

    steps: int
    excess: Ints
    """Each row of device work has the time here by which it was longer than usual; 0 for all others."""
    most: Ints
    """This is how much longer they took than in the fastest of the later steps."""
    tried: Mask
    """True for kernels of operators that launch several times as many as the same operators later: algorithms are compared."""


def cold_kernels(recorded: Recorded) -> Cold:
    """Returns what is spent by the first steps on the kernels of an operator beyond what the same operator takes later.

    Only operators that are called equally often are compared; kernels that no operator launched stand for themselves.
    """
    borders, links, work = step_borders(recorded), recorded.links, recorded.trace.work
    none = np.zeros(len(work), np.int64)
    nothing = Cold(0, none, none, none > 0)
    if borders is None or len(borders) < 4:
        return nothing  # of two steps nobody can say which is the usual one
    count, later = len(borders) - 1, slice((len(borders) - 1) // 2, None)
    rows = np.flatnonzero((work.kind == Work.KERNEL) & ~links.is_class("communication"))
    step = np.clip(np.searchsorted(borders, work.start[rows], side="right") - 1, 0, count - 1)
    operator, name = links.operator[rows], work.name[rows].astype(np.int64)
    known, once = operator >= 0, operator < 0
    name[known] = len(recorded.trace.names) + recorded.trace.operators.name[operator[known]]
    once[np.unique(operator, return_index=True)[1]] = True
    names, place = np.unique(name, return_inverse=True)

    def by_step(values: Ints | int) -> Ints:
        """Returns for each place in the program what is the sum of its rows in each step."""
        return summed(place * count + step, values, len(names) * count).reshape(-1, count)

    total, launched, called = by_step(work.duration[rows]), by_step(1), by_step(once.astype(np.int64))
    alike = called == np.median(called[:, later], axis=1)[:, None]
    excess = np.where(alike, total - np.median(total[:, later], axis=1)[:, None], 0)
    is_cold = excess.sum(axis=0) > COLD_EXCESS * np.maximum(total.sum(axis=0), 1)
    cold = int(np.argmin(np.append(is_cold[: count // 2], False)))
    if not cold:
        return nothing
    excess[:, cold:] = 0
    several = (launched >= SEVERAL * np.median(launched[:, later], axis=1)[:, None]) & (excess > 0)
    fastest = np.where((excess > 0) & ~several, total - total[:, later].min(axis=1)[:, None], excess)

    def spread(values: NDArray[np.float64]) -> Ints:
        """Returns the values, which are spread over the rows of each place in each step."""
        found, share = none.copy(), np.maximum(values, 0) / np.maximum(total, 1)
        found[rows] = (share[place, step] * work.duration[rows]).astype(np.int64)
        return found

    tried = none > 0
    tried[rows] = several[place, step]
    return Cold(cold, spread(excess), spread(fastest), tried)
