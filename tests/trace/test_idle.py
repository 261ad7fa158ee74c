"""Why a device was idle, cause by cause, on traces small enough to check by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from kineto import AUTOGRAD, GEMM, TraceMaker

from redline.trace.decode import read_trace
from redline.trace.host import HostView
from redline.trace.idle import CAUSES, IdleTime, Latency, idle_time, waits_of
from redline.trace.timeline import device_views
from redline.trace.window import recorded

US = 1000
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


@pytest.fixture
def analysed():
    def analyse(maker: TraceMaker) -> tuple[HostView, IdleTime]:
        found = recorded(maker.read())
        host = HostView(found.links)
        (view,) = device_views(found.links)
        return host, idle_time(host, view.rows, found.bounds(view.device, view.busy), view.busy, Latency(10 * US))

    return analyse


@pytest.fixture
def causes(analysed):
    def by_cause(maker: TraceMaker) -> dict[str, float]:
        """Microseconds of each cause that occurs."""
        _, idle = analysed(maker)
        return {cause: idle.ns(cause) / US for cause in CAUSES if idle.ns(cause)}

    return by_cause


def test_a_gap_is_split_where_the_launch_ends(causes) -> None:
    maker = TraceMaker()
    maker.kernel(GEMM, 0, 100 * US, launched=-10 * US)
    maker.kernel(GEMM, 102 * US, 100 * US, launched=10 * US)  # in time: 2 µs from one kernel to the next
    maker.kernel(GEMM, 302 * US, 100 * US, launched=250 * US)  # the call ends at 254, and nothing explains the rest
    maker.kernel(GEMM, 502 * US, 100 * US, launched=300 * US)  # launched in time, and yet 100 µs late
    assert causes(maker) == {"host": 52, "latency": 10, "launch": 2 + 10, "unknown": 38 + 90}


def test_a_launch_that_comes_a_nanosecond_late_costs_a_nanosecond(causes) -> None:
    maker = TraceMaker()
    maker.kernel(GEMM, 0, 100 * US, launched=-10 * US)
    maker.kernel(GEMM, 500 * US, 100 * US, launched=96 * US + 1, call_ns=4 * US)
    assert causes(maker) == {"host": 0.001, "latency": 10, "unknown": 389.999}


def test_nobody_knows_whether_work_without_a_launch_was_launched_in_time(causes) -> None:
    maker = TraceMaker(rocm=True)
    maker.kernel(GEMM, 0, 10 * US, launched=-5 * US)
    maker.kernel(GEMM, 13 * US, 10 * US)
    maker.kernel(GEMM, 500 * US, 10 * US)
    assert causes(maker) == {"unknown": 3 + 477}


def test_work_on_another_stream_is_no_gap(causes) -> None:
    maker = TraceMaker()
    maker.kernel(GEMM, 0, 10 * US, launched=0)
    maker.kernel(GEMM, 5 * US, 200 * US, launched=0, stream=9)
    maker.kernel(GEMM, 100 * US, 10 * US, launched=90 * US)
    assert causes(maker) == {}


def test_the_loader_has_its_part_of_the_gap_and_no_more(causes) -> None:
    maker = TraceMaker()
    maker.kernel(GEMM, 0, 100 * US, launched=-9 * US)
    maker.annotation(LOADER, 50 * US, 250 * US)  # until 300
    maker.kernel(GEMM, 405 * US, 100 * US, launched=396 * US)
    assert causes(maker) == {"data": 200, "host": 100, "latency": 5}


def test_a_server_that_sits_in_a_blocking_copy_is_not_late_with_its_launches(analysed) -> None:
    """The work was launched at once; it waits for an event, and the host in a copy behind it."""
    maker = TraceMaker(rocm=True)
    maker.kernel(GEMM, 80 * US, 4 * US, launched=71 * US, stream=2)
    maker.call("hipStreamWaitEvent", 102 * US, 10 * US, correlation=901)
    maker.kernel(GEMM, 463_380 * US, 6 * US, launched=123 * US, call_ns=5 * US, stream=3)
    copy = maker.operator("aten::copy_", 350 * US, 463_100 * US)
    maker.frame("server/scheduler.py(2919): run_batch", 100 * US, 465_000 * US)
    maker.frame("torch/_tensor.py(10): copy", 355 * US, 463_090 * US)
    maker.kernel(
        "Memcpy DtoH (Device -> Host)", 463_404 * US, 4 * US, launched=361 * US, call_ns=463_064 * US, stream=3,
        kind="gpu_memcpy", caller="hipMemcpyWithStream", operator=copy,
    )  # fmt: skip
    host, idle = analysed(maker)
    assert idle.ns("host") == 44 * US
    # Nothing that the host does can delay work which it has launched: the stream waited for an event.
    assert idle.ns("dependency") / 1e6 == pytest.approx(463.0, abs=0.3)
    (wait,) = waits_of([(host, [idle])])
    assert (wait.call, wait.operator, wait.copies) == ("hipMemcpyWithStream", "aten::copy_", True)
    assert wait.frame == "server/scheduler.py(2919): run_batch"


def test_after_a_wait_the_time_to_launch_again_is_the_hosts(analysed) -> None:
    maker = TraceMaker()
    maker.kernel(GEMM, 0, 100 * US, launched=-9 * US)
    item = maker.operator("aten::item", 20 * US, 95 * US)
    maker.call("cudaStreamSynchronize", 30 * US, 75 * US, **{"External id": item})  # until 105
    maker.kernel(GEMM, 205 * US, 100 * US, launched=196 * US)
    host, idle = analysed(maker)
    assert {cause: idle.ns(cause) for cause in CAUSES if idle.ns(cause)} == {
        "host": 95 * US,
        "sync": 5 * US,
        "latency": 5 * US,
    }
    (wait,) = waits_of([(host, [idle])])
    assert (wait.call, wait.operator, wait.calls) == ("cudaStreamSynchronize", "aten::item", 1)
    assert wait.idle_s == pytest.approx(5e-6)


def test_what_another_thread_waits_for_is_not_this_ones_business(causes) -> None:
    maker = TraceMaker()
    maker.kernel(GEMM, 0, 100 * US, launched=-9 * US)
    maker.call("cudaEventSynchronize", 0, 1000 * US, thread=77)
    maker.kernel(GEMM, 205 * US, 100 * US, launched=196 * US)
    assert causes(maker) == {"host": 100, "latency": 5}


def test_what_the_main_thread_did_before_the_backward_thread_launched(causes) -> None:
    maker = TraceMaker()
    maker.annotation("ProfilerStep#1", -20 * US, 700 * US)
    maker.kernel(GEMM, 0, 100 * US, launched=-9 * US)
    maker.annotation(LOADER, 150 * US, 50 * US)
    maker.operator("autograd::engine::evaluate_function: MmBackward0", 280 * US, 50 * US, thread=AUTOGRAD)
    maker.kernel(GEMM, 305 * US, 375 * US, launched=296 * US, thread=AUTOGRAD)
    found = causes(maker)
    assert found["data"] == 50
    assert found["host"] == pytest.approx(150 + 15)  # and the time before the first kernel


def test_memory_from_the_driver_and_code_that_is_loaded(causes) -> None:
    maker = TraceMaker()
    maker.kernel(GEMM, 0, 100 * US, launched=-9 * US)
    maker.call("cudaMalloc", 120 * US, 30 * US, correlation=901)
    for number in range(20):
        maker.kernel("usual", (1000 + 10 * number) * US, 9 * US, launched=(200 + number) * US, call_ns=US)
    # The first launch of this kernel takes half a millisecond: its code is loaded.
    maker.kernel("new", 1900 * US, 10 * US, launched=1300 * US, call_ns=590 * US)
    found = causes(maker)
    assert found["allocator"] == 30
    assert found["warm-up"] == 590


def test_an_event_of_another_stream(causes) -> None:
    maker = TraceMaker()
    maker.kernel(GEMM, 0, 100 * US, launched=-9 * US)
    maker.call("cudaStreamWaitEvent", 5 * US, US, correlation=901)
    maker.kernel(GEMM, 310 * US, 100 * US, launched=10 * US, stream=9)
    assert causes(maker) == {"launch": 10, "dependency": 200}


def test_the_parts_add_up_to_all_idle_time(analysed, tmp_path: Path) -> None:
    from kineto import training_trace

    for seed in range(3):
        training_trace(tmp_path / "t.json", megabytes=1, seed=seed)
        found = recorded(read_trace(tmp_path / "t.json"))
        host = HostView(found.links)
        (view,) = device_views(found.links)
        bounds = found.bounds(view.device, view.busy)
        idle = idle_time(host, view.rows, bounds, view.busy, Latency(10 * US))
        assert sum(idle.ns(cause) for cause in CAUSES) == bounds[1] - bounds[0] - view.busy.total
