"""Every rule of the diagnosis beside a fault that fires it and neighbours that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from kineto import ADD, CONV, GEMM, REDUCE, TraceMaker
from strangers import MS, OnHost, Program, served
from troubles import CODES
from troubles import Program as Simulated
from troubles import run as simulated

from redline.analyze.decoding import DECODING
from redline.analyze.rules import RULES

US = 1000
SGEMM = "ampere_sgemm_128x64_tn"
TF32 = "sm80_xmma_gemm_tf32f32_tf32f32_f32_tn_n_tilesize128x128x32"
BN_EVAL = "void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>(float)"
BN_TRAIN = "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true>(float)"
TO_NHWC = "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>(int)"
FUSED = "triton_poi_fused_add_relu_3"
NAMELESS = "some_kernel_of_nobody"
EMBEDDING = "void split_embedding_codegen_forward_unweighted_kernel<float, float, float, false, long, 2ul, 32ul>(int)"
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"

Makes = Callable[[], TraceMaker]


def kernels(*each: tuple[str, int], gap_ns: int = 1000, late: bool = False, rocm: bool = False) -> Makes:
    """Kernels one after the other, so many µs each; launched in time, or each only after the one before has ended."""

    def make() -> TraceMaker:
        maker, at = TraceMaker(rocm=rocm), 10_000 * US
        for name, microseconds in each:
            launched = at - gap_ns // 2 if late else 0
            maker.kernel(name, at, microseconds * US, launched=launched, call_ns=10 if late else 4 * US)
            at += microseconds * US + gap_ns
        return maker

    return make


def loader(milliseconds: int) -> Makes:
    """Without the loader the host has the second kernel launched before the first has ended."""

    def make() -> TraceMaker:
        maker, begin = TraceMaker(), 1010 * US + milliseconds * MS
        maker.kernel(GEMM, 0, MS, launched=-10 * US)
        maker.annotation(LOADER, 500 * US, 500 * US + milliseconds * MS)
        maker.kernel(GEMM, begin, MS, launched=begin - 5 * US)
        return maker

    return make


def copy(kind: str, microseconds: int, *, hidden: bool = False) -> Makes:
    def make() -> TraceMaker:
        maker = TraceMaker()
        maker.copy(f"Memcpy HtoD ({kind} -> Device)", 0, microseconds * US, launched=-20 * US, size=10**6)
        maker.kernel(GEMM, microseconds * US, 500 * US, launched=-10 * US)
        if hidden:
            maker.kernel(GEMM, 0, microseconds * US, launched=-30 * US, stream=9)
        return maker

    return make


def collective(begin_us: int) -> Makes:
    def make() -> TraceMaker:
        maker = TraceMaker()
        maker.kernel(GEMM, 0, 500 * US, launched=-10 * US)
        maker.kernel(REDUCE, begin_us * US, 400 * US, launched=-5 * US, stream=20)
        return maker

    return make


def unexplained(gap_us: int) -> Makes:
    def make() -> TraceMaker:
        maker = TraceMaker()
        for number in range(10):
            maker.kernel(GEMM, (100 + (390 + gap_us) * number) * US, 390 * US, launched=number * US)
        return maker

    return make


def frees(*, again: bool) -> Makes:
    """Memory is given back to the driver in every step, or by the first alone."""

    def make() -> TraceMaker:
        program = Program()
        for step in range(4):
            begin = program.now
            if step == 0 or again:
                program.maker.call("cudaFree", program.now, 6 * MS)
                program.now += 6 * MS
            program.products(10, 300 * US)
            program.step(step, begin)
        return program.maker

    return make


def products(lasts_us: int) -> Makes:
    """Of 4096³ in bf16 on an H100: 69 TFLOP/s where they take 2 ms, 687 where they take 0.2."""

    def make() -> TraceMaker:
        maker = TraceMaker()
        maker.gpu("NVIDIA H100 80GB HBM3", (9, 0))
        dims = [[4096, 4096], [4096, 4096]]
        for number in range(8):
            operator = maker.operator("aten::mm", number * 10 * US, 8 * US, dims=dims, types=["c10::BFloat16"] * 2)
            at = (100 + number * (lasts_us + 1)) * US
            maker.kernel(GEMM, at, lasts_us * US, launched=number * 10 * US, operator=operator)
        return maker

    return make


def on_host(operator: str) -> Makes:
    def make() -> TraceMaker:
        program = OnHost()
        return program.steps(program.layers, lambda: program.work(operator, 4 * MS)).maker

    return make


class Fault(NamedTuple):
    fires: Makes
    silent: tuple[Makes, ...]
    change: str = ""
    """What the advice says."""
    gain: float | None = None
    bound: str = ""


FAULTS = {
    "host-bound": Fault(
        kernels(*[(GEMM, 50)] * 10, gap_ns=50 * US, late=True),
        # The same gaps where the work was launched in time: the host is not to blame.
        (kernels(*[(GEMM, 50)] * 10, gap_ns=2 * US, late=True), kernels(*[(GEMM, 50)] * 10, gap_ns=50 * US), loader(2)),
        "torch.compile(model, mode='reduce-overhead')", 950 / 500, "host",
    ),
    "launch-bound": Fault(
        kernels(*[(GEMM, 5)] * 50, gap_ns=2 * US), (kernels(*[(GEMM, 50)] * 50, gap_ns=2 * US),), "torch.compile(model)",
        348 / 250, "launch",
    ),
    "data-wait": Fault(loader(2), (loader(0),), "more loader workers", 4010 / 2000, "data"),
    "copy-bound": Fault(
        copy("Pageable", 250), (copy("Pageable", 9), copy("Pageable", 250, hidden=True)), "pinned memory first", 1.5, "data"
    ),
    "communication-bound": Fault(collective(300), (collective(90),), "overlap it", 700 / 500, "communication"),
    "dependency": Fault(unexplained(610), (unexplained(2),), "the cause lies outside the trace", bound="unknown"),
    "layout-conversions": Fault(
        kernels((TO_NHWC, 10), (CONV, 90), (TO_NHWC, 10), (CONV, 90)),
        (kernels((TO_NHWC, 2), (CONV, 198)), kernels((ADD, 10), (CONV, 90))), "model.to(memory_format=torch.channels_last)",
    ),
    "fp32-matmul": Fault(
        kernels((SGEMM, 80), (NAMELESS, 20)), (kernels((TF32, 80), (NAMELESS, 20)), kernels((SGEMM, 5), (GEMM, 95))),
        "torch.backends.fp32_precision", 101 / 21,
    ),
    "batch-norm-eval": Fault(
        kernels((CONV, 80), (BN_EVAL, 20)), (kernels((CONV, 80), (BN_TRAIN, 20)), kernels((CONV, 99), (BN_EVAL, 1))),
        "torch.fx.experimental.optimization.fuse", 101 / 80,  # the gap before it goes too
    ),
    "elementwise": Fault(
        kernels((GEMM, 60), (ADD, 40)),
        (kernels((GEMM, 60), (FUSED, 40)), kernels((GEMM, 90), (ADD, 10)), kernels((GEMM, 30), (EMBEDDING, 70))),
        "torch.compile(model)",
    ),
    "allocator": Fault(frees(again=True), (frees(again=False),), "keep shapes constant", bound="host"),
    "slow-kernel": Fault(products(2000), (products(200),), "torch.compile(model, mode='max-autotune')"),
    "copies": Fault(on_host("aten::copy_"), (on_host("aten::addmm"),), "copy less"),
    "no-work": Fault(
        lambda: served("queue.py(154): get").maker, (lambda: served(None).maker,), "nothing to fix in the model", bound="host"
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", FAULTS)
def test_a_fault_fires_its_rule_and_its_neighbours_do_not(code: str) -> None:
    fault = FAULTS[code]
    profile = fault.fires().profile()
    (found,) = (finding for finding in profile.findings if finding.code == code)
    assert found.next.startswith(fault.change)
    assert fault.gain is None or found.gain_bound == pytest.approx(fault.gain, rel=1e-3)
    assert fault.bound in ("", profile.bound.label)
    for neighbour in fault.silent:
        assert code not in {finding.code for finding in neighbour().profile().findings}


@pytest.mark.parametrize("trouble", CODES)
def test_a_program_without_its_trouble_has_no_such_finding(trouble: str) -> None:
    """`test_diagnose.py` holds that the same program with it has one."""
    program = Simulated(0, {trouble: 0.8}, 2 if trouble == "straggler" else 1)
    found = simulated(program.without(trouble)).profile().findings
    assert not {finding.code for finding in found} & set(CODES[trouble])


def test_every_rule_has_a_fault() -> None:
    known = {*FAULTS, *(code for codes in CODES.values() for code in codes)}
    assert {rule.code for rule in RULES} <= known
    assert not {rule.code for rule in DECODING} & known, "decoding has its own: test_generation.py"
