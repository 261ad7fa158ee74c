"""Time in which the device waits: for the host, for data, for other ranks, for its own kernels to start."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from redline.analyze.finding import (
    LEAST_SHARE,
    Advice,
    Finding,
    advice,
    does,
    fewer_launches,
    finding_of,
    host_is_cleared,
    is_about_code,
    share_of,
    try_recipe,
    waiting_gain,
    with_graphs,
)
from redline.model.units import format_bytes, format_seconds
from redline.trace.idle import Wait
from redline.trace.losses import Loss, LossCode
from redline.trace.names import label_of

if TYPE_CHECKING:
    from redline.analyze.profile import Profile

LAUNCHES_MISSING = 0.5
"""Of the device's work: with fewer launches in the trace, nothing can be said of the host."""
WIDE_TYPES = frozenset(("float", "float32", "double", "float64", ""))
"""Of messages, as collectives name them; where none is named, it may be any."""


def _waiting(profile: Profile, loss: Loss, code: str, *, evidence: str, todo: Advice | str) -> Finding:
    """Of time in which the device waits: without the profiler there may be less of it than the trace shows."""
    return finding_of(profile, loss, code, evidence=evidence, todo=todo, gain=waiting_gain(profile, loss))


def host(profile: Profile, loss: Loss) -> Finding | None:
    """Python and torch issue work more slowly than the device does it."""
    if host_is_cleared(profile):
        return None
    if not profile.has_device:
        return _python(profile, loss)
    launches, steps = profile.launches, profile.steps_seen
    per_step = f"{launches.calls / steps:.0f} launches a step" if steps else f"{launches.calls:,} launches"
    told = profile.bound.evidence if profile.bound.label == "host" else _share(profile, loss, "the host is late")
    each = f", {format_seconds(launches.mean_call_s)} of host each" if launches.mean_call_s else ""
    todo = fewer_launches(profile, loss)
    beside = f"; meanwhile a thread that launches nothing runs {loss.what}" if loss.what else ""
    return _waiting(
        profile,
        loss,
        "host-bound",
        evidence=f"{told}; {per_step}{each}{beside}",
        todo=todo,
    )


def _python(profile: Profile, loss: Loss) -> Finding:
    """Where the host is the device: Python between one operator and the next."""
    share = share_of(profile, loss.seconds)
    if does(profile).compiles:
        todo = Advice(
            "part of the program runs outside what torch.compile fuses: TORCH_LOGS=graph_breaks says where; or a larger batch"
        )
    else:
        why = "fewer operators, called without Python in between; or a larger batch"
        todo = advice(profile, "compile", why, "torch.compile(model)")
    return _waiting(
        profile,
        loss,
        "host-bound",
        evidence=f"no operator runs {share:.0%} of the time: Python between one operator and the next, {loss.count:,} times, "
        f"{format_seconds(loss.seconds / max(loss.count, 1))} each on average",
        todo=todo,
    )


def stall(profile: Profile, loss: Loss) -> Finding | None:
    """Now and then the host launches nothing for long: it does something else."""
    if host_is_cleared(profile):
        return None
    share = share_of(profile, loss.seconds)
    most = f"; most of it in {loss.what}" if loss.what else ""
    how = "record with with_stack=True" if profile.capture is None else "capture with --stacks"
    see = "" if loss.what else f" ({how} to see the Python functions)"
    server = "" if loss.what or profile.steps_seen else ". A server that has no requests looks the same"
    idle, nothing = "the device waits", " in which the host launches nothing"
    if not profile.has_device:
        idle, nothing = "no operator runs", ""
    stretches = "one stretch" if loss.count == 1 else f"{loss.count:,} stretches"
    each = "" if loss.count == 1 else " each on average"
    return _waiting(
        profile,
        loss,
        "host-stall",
        evidence=f"{idle} {share:.0%} of the time in {stretches}{nothing}, "
        f"{format_seconds(loss.seconds / max(loss.count, 1))}{each}{most}",
        todo="take what the program does there out of the step, or do it less often or in another process: logging, "
        f"metrics, checkpoints, preprocessing on the host{see}{server}",
    )


