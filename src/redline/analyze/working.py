"""Work that could be done in another way: less of it, or by faster kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redline.analyze.bound import HOST_BOUND_SHARE
from redline.analyze.finding import (
    LARGEST_GAIN,
    LEAST_SHARE,
    Advice,
    Finding,
    advice,
    does,
    finding_of,
    recipe_of,
    try_recipe,
    whole_work_s,
    with_switch,
)
from redline.analyze.generation import Generation
from redline.analyze.waiting import Rule
from redline.model.units import format_bytes, format_seconds, format_share
from redline.trace.losses import Loss, LossCode

if TYPE_CHECKING:
    from redline.analyze.profile import Profile

LAYOUT_SHARE = 0.03
NORM_SHARE = 0.03
FP32_SHARE = 0.10
ELEMENTWISE_SHARE = 0.20
SHORT_CALL_S = 20e-6
ATTENTION_SHARE = 0.05
RECOMPUTE_SHARE = 0.03
COLD_SHARE = 0.02
HALF_BYTES = 2.5
"""Per weight: more is fp32."""
"""Of the device's work: below these, mending it is not worth the trouble."""


def _part(profile: Profile, loss: Loss) -> float:
    whole = whole_work_s(profile)
    return loss.seconds / whole if whole else 0.0


def attention(profile: Profile, loss: Loss) -> Finding | None:
    """Attention written out: products, scaling, mask and softmax one by one, with the whole matrix of scores in memory."""
    share = _part(profile, loss)
    if share < ATTENTION_SHARE:
        return None
    by_torch = any("_scaled_dot_product_attention_math" in row.name for row in profile.operators)
    falls_back = (
        "scaled_dot_product_attention falls back to its slow form here: use fp16 or bf16, and no mask that needs a "
        "gradient, so that a fused kernel fits"
    )
    fused = "use torch.nn.functional.scaled_dot_product_attention: one kernel that never writes the scores to memory"
    return finding_of(
        profile,
        loss,
        "attention",
        evidence=f"{share:.0%} of the device's work is attention that is not fused: softmax and the batched products around "
        f"it ({loss.count:,} {'kernels' if profile.has_device else 'operators'})",
        todo=falls_back if by_torch else fused,
    )


def layout_conversions(profile: Profile, loss: Loss) -> Finding | None:
    """Kernels that only turn NCHW into NHWC and back around convolutions."""
    share = _part(profile, loss)
    if share < LAYOUT_SHARE:
        return None
    if any(switch.name == "channels-last" for switch in recipe_of(profile)):
        next_step = Advice(
            "look in the operator table for what brings the other layout back: channels-last is on already"
        )
    else:
        next_step = advice(
            profile,
            "channels-last",
            "keep images in the layout the convolutions want",
            "model.to(memory_format=torch.channels_last), and the inputs too",
        )
    evidence = f"{share:.0%} of the device's work only turns one memory layout into the other ({loss.what})"
    return finding_of(profile, loss, "layout-conversions", evidence=evidence, todo=next_step)


def fp32_products(profile: Profile, loss: Loss) -> Finding | None:
    """Matrix products and convolutions in full fp32, which leave the matrix units idle."""
    share = _part(profile, loss)
    hardware = profile.hardware
    if share < FP32_SHARE or not (hardware.has_tf32 or hardware.has_fp16):
        return None
    on_amd = hardware.maker == "amd"
    check = "the numerics check tells what it costs" if profile.capture is not None else "compare the outputs"
    tf32_is_on = any(switch.name == "tf32" for switch in recipe_of(profile))
    if tf32_is_on:
        next_step = advice(profile, "amp", f"tf32 is on, and these kernels do not use it; {check}", "torch.autocast")
    elif hardware.has_tf32:
        next_step = advice(
            profile,
            "tf32",
            f"tensor cores{', or amp for more' if profile.capture is not None else ''}; {check}",
            "torch.backends.fp32_precision = 'tf32' (or torch.set_float32_matmul_precision('high')), or autocast for more",
        )
    elif hardware.maker == "nvidia" and hardware.capability is None and profile.capture is None:
        next_step = Advice(
            "autocast to fp16: tensor cores; on an A100 or newer also torch.set_float32_matmul_precision('high'). "
            "The trace does not say which GPU it was"
        )
    else:
        why = "matrix cores" if on_amd else "tensor cores; this GPU has none for fp32"
        form = "torch.bfloat16" if hardware.has_bf16 else "torch.float16"
        next_step = advice(
            profile,
            "amp",
            f"{why}; {check}",
            f"torch.autocast('cuda', dtype={form}), with a GradScaler when training in fp16",
        )
    evidence = f"{share:.0%} of the device's work is matrix products and convolutions in full fp32 ({loss.what})"
    return finding_of(profile, loss, "fp32-matmul", evidence=evidence, todo=next_step)


