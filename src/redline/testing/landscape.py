"""The truth behind a fake bench: how long steps really take, what they need, what breaks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, cast

from redline.protocol import SwitchChoice
from redline.record import Failure, Numerics
from redline.spec import RunSpec
from redline.work import Ceilings, Facts, WorkCount

T = TypeVar("T")
PerSpec: TypeAlias = T | Mapping[str, T] | Callable[[RunSpec], T]
"""One value for all; a function of the spec; or a table by `MODEL RECIPE`, recipe, model or `*`, tried in that order.

A table must have an entry for every spec it is asked about (`*` is one): the fake does not guess its own truth.
"""

EXACT = Numerics(rel_l2=0.0, cosine=1.0, top1_agreement=1.0, passed=True)


@dataclass(frozen=True, kw_only=True)
class MemoryTruth:
    """The figures of one spec. `needed` decides what fits; the others are what a bench would report."""

    needed: int
    allocated: int
    reserved: int
    """At its ease the allocator takes this much."""
    resident: int = 0


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """The truth behind a fake bench. Every sigma is relative: of the logarithm of the time."""

    step_s: PerSpec[float]
    """The median time of a step, before drift and offsets: what a perfect measurement would find."""
    ttft_s: PerSpec[float] = 0.0
    """Generation: how much of a step passes until the first token."""
    weight_bytes: int = 10**9
    """Generation: what every token reads."""
    copy_bytes_per_s: float = 1e12
    noise_sigma: float = 0.01
    noise_rho: float = 0.0
    """Correlation of one step's noise with the step before (AR(1)); it fades over the gap between two blocks."""
    drift_sigma: float = 0.0
    """Random walk shared by all sessions, per square root of a second: temperature, clocks, neighbours."""
    tail_share: float = 0.0
    """Share of steps that hit a hiccup, two to three times as long as the others and sometimes far longer."""
    offset_sigma: float = 0.0
    """Every session gets one offset of its own, as every real process does."""
    slow_share: float = 0.0
    """Share of sessions that are slower than the others for all their life, by `slow_factor`: another placement, a neighbour."""
    slow_factor: float = 1.0
    in_company: PerSpec[float] = 1.0
    """What a step takes, as a factor, from the moment another session of the same device has run in between."""
    memory_bytes: PerSpec[int | MemoryTruth] = 2**28
    """A plain number is what the step needs and what it reserves."""
    memory_limit_bytes: int | None = None
    """A spec that needs more, or more than its own limit, fails with kind `oom`."""
    compile_s: PerSpec[float] = 0.0
    build_s: float = 0.5
    start_s: float = 0.05
    slowdown_per_sibling: float = 0.0
    """By this share preparing takes longer for each sibling that is being prepared at the same time."""
    numerics: PerSpec[Numerics] = EXACT
    failure: PerSpec[Failure | None] = None
    """Scripted: `stage` says where it strikes (build, compile, numerics, warmup; measure, epoch, serve, profile)."""
    fails_after_blocks: int = 0
    """How many blocks succeed before a failure scripted for `measure` strikes."""
    issue_share: PerSpec[float] = 0.3
    """Host time to issue a step over the time of the step; near 1 the run is host-bound."""
    sync_s: float = 0.0
    """What a latency step pays on top, for synchronising."""
    step_synchronises: bool | None = False
    steady: bool = True
    device_kind: Literal["cuda", "rocm", "cpu"] = "cuda"
    """What `auto` means here."""
    throttle: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    power_w: PerSpec[float] | None = None
    default_batch: int = 32
    models: Collection[str] = ()
    """Names `AskModels` tells; any other name is accepted as well."""
    unknown_models: Collection[str] = ()
    unknown_switches: Collection[str] = ()
    work: PerSpec[WorkCount | None] = None
    """What counting a spec would find; None: nothing could be counted."""
    ceilings: Ceilings | None = None
    choices: Collection[SwitchChoice] = ()
    """What `AskSwitches` tells a tuner, whatever the model."""
    facts: Facts | None = None
    """What it tells of a few watched steps; None: they did not fit into memory."""
    metric: PerSpec[float] = 1.0
    """What a check of the user's says."""
    metric_failure: PerSpec[Failure | None] = None
    """What it raises instead."""
    load_s: PerSpec[float] = 0.0
    """Seconds in which one worker of a loader makes a batch."""
    cores: int | None = None
    accuracy: PerSpec[float] = 0.9
    """What a training comes near to."""
    fails_after_epochs: int = 0
    """How many epochs succeed before a failure scripted for `epoch` strikes."""
    seed: int = 0


def look_up(table: PerSpec[T], spec: RunSpec) -> T:
    """What a landscape says about one spec."""
    if isinstance(table, Mapping):
        recipe, model = str(spec.recipe), spec.workload.model
        for key in (f"{model} {recipe}", recipe, model, "*"):
            if key in table:
                return cast(T, table[key])
        raise KeyError(f"the landscape has no entry for {model} {recipe}")
    return table(spec) if callable(table) else table
