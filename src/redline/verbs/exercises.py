"""These are the seven exercises of `redline workshop`: each measures, checks its own checkpoints and answers its questions.

Every figure and every answer comes from what was measured on the learner's machine in the same walk: an exercise runs verbs, reads the
rows that they return, and writes what it learned on a `Sheet`. The results file is what learners keep and hand in; its layout stays.
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

from redline.analyze.bound import bound
from redline.analyze.profile import Profile
from redline.model.errors import BenchError
from redline.model.fields import Frozen
from redline.model.metrics import Row
from redline.model.protocol import AskHealth, Health
from redline.model.record import RunRecord
from redline.model.units import format_bytes, format_count, format_seconds, format_share, significant
from redline.model.work import Ceilings
from redline.show.result import row_document
from redline.show.terminal import one_line
from redline.trace.tables import OperatorRow
from redline.verbs.doctor import doctor
from redline.verbs.flops import flops
from redline.verbs.profile import profile
from redline.verbs.run import run
from redline.verbs.workspace import Workspace

MARKS = {True: "[x]", False: "[ ]", None: "[-]"}
FILE_WIDTH = 100
"""The lines of the results file are broken at this width."""
SAME_LOSS = 0.02
"""A 16-bit format whose loss differs by less than this share is called harmless."""
SCRIPT_TIMEOUT_S = 900.0
"""The script may take this long: a CPU needs minutes for a large model."""
STABLE_SPREAD = 0.05
"""A result is called stable if its standard deviation is below this share of its mean."""
NEAR_A_LIMIT = 0.2
"""Below this share of what the roofline allows, neither computing nor memory is called the limit."""
BUSY_HOST = 1.2
"""The host has too much to do if its time is more than this multiple of the device's."""


class Check(Frozen):
    """This is a checkpoint. `passed` is None if it could not be looked at."""

    name: str
    passed: bool | None
    seen: str
    explain: str = ""
    """If the checkpoint is not met: what that means, and what to do."""


class Sheet(msgspec.Struct, kw_only=True):
    """A sheet is one exercise of the results file. It is filled while the exercise runs."""

    number: int
    title: str
    explain: str
    figures: dict[str, str] = {}
    measured: list[dict[str, Any]] = []
    """These are the rows behind the figures, with every number in SI units."""
    checks: list[Check] = []
    answers: dict[str, str] = {}
    """It has the answer to each question."""
    skipped: str | None = None
    """If the exercise could not be done here, this is the reason."""
    example: str | None = None
    """This is an example of what one would see elsewhere. It is not measured here."""

    def check(self, name: str, passed: bool | None, seen: str, explain: str = "") -> None:
        self.checks.append(Check(name=name, passed=passed, seen=seen, explain=explain))

    def add(self, row: Row, more: str = "") -> None:
        """Adds a recipe with its speed and its ratio to the first, and what else there is to say."""
        self.measured.append(row_document(row))
        self.figures[str(row["recipe"])] = f"failed: {row.failure}" if row.failure else f"{speed_text(row)}{more}"
        error = row.metric("signal_error")
        if row.get("compared_with") and error is not None and error.value is not None:
            self.check(
                f"{row['recipe']} keeps the answers",
                row["numerics"] == "passed",
                f"relative error {error}",
                "it is farther from fp32 than rounding explains: do not use this recipe for this model",
            )

    def lines(self, width: int = FILE_WIDTH) -> Iterator[str]:
        """Yields the figures, the checkpoints with what a failed one means, and the questions with their answers."""
        if self.skipped is not None:
            yield from _broken("  ", f"skipped: {self.skipped}", width)
            if self.example is not None:
                yield from _broken("  ", f"example (not measured here): {self.example}", width)
            return
        room = max((len(name) for name in self.figures), default=0)
        for name, value in self.figures.items():
            yield from _broken(f"  {one_line(name):<{room}}  ", value, width)
        for check in self.checks:
            yield from _broken(f"  {MARKS[check.passed]} ", f"{check.name}: {check.seen}", width)
            if check.passed is False and check.explain:
                yield from _broken("      ", check.explain, width)
        for question, answer in self.answers.items():
            yield from _broken("  ", question, width)
            yield from _broken("      ", answer, width)


