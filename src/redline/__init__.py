"""Redline: how fast is your PyTorch model here, how fast could it be, what is in the way, and what to switch on."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "api": (
        "BatchResult",
        "RunResult",
        "SweepResult",
        "doctor",
        "find_batch",
        "models",
        "run",
        "run_specs",
        "sweep",
    ),
    "limits": ("CeilingsResult", "FlopsResult", "RooflineResult", "ceilings", "flops", "roofline"),
    "profiling": ("ProfileResult", "compare_profiles", "profile", "read_profile"),
    "quick": ("QuickProfile", "run_quick_profile"),
    "recipes": ("PlainRecipe", "recipe"),
    "reporting": ("compare", "write_report"),
    "racing": ("RaceResult", "race"),
    "tuning": ("TuneResult", "kept_tune", "tune"),
}
"""Which module each public name lives in: they are loaded when first used, so that importing Redline costs nothing."""

if TYPE_CHECKING:
    from redline.api import BatchResult, RunResult, SweepResult, doctor, find_batch, models, run, run_specs, sweep
    from redline.limits import CeilingsResult, FlopsResult, RooflineResult, ceilings, flops, roofline
    from redline.profiling import ProfileResult, compare_profiles, profile, read_profile
    from redline.quick import QuickProfile, run_quick_profile
    from redline.racing import RaceResult, race
    from redline.recipes import PlainRecipe, recipe
    from redline.reporting import compare, write_report
    from redline.tuning import TuneResult, kept_tune, tune

__all__ = [
    "BatchResult",
    "CeilingsResult",
    "FlopsResult",
    "PlainRecipe",
    "ProfileResult",
    "QuickProfile",
    "RaceResult",
    "RooflineResult",
    "RunResult",
    "SweepResult",
    "TuneResult",
    "__version__",
    "ceilings",
    "compare",
    "compare_profiles",
    "doctor",
    "find_batch",
    "flops",
    "kept_tune",
    "models",
    "profile",
    "race",
    "read_profile",
    "recipe",
    "roofline",
    "run",
    "run_quick_profile",
    "run_specs",
    "sweep",
    "tune",
    "write_report",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"redline.{home}"), name)
    raise AttributeError(f"module 'redline' has no attribute {name!r}")
