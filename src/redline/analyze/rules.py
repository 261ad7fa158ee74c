"""The rules of the diagnosis: what a cause is called, what it removes, what it says, what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redline.analyze import removals
from redline.analyze.bound import SAME_AS_DEVICE, Bound, BoundLabel, by_work, reads_all_the_time, runs_python
from redline.analyze.decoding import DECODING, waits_for_host
from redline.analyze.finding import Advice, Finding, Removal, Rule, findings_of
from redline.analyze.remedies import advice, does, is_about_code, recipe_of, switch, try_recipe, with_graphs
from redline.analyze.removals import Selection, TraceFacts, only_if, operators, rows_of, unless_cleared
from redline.model.note import Code, note
from redline.model.record import RunRecord
from redline.model.units import format_bytes, format_seconds, format_share
from redline.model.work import Ceilings
from redline.trace.names import MEMORY_CLASSES, label_of
from redline.trace.patterns import recomputed, strict_products, unfused_attention

if TYPE_CHECKING:
    from redline.analyze.profile import Profile

GRAPH_BREAKS = "part of the program runs outside what torch.compile fuses: TORCH_LOGS=graph_breaks says where"
GRAPHS_IN_CODE = "torch.compile(model, mode='reduce-overhead'), or torch.cuda.graph around the step"


# The device waits


def _host(facts: TraceFacts, gone: Removal) -> str:
    profile, words = facts.profile, facts.words(gone)
    if not profile.has_device:
        return f"no operator runs {gone.seconds / facts.span_s:.0%} of the time: Python between one operator and the next, {words['often']}"
    launches, steps = profile.launches, profile.steps_seen
    often = f"{launches.calls / steps:.0f} launches a step" if steps else f"{launches.calls:,} launches"
    each = f", {format_seconds(launches.mean_call_s)} of host each" if launches.mean_call_s else ""
    beside = f"; meanwhile a thread that launches nothing runs {gone.what}" if gone.what else ""
    issued = profile.capture.issue_share if profile.capture is not None else None
    known = f"issue/step {issued:.2f}, without the profiler: " if issued is not None else ""
    return f"{known}the device waits for the host {words['time']}; {often}{each}{beside}"


def _fewer_launches(facts: TraceFacts, gone: Removal) -> Advice:
    profile = facts.profile
    if not profile.has_device:
        if does(profile).compiles:
            return Advice(f"{GRAPH_BREAKS}; or a larger batch")
        why = "fewer operators, called without Python in between; or a larger batch"
        return advice(profile, "compile", why, "torch.compile(model)")
    if gone.what and is_about_code(profile):
        return Advice(
            "move what the other thread does to a process of its own (DataLoader workers): threads of one process share one "
            "interpreter and slow each other down; then torch.compile(model, mode='reduce-overhead') for fewer launches"
        )
    if does(profile).records_graph:
        generates = profile.capture is not None and profile.capture.task == "generate"
        late = (
            "of the decode step; the prompt is read without one"
            if generates
            else "so the host is late with something else"
        )
        return Advice(f"a larger batch: graphs are on already, {late}")
    if is_about_code(profile):
        return Advice(f"{GRAPHS_IN_CODE}, so that Python launches one graph instead of every kernel; or a larger batch")
    return try_recipe(with_graphs(profile), "a CUDA graph takes Python out of the step; or a larger batch")


def _stall(facts: TraceFacts, gone: Removal) -> str:
    on_device = facts.profile.has_device
    idle, nothing = (
        ("the device waits", " in which the host launches nothing") if on_device else ("no operator runs", "")
    )
    stretches, mean = ("one stretch", "") if gone.count == 1 else (f"{gone.count:,} stretches", " each on average")
    length = format_seconds(gone.seconds / max(gone.count, 1))
    inside = f"; most of it in {gone.what}" if gone.what else ""
    return f"{idle} {facts.words(gone)['time']} in {stretches}{nothing}, {length}{mean}{inside}"


def _leave_out(facts: TraceFacts, gone: Removal) -> str:
    profile = facts.profile
    how = "capture with --stacks" if profile.capture is not None else "record with with_stack=True"
    see = "" if gone.what else f" ({how} to see the Python functions)"
    also = "" if gone.what or profile.steps_seen else ". A server that has no requests looks the same"
    unseen = profile.has_device and all(wait.copies for wait in profile.waits)
    also += ". No call that waits for the device was recorded: it may wait there" if unseen else ""
    return (
        "take what the program does there out of the step, or do it less often or in another process: logging, "
        f"metrics, checkpoints, preprocessing on the host{see}{also}"
    )


def _waited(facts: TraceFacts, *, copies: bool) -> str:
    sites, steps = [wait for wait in facts.profile.waits if wait.copies == copies], facts.profile.steps_seen
    what = "copies that block the host" if copies else "calls that wait for the device"
    where = ""
    if sites:
        first = sites[0]
        called = f", called by {first.operator}" if first.operator else ""
        frame = f" in {first.frame}" if first.frame else ""
        a_step = "once a step" if steps == first.calls else f"{first.calls / steps:.3g} times a step" if steps else ""
        often = a_step or ("once" if first.calls == 1 else f"{first.calls:,} times")
        where = f": {first.call}{called}{frame}, {often}, {format_seconds(first.blocked_s)} in all"
    blocked = format_seconds(sum(wait.blocked_s for wait in sites))
    return f"the host spends {blocked} in {what} and launches the next work only then{where}"


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


def _record_later(facts: TraceFacts, gone: Removal) -> str:
    again = "; if later steps do it too, TORCH_LOGS=recompiles says why" if does(facts.profile).compiles else ""
    return f"record later steps: torch.profiler.schedule(wait=…, warmup=…) skips the first ones{again}"


def _short_gaps(facts: TraceFacts, gone: Removal) -> str:
    launches = facts.profile.launches
    return (
        f"{facts.words(gone)['time']} lies in short gaps between kernels that were launched in time; {launches.short_share:.0%} "
        f"of the kernels take no more than 10 µs (median {format_seconds(launches.median_kernel_s)})"
    )


def _larger_kernels(facts: TraceFacts, gone: Removal) -> Advice:
    profile, program = facts.profile, does(facts.profile)
    if program.records_graph and (program.compiles or profile.capture is None):
        return Advice(f"a larger batch: the kernels are in a graph already{' and fused' * program.compiles}")
    if program.records_graph or not program.compiles:
        return advice(profile, "compile", "fewer, larger kernels", "torch.compile(model)")
    close = "the kernels of a replayed graph follow each other closely"
    return Advice(f"{GRAPHS_IN_CODE}: {close}") if is_about_code(profile) else try_recipe(with_graphs(profile), close)


def _launches_missing(profile: Profile) -> float:
    """Return the share of the device's work for which the trace holds no launch."""
    return sum(row.device_share for row in profile.operators if row.source == "no-launch")


