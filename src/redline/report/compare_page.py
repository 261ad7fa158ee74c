"""Before and after on one page: the verdict, both distributions over each other, and kernel by kernel what changed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from redline.analyze.blocks import latency_blocks
from redline.analyze.compare import Comparisons
from redline.analyze.profile_diff import ProfileDiff
from redline.record import RunRecord
from redline.report.compare import HEADERS, comparison_cells, conclusion
from redline.units import format_seconds

WIDTH, HEIGHT, MARGIN = 900, 280, 36
KERNELS = 40


def compare_page(
    found: Comparisons,
    sides: tuple[str, str],
    records: tuple[Sequence[RunRecord], Sequence[RunRecord]],
    diff: ProfileDiff | None = None,
) -> str:
    """`sides`: what A and B are called. `diff`: of the two profiles, where both sides have one."""
    environment = Environment(
        loader=PackageLoader("redline.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["time"] = format_seconds
    samples = [_samples(side) for side in records]
    return environment.get_template("compare.html.j2").render(
        title=f"{sides[0]} (A) against {sides[1]} (B)",
        conclusion=conclusion(found),
        headers=HEADERS,
        rows=[comparison_cells(each) for each in found.comparisons],
        reasons=[str(each) for one in found.comparisons for each in (*one.reasons, *one.notes)],
        curves=_curves(samples),
        ticks=_ticks(samples),
        size=(WIDTH, HEIGHT),
        diff=diff,
        kernels=diff.kernels[:KERNELS] if diff is not None else (),
    )


def _samples(side: Sequence[RunRecord]) -> list[float]:
    return list(chain.from_iterable(block.samples for record in side for block in latency_blocks(record)))


def _bounds(samples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Up to the 99th percentile: one step that was held up would flatten everything else."""
    known = [each for each in samples if each]
    return min(min(each) for each in known), max(float(np.quantile(each, 0.99)) for each in known)


def _curves(samples: Sequence[Sequence[float]]) -> list[str]:
    """The share of steps that took at most this long, as the points of two lines."""
    if not all(samples):
        return []
    low, high = _bounds(samples)
    span = (high - low) or low or 1.0
    lines = []
    for each in samples:
        shares = np.linspace(0, 0.99, 100)
        across = MARGIN + (np.quantile(each, shares) - low) / span * (WIDTH - 2 * MARGIN)
        up = HEIGHT - MARGIN - shares * (HEIGHT - 2 * MARGIN)
        lines.append(" ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, up, strict=True)))
    return lines


def _ticks(samples: Sequence[Sequence[float]]) -> list[tuple[float, str]]:
    if not all(samples):
        return []
    low, high = _bounds(samples)
    return [
        (MARGIN + share * (WIDTH - 2 * MARGIN), format_seconds(low + share * (high - low)))
        for share in np.linspace(0, 1, 5)
    ]
