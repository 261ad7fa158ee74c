"""What is in the way of a profiled program, what to try next, and what that can bring at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from redline.analyze.finding import HOST_LATE_SHARE, LEAST_SHARE, Finding, is_small
from redline.analyze.waiting import WAITING
from redline.analyze.working import WORKING, decoding
from redline.model.fields import Frozen
from redline.trace.classes import Described, describe
from redline.trace.losses import FUSED_ATTENTION_SAVES, FUSED_ELEMENTWISE_SAVES, TENSOR_CORES_SAVE, Loss, LossCode
from redline.trace.names import short_name

if TYPE_CHECKING:
    from redline.analyze.profile import Profile

RULES = {**WAITING, **WORKING}
"""For each loss, the rule that makes a finding of it."""
LEAST: dict[LossCode, float] = {"host": HOST_LATE_SHARE, "launch": 0.05}
"""Of the time, where it is more than usual: recording slows the host down, so that a smaller share says little about the
program without the profiler; and a microsecond or two between kernels is what every program pays."""


def diagnose(profile: Profile) -> list[Finding]:
    """Whatever costs a noticeable share of the time, what would save the most first."""
    found = [
        finding
        for code, loss in losses_by_code(profile).items()
        if code in RULES and _is_worth_a_line(profile, loss) and (finding := RULES[code](profile, loss)) is not None
    ]
    decoded = decoding(profile)
    if any(finding.code == "decode-host-bound" for finding in decoded):
        found = [finding for finding in found if finding.code != "host-bound"]  # said once, with how much it costs
    found += decoded
    return sorted(found, key=lambda finding: (-finding.saves_s, -finding.gain_bound, finding.code))


def _is_worth_a_line(profile: Profile, loss: Loss) -> bool:
    least = LEAST.get(loss.code, LEAST_SHARE)
    if loss.code == "stall" and not profile.has_device:
        least = HOST_LATE_SHARE  # a processor that others use too pauses now and then
    return loss.code not in WAITING or not is_small(profile, loss, least)


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
    """None where there is no timeline: from a table of kernels."""
    if profile.has_device and not profile.ranks:
        return None
    idle, timeline = profile.idle, profile.timeline
    parts = {
        ("host-bound", "host-stall", "no-work", "decode-host-bound"): idle.host_wait_s + idle.latency_s,
        ("sync-bound", "blocking-copy"): idle.sync_s,
        ("data-bound",): idle.data_wait_s,
        ("allocator",): idle.allocator_s,
        ("warm-up",): idle.warm_up_s,
        ("launch-bound",): idle.launch_gap_s,
        ("dependency",): idle.dependency_s,
        ("communication-bound", "straggler"): timeline.exposed_communication_s,
        ("copy-bound", "blocking-copy"): timeline.exposed_copy_s,
    }
    codes = {finding.code for finding in profile.findings}
    whole = max(timeline.span_s - timeline.compute_s, 0.0)
    known = min(sum(seconds for named, seconds in parts.items() if codes & set(named)), whole)
    # Sums of the same times in another order differ in their last digits.
    return Explained(not_computing_s=whole, explained_s=known, unexplained_s=max(round(whole - known, 9), 0.0))


def losses_by_code(profile: Profile) -> dict[LossCode, Loss]:
    """From the trace; from a table of kernels, by their names."""
    is_table = profile.has_device and not profile.ranks
    listed = [*_by_names(profile), *profile.losses] if is_table else profile.losses
    return {loss.code: _beside_the_host(profile, loss) for loss in listed}


WORK_SAVES: dict[LossCode, float] = {
    "attention": FUSED_ATTENTION_SAVES,
    "layout": 1.0,
    "fp32": TENSOR_CORES_SAVE,
    "norm": 1.0,
    "elementwise": FUSED_ELEMENTWISE_SAVES,
    "recompute": 1.0,
}
"""Of the device's own work, what doing it the better way usually saves."""


def _beside_the_host(profile: Profile, loss: Loss) -> Loss:
    """What less work of the device saves beside the host as it is without the profiler, which slows it down."""
    capture = profile.capture
    timed = capture is not None and capture.step_s is not None and profile.steps is not None and profile.has_device
    if not timed or loss.code not in WORK_SAVES:
        return loss
    assert capture is not None
    saves_s = loss.saves_s
    if capture.issue_share is not None:
        room_s = profile.wall_s * max(1 - capture.issue_share, 0.0)
        saves_s = max(saves_s, min(loss.seconds * WORK_SAVES[loss.code], room_s))
    most_s = max(min(loss.seconds, profile.wall_s - _least_host_s(profile, loss)), saves_s, loss.most_s)
    return msgspec.structs.replace(loss, saves_s=saves_s, most_s=most_s)


def _least_host_s(profile: Profile, loss: Loss) -> float:
    """What the host needs at the very least for the profiled steps, once this work is done in the better way."""
    issue_s = profile.capture.least_issue_s if profile.capture is not None else None
    if issue_s is None or loss.code == "elementwise":  # a compiler takes most of the host's work away with it
        return 0.0
    return max(issue_s * (profile.steps_seen or 0) - loss.host_s, 0.0)


def _by_names(profile: Profile) -> list[Loss]:
    work = [(row.name, row.total_s, row.calls) for row in profile.kernels]
    in_training = any(describe(name).is_training_norm for name, _, _ in work)
    rules: list[tuple[LossCode, Callable[[Described], bool], float]] = [
        ("layout", lambda name: name.converts_layout, 1.0),
        ("fp32", lambda name: name.is_strict_fp32, TENSOR_CORES_SAVE),
        ("elementwise", lambda name: name.is_unfused, FUSED_ELEMENTWISE_SAVES),
    ]
    rules += [("norm", lambda name: name.is_fixed_norm, 1.0)] if not in_training else []
    found = []
    for code, is_meant, saves in rules:
        meant = [(seconds, name, calls) for name, seconds, calls in work if is_meant(describe(name))]
        if meant:
            total, calls = sum(seconds for seconds, _, _ in meant), sum(calls for _, _, calls in meant)
            top = short_name(max(meant)[1])
            found.append(Loss(code=code, seconds=total, saves_s=total * saves, most_s=total, count=calls, what=top))
    return found
