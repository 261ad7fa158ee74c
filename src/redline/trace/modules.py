"""Time by module: which part of the model the work belongs to, forward and backward."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from redline.trace.columns import UNKNOWN, Ints
from redline.trace.links import Links, Nesting
from redline.trace.operators import self_times

MODULE_PREFIX = "redline-module/"


def module_times(links: Links) -> dict[str, int]:
    """Nanoseconds directly in each module, over all steps; empty where no module was marked."""
    trace = links.trace
    marks = trace.annotations
    named = [number for number, name in enumerate(trace.names) if name.startswith(MODULE_PREFIX)]
    rows = np.flatnonzero(np.isin(marks.name, named))
    if not len(rows):
        return {}
    nesting = Nesting(marks.thread[rows], marks.start[rows], marks.end[rows])
    place = _places(links, nesting)
    if trace.has_device:
        where, duration = _of_work(links, nesting, place), trace.work.duration
    else:
        where, duration = place, self_times(links)[0]
    known = where >= 0
    total = np.zeros(len(rows), np.int64)
    np.add.at(total, where[known], duration[known])
    found: defaultdict[str, int] = defaultdict(int)
    for name, nanoseconds in zip(marks.name[rows].tolist(), total.tolist(), strict=True):
        found[trace.names[name].removeprefix(MODULE_PREFIX)] += nanoseconds
    return dict(found)


def _places(links: Links, nesting: Nesting) -> Ints:
    """For each operator, the mark it belongs to: the one around it, that of its forward operator, or its parent's."""
    operators = links.trace.operators
    place = nesting.around(operators.thread, operators.start)
    backward = _of_forward(links, place)
    place = np.where(place >= 0, place, backward)
    parent = links.nesting.parent
    for level in links.nesting.levels():
        orphans = level[(place[level] < 0) & (parent[level] >= 0)]
        place[orphans] = place[parent[orphans]]
    return place


def _of_forward(links: Links, place: Ints) -> Ints:
    found = np.full(len(links.trace.operators), UNKNOWN, np.int64)
    backward, forward = forward_rows(links)
    found[backward] = np.where(forward >= 0, place[forward], UNKNOWN)
    return found


def forward_rows(links: Links) -> tuple[Ints, Ints]:
    """The operators of the backward pass, and for each the forward operator that it belongs to, or UNKNOWN."""
    operators = links.trace.operators
    numbered = operators.sequence >= 0
    forward = np.flatnonzero(numbered & (operators.forward_thread <= 0))
    backward = np.flatnonzero(numbered & (operators.forward_thread > 0))
    if not len(forward) or not len(backward):
        return backward, np.full(len(backward), UNKNOWN, np.int64)
    # Operators that make no node carry the number of the next one: the last to carry it is the one that made it.
    order = forward[np.lexsort((operators.start[forward], operators.sequence[forward]))]
    numbers = operators.sequence[order]
    last = np.searchsorted(numbers, operators.sequence[backward], side="right") - 1
    matches = (last >= 0) & (numbers[np.maximum(last, 0)] == operators.sequence[backward])
    return backward, np.where(matches, order[np.maximum(last, 0)], UNKNOWN)


def _of_work(links: Links, nesting: Nesting, place: Ints) -> Ints:
    calls = links.trace.calls
    found = np.full(len(links.trace.work), UNKNOWN, np.int64)
    by_operator = links.operator >= 0
    found[by_operator] = place[links.operator[by_operator]]
    rest = np.flatnonzero((found < 0) & (links.call >= 0))  # launched by no operator, such as a kernel of one's own
    called = links.call[rest]
    found[rest] = nesting.around(calls.thread[called], calls.start[called])
    return found
