"""Rules about a device that waits: for the loader, the host, the next launch, copies, other devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redline.analyze.bound import DATA_WAIT_SHARE, EXPOSED_SHARE, LAUNCH_GAP_SHARE
from redline.analyze.diagnose.finding import Finding, gain_without, has_step, with_step
from redline.spec import Recipe
from redline.trace.classes import printable
from redline.units import format_seconds

if TYPE_CHECKING:
    from redline.analyze.profile import Profile


_GRAPHED_MODES = ("reduce-overhead", "max-autotune")
"""Of the compiler: these make graphs of their own."""


def host(profile: Profile) -> Finding | None:
    """Host-bound: Python issues work more slowly than the device does it."""
    if profile.bound.label != "host":
        return None
    launches, steps = profile.launches, profile.steps_seen
    per_step = f"{launches.calls / steps:.0f} launches a step" if steps else f"{launches.calls:,} launches"
    if _is_graphed(profile):
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
    if not has_step(profile, "compile"):
        advice = f"-r {with_step(profile, 'compile')}: fewer, larger kernels"
    elif _is_graphed(profile):
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
        evidence=f"copies with no kernel beside them take {share:.0%} of the time{most}",
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
        evidence=f"communication with nothing computed beside it takes {share:.0%} of the time; {hidden:.0%} is hidden",
        next="overlap it with the backward (larger DDP buckets, gradient_as_bucket_view), a larger batch per device, "
        "gradient accumulation, or bf16 gradients",
        gain_bound=gain_without(profile, profile.timeline.exposed_communication_s),
    )


def _share(profile: Profile, seconds: float) -> float:
    return seconds / profile.timeline.span_s if profile.timeline.span_s else 0.0


def _is_graphed(profile: Profile) -> bool:
    if profile.capture is None:
        return False
    steps = Recipe.parse(profile.capture.recipe).steps
    return any(step.name == "graphs" or step.argument in _GRAPHED_MODES for step in steps)


def _with_graphs(profile: Profile) -> str:
    """TorchScript cannot be recorded; a compiler that makes graphs takes its place."""
    if has_step(profile, "torchscript"):
        return with_step(profile, "compile:reduce-overhead", without="torchscript")
    return with_step(profile, "graphs")
