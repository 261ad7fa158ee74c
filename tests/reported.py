"""Records to report on: simulated sweeps and races on a made-up GPU, and profiles that were captured on an H200."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from redline.model.migrations import decode
from redline.model.note import note
from redline.model.record import Failure, Numerics, RunRecord, TelemetrySample
from redline.model.spec import RunSpec
from redline.model.spec_table import specs_from_table
from redline.model.work import Ceilings, OperatorWork, WorkCount
from redline.search.observer import NoJournal
from redline.search.run import measure_together
from redline.show.result import terminal
from redline.show.terminal import as_text
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.run import Measured, result_of

MIB = 2**20
SPEEDS = {"baseline": 1.0, "channels-last": 0.8, "fp16": 0.4, "fp16+compile": 0.25, "bf16": 0.42}
TRACES = Path(__file__).parent / "data" / "traces"


def step_s(spec: RunSpec) -> float:
    return (0.002 + 3e-4 * (spec.workload.batch or 1)) * SPEEDS.get(str(spec.recipe), 1.0)


def memory(spec: RunSpec) -> int:
    return (300 + 20 * (spec.workload.batch or 1)) * MIB


def numerics(spec: RunSpec) -> Numerics:
    if not spec.recipe.switches:
        return Numerics(
            method="reference", passed=True, rel_l2=0.0, reason=note("reference", "the strict fp32 reference itself")
        )
    if str(spec.recipe) == "bf16":
        return Numerics(
            rel_l2=0.3,
            tolerance=0.02,
            passed=False,
            reason=note("above-tolerance", "error 0.3 is above the tolerance 0.02"),
        )
    return Numerics(
        rel_l2=1e-3,
        tolerance=4e-3,
        cosine=1.0,
        top1_agreement=1.0,
        passed=True,
        reason=note("within-tolerance", "near enough"),
    )


CEILINGS = Ceilings(
    kind="cuda",
    name="fake cuda device",
    driver="fake",
    torch="fake",
    threads=None,
    flops_per_s={"fp32": 5e13, "fp16": 8e14},
    copy_bytes_per_s=4e12,
    launch_s=5e-6,
)


def ceilings_of(record: RunRecord) -> Ceilings | None:
    made_up = record.prepared is not None and record.prepared.environment.device.name == CEILINGS.name
    return CEILINGS if made_up else None


def work(spec: RunSpec) -> WorkCount:
    """Eight GFLOP an image."""
    form = "fp16" if "fp16" in str(spec.recipe) else "fp32"
    products = OperatorWork(
        name="conv", kind="convolution", number_format=form, phase="forward", calls=1, flops=8 * 10**9, bytes=10**8
    )
    batch = spec.workload.batch or 1
    return WorkCount(params=25, compulsory_bytes=10**8, operators=(msgspec.structs.replace(products, calls=batch),))


def fake_door(**changes: Any) -> FakeDoor:
    truth: dict[str, Any] = {
        "step_s": step_s,
        "memory_bytes": memory,
        "memory_limit_bytes": 4000 * MIB,
        "numerics": numerics,
        "work": work,
        "compile_s": lambda spec: 20.0 if "compile" in str(spec.recipe) else 0.0,
        "power_w": 300.0,
        "noise_sigma": 0.005,
    }
    return FakeDoor(Landscape(**{**truth, **changes}))


def sweep_records(door: FakeDoor | None = None, **table: Any) -> list[RunRecord]:
    """Each spec alone, one after the other, as a sweep does it."""
    door = door or fake_door()
    settings = {"model": ["resnet50"], "recipe": ["baseline", "fp16"], "effort": "quick", "device": "cuda:0", **table}
    batches = settings.pop("batches", [1, 8, 64])
    specs = [spec for batch in batches for spec in specs_from_table({**settings, "batch": batch})]
    return [record for spec in specs for record in measure_together([spec], door, NoJournal())]


def shown(records: Sequence[RunRecord], **known: Any) -> str:
    """What `redline run` prints of these records."""
    return as_text(terminal(result_of(Measured(records=list(records)), **known)))


def race_records(
    recipes: Sequence[str] = ("baseline", "fp16", "fp16+compile"), door: FakeDoor | None = None, **table: Any
) -> list[RunRecord]:
    """All specs in turns, as a run does it."""
    settings = {"model": "resnet50", "batch": 32, "effort": "quick", "device": "cuda:0", **table}
    return measure_together(specs_from_table({**settings, "recipe": list(recipes)}), door or fake_door(), NoJournal())


def failed_record(message: str = "this factory raised", model: str = "broken") -> RunRecord:
    (record,) = sweep_records(
        fake_door(failure=Failure(stage="build", kind="user", message=message)),
        model=model,
        recipe="baseline",
        batches=[8],
    )
    return record


def captured(name: str = "h200_resnet50_fp16_b32") -> RunRecord:
    """A record with its trace beside it."""
    record = decode((TRACES / f"{name}.record").read_bytes())
    assert record.trace is not None
    trace = msgspec.structs.replace(record.trace, path=str(TRACES / f"{name}.json.gz"))
    return msgspec.structs.replace(record, trace=trace)


def with_telemetry(record: RunRecord) -> RunRecord:
    """As a real device would tell of itself: several looks at each block, with every figure."""
    blocks = []
    for number, block in enumerate(record.blocks):
        looks = tuple(
            TelemetrySample(
                at_s=0.1 * look,
                utilisation=0.9,
                power_w=280.0 + 5 * look + number,
                temperature_c=50.0 + number,
                clock_hz=1.7e9,
                memory_used_bytes=2**30,
            )
            for look in range(3)
        )
        blocks.append(msgspec.structs.replace(block, telemetry=looks))
    return msgspec.structs.replace(record, blocks=tuple(blocks))


def everything() -> list[RunRecord]:
    """Something for every section."""
    door = fake_door()
    return [
        *sweep_records(
            door, model=["resnet50", "vit_b_16"], recipe=["baseline", "fp16", "bf16"], batches=[1, 4, 16, 64, 256]
        ),
        *sweep_records(door, task="train", recipe=["baseline", "fp16"], batches=[8, 32]),
        *map(with_telemetry, race_records(door=door)),
        failed_record(),
        captured(),
        captured("h200_resnet50_fp32_b32"),
    ]
