"""A finding, how much fixing it can gain, and advice that fits what was profiled."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from redline.analyze.bound import HOST_BOUND_SHARE
from redline.model.fields import Frozen
from redline.model.record import Capabilities
from redline.model.spec import Recipe, Switch
from redline.trace.losses import Loss

if TYPE_CHECKING:
    from redline.analyze.profile import Profile

LARGEST_GAIN = 100.0
"""What is bounded by nothing is not told as infinity."""

LEAST_SHARE = 0.02
"""Share of the time: what costs less is not worth a line."""

HOST_LATE_SHARE = 0.05
"""Recording slows the host down, so that a smaller share of its own time says little about the program without."""

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
    """How much earlier the profiled steps would end without it, as far as can be told. Findings are ordered by this."""
    recipe: str | None = None
    """The recipe that `next` names, if it names one."""


class Advice(NamedTuple):
    text: str
    recipe: str | None = None


def whole_work_s(profile: Profile) -> float:
    """What the device did, or the host where it is the device: shares of work are shares of this."""
    if profile.has_device:
        return sum(row.total_s for row in profile.kernels) + sum(row.total_s for row in profile.copies)
    return sum(row.cpu_self_s for row in profile.operators)


def share_of(profile: Profile, seconds: float) -> float:
    return seconds / profile.timeline.span_s if profile.timeline.span_s else 0.0


def is_small(profile: Profile, loss: Loss, least: float = LEAST_SHARE) -> bool:
    return share_of(profile, max(loss.seconds, loss.saves_s)) < least


def gain_without(profile: Profile, seconds: float) -> float:
    """The time of the steps over what would be left of it."""
    # What was recorded is compared with what was recorded: work that takes longer under the profiler, as on a CPU, must
    # not be taken from the shorter steps without it.
    recorded = profile.timeline.busy_s if profile.has_device else profile.timeline.span_s
    whole = max(profile.wall_s, recorded)
    left = whole - min(seconds, whole)
    return min(whole / left, LARGEST_GAIN) if left > 0 else LARGEST_GAIN


def waiting_gain(profile: Profile, loss: Loss) -> float:
    """Of time in which the device waits: without the profiler there may be less of it than the trace shows."""
    known = profile.has_device and profile.capture is not None and profile.capture.step_s is not None
    known = known and profile.steps is not None
    most = min(loss.most_s, max(profile.wall_s - profile.timeline.busy_s, 0.0)) if known else loss.most_s
    return gain_without(profile, most)


def finding_of(
    profile: Profile, loss: Loss, code: str, *, evidence: str, todo: Advice | str, gain: float | None = None
) -> Finding:
    """What a loss comes to; `gain` where it is not the whole of what it could save."""
    advised = Advice(todo) if isinstance(todo, str) else todo
    return Finding(
        code=code,
        evidence=evidence,
        next=advised.text,
        recipe=advised.recipe,
        gain_bound=gain_without(profile, loss.most_s) if gain is None else gain,
        saves_s=loss.saves_s,
    )


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


def fewer_launches(profile: Profile, loss: Loss) -> Advice:
    if loss.what and is_about_code(profile):
        return Advice(
            "move what the other thread does to a process of its own (DataLoader workers): threads of one process share one "
            "interpreter and slow each other down; then torch.compile(model, mode='reduce-overhead') for fewer launches"
        )
    if does(profile).records_graph:
        late = "so the host is late with something else"
        if profile.capture is not None and profile.capture.task == "generate":
            late = "of the decode step; the prompt is read without one"
        return Advice(f"a larger batch: graphs are on already, {late}")
    if is_about_code(profile):
        return Advice(
            "torch.compile(model, mode='reduce-overhead'), or torch.cuda.graph around the step, so that Python launches "
            "one graph instead of every kernel; or a larger batch"
        )
    return try_recipe(with_graphs(profile), "a CUDA graph takes Python out of the step; or a larger batch")


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
