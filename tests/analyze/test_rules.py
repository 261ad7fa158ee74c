"""Every rule of the diagnosis: a fault that fires it, the same program without the fault, and what mending it brings.

Each fault is a step of a program on a small machine (`strangers.py`), played with the fault and without it. The first finding must name
it, promise no less than the mended program gains and no more than twice the seconds, and be silent about the mended program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from kineto import ADAM, ADD, AUTOGRAD, REDUCE
from strangers import GEMM, LOADER, MS, US, OnHost, Program, served
from troubles import CODES, SOFTMAX
from troubles import Program as Simulated
from troubles import run as simulated

from redline.analyze.profile import Profile
from redline.analyze.rules import RULES

SGEMM = "ampere_sgemm_128x64_tn"
TF32 = "sm80_xmma_gemm_tf32f32_tf32f32_f32_tn_n_tilesize128x128x32"
BN_EVAL = "void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>(float)"
BN_TRAIN = "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true>(float)"
TO_NHWC = "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>(int)"
FUSED = "triton_poi_fused_add_relu_3"
EMBEDDING = "void split_embedding_codegen_forward_unweighted_kernel<float, float, float, false, long, 2ul, 32ul>(int)"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(int)"
TENSILE = "Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SN"
SEND_RECEIVE = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


class Fault(NamedTuple):
    step: Callable[[Any, bool, int], object]
    """One step of the program, with the fault or without it, and its number."""
    codes: tuple[str, ...]
    change: str
    """What the advice says."""
    says: str
    """What the evidence says."""
    bound: str
    make: Callable[[], Program | OnHost]
    is_exact: bool
    """Whether mending it brings all that its rule removes."""


FAULTS: dict[str, Fault] = {}


def fault(
    *codes: str,
    change: str = "",
    says: str = "",
    bound: str = "",
    make: Callable[[], Program | OnHost] = Program,
    is_exact: bool = True,
) -> Callable[[Any], Any]:
    def add(step: Any) -> Any:
        FAULTS[step.__name__] = Fault(step, codes, change, says, bound, make, is_exact)
        return step

    return add


def played(one: Fault, *, bad: bool, steps: int = 6) -> tuple[Profile, int]:
    """What is found in the program, and how long it takes."""
    program = one.make()
    for number in range(steps):
        begin = program.now
        one.step(program, bad, number)
        program.maker.annotation(f"ProfilerStep#{number}", begin, program.now - begin)
    return program.profile(), max(program.now, *getattr(program, "free", {}).values(), 0)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_first_and_bounded_and_its_absence_is_not(name: str) -> None:
    one = FAULTS[name]
    (found, whole), (mended, rest) = played(one, bad=True), played(one, bad=False)
    first, gain = found.findings[0], whole / rest
    assert first.code in one.codes
    assert one.change in first.next
    assert one.says in first.evidence
    assert one.bound in ("", found.bound.label)
    assert first.gain_bound >= gain * 0.995
    assert not one.is_exact or 1 - 1 / first.gain_bound <= 2 * (1 - 1 / gain)
    assert not set(one.codes) & {finding.code for finding in mended.findings}


# The host is late


@fault("host-bound", change="torch.compile(model, mode='reduce-overhead')", bound="host")
def slow_python(program: Program, bad: bool, _: int) -> None:
    program.products(40, 50 * US, host=(110 if bad else 10) * US)


@fault("host-bound", make=lambda: Program(rocm=True))
def slow_python_on_amd(program: Program, bad: bool, _: int) -> None:
    for _ in range(60):
        program.work("aten::mm", TENSILE, 9 * US, host=(45 if bad else 8) * US, caller="hipExtModuleLaunchKernel")


@fault("host-bound", change="mode='reduce-overhead'", is_exact=False)
def many_small_kernels(program: Program, bad: bool, _: int) -> None:
    """The gaps between them go as well where four do the same work."""
    for _ in range(200 if bad else 4):
        program.work("aten::mm", GEMM, (5 if bad else 250) * US, host=20 * US)
    program.products(4, 200 * US, host=15 * US)


@fault("host-stall", says="save_checkpoint", bound="host")
def a_checkpoint_in_every_step(program: Program, bad: bool, _: int) -> None:
    program.products(10, 200 * US)
    if bad:
        program.maker.frame("train.py(50): save_checkpoint", program.now, 9 * MS)
        program.maker.frame("torch/serialization.py(800): save", program.now + 2 * US, 9 * MS - 4 * US)
        program.now += 9 * MS


@fault("host-stall", change="record with with_stack=True", says="once")
def a_pause_for_garbage(program: Program, bad: bool, number: int) -> None:
    program.products(10, 100 * US)
    program.now += 20 * MS if bad and number == 3 else 0


@fault("sync-in-loop", change="read results less often", bound="host")
def printing_the_loss(program: Program, bad: bool, _: int) -> None:
    for _ in range(4):
        program.products(8, 60 * US, host=20 * US)
        if bad:
            program.wait("cudaStreamSynchronize")
            program.now += 150 * US


@fault("sync-in-loop")
def asking_for_each_token_of_a_graph(program: Program, bad: bool, _: int) -> None:
    for _ in range(8):
        number, begin = program.maker.next_number() + 700_000, program.now
        program.maker.call("cudaGraphLaunch", begin, 40 * US, correlation=number)
        at = max(begin + 44 * US, program.free[7] + US)
        for _ in range(40):
            program.maker.kernel(GEMM, at, 20 * US, correlation=number)
            at += 21 * US
        program.free[7], program.now = at, begin + 40 * US
        if bad:
            program.copy("Memcpy DtoH (Device -> Pinned)", 3 * US, blocks=False)
            program.wait("cudaStreamSynchronize")
            program.now += 400 * US


@fault("blocking-copy", change="pinned memory with non_blocking=True", says="once a step", bound="host")
def a_pageable_copy_beside_a_pinned_one(program: Program, bad: bool, _: int) -> None:
    program.copy("Memcpy HtoD (Pinned -> Device)", 900 * US, blocks=False, stream=20)
    if bad:
        program.copy("Memcpy HtoD (Pageable -> Device)", 900 * US, blocks=True)
    program.products(8, 300 * US)


@fault("blocking-copy", make=lambda: Program(rocm=True))
def a_copy_by_a_call_of_amd(program: Program, bad: bool, _: int) -> None:
    if bad:
        program.copy("CopyHostToDevice", 2500 * US, blocks=True, caller="hipMemcpyWithStream")
    for _ in range(10):
        program.work("aten::mm", TENSILE, 300 * US)


@fault("blocking-copy")
def a_copy_in_pieces(program: Program, bad: bool, _: int) -> None:
    """As CUDA copies pageable memory: the call ends when the last piece is staged, the wait after it with the copy."""
    if bad:
        begin, start = program.now, max(program.now + 8 * US, program.free[7] + US)
        end = program.free[7] = start + 1500 * US
        number = program.maker.operator("aten::copy_", begin - 1, end + 20 * US - begin)
        program.maker.copy(
            "Memcpy HtoD (Pageable -> Device)", start, 1500 * US, launched=begin, call_ns=end - 20 * US - begin,
            operator=number, caller="cudaMemcpyAsync",
        )  # fmt: skip
        program.maker.call("cudaStreamSynchronize", end - 15 * US, 20 * US)
        program.now = end + 25 * US
    program.products(10, 200 * US)


@fault("data-wait", change="more loader workers", bound="data")
def a_slow_loader(program: Program, bad: bool, _: int) -> None:
    if bad:
        program.maker.annotation(LOADER, program.now, 3 * MS)
        program.now += 3 * MS
    program.products(10, 200 * US)


@fault("allocator", change="keep shapes constant", bound="host")
def memory_from_the_driver(program: Program, bad: bool, number: int) -> None:
    """In every step, or in the first alone."""
    if bad or number == 0:
        program.maker.call("cudaFree", program.now, 6 * MS)
        program.now += 6 * MS
    program.products(10, 300 * US)


@fault("warm-up", change="record later steps", bound="host")
def compiling(program: Program, bad: bool, number: int) -> None:
    if bad and number == 0:
        program.maker.operator("Torch-Compiled Region: 0/0", program.now, 40 * MS)
        program.maker.operator("_compile.compile_inner (dynamo_timed)", program.now + 10 * US, 40 * MS - 20 * US)
        program.now += 40 * MS
    program.products(20, 300 * US, host=100 * US)


@fault("warm-up")
def recording_a_graph(program: Program, bad: bool, number: int) -> None:
    if bad and number == 0:
        program.maker.call("cudaStreamBeginCapture", program.now, 5 * US)
        program.maker.call("cudaStreamEndCapture", program.now + 30 * MS, 20 * US)
        program.now += 30 * MS + 20 * US
    program.products(10, 300 * US)


# The device waits, and not for the host


@fault("launch-bound", change="torch.compile(model)", bound="launch", is_exact=False)
def tiny_kernels_launched_in_time(program: Program, bad: bool, _: int) -> None:
    for _ in range(100 if bad else 1):
        program.work("aten::add", ADD, (4 if bad else 400) * US, host=4 * US)


@fault("dependency", change="the cause lies outside the trace", bound="unknown")
def a_pause_without_a_reason(program: Program, bad: bool, _: int) -> None:
    for _ in range(10):
        program.work("aten::mm", GEMM, 200 * US, after=program.free[7] + (60 * US if bad else 0))


@fault("copy-bound", change="wait_event", bound="data")
def weights_fetched_before_each_layer(program: Program, bad: bool, _: int) -> None:
    for _ in range(10):
        if bad:
            program.copy("Memcpy HtoD (Pinned -> Device)", 100 * US, blocks=False, stream=13)
            program.maker.call("cudaStreamWaitEvent", program.now, 2 * US)
        program.work("aten::mm", GEMM, 50 * US, after=program.free.get(13, 0) + 2 * US if bad else 0)
        program.free[13] = program.free[7]


@fault("copy-bound", change="before this step's kernels")
def waiting_for_a_copy_on_its_own_stream(program: Program, bad: bool, _: int) -> None:
    program.copy("Memcpy HtoD (Pinned -> Device)", 3 * MS, blocks=False, stream=20)
    if bad:
        program.wait("cudaEventSynchronize", 20)
    else:
        program.copy("Memcpy DtoH (Device -> Pinned)", 700 * US, blocks=False, stream=21)
    program.products(10, 400 * US)


def exchange(operator: str, kernel: str, change: str) -> None:
    def step(program: Program, bad: bool, _: int) -> None:
        for _ in range(6):
            if bad:
                program.work(operator, kernel, 900 * US, stream=20, after=program.free[7])
                program.free[7] = program.free[20]
            program.work("aten::mm", GEMM, 700 * US)

    step.__name__ = f"exposed_{operator}"
    fault("communication-bound", change=change, bound="communication")(step)


exchange("c10d::allreduce_", REDUCE, "overlap it")
exchange("c10d::recv_", SEND_RECEIVE, "micro-batches")
exchange("c10d::alltoall_base_", SEND_RECEIVE, "balance who sends")  # the same kernel: its operator tells which
exchange("c10d::_allgather_base_", "ncclDevKernel_AllGather_RING_LL(void)", "prefetch")
exchange("c10d::broadcast_", "ncclDevKernel_Broadcast_RING_LL(void)", "broadcast_buffers")


@fault("communication-bound", change="no_sync()", says="4 times")
def gradients_reduced_in_every_micro_batch(program: Program, bad: bool, _: int) -> None:
    described = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 25_000_000, "Group size": 8}
    for batch in range(4):
        program.products(6, 300 * US)
        for _ in range(6):
            program.work("autograd::engine::evaluate_function: Mm", GEMM, 600 * US, thread=AUTOGRAD)
        for _ in range(3 if bad else batch == 3):
            lasts, after = (1500 if bad else 100) * US, program.free[7]
            program.work("c10d::allreduce_", REDUCE, lasts, stream=20, thread=AUTOGRAD, after=after, **described)
        program.free[7] = max(program.free.values())
    started = program.now
    program.work("aten::_fused_adamw_", ADAM, 400 * US)
    program.maker.annotation("Optimizer.step#AdamW.step", started, program.now - started)


# Work that could be done in another way


def instead(code: str, slow: str, fast: str, change: str) -> None:
    """One kernel in the place of another, beside products that stay."""

    def step(program: Program, bad: bool, _: int) -> None:
        for _ in range(8):
            program.products(1, 100 * US)
            program.work("aten::conv2d", slow if bad else fast, (80 if bad else 9) * US)

    step.__name__ = f"{code}_beside_{fast[:12]}"
    fault(code, change=change)(step)


instead("fp32-matmul", SGEMM, TF32, "torch.backends.fp32_precision")
instead("layout-conversions", TO_NHWC, ADD, "model.to(memory_format=torch.channels_last)")
instead("batch-norm-eval", BN_EVAL, BN_TRAIN, "torch.fx.experimental.optimization.fuse")
instead("elementwise", ADD, FUSED, "torch.compile(model)")
instead("elementwise", FILL, EMBEDDING, "torch.compile(model)")


@fault("attention", change="scaled_dot_product_attention", says="not fused")
def attention_written_out(program: Program, bad: bool, _: int) -> None:
    """The host is a little late with everything, which by itself costs less."""
    for _ in range(5):
        program.work("aten::mm", GEMM, 120 * US, host=150 * US)
        for name in ("aten::bmm", "aten::div", "aten::_softmax", "aten::bmm") if bad else ():
            program.work(name, SOFTMAX if name == "aten::_softmax" else GEMM, 120 * US, host=130 * US)


@fault("slow-kernel", change="torch.compile(model, mode='max-autotune')", says="of what the device allows")
def products_at_a_tenth_of_the_roofline(program: Program, bad: bool, _: int) -> None:
    """Products of 4096³ in bf16 on an H100: 69 TFLOP/s where they take 2 ms, 687 where they take 0.2."""
    program.maker.gpu("NVIDIA H100 80GB HBM3", (9, 0))
    for _ in range(8):
        program.work("aten::mm", GEMM, (2000 if bad else 200) * US)
        operator = next(event for event in reversed(program.maker.events) if event["cat"] == "cpu_op")
        operator["args"] |= {"Input Dims": [[4096, 4096]] * 2, "Input type": ["c10::BFloat16"] * 2}


# The host is the device


@fault("data-wait", bound="data", make=OnHost)
def a_slow_loader_on_a_cpu(program: OnHost, bad: bool, _: int) -> None:
    program.load((3000 if bad else 10) * US)
    program.layers()


@fault("host-stall", bound="host", make=OnHost)
def something_else_at_the_end_of_each_step(program: OnHost, bad: bool, _: int) -> None:
    program.layers()
    program.sleep(3 * MS if bad else 0)


@fault("host-bound", make=lambda: OnHost(pause_ns=8 * US), is_exact=False)
def python_between_small_operators(program: OnHost, bad: bool, _: int) -> None:
    for _ in range(200 if bad else 1):
        program.work("aten::view", (4 if bad else 900) * US)


@fault("sync-in-loop", change="whole tensors", make=OnHost)
def reading_values_one_by_one(program: OnHost, bad: bool, _: int) -> None:
    program.work("aten::addmm", 900 * US)
    for _ in range(300 if bad else 1):
        program.work("aten::select", 2 * US)
        program.work("aten::item", 2 * US)


@fault("sync-in-loop", make=OnHost)
def deciding_over_the_rows_of_a_tensor(program: OnHost, bad: bool, _: int) -> None:
    """The loop takes the tensor apart first, with a view for each row."""
    program.work("aten::addmm", 900 * US)
    for number in range(160 if bad else 0):
        program.maker.operator("aten::select", program.now + number * 2 * US, US)
    if bad:
        program.work("aten::unbind", 320 * US)
    for _ in range(160 if bad else 1):
        program.work("aten::gt", 2 * US)
        program.work("aten::is_nonzero", 2 * US)


@fault("copies", change="copy less", bound="memory", make=OnHost)
def copying_values(program: OnHost, bad: bool, _: int) -> None:
    program.layers()
    program.work("aten::copy_" if bad else "aten::addmm", (4000 if bad else 4) * US)


@fault("attention", make=OnHost)
def attention_written_out_on_a_cpu(program: OnHost, bad: bool, _: int) -> None:
    program.layers()
    for _ in range(2):
        program.maker.operator("aten::matmul", program.now, 210 * US)
        program.maker.operator("aten::as_strided", program.now + 20 * US, 2 * US)  # inside the product
        program.work("aten::bmm", (200 if bad else 20) * US)
        if bad:
            program.work("aten::div", 40 * US)
            program.work("aten::_softmax", 80 * US)
        program.work("aten::bmm", (200 if bad else 20) * US)


@fault("recompute", change="checkpoint fewer layers", make=OnHost)
def checkpointing_on_a_cpu(program: OnHost, bad: bool, _: int) -> None:
    program.layers()
    begin, inside = program.now, {"Sequence number": 7, "Fwd thread id": 0}
    program.now += 2 * US
    if bad:
        program.work("aten::addmm", 900 * US, **inside)
    program.work("aten::mm", 900 * US)
    name = "autograd::engine::evaluate_function: ReluBackward0"  # whose name says elementwise
    program.maker.operator(name, begin, program.now - begin, **{"Sequence number": 7, "Fwd thread id": 1})


@fault("warm-up", make=OnHost)
def compiling_on_a_cpu(program: OnHost, bad: bool, number: int) -> None:
    if bad and number == 0:
        program.maker.annotation("entire_frame_compile", program.now, 40 * MS)
        program.sleep(40 * MS)
    program.layers()


@pytest.mark.parametrize(("length", "lasts_us", "least", "most"), [(256, 3, 5.0, 100.0), (1 << 20, 300, 1.0, 1.1)])
def test_a_loop_over_rows_may_gain_all_but_the_work_unless_the_rows_are_long(
    length: int, lasts_us: int, least: float, most: float
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


def test_a_server_without_requests_has_nothing_to_do() -> None:
    known, unknown = served("queue.py(154): get").profile(), served(None).profile()
    assert (known.findings[0].code, known.bound.label) == ("no-work", "host")
    assert "queue.py(154): get" in known.findings[0].evidence
    assert "more requests" in known.findings[0].next
    # The copy of the result ended long before: the wait in it is not what keeps the device idle.
    assert known.idle.sync_s < 0.01 * known.idle.host_wait_s
    assert unknown.findings[0].code == "host-stall"
    assert "no requests" in unknown.findings[0].next


def test_a_launch_whose_work_is_not_recorded_is_no_host_that_computes() -> None:
    program = OnHost()
    program.maker.call("cudaLaunchKernel", 5 * US, 4 * US, correlation=9)
    found = program.steps(program.layers, lambda: program.sleep(30 * MS)).profile()
    assert (found.bound.label, found.findings) == ("unknown", ())


@pytest.mark.parametrize("trouble", CODES)
def test_a_program_without_its_trouble_has_no_such_finding(trouble: str) -> None:
    """`test_diagnose.py` holds that the same program with it has one."""
    program = Simulated(0, {trouble: 0.8}, 2 if trouble == "straggler" else 1)
    found = simulated(program.without(trouble)).profile().findings
    assert not {finding.code for finding in found} & set(CODES[trouble])


def test_every_rule_has_a_fault() -> None:
    known = {code for one in FAULTS.values() for code in one.codes} | {
        code for codes in CODES.values() for code in codes
    }
    others = {"no-work", "decode-memory-bound", "decode-host-bound", "decode-slow-kernels", "prefill-bound"}
    assert {rule.code for rule in RULES} - known == others, "a server is above, decoding is in test_generation.py"