def _late_work(facts: TraceFacts, gone: Removal) -> str:
    idle, missing = facts.profile.idle, _launches_missing(facts.profile)
    event, unknown = format_seconds(idle.dependency_s), format_seconds(idle.unknown_s)
    parts = (
        f"{event} of it before work that waits for an event of another stream" if idle.dependency_s else "",
        f"{unknown} for reasons that are not in the trace" if idle.unknown_s else "",
        f"for {missing:.0%} of the device's work the trace holds no launch" if missing else "",
    )
    before = f"the device is idle {facts.words(gone)['time']} before work that the host had not kept waiting"
    return f"{before}: {', '.join(filter(None, parts))}"


def _look_outside(facts: TraceFacts, gone: Removal) -> str:
    if _launches_missing(facts.profile) > facts.profile.idle.dependency_s / max(gone.seconds, 1e-12):
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


def _prefetch(facts: TraceFacts, gone: Removal) -> str:
    moves = [row for row in facts.profile.copies if row.kind == "copy"]
    pageable = any("pageable" in row.name.lower() for row in moves)
    pinned = "pinned memory first (copies from pageable memory block the host), then " if pageable else ""
    if moves and moves[0].is_apart:
        return (
            f"{pinned}start the copy of the next batch before this step's kernels are launched, and let their stream wait for it "
            "(wait_stream, wait_event), not the host: it has a stream of its own, but nothing runs beside it"
        )
    return f"{pinned}prefetch: copy the next batch with non_blocking=True on a stream of its own"


def _communication(facts: TraceFacts, gone: Removal) -> str:
    profile, timeline = facts.profile, facts.profile.timeline
    hidden = 1 - timeline.exposed_communication_s / max(timeline.communication_s, 1e-12)
    often = profile.gradient_reductions or 1
    repeated = f"; gradients are reduced {often} times for each step of the optimizer" if often > 1 else ""
    most = ""
    if profile.collectives:
        row = profile.collectives[0]
        size = f" of {format_bytes(row.message_bytes)}" if row.message_bytes else ""
        speed = f" at {row.bus_bytes_per_s / 1e9:.1f} GB/s on the bus" if row.bus_bytes_per_s else ""
        most = f"; most of it {row.name}{size}{speed}"
    taken = f"communication with nothing computed beside it takes {facts.words(gone)['time']}"
    return f"{taken}; {hidden:.0%} is hidden{most}{repeated}"