def batch_norm_in_eval(profile: Profile, loss: Loss) -> Finding | None:
    """Batch-norm with fixed statistics is a scale and a shift, which the convolution before can do itself."""
    share = _part(profile, loss)
    if share < NORM_SHARE or does(profile).folds_norms:
        return None
    next_step = advice(
        profile,
        "fold-bn",
        "a scale and a shift that the convolutions before can do themselves",
        "torch.fx.experimental.optimization.fuse(model.eval()), or torch.compile with inductor's freezing",
    )
    evidence = f"{share:.0%} of the device's work is batch-norm with fixed statistics ({loss.what})"
    return finding_of(profile, loss, "batch-norm-eval", evidence=evidence, todo=next_step)


def unfused_elementwise(profile: Profile, loss: Loss) -> Finding | None:
    """Elementwise kernels, one by one: each reads and writes all of memory for one operation."""
    share = _part(profile, loss)
    compiled = does(profile).compiles
    if share < ELEMENTWISE_SHARE or (compiled and profile.capture is not None):
        return None
    next_step = (
        Advice(
            "part of the program runs outside what torch.compile fuses: TORCH_LOGS=graph_breaks says where; the optimizer "
            "can be fused or compiled too"
        )
        if compiled
        else advice(
            profile, "compile", "fuse them, so that each value is read and written once", "torch.compile(model)"
        )
    )
    each_s = loss.seconds / max(loss.count, 1)
    # An operator that a CPU is through with so soon was called for longer than it moved memory.
    kind = f"{'kernels' if profile.has_device else 'operators'} bound by memory"
    if not profile.has_device and each_s <= SHORT_CALL_S:
        kind = "operators, mostly their calls"
    evidence = f"{share:.0%} of the device's work is elementwise {kind} ({loss.what})"
    return finding_of(profile, loss, "elementwise", evidence=evidence, todo=next_step)


def recompute(profile: Profile, loss: Loss) -> Finding | None:
    """Activation checkpointing pays with time for memory."""
    share = _part(profile, loss)
    if share < RECOMPUTE_SHARE:
        return None
    return finding_of(
        profile,
        loss,
        "recompute",
        evidence=f"{share:.0%} of the device's work is the forward pass done again during the backward ({loss.what}): "
        "activation checkpointing",
        todo="checkpoint fewer layers, as far as memory allows, or save the expensive ones (selective checkpointing)",
    )


def cold_start(profile: Profile, loss: Loss) -> Finding | None:
    """The first steps ran on cold caches and clocks."""
    if _part(profile, loss) < COLD_SHARE:
        return None
    steps = f"{loss.count} steps" if loss.count > 1 else "step"
    return finding_of(
        profile,
        loss,
        "cold-start",
        evidence=f"the kernels of the first {steps} take {format_seconds(loss.seconds)} longer than those of the same operators "
        f"later, most of it {loss.what}: caches or clocks were cold, or algorithms were compared (cudnn.benchmark)",
        todo="record later steps: torch.profiler.schedule(wait=…, warmup=…) skips the first ones",
    )


def decoding(profile: Profile) -> list[Finding]:
    """What a generation waits for: the host, kernels that read slowly, memory itself; or the prompt."""
    found = profile.generation
    if found is None or profile.capture is None or not profile.capture.step_s or not profile.steps:
        return []
    whole_s = profile.capture.step_s * profile.steps.count
    decode_s = whole_s * found.decode_share
    rules = (_decode(profile, found, decode_s, whole_s), _prefill(profile, found, whole_s - decode_s, whole_s))
    return [each for each in rules if each is not None and each.saves_s >= LEAST_SHARE * whole_s]


def _timed_finding(code: str, evidence: str, todo: Advice, saves_s: float, most_s: float, whole_s: float) -> Finding:
    """A finding whose seconds are those of steps without the profiler."""
    left_s = whole_s - most_s
    gain = min(whole_s / left_s, LARGEST_GAIN) if left_s > 0 else LARGEST_GAIN
    return Finding(code=code, evidence=evidence, next=todo.text, recipe=todo.recipe, gain_bound=gain, saves_s=saves_s)


