"""How long each profiled step took, and how much that varies."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from redline.spec import Spec
from redline.trace.columns import Ints, Trace, seconds
from redline.trace.links import Links

_STEP = re.compile(r"^ProfilerStep\s*#\d+$")


class Steps(Spec):
    count: int
    seconds: tuple[float, ...]
    """Of each step, in order. With a device: from the start of its first work to that of the next step's first work."""
    mean_s: float
    std_s: float | None
    min_s: float
    max_s: float
    spread: float | None
    """Standard deviation over mean."""


def steps_of(links: Sequence[Links]) -> Steps | None:
    """None where the trace has no marks of steps; of several traces, all their steps."""
    lengths = np.concatenate([_lengths(each) for each in links]) if links else np.empty(0, np.int64)
    if not len(lengths):
        return None
    mean = float(lengths.mean())
    std = float(lengths.std(ddof=1)) if len(lengths) > 1 else None
    return Steps(
        count=len(lengths),
        seconds=tuple(seconds(length) for length in lengths.tolist()),
        mean_s=seconds(mean),
        std_s=None if std is None else seconds(std),
        min_s=seconds(int(lengths.min())),
        max_s=seconds(int(lengths.max())),
        spread=None if std is None or not mean else std / mean,
    )


def count_steps(trace: Trace) -> int:
    return int(_step_rows(trace).sum())


def _lengths(links: Links) -> Ints:
    trace = links.trace
    rows = _step_rows(trace)
    start, end = trace.annotations.start[rows], trace.annotations.end[rows]
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    on_host: Ints = end - start
    launched = links.launched_at
    known = launched >= 0
    if not len(start) or not known.any():
        return on_host
    step = np.searchsorted(start, launched[known], side="right") - 1
    inside = (step >= 0) & (launched[known] < end[np.maximum(step, 0)])
    first = np.full(len(start), np.iinfo(np.int64).max)
    last = np.full(len(start), np.iinfo(np.int64).min)
    np.minimum.at(first, step[inside], trace.work.start[known][inside])
    np.maximum.at(last, step[inside], trace.work.end[known][inside])
    if (last < first).any():
        return on_host  # a step without work on the device: only the host's view covers all of them
    # The host runs ahead; a step is over for the device when the next one begins there.
    over = np.concatenate((first[1:], last[-1:]))
    on_device: Ints = np.maximum(over - first, 0)
    return on_device


def _step_rows(trace: Trace) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    names = np.unique(trace.annotations.name).tolist()
    return np.isin(trace.annotations.name, [number for number in names if _STEP.match(trace.names[number])])
