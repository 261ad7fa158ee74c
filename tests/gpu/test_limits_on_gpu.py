"""Counting, ceilings and modules where there is a GPU."""

from __future__ import annotations

import pytest

import redline

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.device_count(), reason="no GPU here")]


def test_ceilings_and_an_eager_roofline_add_up() -> None:
    found = redline.roofline(device="cuda", fresh=True).measured
    assert found.flops_per_s["fp16"] > found.flops_per_s["fp32"]
    assert found.cache_bytes is not None
    (row,) = redline.roofline("resnet50", recipes="baseline", batch=32, device="cuda")
    assert row.error is None
    assert row.attainable_s <= row.measured_s
    assert row.points


def test_modules_take_most_of_an_eager_step() -> None:
    result = redline.flops("resnet50", batch=32, latency=True, device="cuda")
    assert result.summary.latency_s is not None
    assert result.record is not None
    assert all(row.latency_s for row in result.summary.modules if row.flops)


def test_a_compiled_step_dissolves_its_modules() -> None:
    summary = redline.flops("resnet18", batch=8, recipe="compile", latency=True, device="cuda").summary
    assert summary.latency_s is None
    assert any(each.code == "modules-dissolved" for each in summary.notes)
