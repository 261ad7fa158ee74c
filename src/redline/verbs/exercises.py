"""The seven exercises of `redline workshop`: each measures, checks its own checkpoints and answers its questions.

Every figure and every answer comes from what was measured on the learner's machine in the same walk.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from redline.analyze.profile import Profile
from redline.analyze.summary import RunSummary
from redline.api.doctor import doctor
from redline.api.profile import profile
from redline.api.run import RunResult, run
from redline.api.workspace import Workspace
from redline.model.errors import BenchError
from redline.model.questions import AskHealth, Health
from redline.model.units import format_bytes, format_count, format_seconds, format_share
from redline.model.work import Ceilings
from redline.report.workshop import Answer, Check, ExerciseResult
from redline.trace.operators import OperatorRow
from redline.verbs import exercise_answers as words
from redline.verbs.flops import flops

SAME_LOSS = 0.02
"""Relative difference of the loss below which a 16-bit format is called harmless."""
SCRIPT_TIMEOUT_S = 900.0


@dataclass
class Lab:
    """What every exercise works with."""

    workspace: Workspace
    device: str
    model: str
    batch: int
    image_size: int | None
    quick: bool
    shared: dict[str, float] = field(default_factory=dict)
    """Figures of one exercise that a later one needs."""

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def settings(self) -> dict[str, Any]:
        size = {} if self.image_size is None else {"image_size": self.image_size}
        return {"batch": self.batch, "device": self.device, **size}

    def run(self, recipes: list[str], **more: Any) -> RunResult:
        settings = {**self.settings, "effort": "quick" if self.quick else "normal", **more}
        return run(self.model, recipes=recipes, **settings, workspace=self.workspace)

    def script(self, *options: str, ranks: int = 1) -> dict[str, Any]:
        """What `micro_benchmarking_pytorch.py` measures, in a process of its own."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "result.json"
            front = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks > 1 else []
            size = [] if self.image_size is None else ["--image-size", str(self.image_size)]
            command = [sys.executable, *front, "-m", "redline.compat.micro", "--network", self.model]
            command += ["--batch-size", str(self.batch * ranks), "--device", self.device.partition(":")[0], *size]
            command += [*options, "--output-file", str(file)]
            said = ["micro_benchmarking_pytorch.py", *command[command.index("--network") : -2]]
            self.workspace.observer.noted(f"running {' '.join(said)}")
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=SCRIPT_TIMEOUT_S, check=False)
            except subprocess.TimeoutExpired:
                raise BenchError("timeout", f"the script took longer than {SCRIPT_TIMEOUT_S:g} s") from None
            if done.returncode or not file.exists():
                said = [line for line in done.stderr.splitlines() if line.strip()]
                raise BenchError("crash", said[-1] if said else f"the script exited with {done.returncode}")
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return found


Exercise = Callable[[Lab, ExerciseResult], ExerciseResult]


def filled(base: ExerciseResult, **parts: Any) -> ExerciseResult:
    return msgspec.structs.replace(base, **parts)


