"""Redline: how fast is your PyTorch model here, how fast could it be, what is in the way, and what to switch on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PROFILING = ("ProfileResult", "compare_profiles", "profile", "read_profile")
_REPORTING = ("compare", "write_report")
_QUICK = ("QuickProfile", "run_quick_profile")

__all__ = [
    "BatchResult",
    "ProfileResult",
    "QuickProfile",
    "RunResult",
    "SweepResult",
    "__version__",
    "compare",
    "compare_profiles",
    "doctor",
    "find_batch",
    "models",
    "profile",
    "read_profile",
    "run",
    "run_quick_profile",
    "run_specs",
    "sweep",
    "write_report",
]

if TYPE_CHECKING:
    from redline.api import BatchResult, RunResult, SweepResult, doctor, find_batch, models, run, run_specs, sweep
    from redline.profiling import ProfileResult, compare_profiles, profile, read_profile
    from redline.quick import QuickProfile, run_quick_profile
    from redline.reporting import compare, write_report


def __getattr__(name: str) -> Any:
    """Public names are loaded when first used, so that importing Redline costs next to nothing."""
    if name in _PROFILING:
        from redline import profiling

        return getattr(profiling, name)
    if name in _REPORTING:
        from redline import reporting

        return getattr(reporting, name)
    if name in _QUICK:
        from redline import quick

        return getattr(quick, name)
    if name in __all__:
        from redline import api

        return getattr(api, name)
    raise AttributeError(f"module 'redline' has no attribute {name!r}")