def no_work(profile: Profile, loss: Loss) -> Finding | None:
    """The program waits for something to do."""
    if host_is_cleared(profile):
        return None
    return _waiting(
        profile,
        loss,
        "no-work",
        evidence=f"{_idle(profile)} {_time(profile, loss)} because the program has nothing to do: it sits in {loss.what}, "
        f"{'once' if loss.count == 1 else f'{loss.count:,} times'}, "
        f"{format_seconds(loss.seconds / max(loss.count, 1))} each on average",
        todo="nothing to fix in the model: a server needs more requests, or larger batches of them; where the program "
        "fills that queue itself, make what fills it faster (more workers, cheaper preprocessing)",
    )


def synchronisation(profile: Profile, loss: Loss) -> Finding | None:
    """Calls that make the host wait, so that nothing is queued when the device is done."""
    sites = [wait for wait in profile.waits if not wait.copies]
    evidence = f"the device is idle {_time(profile, loss)} because the host waits for it{_sites(profile, sites)}"
    if share_of(profile, loss.seconds) < LEAST_SHARE:
        # The device had work to the end of each wait, but none was prepared behind it.
        evidence = (
            f"the host waits for the device{_sites(profile, sites)}; it launches the next work only then, which "
            f"makes the steps {format_seconds(loss.saves_s)} longer"
        )
    return _waiting(
        profile,
        loss,
        "sync-bound",
        evidence=evidence,
        todo="read results less often: keep them on the device (no .item(), .cpu(), print or if on a tensor in every "
        "step), and wait with an event only where the value is needed",
    )


def blocking_copy(profile: Profile, loss: Loss) -> Finding | None:
    """Copies that block the host until they are done."""
    sites = [wait for wait in profile.waits if wait.copies]
    return _waiting(
        profile,
        loss,
        "blocking-copy",
        evidence=f"the device is idle {_time(profile, loss)} around copies that block the host{_sites(profile, sites)}",
        todo="copy from and to pinned memory with non_blocking=True, and wait for the copy only where its data is "
        "needed; launch the next work before asking for results",
    )


def _sites(profile: Profile, waits: list[Wait]) -> str:
    if not waits:
        return ""
    first = waits[0]
    called = f", called by {first.operator}" if first.operator else ""
    frame = f" in {first.frame}" if first.frame else ""
    steps = profile.steps_seen
    a_step = "once a step" if steps == first.calls else f"{first.calls / steps:.3g} times a step" if steps else ""
    often = a_step or ("once" if first.calls == 1 else f"{first.calls:,} times")
    return f": {first.call}{called}{frame}, {often}, {format_seconds(first.blocked_s)} in all"


def data_loader(profile: Profile, loss: Loss) -> Finding | None:
    share = share_of(profile, loss.seconds)
    return _waiting(
        profile,
        loss,
        "data-bound",
        evidence=f"the device sits idle {share:.0%} of the time while the host waits for the data loader"
        if profile.has_device
        else f"the data loader takes {share:.0%} of the time, in {loss.count:,} batches, "
        f"{format_seconds(loss.seconds / max(loss.count, 1))} each on average",
        todo=f"more loader workers, persistent workers{', pinned memory' if profile.has_device else ''} and prefetching; or "
        "cheaper decoding",
    )


def allocator(profile: Profile, loss: Loss) -> Finding | None:
    """Memory taken from the driver in the middle of a step."""
    return _waiting(
        profile,
        loss,
        "allocator",
        evidence=f"the device is idle {_time(profile, loss)} while the host takes memory from the driver or gives it "
        f"back, in {loss.count:,} calls",
        todo="run a few steps before measuring, so that torch's allocator holds what it needs; if it goes on, take "
        "torch.cuda.empty_cache() out of the loop, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True and keep shapes constant",
    )


def warm_up(profile: Profile, loss: Loss) -> Finding | None:
    """What happens once, inside the recorded steps."""
    again = "; if later steps do it too, TORCH_LOGS=recompiles says why" if does(profile).compiles else ""
    return _waiting(
        profile,
        loss,
        "warm-up",
        evidence=f"{_idle(profile)} {_time(profile, loss)} while the host loads code, compiles or captures, in "
        f"{loss.count:,} calls that happen once: these steps are not the usual ones",
        todo=f"record later steps: torch.profiler.schedule(wait=…, warmup=…) skips the first ones{again}",
    )


