"""Programs of other people, as small traces whose truth is known: what the first finding says, and what it advises."""

from __future__ import annotations

import pytest
from kineto import ADAM, AUTOGRAD, REDUCE
from strangers import GEMM, MS, US, OnHost, Program, served

TENSILE = "Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SN"
SEND_RECEIVE = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def test_a_server_without_requests_has_nothing_to_do() -> None:
    profile = served("queue.py(154): get").profile()
    first = profile.findings[0]
    assert first.code == "no-work"
    assert "queue.py(154): get" in first.evidence
    assert "more requests" in first.next
    # The copy of the result ended long before: the wait in it is not what keeps the device idle.
    assert profile.idle.sync_s < 0.01 * profile.idle.host_wait_s


def test_without_stacks_a_server_looks_like_a_stall_and_the_advice_says_so() -> None:
    first = served(None).profile().findings[0]
    assert first.code == "host-stall"
    assert "no requests" in first.next
    assert "record with with_stack=True" in first.next


def test_a_stall_names_the_function_around_it() -> None:
    program = Program()
    for number in range(4):
        begin = program.now
        program.products(10, 200 * US)
        program.maker.frame("train.py(50): save_checkpoint", program.now, 9 * MS)
        program.maker.frame("torch/serialization.py(800): save", program.now + 2 * US, 9 * MS - 4 * US)
        program.now += 9 * MS
        program.step(number, begin)
    program.maker.frame("train.py(9): main", 0, program.now)
    first = program.profile().findings[0]
    assert (first.code, "save_checkpoint" in first.evidence) == ("host-stall", True)


def test_a_thread_that_shares_the_interpreter_is_named() -> None:
    program = Program()
    for number in range(4):
        begin = program.now
        program.products(60, 40 * US, host=250 * US)
        for at in range(begin, program.now, 500 * US):
            program.maker.operator("aten::div", at, 400 * US, thread=777)
        program.step(number, begin)
    first = program.profile().findings[0]
    assert first.code == "host-bound"
    assert "aten::div" in first.evidence
    assert "process of its own" in first.next


def accumulated(*, syncs: bool) -> Program:
    """Four micro-batches for each step of the optimizer; gradients are reduced after each of them, or after the last."""
    program = Program()
    described = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 25_000_000, "Group size": 8}
    for number in range(3):
        begin = program.now
        for batch in range(4):
            program.products(6, 300 * US)
            for _ in range(6):
                program.work("autograd::engine::evaluate_function: Mm", GEMM, 600 * US, thread=AUTOGRAD)
            for _ in range(3 if syncs or batch == 3 else 0):
                after = program.free[7]
                program.work(
                    "c10d::allreduce_", REDUCE, 1500 * US, stream=20, thread=AUTOGRAD, after=after, **described
                )
            program.free[7] = max(program.free.values())
        started = program.now
        program.work("aten::_fused_adamw_", ADAM, 400 * US)
        program.maker.annotation("Optimizer.step#AdamW.step", started, program.now - started)
        program.step(number, begin)
    return program


def test_gradients_that_are_reduced_too_often() -> None:
    profile = accumulated(syncs=True).profile()
    first = profile.findings[0]
    assert (profile.gradient_reductions, first.code) == (4, "communication-bound")
    assert "no_sync()" in first.next
    assert "4 times" in first.evidence


def test_accumulation_as_it_should_be_is_not_blamed() -> None:
    profile = accumulated(syncs=False).profile()
    assert profile.gradient_reductions == 1
    assert "all but its last micro-batch" not in profile.findings[0].next


def talking(operator: str, kernel: str) -> Program:
    """A layer of computing, then an exchange that nothing runs beside."""
    program = Program()
    for number in range(3):
        begin = program.now
        for _ in range(6):
            program.work(operator, kernel, 900 * US, stream=20, after=program.free[7])
            program.free[7] = program.free[20]
            program.work("aten::mm", GEMM, 700 * US)
        program.step(number, begin)
    return program


def test_advice_on_communication_fits_what_is_exchanged() -> None:
    def advised(operator: str, kernel: str) -> str:
        first = talking(operator, kernel).profile().findings[0]
        assert first.code == "communication-bound"
        return first.next

    assert "micro-batches" in advised("c10d::recv_", SEND_RECEIVE)
    # The same kernel serves another exchange: its operator tells which.
    assert "balance who sends" in advised("c10d::alltoall_base_", SEND_RECEIVE)
    assert "prefetch" in advised("c10d::_allgather_base_", "ncclDevKernel_AllGather_RING_LL(void)")
    assert "broadcast_buffers" in advised("c10d::broadcast_", "ncclDevKernel_Broadcast_RING_LL(void)")