def _decode(profile: Profile, found: Generation, decode_s: float, whole_s: float) -> Finding | None:
    if found.tpot_s is None or found.read_s is None or found.bandwidth_share is None:
        return None
    each, least = format_seconds(found.tpot_s.p50), format_seconds(found.read_s)
    told = (
        f"a token takes {each}, and reading what it needs ({format_bytes(found.read_bytes)}) {least} at the copy "
        f"bandwidth: {format_share(found.bandwidth_share)} of it is reached"
    )
    saves_s = decode_s * max(1 - found.bandwidth_share, 0.0)
    if found.reads_all_the_time:
        saves_s = decode_s * min(found.bandwidth_share, 1.0) / 2  # with half the bytes
        code, evidence, todo = "decode-memory-bound", f"memory limits decoding: {told}", _fewer_bytes(profile, found)
    elif found.host_share is not None and found.host_share > HOST_BOUND_SHARE:
        code, todo = "decode-host-bound", _without_python(profile)
        share = format_share(found.host_share)
        evidence = f"the host limits decoding, it needs {share} of the time to issue a token: {told}"
    else:
        code, todo = "decode-slow-kernels", _faster_kernels(profile)
        evidence = f"neither the host nor memory limits decoding, its kernels are slow: {told}"
    return _timed_finding(code, evidence, todo, saves_s, saves_s, whole_s)


def _fewer_bytes(profile: Profile, found: Generation) -> Advice:
    shared = "a larger batch reads the weights once for all its sequences"
    if found.bytes_per_weight is None or does(profile).quantizes or not profile.has_device:
        return Advice(shared)
    switch = "bf16" if found.bytes_per_weight > HALF_BYTES else "int8:weight-only"
    return try_recipe(with_switch(profile, switch), f"half the bytes per token; {shared}")


def _without_python(profile: Profile) -> Advice:
    if does(profile).records_graph:
        return Advice("a larger batch: the decode step is in a graph already, so the host is late with something else")
    return try_recipe(with_switch(profile, "graphs"), "a graph takes Python out of the decode step")


FEW_SEQUENCES = 4
"""What the switch decode-kernels is for."""
_OTHER_PRODUCTS = ("int4", "int8", "fp8", "amp", "amp-bf16")


def _faster_kernels(profile: Profile) -> Advice:
    if not does(profile).compiles:
        return try_recipe(with_switch(profile, "compile"), "fewer kernels, each of which reads its operands once")
    arguments = {switch.argument for switch in recipe_of(profile) if switch.name == "compile"}
    hardware = profile.hardware
    if profile.has_device and not arguments & {"coordinate-descent", "pdl"}:
        why = "products of one row become kernels that are tuned for reading weights"
        return try_recipe(with_switch(profile, "compile:coordinate-descent"), why)
    if "coordinate-descent" in arguments and hardware.maker == "nvidia" and (hardware.capability or (0, 0)) >= (9, 0):
        why = "the same kernels, each of which begins while the one before ends"
        return try_recipe(with_switch(profile, "compile:pdl"), why)
    batch = profile.capture.batch if profile.capture is not None else None
    taken = {switch.name for switch in recipe_of(profile)} & {"decode-kernels", *_OTHER_PRODUCTS}
    if profile.has_device and batch is not None and batch <= FEW_SEQUENCES and not taken:
        why = "kernels for products of a few rows, which begin to read before the kernel in front has ended"
        backends = [str(switch) for switch in recipe_of(profile) if switch.name == "sdpa"]
        return try_recipe(with_switch(profile, "decode-kernels", without=backends), why)
    return Advice("a larger batch: it takes the same kernels for more sequences")


def _prefill(profile: Profile, found: Generation, prefill_s: float, whole_s: float) -> Finding | None:
    if found.decode_share >= 0.5:
        return None
    evidence = (
        f"reading the prompt takes {format_share(1 - found.decode_share)} of a generation: "
        f"{format_seconds(found.ttft_s)} to the first token"
    )
    todo = Advice(
        "a shorter prompt, or keep the cache of a beginning that prompts share; compile and graphs are of decoding"
    )
    if profile.has_device and (found.bytes_per_weight or 0.0) > HALF_BYTES:
        todo = try_recipe(with_switch(profile, "bf16"), "products of the prompt on the matrix units")
    return _timed_finding("prefill-bound", evidence, todo, prefill_s / 2, prefill_s, whole_s)


WORKING: dict[LossCode, Rule] = {
    "attention": attention,
    "layout": layout_conversions,
    "fp32": fp32_products,
    "norm": batch_norm_in_eval,
    "elementwise": unfused_elementwise,
    "recompute": recompute,
    "cold": cold_start,
}