def launch(profile: Profile, loss: Loss) -> Finding | None:
    """The work was there in time, and still the device pays between one small kernel and the next."""
    launches = profile.launches
    if does(profile).records_graph:
        fewer = "a larger batch: the kernels are in a graph already" + (" and fused" if does(profile).compiles else "")
        todo = (
            Advice(fewer)
            if does(profile).compiles or profile.capture is None
            else advice(profile, "compile", "fewer, larger kernels", "torch.compile(model)")
        )
    elif not does(profile).compiles:
        todo = advice(profile, "compile", "fewer, larger kernels", "torch.compile(model)")
    elif is_about_code(profile):
        todo = Advice(
            "torch.compile(model, mode='reduce-overhead'), or torch.cuda.graph around the step: the kernels of a replayed "
            "graph follow each other closely"
        )
    else:
        todo = try_recipe(with_graphs(profile), "the kernels of a replayed graph follow each other closely")
    return _waiting(
        profile,
        loss,
        "launch-bound",
        evidence=(
            f"{share_of(profile, loss.seconds):.0%} of the time lies in short gaps between kernels; "
            f"{launches.short_share:.0%} of the kernels take no more than 10 µs "
            f"(median {format_seconds(launches.median_kernel_s)})"
        ),
        todo=todo,
    )


def dependency(profile: Profile, loss: Loss) -> Finding | None:
    """Work that was launched in time and yet started late."""
    idle = profile.idle
    unlaunched = sum(row.device_share for row in profile.operators if row.source == "no-launch")
    if unlaunched > LAUNCHES_MISSING and not idle.dependency_s:
        return _waiting(
            profile,
            loss,
            "dependency",
            evidence=f"the device is idle {_time(profile, loss)}, and the trace does not say why: for "
            f"{unlaunched:.0%} of the device's work it holds no launch, so it is not known whether the host was late",
            todo="record again with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], and keep the events of "
            "category cuda_runtime and the argument 'correlation' when a trace is cut or rewritten",
        )
    known = f"{format_seconds(idle.dependency_s)} for an event of another stream" if idle.dependency_s else ""
    unknown = f"{format_seconds(idle.unknown_s)} for reasons that are not in the trace" if idle.unknown_s else ""
    return _waiting(
        profile,
        loss,
        "dependency",
        evidence=f"the device is idle {_time(profile, loss)} although the next work was launched in time: it waited "
        + " and ".join(part for part in (known, unknown) if part),
        todo="record synchronisation between streams too (torch.profiler._ExperimentalConfig(enable_cuda_sync_events="
        "True)) and look at what each stream waits for; other processes on the device stop it as well",
    )


def copies(profile: Profile, loss: Loss) -> Finding | None:
    """Copies with no kernel beside them."""
    moves = [row for row in profile.copies if row.kind == "copy"]
    longest = moves[0] if moves else None
    speed = f" at {longest.bytes_per_s / 1e9:.1f} GB/s" if longest and longest.bytes_per_s else ""
    most = f"; most of it {label_of(longest.name)}{speed}" if longest else ""
    pageable = any("pageable" in row.name.lower() for row in moves)
    pinned = "pinned memory first (copies from pageable memory block the host), then " if pageable else ""
    start = "prefetch: copy the next batch with non_blocking=True on a stream of its own"
    if longest is not None and longest.is_apart:
        start = (
            "start the copy of the next batch before this step's kernels are launched, and let their stream wait for it "
            "(wait_stream, wait_event), not the host: it has a stream of its own, but nothing runs beside it"
        )
    return finding_of(
        profile,
        loss,
        "copy-bound",
        evidence=f"copies with no kernel beside them take {share_of(profile, loss.seconds):.0%} of the time{most}",
        todo=f"{pinned}{start}",
    )


