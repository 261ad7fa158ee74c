"""Traces that Redline captured on real machines, each with its record: the same verdict anywhere, at any time.

`tools/gpu/check.py profile` writes more of them; put its `traces` into `tests/data/traces`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from redline.analyze.profile import Profile, profile_of
from redline.model.migrations import decode
from redline.trace.decode import read_trace
from redline.verbs.roofline import kind_seconds

FOLDER = Path(__file__).parents[1] / "data" / "traces"
TRACES = sorted(FOLDER.glob("*.json.gz"))
ON_GPU = [path for path in TRACES if not path.name.startswith("cpu_")]


def profile(path: Path, *, with_record: bool = True) -> Profile:
    record = decode(path.with_name(path.name.replace(".json.gz", ".record")).read_bytes()) if with_record else None
    return profile_of([read_trace(path)], record)


def codes(found: Profile) -> set[str]:
    return {finding.code for finding in found.findings}


def named(part: str) -> list[Path]:
    return [path for path in ON_GPU if part in path.name]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_every_captured_trace_is_whole_and_small(path: Path) -> None:
    found = profile(path)
    assert path.stat().st_size < 300_000
    assert found.lost is None
    assert found.steps is not None
    assert found.operators
    assert {phase.name: phase.needs_s for phase in found.phases}
    assert found.unclassified_share < 0.05
    assert sum(row.share for row in found.classes) == pytest.approx(1)


def test_training_on_a_cpu() -> None:
    found = profile(FOLDER / "cpu_simple_cnn_train.json.gz")
    assert not found.has_device
    assert set({phase.name: phase.needs_s for phase in found.phases}) == {"forward", "backward", "optimizer"}
    assert found.steps.count == 2
    assert found.bound.label == "device"
    assert found.classes[0].name in ("convolution", "norm", "elementwise")
    assert any(row.cpu_allocated_bytes for row in found.operators)
    assert found.capture.model == "simple_cnn"


@pytest.mark.parametrize("path", ON_GPU, ids=lambda path: path.name)
def test_on_a_gpu_every_kernel_has_its_launch_and_nearly_all_an_operator(path: Path) -> None:
    found = profile(path)
    total = sum(row.total_s for row in found.kernels) + sum(row.total_s for row in found.copies)
    assert found.launches.work == sum(row.calls for row in found.kernels) + sum(row.calls for row in found.copies)
    assert sum(row.device_self_s for row in found.operators) >= 0.95 * total
    assert found.timeline.busy_s <= found.timeline.span_s


@pytest.mark.parametrize("path", named("fp16_b32"), ids=lambda path: path.name)
def test_a_small_batch_in_fp16_waits_for_python(path: Path) -> None:
    found = profile(path)
    assert found.bound.label == "host"
    (finding,) = [finding for finding in found.findings if finding.code == "host-bound"]
    assert "graphs" in finding.next
    assert finding.gain_bound > 1.1


@pytest.mark.parametrize("path", [*named("fp32_b32"), *named("fp16_b256")], ids=lambda path: path.name)
def test_strict_fp32_and_a_large_batch_do_not(path: Path) -> None:
    found = profile(path)
    assert found.bound.label != "host"
    assert "host-bound" not in codes(found)
    assert found.timeline.busy_s > 0.5 * found.timeline.span_s


@pytest.mark.parametrize("path", named("fp32_b32"), ids=lambda path: path.name)
def test_strict_fp32_is_told_to_use_tensor_cores(path: Path) -> None:
    assert "fp32-matmul" in codes(profile(path))


@pytest.mark.parametrize("path", named("train_b32"), ids=lambda path: path.name)
def test_a_training_step_shows_its_phases_on_the_device(path: Path) -> None:
    found = profile(path)
    assert [phase.name for phase in found.phases] == ["forward", "backward", "optimizer"]
    assert all(phase.device_s > 0 for phase in found.phases)


def test_time_by_class_is_that_of_operators_whatever_their_kernels_are_called() -> None:
    """On the H200 some convolutions run as kernels called gemm; by their names ResNet-50 would multiply for 0.2 ms."""
    (path,) = named("fp32_b32")
    found = profile(path)
    by_name = {row.name: row.total_s for row in found.classes}
    by_operator = kind_seconds(found)
    steps = found.steps_seen
    assert by_name["matmul"] / steps > 5 * by_operator["matmul"]
    assert sum(by_operator.values()) == pytest.approx(sum(by_name.values()) / steps, rel=0.02)
