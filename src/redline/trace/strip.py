"""How busy a device was from moment to moment: a strip of equal stretches of time, for a picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from redline.spec import Spec
from redline.trace.columns import Trace, Work, seconds
from redline.trace.intervals import Intervals, joined, union
from redline.trace.timeline import is_communication, per_device

STRETCHES = 240


class Strip(Spec):
    """Shares between 0 and 1, one per stretch; together no more than 1."""

    label: str
    span_s: float
    compute: tuple[float, ...]
    communication: tuple[float, ...]
    """While nothing computes."""
    copy: tuple[float, ...]
    """While no kernel runs."""


def strips_of(traces: Sequence[Trace], stretches: int = STRETCHES) -> list[Strip]:
    strips = []
    for trace in traces:
        for device, work in per_device(trace):
            everything = union(work.start, work.end)
            edges = np.linspace(int(everything.start[0]), int(everything.end[-1]), stretches + 1)
            talking = is_communication(trace, work)
            computing = (work.kind == Work.KERNEL) & ~talking
            compute = union(work.start[computing], work.end[computing])
            kernels = joined(compute, union(work.start[talking], work.end[talking]))
            busy = [_shares(each, edges) for each in (compute, kernels, everything)]
            rank = f"rank {trace.rank}, " if trace.rank is not None else ""
            strips.append(
                Strip(
                    label=f"{rank}device {device}",
                    span_s=seconds(everything.span),
                    compute=_rounded(busy[0]),
                    communication=_rounded(busy[1] - busy[0]),
                    copy=_rounded(busy[2] - busy[1]),
                )
            )
    return strips


def _shares(busy: Intervals, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much of each stretch lies inside the intervals."""
    if not len(busy):
        return np.zeros(len(edges) - 1)
    lengths = (busy.end - busy.start).astype(np.float64)
    before = np.concatenate(([0.0], np.cumsum(lengths)))
    place = np.searchsorted(busy.start, edges, side="right") - 1
    inside = np.clip(edges - busy.start[np.maximum(place, 0)], 0, lengths[np.maximum(place, 0)])
    covered = np.where(place >= 0, before[np.maximum(place, 0)] + inside, 0.0)
    widths = np.maximum(np.diff(edges), 1e-9)
    return np.clip(np.diff(covered) / widths, 0, 1)


def _rounded(shares: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(np.round(np.clip(shares, 0, 1), 4).tolist())
