"""A finding, how much fixing it can gain, and advice that fits what was profiled."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from redline.analyze.bound import HOST_BOUND_SHARE
from redline.model.fields import Frozen
from redline.model.record import Capabilities
from redline.model.spec import Recipe, Switch

if TYPE_CHECKING:
    from redline.analyze.costs import Cost
    from redline.analyze.profile import Profile

LARGEST_GAIN = 100.0
"""What is bounded by nothing is not told as infinity."""

_COMPILED_REGION = re.compile(r"(## )?Call CompiledFxGraph\b|Torch-Compiled Region\b|CompiledFunction\b")
_FUSED_KERNEL = tuple(f"triton_{kind}_fused_" for kind in ("poi", "red", "per", "for"))


class Finding(Frozen):
    code: str
    evidence: str
    next: str
    """What to try: a recipe of Redline where Redline captured the profile, else what to change in the program."""
    gain_bound: float
    """How many times faster the steps can become at most, if all of this were gone."""
    saves_s: float = 0.0
    """How much earlier the profiled steps would end without it. Findings are ordered by this, and bounded by it."""
    recipe: str | None = None
    """The recipe that `next` names, if it names one."""


class Advice(NamedTuple):
    text: str
    recipe: str | None = None


def gain_without(profile: Profile, seconds: float) -> float:
    """The time of the steps over what would be left of it."""
    left = profile.whole_s - min(seconds, profile.whole_s)
    return min(profile.whole_s / left, LARGEST_GAIN) if left > 0 else LARGEST_GAIN


def seconds_saved(profile: Profile, cost: Cost) -> float:
    """What the replay of the recorded steps saves, corrected for the profiler, which slows the host down."""
    capture = profile.capture
    if capture is None or capture.step_s is None or profile.steps is None or not profile.has_device:
        return cost.saves_s
    if cost.kind == "wait":
        # Without the profiler there may be less waiting than the trace shows.
        return min(cost.saves_s, max(profile.wall_s - profile.timeline.busy_s, 0.0))
    if cost.kind == "work":
        # The host hides less work, and what it takes to launch the work is shorter; one that a compiler drives needs hardly
        # any time.
        issue_s = 0.0 if cost.code == "elementwise" else (capture.least_issue_s or 0.0) * profile.steps.count
        slowed = max(profile.timeline.span_s / profile.wall_s, 1.0)
        return max(cost.saves_s / slowed, min(cost.seconds, profile.wall_s - issue_s))
    return cost.saves_s


HOST_LATE_SHARE = 0.05
"""Recording slows the host down, so that a smaller share of its own time says little about the program without."""


def host_is_cleared(profile: Profile) -> bool:
    """The steps without the profiler show that the host keeps up: only recording made it late."""
    if not profile.has_device and profile.capture is not None and profile.capture.step_s is not None:
        return profile.wall_s - profile.timeline.busy_s < HOST_LATE_SHARE * profile.wall_s
    share = profile.capture.issue_share if profile.capture is not None else None
    return share is not None and share <= HOST_BOUND_SHARE


def recipe_of(profile: Profile) -> tuple[Switch, ...]:
    """The switches of the profiled recipe; none of a trace from elsewhere."""
    return Recipe.parse(profile.capture.recipe).switches if profile.capture is not None else ()


def does(profile: Profile) -> Capabilities:
    """What the profiled recipe does to the program, and what the trace shows of it."""
    told = profile.capture.capabilities if profile.capture is not None else Capabilities(compiles=_is_compiled(profile))
    return Capabilities.together((told, Capabilities(records_graph=profile.launches.graphs > 0)))


def _is_compiled(profile: Profile) -> bool:
    """Whether a trace from elsewhere shows a compiler's work: its regions, or kernels that it fused."""
    regions = any(_COMPILED_REGION.match(row.name) for row in profile.operators)
    return regions or any(row.name.startswith(_FUSED_KERNEL) for row in profile.kernels)


def with_switch(profile: Profile, switch: str, without: Collection[str] = ()) -> str:
    """The profiled recipe with this switch in the place of one of the same name."""
    name = switch.partition(":")[0]
    kept = [str(other) for other in recipe_of(profile) if other.name != name and str(other) not in without]
    is_generation = profile.capture is not None and profile.capture.task == "generate"
    if is_generation and name in ("compile", "graphs") and not any(each.startswith("static-cache") for each in kept):
        kept.append("static-cache")  # a cache that grows gives every token another shape
    return "+".join([*kept, switch])


FLAGS = ("tf32", "cudnn-benchmark")
"""Switches that set a flag of the process, which is all that a function of the user's can be given."""


def captured_by_us(profile: Profile) -> bool:
    return profile.capture is not None


def is_about_code(profile: Profile) -> bool:
    """Whether the program must be changed by its author: a trace from elsewhere, or a function that is run as it is."""
    return profile.capture is None or profile.capture.task == "step"


def advice(profile: Profile, switch: str, why: str, in_code: str) -> Advice:
    """The recipe to run next, or what to change in the program where no recipe can."""
    if profile.capture is None or (is_about_code(profile) and switch not in FLAGS):
        return Advice(f"{in_code}: {why}")
    return try_recipe(with_switch(profile, switch), why)


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
