"""Measurements that take a fraction of their time: for tests of everything around the timing, not of the timing itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from redline.model.spec import Effort, MeasureSpec

Patch = Callable[[Any, str, Any], None]

BRIEF = {
    "block_seconds": 0.02,
    "settle_seconds": 0.0,
    "max_seconds": 0.4,
    "warmup_min_seconds": 0.0,
    "warmup_max_seconds": 0.4,
    "warmup_window": 2,
    "warmup_window_seconds": 0.01,
    "tail_samples": 10,
    "min_samples": 10,
    "min_rounds": 5,
    "loss_path_steps": 5,
}


def shorten_efforts(patch: Patch = setattr) -> None:
    """Every effort is timed for less than a second; specs differ from each other as before."""
    usual = MeasureSpec.for_effort

    def brief(effort: Effort = "normal", *, tail: bool = False) -> MeasureSpec:
        return msgspec.structs.replace(usual(effort, tail=tail), **BRIEF)

    patch(MeasureSpec, "for_effort", staticmethod(brief))


def shorten_ceilings(patch: Patch = setattr) -> None:
    """Of a bench in this process: small sizes, once."""
    from redline.bench.measure import ceilings

    for name, value in {
        "CPU_SIZES": (64, 128),
        "CPU_LONGEST_S": float("inf"),  # how many sizes are tried must not depend on the machine's load
        "BURSTS": 3,
        "BURST_S": 1e-4,
        "WARM_S": 0.0,
        "COPY_BYTES": {True: 1 << 20, False: 1 << 18},
        "COPY_TO_CACHE": 0,
        "LAUNCHES": 10,
    }.items():
        patch(ceilings, name, value)
