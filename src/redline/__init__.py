"""Redline: how fast is your PyTorch model here, how fast could it be, what is in the way, and what to switch on."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.9.0"

_HOMES = {
    "bisect": ("BisectResult", "bisect"),
    "compare": ("CompareResult", "compare"),
    "doctor": ("doctor", "models"),
    "flops": ("FlopsResult", "flops"),
    "gate": ("GateResult", "gate"),
    "history": ("HistoryFilters", "HistoryResult", "history"),
    "serve": ("serve",),
    "load": ("LoadResult", "load"),
    "memory": ("MemoryResult", "profile_memory"),
    "monitor": ("MonitorResult", "monitor"),
    "profile": ("ProfileResult", "compare_profiles", "import_profile", "profile", "read_profile"),
    "quick": ("QuickProfile", "run_quick_profile"),
    "recipe": ("PlainRecipe", "recipe"),
    "report": ("write_report",),
    "roofline": ("RooflineResult", "roofline"),
    "run": ("RunResult", "demo", "run", "run_step"),
    "scale": ("ScaleResult", "scale"),
    "study": ("StudyResult", "study"),
    "train": ("LoaderResult", "TrainResult", "find_workers", "train"),
    "tune": ("TuneResult", "kept_tune", "tune"),
    "watch": ("Watch", "WatchResult", "lightning_callback", "trainer_callback", "watch"),
    "workshop": ("checklist", "workshop"),
    "workspace": ("Workspace",),
}
"""Which module of `redline.api` each public name is in. It is loaded on first use, so that importing Redline is free."""

_VERBS = ("batch",)
"""The verbs that have a file of their own in `redline.verbs`."""

if TYPE_CHECKING:
    from redline.api.bisect import BisectResult, bisect
    from redline.api.compare import CompareResult, compare
    from redline.api.doctor import doctor, models
    from redline.api.flops import FlopsResult, flops
    from redline.api.gate import GateResult, gate
    from redline.api.history import HistoryFilters, HistoryResult, history
    from redline.api.load import LoadResult, load
    from redline.api.memory import MemoryResult, profile_memory
    from redline.api.monitor import MonitorResult, monitor
    from redline.api.profile import ProfileResult, compare_profiles, import_profile, profile, read_profile
    from redline.api.quick import QuickProfile, run_quick_profile
    from redline.api.recipe import PlainRecipe, recipe
    from redline.api.report import write_report
    from redline.api.roofline import RooflineResult, roofline
    from redline.api.run import RunResult, demo, run, run_step
    from redline.api.scale import ScaleResult, scale
    from redline.api.serve import serve
    from redline.api.study import StudyResult, study
    from redline.api.train import LoaderResult, TrainResult, find_workers, train
    from redline.api.tune import TuneResult, kept_tune, tune
    from redline.api.watch import Watch, WatchResult, lightning_callback, trainer_callback, watch
    from redline.api.workshop import checklist, workshop
    from redline.api.workspace import Workspace
    from redline.verbs.batch import batch

__all__ = [
    "BisectResult",
    "CompareResult",
    "FlopsResult",
    "GateResult",
    "HistoryFilters",
    "HistoryResult",
    "LoadResult",
    "LoaderResult",
    "MemoryResult",
    "MonitorResult",
    "PlainRecipe",
    "ProfileResult",
    "QuickProfile",
    "RooflineResult",
    "RunResult",
    "ScaleResult",
    "StudyResult",
    "TrainResult",
    "TuneResult",
    "Watch",
    "WatchResult",
    "Workspace",
    "__version__",
    "batch",
    "bisect",
    "checklist",
    "compare",
    "compare_profiles",
    "demo",
    "doctor",
    "find_workers",
    "flops",
    "gate",
    "history",
    "import_profile",
    "kept_tune",
    "lightning_callback",
    "load",
    "models",
    "monitor",
    "profile",
    "profile_memory",
    "read_profile",
    "recipe",
    "roofline",
    "run",
    "run_quick_profile",
    "run_step",
    "scale",
    "serve",
    "study",
    "train",
    "trainer_callback",
    "tune",
    "watch",
    "workshop",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(import_module(f"redline.verbs.{name}"), name)
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"redline.api.{home}"), name)
    raise AttributeError(f"module 'redline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
