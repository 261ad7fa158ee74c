"""The rules of the diagnosis stand here: what a cause is called, what it removes, what it says, what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redline.analyze import removals
from redline.analyze.bound import SAME_AS_DEVICE, by_work, first_limit
from redline.analyze.finding import Advice, Bound, Finding, Removal, Rule, findings_of
from redline.analyze.remedies import advice, does, graphs, is_about_code, recipe_of, switch
from redline.analyze.removals import Selection, TraceFacts, decoding, only_if, operators, rows_of, unless_cleared
from redline.model.note import note
from redline.model.record import RunRecord
from redline.model.units import format_bytes, format_seconds, format_share
from redline.model.work import Ceilings
from redline.trace.host import MOSTLY
from redline.trace.names import MEMORY_CLASSES, label_of
from redline.trace.patterns import recomputed, strict_products, unfused_attention

if TYPE_CHECKING:
    from redline.analyze.profile import Profile

GRAPH_BREAKS = "part of the program runs outside what torch.compile fuses: TORCH_LOGS=graph_breaks says where"
GRAPHS_IN_CODE = "torch.compile(model, mode='reduce-overhead'), or torch.cuda.graph around the step"


# The device waits


def _host(facts: TraceFacts, gone: Removal) -> str:
    profile, words, launches = facts.profile, facts.words(gone), facts.profile.launches
    if not profile.has_device:
        return f"no operator runs {gone.seconds / facts.span_s:.0%} of the time: Python between one operator and the next, {words['often']}"
    a_step = (
        f"{launches.calls / profile.steps_seen:.0f} launches a step"
        if profile.steps_seen
        else f"{launches.calls:,} launches"
    )
    mean = f", {format_seconds(launches.mean_call_s)} of host each" if launches.mean_call_s else ""
    issued = profile.capture.issue_share if profile.capture is not None else None
    known = f"issue/step {issued:.2f}, without the profiler: " if issued is not None else ""
    exposed_s = profile.timeline.exposed_communication_s
    beside = (
        f"; beside it {format_seconds(exposed_s)} are communication with nothing computed"
        if exposed_s > MOSTLY * gone.seconds
        else ""
    )
    return f"{known}the device waits for the host {words['time']}; {a_step}{mean}{beside}"


def _fewer_launches(facts: TraceFacts, gone: Removal) -> Advice:
    profile, program = facts.profile, does(facts.profile)
    if not profile.has_device and program.compiles:
        return Advice(f"{GRAPH_BREAKS}; or a larger batch")
    if not profile.has_device:
        why = "fewer operators, called without Python in between; or a larger batch"
        return advice(profile, "compile", why, "torch.compile(model)")
    if program.records_graph:
        return Advice(
            "a larger batch: graphs are on already, so the host is late with something else, such as a prompt that is read without one"
        )
    return graphs(profile, "a graph takes Python out of the step; or a larger batch", GRAPHS_IN_CODE)


def _stall(facts: TraceFacts, gone: Removal) -> str:
    idle, nothing = (
        ("the device waits", " in which the host launches nothing")
        if facts.profile.has_device
        else ("no operator runs", "")
    )
    inside = f"; most of it in {gone.what}" if gone.what else ""
    return f"{idle} {facts.words(gone)['time']} in long stretches{nothing}, {facts.words(gone)['often']}{inside}"


def _leave_out(facts: TraceFacts, gone: Removal) -> str:
    leave = "take what the program does there out of the step, or do it less often or in another process: logging, metrics, checkpoints, preprocessing on the host"
    how = "capture with --stacks" if facts.profile.capture is not None else "record with with_stack=True"
    see = f" ({how} to see the Python functions; a server that has no requests looks the same, and so does a wait that was not recorded)"
    return leave if gone.what else leave + see


def _waited(facts: TraceFacts, *, copies: bool) -> str:
    sites, steps = [wait for wait in facts.profile.waits if wait.copies == copies], facts.profile.steps_seen
    what, blocked = (
        "copies that block the host" if copies else "calls that wait for the device",
        sum(wait.blocked_s for wait in sites),
    )
    spends = f"the host spends {format_seconds(blocked)} in {what} and launches the next work only then"
    if not sites:
        return spends
    first = sites[0]
    where = "".join(
        f"{word} {place}" for word, place in ((", called by", first.operator), (" in", first.frame)) if place
    )
    often = f"{first.calls / steps:.3g} times a step" if steps else f"{first.calls:,} times"
    return f"{spends}: {first.call}{where}, {'once a step' if steps == first.calls else often}, {format_seconds(first.blocked_s)} in all"


def _read(facts: TraceFacts, gone: Removal) -> str:
    if facts.profile.has_device:
        return _waited(facts, copies=False)
    time = facts.words(gone)["time"]
    return f"tensors are turned into Python numbers {gone.count:,} times by {gone.what}, {time} with the Python around"


def _read_less_often(facts: TraceFacts, gone: Removal) -> str:
    if not facts.profile.has_device:
        return "compute on whole tensors instead of reading single values (.item(), float(), if on a tensor) in a Python loop"
    return (
        "read results less often: keep them on the device (no .item(), .cpu(), print or if on a tensor in every step), and "
        "wait with an event only where the value is needed"
    )


RECORD_LATER = (
    "record later steps: torch.profiler.schedule(wait=…, warmup=…) skips the first ones; if later steps of a compiled program do it too, "
    "TORCH_LOGS=recompiles says why"
)


def _short_gaps(facts: TraceFacts, gone: Removal) -> str:
    launches, time = facts.profile.launches, facts.words(gone)["time"]
    return (
        f"{time} lies in short gaps between kernels that were launched in time; {launches.short_share:.0%} "
        f"of the kernels take no more than 10 µs (median {format_seconds(launches.median_kernel_s)})"
    )


def _larger_kernels(facts: TraceFacts, gone: Removal) -> Advice:
    profile, program = facts.profile, does(facts.profile)
    if not program.compiles and (program.records_graph or not is_about_code(profile)):
        return advice(profile, "compile", "fewer, larger kernels", "torch.compile(model)")
    if program.records_graph:
        return Advice("a larger batch: the kernels are in a graph already, and fused")
    if program.compiles:
        return graphs(profile, "the kernels of a replayed graph follow each other closely", GRAPHS_IN_CODE)
    return Advice("torch.compile(model): fewer, larger kernels")


def _late_work(facts: TraceFacts, gone: Removal) -> str:
    idle, missing = facts.profile.idle, facts.profile.launches_missing
    parts = (
        (
            idle.dependency_s,
            f"{format_seconds(idle.dependency_s)} of it before work that waits for an event of another stream",
        ),
        (idle.unknown_s, f"{format_seconds(idle.unknown_s)} for reasons that are not in the trace"),
        (missing, f"for {missing:.0%} of the device's work the trace holds no launch"),
    )
    before = f"the device is idle {facts.words(gone)['time']} before work that the host had not kept waiting"
    return f"{before}: {', '.join(text for share, text in parts if share)}"


def _look_outside(facts: TraceFacts, gone: Removal) -> str:
    if facts.profile.launches_missing > facts.profile.idle.dependency_s / max(gone.seconds, 1e-12):
        return (
            "record again with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], and keep the events of category "
            "cuda_runtime and the argument 'correlation' when a trace is cut or rewritten"
        )
    return (
        "the cause lies outside the trace: work from before the recording, other processes on the device, or a stream that waits for "
        "another (torch.profiler._ExperimentalConfig(enable_cuda_sync_events=True) records that)"
    )


# Copies and communication


def _copies(facts: TraceFacts, gone: Removal) -> str:
    longest = next((row for row in facts.profile.copies if row.kind == "copy"), None)
    speed = f" at {longest.bytes_per_s / 1e9:.1f} GB/s" if longest and longest.bytes_per_s else ""
    most = f"; most of it {label_of(longest.name)}{speed}" if longest else ""
    return f"copies with no kernel beside them take {facts.words(gone)['time']}{most}"


def _communication(facts: TraceFacts, gone: Removal) -> str:
    profile, timeline = facts.profile, facts.profile.timeline
    hidden = 1 - timeline.exposed_communication_s / max(timeline.communication_s, 1e-12)
    often = profile.gradient_reductions or 1
    repeated = f"; gradients are reduced {often} times for each step of the optimizer" if often > 1 else ""
    most = ""
    for row in profile.collectives[:1]:
        size = f" of {format_bytes(row.message_bytes)}" if row.message_bytes else ""
        speed = f" at {row.bus_bytes_per_s / 1e9:.1f} GB/s on the bus" if row.bus_bytes_per_s else ""
        most = f"; most of it {row.name}{size}{speed}"
    taken = f"communication with nothing computed beside it takes {facts.words(gone)['time']}"
    return f"{taken}; {hidden:.0%} is hidden{most}{repeated}"


_STAGES = (
    "this is mostly waiting for the neighbouring stage of a pipeline: more micro-batches for each step, an interleaved "
    "schedule, and stages that take equally long"
)
_EXCHANGES = {
    "allgather": "start it earlier and compute beside it: FSDP can prefetch the next layer's parameters (forward_prefetch, "
    "backward_prefetch), or keep them until the backward where memory allows (reshard_after_forward=False); a larger batch "
    "per device",
    "alltoall": "compute beside it what does not need its result (dense layers, another micro-batch); balance who sends "
    "what, and send less (lower precision)",
    **dict.fromkeys(("sendrecv", "send", "recv"), _STAGES),
    "broadcast": "DDP(broadcast_buffers=False) where the ranks need not share their buffers; else fewer, larger broadcasts",
}
"""These say how to wait less for what is exchanged most; reductions are in `_overlap`."""


def _overlap(facts: TraceFacts, gone: Removal) -> str:
    if (facts.profile.gradient_reductions or 0) > 1:
        return (
            "reduce gradients once for each step of the optimizer: run all but its last micro-batch inside model.no_sync() "
            "(FSDP: no_sync() or set_requires_gradient_sync(False))"
        )
    kind = facts.profile.collectives[0].name if facts.profile.collectives else ""
    return _EXCHANGES.get(
        kind,
        "overlap it with the backward (larger DDP buckets, gradient_as_bucket_view), a larger batch per device, gradient accumulation "
        "under no_sync(), or gradients in bf16",
    )


def _straggler(facts: TraceFacts, gone: Removal) -> str:
    worst = facts.profile.stragglers[0]
    return (
        f"ranks wait {facts.words(gone)['time']} inside collectives for the last one to arrive; {worst.label} is last in "
        f"{worst.last} of {worst.collectives}, the others wait {format_seconds(worst.waited_s)} for it"
    )


# The next rules are about work that could be done in another way.


def _matrix_units(facts: TraceFacts, gone: Removal) -> Advice:
    profile, hardware = facts.profile, facts.profile.hardware
    if any(one.name == "tf32" for one in recipe_of(profile)):
        return advice(
            profile,
            "amp",
            "tf32 is on, and these kernels do not use it; the numerics check tells what it costs",
            "torch.autocast",
        )
    if hardware.has_tf32:
        in_code = "torch.backends.fp32_precision = 'tf32' (or torch.set_float32_matmul_precision('high')), or autocast for more"
        return advice(profile, "tf32", "tensor cores; compare the outputs", in_code)
    if hardware.maker == "nvidia" and hardware.capability is None and profile.capture is None:
        return Advice(
            "autocast to fp16: tensor cores; on an A100 or newer also torch.set_float32_matmul_precision('high'). "
            "The trace does not say which GPU it was"
        )
    why = "matrix cores" if hardware.maker == "amd" else "tensor cores; this GPU has none for fp32"
    form = "torch.bfloat16" if hardware.has_bf16 else "torch.float16"
    in_code = f"torch.autocast('cuda', dtype={form}), with a GradScaler when training in fp16"
    return advice(profile, "amp", f"{why}; compare the outputs", in_code)


def _fuse(facts: TraceFacts, gone: Removal) -> Advice:
    if does(facts.profile).compiles:
        return Advice(f"{GRAPH_BREAKS}; the optimizer can be fused or compiled too")
    why = "fuse them, so that each value is read and written once"
    return advice(facts.profile, "compile", why, "torch.compile(model)")


def _slow_kernel(facts: TraceFacts, gone: Removal) -> str:
    row = next(row for row in facts.profile.limits if row.label == gone.what)
    tflops = f"{row.flops_per_s / 1e12:.3g} TFLOP/s in {row.number_format}"
    reached = tflops if row.limited_by == "compute" else f"{row.bytes_per_s / 1e9:,.3g} GB/s"
    share = format_share(row.efficiency)
    return f"{gone.what} takes {format_seconds(row.device_s)} in {row.calls:,} calls at {share} of what {row.limit_of} allows ({reached})"


def _another_kernel(facts: TraceFacts, gone: Removal) -> Advice:
    profile, kind = facts.profile, next(row.kind for row in facts.profile.limits if row.label == gone.what)
    if kind == "attention":
        return Advice(
            "another kernel for it: newer flash attention or cuDNN's (torch.nn.attention.sdpa_kernel), head sizes and sequence lengths "
            "that are multiples of 64 or 128, or a larger batch: few heads do not fill the device"
        )
    if not profile.has_device and kind in ("convolution", "reduction"):
        in_code = "model.to(memory_format=torch.channels_last)"
        return advice(profile, "channels-last", "kernels for that layout are faster on many processors", in_code)
    why, in_code = (
        "kernels tuned for these shapes; or shapes that are multiples of 64",
        "torch.compile(model, mode='max-autotune')",
    )
    return advice(profile, "compile:max-autotune-no-cudagraphs", why, in_code)


_TOKEN = "a token takes {token}, and reading what it needs ({bytes}) {read} at the copy bandwidth: {reached} of it is reached"

RULES: tuple[Rule[TraceFacts], ...] = (
    Rule(
        code="data-wait",
        removes=removals.named("data"),
        says="{idle} {time} while the host waits for the data loader, in {count} batches",
        change="more loader workers, persistent workers and prefetching, with pinned memory for a GPU; or cheaper decoding",
        limit="data",
    ),
    Rule(
        code="warm-up",
        removes=removals.named("warm-up"),
        says="{idle} {time} while the host loads code, compiles or records a graph, in {count} calls that happen once: these steps "
        "are not the usual ones",
        change=RECORD_LATER,
        limit="host",
    ),
    Rule(
        code="allocator",
        removes=removals.named("allocator"),
        says="the device is idle {time} while the host takes memory from the driver or gives it back, in {count} calls",
        change="keep shapes constant, take torch.cuda.empty_cache() out of the loop, and set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: torch's allocator then keeps what it needs",
        limit="host",
    ),
    Rule(
        code="host-stall",
        removes=unless_cleared(removals.stalls(for_work=False)),
        says=_stall,
        change=_leave_out,
        limit="host",
    ),
    Rule(
        code="no-work",
        removes=unless_cleared(removals.stalls(for_work=True)),
        says="{idle} {time} because the program has nothing to do: it sits in {what}, {often}",
        change="nothing to fix in the model: a server needs more requests, or larger batches of them; where the program fills "
        "that queue itself, make what fills it faster (more workers, cheaper preprocessing)",
        limit="host",
    ),
    Rule(
        code="host-bound",
        removes=unless_cleared(Selection(kind="wait", on_device=removals.late_host, on_host=removals.python)),
        says=_host,
        change=_fewer_launches,
        limit="host",
        least_share=0.05,
    ),
    Rule(
        code="sync-in-loop",
        removes=Selection(kind="wait", on_device=removals.waits(copies=False), on_host=removals.reading),
        says=_read,
        change=_read_less_often,
        limit="host",
    ),
    Rule(
        code="blocking-copy",
        removes=Selection(kind="other", on_device=removals.waits(copies=True)),
        says=lambda facts, gone: _waited(facts, copies=True),
        change="copy from and to pinned memory with non_blocking=True, and wait for the copy only where its data is needed; "
        "launch the next work before asking for results",
        limit="host",
    ),
    Rule(
        code="launch-bound",
        removes=Selection(kind="wait", on_device=removals.launch_gaps),
        says=_short_gaps,
        change=_larger_kernels,
        limit="launch",
        least_share=0.05,
    ),
    Rule(
        code="dependency",
        removes=Selection(kind="wait", on_device=removals.late_work),
        says=_late_work,
        change=_look_outside,
        limit="unknown",
    ),
    Rule(
        code="communication-bound",
        removes=removals.exchanges,
        says=_communication,
        change=_overlap,
        limit="communication",
    ),
    Rule(
        code="straggler",
        removes=removals.straggler,
        says=_straggler,
        change="look at {what} by itself: more work than the others (uneven batches, sequence lengths, sharding), a slower loader, or a "
        "slower or shared device",
        limit="communication",
    ),
    Rule(
        code="copy-bound",
        removes=Selection(kind="other", on_device=removals.copies_alone),
        says=_copies,
        change="prefetch from pinned memory: copy the next batch with non_blocking=True on a stream of its own, started before this step's "
        "kernels are launched, and let their stream wait for it (wait_stream, wait_event), not the host",
        limit="data",
    ),
    Rule(
        code="attention",
        removes=Selection(
            kind="work",
            on_device=lambda seen: rows_of(seen, unfused_attention(seen.links)),
            on_host=operators(lambda seen: seen.attention),
        ),
        says="{part} is attention that is not fused: softmax and the batched products around it ({count} {pieces})",
        change="use torch.nn.functional.scaled_dot_product_attention: one kernel that never writes the scores to memory; where it falls back "
        "to its slow form (math), fp16 or bf16 and no mask that needs a gradient, so that a fused kernel fits",
        least_share=0.05,
    ),
    Rule(
        code="recompute",
        removes=Selection(
            kind="work",
            on_device=lambda seen: rows_of(seen, recomputed(seen.links)),
            on_host=removals.again,
        ),
        says="{part} is the forward pass done again during the backward ({what}): activation checkpointing",
        change="checkpoint fewer layers, as far as memory allows, or save the expensive ones (selective checkpointing)",
    ),
    Rule(
        code="layout-conversions",
        removes=removals.of_names(lambda name: name.converts_layout),
        says="{part} only turns one memory layout into the other ({what})",
        change=switch(
            "channels-last",
            "keep images in the layout the convolutions want",
            "model.to(memory_format=torch.channels_last), and the inputs too",
        ),
        least_share=0.03,
    ),
    Rule(
        code="fp32-matmul",
        removes=only_if(
            lambda profile: profile.hardware.has_tf32 or profile.hardware.has_fp16,
            Selection(
                kind="work",
                on_device=lambda seen: rows_of(
                    seen, strict_products(seen.links) & ~unfused_attention(seen.links), launches=False
                ),
                named=lambda name: name.is_strict_fp32,
            ),
        ),
        says="{part} is matrix products and convolutions in full fp32 ({what})",
        change=_matrix_units,
        least_share=0.1,
    ),
    Rule(
        code="batch-norm-eval",
        removes=only_if(
            lambda profile: not does(profile).folds_norms and not removals.trains_norms(profile),
            removals.of_names(lambda name: name.is_fixed_norm),
        ),
        says="{part} is batch-norm with fixed statistics ({what})",
        change=switch(
            "fold-bn",
            "a scale and a shift that the convolutions before can do themselves",
            "torch.fx.experimental.optimization.fuse(model.eval()), or torch.compile with inductor's freezing",
        ),
        least_share=0.03,
    ),
    Rule(
        code="elementwise",
        removes=only_if(
            lambda profile: profile.capture is None or not does(profile).compiles,
            Selection(
                kind="fused",
                on_device=removals.unfused,
                on_host=operators(removals.written_out),
                named=lambda name: name.is_unfused,
            ),
        ),
        says="{part} is elementwise {pieces} bound by memory ({what})",
        change=_fuse,
        least_share=0.2,
    ),
    Rule(
        code="copies",
        removes=Selection(kind="work", on_host=operators(removals.copying)),
        says="{part} only copies values from one place to another ({what}, {count} calls)",
        change="copy less: views instead of .contiguous() and .clone(), preallocated outputs (out=), one dtype and layout "
        "throughout",
        least_share=0.1,
        limit="memory",
    ),
    Rule(
        code="cold-start",
        removes=Selection(kind="other", on_device=removals.cold),
        says="the kernels of the first steps ({count}) take {seconds} longer than those of the same operators later, most of it "
        "{what}: caches or clocks were cold, or algorithms were compared (cudnn.benchmark)",
        change=RECORD_LATER,
    ),
    Rule(code="slow-kernel", removes=removals.beyond_need, says=_slow_kernel, change=_another_kernel, least_share=0.05),
    Rule(
        code="decode-memory-bound",
        removes=decoding(
            lambda found: found.reads_all_the_time,
            lambda found: found.decode_share * min(found.bandwidth_share or 0.0, 1.0) / 2,
        ),
        says=f"memory limits decoding: {_TOKEN}",
        change="half the bytes per token (bf16 weights, after that int8:weight-only), or a larger batch, which reads the weights once for "
        "all its sequences",
        limit="memory",
    ),
    Rule(
        code="decode-host-bound",
        removes=decoding(removals.is_late, removals.beyond_reading),
        says=f"the host limits decoding, it needs {{host}} of the time to issue a token: {_TOKEN}",
        change="static-cache+graphs takes Python out of the decode step; where it is in a graph already, a larger batch",
        limit="host",
    ),
    Rule(
        code="decode-slow-kernels",
        removes=decoding(removals.is_slow, removals.beyond_reading),
        says=f"neither the host nor memory limits decoding, its kernels are slow: {_TOKEN}",
        change="compile:coordinate-descent tunes kernels for reading weights, compile:pdl (Hopper) and decode-kernels (batches up to 4) begin "
        "to read before the kernel in front has ended; or a larger batch, which takes the same kernels for more sequences",
    ),
    Rule(
        code="prefill-bound",
        removes=decoding(lambda found: found.decode_share < MOSTLY, lambda found: 1 - found.decode_share),
        says="reading the prompt takes {prompt} of a generation: {first} to the first token",
        change="bf16, for products of the prompt on the matrix units; a shorter prompt, or keep the cache of a beginning that prompts share",
    ),
)
RULE_OF = {rule.code: rule for rule in RULES}


def diagnose(facts: TraceFacts) -> list[Finding]:
    """Returns whatever costs a noticeable share of the time, with what would save the most first. Of decoding there is one finding about
    the host."""
    found = [] if facts.profile.missing else findings_of(RULES, facts)
    told = {finding.code for finding in found}
    return [finding for finding in found if finding.code != "host-bound" or "decode-host-bound" not in told]


LIMITS = 0.1
"""A first finding that saves less than this share of the time is not what limits the steps."""
NO_SHAPES = note(
    SAME_AS_DEVICE.code,
    "host and device are the same; recorded with record_shapes=True, a trace also tells which operators are slow for their size",
)


def limit_of(profile: Profile, record: RunRecord | None, ceilings: Ceilings | None) -> Bound:
    """Return what limits the steps: what the first finding says, else the device by its work."""
    if profile.missing:
        return Bound(label="unknown", evidence=note("not-measured", profile.missing))
    if record is not None and (reading := first_limit(record, ceilings, "memory")) is not None:
        return reading
    for first in profile.findings[:1]:
        if (label := RULE_OF[first.code].limit) is not None and first.saves_s >= LIMITS * profile.whole_s:
            code = label if label in ("host", "launch", "data", "communication", "memory") else "not-measured"
            return Bound(label=label, evidence=note(code, first.evidence))
    if not profile.has_device:
        python = first_limit(record, ceilings, "outside-operators") if record is not None else None
        known = SAME_AS_DEVICE if profile.limits or record is not None else NO_SHAPES
        return python or by_work(record, ceilings, known, otherwise="device")
    share = min(profile.timeline.busy_s / profile.whole_s, 1.0) if profile.whole_s else 0.0
    busy = f"the device is busy {share:.0%} of the time"
    found = by_work(record, ceilings, note("device-busy", f"{busy}: it is the limit"))
    return found if found.label != "unknown" else _by_names_and_shapes(profile, share, busy) or found


def _by_names_and_shapes(profile: Profile, share: float, busy: str) -> Bound | None:
    """Work that makes up more than half of the device's time names its limit."""
    compute_s, memory_s = (
        sum(row.device_s for row in profile.limits if row.limited_by == side) for side in ("compute", "memory")
    )
    known_s = compute_s + memory_s
    if known_s and known_s >= MOSTLY * profile.timeline.busy_s:
        units = "the matrix units" if compute_s >= memory_s else "memory bandwidth"
        evidence = f"{busy}, {max(compute_s, memory_s) / known_s:.0%} of it in operators limited by {units}"
        return Bound(label="compute" if compute_s >= memory_s else "memory", evidence=note("work", evidence))
    moving = sum(row.share for row in profile.classes if row.name in MEMORY_CLASSES)
    if moving >= MOSTLY:
        text = f"{moving:.0%} of the device's work moves data and computes little"
        return Bound(label="memory", evidence=note("memory", text))
    if share < MOSTLY:
        return None
    unknown = "shapes were not recorded, or the device's peaks are not known"
    evidence = f"{busy}, but whether compute or memory limits it is not known: {unknown}"
    return Bound(label="device", evidence=note("device-busy", evidence))
