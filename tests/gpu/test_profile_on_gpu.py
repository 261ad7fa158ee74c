"""On a real GPU: captured kernels have their launches and operators, phases reach the device, counters come through ncu."""

from __future__ import annotations

from pathlib import Path

import pytest

import redline
from redline.model.errors import UsageError
from redline.search.vendors import Ncu, find_tool

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.device_count(), reason="no GPU here")]


def test_a_training_step_is_explained(tmp_path: Path) -> None:
    found = redline.profile("resnet18", recipe="amp", batch=8, task="train", steps=2, folder=tmp_path).profile
    assert found.has_device
    assert found.lost is None
    assert [phase.name for phase in found.phases] == ["forward", "backward", "optimizer"]
    assert all(phase.device_s > 0 for phase in found.phases)
    assert found.launches.work == sum(row.calls for row in (*found.kernels, *found.copies))
    assert found.unclassified_share < 0.05
    assert found.capture.step_s
    assert found.bound.label


def test_ncu_gives_a_table_and_counters(tmp_path: Path) -> None:
    try:
        find_tool(Ncu())
    except UsageError as error:
        pytest.skip(str(error))
    found = redline.profile("resnet18", recipe="fp16", batch=8, tool="ncu", folder=tmp_path).profile
    assert found.kernels
    assert {counter.name for counter in found.counters if counter.kernel is None} >= {"bandwidth", "occupancy"}
    assert all(0 <= counter.value <= 1.05 for counter in found.counters if counter.unit == "share")
