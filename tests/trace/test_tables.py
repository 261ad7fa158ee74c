"""The tables, each from a trace small enough to check by hand."""

from __future__ import annotations

import pytest
from kineto import ADD, AUTOGRAD, GEMM, REDUCE, TraceMaker

from redline.trace.columns import Work
from redline.trace.host import HostView, host_of, launches_of
from redline.trace.links import Links
from redline.trace.tables import class_rows, copy_rows, kernel_rows, most_of_the_time, operator_rows, times_by_name
from redline.trace.timeline import device_time, device_views, timeline_of
from redline.trace.window import phases_of, recorded, steps_of

US = 1000


class TestKernels:
    def test_calls_totals_extremes_and_shares(self) -> None:
        maker = TraceMaker()
        for start, duration in ((0, 30), (100, 10), (200, 20)):
            maker.kernel(GEMM, start * US, duration * US)
        maker.kernel(ADD, 300 * US, 20 * US)
        maker.copy("Memcpy HtoD (Pageable -> Device)", 400 * US, 20 * US, size=4000)
        trace = maker.read()
        gemm, add = kernel_rows(times_by_name([trace], [Work.KERNEL]))
        assert (gemm.calls, gemm.total_s, gemm.mean_s, gemm.min_s, gemm.max_s) == (3, 60e-6, 20e-6, 10e-6, 30e-6)
        assert (gemm.kernel_class, gemm.share, add.share) == ("matmul", 0.75, 0.25)
        classes = class_rows(times_by_name([trace], [Work.KERNEL]), times_by_name([trace], [Work.COPY]))
        assert {row.name: row.share for row in classes} == {"matmul": 0.6, "elementwise": 0.2, "copy": 0.2}

    def test_several_traces_become_one_table(self) -> None:
        traces = []
        for rank, duration in enumerate((10, 30)):
            maker = TraceMaker()
            maker.kernel(GEMM, 0, duration * US)
            maker.kernel(f"only_on_{rank}", 100 * US, US)
            traces.append(maker.read())
        rows = {row.name: row for row in kernel_rows(times_by_name(traces, [Work.KERNEL]))}
        assert (rows[GEMM].calls, rows[GEMM].total_s, rows[GEMM].min_s, rows[GEMM].max_s) == (2, 40e-6, 10e-6, 30e-6)
        assert {"only_on_0", "only_on_1"} < rows.keys()

    def test_the_fewest_kernels_that_make_most_of_the_time(self) -> None:
        maker = TraceMaker()
        for number, duration in enumerate((50, 30, 15, 5)):
            maker.kernel(f"k{number}", number * 1000 * US, duration * US)
        rows = kernel_rows(times_by_name([maker.read()], [Work.KERNEL]))
        assert most_of_the_time(rows, 0.8) == 2
        assert most_of_the_time(rows, 0.81) == 3
        assert most_of_the_time([], 0.8) == 0

    def test_copies_tell_their_bandwidth_only_when_all_sizes_are_known(self) -> None:
        maker = TraceMaker(rocm=True)
        maker.copy("Memcpy HtoD", 0, 10 * US, size="1000")
        maker.copy("Memcpy HtoD", 20 * US, 10 * US, size=1000)
        maker.copy("Memcpy DtoD", 40 * US, 10 * US)
        rows = {row.name: row for row in copy_rows([maker.read()])}
        assert rows["Memcpy HtoD"].bytes_per_s == pytest.approx(1e8)
        assert rows["Memcpy DtoD"].bytes is None
        assert rows["Memcpy DtoD"].bytes_per_s is None


