"""What the compiler has been doing in this process: how often, for how long, and from which cache."""

from __future__ import annotations

import sys
from typing import Any, Literal


def compilations() -> int:
    """Graphs compiled so far; a rise means the steady state is not reached."""
    counters = _counters()
    return int(counters["stats"]["unique_graphs"]) + int(counters["stats"]["calls_captured"]) if counters else 0


def compile_seconds() -> float | None:
    """Seconds spent compiling frames so far, or None where nothing was compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    metrics = getattr(dynamo, "compilation_time_metrics", {}) if dynamo else {}
    for name in ("_compile.compile_inner", "entire_frame_compile"):
        if metrics.get(name):
            return float(sum(metrics[name]))
    return None


def cache_state() -> Literal["cold", "warm", "mixed"] | None:
    """Whether inductor's on-disk cache already had what was compiled."""
    counters = _counters()
    if not counters:
        return None
    inductor = counters["inductor"]
    hits, misses = inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
    if not hits and not misses:
        aot = counters["aot_autograd"]
        hits, misses = aot["autograd_cache_hit"], aot["autograd_cache_miss"] + aot["autograd_cache_bypass"]
    if hits and misses:
        return "mixed"
    return "warm" if hits else "cold" if misses else None


def _counters() -> Any:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return getattr(dynamo, "counters", None) if dynamo else None