_WIDE_TYPES = frozenset(("float", "float32", "double", "float64", ""))
"""Types of messages that could be narrower; a message without a named type may have any."""
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
    "sendrecv": _STAGES,
    "send": _STAGES,
    "recv": _STAGES,
    "broadcast": "DDP(broadcast_buffers=False) where the ranks need not share their buffers; else fewer, larger broadcasts",
}
"""How to wait less for what is exchanged most; reductions are in `_overlap`."""


def _overlap(facts: TraceFacts, gone: Removal) -> str:
    profile = facts.profile
    if (profile.gradient_reductions or 0) > 1:
        return (
            "reduce gradients once for each step of the optimizer: run all but its last micro-batch inside model.no_sync() "
            "(FSDP: no_sync() or set_requires_gradient_sync(False))"
        )
    if profile.collectives and profile.collectives[0].name in _EXCHANGES:
        return _EXCHANGES[profile.collectives[0].name]
    wide = any(row.dtype.lower() in _WIDE_TYPES for row in profile.collectives[:3])
    more = (
        "gradient accumulation under no_sync(), or bf16 gradients"
        if wide
        else "or gradient accumulation under no_sync()"
    )
    return (
        f"overlap it with the backward (larger DDP buckets, gradient_as_bucket_view), a larger batch per device, {more}"
    )


def _straggler(facts: TraceFacts, gone: Removal) -> str:
    worst, slowest = facts.profile.stragglers[0], facts.profile.slowest
    why = f"; {slowest.label}: {slowest.why}" if slowest is not None else ""
    return (
        f"ranks wait {facts.words(gone)['time']} inside collectives for the last one to arrive; {worst.label} is last in "
        f"{worst.last} of {worst.collectives}, the others wait {format_seconds(worst.waited_s)} for it{why}"
    )


# This work could be done in another way


def _fuse_attention(facts: TraceFacts, gone: Removal) -> str:
    if any("_scaled_dot_product_attention_math" in row.name for row in facts.profile.operators):
        return (
            "scaled_dot_product_attention falls back to its slow form here: use fp16 or bf16, and no mask that needs a "
            "gradient, so that a fused kernel fits"
        )
    return "use torch.nn.functional.scaled_dot_product_attention: one kernel that never writes the scores to memory"


def _keep_layout(facts: TraceFacts, gone: Removal) -> Advice:
    if any(one.name == "channels-last" for one in recipe_of(facts.profile)):
        return Advice("look in the operator table for what brings the other layout back: channels-last is on already")
    in_code = "model.to(memory_format=torch.channels_last), and the inputs too"
    return advice(facts.profile, "channels-last", "keep images in the layout the convolutions want", in_code)


def _matrix_units(facts: TraceFacts, gone: Removal) -> Advice:
    profile, hardware = facts.profile, facts.profile.hardware
    check = "the numerics check tells what it costs" if profile.capture is not None else "compare the outputs"
    if any(one.name == "tf32" for one in recipe_of(profile)):
        return advice(profile, "amp", f"tf32 is on, and these kernels do not use it; {check}", "torch.autocast")
    if hardware.has_tf32:
        in_code = "torch.backends.fp32_precision = 'tf32' (or torch.set_float32_matmul_precision('high')), or autocast for more"
        more = ", or amp for more" if profile.capture is not None else ""
        return advice(profile, "tf32", f"tensor cores{more}; {check}", in_code)
    if hardware.maker == "nvidia" and hardware.capability is None and profile.capture is None:
        return Advice(
            "autocast to fp16: tensor cores; on an A100 or newer also torch.set_float32_matmul_precision('high'). "
            "The trace does not say which GPU it was"
        )
    why = "matrix cores" if hardware.maker == "amd" else "tensor cores; this GPU has none for fp32"
    form = "torch.bfloat16" if hardware.has_bf16 else "torch.float16"
    in_code = f"torch.autocast('cuda', dtype={form}), with a GradScaler when training in fp16"
    return advice(profile, "amp", f"{why}; {check}", in_code)


def _fuse(facts: TraceFacts, gone: Removal) -> Advice:
    if does(facts.profile).compiles:
        return Advice(f"{GRAPH_BREAKS}; the optimizer can be fused or compiled too")
    why = "fuse them, so that each value is read and written once"
    return advice(facts.profile, "compile", why, "torch.compile(model)")


def _slow_kernel(facts: TraceFacts, gone: Removal) -> str:
    row = next(row for row in facts.profile.limits if row.label == gone.what)
    tflops = f"{row.flops_per_s / 1e12:.1f} TFLOP/s in {row.number_format}"
    reached = tflops if row.limited_by == "compute" else f"{row.bytes_per_s / 1e9:,.3g} GB/s"
    share = format_share(row.efficiency)
    return f"{gone.what} takes {format_seconds(row.device_s)} in {row.calls:,} calls at {share} of what {row.limit_of} allows ({reached})"