class TestTimeline:
    def test_exposed_communication_and_copies(self) -> None:
        maker = TraceMaker()
        maker.kernel(GEMM, 0, 100)
        maker.kernel(REDUCE, 60, 100, stream=20)  # 40 of it while nothing computes, 20 of those beside a copy
        maker.kernel(GEMM, 120, 20)
        maker.copy("Memcpy HtoD", 150, 30, stream=13)
        (view,) = device_views(Links(maker.read()))
        found = device_time(view)
        assert (found.span, found.busy, found.idle) == (180, 180, 0)
        assert (found.compute, found.communication, found.exposed_communication) == (120, 100, 40)
        assert (found.copy, found.exposed_copy) == (30, 20)

    def test_copies_within_the_device_are_not_waited_for(self) -> None:
        maker = TraceMaker()
        maker.kernel(GEMM, 0, 100)
        maker.copy("Memcpy DtoD (Device -> Device)", 100, 50)
        maker.copy("Memcpy DtoH (Device -> Pageable)", 150, 20)
        (view,) = device_views(Links(maker.read()))
        found = device_time(view)
        assert (found.copy, found.exposed_copy) == (70, 20)

    def test_several_devices_are_looked_at_one_by_one(self) -> None:
        maker = TraceMaker()
        maker.kernel(GEMM, 0, 100)
        maker.device = 1
        maker.kernel(GEMM, 50, 100)
        times = [device_time(view) for view in device_views(Links(maker.read()))]
        assert timeline_of(times).busy_s == pytest.approx(200e-9)
        assert timeline_of(times).span_s == pytest.approx(200e-9)


class TestOperators:
    def test_self_and_total_on_host_and_device(self) -> None:
        maker = TraceMaker()
        outer = maker.operator("aten::linear", 0, 100 * US)
        inner = maker.operator("aten::addmm", 20 * US, 50 * US)
        maker.kernel(GEMM, 30 * US, 40 * US, launched=25 * US, operator=inner)
        maker.kernel(ADD, 80 * US, 10 * US, launched=75 * US, operator=outer)
        rows = {row.name: row for row in operator_rows([Links(maker.read())])}
        linear, addmm = rows["aten::linear"], rows["aten::addmm"]
        assert (linear.cpu_self_s, linear.cpu_total_s) == (50e-6, 100e-6)
        assert (linear.device_self_s, linear.device_total_s) == (10e-6, 50e-6)
        assert (addmm.device_self_s, addmm.device_total_s, addmm.calls) == (40e-6, 40e-6, 1)

    def test_an_operator_inside_its_own_kind_is_counted_once(self) -> None:
        maker = TraceMaker()
        maker.operator("aten::add", 0, 100 * US)
        maker.operator("aten::add", 10 * US, 50 * US)
        (row,) = operator_rows([Links(maker.read())])
        assert (row.calls, row.cpu_self_s, row.cpu_total_s) == (2, 100e-6, 100e-6)

    def test_launches_without_an_operator_go_to_the_one_around_them(self) -> None:
        maker = TraceMaker(rocm=True)
        maker.operator("aten::mm", 0, 100 * US)
        maker.operator("aten::relu", 200 * US, 100 * US)
        maker.kernel(GEMM, 400 * US, 40 * US, launched=50 * US)
        maker.kernel(ADD, 500 * US, 7 * US, launched=150 * US)  # between the two: nobody's
        maker.kernel(ADD, 600 * US, 5 * US)  # no launch in the file
        rows = {row.name: row for row in operator_rows([Links(maker.read())])}
        assert {name: (row.device_self_s, row.source) for name, row in rows.items()} == {
            "aten::mm": (40e-6, "operator"),
            "aten::relu": (0.0, "operator"),
            "(launched outside any operator)": (7e-6, "no-operator"),
            "(no launch in the file)": (5e-6, "no-launch"),
        }
        assert sum(row.device_share for row in rows.values()) == pytest.approx(1)

    def test_memory_goes_to_the_operator_that_took_it(self) -> None:
        maker = TraceMaker()
        maker.operator("aten::conv2d", 0, 100 * US)
        maker.operator("aten::empty", 10 * US, 10 * US)
        maker.memory(15 * US, 4096)
        maker.memory(16 * US, -4096)
        maker.memory(50 * US, 100, on_device=False)
        maker.memory(500 * US, 10**9)
        rows = {row.name: row for row in operator_rows([Links(maker.read())])}
        assert rows["aten::empty"].device_allocated_bytes == 4096
        assert rows["aten::conv2d"].device_allocated_bytes == 4096
        assert rows["aten::conv2d"].cpu_allocated_bytes == 100


