"""Redline: how fast is your PyTorch model here, how fast could it be, what is in the way, and what to switch on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_RECIPES = ("PlainRecipe", "recipe")
_PROFILING = ("ProfileResult", "compare_profiles", "profile", "read_profile")
_RACING = ("RaceResult", "race")
_TUNING = ("TuneResult", "kept_tune", "tune")

__all__ = [
    "BatchResult",
    "PlainRecipe",
    "ProfileResult",
    "RaceResult",
    "RunResult",
    "SweepResult",
    "TuneResult",
    "__version__",
    "compare_profiles",
    "doctor",
    "find_batch",
    "kept_tune",
    "models",
    "profile",
    "race",
    "read_profile",
    "recipe",
    "run",
    "run_specs",
    "sweep",
    "tune",
]

if TYPE_CHECKING:
    from redline.api import BatchResult, RunResult, SweepResult, doctor, find_batch, models, run, run_specs, sweep
    from redline.profiling import ProfileResult, compare_profiles, profile, read_profile
    from redline.racing import RaceResult, race
    from redline.recipes import PlainRecipe, recipe
    from redline.tuning import TuneResult, kept_tune, tune


def __getattr__(name: str) -> Any:
    """Public names are loaded when first used, so that importing Redline costs next to nothing."""
    if name in _PROFILING:
        from redline import profiling

        return getattr(profiling, name)
    if name in _RECIPES:
        from redline import recipes

        return getattr(recipes, name)
    if name in _RACING:
        from redline import racing

        return getattr(racing, name)
    if name in _TUNING:
        from redline import tuning

        return getattr(tuning, name)
    if name in __all__:
        from redline import api

        return getattr(api, name)
    raise AttributeError(f"module 'redline' has no attribute {name!r}")
