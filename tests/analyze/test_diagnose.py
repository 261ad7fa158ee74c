"""Each rule of the diagnosis on a trace that shows it and on one that does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from kineto import ADD, CONV, GEMM, REDUCE, TraceMaker

from redline.analyze.diagnose import RULES, Finding
from redline.analyze.profile import Capture, Profile, profile_of
from redline.record import Capabilities
from redline.trace.decode import read_trace

US = 1000
SGEMM = "ampere_sgemm_128x64_tn"
TF32 = "sm80_xmma_gemm_tf32f32_tf32f32_f32_tn_n_tilesize128x128x32"
BN_EVAL = "void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>(float)"
BN_TRAIN = "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true>(float)"
TO_NHWC = "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>(int)"
FUSED = "triton_poi_fused_add_relu_3"
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"

Made = Callable[[TraceMaker], Profile]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def profile(maker: TraceMaker) -> Profile:
        return profile_of([read_trace(maker.write(tmp_path / "a.json"))])

    return profile


def row(maker: TraceMaker, *kernels: tuple[str, int], gap_ns: int = 1000, late: bool = False) -> TraceMaker:
    """Kernels one after the other, so many µs each; launched in time, or each only after the one before has ended."""
    at = 10_000 * US
    for name, microseconds in kernels:
        launched = at - gap_ns // 2 if late else 0
        maker.kernel(name, at, microseconds * US, launched=launched, call_ns=10)
        at += microseconds * US + gap_ns
    return maker


def codes(profile: Profile) -> set[str]:
    return {finding.code for finding in profile.findings}


def finding(profile: Profile, code: str) -> Finding:
    return next(one for one in profile.findings if one.code == code)


BUSY = row(TraceMaker(), *[(GEMM, 100)] * 10)


def test_nothing_is_found_where_nothing_is_wrong(made: Made) -> None:
    assert made(BUSY).findings == ()


def test_host_bound(made: Made) -> None:
    profile = made(row(TraceMaker(), *[(GEMM, 50)] * 10, gap_ns=50 * US, late=True))
    found = finding(profile, "host-bound")
    assert profile.bound.label == "host"
    assert found.next.startswith("-r graphs")
    assert found.gain_bound == pytest.approx(950 / 500, rel=1e-6)
    assert "47%" in found.evidence
    assert "host-bound" not in codes(made(row(TraceMaker(), *[(GEMM, 50)] * 10, gap_ns=5 * US, late=True)))
    # The same gaps, but the work was launched in time: the host is not to blame.
    assert "host-bound" not in codes(made(row(TraceMaker(), *[(GEMM, 50)] * 10, gap_ns=50 * US)))


def test_launch_bound(made: Made) -> None:
    profile = made(row(TraceMaker(), *[(GEMM, 5)] * 50, gap_ns=2 * US))
    found = finding(profile, "launch-bound")
    assert profile.bound.label == "launch"
    assert found.next.startswith("-r compile")
    assert found.gain_bound == pytest.approx(348 / 250, rel=1e-6)
    assert "launch-bound" not in codes(made(row(TraceMaker(), *[(GEMM, 50)] * 50, gap_ns=2 * US)))


def test_data_bound(made: Made) -> None:
    def with_loader(milliseconds: int) -> TraceMaker:
        maker = TraceMaker()
        maker.kernel(GEMM, 0, 1000 * US, launched=-10 * US)
        maker.annotation(LOADER, 500 * US, 500 * US + milliseconds * 1000 * US)
        begin = 1010 * US + milliseconds * 1000 * US
        maker.kernel(GEMM, begin, 1000 * US, launched=begin - 5 * US)
        return maker

    profile = made(with_loader(2))
    assert profile.bound.label == "data"
    assert finding(profile, "data-bound").gain_bound == pytest.approx(4010 / 2010, rel=1e-3)
    assert "host-bound" not in codes(profile)  # the host waited, but for the loader
    assert profile.bottleneck == "data"
    assert "data-bound" not in codes(made(with_loader(0)))


def test_copy_bound(made: Made) -> None:
    def with_copy(name: str, microseconds: int) -> TraceMaker:
        maker = TraceMaker()
        maker.copy(name, 0, microseconds * US, launched=-20 * US, size=10**6)
        maker.kernel(GEMM, microseconds * US, 500 * US, launched=-10 * US)
        return maker

    profile = made(with_copy("Memcpy HtoD (Pageable -> Device)", 250))
    found = finding(profile, "copy-bound")
    assert profile.bound.label == "data"
    assert "pinned memory first" in found.next
    assert "4.0 GB/s" in found.evidence
    assert found.gain_bound == pytest.approx(1.5)
    assert "pinned" not in finding(made(with_copy("Memcpy HtoD (Pinned -> Device)", 250)), "copy-bound").next
    assert "copy-bound" not in codes(made(with_copy("Memcpy HtoD (Pageable -> Device)", 25)))
    overlapped = with_copy("Memcpy HtoD (Pageable -> Device)", 250)
    overlapped.kernel(GEMM, 0, 250 * US, launched=-30 * US, stream=9)
    assert "copy-bound" not in codes(made(overlapped))


def test_communication_bound(made: Made) -> None:
    def with_collective(begin: int) -> TraceMaker:
        maker = TraceMaker()
        maker.kernel(GEMM, 0, 500 * US, launched=-10 * US)
        maker.kernel(REDUCE, begin * US, 400 * US, launched=-5 * US, stream=20)
        return maker

    profile = made(with_collective(300))
    assert profile.bound.label == "communication"
    assert finding(profile, "communication-bound").gain_bound == pytest.approx(700 / 500)
    assert "communication-bound" not in codes(made(with_collective(90)))


def test_layout_conversions(made: Made) -> None:
    profile = made(row(TraceMaker(), (TO_NHWC, 10), (CONV, 90), (TO_NHWC, 10), (CONV, 90)))
    found = finding(profile, "layout-conversions")
    assert found.next.startswith("-r channels-last")
    assert "10%" in found.evidence
    assert "layout-conversions" not in codes(made(row(TraceMaker(), (TO_NHWC, 2), (CONV, 198))))
    assert "layout-conversions" not in codes(made(row(TraceMaker(), (ADD, 10), (CONV, 90))))


def test_fp32_products(made: Made) -> None:
    found = finding(made(row(TraceMaker(), (SGEMM, 80), (NAMELESS, 20))), "fp32-matmul")
    assert found.next.startswith("-r tf32")
    assert found.gain_bound == pytest.approx(101 / 21, rel=1e-6)
    assert "fp32-matmul" not in codes(made(row(TraceMaker(), (TF32, 80), (NAMELESS, 20))))
    assert "fp32-matmul" not in codes(made(row(TraceMaker(), (SGEMM, 5), (GEMM, 95))))


def test_fp32_products_on_amd(made: Made) -> None:
    found = finding(made(row(TraceMaker(rocm=True), ("Cijk_Ailk_Bljk_SB_MT64x64x16", 80))), "fp32-matmul")
    assert found.next.startswith("-r amp")


def test_batch_norm_in_eval(made: Made) -> None:
    found = finding(made(row(TraceMaker(), (CONV, 80), (BN_EVAL, 20))), "batch-norm-eval")
    assert found.next.startswith("-r fold-bn")
    assert found.gain_bound == pytest.approx(101 / 81, rel=1e-6)
    assert "batch-norm-eval" not in codes(made(row(TraceMaker(), (CONV, 80), (BN_TRAIN, 20))))
    assert "batch-norm-eval" not in codes(made(row(TraceMaker(), (CONV, 99), (BN_EVAL, 1))))


def test_elementwise(made: Made) -> None:
    found = finding(made(row(TraceMaker(), (GEMM, 60), (ADD, 40))), "elementwise")
    assert found.next.startswith("-r compile")
    assert "elementwise" not in codes(made(row(TraceMaker(), (GEMM, 60), (FUSED, 40))))
    assert "elementwise" not in codes(made(row(TraceMaker(), (GEMM, 90), (ADD, 10))))


def test_without_a_device_operators_are_the_work(made: Made) -> None:
    maker = TraceMaker()
    for number in range(4):
        maker.operator("aten::mkldnn_convolution", number * 100 * US, 70 * US)
        maker.operator("aten::native_batch_norm", number * 100 * US + 70 * US, 30 * US)
    profile = made(maker)
    assert not profile.has_device
    assert codes(profile) == {"batch-norm-eval"}
    maker.operator("NativeBatchNormBackward0", 900 * US, 10 * US)
    assert codes(made(maker)) == set()


COMPILED = Capabilities(compiles=True, dissolves_modules=True)
DOES = {
    "compile": COMPILED,
    "compile:max-autotune-no-cudagraphs": COMPILED,
    "compile:reduce-overhead": msgspec.structs.replace(COMPILED, records_graph=True),
    "compile:max-autotune": msgspec.structs.replace(COMPILED, records_graph=True),
    "torchscript": msgspec.structs.replace(COMPILED, refuses_graph=True, folds_norms=True),
    "onnx": msgspec.structs.replace(COMPILED, refuses_graph=True, folds_norms=True),
    "graphs": Capabilities(records_graph=True),
}
"""As the switches themselves say: `test_compose.py` holds them to it."""


def captured(profile: Profile, recipe: str, step_s: float | None = None) -> Profile:
    capture = Capture(
        record_id="1",
        model="resnet50",
        task="infer",
        recipe=recipe,
        batch=32,
        device="cuda:0",
        device_name="H200",
        capture_s=1.0,
        step_s=step_s,
        profiled_step_s=None,
        switches={switch: DOES.get(switch, Capabilities()) for switch in recipe.split("+")},
    )
    return msgspec.structs.replace(profile, capture=capture)


def again(profile: Profile) -> dict[str, Finding]:
    return {found.code: found for rule in RULES if (found := rule(profile)) is not None}


def test_advice_builds_on_the_recipe_at_hand(made: Made) -> None:
    profile = made(row(TraceMaker(), (TO_NHWC, 20), (CONV, 80), (ADD, 40)))
    assert "-r fp16+channels-last:" in again(captured(profile, "fp16"))["layout-conversions"].next
    assert "-r channels-last:" in again(captured(profile, "baseline"))["layout-conversions"].next
    assert "on already" in again(captured(profile, "fp16+channels-last"))["layout-conversions"].next
    assert "elementwise" not in again(captured(profile, "fp16+compile"))
    late = made(row(TraceMaker(), *[(GEMM, 50)] * 10, gap_ns=50 * US, late=True))
    assert "-r fp16+channels-last+graphs:" in again(captured(late, "fp16+channels-last"))["host-bound"].next
    assert "-r fp16+compile+graphs:" in again(captured(late, "fp16+compile"))["host-bound"].next
    scripted = again(captured(late, "fp16+torchscript"))["host-bound"].next
    assert "-r fp16+compile:reduce-overhead:" in scripted, "torchscript and graphs exclude each other"
    assert "-r fp16+compile:reduce-overhead:" in again(captured(late, "fp16+onnx"))["host-bound"].next
    assert "elementwise" not in again(captured(profile, "onnx")), "another engine fuses by itself"
    for recipe in ("graphs", "compile:reduce-overhead", "fp16+compile:max-autotune"):
        assert "graphs are on already" in again(captured(late, recipe))["host-bound"].next
    assert "-r compile:max-autotune-no-cudagraphs+graphs:" in (
        again(captured(late, "compile:max-autotune-no-cudagraphs"))["host-bound"].next
    )


def test_findings_are_ordered_by_what_they_can_bring(made: Made) -> None:
    gains = [found.gain_bound for found in made(row(TraceMaker(), (TO_NHWC, 5), (SGEMM, 50), (ADD, 45))).findings]
    assert len(gains) == 3
    assert gains == sorted(gains, reverse=True)


def test_a_gain_is_never_infinite(made: Made) -> None:
    maker = TraceMaker()
    maker.copy("Memcpy HtoD (Pageable -> Device)", 0, 100 * US)
    assert finding(made(maker), "copy-bound").gain_bound == 100.0


NAMELESS = "some_kernel_of_nobody"
