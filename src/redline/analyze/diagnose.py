"""A finding, and an upper bound of what fixing it can gain."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from redline.analyze.bound import DATA_WAIT_SHARE, EXPOSED_SHARE, LAUNCH_GAP_SHARE
from redline.record import Capabilities
from redline.spec import Frozen, Recipe, Switch
from redline.trace.classes import class_of, converts_layout, is_strict_fp32, printable, short_name
from redline.units import format_seconds

if TYPE_CHECKING:
    from redline.analyze.profile import Profile


LARGEST_GAIN = 100.0
"""What is bounded by nothing is not told as infinity."""


class Finding(Frozen):
    code: str
    evidence: str
    next: str
    """What to try, in Redline's recipe words where there is one."""
    gain_bound: float
    """The switch can become so many times faster at most, were this all of it gone."""


def gain_without(profile: Profile, seconds: float) -> float:
    """The step's time over what would be left of it."""
    whole = profile.wall_s
    left = whole - min(seconds, whole)
    return min(whole / left, LARGEST_GAIN) if left > 0 else LARGEST_GAIN


def recipe_of(profile: Profile) -> tuple[Switch, ...]:
    """The switches of the profiled recipe; none of a trace from elsewhere."""
    return Recipe.parse(profile.capture.recipe).switches if profile.capture is not None else ()


def does(profile: Profile) -> Capabilities:
    """What the profiled recipe does to the program. Of a trace from elsewhere nothing is known: nothing."""
    return profile.capture.capabilities if profile.capture is not None else Capabilities()


def with_switch(profile: Profile, switch: str, without: Collection[str] = ()) -> str:
    """The profiled recipe with this switch in the place of one of the same name; of a trace from elsewhere, only it."""
    name = switch.partition(":")[0]
    kept = [str(other) for other in recipe_of(profile) if other.name != name and str(other) not in without]
    return "+".join([*kept, switch])


LAYOUT_SHARE = 0.03
NORM_SHARE = 0.03
FP32_SHARE = 0.10
ELEMENTWISE_SHARE = 0.20
"""Of the device's work: below these, mending it is not worth the trouble."""

_NORM_IN_EVAL = re.compile(r"bn_fw_inf|FwdInfer|batch_norm_transform_input|^aten::native_batch_norm$")
_NORM_IN_TRAINING = re.compile(
    r"collect_statistics|bn_fw_tr|bn_bw|FwdTrain|BnormBwd|BatchNormBwd|batch_norm_back|NormBackward", re.IGNORECASE
)
_FUSED_ALREADY = re.compile(r"^triton_|multi_tensor_apply|^aten::_fused_")


def layout_conversions(profile: Profile) -> Finding | None:
    """Kernels that only turn NCHW into NHWC and back around convolutions."""
    seconds, share, top = _part(profile, converts_layout)
    if share < LAYOUT_SHARE:
        return None
    if any(switch.name == "channels-last" for switch in recipe_of(profile)):
        advice = "look in the operator table for what brings the other layout back: channels-last is on already"
    else:
        advice = f"-r {with_switch(profile, 'channels-last')}: keep images in the layout the convolutions want"
    return Finding(
        code="layout-conversions",
        evidence=f"{share:.0%} of the device's work only turns one memory layout into the other ({top})",
        next=advice,
        gain_bound=gain_without(profile, seconds),
    )


def fp32_products(profile: Profile) -> Finding | None:
    """Matrix products and convolutions in full fp32, which leave the tensor cores idle."""
    seconds, share, top = _part(profile, is_strict_fp32)
    if share < FP32_SHARE:
        return None
    on_rocm = any(row.name.startswith(("Cijk_", "igemm_", "miopen")) for row in profile.kernels)
    switch = "amp" if on_rocm else "tf32"
    also = "" if on_rocm else ", or amp for more"
    return Finding(
        code="fp32-matmul",
        evidence=f"{share:.0%} of the device's work is matrix products and convolutions in full fp32 ({top})",
        next=f"-r {with_switch(profile, switch)}: tensor cores{also}; the numerics check tells what it costs",
        gain_bound=gain_without(profile, seconds),
    )


def batch_norm_in_eval(profile: Profile) -> Finding | None:
    """Batch-norm with fixed statistics is a scale and a shift, which the convolution before can do itself."""
    names = [*(row.name for row in profile.kernels), *(row.name for row in profile.operators)]
    if any(_NORM_IN_TRAINING.search(name) for name in names):
        return None
    seconds, share, top = _part(profile, lambda name: bool(_NORM_IN_EVAL.search(name)))
    if share < NORM_SHARE or does(profile).folds_norms:
        return None
    return Finding(
        code="batch-norm-eval",
        evidence=f"{share:.0%} of the device's work is batch-norm with fixed statistics ({top})",
        next=f"-r {with_switch(profile, 'fold-bn')}: a scale and a shift that the convolutions before can do themselves",
        gain_bound=gain_without(profile, seconds),
    )


def unfused_elementwise(profile: Profile) -> Finding | None:
    """Elementwise kernels, one by one: each reads and writes all of memory for one operation."""

    def unfused(name: str) -> bool:
        return class_of(name) == "elementwise" and not _FUSED_ALREADY.search(name)

    seconds, share, top = _part(profile, unfused)
    if share < ELEMENTWISE_SHARE or does(profile).compiles:
        return None
    return Finding(
        code="elementwise",
        evidence=f"{share:.0%} of the device's work is elementwise kernels bound by memory ({top})",
        next=f"-r {with_switch(profile, 'compile')}: fuse them, so that each value is read and written once",
        gain_bound=gain_without(profile, seconds),
    )


