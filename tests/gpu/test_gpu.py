"""On a real GPU: CUDA, compile, graphs, DataLoader and the profiler inside forked workers; figures that make sense."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import redline
from redline.launch import open_door
from redline.model.protocol import BlockReply, FailureReply, Measure, Prepare, PreparedReply, Profile, TraceReply
from redline.model.spec import LaunchSpec, MeasureSpec, Recipe, RunSpec, WorkloadSpec

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.device_count(), reason="no GPU here")]

MISBEHAVING = Path(__file__).parent.parent / "models" / "misbehaving.py"


def spec_of(recipe: str, model: str = "resnet18", task: str = "infer", **measure) -> RunSpec:
    return RunSpec(
        workload=WorkloadSpec(model=model, batch=8, task=task),
        recipe=Recipe.parse(recipe),
        measure=MeasureSpec.for_effort("quick"),
        launch=LaunchSpec(door="fork"),
        device="auto",
    )


@pytest.fixture
def door():
    opened = open_door(LaunchSpec())
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "recipe", ["baseline", "fp16+channels-last+compile:reduce-overhead", "tf32+cudnn-benchmark", "torchscript"]
)
def test_a_forked_worker_measures_on_the_gpu(door, recipe: str) -> None:
    spec = spec_of(recipe)
    session = door.open(spec)
    prepared = session.ask(Prepare(spec=spec))
    assert isinstance(prepared, PreparedReply), prepared
    assert prepared.prepared.environment.device.kind in ("cuda", "rocm")
    assert prepared.prepared.numerics.passed, prepared.prepared.numerics
    throughput = session.ask(Measure(kind="throughput", seconds=0.3))
    latency = session.ask(Measure(kind="latency", seconds=0.3))
    assert isinstance(throughput, BlockReply)
    assert isinstance(latency, BlockReply)
    assert throughput.block.clock == "device"
    assert latency.block.clock == "host"
    assert len(throughput.block.issue_s) == len(throughput.block.samples) + len(throughput.block.settling)
    assert throughput.block.memory.peak_reserved_bytes >= throughput.block.memory.peak_allocated_bytes > 0
    assert throughput.block.telemetry
    assert throughput.block.telemetry[-1].power_w


def test_the_profiler_sees_kernels_in_a_forked_worker(door, tmp_path: Path) -> None:
    spec = spec_of("baseline")
    session = door.open(spec)
    assert isinstance(session.ask(Prepare(spec=spec)), PreparedReply)
    reply = session.ask(Profile(path=str(tmp_path / "trace.json.gz")))
    assert isinstance(reply, TraceReply), reply
    events = json.loads(gzip.decompress(Path(reply.trace.path).read_bytes()))["traceEvents"]
    assert sum(event.get("cat") == "kernel" for event in events) > 50


def test_loader_workers_feed_a_forked_gpu_worker(door) -> None:
    spec = RunSpec(
        workload=WorkloadSpec(model=f"{MISBEHAVING}:loads_with_workers"), measure=MeasureSpec.for_effort("quick")
    )
    assert isinstance(door.open(spec).ask(Prepare(spec=spec)), PreparedReply)


@pytest.mark.parametrize("recipe", ["amp", "amp-bf16+channels-last", "tf32+compile"])
def test_training_keeps_its_loss_path(door, recipe: str) -> None:
    spec = spec_of(recipe, task="train")
    session = door.open(spec)
    prepared = session.ask(Prepare(spec=spec))
    assert isinstance(prepared, PreparedReply), prepared
    assert prepared.prepared.numerics.passed, prepared.prepared.numerics
    block = session.ask(Measure(kind="throughput", seconds=0.3))
    assert isinstance(block, BlockReply)
    assert set(block.block.phases) == {"forward", "backward", "optimizer"}
    assert len(block.block.phases["forward"]) == len(block.block.samples)


def test_out_of_memory_on_the_gpu_is_a_row(door) -> None:
    model = f"{MISBEHAVING}:eats_device_memory"
    spec = RunSpec(workload=WorkloadSpec(model=model), measure=MeasureSpec.for_effort("quick"))
    reply = door.open(spec).ask(Prepare(spec=spec))
    assert isinstance(reply, FailureReply)
    assert reply.failure.kind == "oom"


def test_sibling_sessions_are_not_foreign(tmp_path: Path) -> None:
    result = redline.run("resnet18", recipes=["baseline", "fp16"], batch=8, effort="quick")
    assert all("shared-gpu" not in row.verdict.labels for row in result)
    assert result[1].vs_first is not None