def communication(profile: Profile, loss: Loss) -> Finding | None:
    timeline = profile.timeline
    hidden = 1 - timeline.exposed_communication_s / max(timeline.communication_s, 1e-12)
    often = profile.gradient_reductions
    repeated = f"; gradients are reduced {often} times for each step of the optimizer" if often and often > 1 else ""
    return finding_of(
        profile,
        loss,
        "communication-bound",
        evidence=f"communication with nothing computed beside it takes {share_of(profile, loss.seconds):.0%} of the "
        f"time; {hidden:.0%} is hidden{_largest_collective(profile)}{repeated}",
        todo=_overlap_advice(profile),
    )


def _overlap_advice(profile: Profile) -> str:
    first = profile.collectives[0] if profile.collectives else None
    wide = any(row.dtype.lower() in WIDE_TYPES for row in profile.collectives[:3])
    if (profile.gradient_reductions or 0) > 1:
        return (
            "reduce gradients once for each step of the optimizer: run all but its last micro-batch inside model.no_sync() "
            "(FSDP: no_sync() or set_requires_gradient_sync(False))"
        )
    if first is not None and first.name in _ADVICE:
        return _ADVICE[first.name]
    more = (
        "gradient accumulation under no_sync(), or bf16 gradients"
        if wide
        else "or gradient accumulation under no_sync()"
    )
    return (
        f"overlap it with the backward (larger DDP buckets, gradient_as_bucket_view), a larger batch per device, {more}"
    )


_STAGES = (
    "this is mostly waiting for the neighbouring stage of a pipeline: more micro-batches for each step, an interleaved "
    "schedule, and stages that take equally long"
)
_ADVICE = {
    "allgather": "start it earlier and compute beside it: FSDP can prefetch the next layer's parameters (forward_prefetch, "
    "backward_prefetch), or keep them until the backward where memory allows (reshard_after_forward=False); a larger batch "
    "per device",
    "alltoall": "compute beside it what does not need its result (dense layers, another micro-batch); balance who sends "
    "what, and send less (lower precision)",
    "sendrecv": _STAGES,
    "send": _STAGES,
    "recv": _STAGES,
    "broadcast": "DDP(broadcast_buffers=False) where the ranks need not share their buffers; else fewer, larger broadcasts",
}
"""For what is exchanged most, how to wait less for it; of reductions, see above."""


def _largest_collective(profile: Profile) -> str:
    if not profile.collectives:
        return ""
    row = profile.collectives[0]
    size = f" of {format_bytes(row.message_bytes)}" if row.message_bytes else ""
    speed = f" at {row.bus_bytes_per_s / 1e9:.1f} GB/s on the bus" if row.bus_bytes_per_s else ""
    return f"; most of it {row.name}{size}{speed}"


def straggler(profile: Profile, loss: Loss) -> Finding | None:
    """One rank comes late to collectives, and the others wait for it there."""
    if not profile.stragglers:
        return None
    worst = profile.stragglers[0]
    return finding_of(
        profile,
        loss,
        "straggler",
        evidence=f"ranks wait {_time(profile, loss)} inside collectives for the last one to arrive; {worst.label} is "
        f"last in {worst.last} of {worst.collectives}, the others wait {format_seconds(worst.waited_s)} for it"
        + (f"; {profile.slowest.label}: {profile.slowest.why}" if profile.slowest is not None else ""),
        todo=f"look at {worst.label} by itself: more work than the others (uneven batches, sequence lengths, sharding), "
        "a slower loader, or a slower or shared device",
    )


def _idle(profile: Profile) -> str:
    return "the device is idle" if profile.has_device else "the model does not run for"


def _share(profile: Profile, loss: Loss, what: str) -> str:
    return f"{what} {share_of(profile, loss.seconds):.0%} of the time"


def _time(profile: Profile, loss: Loss) -> str:
    return f"{format_seconds(loss.seconds)} ({share_of(profile, loss.seconds):.0%} of the time)"


Rule = Callable[["Profile", Loss], Finding | None]

WAITING: dict[LossCode, Rule] = {
    "host": host,
    "stall": stall,
    "no-work": no_work,
    "sync": synchronisation,
    "blocking-copy": blocking_copy,
    "data": data_loader,
    "allocator": allocator,
    "warm-up": warm_up,
    "launch": launch,
    "dependency": dependency,
    "copies": copies,
    "communication": communication,
    "straggler": straggler,
}
"""Asked only of losses that are not small."""
