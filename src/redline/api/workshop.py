"""`redline workshop`: seven exercises on the learner's own machine, checked and written down by the tool.

Each exercise measures, checks its own checkpoints and answers its questions from the numbers it just took. What the
hardware cannot do is skipped, with an example that is marked as one.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from redline.analyze.summary import RunSummary
from redline.api.ceilings import ceilings
from redline.api.doctor import doctor
from redline.api.flops import flops
from redline.api.profile import profile
from redline.api.run import RunResult, run
from redline.api.settings import specs_of
from redline.api.workspace import Workspace, use
from redline.errors import BenchError, RedlineError, SpecError
from redline.protocol import AskHealth, Health
from redline.report.workshop import Answer, Check, ExerciseResult, WorkshopResult, results_text
from redline.units import format_bytes, format_seconds, format_share, significant

STABLE_SPREAD = 0.05
"""Standard deviation over mean below which a result is called stable."""
SMALL_ERROR = 0.05
"""Relative error of a 16-bit format that random weights usually stay under."""
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
    shared: dict[str, Any] = field(default_factory=dict)

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


def workshop(
    exercises: list[int] | None = None,
    *,
    folder: str | Path = ".",
    quick: bool = False,
    resume: bool = False,
    device: str = "auto",
    on_exercise: Callable[[ExerciseResult], None] = lambda result: None,
    on_start: Callable[[int, str, str], None] = lambda number, title, explain: None,
    workspace: Workspace | None = None,
) -> WorkshopResult:
    """Do the exercises, and fill in `my_workshop_results.txt` and `.json` in `folder` after each one."""
    chosen = exercises or [number for number, _, _, _ in EXERCISES]
    for number in chosen:
        if not 1 <= number <= len(EXERCISES):
            raise SpecError(f"exercise must be from 1 to {len(EXERCISES)}, got {number}")
    folder = Path(folder)
    with use(workspace) as opened:
        resolved = opened.checked(specs_of(opened, "simple_cnn", device=device)[0])[0].device
        lab = _lab(resolved, opened, quick)
        name = opened.environment(resolved).device.name
        result = WorkshopResult(device=resolved, device_name=name, model=lab.model, batch=lab.batch, quick=quick)
        done = _kept(folder, result) if resume else {}
        for number, title, explain, exercise in EXERCISES:
            if number not in chosen or number in done:
                continue
            on_start(number, title, explain)
            try:
                found = exercise(lab, ExerciseResult(number=number, title=title, explain=explain))
            except RedlineError as error:
                found = ExerciseResult(number=number, title=title, explain=explain, skipped=str(error).splitlines()[0])
            done[number] = found
            result = msgspec.structs.replace(result, exercises=tuple(done[key] for key in sorted(done)))
            _write(folder, result)
            on_exercise(found)
    return msgspec.structs.replace(result, exercises=tuple(done[key] for key in sorted(done)))


def _lab(device: str, workspace: Workspace, quick: bool) -> Lab:
    if device != "cpu":
        return Lab(workspace, device, "resnet50", 32, None, quick)
    return Lab(workspace, device, "resnet18" if not quick else "simple_cnn", 4, 64 if not quick else 32, quick)


def _kept(folder: Path, now: WorkshopResult) -> dict[int, ExerciseResult]:
    """What an earlier walk on the same device found."""
    path = folder / "my_workshop_results.json"
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        kept = msgspec.convert(
            {key: value for key, value in plain.items() if key not in ("schema", "kind")}, WorkshopResult
        )
    except FileNotFoundError:
        raise SpecError(f"nothing to resume in {folder}: leave out --resume") from None
    except (ValueError, msgspec.ValidationError) as error:
        raise SpecError(f"cannot resume from {path}: {error}") from None
    if (kept.device_name, kept.model, kept.quick) != (now.device_name, now.model, now.quick):
        raise SpecError(f"{path} is of another device or mode: start in another folder")
    return {exercise.number: exercise for exercise in kept.exercises if exercise.skipped is None}


def _write(folder: Path, result: WorkshopResult) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "my_workshop_results.txt").write_text(results_text(result), encoding="utf-8")
        (folder / "my_workshop_results.json").write_text(result.to_json(), encoding="utf-8")
    except OSError as error:
        raise SpecError(f"cannot write into {folder}: {error.strerror}") from None


def _filled(base: ExerciseResult, **parts: Any) -> ExerciseResult:
    return msgspec.structs.replace(base, **parts)


def _baseline(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    (row,) = lab.run(["baseline"])
    _require(row)
    lab.shared["baseline"] = row
    spread = _spread(row)
    losses = _script(lab, "--mode", "inference", "--iterations", "5")["losses"]
    reserved = row.memory.peak_reserved_bytes or row.memory.peak_rss_bytes if row.memory else None
    stable = Check(
        name="the time of a step is stable",
        passed=None if spread is None else spread < STABLE_SPREAD,
        seen="n/a" if spread is None else f"standard deviation {format_share(spread)} of the mean",
        explain="something else uses this machine, or it throttles: close other programs, look at 'redline doctor'",
    )
    same = Check(
        name="the loss is the same in every iteration",
        passed=len(set(losses)) == 1,
        seen=", ".join(f"{loss:.4f}" for loss in losses[:3]),
        explain="inference changes nothing, so the same input must give the same loss: look for dropout or randomness",
    )
    trusted = Check(
        name="the result may be trusted", passed=row.verdict.trusted, seen=", ".join(row.verdict.labels),
        explain="the labels say why not; a quieter machine or '--effort normal' helps",
    )  # fmt: skip
    return _filled(
        base,
        figures=_row_figures(row) | {"memory": format_bytes(reserved)},
        values=_values(row),
        checks=(stable, same, trusted),
        answers=(
            Answer(question="Why is the first iteration slow?", answer=_cold(row)),
            Answer(question="What limits it?", answer=str(row.bound.label)),
        ),
    )


def _precision(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    recipes = ["baseline", "amp", "fp16", "amp-bf16"] if lab.on_gpu else ["baseline", "amp-bf16"]
    rows = list(lab.run(recipes))
    _require(rows[0])
    figures, values, checks = {}, {}, []
    for row in rows:
        if row.failure is not None:
            figures[row.recipe] = f"failed: {row.failure.message}"
            continue
        ratio = row.vs_first.ratio if row.vs_first else 1.0
        figures[row.recipe] = f"{_rate(row)}, {ratio:.2f}× the baseline"
        values[f"{row.recipe} ratio"] = ratio
        error = row.numerics.rel_l2 if row.numerics else None
        if row.recipe != "baseline" and error is not None:
            checks.append(
                Check(
                    name=f"{row.recipe} keeps the answers", passed=row.numerics.passed if row.numerics else None,
                    seen=f"relative error {error:.1e}",
                    explain="it is farther from fp32 than rounding explains: do not use this format for this model",
                )
            )  # fmt: skip
    best = max(
        (row for row in rows if row.vs_first), key=lambda row: row.vs_first.ratio if row.vs_first else 0, default=None
    )
    return _filled(
        base, figures=figures, values=values, checks=tuple(checks),
        answers=(Answer(question="Is a shorter number format faster here?", answer=_faster(best)),),
    )  # fmt: skip


def _profiler(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    found = profile(lab.model, **lab.settings, workspace=lab.workspace).profile
    classes = {row.name: row.share for row in found.classes}
    operators = sorted(found.operators, key=lambda row: -(row.device_self_s if found.has_device else row.cpu_self_s))[
        :5
    ]
    top = {f"{place}. {row.name}": format_seconds(row.device_self_s if found.has_device else row.cpu_self_s)
           for place, row in enumerate(operators, 1)}  # fmt: skip
    share = classes.get("convolution", 0.0) if classes else _operator_share(found, "conv")
    return _filled(
        base,
        figures=top | {"convolutions": format_share(share)},
        values={"convolution_share": share},
        checks=(
            Check(name="operators were recorded", passed=bool(operators), seen=f"{len(found.operators)} operators",
                  explain="the profiler saw nothing: look at 'redline doctor'"),
        ),
        answers=(
            Answer(question="Are convolutions the bottleneck?",
                   answer=f"yes, {format_share(share)} of the time" if share > 0.5 else f"no, only {format_share(share)}"),
            Answer(question="What is in the way, and what to try?",
                   answer="; ".join(f"{one.code}: {one.next}" for one in found.findings[:2]) or "nothing stands out"),
        ),
    )  # fmt: skip


def _flops(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    counted = flops(
        lab.model, **{k: v for k, v in lab.settings.items() if k != "device"}, workspace=lab.workspace
    ).summary
    items = counted.batch or 1
    known = ceilings(lab.device, workspace=lab.workspace)
    peak = known.ceilings.flops_per_s.get("fp32")
    table, values = {}, {}
    for batch in [1, lab.batch] if lab.quick else [1, lab.batch, 4 * lab.batch]:
        (row,) = lab.run(["baseline"], batch=batch)
        if row.failure is None and row.throughput_per_s:
            achieved = counted.flops / items * row.throughput_per_s
            values[f"batch {batch} flops_per_s"] = achieved
            efficiency = f", {format_share(achieved / peak)} of the measured fp32 peak" if peak else ""
            table[f"batch {batch}"] = f"{significant(achieved / 1e12, 3)} TFLOP/s{efficiency}"
    highest = max(values.values(), default=0.0)
    return _filled(
        base,
        figures={"parameters": f"{counted.params:,}", "forward FLOPs per item": f"{counted.flops // items:,}", **table},
        values=values,
        checks=(
            Check(name="the efficiency is plausible", passed=None if not peak else 0 < highest <= peak * 1.05,
                  seen="no fp32 ceiling" if not peak else f"at most {format_share(highest / peak)} of the peak",
                  explain="no program is faster than the peak: the ceilings were measured on a busy machine, measure them again"),
        ),
        answers=(Answer(question="Does a larger batch use the device better?", answer=_batch_answer(values)),),
    )  # fmt: skip


def _many_gpus(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    found = lab.workspace.ask(AskHealth(), Health).devices if lab.on_gpu else ()
    gpus = sum(device.kind != "cpu" for device in found)
    if gpus < 2:
        return _filled(
            base,
            skipped=f"needs two GPUs, and this machine has {gpus}",
            example="with two GPUs: torchrun --nproc-per-node 2 micro_benchmarking_pytorch.py --network resnet50 "
            "--batch-size 128; scaling efficiency is (throughput of 2) / (2 × throughput of 1), often 85 to 95 %",
        )
    single = _script(lab, "--iterations", "10")["throughput_per_s"]
    both = _script(lab, "--iterations", "10", ranks=2)["throughput_per_s"]
    efficiency = both / (2 * single)
    return _filled(
        base,
        figures={"one GPU": f"{single:.1f} img/s", "two GPUs": f"{both:.1f} img/s", "efficiency": format_share(efficiency)},
        values={"efficiency": efficiency},
        checks=(Check(name="the efficiency is plausible", passed=0.3 < efficiency <= 1.05, seen=format_share(efficiency),
                      explain="far below: the local batch is too small, or the link between the GPUs is slow"),),
    )  # fmt: skip


def _compilation(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    recipes = ["baseline", "compile"] + (["compile:reduce-overhead"] if lab.on_gpu and not lab.quick else [])
    rows = list(lab.run(recipes))
    _require(rows[0])
    figures, values = {}, {}
    for row in rows:
        if row.failure is not None:
            figures[row.recipe] = f"failed: {row.failure.message}"
            continue
        compile_s = row.cold_start_s.compile_s if row.cold_start_s else None
        ratio = row.vs_first.ratio if row.vs_first else 1.0
        took = "" if compile_s is None else f", {compile_s:.0f} s to compile"
        figures[row.recipe] = f"{_rate(row)}, {ratio:.2f}×{took}"
        values[f"{row.recipe} ratio"] = ratio
    compiled = next((row for row in rows[1:] if row.failure is None), None)
    return _filled(
        base, figures=figures, values=values,
        checks=(Check(name="compiling works here", passed=compiled is not None,
                      seen="yes" if compiled else figures.get("compile", "no"),
                      explain="it needs a C++ compiler on a CPU and Triton on a GPU: 'redline doctor' says what is missing"),),
        answers=(Answer(question="After how many steps does compiling pay?", answer=_break_even(rows[0], compiled)),),
    )  # fmt: skip


def _vendors(lab: Lab, base: ExerciseResult) -> ExerciseResult:
    items = {item.name: item for item in doctor(workspace=lab.workspace)}
    there = [
        name for name in ("ncu", "nsys", "rocprofv3", "rocprof") if (item := items.get(name)) is not None and item.ok
    ]
    if not lab.on_gpu or not there:
        return _filled(
            base,
            skipped="needs a GPU and its vendor's profiler" if not lab.on_gpu else "no vendor profiler is installed",
            example="with one: redline profile resnet50 --tool ncu (NVIDIA) or --tool rocprofv3 (AMD) lists kernels with "
            "their share, bandwidth and occupancy; 'redline profile --import FILE' reads a file you already have",
        )
    try:
        found = profile(lab.model, tool=there[0], **lab.settings, workspace=lab.workspace).profile
    except BenchError as error:
        return _filled(base, skipped=f"{there[0]}: {str(error).splitlines()[0]}")
    top = {row.name[:60]: f"{format_share(row.share)}, {row.calls} calls" for row in found.kernels[:5]}
    return _filled(
        base, figures=top,
        checks=(Check(name="kernels were listed", passed=bool(found.kernels), seen=f"{len(found.kernels)} kernels by {there[0]}"),),
        answers=tuple(Answer(question=f"{one.name}?", answer=f"{format_share(one.value)}: {one.meaning}")
                      for one in found.counters if one.kernel is None and one.unit == "share"),
    )  # fmt: skip


Exercise = Callable[[Lab, ExerciseResult], ExerciseResult]

EXERCISES: tuple[tuple[int, str, str, Exercise], ...] = (
    (1, "Baseline", "Measure a known model in strict fp32. Every later number is compared with this one, so it must be stable first.", _baseline),
    (2, "Precision", "16-bit formats halve the bytes and use faster units. Each is checked against fp32 before it is timed.", _precision),
    (3, "Profiler", "Look inside one step: which operators take the time, and does the device wait for the host?", _profiler),
    (4, "FLOPs and roofline", "Count the work, divide by the time, and compare with what this device reached at its best.", _flops),
    (5, "Several GPUs", "Split the batch over two GPUs. What is lost to communication is one minus the scaling efficiency.", _many_gpus),
    (6, "Compilation", "torch.compile fuses operators. It costs time once; see after how many steps that is paid back.", _compilation),
    (7, "Vendor profilers", "The vendor's own tools read hardware counters: bandwidth, occupancy, cache hits.", _vendors),
)  # fmt: skip


def _script(lab: Lab, *words: str, ranks: int = 1) -> dict[str, Any]:
    """What `micro_benchmarking_pytorch.py` measures, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        size = [] if lab.image_size is None else ["--image-size", str(lab.image_size)]
        front = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *front, "-m", "redline.compat.micro", "--network", lab.model, "--batch-size",
                   str(lab.batch * ranks), "--device", lab.device.partition(":")[0], *size, *words, "--output-file", str(file)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCRIPT_TIMEOUT_S, check=False)
        if done.returncode or not file.exists():
            said = [line for line in done.stderr.splitlines() if line.strip()]
            raise BenchError("crash", said[-1] if said else f"the script exited with {done.returncode}")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found