def baseline(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    result = lab.run(["baseline"])
    (row,) = result
    _require(row)
    script = lab.script("--mode", "inference", "--iterations", "5")
    losses = script["losses"]
    lab.shared["loss"] = losses[0]
    memory = row.memory
    peak = memory.peak_allocated_bytes or memory.peak_rss_bytes if memory is not None else None
    latency = row.latency_s
    return filled(
        base,
        figures={
            "throughput": words.rate_text(row),
            "time per step": format_seconds(latency.p50 if latency else None),
            "memory at its peak": format_bytes(peak),
        },
        values=words.speed_values(row)
        | ({} if peak is None else {"peak_bytes": float(peak)})
        | words.spread_values(row),
        checks=(words.check_stable(row), words.check_same_loss(losses), words.check_trusted(row)),
        answers=(
            Answer(question="Why is the first iteration slow?", answer=words.warm_up_answer(script["warmup_times"])),
            Answer(question="How many batches is that per second?", answer=words.batches_answer(row)),
            Answer(question="What takes the memory?", answer=words.memory_answer(result, peak)),
            Answer(question="What limits it?", answer=words.limit_answer(row, lab.on_gpu)),
        ),
    )


def precision(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    recipes = ["baseline", "amp", "fp16", "amp-bf16"] if lab.on_gpu else ["baseline", "amp-bf16"]
    rows = list(lab.run(recipes))
    _require(rows[0])
    figures: dict[str, str] = {}
    values: dict[str, float] = {}
    checks = []
    for row in rows:
        if row.failure is not None:
            figures[row.recipe] = f"failed: {row.failure.message}"
            continue
        change = row.vs_first.memory_change if row.vs_first and lab.on_gpu else None
        memory = "" if change is None else f", {format_share(abs(change))} {'less' if change < 0 else 'more'} memory"
        figures[row.recipe] = f"{words.rate_text(row)}{words.times_text(row)}{memory}"
        values |= words.compared_values(row)
        if row.recipe != "baseline" and row.numerics is not None and row.numerics.rel_l2 is not None:
            checks.append(words.check_answers(row.recipe, row.numerics.passed, row.numerics.rel_l2))
    checks.append(_similar_loss(lab))
    best = _fastest(rows[1:])
    return filled(
        base,
        figures=figures,
        values=values,
        checks=tuple(checks),
        answers=(
            Answer(question="Is a shorter number format faster here?", answer=words.faster_answer(best)),
            Answer(question="Why would it be?", answer=words.why_faster_answer(rows[0], best)),
        ),
    )


def _similar_loss(lab: Lab) -> Check:
    """The workshop's own test: the script's loss in fp32 and in fp16."""
    options = ("--mode", "inference", "--iterations", "2", "--fp16")
    if "loss" not in lab.shared:
        lab.shared["loss"] = lab.script(*options, "0")["losses"][0]
    wide, half = lab.shared["loss"], lab.script(*options, "1")["losses"][0]
    apart = abs(half - wide) / abs(wide) if wide and math.isfinite(half) else math.inf
    return Check(
        name="the loss in fp16 is that of fp32",
        passed=apart < SAME_LOSS,
        seen=f"{wide:.4f} and {half:.4f}" + (f", {format_share(apart)} apart" if math.isfinite(apart) else ""),
        explain="fp16 has a range of 65504 and three digits: this model leaves one or the other, so use bf16 or amp",
    )


def profiler(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    found = profile(lab.model, **lab.settings, workspace=lab.workspace).profile
    operators = sorted(found.operators, key=lambda row: -_own_s(row, found))[:5]
    steps = found.steps_seen or 1
    figures = {
        f"{rank}. {row.name}": f"{format_seconds(_own_s(row, found) / steps)} per step"
        for rank, row in enumerate(operators, 1)
    }
    whole_s = sum(_own_s(row, found) for row in found.operators)
    share = _convolutions_s(found) / whole_s if whole_s else 0.0
    answers = [
        Answer(
            question="Are convolutions the bottleneck?",
            answer=words.convolutions_answer(share, operators[0].name if operators else ""),
        ),
        Answer(
            question="What is in the way, and what to try?",
            answer="; ".join(f"{one.evidence}: try {one.next}" for one in found.findings[:2]) or "nothing stands out",
        ),
    ]
    checks = [words.check_recorded(len(found.operators))]
    if found.host.ratio is not None:
        checks.append(words.check_host(found.host.ratio, found.host.verdict))
    if lab.on_gpu:
        answers.append(_in_half(lab, found))
    return filled(
        base,
        figures=figures | {"convolutions": format_share(share)},
        values={"convolution_share": share},
        checks=tuple(checks),
        answers=tuple(answers),
    )


def _own_s(row: OperatorRow, found: Profile) -> float:
    return row.device_self_s if found.has_device else row.cpu_self_s


def _convolutions_s(found: Profile) -> float:
    """By operator: many convolutions run as kernels that multiply matrices, more of them in fp16 than in fp32."""
    return sum(_own_s(row, found) for row in found.operators if re.search("conv(?!ert)", row.name))


def _in_half(lab: Lab, found: Profile) -> Answer:
    half = profile(lab.model, recipe="fp16", **lab.settings, workspace=lab.workspace).profile
    wide_s, half_s = (_convolutions_s(each) / (each.steps_seen or 1) for each in (found, half))
    told = f"{format_seconds(wide_s)} of a step in fp32, {format_seconds(half_s)} in fp16"
    return Answer(
        question="How long do convolutions take in each format?",
        answer=f"{told}: {wide_s / half_s:.2f}×" if half_s else told,
    )


def work(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    counted = flops(lab.model, latency=True, **lab.settings, workspace=lab.workspace)
    products, moved, params = (int(counted.rows[0].value(name)) for name in ("flops", "min_bytes", "params"))
    items = lab.batch
    known, missing = _ceilings(lab)
    peak = known.flops_per_s.get("fp32") if known is not None else None
    table, values, doubted = {}, {}, False
    for batch in [1, lab.batch] if lab.quick else [1, lab.batch, 4 * lab.batch]:
        (row,) = lab.run(["baseline"], batch=batch)
        if row.failure is None and row.throughput_per_s:
            achieved = products / items * row.throughput_per_s
            values[f"batch {batch} flops_per_s"] = achieved
            table[f"batch {batch}"] = f"{format_count(achieved)}FLOP/s{words.of_peak_text(achieved, peak)}"
            doubted = doubted or not row.verdict.trusted
    highest = max(values.values(), default=0.0)
    answers = [
        Answer(question="Does a larger batch use the device better?", answer=words.larger_batch_answer(values, doubted))
    ]
    layers = [row for row in counted.table("modules").rows if row["depth"] == 1 and "time_share" in row]
    if layers:
        answers.append(Answer(question="Which part takes most of the time?", answer=words.slowest_answer(layers)))
    answers.append(
        Answer(
            question="Is it bound by computing or by memory?",
            answer=words.intensity_answer(products, moved, known, highest),
        )
    )
    return filled(
        base,
        figures={"parameters": f"{params:,}", "forward FLOPs per item": f"{products // items:,}", **table},
        values=values,
        checks=(words.check_efficiency(highest, peak, missing),),
        answers=tuple(answers),
    )


def _ceilings(lab: Lab) -> tuple[Ceilings | None, str]:
    """Those of the device; None with the reason where they could not be measured."""
    try:
        return lab.workspace.device_ceilings(lab.device), ""
    except BenchError as error:
        return None, f"the peak could not be measured: {str(error).splitlines()[0]}"


def many_gpus(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    found = lab.workspace.ask(AskHealth(), Health).devices if lab.on_gpu else ()
    gpus = sum(device.kind != "cpu" for device in found)
    if gpus < 2:
        return filled(
            base,
            skipped=f"needs two GPUs, and this machine has {gpus}",
            example=words.EXAMPLE_OF_SCALING,
        )
    single = lab.script("--iterations", "10")["throughput_per_s"]
    both = lab.script("--iterations", "10", ranks=2)["throughput_per_s"]
    efficiency = both / (2 * single)
    return filled(
        base,
        figures={
            "one GPU": f"{single:.1f} img/s",
            "two GPUs": f"{both:.1f} img/s",
            "ideal": f"{2 * single:.1f} img/s",
            "efficiency": format_share(efficiency),
        },
        values={"efficiency": efficiency},
        checks=(words.check_scaling(efficiency),),
        answers=(
            Answer(
                question="What is lost to communication?",
                answer=f"{format_share(max(1 - efficiency, 0.0))} at {lab.batch} items per GPU; 'redline scale' shows more",
            ),
        ),
    )


def compilation(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    recipes = ["baseline", "compile"]
    if lab.on_gpu and not lab.quick:  # each costs half a minute of compiling
        recipes += ["compile:reduce-overhead", "fp16+compile"]
    rows = list(lab.run(recipes))
    _require(rows[0])
    figures: dict[str, str] = {}
    values: dict[str, float] = {}
    for row in rows:
        if row.failure is not None:
            figures[row.recipe] = f"failed: {row.failure.message}"
            continue
        compile_s = row.cold_start_s.compile_s if row.cold_start_s else None
        took = "" if compile_s is None else f", {compile_s:.0f} s to compile"
        figures[row.recipe] = f"{words.rate_text(row)}{words.times_text(row)}{took}"
        values |= words.compared_values(row) | ({} if compile_s is None else {f"{row.recipe} compile_s": compile_s})
    compiled = next((row for row in rows[1:] if row.failure is None), None)
    best = _fastest([row for row in rows if row.failure is None])
    checks = [words.check_compiles(compiled is not None, figures.get("compile", "no"))]
    if compiled is not None and compiled.numerics is not None and compiled.numerics.rel_l2 is not None:
        checks.append(words.check_answers(compiled.recipe, compiled.numerics.passed, compiled.numerics.rel_l2))
    return filled(
        base,
        figures=figures,
        values=values,
        checks=tuple(checks),
        answers=(
            Answer(
                question="After how many steps does compiling pay?", answer=words.break_even_answer(rows[0], compiled)
            ),
            Answer(question="Is the compiled model faster?", answer=words.faster_answer(best)),
        ),
    )


def vendors(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    items = {item.name: item for item in doctor(workspace=lab.workspace)}
    there = [
        name for name in ("ncu", "nsys", "rocprofv3", "rocprof") if (item := items.get(name)) is not None and item.ok
    ]
    if not lab.on_gpu or not there:
        return filled(
            base,
            skipped="needs a GPU and its vendor's profiler" if not lab.on_gpu else "no vendor profiler is installed",
            example=words.EXAMPLE_OF_COUNTERS,
        )
    try:
        found = profile(lab.model, tool=there[0], **lab.settings, workspace=lab.workspace).profile
    except BenchError as error:
        return filled(base, skipped=f"{there[0]}: {str(error).splitlines()[0]}")
    few = f"{found.kernels_for_most} of {len(found.kernels)} kernels take 80 % of the time"
    return filled(
        base,
        figures={
            f"{rank}. {row.short_name[:56]}": f"{format_share(row.share)}, {row.calls} calls"
            for rank, row in enumerate(found.kernels[:5], 1)
        },
        checks=(words.check_listed(len(found.kernels), there[0]),),
        answers=(
            Answer(question="How many kernels matter?", answer=few),
            *(
                Answer(question=words.COUNTERS[one.name], answer=f"{format_share(one.value)}: {one.meaning}")
                for one in found.counters
                if one.kernel is None and one.name in words.COUNTERS
            ),
        ),
    )


EXERCISES: tuple[tuple[int, str, str, Exercise], ...] = (
    (1, "Baseline", "Measure a known model in strict fp32. Every later number is compared with this one, so it must be stable first.", baseline),
    (2, "Precision", "16-bit formats halve the bytes and, where the device has them, use faster units. Each is checked against fp32.", precision),
    (3, "Profiler", "Look inside one step: which operators take the time, and does the device wait for the host?", profiler),
    (4, "FLOPs and roofline", "Count the work, divide by the time, and compare with what this device reached at its best.", work),
    (5, "Several GPUs", "Split the batch over two GPUs. What is lost to communication is one minus the scaling efficiency.", many_gpus),
    (6, "Compilation", "torch.compile fuses operators. It costs time once; see after how many steps that is paid back.", compilation),
    (7, "Vendor profilers", "The vendor's own tools read hardware counters: bandwidth, occupancy, cache hits.", vendors),
)  # fmt: skip


def _require(row: RunSummary) -> None:
    if row.failure is not None:
        raise BenchError("crash", f"{row.recipe}: {row.failure.message}")


def _fastest(rows: Sequence[RunSummary]) -> RunSummary | None:
    """Of the rows that have a ratio to the first."""
    compared = [row for row in rows if row.vs_first is not None]
    return max(compared, key=lambda row: row.vs_first.ratio if row.vs_first else 0.0, default=None)