def test_copies_on_other_streams_are_not_blamed() -> None:
    program = Program()
    for number in range(5):
        begin = program.now
        program.copy("Memcpy HtoD (Pinned -> Device)", 800 * US, blocks=False, stream=20)
        program.copy("Memcpy DtoH (Device -> Pinned)", 700 * US, blocks=False, stream=21)
        program.products(10, 300 * US)
        program.step(number, begin)
    profile = program.profile()
    assert not profile.findings
    assert profile.bound.label == "device"


def test_of_a_pinned_and_a_pageable_copy_the_pageable_one_is_blamed() -> None:
    program = Program()
    for number in range(5):
        begin = program.now
        program.copy("Memcpy HtoD (Pinned -> Device)", 900 * US, blocks=False, stream=20)
        program.copy("Memcpy HtoD (Pageable -> Device)", 900 * US, blocks=True)
        program.products(8, 300 * US)
        program.step(number, begin)
    first = program.profile().findings[0]
    assert (first.code, "once a step" in first.evidence) == ("blocking-copy", True)


def test_a_copy_on_a_stream_of_its_own_that_the_host_waits_for() -> None:
    program = Program()
    for number in range(5):
        begin = program.now
        program.copy("Memcpy HtoD (Pinned -> Device)", 3 * MS, blocks=False, stream=20)
        program.wait("cudaEventSynchronize", 20)
        program.products(8, 300 * US)
        program.step(number, begin)
    first = program.profile().findings[0]
    assert first.code == "copy-bound"
    assert "before this step's kernels" in first.next


def test_a_window_that_begins_inside_a_step_counts_only_its_own() -> None:
    program = Program()
    for number in range(8):
        program.maker.kernel(GEMM, number * 400 * US, 390 * US, correlation=900_000 + number)
    program.free[7], program.now = 3200 * US, MS
    for number in range(4):
        begin = program.now
        program.products(8, 390 * US)
        program.wait("cudaStreamSynchronize")
        program.now += 1500 * US
        program.step(7 + number, begin)
    profile = program.profile()
    assert profile.timeline.busy_s * 1e9 == 4 * 8 * 390 * US
    assert profile.findings[0].code == "sync-in-loop"


def test_calls_of_amd_are_understood() -> None:
    late, copying = Program(rocm=True), Program(rocm=True)
    for number in range(4):
        begin = late.now
        for _ in range(60):
            late.work("aten::mm", TENSILE, 9 * US, host=45 * US, caller="hipExtModuleLaunchKernel")
        late.step(number, begin)
        begin = copying.now
        copying.copy("CopyHostToDevice", 2500 * US, blocks=True, caller="hipMemcpyWithStream")
        for _ in range(10):
            copying.work("aten::mm", TENSILE, 300 * US)
        copying.step(number, begin)
    assert late.profile().findings[0].code == "host-bound"
    assert copying.profile().findings[0].code == "blocking-copy"


def test_a_loop_of_graphs_that_asks_for_each_token() -> None:
    program = Program()
    for _ in range(50):
        number, begin = program.maker.next_number() + 700_000, program.now
        program.maker.call("cudaGraphLaunch", begin, 40 * US, correlation=number)
        at = max(begin + 44 * US, program.free[7] + US)
        for _ in range(40):
            program.maker.kernel(GEMM, at, 20 * US, correlation=number)
            at += 21 * US
        program.free[7], program.now = at, begin + 40 * US
        program.copy("Memcpy DtoH (Device -> Pinned)", 3 * US, blocks=False)
        program.wait("cudaStreamSynchronize")
        program.now += 400 * US
    profile = program.profile()
    assert profile.findings[0].code == "sync-in-loop"
    assert all("reduce-overhead" not in finding.next for finding in profile.findings)


