"""Which recipes to try next: those the bench found applicable to this model here, and that the device can gain from.

A number format helps where the device multiplies faster in it, as its own ceilings say. What nobody has measured is
believed of a GPU, whose formats differ by factors, and not of a CPU, which emulates most of them.
"""

from __future__ import annotations

from collections.abc import Collection

from redline.record import RunRecord
from redline.spec import Recipe
from redline.work import Ceilings

SUGGESTED = 2
FASTER_FORMAT = 1.3
"""Products in the format over products in fp32, at least: casting costs time too."""
FORMATS = {
    "tf32": "tf32",
    "fp16": "fp16",
    "bf16": "bf16",
    "amp": "fp16",
    "amp-bf16": "bf16",
}
"""What switches that change the number format compute in."""


def worth_trying(
    record: RunRecord, ceilings: Ceilings | None, *, host_bound: bool = False, known: Collection[str] = ()
) -> tuple[str, ...]:
    """At most two recipes, the more promising last; empty where nothing is known to help. `known`: measured already."""
    if record.prepared is None or record.failure is not None:
        return ()
    done = {Recipe.parse(text).canonical() for text in (*known, str(record.spec.recipe))}
    options = [text for text in record.prepared.applicable if Recipe.parse(text).canonical() not in done]
    helpful = [text for text in options if _device_gains(text, record, ceilings)]
    if host_bound:
        helpful.sort(key=lambda text: not _takes_python_out(text))
    return tuple(reversed(helpful[:SUGGESTED]))


def _device_gains(text: str, record: RunRecord, ceilings: Ceilings | None) -> bool:
    formats = {FORMATS[switch.name] for switch in Recipe.parse(text).switches if switch.name in FORMATS}
    if not formats:
        return True
    work = record.prepared.work if record.prepared else None
    if work is not None and work.total_flops == 0:
        return False  # nothing is multiplied
    if ceilings is None or "fp32" not in ceilings.flops_per_s:
        return record.prepared is not None and record.prepared.environment.device.kind != "cpu"
    plain = ceilings.flops_per_s["fp32"]
    return all(ceilings.flops_per_s.get(form, 0.0) >= FASTER_FORMAT * plain for form in formats)


def _takes_python_out(text: str) -> bool:
    return any(
        switch.name == "graphs" or switch.argument == "reduce-overhead" for switch in Recipe.parse(text).switches
    )
