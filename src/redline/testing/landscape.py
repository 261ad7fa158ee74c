"""The landscape is the truth behind a fake bench: how long steps, trainings and generations really take, what they need, what breaks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from redline.model import record
from redline.model.protocol import SwitchChoice
from redline.model.record import (
    DATA_PHASE,
    Block,
    Capabilities,
    DataInfo,
    Epoch,
    Failure,
    Fed,
    FedPart,
    Memory,
    Numerics,
)
from redline.model.spec import DEFAULT_NEW_TOKENS, DEFAULT_PROMPT, RunSpec
from redline.model.work import Ceilings, Facts, GenerationInfo, WorkCount

T = TypeVar("T")
PerSpec: TypeAlias = T | Mapping[str, T] | Callable[[RunSpec], T]
"""It is one value for all specs, a function of the spec, or a table by `MODEL RECIPE`, recipe, model or `*`, tried in that order.

A table must have an entry for every spec it is asked about (`*` is one): the fake does not guess its own truth.
"""

Pace: TypeAlias = Callable[[int, NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64] | float]
"""It returns factors on the times of steps, given the number of the process, the seconds since it was opened, and the world's clock."""

EXACT = Numerics(rel_l2=0.0, cosine=1.0, top1_agreement=1.0, passed=True)


@dataclass(frozen=True, kw_only=True)
class MemoryTruth:
    """These are the figures of one spec. `needed` decides what fits; the others are what a bench would report."""

    needed: int
    allocated: int
    reserved: int
    """At its ease the allocator takes this much."""
    resident: int = 0


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """A landscape is the truth behind a fake bench. Every sigma is relative: it is that of the logarithm of the time."""

    step_s: PerSpec[float]
    """This is the median time of a step before drift and offsets, which a perfect measurement would find."""
    ttft_s: PerSpec[float] = 0.0
    """In generation, this much of a step passes until the first token."""
    weight_bytes: int = 10**9
    """In generation, every token reads this much."""
    copy_bytes_per_s: float = 1e12
    noise_sigma: float = 0.01
    noise_rho: float = 0.0
    """One step's noise has this correlation with that of the step before (AR(1)); it fades over the gap between two blocks."""
    drift_sigma: float = 0.0
    """All sessions share a random walk, as of temperature, clocks and neighbours; this is its sigma per square root of a second."""
    tail_share: float = 0.0
    """This share of steps hits a hiccup: they are two to three times as long as the others and sometimes far longer."""
    offset_sigma: float = 0.0
    """Every session gets one offset of its own, as every real process does."""
    slow_share: float = 0.0
    """This share of sessions is slower for all their life, by `slow_factor`, as by another placement or a neighbour."""
    slow_factor: float = 1.0
    pace: Pace | None = None
    """It may be anything else that makes steps slower: a load that comes and goes, processes that warm up, every other process."""
    others_cores: Callable[[float], float] | None = None
    """It returns how many cores other processes keep busy at this time of the world's clock; only a CPU minds."""
    slowed_by_others: PerSpec[float] = 0.0
    """A step takes longer by this share for each such core, because it waits for a processor."""
    contended_factor: PerSpec[float] = 1.0
    """A step takes this many times as long from the moment another session of the same device has run in between."""
    memory_bytes: PerSpec[int | MemoryTruth] = 2**28
    """A plain number is what the step needs and what it reserves."""
    memory_limit_bytes: int | None = None
    """A spec that needs more, or more than its own limit, fails with kind `oom`."""
    compile_s: PerSpec[float] = 0.0
    build_s: float = 0.5
    start_s: float = 0.05
    slowdown_per_sibling: float = 0.0
    """Preparing takes longer by this share for each sibling that is being prepared at the same time."""
    numerics: PerSpec[Numerics] = EXACT
    failure: PerSpec[Failure | None] = None
    """This failure is scripted: `stage` says where it strikes (build, compile, numerics, warm-up; measure, epoch, load, profile)."""
    fails_after_blocks: int = 0
    """This many blocks are measured before a failure scripted for `measure` strikes."""
    issue_share: PerSpec[float] = 0.3
    """This is the host's time to issue a step over the time of the step; near 1 the run is host-bound."""
    sync_s: float = 0.0
    """A latency step takes this much longer, because it synchronises."""
    step_synchronises: bool | None = False
    steady: bool = True
    device_kind: Literal["cuda", "rocm", "cpu"] = "cuda"
    """The device `auto` means this kind here."""
    throttle: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    power_w: PerSpec[float] | None = None
    default_batch: int = 32
    models: Collection[str] = ()
    """`AskModels` tells these names; any other name is accepted as well."""
    unknown_models: Collection[str] = ()
    unknown_switches: Collection[str] = ()
    work: PerSpec[WorkCount | None] = None
    """Counting a spec finds this; None means that nothing could be counted."""
    ceilings: Ceilings | None = None
    choices: Collection[SwitchChoice] = ()
    """`AskSwitches` tells a tuner these choices, whatever the model is."""
    facts: Facts | None = None
    """It tells this of a few watched steps; None means that they did not fit into memory."""
    metric: PerSpec[float] = 1.0
    """A check of the user's returns this value."""
    metric_failure: PerSpec[Failure | None] = None
    """The check raises this instead, unless it is None."""
    load_s: PerSpec[float] = 0.0
    """One worker of a loader takes this many seconds to make a batch."""
    cores: int | None = None
    accuracy: PerSpec[float] = 0.9
    """The accuracy of a training comes near to this."""
    fails_after_epochs: int = 0
    """This many epochs are trained before a failure scripted for `epoch` strikes."""
    seed: int = 0


