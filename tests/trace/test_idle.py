"""Why a device was idle, cause by cause, on traces small enough to check by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kineto import AUTOGRAD, GEMM, TraceMaker, training_trace

from redline.trace.columns import Trace
from redline.trace.decode import read_trace
from redline.trace.host import HostView
from redline.trace.idle import CAUSES, IdleTime, idle_time, waits_of
from redline.trace.timeline import device_views
from redline.trace.window import recorded

US = 1000
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
Add = Callable[[TraceMaker], object]


def analysed(trace: Trace) -> tuple[HostView, IdleTime, int]:
    """The host, the idle time by cause, and all of it."""
    found = recorded(trace)
    host = HostView(found.links)
    (view,) = device_views(found.links)
    bounds = found.bounds(view.device, view.busy)
    idle = idle_time(host, view.rows, bounds, view.busy, 10 * US)
    return host, idle, bounds[1] - bounds[0] - view.busy.total


def kernel(
    start: int, lasts: int, launched: int | None = None, *, name: str = GEMM, call_ns: int = 4000, **more: Any
) -> Add:
    """All in microseconds but the length of the call."""
    at = None if launched is None else launched * US
    return lambda maker: maker.kernel(name, start * US, lasts * US, launched=at, call_ns=call_ns, **more)


def call(name: str, start: int, lasts: int, **more: Any) -> Add:
    return lambda maker: maker.call(name, start * US, lasts * US, correlation=900 + start, **more)


FIRST = kernel(0, 100, -9)
USUAL = [kernel(1000 + 10 * number, 9, 200 + number, name="usual", call_ns=US) for number in range(20)]


@pytest.mark.parametrize(
    ("made_of", "expected"),
    [
        pytest.param(
            [
                kernel(0, 100, -10),
                kernel(102, 100, 10),  # in time: 2 µs from one kernel to the next
                kernel(302, 100, 250),  # the call ends at 254, and nothing explains the rest
                kernel(502, 100, 300),  # launched in time, and yet 100 µs late
            ],
            {"host": 52, "latency": 10, "launch": 2 + 10, "unknown": 38 + 90},
            id="a gap is split where the launch ends",
        ),
        pytest.param(
            [FIRST, lambda maker: maker.kernel(GEMM, 500 * US, 100 * US, launched=96 * US + 1)],
            {"host": 0.001, "latency": 10, "unknown": 389.999},
            id="a launch that comes a nanosecond late costs a nanosecond",
        ),
        pytest.param(
            [kernel(0, 10, -5), kernel(13, 10), kernel(500, 10)],
            {"unknown": 3 + 477},
            id="nobody knows whether work without a launch was launched in time",
        ),
        pytest.param(
            [kernel(0, 10, 0), kernel(5, 200, 0, stream=9), kernel(100, 10, 90)],
            {},
            id="what another stream fills is no gap",
        ),
        pytest.param(
            [FIRST, lambda maker: maker.annotation(LOADER, 50 * US, 250 * US), kernel(405, 100, 396)],
            {"data": 200, "host": 100, "latency": 5},
            id="the loader has its part of the gap and no more",
        ),
        pytest.param(
            [FIRST, call("cudaEventSynchronize", 0, 1000, thread=77), kernel(205, 100, 196)],
            {"host": 100, "latency": 5},
            id="what another thread waits for is not this one's business",
        ),
        pytest.param(
            [FIRST, call("cudaMalloc", 120, 30), *USUAL, kernel(1900, 10, 1300, name="new", call_ns=590 * US)],
            {"allocator": 30, "warm-up": 590, "host": 71 + 101, "latency": 20, "launch": 19, "unknown": 789},
            id="memory from the driver, and code that the first launch of a kernel loads",
        ),
        pytest.param(
            [FIRST, call("cudaStreamWaitEvent", 5, 1), kernel(310, 100, 10, stream=9)],
            {"launch": 10, "dependency": 200},
            id="an event of another stream",
        ),
    ],
)
def test_idle_time_is_split_by_cause(made_of: list[Add], expected: dict[str, float]) -> None:
    """In microseconds, for causes that occur."""
    maker = TraceMaker()
    for add in made_of:
        add(maker)
    _, idle, _ = analysed(maker.read())
    found = {cause: idle.ns(cause) / US for cause in CAUSES if idle.ns(cause)}
    assert {cause: found.get(cause) for cause in expected} == expected
    assert len(found) == len(expected)


def test_a_server_that_sits_in_a_blocking_copy_is_not_late_with_its_launches() -> None:
    """The work was launched at once; it waits for an event, and the host in a copy behind it."""
    maker = TraceMaker(rocm=True)
    kernel(80, 4, 71, stream=2)(maker)
    call("hipStreamWaitEvent", 102, 10)(maker)
    kernel(463_380, 6, 123, call_ns=5 * US, stream=3)(maker)
    copy = maker.operator("aten::copy_", 350 * US, 463_100 * US)
    maker.frame("server/scheduler.py(2919): run_batch", 100 * US, 465_000 * US)
    maker.frame("torch/_tensor.py(10): copy", 355 * US, 463_090 * US)
    kernel(
        463_404, 4, 361, name="Memcpy DtoH (Device -> Host)", call_ns=463_064 * US, stream=3, kind="gpu_memcpy",
        caller="hipMemcpyWithStream", operator=copy,
    )(maker)  # fmt: skip
    host, idle, _ = analysed(maker.read())
    assert idle.ns("host") == 44 * US
    # Nothing that the host does can delay work which it has launched: the stream waited for an event.
    assert idle.ns("dependency") / 1e6 == pytest.approx(463.0, abs=0.3)
    (wait,) = waits_of([(host, [idle])])
    assert (wait.call, wait.operator, wait.copies) == ("hipMemcpyWithStream", "aten::copy_", True)
    assert wait.frame == "server/scheduler.py(2919): run_batch"


def test_after_a_wait_the_time_to_launch_again_is_the_hosts() -> None:
    maker = TraceMaker()
    FIRST(maker)
    item = maker.operator("aten::item", 20 * US, 95 * US)
    maker.call("cudaStreamSynchronize", 30 * US, 75 * US, **{"External id": item})  # until 105
    kernel(205, 100, 196)(maker)
    host, idle, _ = analysed(maker.read())
    assert {cause: idle.ns(cause) for cause in CAUSES if idle.ns(cause)} == {
        "host": 95 * US,
        "sync": 5 * US,
        "latency": 5 * US,
    }
    (wait,) = waits_of([(host, [idle])])
    assert (wait.call, wait.operator, wait.calls) == ("cudaStreamSynchronize", "aten::item", 1)
    assert wait.idle_s == pytest.approx(5e-6)


def test_what_the_main_thread_did_before_the_backward_thread_launched() -> None:
    maker = TraceMaker()
    maker.annotation("ProfilerStep#1", -20 * US, 700 * US)
    FIRST(maker)
    maker.annotation(LOADER, 150 * US, 50 * US)
    maker.operator("autograd::engine::evaluate_function: MmBackward0", 280 * US, 50 * US, thread=AUTOGRAD)
    kernel(305, 375, 296, thread=AUTOGRAD)(maker)
    _, idle, _ = analysed(maker.read())
    assert idle.ns("data") == 50 * US
    assert idle.ns("host") == (150 + 15) * US  # and the time before the first kernel


def test_the_parts_add_up_to_all_idle_time(tmp_path: Path) -> None:
    for seed in range(3):
        training_trace(tmp_path / "t.json", megabytes=1, seed=seed)
        _, idle, whole = analysed(read_trace(tmp_path / "t.json"))
        assert sum(idle.ns(cause) for cause in CAUSES) == whole
