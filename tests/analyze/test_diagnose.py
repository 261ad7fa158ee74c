"""What findings say beside each other, what they promise, and advice that fits the recipe, the hardware and the trace."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from dresses import DRESSES
from kineto import ADD, CONV, GEMM, TraceMaker
from strangers import OnHost
from troubles import CODES, Program, run

from redline.analyze.finding import Finding
from redline.analyze.profile import Capture, Profile, facts_of
from redline.analyze.remedies import advice
from redline.analyze.removals import TraceFacts
from redline.analyze.rules import diagnose
from redline.model.record import Capabilities

US = 1000
SGEMM = "ampere_sgemm_128x64_tn"
TO_NHWC = "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>(int)"


def row(maker: TraceMaker, *kernels: tuple[str, int], gap_ns: int = 1000, late: bool = False) -> TraceMaker:
    """Kernels one after the other, so many µs each; launched in time, or each only after the one before has ended."""
    at = 10_000 * US
    for name, microseconds in kernels:
        launched = at - gap_ns // 2 if late else 0
        maker.kernel(name, at, microseconds * US, launched=launched, call_ns=10 if late else 4 * US)
        at += microseconds * US + gap_ns
    return maker


def codes(profile: Profile) -> set[str]:
    return {finding.code for finding in profile.findings}


def finding(profile: Profile, code: str) -> Finding:
    return next(one for one in profile.findings if one.code == code)


BUSY = row(TraceMaker(), *[(GEMM, 100)] * 10)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    program = OnHost()
    for found in (BUSY.profile(), program.steps(lambda: program.load(10 * US), program.layers).profile()):
        assert (found.findings, found.bound.label) == ((), "device")


@pytest.mark.parametrize(
    ("turned_by", "saved_us"),
    [("convolution", 90), ("another operator", 60), ("graph", 90)],
)
def test_what_prepares_a_product_goes_with_it(turned_by: str, saved_us: int) -> None:
    """Images are turned around for a strict kernel, by its own operator or before it; in a graph nobody knows."""
    maker = TraceMaker()
    if turned_by == "graph":
        maker.call("cudaGraphLaunch", 0, 20 * US, correlation=77)
    elif turned_by == "convolution":
        maker.operator("aten::cudnn_convolution", 0, 20 * US)
    else:
        maker.operator("aten::contiguous", 0, 9 * US)
        maker.operator("aten::cudnn_convolution", 10 * US, 10 * US)
    maker.operator("aten::mm", 20 * US, 10 * US)
    for place, (name, start, duration) in enumerate(((TO_NHWC, 100, 30), (SGEMM, 130, 60), (GEMM, 190, 100))):
        launch = {"correlation": 77} if turned_by == "graph" else {"launched": (10 * place + 2) * US}
        maker.kernel(name, start * US, duration * US, **launch)
    found = finding(maker.profile(), "fp32-matmul")
    assert found.gain_bound == pytest.approx(190 / (190 - saved_us), rel=1e-6)


def test_fp32_products_on_amd() -> None:
    found = finding(row(TraceMaker(rocm=True), ("Cijk_Ailk_Bljk_SB_MT64x64x16", 80)).profile(), "fp32-matmul")
    assert found.next.startswith("torch.autocast('cuda', dtype=torch.bfloat16)")


def test_a_function_that_is_run_as_it_is_gets_advice_about_its_code() -> None:
    profile = facts_of([row(TraceMaker(), (GEMM, 60), (ADD, 40)).read()])
    found = [each for task in ("infer", "step") for each in diagnose(captured(profile, "baseline", task=task))]
    assert [each.recipe for each in found if each.code == "elementwise"] == ["compile", None]
    flag = advice(captured(profile, "baseline", task="step").profile, "tf32", "why", "code")
    assert flag.recipe == "tf32", "a flag of the process reaches a function too"


def test_without_a_device_operators_are_the_work() -> None:
    maker = TraceMaker()
    for number in range(4):
        maker.operator("aten::mkldnn_convolution", number * 100 * US, 70 * US)
        maker.operator("aten::native_batch_norm", number * 100 * US + 70 * US, 30 * US)
    profile = maker.profile()
    assert not profile.has_device
    assert codes(profile) == {"batch-norm-eval"}
    maker.operator("NativeBatchNormBackward0", 400 * US, 10 * US)
    assert codes(maker.profile()) == set()


COMPILED = Capabilities(compiles=True, dissolves_modules=True)
DOES = {
    "compile": COMPILED,
    "compile:max-autotune-no-cudagraphs": COMPILED,
    "compile:reduce-overhead": msgspec.structs.replace(COMPILED, records_graph=True),
    "compile:max-autotune": msgspec.structs.replace(COMPILED, records_graph=True),
    "torchscript": msgspec.structs.replace(COMPILED, refuses_graph=True, folds_norms=True),
    "onnx": msgspec.structs.replace(COMPILED, refuses_graph=True, folds_norms=True),
    "graphs": Capabilities(records_graph=True),
    "amp": Capabilities(scales_loss=True),
}
"""As the switches themselves say: `test_compose.py` holds them to it."""


def captured(facts: TraceFacts, recipe: str, step_s: float | None = None, task: str = "infer") -> TraceFacts:
    capture = Capture(
        record_id="1",
        model="resnet50",
        task=task,
        recipe=recipe,
        batch=32,
        device="cuda:0",
        device_name="H200",
        capture_s=1.0,
        step_s=step_s,
        switches={switch: DOES.get(switch, Capabilities()) for switch in recipe.split("+")},
    )
    return replace(facts, profile=msgspec.structs.replace(facts.profile, capture=capture))


def again(facts: TraceFacts) -> dict[str, Finding]:
    return {found.code: found for found in diagnose(facts)}


TURNED = facts_of([row(TraceMaker(), (TO_NHWC, 20), (CONV, 80), (ADD, 40)).read()])
LATE = facts_of([row(TraceMaker(), *[(GEMM, 50)] * 10, gap_ns=50 * US, late=True).read()])


@pytest.mark.parametrize(
    ("facts", "recipe", "code", "says"),
    [
        (TURNED, "fp16", "layout-conversions", "-r fp16+channels-last:"),
        (TURNED, "baseline", "layout-conversions", "-r channels-last:"),
        (TURNED, "fp16+channels-last", "layout-conversions", "on already"),
        (TURNED, "fp16+compile", "elementwise", None),
        (TURNED, "onnx", "elementwise", None),  # another engine fuses by itself
        (LATE, "fp16+channels-last", "host-bound", "-r fp16+channels-last+graphs:"),
        (LATE, "fp16+compile", "host-bound", "-r fp16+compile+graphs:"),
        (LATE, "fp16+torchscript", "host-bound", "-r fp16+compile:reduce-overhead:"),  # no graphs of torchscript
        (LATE, "fp16+onnx", "host-bound", "-r fp16+compile:reduce-overhead:"),
        (LATE, "graphs", "host-bound", "graphs are on already"),
        (LATE, "compile:reduce-overhead", "host-bound", "graphs are on already"),
        (LATE, "fp16+compile:max-autotune", "host-bound", "graphs are on already"),
        (LATE, "compile:max-autotune-no-cudagraphs", "host-bound", "-r compile:max-autotune-no-cudagraphs+graphs:"),
        (LATE, "amp", "host-bound", "-r amp+graphs:"),
        (LATE, "amp for training", "host-bound", "-r amp+fused-optimizer+graphs:"),
        (LATE, "amp+fused-optimizer for training", "host-bound", "-r amp+fused-optimizer+graphs:"),
    ],
)
def test_advice_builds_on_the_recipe_at_hand(facts: TraceFacts, recipe: str, code: str, says: str | None) -> None:
    recipe, _, trains = recipe.partition(" for ")
    found = again(captured(facts, recipe, task="train" if trains else "infer")).get(code)
    assert (found is None) == (says is None)
    if found is not None and says is not None:
        assert says in found.next
        assert found.recipe == (says[3:-1] if says.startswith("-r ") else None)
        assert again(facts)[code].recipe is None, "nobody's recipe"


def test_a_trace_of_a_compiled_program_is_not_told_to_compile() -> None:
    small = row(TraceMaker(), *[("triton_poi_fused_add_mul_3", 5)] * 50, gap_ns=2 * US).profile()
    assert "reduce-overhead" in finding(small, "launch-bound").next
    assert "-r " not in finding(small, "launch-bound").next
    rest = row(TraceMaker(), ("triton_poi_fused_add_mul_3", 40), *[(ADD, 60)] * 3).profile()
    assert "graph_breaks" in finding(rest, "elementwise").next
    assert finding(row(TraceMaker(), *[(ADD, 60)] * 3).profile(), "elementwise").next.startswith("torch.compile(model)")


def test_work_that_the_profiler_slows_down_is_not_taken_from_faster_steps() -> None:
    """On a CPU operators take longer while they are recorded: half of the work was bounded by 100×."""
    maker = TraceMaker()
    maker.annotation("ProfilerStep#0", 0, 1000 * US)
    maker.operator("aten::native_batch_norm", 0, 500 * US)
    maker.operator("aten::conv2d", 500 * US, 500 * US)
    found = again(captured(facts_of([maker.read()]), "baseline", step_s=400e-6))["batch-norm-eval"]
    assert found.gain_bound == pytest.approx(2.0, rel=1e-3)


def test_findings_are_ordered_by_what_they_can_bring() -> None:
    found = row(TraceMaker(), (TO_NHWC, 5), (SGEMM, 50), (ADD, 45)).profile().findings
    assert [one.code for one in found] == ["fp32-matmul", "elementwise", "layout-conversions"]
    assert [one.saves_s for one in found] == sorted((one.saves_s for one in found), reverse=True)


def test_a_gain_is_never_infinite() -> None:
    maker = TraceMaker()
    maker.copy("Memcpy HtoD (Pageable -> Device)", 0, 100 * US)
    assert finding(maker.profile(), "copy-bound").gain_bound == 100.0


NAMELESS = "some_kernel_of_nobody"


VOLTA_SGEMM = "volta_sgemm_128x64_tn"
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(float*, float const*)"


class TestAdviceFitsTheHardwareAndTheTrace:
    @pytest.mark.parametrize(
        ("gpu", "capability", "kernel", "told", "not_told"),
        [
            ("Tesla V100-SXM2-32GB", (7, 0), SGEMM, "float16", "set_float32_matmul_precision"),
            ("Tesla T4", (7, 5), SGEMM, "float16", "bfloat16"),
            ("NVIDIA H100 80GB HBM3", (9, 0), SGEMM, "set_float32_matmul_precision", "this GPU has none"),
            ("", None, VOLTA_SGEMM, "float16", "set_float32_matmul_precision"),
        ],
    )
    def test_tensor_cores_for_fp32_only_where_there_are_some(
        self, gpu: str, capability: tuple[int, int] | None, kernel: str, told: str, not_told: str
    ) -> None:
        maker = row(TraceMaker(), (kernel, 80), (NAMELESS, 20))
        if gpu:
            maker.gpu(gpu, capability)
        advice = finding(maker.profile(), "fp32-matmul").next
        assert told in advice
        assert not_told not in advice

    def test_a_gpu_without_tensor_cores_is_promised_none(self) -> None:
        maker = row(TraceMaker(), ("maxwell_sgemm_128x64_tn", 80), (NAMELESS, 20))
        maker.gpu("Tesla P100-PCIE-16GB", (6, 0))
        assert "fp32-matmul" not in codes(maker.profile())

    def test_graphs_are_not_advised_where_there_are_some(self) -> None:
        maker = TraceMaker()
        for number in range(10):
            at = 1000 * number
            maker.call("cudaGraphLaunch", (at - 30) * US, 29 * US, correlation=9000 + number)
            for kernel in range(5):
                maker.kernel(GEMM, (at + 50 * kernel) * US, 49 * US, correlation=9000 + number)
        profile = maker.profile()
        assert profile.launches.graphs == 10
        for one in profile.findings:
            assert "torch.cuda.graph" not in one.next
            assert "reduce-overhead" not in one.next

    def test_loading_code_is_warm_up_and_not_a_slow_host(self) -> None:
        """173 launches took 6.3 ms each, every one the first of its kernel."""
        maker = TraceMaker()
        for number in range(50):
            at = 6400 * number
            maker.kernel(f"void kernel_{'abcdefghij'[number % 10]}{number}<float>(int)", (at + 6310) * US, 50 * US,
                         launched=at * US, call_ns=6300 * US)  # fmt: skip
        profile = maker.profile()
        assert profile.findings[0].code == "warm-up"
        assert not {"host-bound", "host-stall"} & codes(profile)


def test_softmax_between_products_is_attention_by_the_names_of_kernels_alone() -> None:
    layer = ((GEMM, 20), (GEMM, 30), (ADD, 20), (SOFTMAX, 30), (GEMM, 20))
    assert "attention" in codes(row(TraceMaker(), *layer * 4).profile())
    maker = TraceMaker()
    for number, (name, kernel) in enumerate(
        [("aten::addmm", GEMM), ("aten::_softmax", SOFTMAX), ("aten::mm", GEMM)]
    ):  # the end of a classifier
        operator = maker.operator(name, number * 10 * US, 5 * US)
        maker.kernel(kernel, (100 + number * 60) * US, 50 * US, launched=(number * 10 + 1) * US, operator=operator)
    assert "attention" not in codes(maker.profile())


def test_a_busy_device_is_the_limit_even_where_its_kind_is_not_known() -> None:
    evidence = str(BUSY.profile().bound.evidence)
    assert "busy 99% of the time" in evidence
    assert "not known" in evidence


class TestTroublesOfKnownSize:
    """Simulated programs with a trouble and without it: `benchmarks/trace_diagnosis.py` has many more of them."""

    def judged(self, troubles: dict[str, float], larger: str, dress: str = "as it is") -> None:
        program = Program(0, troubles, 2 if "straggler" in troubles else 1)
        whole = run(program)
        gain = whole.wall_ns / run(program.without(larger)).wall_ns
        for rank in whole.ranks:
            DRESSES[dress](rank)
        first = whole.profile().findings[0]
        assert first.code in CODES[larger]
        assert first.gain_bound >= gain * (1 - 0.005)
        if program.ranks == 1:  # of several ranks, each may be what the others wait for
            assert first.gain_bound < 1 + 2 * (gain - 1), "a bound that says something"

    @pytest.mark.parametrize("trouble", CODES)
    def test_alone(self, trouble: str) -> None:
        self.judged({trouble: 0.8}, trouble)

    @pytest.mark.parametrize(
        ("larger", "smaller"),
        [("late launch", "sync copy"), ("unfused attention", "sync copy"), ("launch overhead", "straggler"),
         ("item", "recompute"), ("late launch", "result copy")],
    )  # fmt: skip
    def test_the_larger_of_two(self, larger: str, smaller: str) -> None:
        self.judged({larger: 0.8, smaller: 0.3}, larger)

    def test_waits_that_follow_each_other_at_once(self) -> None:
        """A copy back at the end of a step and a copy in at the beginning of the next: the host may be early in between."""
        self.judged({"input copy": 0.8, "sync copy": 0.3, "result copy": 0.3}, "input copy")

    def test_a_stall_behind_a_wait_is_bounded_by_all_that_it_may_save(self) -> None:
        """Either the wait or the stall is enough to take out, so the stall's bound covers the idle time they share."""
        program = Program(2, {"result copy": 0.1, "logging sync": 0.3, "late graph": 0.3})
        whole = run(program)
        gain = whole.wall_ns / run(program.without("late graph")).wall_ns
        findings = whole.profile().findings
        stall = next(finding for finding in findings if finding.code == "host-stall")
        assert gain <= stall.gain_bound < 1 + 2 * (gain - 1)

        found = diagnose(captured(facts_of(whole.read()), "baseline"))
        stall = next(finding for finding in found if finding.code == "host-stall")
        assert "(capture with --stacks to see the Python functions" in stall.next

    @pytest.mark.parametrize("dress", DRESSES)
    def test_as_traces_of_others_show_it(self, dress: str) -> None:
        self.judged({"item": 0.8}, "item", dress)
