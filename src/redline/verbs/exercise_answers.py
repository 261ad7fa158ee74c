"""What the exercises of `redline workshop` say: their checkpoints, their answers and their figures, from what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from redline.analyze.recommend.evidence import interval_text
from redline.analyze.summary import RunSummary, VersusFirst
from redline.api.run import RunResult
from redline.model.metrics import Row
from redline.model.units import format_bytes, format_seconds, format_share, significant
from redline.model.work import Ceilings
from redline.report.workshop import Check

COUNTERS = {
    "bandwidth": "How much of the memory bandwidth is used?",
    "occupancy": "How full of threads are the multiprocessors?",
    "l1_hits": "How often does the first cache have the data?",
    "l2_hits": "How often does the second cache have it?",
    "compute": "How busy are the arithmetic units?",
    "lds_conflicts": "How often does shared memory wait for bank conflicts?",
}
"""The question that each counter answers."""
EXAMPLE_OF_SCALING = (
    "with two GPUs: torchrun --nproc-per-node 2 micro_benchmarking_pytorch.py --network resnet50 "
    "--batch-size 128; scaling efficiency is (throughput of 2) / (2 × throughput of 1), often 85 to 95 %"
)
EXAMPLE_OF_COUNTERS = (
    "with one: redline profile resnet50 --tool ncu (NVIDIA) or --tool rocprofv3 (AMD) lists kernels with "
    "their share, bandwidth and occupancy; 'redline profile --import FILE' reads a file you already have"
)
STABLE_SPREAD = 0.05
"""Standard deviation over mean below which a result is called stable."""
NEAR_A_LIMIT = 0.2
"""Share of what the roofline allows below which neither computing nor memory is called the limit."""
BUSY_HOST = 1.2
"""Host time over device time above which the host has too much to do."""


def check_stable(row: RunSummary) -> Check:
    latency = row.latency_s
    known = latency is not None and latency.std is not None and latency.mean
    spread = latency.std / latency.mean if known and latency is not None and latency.std is not None else None
    return Check(
        name="the time of a step is stable",
        passed=None if spread is None else spread < STABLE_SPREAD,
        seen="n/a" if spread is None else f"standard deviation {format_share(spread)} of the mean",
        explain="something else uses this machine, or it throttles: close other programs, look at 'redline doctor'",
    )


def check_same_loss(losses: Sequence[float]) -> Check:
    finite = all(math.isfinite(loss) for loss in losses)
    return Check(
        name="the loss is the same in every iteration",
        passed=finite and len(set(losses)) == 1,
        seen=", ".join(f"{loss:.4f}" for loss in dict.fromkeys(losses)),
        explain="inference changes nothing, so the same input must give the same loss: look for dropout or randomness"
        if finite
        else "the loss is not a number: the weights or the number format overflow",
    )


def check_trusted(row: RunSummary) -> Check:
    return Check(
        name="the result may be trusted",
        passed=row.verdict.trusted,
        seen=", ".join(row.verdict.labels),
        explain="; ".join(map(str, row.verdict.reasons)) or "measure again on a quieter machine",
    )


def warm_up_answer(times: Sequence[float]) -> str:
    if len(times) < 2:
        return "not measured"
    first, last = times[0], times[-1]
    told = (
        f"the first iteration of micro_benchmarking_pytorch.py took {format_seconds(first)}, the last of its warm-up "
        f"{format_seconds(last)}"
    )
    if first < 1.5 * last:
        return f"here it is not: {told}"
    return f"{told}: at first libraries load, memory is taken and algorithms are chosen; so warm-up is not counted"


def limit_answer(row: RunSummary, on_gpu: bool) -> str:
    if not on_gpu and row.bound.label == "device":
        return "the CPU itself: no other device waits for it; exercise 4 asks whether computing or memory is the limit"
    return f"{row.bound.label}: {row.bound.evidence}"


def spread_values(row: RunSummary) -> dict[str, float]:
    latency = row.latency_s
    if latency is None or latency.std is None:
        return {}
    return {"latency_mean_s": latency.mean, "latency_std_s": latency.std}


def batches_answer(row: RunSummary) -> str:
    if not row.throughput_per_s or not row.batch:
        return "not measured"
    return f"{significant(row.throughput_per_s / row.batch, 3)} batches of {row.batch}"


def memory_answer(result: RunResult, peak: int | None) -> str:
    prepared = result.records[0].prepared if result.records else None
    if prepared is None or peak is None:
        return "not measured"
    weights = 4 * prepared.workload.parameters
    return (
        f"the weights {format_bytes(weights)} ({format_share(weights / peak)} of the peak); the rest is activations, inputs "
        "and what the libraries need"
    )


def check_answers(recipe: str, passed: bool | None, error: float) -> Check:
    return Check(
        name=f"{recipe} keeps the answers",
        passed=passed,
        seen=f"relative error {error:.1e}",
        explain="it is farther from fp32 than rounding explains: do not use this format for this model",
    )


def faster_answer(best: RunSummary | None) -> str:
    if best is None or best.vs_first is None:
        return "nothing to compare"
    versus = best.vs_first
    doubt = "" if best.verdict.trusted else f"; doubtful, as the result is {', '.join(best.verdict.labels)}"
    if versus.first_doubted:
        return f"not certain: {best.recipe} measured {versus.ratio:.2f}×, but the times of the baseline itself vary too much"
    if versus.low is not None and versus.low > 1:
        return f"yes: {best.recipe} is {versus.ratio:.2f}× as fast{_between(versus)}{doubt}"
    if versus.high is not None and versus.high < 1:
        return f"no: {best.recipe} is {versus.ratio:.2f}× as fast as the baseline{doubt}"
    return f"not certain: {best.recipe} measured {versus.ratio:.2f}×, and the interval includes 1{doubt}"


def why_faster_answer(first: RunSummary, best: RunSummary | None) -> str:
    if best is None or best.vs_first is None or (best.vs_first.low or 0) <= 1:
        told = "16-bit numbers halve the bytes, but only a device with units for them computes faster"
        is_slower = best is not None and best.vs_first is not None and (best.vs_first.high or 2) < 1
        return f"{told}; {'this one does not' if is_slower else 'these figures do not show it here'}"
    at_most = "twice, by the bytes alone" if first.bound.label == "memory" else "as much as the faster units allow"
    return f"half the bytes for weights and activations, and faster units for products; the baseline is bound by {first.bound.label}, so {at_most}"


def check_host(ratio: float, verdict: str) -> Check:
    return Check(
        name="the host keeps up with the device",
        passed=ratio < BUSY_HOST,
        seen=f"host over device {ratio:.2f}: {verdict}",
        explain="Python launches work more slowly than the device does it: a larger batch, compilation or graphs help",
    )


def of_peak_text(achieved: float, peak: float | None) -> str:
    return f", {format_share(achieved / peak)} of the measured fp32 peak" if peak else ""


def intensity_answer(products: int, moved: int, known: Ceilings | None, achieved: float) -> str:
    if not moved:
        return "not counted"
    intensity = products / moved
    told = f"{significant(intensity, 3)} FLOPs per byte, operator by operator"
    peak = known.flops_per_s.get("fp32") if known is not None else None
    if known is None or not peak or not known.copy_bytes_per_s:
        return f"{told}; the peak of this device is not known"
    ridge = peak / known.copy_bytes_per_s
    kind = "computing" if intensity > ridge else "memory"
    told = f"{told}, and this device needs {significant(ridge, 3)} to be busy with computing"
    reached = achieved / min(peak, intensity * known.copy_bytes_per_s)
    if reached < NEAR_A_LIMIT:
        return (
            f"neither yet: it reaches {format_share(reached)} of what {kind} allows, so something else takes the time, such "
            f"as small operators or other programs; {kind} would be the limit: {told}"
        )
    return f"{kind}: {told}"


def larger_batch_answer(values: dict[str, float], doubted: bool) -> str:
    if len(values) < 2:
        return "only one batch could be measured"
    first, *_, last = values.values()
    gain = last / first
    verdict = "not certain, as these times vary too much" if doubted else "yes" if gain > 1.1 else "no"
    return f"{verdict}: the largest batch reaches {gain:.2f}× the FLOP/s of the smallest"


def break_even_answer(first: RunSummary, compiled: RunSummary | None) -> str:
    if compiled is None or compiled.cold_start_s is None or compiled.cold_start_s.compile_s is None:
        return "compiling failed or was not timed"
    versus = compiled.vs_first
    if first.latency_s is None or versus is None:
        return "not measured"
    if versus.first_doubted:
        return "not certain: the times of the baseline itself vary too much"
    if versus.high is not None and versus.high <= 1:
        return f"never here: the compiled step is not faster ({versus.ratio:.2f}×)"
    if versus.low is not None and versus.low <= 1:
        return f"not certain that it does: {versus.ratio:.2f}×{_between(versus)}"
    saved = first.latency_s.p50 * (1 - 1 / versus.ratio)
    if saved <= 0:
        return "never here: the compiled step is not faster"
    return f"after {math.ceil(compiled.cold_start_s.compile_s / saved):,} steps"


def rate_text(row: RunSummary) -> str:
    return "n/a" if row.throughput_per_s is None else f"{significant(row.throughput_per_s, 4)} {row.item or 'items'}/s"


def times_text(row: RunSummary) -> str:
    """Against the baseline, with the interval."""
    versus = row.vs_first
    return "" if versus is None else f", {versus.ratio:.2f}×{_between(versus)} the baseline"


def _between(versus: VersusFirst) -> str:
    if versus.low is None or versus.high is None:
        return ""
    return f" ({interval_text(versus.low, versus.high)})"


def compared_values(row: RunSummary) -> dict[str, float]:
    versus, numerics = row.vs_first, row.numerics
    found = {
        "throughput_per_s": row.throughput_per_s,
        "ratio": versus.ratio if versus else 1.0,
        "ratio low": versus.low if versus else None,
        "ratio high": versus.high if versus else None,
        "relative error": numerics.rel_l2 if numerics else None,
    }
    return {f"{row.recipe} {name}": value for name, value in found.items() if value is not None}


def speed_values(row: RunSummary) -> dict[str, float]:
    found = {"throughput_per_s": row.throughput_per_s, "latency_p50_s": row.latency_s.p50 if row.latency_s else None}
    return {name: value for name, value in found.items() if value is not None}


def check_recorded(operators: int) -> Check:
    return Check(
        name="operators were recorded",
        passed=operators > 0,
        seen=f"{operators} operators",
        explain="the profiler saw nothing: look at 'redline doctor'",
    )


def convolutions_answer(share: float, slowest: str) -> str:
    if share > 0.5:
        return f"yes, {format_share(share)} of the time"
    return f"no, only {format_share(share)} of the time" + (f"; most is {slowest}" if slowest else "")


def check_efficiency(highest: float, peak: float | None, missing: str) -> Check:
    """`missing`: why the peak is not known."""
    return Check(
        name="the efficiency is plausible",
        passed=0 < highest <= peak * 1.05 if peak else None,
        seen=f"at most {format_share(highest / peak)} of the peak" if peak else missing or "no fp32 ceiling",
        explain="no program is faster than the peak: the ceilings were measured on a busy machine, measure them "
        "again with 'redline roofline --fresh'",
    )


def slowest_answer(layers: Sequence[Row]) -> str:
    slowest = max(layers, key=lambda row: row.value("time_share"))
    return f"{slowest['path']}: {slowest['time_share']} of the time and {slowest['macs_share']} of the work"


def check_scaling(efficiency: float) -> Check:
    return Check(
        name="the efficiency is plausible",
        passed=0.3 < efficiency <= 1.05,
        seen=format_share(efficiency),
        explain="far below: the local batch is too small, or the link between the GPUs is slow; above 1: the single "
        "GPU was slowed by something",
    )


def check_compiles(works: bool, told: str) -> Check:
    return Check(
        name="compiling works here",
        passed=works,
        seen="yes" if works else told,
        explain="it needs a C++ compiler on a CPU and Triton on a GPU: 'redline doctor' says what is missing",
    )


def check_listed(kernels: int, tool: str) -> Check:
    return Check(
        name="kernels were listed",
        passed=kernels > 0,
        seen=f"{kernels} kernels by {tool}",
        explain="the tool ran and saw nothing: may it read the counters? 'redline doctor' says",
    )
