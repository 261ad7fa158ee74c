"""This module says what to change: a recipe of Redline where Redline captured the profile, else something in the program."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from redline.analyze.finding import Advice, Removal
from redline.model.record import Capabilities
from redline.model.spec import Recipe, Switch

if TYPE_CHECKING:
    from redline.analyze.profile import Profile
    from redline.analyze.removals import TraceFacts

_COMPILED = re.compile(
    r"(## )?Call CompiledFxGraph\b|Torch-Compiled Region\b|CompiledFunction\b|triton_(poi|red|per|for)_fused_"
)
"""Regions and kernels that a compiler made have such names."""


def recipe_of(profile: Profile) -> tuple[Switch, ...]:
    """Returns the switches of the profiled recipe; a trace from elsewhere has none."""
    return Recipe.parse(profile.capture.recipe).switches if profile.capture is not None else ()


def does(profile: Profile) -> Capabilities:
    """Returns what is done to the program by the profiled recipe, and what the trace shows of it."""
    shown = Capabilities(records_graph=profile.launches.graphs > 0)
    if profile.capture is not None:
        return Capabilities.together((profile.capture.capabilities, shown))
    compiles = any(_COMPILED.match(row.name) for row in profile.rows)
    return Capabilities.together((shown, Capabilities(compiles=compiles)))


def is_about_code(profile: Profile) -> bool:
    """Returns true if the program must be changed by its author: a trace from elsewhere, or a function that is run as it is."""
    return profile.capture is None or profile.capture.task == "step"


FLAGS = ("tf32", "cudnn-benchmark")
"""Switches that set a flag of the process, which is all that a function of the user's can be given."""


def advice(profile: Profile, switch: str, why: str, in_code: str, without: Collection[str] = ()) -> Advice:
    """Returns the recipe to run next, or what to change in the program where no recipe can. A switch takes the place of one of its name."""
    if profile.capture is None or (is_about_code(profile) and switch not in FLAGS):
        return Advice(f"{in_code}: {why}")
    name, own = switch.partition(":")[0], recipe_of(profile)
    if switch in [str(one) for one in own]:
        return Advice(f"{switch} is on already: look in the operator table for what it does not reach")
    kept = [str(other) for other in own if other.name != name and str(other) not in without]
    recipe = "+".join([*kept, switch])
    return Advice(f"-r {recipe}: {why}", recipe)


def switch(name: str, why: str, in_code: str) -> Callable[[TraceFacts, Removal], Advice]:
    """Returns a function that gives the same advice for whatever is removed."""
    return lambda facts, gone: advice(facts.profile, name, why, in_code)


def graphs(profile: Profile, why: str, in_code: str) -> Advice:
    """An engine that cannot be recorded gives its place to a compiler that makes graphs."""
    switches = profile.capture.switches if profile.capture is not None else {}
    if engines := [switch for switch, told in switches.items() if told.refuses_graph]:
        return advice(profile, "compile:reduce-overhead", why, in_code, engines)
    trains = profile.capture is not None and profile.capture.task == "train"
    # A scaler of the loss asks the host whether to take a step, which a graph cannot; a fused optimizer decides itself.
    fused = trains and any(told.scales_loss for told in switches.values()) and "fused-optimizer" not in switches
    return advice(profile, "fused-optimizer+graphs" if fused else "graphs", why, in_code)