def _part(profile: Profile, is_meant: Callable[[str], bool]) -> tuple[float, float, str]:
    """Seconds and share of the work whose name is meant, and the name that takes most of it."""
    work = _work(profile)
    meant = [(seconds, name) for name, seconds in work if is_meant(name)]
    whole, part = sum(seconds for _, seconds in work), sum(seconds for seconds, _ in meant)
    return part, part / whole if whole else 0.0, short_name(max(meant)[1]) if meant else ""


def _work(profile: Profile) -> list[tuple[str, float]]:
    """What keeps the device busy: kernels and copies; where the host is the device, operators without their children."""
    if profile.has_device:
        copies = [(row.name, row.total_s) for row in profile.copies]
        return [*((row.name, row.total_s) for row in profile.kernels), *copies]
    return [(row.name, row.cpu_self_s) for row in profile.operators]


def host(profile: Profile) -> Finding | None:
    """Host-bound: Python issues work more slowly than the device does it."""
    if profile.bound.label != "host":
        return None
    launches, steps = profile.launches, profile.steps_seen
    per_step = f"{launches.calls / steps:.0f} launches a step" if steps else f"{launches.calls:,} launches"
    if does(profile).records_graph:
        advice = "a larger batch: graphs are on already, so the host is late with something else"
    else:
        advice = f"-r {_with_graphs(profile)}: a CUDA graph takes Python out of the step; or a larger batch"
    return Finding(
        code="host-bound",
        evidence=f"{profile.bound.evidence}; {per_step}",
        next=advice,
        gain_bound=gain_without(profile, profile.wall_s - min(profile.timeline.busy_s, profile.wall_s)),
    )


def launch(profile: Profile) -> Finding | None:
    """Launch-bound: the work was there in time, and still the device pays between one small kernel and the next."""
    share = _share(profile, profile.idle.launch_gap_s)
    if share < LAUNCH_GAP_SHARE:
        return None
    launches = profile.launches
    if not does(profile).compiles:
        advice = f"-r {with_switch(profile, 'compile')}: fewer, larger kernels"
    elif does(profile).records_graph:
        advice = "a larger batch: the kernels are fused and in a graph already"
    else:
        advice = f"-r {_with_graphs(profile)}: the kernels of a replayed graph follow each other closely"
    return Finding(
        code="launch-bound",
        evidence=(
            f"{share:.0%} of the time lies in short gaps between kernels; {launches.short_share:.0%} of the kernels "
            f"take no more than 10 µs (median {format_seconds(launches.median_kernel_s)})"
        ),
        next=advice,
        gain_bound=gain_without(profile, profile.idle.launch_gap_s),
    )


def data_loader(profile: Profile) -> Finding | None:
    share = _share(profile, profile.idle.data_wait_s)
    if share < DATA_WAIT_SHARE:
        return None
    return Finding(
        code="data-bound",
        evidence=f"the device sits idle {share:.0%} of the time while the host waits for the data loader",
        next="more loader workers, persistent workers, pinned memory and prefetching; or cheaper decoding",
        gain_bound=gain_without(profile, profile.idle.data_wait_s),
    )


def copies(profile: Profile) -> Finding | None:
    """Copy-bound: copies with no kernel beside them."""
    share = _share(profile, profile.timeline.exposed_copy_s)
    if share < EXPOSED_SHARE:
        return None
    moves = [row for row in profile.copies if row.kind == "copy"]
    longest = moves[0] if moves else None
    speed = f" at {longest.bytes_per_s / 1e9:.1f} GB/s" if longest and longest.bytes_per_s else ""
    most = f"; most of it {printable(longest.name[:80])}{speed}" if longest else ""
    pageable = any("pageable" in row.name.lower() for row in moves)
    pinned = "pinned memory first (copies from pageable memory block the host), then " if pageable else ""
    return Finding(
        code="copy-bound",
        evidence=f"copies that overlap no kernel take {share:.0%} of the time{most}",
        next=f"{pinned}prefetch: copy the next batch with non_blocking=True on a stream of its own",
        gain_bound=gain_without(profile, profile.timeline.exposed_copy_s),
    )


def communication(profile: Profile) -> Finding | None:
    share = _share(profile, profile.timeline.exposed_communication_s)
    if share < EXPOSED_SHARE:
        return None
    hidden = 1 - profile.timeline.exposed_communication_s / max(profile.timeline.communication_s, 1e-12)
    return Finding(
        code="communication-bound",
        evidence=f"communication that overlaps no computation takes {share:.0%} of the time; {hidden:.0%} is hidden",
        next="overlap it with the backward (larger DDP buckets, gradient_as_bucket_view), a larger batch per device, "
        "gradient accumulation, or bf16 gradients",
        gain_bound=gain_without(profile, profile.timeline.exposed_communication_s),
    )


def _share(profile: Profile, seconds: float) -> float:
    return seconds / profile.timeline.span_s if profile.timeline.span_s else 0.0


def _with_graphs(profile: Profile) -> str:
    """An engine that cannot be recorded gives its place to a compiler that makes graphs."""
    switches = profile.capture.switches if profile.capture is not None else {}
    engines = [switch for switch, told in switches.items() if told.refuses_graph]
    if engines:
        return with_switch(profile, "compile:reduce-overhead", without=engines)
    return with_switch(profile, "graphs")


__all__ = ["RULES", "Finding", "diagnose"]

RULES: tuple[Callable[[Profile], Finding | None], ...] = (
    data_loader,
    host,
    launch,
    copies,
    communication,
    layout_conversions,
    fp32_products,
    batch_norm_in_eval,
    unfused_elementwise,
)


def diagnose(profile: Profile) -> list[Finding]:
    """The largest possible gain first."""
    found = [finding for rule in RULES if (finding := rule(profile)) is not None]
    return sorted(found, key=lambda finding: -finding.gain_bound)
