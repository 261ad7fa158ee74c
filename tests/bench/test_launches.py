"""When launches are shortened and what compiles kernels is ended: once everything has run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch._inductor import async_compile

from redline.bench.device import cuda
from redline.bench.device.cpu import CpuDevice
from redline.bench.device.process import COMPILER, end_compile_pool
from redline.bench.session import BenchSession
from redline.bench.workload import step
from redline.bench.workload.step import make_optimizer
from redline.model.protocol import Close, Prepare, PreparedReply
from redline.model.spec_table import specs_from_table


@pytest.fixture
def stages() -> list[str]:
    return []


@pytest.fixture
def bench(stages: list[str]) -> Iterator[BenchSession]:
    session = BenchSession(lambda progress: stages.append(progress.stage))
    yield session
    session.handle(Close())


def prepared(bench: BenchSession, recipe: str) -> PreparedReply:
    table = {"model": "simple_cnn", "batch": 2, "device": "cpu", "effort": "quick", "threads": 1, "recipe": recipe}
    reply = bench.handle(Prepare(spec=specs_from_table(table)[0]))
    assert isinstance(reply, PreparedReply), reply
    return reply


def test_they_are_when_all_has_run_and_nothing_is_timed_yet(
    bench: BenchSession, stages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "shorten_launches", lambda self: stages.append("launches"))
    monkeypatch.setattr(step, "end_compile_pool", lambda: stages.append("pool"))
    prepared(bench, "compile:backend=eager")
    assert stages.count("launches") == stages.count("pool") == 1
    at = stages.index("pool")
    assert stages[at + 1] == "launches"
    assert {"compile", "numerics"} <= set(stages[:at])
    assert "warm-up" not in stages[:at]


def test_a_program_of_separate_operators_is_left_alone(
    bench: BenchSession, stages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "shorten_launches", lambda self: stages.append("launches"))
    prepared(bench, "channels-last")
    assert "launches" not in stages


def test_a_note_says_where_it_could_not_be_done(bench: BenchSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "shorten_launches", lambda self: "no second context could be opened")
    notes = prepared(bench, "compile:backend=eager").prepared.recipe_notes
    assert [str(each) for each in notes if each.about == "launches"] == ["no second context could be opened"]


@pytest.mark.parametrize(
    ("fused", "on_gpu", "sizes"),
    [(True, True, [40, 8, 5, 5]), (True, False, [40, 5, 5, 8]), (False, True, [40, 5, 5, 8])],
)
def test_a_fused_optimizer_takes_large_parameters_first_on_a_gpu(
    fused: bool, on_gpu: bool, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(step.torch.optim, "SGD", lambda parameters, **options: taken.extend(parameters))
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", on_gpu, raising=False)
    model = nn.ModuleList([nn.Linear(8, 5), nn.BatchNorm1d(5), nn.PReLU(8)])
    model[1].bias = None
    make_optimizer("sgd", model, fused=fused)
    assert [each.numel() for each in taken] == sizes


class Driver:
    """CUDA's, as far as contexts go."""

    def __init__(self, **errors: int) -> None:
        self.errors, self.called = errors, list[str]()

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*given: Any) -> int:
            self.called.append(name)
            return self.errors.get(name, 0)

        return call


@pytest.mark.parametrize(
    ("errors", "told", "calls"),
    [
        ({}, None, 3),
        ({"cuCtxDestroy_v2": 201}, "cuCtxDestroy: error 201", 3),
        ({"cuCtxCreate_v2": 2}, "cuCtxCreate: error 2", 2),
    ],
)
def test_a_second_context_is_closed_again_and_an_error_is_told(
    errors: dict[str, int], told: str | None, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(**errors)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: driver.called.append("synchronize"))
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    assert cuda.shorten_launches() == told
    assert driver.called == ["synchronize", *["cuCtxGetDevice", "cuCtxCreate_v2", "cuCtxDestroy_v2"][:calls]]


def test_no_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("ctypes.CDLL", missing)
    assert cuda.shorten_launches() == "libcuda.so.1: cannot open shared object file"


def children() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [each for each in found if "compile_worker" in " ".join(each.cmdline())]


@pytest.fixture(autouse=True)
def _several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)


def test_they_are_ended_while_they_still_begin(caplog: pytest.LogCaptureFixture) -> None:
    first = async_compile.AsyncCompile.process_pool()
    waiting = first.submit(len, "three")
    assert children()
    end_compile_pool()
    assert waiting.done()
    first.shutdown()  # as torch does when a program ends
    assert not children()
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    second = async_compile.AsyncCompile.process_pool()
    assert second is not first
    assert second.submit(len, "four").result(60) == 4
    assert len(children()) > 1
    end_compile_pool()
    assert not children()


def test_there_may_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    end_compile_pool()
    monkeypatch.delitem(sys.modules, COMPILER)
    end_compile_pool()
    assert COMPILER not in sys.modules