class TestHost:
    def test_a_graphs_kernels_share_one_launch(self) -> None:
        maker = TraceMaker()
        maker.call("cudaGraphLaunch", 0, 20 * US, correlation=77)
        for number in range(5):
            maker.kernel(GEMM, (30 + 10 * number) * US, 5 * US, correlation=77)
        found = launches_of([HostView(Links(maker.read()))])
        assert (found.calls, found.work, found.host_s) == (1, 5, 20e-6)
        assert (found.short_kernels, found.short_share) == (5, 1.0)

    def test_waiting_for_the_device_is_not_being_busy(self) -> None:
        maker = TraceMaker()
        maker.operator("aten::mm", 0, 100 * US)
        maker.operator("aten::item", 100 * US, 400 * US)
        maker.call("cudaStreamSynchronize", 150 * US, 300 * US)
        found = host_of([HostView(Links(maker.read()))], device_busy_s=400e-6)
        assert (found.busy_s, found.blocked_s, found.ratio) == (pytest.approx(200e-6), 300e-6, pytest.approx(0.5))


class TestPhases:
    def test_our_own_marks(self) -> None:
        maker = TraceMaker()
        maker.annotation("redline/forward", 0, 100 * US)
        maker.annotation("redline/backward", 100 * US, 200 * US)
        maker.annotation("redline/optimizer", 300 * US, 50 * US)
        maker.operator("aten::mm", 0, 90 * US)
        maker.kernel(GEMM, 20 * US, 30 * US, launched=10 * US)
        maker.kernel(GEMM, 200 * US, 500 * US, launched=150 * US, thread=AUTOGRAD)
        maker.kernel(ADD, 800 * US, 10 * US, launched=310 * US)
        maker.call("cudaStreamSynchronize", 320 * US, 20 * US)
        phases = phases_of([HostView(Links(maker.read()))])
        assert [(phase.name, phase.host_s, phase.device_s) for phase in phases] == [
            ("forward", 100e-6, 30e-6),
            ("backward", 200e-6, 500e-6),
            ("optimizer", pytest.approx(30e-6), 10e-6),
        ]
        assert max(phases, key=lambda phase: phase.needs_s).name == "backward"

    def test_marks_of_torch(self) -> None:
        maker = TraceMaker()
        maker.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 900 * US)
        maker.operator("aten::mm", 1000 * US, 100 * US)
        maker.kernel(GEMM, 1100 * US, 50 * US, launched=1050 * US)
        backward = "autograd::engine::evaluate_function: AddmmBackward0"
        maker.operator(backward, 1200 * US, 100 * US, thread=AUTOGRAD)
        maker.kernel(GEMM, 1300 * US, 80 * US, launched=1250 * US, thread=AUTOGRAD)
        maker.annotation("Optimizer.step#SGD.step", 1400 * US, 60 * US)
        maker.kernel(ADD, 1450 * US, 10 * US, launched=1420 * US)
        phases = {phase.name: phase.needs_s for phase in phases_of([HostView(Links(maker.read()))])}
        assert list(phases) == ["data", "forward", "backward", "optimizer"]
        assert phases["data"] == 900e-6
        assert phases["forward"] == pytest.approx(100e-6)
        phases = phases_of([HostView(Links(maker.read()))])
        assert max(phases, key=lambda phase: phase.needs_s).name == "data"


class TestSteps:
    def test_on_the_device_a_step_ends_where_the_next_begins(self) -> None:
        maker = TraceMaker()
        for number, (begin, duration) in enumerate(((100, 80), (200, 250), (500, 100))):
            maker.annotation(f"ProfilerStep#{number + 3}", number * 20 * US, 20 * US)  # the host runs ahead
            maker.kernel(GEMM, begin * US, duration * US, launched=(number * 20 + 5) * US)
        found = steps_of([recorded(maker.read())])
        assert found.seconds == (100e-6, 300e-6, 100e-6)
        assert (found.count, found.min_s, found.max_s) == (3, 100e-6, 300e-6)
        assert found.spread == pytest.approx(0.6928, abs=1e-3)

    def test_without_a_device_the_marks_are_the_steps(self) -> None:
        maker = TraceMaker()
        for number in range(2):
            maker.annotation(f"ProfilerStep#{number}", number * 100 * US, 90 * US)
            maker.operator("aten::mm", number * 100 * US, 50 * US)
        found = steps_of([recorded(maker.read())])
        assert found.seconds == (90e-6, 90e-6)

    def test_no_marks_no_steps(self) -> None:
        maker = TraceMaker()
        maker.operator("aten::mm", 0, 50 * US)
        assert steps_of([recorded(maker.read())]) is None