def look_up(table: PerSpec[T], spec: RunSpec) -> T:
    """Returns what a landscape says about one spec."""
    if isinstance(table, Mapping):
        recipe, model = str(spec.recipe), spec.workload.model
        for key in (f"{model} {recipe}", recipe, model, "*"):
            if key in table:
                return cast(T, table[key])
        raise KeyError(f"the landscape has no entry for {model} {recipe}")
    return table(spec) if callable(table) else table


TRAIN_SAMPLES, VAL_SAMPLES, CLASSES = 10_240, 2_048, 10
PHASES = {"forward": 0.33, "backward": 0.6, "optimizer": 0.07}
"""Each phase takes this share of a training step."""
VALIDATION = 0.25
"""A validation step takes this share of the time of a training step."""


def data_of(spec: RunSpec, truth: Landscape) -> DataInfo:
    assert spec.train is not None
    data = spec.train.data
    batch, samples = spec.workload.batch or truth.default_batch, data.train_samples or TRAIN_SAMPLES
    return DataInfo(
        name=data.name,
        train_samples=samples,
        val_samples=data.val_samples or VAL_SAMPLES,
        classes=CLASSES,
        shape=(3, 32, 32),
        fingerprint="fake",
        stem=spec.workload.stem or ("cifar" if "resnet" in spec.workload.model else None),
        steps_per_epoch=samples // batch,
        last_batch=samples % batch,
        last_batch_fate="dropped" if samples % batch else "none",
        learning_rate=spec.train.learning_rate or 0.1,
        workers=data.workers,
        augment=data.augment,
        random_labels=data.name == "synthetic",
    )


def epoch_of(spec: RunSpec, truth: Landscape, number: int, step_s: float, memory: Memory) -> tuple[Epoch, Block]:
    """Returns an epoch without noise, because tests look at what is made of it."""
    assert spec.train is not None
    info, settings = data_of(spec, truth), spec.train
    batch = spec.workload.batch or truth.default_batch
    wait_s = waiting_s(spec, truth, step_s, settings.data.workers, prefetch=settings.data.prefetch)
    steps = info.steps_per_epoch
    limit = settings.max_seconds
    most = steps if limit is None else max(1, min(steps, int(limit / (step_s + wait_s))))
    phases = {DATA_PHASE: wait_s, **{name: share * step_s for name, share in PHASES.items()}}
    learned = 1 - math.exp(-number)
    accuracy = 1 / CLASSES + (look_up(truth.accuracy, spec) - 1 / CLASSES) * learned
    train_s, validation_s = most * (step_s + wait_s), VALIDATION * step_s * info.val_samples / batch
    epoch = Epoch(
        number=number,
        seconds=train_s + validation_s,
        train_s=train_s,
        validation_s=validation_s,
        steps=most,
        samples=most * batch,
        train_loss=math.log(CLASSES) * (1 - 0.9 * learned),
        val_loss=math.log(CLASSES) * (1 - 0.8 * learned),
        val_accuracy=accuracy,
        learning_rate=info.learning_rate,
        phases_s={name: most * seconds for name, seconds in phases.items()},
        peak_bytes=memory.peak_rss_bytes if memory.peak_reserved_bytes is None else memory.peak_reserved_bytes,
        utilisation=step_s / (step_s + wait_s),
        energy_j=None if truth.power_w is None else look_up(truth.power_w, spec) * train_s,
        is_cut=most < steps,
    )
    block = Block(
        kind="throughput",
        clock="host",
        samples=(step_s + wait_s,) * most,
        phases={name: (seconds,) * most for name, seconds in phases.items()},
        wall_s=train_s,
        round=number,
        memory=memory,
        energy_j=epoch.energy_j,
    )
    return epoch, block