def _broken(start: str, text: str, width: int) -> list[str]:
    """Returns the text in lines of at most this width, all of them below its first word."""
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


@dataclass
class Lab:
    """A lab holds the workspace and the settings that every exercise works with."""

    workspace: Workspace
    device: str
    model: str
    batch: int
    image_size: int | None
    quick: bool
    shared: dict[str, float] = field(default_factory=dict)
    """Figures of one exercise that a later one needs."""
    records: list[RunRecord] = field(default_factory=list)
    """These are the records of the last run."""

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def settings(self) -> dict[str, Any]:
        size = {} if self.image_size is None else {"image_size": self.image_size}
        return {"batch": self.batch, "device": self.device, **size}

    def run(self, *recipes: str, **more: Any) -> Sequence[Row]:
        """Returns the rows of the recipes, of which the first must have been measured."""
        settings = {**self.settings, "effort": "quick" if self.quick else "normal", **more}
        result = run(self.model, recipes=recipes, **settings, workspace=self.workspace)
        self.records = list(result.records)
        if result.rows[0].failure:
            raise BenchError("crash", f"{recipes[0]}: {result.rows[0].failure}")
        return result.rows

    def script(self, *options: str, ranks: int = 1) -> dict[str, Any]:
        """Returns what `micro_benchmarking_pytorch.py` measures, in a process of its own."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "result.json"
            front = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks > 1 else []
            words = ["--network", self.model, "--batch-size", str(self.batch * ranks)]
            words += ["--device", self.device.partition(":")[0]]
            words += [] if self.image_size is None else ["--image-size", str(self.image_size)]
            self.workspace.observer.noted(f"running micro_benchmarking_pytorch.py {' '.join([*words, *options])}")
            command = [sys.executable, *front, "-m", "redline.compat.micro", *words, *options]
            try:
                done = subprocess.run(
                    [*command, "--output-file", str(file)],
                    capture_output=True,
                    text=True,
                    timeout=SCRIPT_TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise BenchError("timeout", f"the script took longer than {SCRIPT_TIMEOUT_S:g} s") from None
            if done.returncode or not file.exists():
                errors = [line for line in done.stderr.splitlines() if line.strip()]
                raise BenchError("crash", errors[-1] if errors else f"the script exited with {done.returncode}")
            measured: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return measured


def baseline(lab: Lab, sheet: Sheet) -> None:
    row = lab.run("baseline")[0]
    script = lab.script("--mode", "inference", "--iterations", "5")
    losses = script["losses"]
    lab.shared["loss"] = losses[0]
    memory = row.metric("memory_allocated") or row.metric("memory")
    sheet.measured.append(row_document(row))
    sheet.figures = {
        "throughput": speed_text(row),
        "time per step": row.cell("latency_p50") or "n/a",
        "memory at its peak": str(memory or "n/a"),
    }
    mean, deviation = row.value("latency_mean"), row.value("latency_std")
    sheet.check(
        "the time of a step is stable",
        deviation / mean < STABLE_SPREAD if mean else None,
        f"standard deviation {format_share(deviation / mean)} of the mean" if mean else "n/a",
        "something else uses this machine, or it throttles: close other programs, look at 'redline doctor'",
    )
    is_finite = all(math.isfinite(loss) for loss in losses)
    sheet.check(
        "the loss is the same in every iteration",
        is_finite and len(set(losses)) == 1,
        ", ".join(f"{loss:.4f}" for loss in dict.fromkeys(losses)),
        "inference changes nothing, so the same input must give the same loss: look for dropout or randomness"
        if is_finite
        else "the loss is not a number: the weights or the number format overflow",
    )
    sheet.check(
        "the result may be trusted",
        row["trust"] == "valid",
        str(row["trust"]),
        "; ".join(map(str, row.notes)) or "measure again on a quieter machine",
    )
    record = lab.records[0]
    sheet.answers = {
        "Why is the first iteration slow?": warm_up_answer(script["warmup_times"]),
        "How many batches is that per second?": batches_answer(row),
        "What takes the memory?": memory_answer(record, memory.value if memory else None),
        "What limits it?": limit_answer(record, lab.on_gpu),
    }


def precision(lab: Lab, sheet: Sheet) -> None:
    rows = lab.run("baseline", "amp-bf16", *(("amp", "fp16") if lab.on_gpu else ()))
    for row in rows:
        change = row.value("memory_change") if lab.on_gpu else 0.0  # a CPU's resident memory tells little
        less = f", {format_share(abs(change))} {'less' if change < 0 else 'more'} memory" if change else ""
        sheet.add(row, less)
    # The workshop's own test: the script's loss in fp32 and in fp16.
    options = ("--mode", "inference", "--iterations", "2", "--fp16")
    if "loss" not in lab.shared:
        lab.shared["loss"] = lab.script(*options, "0")["losses"][0]
    wide, half = lab.shared["loss"], lab.script(*options, "1")["losses"][0]
    apart = abs(half - wide) / abs(wide) if wide and math.isfinite(half) else math.inf
    sheet.check(
        "the loss in fp16 is that of fp32",
        apart < SAME_LOSS,
        f"{wide:.4f} and {half:.4f}" + (f", {format_share(apart)} apart" if math.isfinite(apart) else ""),
        "fp16 has a range of 65504 and three digits: this model leaves one or the other, so use bf16 or amp",
    )
    best = fastest(rows)
    sheet.answers = {
        "Is a shorter number format faster here?": faster_answer(best),
        "Why would it be?": why_faster_answer(rows[0], best),
    }


def profiler(lab: Lab, sheet: Sheet) -> None:
    seen = _profiled(lab)
    operators = sorted(seen.operators, key=lambda row: -_own_s(row, seen))
    steps = seen.steps_seen or 1
    for rank, row in enumerate(operators[:5], 1):
        sheet.figures[f"{rank}. {row.name}"] = f"{format_seconds(_own_s(row, seen) / steps)} per step"
    whole_s = sum(_own_s(row, seen) for row in operators)
    share = _convolutions_s(seen) / whole_s if whole_s else 0.0
    sheet.figures["convolutions"] = format_share(share)
    sheet.measured.append({"convolution_share": share})
    sheet.check(
        "operators were recorded",
        bool(operators),
        f"{len(operators)} operators",
        "the profiler saw nothing: look at 'redline doctor'",
    )
    if seen.host.ratio is not None:
        sheet.check(
            "the host keeps up with the device",
            seen.host.ratio < BUSY_HOST,
            f"host over device {seen.host.ratio:.2f}: {seen.host.verdict}",
            "Python launches work more slowly than the device does it: a larger batch, compilation or graphs help",
        )
    slowest = f"; most is {operators[0].name}" if operators and share <= 0.5 else ""
    sheet.answers = {
        "Are convolutions the bottleneck?": f"{'yes,' if share > 0.5 else 'no, only'} {format_share(share)} of the time{slowest}",
        "What is in the way, and what to try?": "; ".join(
            f"{finding.evidence}: try {finding.next}" for finding in seen.findings[:2]
        )
        or "nothing stands out",
    }
    if lab.on_gpu:
        half = _profiled(lab, recipes="fp16")
        wide_s, half_s = (_convolutions_s(one) / (one.steps_seen or 1) for one in (seen, half))
        times = f"{format_seconds(wide_s)} of a step in fp32, {format_seconds(half_s)} in fp16"
        sheet.answers["How long do convolutions take in each format?"] = (
            f"{times}: {wide_s / half_s:.2f}×" if half_s else times
        )


def _profiled(lab: Lab, **how: Any) -> Profile:
    result = profile(lab.model, **how, **lab.settings, workspace=lab.workspace)
    assert result.profile is not None
    return result.profile


def _own_s(row: OperatorRow, seen: Profile) -> float:
    return row.device_self_s if seen.has_device else row.cpu_self_s


def _convolutions_s(seen: Profile) -> float:
    """Counts operators, because many convolutions run as kernels that multiply matrices, more of them in fp16 than in fp32."""
    return sum(_own_s(row, seen) for row in seen.operators if re.search("conv(?!ert)", row.name))


def work(lab: Lab, sheet: Sheet) -> None:
    counted = flops(lab.model, latency=True, **lab.settings, workspace=lab.workspace)
    products, moved, params = (int(counted.rows[0].value(name)) for name in ("flops", "min_bytes", "params"))
    sheet.figures = {"parameters": f"{params:,}", "forward FLOPs per item": f"{products // lab.batch:,}"}
    try:
        known, missing = lab.workspace.device_ceilings(lab.device), "no fp32 ceiling"
    except BenchError as error:
        known, missing = None, f"the peak could not be measured: {str(error).splitlines()[0]}"
    peak = known.flops_per_s.get("fp32") if known is not None else None
    reached: list[float] = []
    is_doubted = False
    for batch in [1, lab.batch] if lab.quick else [1, lab.batch, 4 * lab.batch]:
        row = lab.run("baseline", batch=batch)[0]
        sheet.measured.append(row_document(row))
        reached.append(products / lab.batch * row.value("throughput"))
        share = f", {format_share(reached[-1] / peak)} of the measured fp32 peak" if peak else ""
        speed = row.metric("throughput")
        is_known = speed is not None and not speed.is_too_noisy
        sheet.figures[f"batch {batch}"] = f"{format_count(reached[-1])}FLOP/s{share}" if is_known else speed_text(row)
        is_doubted = is_doubted or row["trust"] != "valid"
    highest = max(reached)
    sheet.check(
        "the efficiency is plausible",
        0 < highest <= peak * 1.05 if peak else None,
        f"at most {format_share(highest / peak)} of the peak" if peak else missing,
        "no program is faster than the peak: the ceilings were measured on a busy machine, measure them "
        "again with 'redline roofline --fresh'",
    )
    sheet.answers["Does a larger batch use the device better?"] = larger_batch_answer(reached, is_doubted)
    layers = [row for row in counted.table("modules").rows if row["depth"] == 1 and "time_share" in row]
    if layers:
        slowest = max(layers, key=lambda row: row.value("time_share"))
        sheet.answers["Which part takes most of the time?"] = (
            f"{slowest['path']}: {slowest['time_share']} of the time and {slowest['macs_share']} of the work"
        )
    sheet.answers["Is it bound by computing or by memory?"] = intensity_answer(products, moved, known, highest)


def many_gpus(lab: Lab, sheet: Sheet) -> None:
    devices = lab.workspace.ask(AskHealth(), Health).devices if lab.on_gpu else ()
    gpus = sum(device.kind != "cpu" for device in devices)
    if gpus < 2:
        sheet.skipped = f"needs two GPUs, and this machine has {gpus}"
        sheet.example = (
            "with two GPUs: torchrun --nproc-per-node 2 micro_benchmarking_pytorch.py --network resnet50 "
            "--batch-size 128; scaling efficiency is (throughput of 2) / (2 × throughput of 1), often 85 to 95 %"
        )
        return
    single = lab.script("--iterations", "10")["throughput_per_s"]
    both = lab.script("--iterations", "10", ranks=2)["throughput_per_s"]
    efficiency = both / (2 * single)
    sheet.measured.append({"efficiency": efficiency})
    sheet.figures = {
        "one GPU": f"{single:.1f} img/s",
        "two GPUs": f"{both:.1f} img/s",
        "ideal": f"{2 * single:.1f} img/s",
        "efficiency": format_share(efficiency),
    }
    sheet.check(
        "the efficiency is plausible",
        0.3 < efficiency <= 1.05,
        format_share(efficiency),
        "far below: the local batch is too small, or the link between the GPUs is slow; above 1: the single "
        "GPU was slowed by something",
    )
    lost = format_share(max(1 - efficiency, 0.0))
    sheet.answers["What is lost to communication?"] = f"{lost} at {lab.batch} items per GPU; 'redline scale' shows more"


def compilation(lab: Lab, sheet: Sheet) -> None:
    more = ("compile:reduce-overhead", "fp16+compile") if lab.on_gpu and not lab.quick else ()  # half a minute each
    rows = lab.run("baseline", "compile", *more)
    compiled = next((row for row in rows[1:] if not row.failure), None)
    sheet.check(
        "compiling works here",
        compiled is not None,
        "yes" if compiled is not None else f"failed: {rows[1].failure}",
        "it needs a C++ compiler on a CPU and Triton on a GPU: 'redline doctor' says what is missing",
    )
    for row in rows:
        seconds = row.value("compile_time")
        sheet.add(row, f", {seconds:.0f} s to compile" if seconds else "")
    sheet.answers = {
        "After how many steps does compiling pay?": break_even_answer(rows[0], compiled),
        "Is the compiled model faster?": faster_answer(fastest(rows)),
    }


def vendors(lab: Lab, sheet: Sheet) -> None:
    states = {row["item"]: row["state"] for row in doctor(workspace=lab.workspace).rows}
    tool = next((name for name in ("ncu", "nsys", "rocprofv3", "rocprof") if states.get(name) == "ok"), None)
    if not lab.on_gpu or tool is None:
        sheet.skipped = "no vendor profiler is installed" if lab.on_gpu else "needs a GPU and its vendor's profiler"
        sheet.example = (
            "with one: redline profile resnet50 --tool ncu (NVIDIA) or --tool rocprofv3 (AMD) lists kernels with "
            "their share, bandwidth and occupancy; 'redline profile --import FILE' reads a file you already have"
        )
        return
    try:
        seen = _profiled(lab, tool=tool)
    except BenchError as error:
        sheet.skipped = f"{tool}: {str(error).splitlines()[0]}"
        return
    for rank, row in enumerate(seen.kernels[:5], 1):
        sheet.figures[f"{rank}. {row.short_name[:56]}"] = f"{format_share(row.share)}, {row.calls} calls"
    sheet.check(
        "kernels were listed",
        bool(seen.kernels),
        f"{len(seen.kernels)} kernels by {tool}",
        "the tool ran and saw nothing: may it read the counters? 'redline doctor' says",
    )
    sheet.answers["How many kernels matter?"] = (
        f"{seen.kernels_for_most} of {len(seen.kernels)} kernels take 80 % of the time"
    )
    for counter in seen.counters:
        if counter.kernel is None and counter.name in COUNTERS:
            sheet.answers[COUNTERS[counter.name]] = f"{format_share(counter.value)}: {counter.meaning}"


Exercise = Callable[[Lab, Sheet], None]
EXERCISES: tuple[tuple[int, str, str, Exercise], ...] = (
    (1, "Baseline", "Measure a known model in strict fp32. Every later number is compared with this one, so it must be stable first.", baseline),
    (2, "Precision", "16-bit formats halve the bytes and, where the device has them, use faster units. Each is checked against fp32.", precision),
    (3, "Profiler", "Look inside one step: which operators take the time, and does the device wait for the host?", profiler),
    (4, "FLOPs and roofline", "Count the work, divide by the time, and compare with what this device reached at its best.", work),
    (5, "Several GPUs", "Split the batch over two GPUs. What is lost to communication is one minus the scaling efficiency.", many_gpus),
    (6, "Compilation", "torch.compile fuses operators. It costs time once; see after how many steps that is paid back.", compilation),
    (7, "Vendor profilers", "The vendor's own tools read hardware counters: bandwidth, occupancy, cache hits.", vendors),
)  # fmt: skip
COUNTERS = {
    "bandwidth": "How much of the memory bandwidth is used?",
    "occupancy": "How full of threads are the multiprocessors?",
    "l1_hits": "How often does the first cache have the data?",
    "l2_hits": "How often does the second cache have it?",
    "compute": "How busy are the arithmetic units?",
    "lds_conflicts": "How often does shared memory wait for bank conflicts?",
}
"""Each hardware counter answers the question beside it."""


# What they say


def speed_text(row: Row) -> str:
    """Returns the speed, and how it compares with the first of its run."""
    speed, ratio = row.metric("throughput"), row.metric("ratio")
    text = speed.in_words if speed is not None else "n/a"
    if ratio is None:
        return text
    return f"{text}, {'too noisy to compare with' if ratio.is_too_noisy else f'{ratio}'} the baseline"


def fastest(rows: Sequence[Row]) -> Row | None:
    """Returns the row with the highest ratio to the first."""
    return max((row for row in rows if "ratio" in row), key=lambda row: row.value("ratio"), default=None)


def faster_answer(best: Row | None) -> str:
    """Returns what the table's own verdict says of the fastest recipe."""
    if best is None:
        return "nothing to compare"
    doubt = "" if best["trust"] == "valid" else f"; its measurement is {best['trust']}"
    if best["verdict"] == "faster":
        return f"yes: {best['recipe']} is {best['ratio']} as fast{doubt}"
    if (ratio := best.metric("ratio")) is not None and ratio.is_too_noisy:
        return f"not certain: the times of {best['recipe']} or of the baseline are too noisy to compare"
    if best["verdict"] == "undecided":
        return f"not certain: {best['recipe']} measured {best['ratio']}{doubt}"
    return f"no: {best['recipe']} is {best['ratio']} as fast as the baseline{doubt}"


