"""A search that has made some trials, for what is planned from them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

from redline.model.questions import SwitchChoice
from redline.model.spec import Recipe, RunSpec, WorkloadSpec
from redline.search.tune.estimates import Estimate
from redline.search.tune.record import Trial, TuneSpec
from redline.search.tune.space import Space, Switches
from redline.search.tune.tuner import Tuner

GRAPHED = ("compile:reduce-overhead", "compile:max-autotune")
CHOICES = (
    SwitchChoice(switch="amp", family="precision"),
    SwitchChoice(switch="amp-bf16", family="precision"),
    SwitchChoice(switch="tf32", family="tf32"),
    SwitchChoice(switch="channels-last", family="layout"),
    SwitchChoice(switch="compile", family="compiler", relieves="both"),
    SwitchChoice(switch="compile:reduce-overhead", family="compiler", relieves="both"),
    SwitchChoice(switch="compile:max-autotune", family="compiler", relieves="both", is_slow_to_prepare=True),
    SwitchChoice(switch="graphs", family="graphs", relieves="host", excludes=GRAPHED, leaves_program=True),
    SwitchChoice(switch="fused-optimizer", family="optimizer", relieves="both", leaves_program=True),
    SwitchChoice(switch="cudnn-benchmark", family="autotune", leaves_program=True),
    SwitchChoice(switch="compile:regional", family="compiler", relieves="both"),
)


def switches(text: str) -> Switches:
    return frozenset(text.split("+")) - {"baseline"}


def after(*trials: tuple[str, float], times_s: dict[str, float] | None = None, broken: str = "", **given: Any) -> Tuner:
    """A search that has made these trials: recipe and seconds. All were sound but one."""
    sound = [recipe for recipe, _ in trials if recipe != broken]
    estimates = {
        switches(recipe): Estimate(
            recipe=recipe,
            record_id=recipe,
            log_s=math.log((times_s or {}).get(recipe, 1.0)),
            error=0.002,
            host_log_s=None,
            is_host_bound=False,
            cost_s=0.0,
        )
        for recipe in sound
    }
    fastest = min(estimates.values(), key=lambda each: each.log_s, default=None)
    stub = SimpleNamespace(
        space=Space(CHOICES),
        tune=SimpleNamespace(
            facts=given.get("facts"),
            finals=(),
            given_up=given.get("given_up", ()),
            probes=given.get("probes", ()),
            earlier=given.get("earlier"),
            trials=[Trial(recipe=recipe, record_id=recipe, cost_s=seconds) for recipe, seconds in trials],
        ),
        records={
            recipe: SimpleNamespace(spec=SimpleNamespace(recipe=Recipe.parse(recipe)), prepared=True)
            for recipe in sound
        },
        seen=lambda: estimates,
        timed=lambda: estimates,
        given_up=set(),
        overdue={},
        may_win=lambda each: True,
        leader=lambda: fastest,
        asked=TuneSpec(spec=RunSpec(workload=WorkloadSpec(model="m"))),
        budget_s=given.get("budget_s", 600.0),
        on_cpu=given.get("on_cpu", False),
        jobs=given.get("jobs", 1),
        has_memory_for=lambda workers: workers <= given.get("workers", 100),
        twins_of=lambda recipe: 0,
    )
    return cast(Tuner, stub)
