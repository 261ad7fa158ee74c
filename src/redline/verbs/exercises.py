"""The seven exercises of `redline workshop`: each measures, checks its own checkpoints and answers its questions.

Every figure and every answer comes from what was measured on the learner's machine in the same walk. The results file is what
learners keep and hand in; its layout stays.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from redline.analyze.profile import Profile
from redline.analyze.summary import RunSummary, VersusFirst, replicate_rows
from redline.model.errors import BenchError
from redline.model.fields import Frozen
from redline.model.metrics import RATIO, Row
from redline.model.protocol import AskHealth, Health
from redline.model.record import Prepared, RunRecord
from redline.model.units import format_bytes, format_count, format_seconds, format_share, significant
from redline.model.work import Ceilings
from redline.show.export import JsonDocument, json_document
from redline.show.terminal import one_line
from redline.trace.tables import OperatorRow
from redline.verbs.doctor import doctor
from redline.verbs.flops import flops
from redline.verbs.profile import profile
from redline.verbs.run import run
from redline.verbs.workspace import Workspace

MARKS = {True: "[x]", False: "[ ]", None: "[-]"}
RULE = "-" * 72
FILE_WIDTH = 100
"""Where the lines of the results file are broken."""


class Check(Frozen):
    """A checkpoint; None where it could not be looked at."""

    name: str
    passed: bool | None
    seen: str
    explain: str = ""
    """What a failed one means and what to do."""


class Answer(Frozen):
    question: str
    answer: str


class ExerciseResult(Frozen):
    number: int
    title: str
    explain: str
    figures: dict[str, str] = {}
    values: dict[str, float] = {}
    """The same figures as numbers, in SI units."""
    checks: tuple[Check, ...] = ()
    answers: tuple[Answer, ...] = ()
    skipped: str | None = None
    """Why it could not be done here."""
    example: str | None = None
    """What one would see elsewhere; not measured here."""

    @property
    def passed(self) -> bool:
        return self.skipped is None and all(check.passed is not False for check in self.checks)

    def __str__(self) -> str:
        return "\n".join([f"Exercise {self.number}: {self.title}", RULE, *exercise_text(self)])


class WorkshopResult(Frozen):
    device: str
    device_name: str
    model: str
    batch: int
    quick: bool
    exercises: tuple[ExerciseResult, ...] = ()

    def __str__(self) -> str:
        return results_text(self)

    def to_json(self) -> JsonDocument:
        return json_document("workshop", self)


def exercise_text(found: ExerciseResult, width: int = FILE_WIDTH) -> Iterator[str]:
    """Figures, checkpoints with what a failed one means, and the questions with their answers."""
    if found.skipped is not None:
        yield from _broken("  ", f"skipped: {found.skipped}", width)
        if found.example is not None:
            yield from _broken("  ", f"example (not measured here): {found.example}", width)
        return
    room = max((len(name) for name in found.figures), default=0)
    for name, value in found.figures.items():
        yield from _broken(f"  {one_line(name):<{room}}  ", value, width)
    for check in found.checks:
        yield from _broken(f"  {MARKS[check.passed]} ", f"{check.name}: {check.seen}", width)
        if check.passed is False and check.explain:
            yield from _broken("      ", check.explain, width)
    for answer in found.answers:
        yield from _broken("  ", answer.question, width)
        yield from _broken("      ", answer.answer, width)


def _broken(start: str, text: str, width: int) -> list[str]:
    """The text in lines of this width at most, all of them below its first word."""
    indent = " " * min(len(start), width // 2)
    lines = textwrap.wrap(
        one_line(text),
        width,
        initial_indent=start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [start.rstrip()]


def heading(result: WorkshopResult) -> list[str]:
    """What all exercises are about."""
    return [
        f"device: {one_line(result.device_name)} ({result.device})",
        f"model: {result.model}, batch {result.batch}{', quick' if result.quick else ''}",
    ]


def outcome(result: WorkshopResult) -> str:
    """How far the learner has come, in one line."""
    done = [found for found in result.exercises if found.skipped is None]
    skipped = len(result.exercises) - len(done)
    checks = [check.passed for found in done for check in found.checks if check.passed is not None]
    told = f"{len(done)} of {len(result.exercises)} exercises done{f', {skipped} skipped' if skipped else ''}"
    return f"{told}; {sum(checks)} of {len(checks)} checkpoints met"


def results_text(result: WorkshopResult) -> str:
    lines = ["My workshop results", *heading(result), ""]
    for found in result.exercises:
        lines += [str(found), ""]
    return "\n".join(lines)


# The exercises


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
    records: list[RunRecord] = field(default_factory=list)
    """What the last run measured."""

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def settings(self) -> dict[str, Any]:
        size = {} if self.image_size is None else {"image_size": self.image_size}
        return {"batch": self.batch, "device": self.device, **size}

    def run(self, recipes: list[str], **more: Any) -> list[RunSummary]:
        settings = {**self.settings, "effort": "quick" if self.quick else "normal", **more}
        records = run(self.model, recipes=recipes, **settings, workspace=self.workspace).records
        self.records = list(records)
        return replicate_rows(records, self.workspace.ceilings_of(records))

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
    (row,) = lab.run(["baseline"])
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
            "throughput": rate_text(row),
            "time per step": format_seconds(latency.p50 if latency else None),
            "memory at its peak": format_bytes(peak),
        },
        values=speed_values(row) | ({} if peak is None else {"peak_bytes": float(peak)}) | spread_values(row),
        checks=(check_stable(row), check_same_loss(losses), check_trusted(row)),
        answers=(
            Answer(question="Why is the first iteration slow?", answer=warm_up_answer(script["warmup_times"])),
            Answer(question="How many batches is that per second?", answer=batches_answer(row)),
            Answer(
                question="What takes the memory?",
                answer=memory_answer(lab.records[0].prepared if lab.records else None, peak),
            ),
            Answer(question="What limits it?", answer=limit_answer(row, lab.on_gpu)),
        ),
    )


def precision(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    recipes = ["baseline", "amp", "fp16", "amp-bf16"] if lab.on_gpu else ["baseline", "amp-bf16"]
    rows = lab.run(recipes)
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
        figures[row.recipe] = f"{rate_text(row)}{times_text(row)}{memory}"
        values |= compared_values(row)
        if row.recipe != "baseline" and row.numerics is not None and row.numerics.rel_l2 is not None:
            checks.append(check_answers(row.recipe, row.numerics.passed, row.numerics.rel_l2))
    checks.append(_similar_loss(lab))
    best = _fastest(rows[1:])
    return filled(
        base,
        figures=figures,
        values=values,
        checks=tuple(checks),
        answers=(
            Answer(question="Is a shorter number format faster here?", answer=faster_answer(best)),
            Answer(question="Why would it be?", answer=why_faster_answer(rows[0], best)),
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
    found = _profiled(lab)
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
            answer=convolutions_answer(share, operators[0].name if operators else ""),
        ),
        Answer(
            question="What is in the way, and what to try?",
            answer="; ".join(f"{one.evidence}: try {one.next}" for one in found.findings[:2]) or "nothing stands out",
        ),
    ]
    checks = [check_recorded(len(found.operators))]
    if found.host.ratio is not None:
        checks.append(check_host(found.host.ratio, found.host.verdict))
    if lab.on_gpu:
        answers.append(_in_half(lab, found))
    return filled(
        base,
        figures=figures | {"convolutions": format_share(share)},
        values={"convolution_share": share},
        checks=tuple(checks),
        answers=tuple(answers),
    )


def _profiled(lab: Lab, **how: Any) -> Profile:
    found = profile(lab.model, **how, **lab.settings, workspace=lab.workspace)
    assert found.profile is not None
    return found.profile


def _own_s(row: OperatorRow, found: Profile) -> float:
    return row.device_self_s if found.has_device else row.cpu_self_s


def _convolutions_s(found: Profile) -> float:
    """By operator: many convolutions run as kernels that multiply matrices, more of them in fp16 than in fp32."""
    return sum(_own_s(row, found) for row in found.operators if re.search("conv(?!ert)", row.name))


def _in_half(lab: Lab, found: Profile) -> Answer:
    half = _profiled(lab, recipes="fp16")
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
            table[f"batch {batch}"] = f"{format_count(achieved)}FLOP/s{of_peak_text(achieved, peak)}"
            doubted = doubted or not row.verdict.trusted
    highest = max(values.values(), default=0.0)
    answers = [
        Answer(question="Does a larger batch use the device better?", answer=larger_batch_answer(values, doubted))
    ]
    layers = [row for row in counted.table("modules").rows if row["depth"] == 1 and "time_share" in row]
    if layers:
        answers.append(Answer(question="Which part takes most of the time?", answer=slowest_answer(layers)))
    answers.append(
        Answer(
            question="Is it bound by computing or by memory?",
            answer=intensity_answer(products, moved, known, highest),
        )
    )
    return filled(
        base,
        figures={"parameters": f"{params:,}", "forward FLOPs per item": f"{products // items:,}", **table},
        values=values,
        checks=(check_efficiency(highest, peak, missing),),
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
            example=EXAMPLE_OF_SCALING,
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
        checks=(check_scaling(efficiency),),
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
    rows = lab.run(recipes)
    _require(rows[0])
    figures: dict[str, str] = {}
    values: dict[str, float] = {}
    for row in rows:
        if row.failure is not None:
            figures[row.recipe] = f"failed: {row.failure.message}"
            continue
        compile_s = row.cold_start_s.compile_s if row.cold_start_s else None
        took = "" if compile_s is None else f", {compile_s:.0f} s to compile"
        figures[row.recipe] = f"{rate_text(row)}{times_text(row)}{took}"
        values |= compared_values(row) | ({} if compile_s is None else {f"{row.recipe} compile_s": compile_s})
    compiled = next((row for row in rows[1:] if row.failure is None), None)
    best = _fastest([row for row in rows if row.failure is None])
    checks = [check_compiles(compiled is not None, figures.get("compile", "no"))]
    if compiled is not None and compiled.numerics is not None and compiled.numerics.rel_l2 is not None:
        checks.append(check_answers(compiled.recipe, compiled.numerics.passed, compiled.numerics.rel_l2))
    return filled(
        base,
        figures=figures,
        values=values,
        checks=tuple(checks),
        answers=(
            Answer(question="After how many steps does compiling pay?", answer=break_even_answer(rows[0], compiled)),
            Answer(question="Is the compiled model faster?", answer=faster_answer(best)),
        ),
    )


def vendors(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    states = {row["item"]: row["state"] for row in doctor(workspace=lab.workspace).rows}
    there = [name for name in ("ncu", "nsys", "rocprofv3", "rocprof") if states.get(name) == "ok"]
    if not lab.on_gpu or not there:
        return filled(
            base,
            skipped="needs a GPU and its vendor's profiler" if not lab.on_gpu else "no vendor profiler is installed",
            example=EXAMPLE_OF_COUNTERS,
        )
    try:
        found = _profiled(lab, tool=there[0])
    except BenchError as error:
        return filled(base, skipped=f"{there[0]}: {str(error).splitlines()[0]}")
    few = f"{found.kernels_for_most} of {len(found.kernels)} kernels take 80 % of the time"
    return filled(
        base,
        figures={
            f"{rank}. {row.short_name[:56]}": f"{format_share(row.share)}, {row.calls} calls"
            for rank, row in enumerate(found.kernels[:5], 1)
        },
        checks=(check_listed(len(found.kernels), there[0]),),
        answers=(
            Answer(question="How many kernels matter?", answer=few),
            *(
                Answer(question=COUNTERS[one.name], answer=f"{format_share(one.value)}: {one.meaning}")
                for one in found.counters
                if one.kernel is None and one.name in COUNTERS
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


# What they say


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


def memory_answer(prepared: Prepared | None, peak: int | None) -> str:
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
    """Against the baseline, with the interval; no number where nobody could use it."""
    versus = row.vs_first
    if versus is None:
        return ""
    ratio = RATIO(versus.ratio, versus.low, versus.high)
    return ", too noisy to compare with the baseline" if ratio.is_too_noisy else f", {ratio} the baseline"


def _between(versus: VersusFirst) -> str:
    if versus.low is None or versus.high is None or RATIO(versus.ratio, versus.low, versus.high).is_too_noisy:
        return ""
    return f" ({versus.low:.2f}–{versus.high:.2f})"


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