def why_faster_answer(first: Row, best: Row | None) -> str:
    if best is None or best["verdict"] != "faster":
        ending = "this one does not" if best and best["verdict"] == "slower" else "these figures do not show it here"
        return f"16-bit numbers halve the bytes, but only a device with units for them computes faster; {ending}"
    at_most = "twice, by the bytes alone" if first["bound"] == "memory" else "as much as the faster units allow"
    return f"half the bytes for weights and activations, and faster units for products; the baseline is bound by {first['bound']}, so {at_most}"


def break_even_answer(first: Row, compiled: Row | None) -> str:
    if compiled is None or not compiled.value("compile_time"):
        return "compiling failed or was not timed"
    if compiled["verdict"] != "faster":
        is_open = compiled["verdict"] == "undecided"
        return f"{'not certain that it does' if is_open else 'never here: the compiled step is not faster'}: {compiled['ratio']}"
    saved = first.value("latency_p50") * (1 - 1 / compiled.value("ratio"))
    return f"after {math.ceil(compiled.value('compile_time') / saved):,} steps" if saved > 0 else "not measured"


def warm_up_answer(times: Sequence[float]) -> str:
    if len(times) < 2:
        return "not measured"
    first, last = times[0], times[-1]
    text = (
        f"the first iteration of micro_benchmarking_pytorch.py took {format_seconds(first)}, the last of its warm-up "
        f"{format_seconds(last)}"
    )
    if first < 1.5 * last:
        return f"here it is not: {text}"
    return f"{text}: at first libraries load, memory is taken and algorithms are chosen; so warm-up is not counted"


