"""Counting, ceilings and modules where there is a GPU."""

from __future__ import annotations

import pytest

import redline

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.device_count(), reason="no GPU here")]


def test_ceilings_and_an_eager_roofline_add_up() -> None:
    found = redline.roofline(device="cuda", fresh=True)
    measured = {row["what"]: row.value("measured") for row in found.rows}
    assert measured["fp16 products"] > measured["fp32 products"]
    assert found.about["cache_bytes"]
    found = redline.roofline("resnet50", recipes="baseline", batch=32, device="cuda")
    (row,) = found.rows
    assert not row.failure
    assert row.value("roofline") <= row.value("measured")
    assert found.table("modules").rows


def test_modules_take_most_of_an_eager_step() -> None:
    result = redline.flops("resnet50", batch=32, latency=True, device="cuda")
    assert result.rows[0].value("latency")
    assert all(row.value("latency") for row in result.table("modules").rows if row.value("flops"))


def test_a_compiled_step_dissolves_its_modules() -> None:
    result = redline.flops("resnet18", batch=8, recipe="compile", latency=True, device="cuda")
    assert "latency" not in result.rows[0]
    assert any(each.code == "modules-dissolved" for each in result.notes)
