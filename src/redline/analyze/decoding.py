"""What a generation waits for: the host, kernels that read slowly, memory itself, or the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redline.analyze.bound import HOST_BOUND_SHARE
from redline.analyze.finding import LARGEST_GAIN, Advice, Finding, does, recipe_of, try_recipe, with_switch
from redline.analyze.generation import Generation
from redline.model.units import format_bytes, format_seconds, format_share
from redline.trace.selections import WORTH_A_LINE

if TYPE_CHECKING:
    from redline.analyze.profile import Profile

HALF_BYTES = 2.5
"""Bytes per weight: more is fp32."""


def decoding(profile: Profile) -> list[Finding]:
    """What a generation waits for: the host, kernels that read slowly, memory itself; or the prompt."""
    found = profile.generation
    if found is None or profile.capture is None or not profile.capture.step_s or not profile.steps:
        return []
    whole_s = profile.capture.step_s * profile.steps.count
    decode_s = whole_s * found.decode_share
    rules = (_decode(profile, found, decode_s, whole_s), _prefill(profile, found, whole_s - decode_s, whole_s))
    return [finding for finding in rules if finding is not None and finding.saves_s >= WORTH_A_LINE * whole_s]


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