def limit_answer(record: RunRecord, on_gpu: bool) -> str:
    limit = bound(record)
    if not on_gpu and limit.label == "device":
        return "the CPU itself: no other device waits for it; exercise 4 asks whether computing or memory is the limit"
    return f"{limit.label}: {limit.evidence}"


def batches_answer(row: Row) -> str:
    batch, speed = int(str(row.get("batch") or 0)), row.metric("throughput")
    if speed is None or not speed.value or not batch:
        return "not measured"
    if speed.is_too_noisy:
        return "the times are too noisy to say"
    return f"{significant(row.value('throughput') / batch, 3)} batches of {batch}"


def memory_answer(record: RunRecord, peak: float | None) -> str:
    if record.prepared is None or not peak:
        return "not measured"
    weights = 4 * record.prepared.workload.parameters
    return (
        f"the weights {format_bytes(weights)} ({format_share(weights / peak)} of the peak); the rest is activations, inputs "
        "and what the libraries need"
    )


def larger_batch_answer(reached: Sequence[float], is_doubted: bool) -> str:
    if is_doubted or not reached[0]:
        return "not certain, as these times vary too much"
    gain = reached[-1] / reached[0]
    return f"{'yes' if gain > 1.1 else 'no'}: the largest batch reaches {gain:.2f}× the FLOP/s of the smallest"


def intensity_answer(products: int, moved: int, known: Ceilings | None, achieved: float) -> str:
    if not moved:
        return "not counted"
    intensity = products / moved
    text = f"{significant(intensity, 3)} FLOPs per byte, operator by operator"
    peak = known.flops_per_s.get("fp32") if known is not None else None
    if known is None or not peak or not known.copy_bytes_per_s:
        return f"{text}; the peak of this device is not known"
    ridge = peak / known.copy_bytes_per_s
    kind = "computing" if intensity > ridge else "memory"
    text = f"{text}, and this device needs {significant(ridge, 3)} to be busy with computing"
    reached = achieved / min(peak, intensity * known.copy_bytes_per_s)
    if reached < NEAR_A_LIMIT:
        return (
            f"neither yet: it reaches {format_share(reached)} of what {kind} allows, so something else takes the time, such "
            f"as small operators or other programs; {kind} would be the limit: {text}"
        )
    return f"{kind}: {text}"