def fed_of(
    spec: RunSpec, truth: Landscape, part: FedPart, seconds: float, step_s: float, workers: int, prefetch: bool
) -> Fed:
    batch = spec.workload.batch or truth.default_batch
    wait_s = waiting_s(spec, truth, step_s, workers, prefetch=prefetch)
    loading_s = max(look_up(truth.load_s, spec) / max(1, workers), 1e-6)
    each_s = {"loader": loading_s, "model": step_s, "together": step_s + wait_s}[part]
    return Fed(
        part=part,
        samples=round(seconds / each_s * batch),
        seconds=seconds,
        wait_s=seconds * wait_s / each_s if part == "together" else 0.0,
        workers=workers,
        prefetch=prefetch,
    )


def waiting_s(spec: RunSpec, truth: Landscape, step_s: float, workers: int, *, prefetch: bool) -> float:
    """Returns how long a step waits for its batch, which is no time if loading fits beside the step before."""
    loading_s = look_up(truth.load_s, spec) / max(1, workers)
    return loading_s if not workers and not prefetch else max(0.0, loading_s - step_s)


def generation_info_of(spec: RunSpec, truth: Landscape) -> GenerationInfo | None:
    if spec.workload.task != "generate":
        return None
    return GenerationInfo(
        prompt=spec.workload.prompt or DEFAULT_PROMPT,
        new_tokens=spec.workload.new_tokens or DEFAULT_NEW_TOKENS,
        weight_bytes=truth.weight_bytes,
        read_bytes=truth.weight_bytes,
        cache_bytes=0,
        copy_bytes_per_s=truth.copy_bytes_per_s,
        is_static=(is_static := any(switch.name == "static-cache" for switch in spec.recipe.switches)),
        cache="static" if is_static else "growing",
    )


def generation_parts_of(spec: RunSpec, truth: Landscape, times: NDArray[np.float64]) -> dict[str, Any]:
    """Returns fields of a block: the prefill has its share of each generation, and the tokens after the first share the rest."""
    if spec.workload.task != "generate":
        return {}
    step_s = look_up(truth.step_s, spec)
    first = times * (look_up(truth.ttft_s, spec) / step_s)
    others = (spec.workload.new_tokens or DEFAULT_NEW_TOKENS) - 1
    each = np.repeat((times - first) / max(others, 1), others)
    issued = (times - first) / max(others, 1) * look_up(truth.issue_share, spec)
    return {
        "phases": {"prefill": tuple(first.tolist()), "decode": tuple((times - first).tolist())},
        "token_s": tuple(each.tolist()),
        "token_issue_s": tuple(issued.tolist()) if truth.device_kind != "cpu" and others else (),
    }


def device_of(spec: RunSpec, truth: Landscape) -> str:
    if spec.device != "auto":
        return spec.device
    return "cpu" if truth.device_kind == "cpu" else f"{truth.device_kind}:0"


def kind_of(device: str) -> str:
    return device.partition(":")[0]


def device_info(device: str, truth: Landscape) -> record.DeviceInfo:
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return record.DeviceInfo(kind=kind, name="fake cpu", memory_bytes=truth.memory_limit_bytes)
    return record.DeviceInfo(
        kind=kind,
        index=int(index or 0),
        name=f"fake {kind} device",
        driver="fake",
        memory_bytes=truth.memory_limit_bytes,
    )


def environment_of(device: str, truth: Landscape) -> record.Environment:
    return record.Environment(
        device=device_info(device, truth), hostname="fake", versions={"torch": "fake"}, logical_cores=truth.cores
    )


def workload_of(spec: RunSpec, truth: Landscape) -> record.WorkloadInfo:
    model, info = spec.workload.model, generation_info_of(spec, truth)
    return record.WorkloadInfo(
        source="fake",
        class_name=model,
        parameters=0,
        items_per_step=(spec.workload.batch or truth.default_batch) * (info.new_tokens if info is not None else 1),
        batch=spec.workload.batch or truth.default_batch,
        batch_from="source",
        item="tok" if info is not None else "img",
        model_hash=f"{zlib.crc32(model.encode()):08x}",
        input_hash=f"{zlib.crc32(msgspec.json.encode(spec.workload)):08x}",
    )


def capabilities_of(switch: str, truth: Landscape) -> Capabilities:
    """Returns what the landscape's choices say of a switch; one with options of its own has the capabilities of the plain switch."""
    told = {choice.switch: choice.capabilities for choice in truth.choices}
    return told.get(switch) or told.get(switch.partition(":")[0]) or Capabilities()


def memory_of(spec: RunSpec, truth: Landscape) -> MemoryTruth:
    memory = cast("int | MemoryTruth", look_up(truth.memory_bytes, spec))
    if isinstance(memory, MemoryTruth):
        return memory
    return MemoryTruth(needed=memory, allocated=int(0.9 * memory), reserved=memory)


def memory_limit_of(spec: RunSpec, truth: Landscape) -> int | None:
    limits = [limit for limit in (truth.memory_limit_bytes, spec.launch.memory_limit_bytes) if limit is not None]
    return min(limits, default=None)
