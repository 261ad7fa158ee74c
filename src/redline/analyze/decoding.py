"""These are the rules about what a generation waits for: the host, kernels that read slowly, memory itself, or the prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from redline.analyze.bound import HOST_BOUND_SHARE
from redline.analyze.finding import Advice, Removal, Rule
from redline.analyze.generation import Generation
from redline.analyze.remedies import does, recipe_of, try_recipe, with_switch
from redline.analyze.removals import TraceFacts
from redline.model.units import format_bytes, format_seconds, format_share
from redline.trace.host import MOSTLY

if TYPE_CHECKING:
    from redline.analyze.profile import Profile

HALF_BYTES = 2.5
"""Bytes per weight: more is fp32."""


def _generation(profile: Profile) -> Generation | None:
    """Returns what was measured of the generation without the profiler."""
    is_timed = profile.capture is not None and profile.capture.step_s and profile.steps
    return profile.generation if is_timed else None


def _is_slow(found: Generation) -> bool:
    """Returns true if its tokens are slower than reading what they need."""
    return found.tpot_s is not None and found.read_s is not None and not found.reads_all_the_time


def _is_late(found: Generation) -> bool:
    return _is_slow(found) and (found.host_share or 0.0) > HOST_BOUND_SHARE


def waits_for_host(profile: Profile) -> bool:
    """Returns true if the host is what limits decoding, which then has a finding of its own."""
    found = _generation(profile)
    return found is not None and _is_late(found)


def _removes(
    holds: Callable[[Generation], bool], share: Callable[[Generation], float]
) -> Callable[[TraceFacts], Removal | None]:
    """`share`: of a generation's time, what would be gone."""

    def removes(facts: TraceFacts) -> Removal | None:
        found = _generation(facts.profile)
        if found is None or not holds(found):
            return None
        saves_s = facts.profile.wall_s * max(share(found), 0.0)
        return Removal(saves_s=saves_s, seconds=saves_s)

    return removes


def _beyond_reading(found: Generation) -> float:
    return found.decode_share * (1 - (found.bandwidth_share or 0.0))


def _with_half_the_bytes(found: Generation) -> float:
    return found.decode_share * min(found.bandwidth_share or 0.0, 1.0) / 2


def _says(text: str) -> Callable[[TraceFacts, Removal], str]:
    """The text with its gaps filled by what is known of the generation."""

    def says(facts: TraceFacts, gone: Removal) -> str:
        found = facts.profile.generation
        assert found is not None
        return text.format(
            token="n/a" if found.tpot_s is None else format_seconds(found.tpot_s.p50),
            bytes=format_bytes(found.read_bytes),
            read=format_seconds(found.read_s),
            reached=format_share(found.bandwidth_share),
            host=format_share(found.host_share),
            prompt=format_share(1 - found.decode_share),
            first=format_seconds(found.ttft_s),
        )

    return says


_TOKEN = "a token takes {token}, and reading what it needs ({bytes}) {read} at the copy bandwidth: {reached} of it is reached"


def _fewer_bytes(facts: TraceFacts, removal: Removal) -> Advice:
    profile, found = facts.profile, facts.profile.generation
    assert found is not None
    shared = "a larger batch reads the weights once for all its sequences"
    if found.bytes_per_weight is None or does(profile).quantizes or not profile.has_device:
        return Advice(shared)
    switch = "bf16" if found.bytes_per_weight > HALF_BYTES else "int8:weight-only"
    return try_recipe(with_switch(profile, switch), f"half the bytes per token; {shared}")


def _without_python(facts: TraceFacts, removal: Removal) -> Advice:
    profile = facts.profile
    if does(profile).records_graph:
        return Advice("a larger batch: the decode step is in a graph already, so the host is late with something else")
    return try_recipe(with_switch(profile, "graphs"), "a graph takes Python out of the decode step")


FEW_SEQUENCES = 4
"""The switch decode-kernels is for batches up to this."""
_OTHER_PRODUCTS = ("int8", "fp8", "amp", "amp-bf16")


def _faster_kernels(facts: TraceFacts, removal: Removal) -> Advice:
    profile = facts.profile
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
        return try_recipe(with_switch(profile, "decode-kernels"), why)
    return Advice("a larger batch: it takes the same kernels for more sequences")


def _shorter_prompt(facts: TraceFacts, removal: Removal) -> Advice:
    profile = facts.profile
    assert profile.generation is not None
    if profile.has_device and (profile.generation.bytes_per_weight or 0.0) > HALF_BYTES:
        return try_recipe(with_switch(profile, "bf16"), "products of the prompt on the matrix units")
    return Advice(
        "a shorter prompt, or keep the cache of a beginning that prompts share; compile and graphs are of decoding"
    )


DECODING: tuple[Rule[TraceFacts], ...] = (
    Rule(
        code="decode-memory-bound",
        removes=_removes(lambda found: found.reads_all_the_time, _with_half_the_bytes),
        says=_says(f"memory limits decoding: {_TOKEN}"),
        change=_fewer_bytes,
        limit="memory",
    ),
    Rule(
        code="decode-host-bound",
        removes=_removes(_is_late, _beyond_reading),
        says=_says(f"the host limits decoding, it needs {{host}} of the time to issue a token: {_TOKEN}"),
        change=_without_python,
        limit="host",
    ),
    Rule(
        code="decode-slow-kernels",
        removes=_removes(lambda found: _is_slow(found) and not _is_late(found), _beyond_reading),
        says=_says(f"neither the host nor memory limits decoding, its kernels are slow: {_TOKEN}"),
        change=_faster_kernels,
    ),
    Rule(
        code="prefill-bound",
        removes=_removes(lambda found: found.decode_share < MOSTLY, lambda found: 1 - found.decode_share),
        says=_says("reading the prompt takes {prompt} of a generation: {first} to the first token"),
        change=_shorter_prompt,
    ),
)