def _another_kernel(facts: TraceFacts, gone: Removal) -> Advice:
    profile = facts.profile
    row = next(row for row in profile.limits if row.label == gone.what)
    if row.kind == "attention":
        return Advice(
            "another kernel for it: newer flash attention or cuDNN's (torch.nn.attention.sdpa_kernel), head sizes and sequence lengths "
            "that are multiples of 64 or 128, or a larger batch: few heads do not fill the device"
        )
    if not profile.has_device and row.kind in ("convolution", "reduction"):
        why, in_code = (
            "kernels for that layout are faster on many processors",
            "model.to(memory_format=torch.channels_last)",
        )
        return advice(profile, "channels-last", why, in_code)
    why, in_code = (
        "kernels tuned for these shapes; or shapes that are multiples of 64",
        "torch.compile(model, mode='max-autotune')",
    )
    return advice(profile, "compile:max-autotune-no-cudagraphs", why, in_code)


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
        change=_record_later,
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
        removes=only_if(
            lambda profile: not waits_for_host(profile),
            unless_cleared(Selection(kind="wait", on_device=removals.late_host, on_host=removals.python)),
        ),
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
        change=_prefetch,
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
        change=_fuse_attention,
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
        change=_keep_layout,
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
        change=_record_later,
    ),
    Rule(code="slow-kernel", removes=removals.beyond_need, says=_slow_kernel, change=_another_kernel, least_share=0.05),
)


def diagnose(facts: TraceFacts) -> list[Finding]:
    """Whatever costs a noticeable share of the time, what would save the most first."""
    return [] if facts.profile.missing else findings_of((*RULES, *DECODING), facts)


LIMIT_OF = {rule.code: rule.limit for rule in (*RULES, *DECODING)}
LIMITS = 0.1
"""Share of the time: a first finding that saves less is not what limits the steps."""
MOSTLY = 0.5
"""Work that makes up more than half of the device's time names its limit."""
NO_SHAPES = note(
    SAME_AS_DEVICE.code,
    "host and device are the same; recorded with record_shapes=True, a trace also tells which operators are slow for their size",
)
_NOTES: dict[BoundLabel, Code] = {
    "host": "host",
    "launch": "launch",
    "data": "data",
    "communication": "communication",
    "memory": "memory",
}


def limit_of(profile: Profile, record: RunRecord | None, ceilings: Ceilings | None) -> Bound:
    """Return what limits the steps: what the first finding says, else the device by its work."""
    if profile.missing:
        return Bound(label="unknown", evidence=note("not-measured", profile.missing))
    if record is not None and (reading := reads_all_the_time(record, ceilings)) is not None:
        return reading
    first = next(iter(profile.findings), None)
    label = LIMIT_OF[first.code] if first is not None and first.saves_s >= LIMITS * profile.whole_s else None
    if first is not None and label is not None:
        return Bound(label=label, evidence=note(_NOTES.get(label, "not-measured"), first.evidence))
    if not profile.has_device:
        python = runs_python(record) if record is not None else None
        known = SAME_AS_DEVICE if profile.limits or record is not None else NO_SHAPES
        return python or by_work(record, ceilings, known, otherwise="device")
    share = min(profile.timeline.busy_s / profile.whole_s, 1.0) if profile.whole_s else 0.0
    busy = f"the device is busy {share:.0%} of the time"
    found = by_work(record, ceilings, note("device-busy", f"{busy}: it is the limit"))
    return found if found.label != "unknown" else _by_names_and_shapes(profile, share, busy) or found


def _by_names_and_shapes(profile: Profile, share: float, busy: str) -> Bound | None:
    sums = {
        kind: sum(row.device_s for row in profile.limits if row.limited_by == kind) for kind in ("compute", "memory")
    }
    known_s = sum(sums.values())
    if known_s and known_s >= MOSTLY * profile.timeline.busy_s:
        label: BoundLabel = "compute" if sums["compute"] >= sums["memory"] else "memory"
        units = "the matrix units" if label == "compute" else "memory bandwidth"
        evidence = f"{busy}, {sums[label] / known_s:.0%} of it in operators limited by {units}"
        return Bound(label=label, evidence=note("work", evidence))
    moving = sum(row.share for row in profile.classes if row.name in MEMORY_CLASSES)
    if moving >= MOSTLY:
        text = f"{moving:.0%} of the device's work moves data and computes little"
        return Bound(label="memory", evidence=note("memory", text))
    if share < MOSTLY:
        return None
    unknown = "shapes were not recorded, or the device's peaks are not known"
    evidence = f"{busy}, but whether compute or memory limits it is not known: {unknown}"
    return Bound(label="device", evidence=note("device-busy", evidence))
