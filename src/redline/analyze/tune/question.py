"""Whether two searches ask the same: only then does one go on where the other stopped."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from redline.analyze.tune.record import TuneSpec
from redline.spec import LaunchSpec, RunSpec

LISTS = ("steps", "without", "seeds")
"""Their order asks nothing."""


def bare_question(asked: TuneSpec) -> TuneSpec:
    """Without what two searches that ask the same may differ in: how often it races, how it is launched, the order of lists."""
    return msgspec.structs.replace(
        asked,
        spec=msgspec.structs.replace(asked.spec, launch=LaunchSpec()),
        replicates=TuneSpec(spec=asked.spec).replicates,
        **{name: tuple(sorted(getattr(asked, name))) for name in LISTS},
    )


def differences(one: TuneSpec, other: TuneSpec) -> list[str]:
    """What differs, in the words in which it is asked for. How long it may take and how often it races does not count."""
    specs = dict.fromkeys([*_of_workloads(one.spec, other.spec), *_of_searches(one, other)])
    return list(specs)


def _of_workloads(one: RunSpec, other: RunSpec) -> Iterator[str]:
    for field in msgspec.structs.fields(one.workload):
        if getattr(one.workload, field.name) != getattr(other.workload, field.name):
            yield field.name.replace("_", "-")
    for name in ("device", "threads", "seed"):
        if getattr(one, name) != getattr(other, name):
            yield name
    if one.launch.memory_limit_bytes != other.launch.memory_limit_bytes:
        yield "max-memory"


def _of_searches(one: TuneSpec, other: TuneSpec) -> Iterator[str]:
    words = {
        "objective": "objective",
        "tunes_batch": "batch",
        "slo_p95_s": "slo-p95",
        "tolerance": "tolerance",
        "allow_quantized": "allow-quantized",
        "check": "check",
    }
    for name, word in words.items():
        if getattr(one, name) != getattr(other, name):
            yield word
    for name, word in zip(LISTS, ("steps", "without", "recipe"), strict=True):
        if set(getattr(one, name)) != set(getattr(other, name)):
            yield word
