"""Redline: how fast is your PyTorch model here, how fast could it be, what is in the way, and what to switch on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PROFILING = ("ProfileResult", "compare_profiles", "profile", "read_profile")
_LIMITS = ("CeilingsResult", "FlopsResult", "RooflineResult", "ceilings", "flops", "roofline")

__all__ = [
    "BatchResult",
    "CeilingsResult",
    "FlopsResult",
    "ProfileResult",
    "RooflineResult",
    "RunResult",
    "SweepResult",
    "__version__",
    "ceilings",
    "compare_profiles",
    "doctor",
    "find_batch",
    "flops",
    "models",
    "profile",
    "read_profile",
    "roofline",
    "run",
    "run_specs",
    "sweep",
]

if TYPE_CHECKING:
    from redline.api import BatchResult, RunResult, SweepResult, doctor, find_batch, models, run, run_specs, sweep
    from redline.limits import CeilingsResult, FlopsResult, RooflineResult, ceilings, flops, roofline
    from redline.profiling import ProfileResult, compare_profiles, profile, read_profile


def __getattr__(name: str) -> Any:
    """Public names are loaded when first used, so that importing Redline costs next to nothing."""
    if name in _PROFILING:
        from redline import profiling

        return getattr(profiling, name)
    if name in _LIMITS:
        from redline import limits

        return getattr(limits, name)
    if name in __all__:
        from redline import api

        return getattr(api, name)
    raise AttributeError(f"module 'redline' has no attribute {name!r}")
