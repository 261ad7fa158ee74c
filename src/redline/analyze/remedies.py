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

_COMPILED_REGION = re.compile(r"(## )?Call CompiledFxGraph\b|Torch-Compiled Region\b|CompiledFunction\b")
_FUSED_KERNEL = tuple(f"triton_{kind}_fused_" for kind in ("poi", "red", "per", "for"))


def recipe_of(profile: Profile) -> tuple[Switch, ...]:
    """The switches of the profiled recipe; none of a trace from elsewhere."""
    return Recipe.parse(profile.capture.recipe).switches if profile.capture is not None else ()


def does(profile: Profile) -> Capabilities:
    """Returns what is done to the program by the profiled recipe, and what the trace shows of it."""
    told = profile.capture.capabilities if profile.capture is not None else Capabilities(compiles=_is_compiled(profile))
    return Capabilities.together((told, Capabilities(records_graph=profile.launches.graphs > 0)))


def _is_compiled(profile: Profile) -> bool:
    """Returns true if a compiler's work is in a trace from elsewhere: its regions, or kernels that it fused."""
    regions = any(_COMPILED_REGION.match(row.name) for row in profile.operators)
    return regions or any(row.name.startswith(_FUSED_KERNEL) for row in profile.kernels)


def with_switch(profile: Profile, switch: str, without: Collection[str] = ()) -> str:
    """Returns the profiled recipe; this switch is in the place of one of the same name."""
    name = switch.partition(":")[0]
    kept = [str(other) for other in recipe_of(profile) if other.name != name and str(other) not in without]
    is_generation = profile.capture is not None and profile.capture.task == "generate"
    if is_generation and name in ("compile", "graphs") and not any(each.startswith("static-cache") for each in kept):
        kept.append("static-cache")  # a cache that grows gives every token another shape
    return "+".join([*kept, switch])


FLAGS = ("tf32", "cudnn-benchmark")
"""Switches that set a flag of the process, which is all that a function of the user's can be given."""


def is_about_code(profile: Profile) -> bool:
    """Returns true if the program must be changed by its author: a trace from elsewhere, or a function that is run as it is."""
    return profile.capture is None or profile.capture.task == "step"


def advice(profile: Profile, switch: str, why: str, in_code: str) -> Advice:
    """The recipe to run next, or what to change in the program where no recipe can."""
    if profile.capture is None or (is_about_code(profile) and switch not in FLAGS):
        return Advice(f"{in_code}: {why}")
    return try_recipe(with_switch(profile, switch), why)


def switch(name: str, why: str, in_code: str) -> Callable[[TraceFacts, Removal], Advice]:
    """The same advice for whatever is removed."""
    return lambda facts, gone: advice(facts.profile, name, why, in_code)


def try_recipe(recipe: str, why: str) -> Advice:
    return Advice(f"-r {recipe}: {why}", recipe)


def with_graphs(profile: Profile) -> str:
    """An engine that cannot be recorded gives its place to a compiler that makes graphs."""
    switches = profile.capture.switches if profile.capture is not None else {}
    engines = [switch for switch, told in switches.items() if told.refuses_graph]
    if engines:
        return with_switch(profile, "compile:reduce-overhead", without=engines)
    trains = profile.capture is not None and profile.capture.task == "train"
    # A scaler of the loss asks the host whether to take a step, which a graph cannot; a fused optimizer decides itself.
    fused = trains and any(told.scales_loss for told in switches.values()) and "fused-optimizer" not in switches
    return with_switch(profile, "fused-optimizer+graphs" if fused else "graphs")
