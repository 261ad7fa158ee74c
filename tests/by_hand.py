"""Records built by hand: a sound GPU run, of which each test changes one thing."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from redline.model.record import (
    Block,
    ColdStart,
    DeviceInfo,
    Environment,
    Memory,
    Numerics,
    Prepared,
    RunRecord,
    TelemetrySample,
    Warmup,
    WorkloadInfo,
)
from redline.model.spec import Recipe, RunSpec, WorkloadSpec


def make_block(step_s: float = 0.010, *, count: int = 25, sigma: float = 0.002, seed: int = 0, **changes: Any) -> Block:
    noise = np.random.default_rng(seed).standard_normal(count)
    samples = tuple((step_s * np.exp(sigma * noise)).tolist())
    block = Block(
        kind="throughput",
        clock="device",
        samples=samples,
        issue_s=(0.009, 0.003, 0.003, 0.003),
        wall_s=sum(samples),
        memory=Memory(peak_allocated_bytes=300, peak_reserved_bytes=400, allocator_retries=0),
        telemetry=(TelemetrySample(at_s=0.0),),
    )
    return msgspec.structs.replace(block, **changes)


def make_prepared(kind: str = "cuda", **changes: Any) -> Prepared:
    prepared = Prepared(
        environment=Environment(device=DeviceInfo(kind=kind, index=0 if kind != "cpu" else None, name=f"some {kind}")),
        workload=WorkloadInfo(
            source="torchvision", class_name="ResNet", parameters=25, items_per_step=32, item="img", batch=32
        ),
        cold_start=ColdStart(
            import_s=4.0, start_s=0.02, build_s=0.5, first_call_s=3.0, compile_s=2.0, compile_cache="cold"
        ),
        numerics=Numerics(rel_l2=1e-3, cosine=0.999, top1_agreement=1.0, floor=8e-4, tolerance=3.2e-3, passed=True),
        warmup=Warmup(steady=True, seconds=1.0),
        memory=Memory(),
        step_synchronises=False,
    )
    return msgspec.structs.replace(prepared, **changes)


def make_record(recipe: str = "baseline", *, task: str = "infer", device: str = "cuda:0", **changes: Any) -> RunRecord:
    workload = WorkloadSpec(model="resnet50", batch=32, task=task)  # type: ignore[arg-type]
    record = RunRecord(
        id=f"id-{recipe}",
        spec=RunSpec(workload=workload, recipe=Recipe.parse(recipe), device=device),
        prepared=make_prepared(device.partition(":")[0]),
        blocks=tuple(make_block(round=number, seed=number) for number in range(8)),
        stopped="target",
    )
    return msgspec.structs.replace(record, **changes)
