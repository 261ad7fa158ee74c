"""Redline: how fast is your PyTorch model here, how fast could it be, what is in the way, and what to switch on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redline.verbs import public, public_names

__version__ = "1.0.0rc1"

if TYPE_CHECKING:  # the same names for programs that check types, which cannot read the table in `redline.verbs`
    from redline.show.result import Result as Result
    from redline.verbs.batch import batch as batch
    from redline.verbs.compare import compare as compare
    from redline.verbs.demo import demo as demo
    from redline.verbs.doctor import doctor as doctor
    from redline.verbs.flops import flops as flops
    from redline.verbs.gate import gate as gate
    from redline.verbs.history import history as history
    from redline.verbs.load import load as load
    from redline.verbs.models import models as models
    from redline.verbs.monitor import monitor as monitor
    from redline.verbs.profile import ProfileResult as ProfileResult
    from redline.verbs.profile import profile as profile
    from redline.verbs.quick import QuickProfile as QuickProfile
    from redline.verbs.quick import run_quick_profile as run_quick_profile
    from redline.verbs.recipe import PlainRecipe as PlainRecipe
    from redline.verbs.recipe import recipe as recipe
    from redline.verbs.report import report as report
    from redline.verbs.roofline import roofline as roofline
    from redline.verbs.run import run as run
    from redline.verbs.scale import scale as scale
    from redline.verbs.serve import serve as serve
    from redline.verbs.study import study as study
    from redline.verbs.train import train as train
    from redline.verbs.tune import TuneResult as TuneResult
    from redline.verbs.tune import kept_tune as kept_tune
    from redline.verbs.tune import tune as tune
    from redline.verbs.watch import Watch as Watch
    from redline.verbs.watch import lightning_callback as lightning_callback
    from redline.verbs.watch import trainer_callback as trainer_callback
    from redline.verbs.watch import watch as watch
    from redline.verbs.workshop import workshop as workshop
    from redline.verbs.workspace import Workspace as Workspace

__all__ = sorted([*public_names(), "__version__"])


def __getattr__(name: str) -> Any:
    return public(name)


def __dir__() -> list[str]:
    return __all__