class TestWhereTheHostIsTheDevice:
    """A step of layers takes 4.83 ms."""

    def test_nothing_is_found_where_nothing_is_wrong(self) -> None:
        program = OnHost()
        found = program.steps(lambda: program.load(10 * US), program.layers).profile()
        assert found.findings == ()
        assert found.bound.label == "device"

    def test_a_slow_loader(self) -> None:
        program = OnHost()
        found = program.steps(lambda: program.load(3 * MS), program.layers).profile()
        assert [finding.code for finding in found.findings] == ["data-wait"]
        whole = found.timeline.span_s
        assert found.findings[0].gain_bound == pytest.approx(whole / (whole - 12e-3))
        assert found.bound.label == "data"

    def test_what_the_program_does_at_the_end_of_each_step(self) -> None:
        program = OnHost()
        found = program.steps(program.layers, lambda: program.sleep(3 * MS)).profile()
        assert [finding.code for finding in found.findings] == ["host-stall"]
        whole = found.timeline.span_s
        assert whole == pytest.approx(program.now / 1e9)  # the last one counts too
        assert found.findings[0].gain_bound == pytest.approx(whole / (whole - 12e-3), rel=0.01)
        assert found.bound.label == "host"

    def test_python_between_small_operators(self) -> None:
        program = OnHost(pause_ns=8 * US)
        found = program.steps(lambda: [program.work("aten::view", 4 * US) for _ in range(200)] and None)
        assert found.profile().findings[0].code == "host-bound"
        assert found.profile().findings[0].gain_bound > 3  # its calls go as well

    @pytest.mark.parametrize(("reads", "expected"), [("aten::item", "sync-in-loop"), ("aten::select", "host-bound")])
    def test_a_loop_that_reads_single_values(self, reads: str, expected: str) -> None:
        program = OnHost(pause_ns=3 * US)

        def loop() -> None:
            for _ in range(300):
                program.work("aten::select", 2 * US)
                program.work(reads, 2 * US)

        first = program.steps(lambda: program.work("aten::addmm", 900 * US), loop).profile().findings[0]
        assert first.code == expected
        assert first.saves_s == pytest.approx(4 * 300 * 10e-6, rel=0.01)

    @pytest.mark.parametrize(("length", "lasts_us", "least", "most"), [(256, 3, 5.0, 100.0), (1 << 20, 300, 1.0, 1.1)])
    def test_a_loop_over_rows_may_gain_all_but_the_work_unless_the_rows_are_long(
        self, length: int, lasts_us: int, least: float, most: float
    ) -> None:
        """As measured on a CPU: 64 rows of 256 values one by one take five times as long as all at once."""
        program, dims = OnHost(pause_ns=US), [[length], []]

        def loop() -> None:
            for _ in range(64):
                for name in ("aten::relu", "aten::mul", "aten::add"):
                    program.work(name, lasts_us * US, dims=dims, types=["float", "Scalar"])

        found = program.steps(lambda: program.work("aten::addmm", 90 * US), loop).profile().findings
        gain = max((finding.gain_bound for finding in found if finding.code == "host-bound"), default=1.0)
        assert least <= gain <= most

    @pytest.mark.parametrize(("between", "expected"), [("aten::_softmax", {"attention"}), ("aten::relu", set())])
    def test_attention_written_out(self, between: str, expected: set[str]) -> None:
        program = OnHost()

        def attend() -> None:
            program.maker.operator("aten::matmul", program.now, 210 * US)
            program.maker.operator("aten::as_strided", program.now + 20 * US, 2 * US)  # inside the product
            program.work("aten::bmm", 200 * US)
            program.work("aten::div", 40 * US)
            program.work(between, 80 * US)
            program.work("aten::bmm", 200 * US)

        found = program.steps(program.layers, attend, attend).profile()
        assert {finding.code for finding in found.findings} == expected

    @pytest.mark.parametrize(("again", "expected"), [(True, {"recompute"}), (False, set())])
    def test_checkpointing(self, again: bool, expected: set[str]) -> None:
        program = OnHost()

        def backward() -> None:
            begin, inside = program.now, {"Sequence number": 7, "Fwd thread id": 0} if again else {}
            program.now += 2 * US
            program.work("aten::addmm", 900 * US, **inside)
            program.work("aten::mm", 900 * US)
            name = "autograd::engine::evaluate_function: ReluBackward0"  # whose name says elementwise
            lasts = program.now - begin
            program.maker.operator(name, begin, lasts, **{"Sequence number": 7, "Fwd thread id": 1})

        found = program.steps(program.layers, backward, backward).profile()
        assert {finding.code for finding in found.findings} == expected

    def test_a_launch_whose_work_is_not_recorded_is_no_host_that_computes(self) -> None:
        program = OnHost()
        program.maker.call("cudaLaunchKernel", 5 * US, 4 * US, correlation=9)
        found = program.steps(program.layers, lambda: program.sleep(30 * MS)).profile()
        assert found.bound.label == "unknown"
        assert found.findings == ()


@pytest.mark.parametrize("on_device", [True, False])
def test_compiling_is_warm_up_however_torch_marks_it(on_device: bool) -> None:
    """Newer versions of torch mark it as an operator, with the first call of the compiled function around it."""
    program = Program()
    for number in range(4):
        begin = program.now
        if number == 0:
            program.maker.operator("Torch-Compiled Region: 0/0", begin, 40 * MS)
            program.maker.operator("_compile.compile_inner (dynamo_timed)", begin + 10 * US, 40 * MS - 20 * US)
            program.now += 40 * MS
        program.products(20, 300 * US, host=100 * US)
        program.step(number, begin)
    if not on_device:
        kept = ("cpu_op", "user_annotation")
        program.maker.events = [event for event in program.maker.events if event["cat"] in kept]
    found = program.profile()
    assert found.findings[0].code == "warm-up"
    assert found.idle.warm_up_s == pytest.approx(40e-3, rel=0.02)
