"""The lines about a profile that stand above its tables, in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Iterator

from redline.analyze.generation import Generation
from redline.analyze.profile import Profile
from redline.model.units import format_bytes, format_seconds, format_share
from redline.trace.host import Launches
from redline.trace.memory import MemoryLine
from redline.trace.names import label_of

PERFETTO = "https://ui.perfetto.dev"


def title(profile: Profile) -> str:
    capture = profile.capture
    if capture is None:
        return " · ".join(profile.sources)
    parts = [
        capture.model,
        capture.task,
        capture.recipe,
        f"batch {capture.batch}" if capture.batch else "",
        capture.setting,
        f"{capture.device_name} ({capture.device})" if capture.device_name else capture.device,
        f"{profile.steps_seen} steps" if profile.steps_seen else "",
        f"under {capture.tool}",
    ]
    return " · ".join(part for part in parts if part)


def hints(profile: Profile) -> Iterator[str]:
    """Where to look further."""
    trace = profile.capture.trace if profile.capture else None
    if trace and trace.endswith(".json.gz"):
        yield f"trace: {trace}"
        yield f"open it at {PERFETTO} (it stays in the browser), or: tensorboard --logdir {trace.rpartition('/')[0]}"
        assert profile.capture is not None
        yield f"compare it with another: redline profile --diff {profile.capture.record_id[:13]} OTHER"
    elif profile.capture is None and not _is_kernel_table(profile):
        yield f"the whole timeline: open the file at {PERFETTO} (it stays in the browser)"
    elif profile.capture is not None and trace:
        yield f"files of {profile.capture.tool}: {trace}"


def _is_kernel_table(profile: Profile) -> bool:
    return any(one.code == "kernel-table" for one in profile.notes)


def facts(profile: Profile) -> Iterator[tuple[str, str]]:
    """Name and words of each line, in the order in which they are shown."""
    if profile.lost:
        yield "lost", "; ".join(profile.lost.reasons)
    if told := _hardware(profile):
        yield "device", told
    yield "bound", f"{profile.bound.label}: {profile.bound.evidence}"
    yield _timeline(profile)
    if profile.slowest is not None:
        late = profile.slowest
        yield "slowest", f"{late.label}: the others waited {told_time(late.waited_s)} for it; {late.why}"
    if profile.timeline.idle_s and not _is_kernel_table(profile) and idle_parts(profile):
        yield "idle", ", ".join(f"{name} {told_time(value)}" for name, value in idle_parts(profile))
    if profile.outside:
        yield "not counted", _outside(profile)
    yield from _step_facts(profile)
    if profile.generation is not None:
        yield "generation", _generation(profile.generation)
    if profile.phases:
        yield "phases", _phases(profile)
    yield from _launch_facts(profile.launches)
    yield from (("memory", _memory(line)) for line in profile.memory)
    if profile.host.ratio is not None or profile.host.launched:
        host = profile.host
        ratio = f"{host.ratio:.2f}: " if host.ratio is not None else ""
        busy = f"host busy {told_time(host.busy_s)}, blocked {told_time(host.blocked_s)}"
        yield "host/device", f"{ratio}{host.verdict} ({busy})"


def _timeline(profile: Profile) -> tuple[str, str]:
    timeline = profile.timeline
    if profile.host.ratio is None and not profile.has_device:
        told = f"{told_time(timeline.span_s)}, in operators {told_part(timeline.busy_s, timeline.span_s)}"
        return "timeline", told
    if _is_kernel_table(profile):
        talking = f", of it communicating {told_time(timeline.communication_s)}" if timeline.communication_s else ""
        return "kernels", f"{told_time(timeline.busy_s)} in total{talking}"
    return (
        "timeline",
        f"{told_time(timeline.span_s)}: busy {told_part(timeline.busy_s, timeline.span_s)}, "
        f"idle {told_part(timeline.idle_s, timeline.span_s)}; computing {told_time(timeline.compute_s)}, communicating "
        f"{told_time(timeline.communication_s)} (alone {told_time(timeline.exposed_communication_s)}), "
        f"copying {told_time(timeline.copy_s)}",
    )


def _phases(profile: Profile) -> str:
    bottleneck = f"; bottleneck: {profile.bottleneck}" if profile.bottleneck else ""
    # Whole traces are summed up; a person sets phases against the time of one step.
    steps = profile.steps.count if profile.steps else 1
    of_what = "per step, under the profiler" if profile.steps else "of the whole trace"
    told = ", ".join(
        _phase(phase.name, phase.host_s / steps, phase.device_s / steps, profile) for phase in profile.phases
    )
    return f"{told} ({of_what}){bottleneck}"


def _launch_facts(launches: Launches) -> Iterator[tuple[str, str]]:
    if launches.calls:
        graphs = f", {launches.graph_work:,} of them replayed by {launches.graphs:,} graph launches"
        yield (
            "launches",
            f"{launches.calls:,} for {launches.work:,} pieces of work{graphs if launches.graphs else ''}, "
            f"{told_time(launches.mean_call_s)} of host each; "
            f"median kernel {told_time(launches.median_kernel_s)}, {format_share(launches.short_share)} of them ≤ 10 µs",
        )
    if launches.delays is not None and launches.queue is not None:
        delays, queue = launches.delays, launches.queue
        yield (
            "queue",
            f"work starts {told_time(delays.p50_s)} after its launch (median; 90 % within {told_time(delays.p90_s)}, "
            f"99 % within {told_time(delays.p99_s)}); {queue.mean:.3g} launches wait on average, {queue.largest:,} at "
            f"most, none {format_share(queue.empty_share)} of the time",
        )


def _memory(line: MemoryLine) -> str:
    most = ", ".join(f"{one.operator} {format_bytes(one.bytes)}" for one in line.at_peak[:3])
    return (
        f"{line.label}: at most {format_bytes(line.peak_bytes)} in use, {told_time(line.peak_at_s)} after the first "
        f"allocation" + (f"; of what was taken since then, most by {most}" if most else "")
    )


def _generation(found: Generation) -> str:
    told = f"first token after {told_time(found.ttft_s)}"
    if found.prefill_tokens_per_s is not None:
        told += f" ({found.prefill_tokens_per_s:,.0f} tokens of the prompt per second)"
    if found.tpot_s is None:
        return told
    told += f", then {told_time(found.tpot_s.p50)} per token"
    if found.reads_from_cache:
        return f"{told}; it reads {format_bytes(found.read_bytes)}, which stay in a cache of the processor"
    if found.read_s is None or found.bandwidth_share is None:
        return told
    share = format_share(found.bandwidth_share)
    return f"{told}; reading {format_bytes(found.read_bytes)} takes at least {told_time(found.read_s)}: {share} of the copy bandwidth"


def _hardware(profile: Profile) -> str:
    hardware = profile.hardware
    newer = " or newer" if hardware.at_least else ""
    parts = [
        label_of(hardware.name),
        f"compute capability {hardware.capability[0]}.{hardware.capability[1]}{newer}" if hardware.capability else "",
        f"{hardware.devices} devices" if hardware.devices > 1 else "",
        _ranks_told(profile),
    ]
    return ", ".join(part for part in parts if part)


def _ranks_told(profile: Profile) -> str:
    ranks = sorted({rank.rank for rank in profile.ranks if rank.rank is not None})
    sizes = {rank.world_size for rank in profile.ranks if rank.world_size}
    if not ranks or max(sizes, default=1) < 2:
        return ""
    listed = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed} of {max(sizes)}"


def idle_parts(profile: Profile) -> list[tuple[str, float]]:
    """The causes that occur, the longest first."""
    idle = profile.idle
    parts = [
        ("host wait" if profile.has_device else "Python and other code", idle.host_wait_s),
        ("host blocked in a call that waits", idle.sync_s),
        ("data loader", idle.data_wait_s),
        ("allocating memory", idle.allocator_s),
        ("warm-up", idle.warm_up_s),
        ("from a late launch to its start", idle.latency_s),
        ("launch gaps", idle.launch_gap_s),
        ("another stream", idle.dependency_s),
        ("unknown", idle.unknown_s),
    ]
    return sorted(((name, value) for name, value in parts if value), key=lambda part: -part[1])


def _outside(profile: Profile) -> str:
    outside = profile.outside
    parts = [
        f"{told_time(outside.before_s)} of device work launched before the first step ({outside.before_work:,} pieces)"
        if outside.before_work
        else "",
        f"{told_time(outside.between_s)} launched after the last step ({outside.between_work:,} pieces)"
        if outside.between_work
        else "",
    ]
    return "; ".join(part for part in parts if part)


def _step_facts(profile: Profile) -> Iterator[tuple[str, str]]:
    steps, capture = profile.steps, profile.capture
    if steps is not None:
        spread = f", spread {format_share(steps.spread)}" if steps.spread is not None else ""
        yield (
            "steps",
            f"{steps.count}, mean {told_time(steps.mean_s)} ({told_time(steps.min_s)}–{told_time(steps.max_s)}{spread})",
        )
    if capture is not None and capture.step_s:
        slower = f", {steps.mean_s / capture.step_s:.2f}× under it" if steps else ""
        yield (
            "profiler",
            f"a step takes {told_time(capture.step_s)} without it{slower}; capturing took {told_time(capture.capture_s)}",
        )


def _phase(name: str, host_s: float, device_s: float, profile: Profile) -> str:
    return (
        f"{name} {told_time(host_s)} host, {told_time(device_s)} device"
        if profile.has_device
        else f"{name} {told_time(host_s)}"
    )


def told_part(value: float, whole: float) -> str:
    return f"{told_time(value)} ({format_share(value / whole) if whole else 'n/a'})"


def told_time(value: float | None) -> str:
    return format_seconds(value) if value else ("n/a" if value is None else "0")