def _require(row: RunSummary) -> None:
    if row.failure is not None:
        raise BenchError("crash", f"{row.recipe}: {row.failure.message}")


def _spread(row: RunSummary) -> float | None:
    latency = row.latency_s
    return latency.std / latency.mean if latency is not None and latency.std is not None and latency.mean else None


def _rate(row: RunSummary) -> str:
    return "n/a" if row.throughput_per_s is None else f"{significant(row.throughput_per_s, 4)} {row.item or 'items'}/s"


def _row_figures(row: RunSummary) -> dict[str, str]:
    latency = row.latency_s
    return {"throughput": _rate(row), "time per step": format_seconds(latency.p50 if latency else None)}


def _values(row: RunSummary) -> dict[str, float]:
    found = {"throughput_per_s": row.throughput_per_s, "latency_p50_s": row.latency_s.p50 if row.latency_s else None}
    return {name: value for name, value in found.items() if value is not None}


def _cold(row: RunSummary) -> str:
    cold = row.cold_start_s
    if cold is None or cold.first_call_s is None or row.latency_s is None:
        return "not measured"
    times = cold.first_call_s / row.latency_s.p50
    if times < 2:
        return "here it was not: the reference ran before it, so libraries were loaded already"
    return f"the first call took {format_seconds(cold.first_call_s)}, {times:.0f} times a later one: libraries load, memory is taken, algorithms are chosen"


