"""This module finds work in a trace that could be done in another way.

It looks at rows of device work, and does not rely on names alone if the operators around them are known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from redline.trace.columns import DeviceWork, HostRanges, Ints, Mask, Work
from redline.trace.intervals import summed, union
from redline.trace.links import Links, matching, where_name
from redline.trace.names import class_of
from redline.trace.window import Recorded, step_borders

_BATCHED_PRODUCT = re.compile(r"^aten::(bmm|baddbmm_?)$")
_SOFTMAX = re.compile(r"^aten::_?(safe_)?softmax")
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function")
_FORWARD_ONLY = re.compile(
    r"^aten::(linear|conv\dd|convolution|layer_norm|native_layer_norm|batch_norm|group_norm|relu_?|gelu|silu|"
    r"scaled_dot_product_attention|embedding|dropout|softmax|matmul|addmm)$"
)
"""No backward formula calls these operators, so in a backward pass they are recomputed."""

_NEAR = 10
"""There are no more kernels (scaling, masking, dropout, copies) than this between the products of attention and its softmax."""
SEVERAL = 3
"""Operators with this many times as many kernels as usual are trying kernels, not using them."""
COLD_EXCESS = 0.05
"""A first step was not warm if its kernels take longer by this share than the same kernels later."""


def unfused_attention(links: Links) -> Mask:
    """Returns True for attention that is written out, forward or backward: softmax between batched products, and all between them.

    It is recognised by its operators. Kernels without an operator are recognised by their names.
    """
    trace, work, by_operator = links.trace, links.trace.work, links.operator >= 0
    kernels, product = work.kind == Work.KERNEL, links.is_class("matmul")
    product[by_operator] &= matching(trace, trace.operators, _BATCHED_PRODUCT)[links.operator[by_operator]]
    softmax = links.are(lambda name: name.is_softmax)
    softmax[by_operator] |= matching(trace, trace.operators, _SOFTMAX)[links.operator[by_operator]]
    found, queue = np.zeros(len(work), np.bool_), (work.device.astype(np.int64) << 32) ^ work.stream
    for rows in _written_out(links, work, kernels, queue, softmax & kernels, product):
        found[rows] = True
    return found


def attention_on_host(links: Links) -> Mask:
    """Returns the same among operators, for traces where the host is the device. It covers all that run from the first
    product to the second."""
    trace, operators, nesting = links.trace, links.trace.operators, links.nesting
    softmax, product = matching(trace, operators, _SOFTMAX), matching(trace, operators, _BATCHED_PRODUCT)
    works = where_name(trace, operators, lambda name: class_of(name) != "other")

    def innermost(rows: Mask) -> Mask:
        """Leaves out operators that only call another of the same kind, because they are not a second one."""
        return rows & ~(nesting.with_all_inside(rows.astype(np.int64)) > rows)

    counted = innermost(softmax | product) | (innermost(works) & ~softmax & ~product)
    found = np.zeros(len(operators), np.bool_)
    for rows in _written_out(links, operators, counted, operators.thread.astype(np.int64), softmax, product):
        during = union(operators.start[rows[:1]], operators.end[rows[-1:]])
        found |= (operators.thread == operators.thread[rows[0]]) & during.holds(operators.start)
    return found


def _written_out(
    links: Links, table: HostRanges | DeviceWork, counted: Mask, queue: Ints, softmax: Mask, product: Mask
) -> Iterator[Ints]:
    """Yields the rows from the product before each softmax to the one after it, if both are near and in the same queue."""
    rows = np.flatnonzero(counted)
    order = rows[np.lexsort((table.start[rows], queue[rows]))]
    backward = where_name(links.trace, table, lambda name: "backward" in name.lower())[order]
    at, queue = np.flatnonzero(product[order]), queue[order]
    for position in np.flatnonzero(softmax[order]).tolist():
        right = int(np.searchsorted(at, position))
        near = [
            one
            for one in at[max(right - 2, 0) : right + 2].tolist()
            if abs(one - position) <= _NEAR + 2 and queue[one] == queue[position]
        ]
        before, after = [one for one in near if one < position], [one for one in near if one > position]
        if before and after and max(position - before[-1], after[0] - position) <= _NEAR:
            first, last = before[-1], after[0]
            # In the backward pass two products are on either side.
            if backward[position]:
                first = before[0] if first - before[0] <= 2 else first
                last = after[-1] if after[-1] - last <= 2 else last
            yield order[first : last + 1]


def strict_products(links: Links) -> Mask:
    """Returns True for matrix products and convolutions without tensor cores, and for all that their operator does to prepare them.

    A graph replays kernels without operators. There the conversions of layout beside such products count as theirs.
    """
    strict, trace, has_operator = links.are(lambda name: name.is_strict_fp32), links.trace, links.operator >= 0
    multiplies = where_name(trace, trace.operators, lambda name: class_of(name) in ("matmul", "convolution"))
    calls_strict = np.zeros(len(trace.operators), np.bool_)
    calls_strict[links.operator[strict & has_operator]] = True
    found = strict.copy()
    found[has_operator] |= (calls_strict & multiplies)[links.operator[has_operator]]
    if (strict & links.by_graph).any():
        found |= links.by_graph & links.are(lambda name: name.converts_layout)
    found &= trace.work.kind == Work.KERNEL
    return found


def recomputed(links: Links) -> Mask:
    """The mask is true for device work of the forward pass that is done again during the backward pass."""
    return np.append(recomputed_operators(links), False)[links.operator]


def recomputed_operators(links: Links) -> Mask:
    """The mask is true for operators of the forward pass that run again during the backward pass, as activation checkpointing does.

    Operators in the backward pass run without recording a graph. Recomputed ones record one, and carry its number.
    """
    trace, operators, parent = links.trace, links.trace.operators, links.nesting.parent
    backward, again = matching(trace, operators, _BACKWARD), np.zeros(len(operators), np.bool_)
    if not backward.any():
        return again
    inside = again.copy()
    numbered = (operators.sequence >= 0) & (operators.forward_thread <= 0)
    for level in links.nesting.levels()[1:]:
        inside[level] = inside[parent[level]] | backward[parent[level]]
        again[level] = again[parent[level]] | (inside[level] & numbered[level])
    # The backward pass may record a graph as well (create_graph), so only operators that no backward formula calls are proof.
    return again & (again & matching(trace, operators, _FORWARD_ONLY)).any()


@dataclass(frozen=True)
class Cold:
    """These are kernels of the first steps that took longer than those of the same operators later, or that only the first steps tried."""

    steps: int
    excess: Ints
    """For each row of device work it holds how much longer the row was than the same work in the fastest of the later steps."""
    tried: Mask
    """It is true for kernels of operators that launch several times as many as the same operators later. They are comparing algorithms."""


def cold_kernels(recorded: Recorded) -> Cold:
    """Returns what is spent by the first steps on the kernels of an operator beyond what the same operator takes later.

    Only operators that are called equally often are compared. Kernels that no operator launched stand for themselves.
    """
    borders, links, work = step_borders(recorded), recorded.links, recorded.trace.work
    none = np.zeros(len(work), np.int64)
    if borders is None or len(borders) < 4:
        # Of two steps nobody can say which is the usual one.
        return Cold(0, none, none > 0)
    count = len(borders) - 1
    later = slice(count // 2, None)
    rows = np.flatnonzero((work.kind == Work.KERNEL) & ~links.is_class("communication"))
    step = np.clip(np.searchsorted(borders, work.start[rows], side="right") - 1, 0, count - 1)
    operator, known = links.operator[rows], links.operator[rows] >= 0
    once = ~known
    once[np.unique(operator, return_index=True)[1]] = True
    named = np.append(recorded.trace.operators.name, 0)[operator] + len(recorded.trace.names)
    names, place = np.unique(np.where(known, named, work.name[rows]), return_inverse=True)

    def by_step(values: Ints | int) -> Ints:
        """Returns the sum of the values over the rows of each place in the program, for each step."""
        return summed(place * count + step, values, len(names) * count).reshape(-1, count)

    def usual(values: Ints) -> Any:
        return np.median(values[:, later], axis=1, keepdims=True)

    total, launched, called = by_step(work.duration[rows]), by_step(1), by_step(once.astype(np.int64))
    excess = np.where(called == usual(called), total - usual(total), 0)
    is_cold = excess.sum(axis=0) > COLD_EXCESS * np.maximum(total.sum(axis=0), 1)
    cold = int(np.argmin(np.append(is_cold[: count // 2], False)))
    longer = (excess > 0) & (np.arange(count) < cold)
    several = (launched >= SEVERAL * usual(launched)) & longer
    # If several algorithms are tried, what counts is the time beyond what the one that is kept usually takes.
    beyond = np.where(several, excess, total - total[:, later].min(axis=1, keepdims=True)) * longer
    found, tried = none.copy(), none > 0
    found[rows] = ((beyond / np.maximum(total, 1))[place, step] * work.duration[rows]).astype(np.int64)
    tried[rows] = several[place, step]
    return Cold(cold, found, tried)
