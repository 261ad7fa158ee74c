"""Kernels and operators find their modules: by what was around their launch, and backward by autograd's numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kineto import ADD, GEMM, TraceMaker
from torch import nn

from redline.bench.capture import MODULE_PREFIX as BENCH_PREFIX
from redline.bench.capture import capture
from redline.bench.device.cpu import CpuDevice
from redline.model.protocol import Profile
from redline.trace.decode import read_trace
from redline.trace.links import Links
from redline.trace.tree import MODULE_PREFIX, module_times

US = 1000
US_S = 1e-6


def mark(maker: TraceMaker, path: str, start: int, duration: int) -> None:
    maker.annotation(f"{MODULE_PREFIX}{path}", start * US, duration * US)


def test_both_halves_use_the_same_prefix() -> None:
    assert BENCH_PREFIX == MODULE_PREFIX


def test_kernels_belong_to_the_innermost_module_around_their_launch() -> None:
    maker = TraceMaker()
    mark(maker, "", 0, 100)
    mark(maker, "a", 10, 40)
    mark(maker, "a.b", 20, 20)
    inner = maker.operator("aten::mm", 25 * US, 10 * US)
    maker.kernel(GEMM, 500 * US, 70 * US, launched=28 * US, operator=inner)  # runs long after the module has returned
    outer = maker.operator("aten::add", 60 * US, 10 * US)
    maker.kernel(ADD, 600 * US, 5 * US, launched=62 * US, operator=outer)
    maker.kernel(ADD, 700 * US, 3 * US, launched=45 * US)  # by no operator: what stood around the call counts
    late = maker.operator("aten::add", 200 * US, 10 * US)
    maker.kernel(ADD, 800 * US, 9 * US, launched=202 * US, operator=late)  # outside of every module
    found = module_times(Links(maker.read()))
    assert found == pytest.approx({"": 5 * US_S, "a": 3 * US_S, "a.b": 70 * US_S})


def test_without_marks_there_is_nothing_to_tell() -> None:
    maker = TraceMaker()
    maker.operator("aten::mm", 0, 10 * US)
    assert module_times(Links(maker.read())) == {}


class Step:
    """A training step of a small model, as the bench would run it."""

    phases = ("forward",)

    def __init__(self, model: nn.Module) -> None:
        self.model, self.x = model, torch.randn(64, 128)

    def __call__(self, mark: object = None) -> None:
        self.model(self.x).sum().backward()

    def plain(self, mark: object = None) -> Callable[[], None]:
        return self

    def context(self) -> torch.enable_grad:
        return torch.enable_grad()

    def recover(self) -> None: ...


def test_a_real_step_on_a_cpu_forward_and_backward(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 512), nn.Sequential(nn.ReLU(), nn.Linear(512, 8)))
    path = tmp_path / "t.json.gz"
    request = Profile(path=str(path), wait=0, warmup=1, active=2, shapes=False, modules=True)
    capture(Step(model), CpuDevice(), request, model)  # type: ignore[arg-type]
    found = module_times(Links(read_trace(path)))
    assert set(found) == {"", "0", "1", "1.0", "1.1"}
    assert all(found[path] > 0 for path in ("0", "1.0", "1.1"))
    assert not nn.modules.module._global_forward_pre_hooks


def test_a_dissolved_model_carries_no_marks(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 4))
    path = tmp_path / "t.json.gz"
    request = Profile(path=str(path), wait=0, warmup=1, active=1, shapes=False, modules=True)
    capture(Step(model), CpuDevice(), request, None)  # type: ignore[arg-type]
    assert module_times(Links(read_trace(path))) == {}