def _faster(best: RunSummary | None) -> str:
    if best is None or best.vs_first is None:
        return "nothing to compare"
    versus = best.vs_first
    if versus.low is not None and versus.low > 1:
        return f"yes: {best.recipe} is {versus.ratio:.2f}× as fast ({versus.low:.2f}–{versus.high:.2f})"
    if versus.high is not None and versus.high < 1:
        return f"no: the fastest, {best.recipe}, is {versus.ratio:.2f}× (below 1 is slower); this device has no fast units for it"
    return f"not certain: {best.recipe} measured {versus.ratio:.2f}×, and the interval includes 1"


def _operator_share(found: Any, word: str) -> float:
    total = sum(row.cpu_self_s for row in found.operators)
    own = sum(row.cpu_self_s for row in found.operators if re.search(word, row.name))
    return own / total if total else 0.0


def _batch_answer(values: dict[str, float]) -> str:
    if len(values) < 2:
        return "only one batch could be measured"
    first, *_, last = values.values()
    gain = last / first
    return f"{'yes' if gain > 1.1 else 'no'}: the largest batch reaches {gain:.2f}× the FLOP/s of the smallest"


def _break_even(baseline: RunSummary, compiled: RunSummary | None) -> str:
    if compiled is None or compiled.cold_start_s is None or compiled.cold_start_s.compile_s is None:
        return "compiling failed or was not timed"
    versus = compiled.vs_first
    if baseline.latency_s is None or versus is None:
        return "not measured"
    if versus.high is not None and versus.high <= 1:
        return f"never here: the compiled step is not faster ({versus.ratio:.2f}×)"
    if versus.low is not None and versus.low <= 1:
        return f"not certain that it does: {versus.ratio:.2f}× ({versus.low:.2f}–{versus.high:.2f})"
    saved = baseline.latency_s.p50 * (1 - 1 / versus.ratio)
    if saved <= 0:
        return "never here: the compiled step is not faster"
    return f"after {math.ceil(compiled.cold_start_s.compile_s / saved):,} steps"
