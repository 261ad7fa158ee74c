"""A finding, the arithmetic of what mending it can bring, and advice that fits what was profiled."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from redline.analyze.bound import HOST_BOUND_SHARE
from redline.record import Capabilities
from redline.spec import Frozen, Recipe, Switch
from redline.trace.classes import Described, describe
from redline.trace.losses import FUSED_ELEMENTWISE_SAVES, TENSOR_CORES_SAVE, Loss, LossCode

if TYPE_CHECKING:
    from redline.analyze.profile import Profile

LARGEST_GAIN = 100.0
"""What is bounded by nothing is not told as infinity."""

LEAST_SHARE = 0.02
"""Of the time: what costs less is not worth a line."""


class Finding(Frozen):
    code: str
    evidence: str
    next: str
    """What to try: a recipe of Redline where Redline captured the profile, else what to change in the program."""
    gain_bound: float
    """The steps can become so many times faster at most, were this all of it gone."""
    saves_s: float = 0.0
    """How much earlier the profiled steps would end without it, as far as can be told. Findings are ordered by this."""


class Explained(Frozen):
    """How much of the time in which nothing is computed the findings account for."""

    not_computing_s: float
    explained_s: float
    unexplained_s: float
    """Of which the causes are too small for a finding, or not in the trace."""

    @property
    def share(self) -> float:
        return self.explained_s / self.not_computing_s if self.not_computing_s else 1.0


def explained(profile: Profile) -> Explained | None:
    """None where there is no timeline: without a device, or from a table of kernels."""
    if not profile.has_device or not profile.ranks:
        return None
    idle, timeline = profile.idle, profile.timeline
    parts = {
        ("host-bound", "host-stall"): idle.host_wait_s + idle.latency_s,
        ("sync-bound", "blocking-copy"): idle.sync_s,
        ("data-bound",): idle.data_wait_s,
        ("allocator",): idle.allocator_s,
        ("warm-up",): idle.warm_up_s,
        ("launch-bound",): idle.launch_gap_s,
        ("dependency",): idle.dependency_s,
        ("communication-bound", "straggler"): timeline.exposed_communication_s,
        ("copy-bound",): timeline.exposed_copy_s,
    }
    codes = {finding.code for finding in profile.findings}
    whole = max(timeline.span_s - timeline.compute_s, 0.0)
    known = min(sum(seconds for named, seconds in parts.items() if codes & set(named)), whole)
    return Explained(not_computing_s=whole, explained_s=known, unexplained_s=whole - known)


def losses_by_code(profile: Profile) -> dict[LossCode, Loss]:
    """From the trace; without a timeline, by the names of what ran."""
    listed = profile.losses if profile.ranks else _by_names(profile)
    return {loss.code: loss for loss in listed}


def _by_names(profile: Profile) -> list[Loss]:
    work = _work(profile)
    in_training = any(describe(name).is_training_norm for name, _ in work)
    rules: list[tuple[LossCode, Callable[[Described], bool], float]] = [
        ("layout", lambda name: name.converts_layout, 1.0),
        ("fp32", lambda name: name.is_strict_fp32, TENSOR_CORES_SAVE),
        ("elementwise", lambda name: name.is_unfused, FUSED_ELEMENTWISE_SAVES),
    ]
    rules += [("norm", lambda name: name.is_fixed_norm, 1.0)] if not in_training else []
    found = []
    for code, is_meant, saves in rules:
        meant = [(seconds, name) for name, seconds in work if is_meant(describe(name))]
        if meant:
            total = sum(seconds for seconds, _ in meant)
            top = describe(max(meant)[1]).short_name
            found.append(
                Loss(code=code, seconds=total, saves_s=total * saves, most_s=total, count=len(meant), what=top)
            )
    return found


def _work(profile: Profile) -> list[tuple[str, float]]:
    """What keeps the device busy; where the host is the device, operators without their children."""
    if profile.has_device:
        return [(row.name, row.total_s) for row in profile.kernels]
    return [(row.name, row.cpu_self_s) for row in profile.operators]


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
    whole = profile.wall_s
    left = whole - min(seconds, whole)
    return min(whole / left, LARGEST_GAIN) if left > 0 else LARGEST_GAIN


def waiting_gain(profile: Profile, loss: Loss) -> float:
    """Of time in which the device waits: without the profiler there may be less of it than the trace shows."""
    known = profile.capture is not None and profile.capture.step_s is not None and profile.steps is not None
    most = min(loss.most_s, max(profile.wall_s - profile.timeline.busy_s, 0.0)) if known else loss.most_s
    return gain_without(profile, most)


def host_is_cleared(profile: Profile) -> bool:
    """The steps without the profiler show that the host keeps up: only recording made it late."""
    share = profile.capture.issue_share if profile.capture is not None else None
    return share is not None and share <= HOST_BOUND_SHARE


def recipe_of(profile: Profile) -> tuple[Switch, ...]:
    """The switches of the profiled recipe; none of a trace from elsewhere."""
    return Recipe.parse(profile.capture.recipe).switches if profile.capture is not None else ()


def does(profile: Profile) -> Capabilities:
    """What the profiled recipe does to the program, and what the trace shows of it."""
    told = profile.capture.capabilities if profile.capture is not None else Capabilities()
    return Capabilities.together((told, Capabilities(records_graph=profile.launches.graphs > 0)))


def with_switch(profile: Profile, switch: str, without: Collection[str] = ()) -> str:
    """The profiled recipe with this switch in the place of one of the same name."""
    name = switch.partition(":")[0]
    kept = [str(other) for other in recipe_of(profile) if other.name != name and str(other) not in without]
    return "+".join([*kept, switch])


def advice(profile: Profile, switch: str, why: str, in_code: str) -> str:
    """The recipe to run next where Redline captured; of a trace from elsewhere, what to change in the program."""
    if profile.capture is None:
        return f"{in_code}: {why}"
    return f"-r {with_switch(profile, switch)}: {why}"
