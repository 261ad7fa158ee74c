"""This is `micro_benchmarking_pytorch.py`: it has its flags in both spellings and its printed forms, with Redline's numbers.

`redline micro …`, `python -m redline.compat.micro …` and the script at the top of the repository are the same program. People's
scripts read the printed forms: the workshop's summary, the public script's lines, DeepSpeed's FLOPs profile.
"""

from __future__ import annotations

import argparse
import ast
import csv
import math
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from redline.launch import require_torch
from redline.model.errors import BenchError, Exit, RedlineError, SpecError, UsageError
from redline.model.fields import Frozen
from redline.model.spec import Recipe, RunSpec, WorkloadSpec
from redline.model.units import printable
from redline.model.work import ModuleWork, WorkCount
from redline.show.export import json_document

if TYPE_CHECKING:
    from redline.bench.micro import Iteration, MicroBench
    from redline.bench.workload.ranks import Rank

WARMUP_ITERATIONS = 5
PROFILED_ITERATIONS = 5
"""The operator tables are made of at most this many iterations."""

ALIASES = {
    "SqueezeNet": "squeezenet1_0",
    "SqueezeNet1.1": "squeezenet1_1",
    "resnext50": "resnext50_32x4d",
    "resnext101": "resnext101_32x8d",
    "shufflenet": "shufflenet_v2_x1_0",
    "shufflenet_v2": "shufflenet_v2_x1_0",
    "shufflenet_v2_x05": "shufflenet_v2_x0_5",
    "shufflenet_v2_x10": "shufflenet_v2_x1_0",
    "shufflenet_v2_x15": "shufflenet_v2_x1_5",
    "shufflenet_v2_x20": "shufflenet_v2_x2_0",
    "xception": "timm:xception",
}
"""These names of the public script are spelt differently by torchvision, or are not there."""

AMP_LEVELS = {0: "", 1: "amp", 2: "amp", 3: "fp16"}
"""These are the words of today for what APEX called O0 to O3."""

COMPILE_KEYS = ("mode", "fullgraph", "dynamic", "backend", "options", "disable")
"""These are the arguments of `torch.compile`, which `--compileContext` may set."""


@dataclass(frozen=True)
class Asked:
    """This is the command line, read and checked."""

    network: str
    spec: RunSpec
    """Its batch is global under torchrun, and of each process otherwise."""
    iterations: int
    precision: str
    accumulation: int
    compile_mode: str | None
    tables: bool
    trace: Path | None
    flops_step: int
    csv: Path | None
    json: Path | None
    notes: tuple[str, ...]

    @property
    def training(self) -> bool:
        return self.spec.workload.task == "train"


class _Parser(argparse.ArgumentParser):
    """This parser tells a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)}; '--help' lists the flags\n")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="micro_benchmarking_pytorch.py",
        description="Time a network, training or inference, on one or more GPUs. Flags may be written with _ for -.",
    )
    add = made.add_argument
    add("--network", required=True, help="a torchvision name, timm:NAME, hf:NAME, or an old alias")
    add("--batch-size", type=int, default=64, help="split over the ranks under torchrun")
    add("--iterations", type=int, default=20, help="timed iterations")
    add("--mode", choices=("training", "inference"), default="training")
    add("--fp16", type=int, choices=(0, 1), default=0, help="1: weights, inputs and arithmetic in fp16")
    add("--amp", action="store_true", help="fp16 autocast, with GradScaler in training")
    add("--amp-opt-level", type=int, choices=tuple(AMP_LEVELS), help="old APEX levels")
    add("--nhwc", action="store_true", help="channels-last")
    add("--opt-step", type=int, default=1, help="iterations per optimizer step")
    add("--autograd-profiler", action="store_true", help="print operator tables")
    add("--kineto", action="store_true", help="also write a Chrome trace")
    add("--profiler-output", default="", help="name of that trace")
    add("--flops-prof-step", type=int, default=0, help="0: no FLOPs profile")
    add("--compile", action="store_true", help="torch.compile")
    add("--compileContext", "--compile-context", default="{}", help="a dict of torch.compile's arguments")
    add("--distributed-dataparallel", action="store_true")
    add("--dataparallel", action="store_true", help="refused: use torchrun, one process per GPU")
    add("--device-ids", default="", help="with manual DDP: 0,1")
    add("--rank", type=int)
    add("--world-size", type=int)
    add("--dist-backend", choices=("nccl", "gloo", "mpi", "ucc"))
    add("--dist-url", default="tcp://127.0.0.1:4332")
    add("--csv-file", help="append one row; default benchmark_summary.csv")
    add("--output-dir", help="folder of the CSV and JSON files")
    add("--output-file", help="write the result as JSON")
    add("--device", default="auto", help="auto, cpu, cuda, rocm")
    add("--image-size", type=int, help="pixels per side; the network's own by default")
    return made


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags, which may be written with underscores as in `--batch_size`."""
    given = sys.argv[1:] if words is None else words
    parts = [word.partition("=") if word.startswith("--") else (word, "", "") for word in given]
    dashed = [(name.replace("_", "-") if name.startswith("--") else name) + rest + value for name, rest, value in parts]
    return parser().parse_args(dashed)


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program. A mistake is one line and exit code 2; a failed run is one line and exit code 5."""
    given = parsed(words)
    try:
        require_torch()
        return _run(asked_for(given), _rank(given))
    except RedlineError as error:
        print(f"micro_benchmarking_pytorch.py: {printable(' '.join(str(error).splitlines()))}", file=sys.stderr)  # noqa: T201
        return Exit.FAILED_ROW if isinstance(error, BenchError) else Exit.USAGE


def asked_for(given: argparse.Namespace) -> Asked:
    for name, least in (("batch_size", 1), ("iterations", 1), ("opt_step", 1), ("flops_prof_step", 0)):
        if getattr(given, name) < least:
            raise SpecError(f"--{name.replace('_', '-')} must be {least} or more, got {getattr(given, name)}")
    notes: list[str] = []
    precision = _precision(given, notes)
    compile_switch, mode = _compile_switch(given)
    switches = [switch for switch in (precision, "channels-last" if given.nhwc else "", compile_switch) if switch]
    folder = Path(given.output_dir or "")
    csv = folder / (given.csv_file or "benchmark_summary.csv") if given.csv_file or given.output_dir else None
    json = folder / given.output_file if given.output_file else None
    trace = None
    if given.kineto:
        name = given.profiler_output or f"{given.network.replace(':', '_')}_trace"
        trace = Path(name if name.endswith((".json", ".json.gz")) else f"{name}.json")
    _check_places(folder, [file for file in (csv, json, trace) if file is not None])
    workload = WorkloadSpec(
        model=ALIASES.get(given.network, given.network),
        task="train" if given.mode == "training" else "infer",
        batch=given.batch_size,
        image_size=given.image_size,
    )
    return Asked(
        network=given.network,
        spec=RunSpec(workload=workload, recipe=Recipe.parse("+".join(switches) or "baseline"), device=given.device),
        iterations=given.iterations,
        precision={"": "FP32", "amp": "AMP (FP16)"}.get(precision, "FP16"),
        accumulation=given.opt_step,
        compile_mode=mode,
        tables=given.autograd_profiler or given.kineto,
        trace=trace,
        flops_step=min(given.flops_prof_step, max(given.iterations - 1, 1)) if given.flops_prof_step else 0,
        csv=csv,
        json=json,
        notes=tuple(notes),
    )


def _check_places(folder: Path, files: Sequence[Path]) -> None:
    """Says before anything is measured what cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"cannot make the folder {folder}: {error.strerror}") from None
    for file in files:
        if file.is_dir() or not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            why = "it is a folder" if file.is_dir() else "no such folder, or it cannot be written"
            raise SpecError(f"cannot write {file}: {why}")


def _precision(given: argparse.Namespace, notes: list[str]) -> str:
    wanted = {switch for switch, on in (("fp16", given.fp16 == 1), ("amp", given.amp)) if on}
    if given.amp_opt_level is not None:
        level = AMP_LEVELS[given.amp_opt_level]
        notes.append(f"--amp-opt-level {given.amp_opt_level} is an APEX level; it now means {level or 'fp32'}")
        wanted |= {level} - {""}
    if len(wanted) > 1:
        raise UsageError("--fp16 1 and mixed precision exclude each other: give one of --fp16, --amp, --amp-opt-level")
    return next(iter(wanted), "")


def _compile_switch(given: argparse.Namespace) -> tuple[str, str | None]:
    """Returns the switch for the recipe, and the mode as it is printed by the echo. The mode is None if nothing is compiled."""
    try:
        context = ast.literal_eval(given.compileContext)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        context = None
    if not isinstance(context, dict) or not all(isinstance(key, str) for key in context):
        raise SpecError(
            f"--compileContext must be a dict such as \"{{'mode': 'max-autotune'}}\", got {given.compileContext}"
        )
    if unknown := [key for key in context if key not in COMPILE_KEYS]:
        raise SpecError(f"--compileContext has no {unknown[0]!r}: use {', '.join(COMPILE_KEYS)}")
    if context and not given.compile:
        raise UsageError("--compileContext goes with --compile")
    context = {key: {"True": True, "False": False}.get(str(value), value) for key, value in context.items()}
    if not given.compile or context.pop("disable", False) is True:
        return "", None
    mode, options = context.pop("mode", None) or "default", context.pop("options", None) or {}
    if mode != "default" and options:
        raise UsageError("--compileContext: mode and options exclude each other")
    if not isinstance(options, dict):
        raise SpecError(f"--compileContext: options must be a dict, got {options!r}")
    pairs = {key: value for key, value in (context | options).items() if value is not None}
    words = [] if mode == "default" else [mode]
    words += [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in pairs.items()]
    return f"compile:{','.join(map(str, words))}" if words else "compile", str(mode)


def _rank(given: argparse.Namespace) -> Rank:
    from redline.bench.workload.ranks import Rank

    if given.dataparallel:
        raise UsageError("--dataparallel is not supported: one process per GPU does it, torchrun --nproc-per-node N")
    by_hand = {"--device_ids": given.device_ids, "--rank": given.rank, "--world-size": given.world_size}
    if not given.distributed_dataparallel:
        if ignored := [flag for flag, value in by_hand.items() if value not in (None, "")]:
            raise UsageError(f"{ignored[0]} goes with --distributed_dataparallel")
        return Rank.of_environment()
    if given.rank is None and "RANK" in os.environ:
        return Rank.of_environment()
    if given.rank is None or given.world_size is None:
        raise UsageError("--distributed_dataparallel needs --rank and --world-size (or start it with torchrun)")
    if not 0 <= given.rank < given.world_size:
        raise SpecError(f"--rank must be from 0 to {given.world_size - 1}, got {given.rank}")
    ids = [word.strip() for word in given.device_ids.split(",") if word.strip()]
    if not all(word.isdecimal() for word in ids):
        raise SpecError(f"--device_ids must be numbers such as 0,1, got {given.device_ids!r}")
    local = int(ids[given.rank % len(ids)]) if ids else given.rank
    return Rank(number=given.rank, local=local, world=given.world_size, backend=given.dist_backend, url=given.dist_url)


def _run(asked: Asked, rank: Rank) -> int:
    from redline.bench.device.failure import failure_from
    from redline.bench.micro import MicroBench

    spec, batch = asked.spec, asked.spec.workload.batch or 1
    by_torchrun = rank.world > 1 and rank.url == "env://"
    local = batch // rank.world + (rank.number < batch % rank.world) if by_torchrun else batch
    if local < 1:
        raise SpecError(f"--batch-size {batch} leaves nothing for rank {rank.number} of {rank.world}")
    say = Printer(rank)
    if by_torchrun and rank.number == 0:
        say.plain("**** Launching with torchrun ****", "Setting up process group...")
    spec = msgspec.structs.replace(spec, workload=msgspec.structs.replace(spec.workload, batch=local))
    try:
        with MicroBench(spec, rank, asked.accumulation) as bench:
            say(*echo(asked, local, bench, rank))
            _measure(asked, bench, rank, local, say)
    except RedlineError:
        raise
    except Exception as error:
        failure = failure_from(error, "run")
        raise BenchError(failure.kind, failure.told) from error
    return 0


def _measure(asked: Asked, bench: MicroBench, rank: Rank, local: int, say: Printer) -> None:
    compiles, is_first = asked.compile_mode is not None, rank.number == 0
    say("", "Loading model...")
    bench.prepare()
    say("Model loaded successfully.", "", *(["Compiling model..."] if compiles else []))
    say(f"Warming up ({WARMUP_ITERATIONS} iterations)...")
    warmup, timed = [], []
    for one in bench.warm_up(WARMUP_ITERATIONS):
        warmup.append(one.seconds)
        if one.number == 0 and compiles:
            say("Compilation complete.")
        say(iteration_line("Warmup iteration", one))
    say("Warmup complete.", "", "Running timed iterations...")
    for one in bench.timed(asked.iterations):
        timed.append(one)
        say(iteration_line("Epoch", one))
    if not all(math.isfinite(one.loss) for one in timed):
        print("warning: the loss is not finite", file=sys.stderr)  # noqa: T201
    times, info = [one.seconds for one in timed], bench.device.info()
    figures = Figures(
        network=asked.network,
        device=info.kind if info.index is None else f"{info.kind}:{info.index}",
        device_name=info.name,
        precision=asked.precision,
        training=asked.training,
        iterations=len(times),
        local_batch=local,
        global_batch=round(sum(bench.gathered(float(local)))),
        world=rank.world,
        mean_s=max(bench.gathered(statistics.fmean(times))),
        std_s=statistics.stdev(times) if len(times) > 1 else 0.0,
        peak_bytes=bench.peak_bytes(),
        compile_s=warmup[0] if compiles else None,
        phases={name: statistics.fmean(one.phases[name] for one in timed) for name in timed[0].phases},
        losses=tuple(one.loss for one in timed),
        times=tuple(times),
        warmup_times=tuple(warmup),
    )
    if is_first:
        say.plain(summary_block(figures))
        _write(asked, figures)
    if asked.tables:
        trace = str(asked.trace) if asked.trace and is_first else None
        tables = bench.operator_tables(min(asked.iterations, PROFILED_ITERATIONS), trace)
        if is_first:
            written = [f"Trace written to {trace}"] if trace else []
            say.plain(tables_form(tables, on_device=bench.device.is_accelerator), *written)
    if asked.flops_step:
        work, seconds = bench.count(), bench.module_seconds()
        if is_first:
            say.plain(*flops_form(figures, work, seconds, step=asked.flops_step))


def _write(asked: Asked, figures: Figures) -> None:
    try:
        if asked.csv is not None:
            write_csv(asked.csv, figures)
        if asked.json is not None:
            fields = {**msgspec.to_builtins(figures), "throughput_per_s": figures.per_s}
            asked.json.write_text(json_document("micro", fields), encoding="utf-8")
    except OSError as error:
        raise SpecError(f"cannot write {error.filename}: {error.strerror}") from None


def script() -> None:
    """Runs the program as the script at the top of the repository does."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    ranks = sys.modules.get("redline.bench.workload.ranks")
    # A thread of gloo may abort a process whose interpreter is being taken down, so such a process ends at once.
    if ranks is not None and ranks.GLOO_JOINED.is_set():
        os._exit(code)
    sys.exit(code)


RULE = "=" * 40


class Figures(Frozen):
    """These are the figures of one run."""

    network: str
    device: str
    device_name: str
    precision: str
    training: bool
    iterations: int
    local_batch: int
    global_batch: int
    world: int
    mean_s: float
    """This is the mean time of an iteration; of several ranks it is that of the slowest."""
    std_s: float
    peak_bytes: int | None
    compile_s: float | None
    phases: dict[str, float]
    losses: tuple[float, ...]
    times: tuple[float, ...]
    warmup_times: tuple[float, ...] = ()

    @property
    def per_s(self) -> float:
        return self.global_batch / self.mean_s


def echo(asked: Asked, local: int, bench: MicroBench, rank: Rank) -> Iterator[str]:
    """Yields the settings as they are about to be used."""
    device, batch = bench.device.info(), asked.spec.workload.batch
    yield f"Using network: {asked.network}"
    yield f"Mode: {'training' if asked.training else 'inference'}"
    yield f"Batch size: {local if rank.world == 1 else batch}"
    yield f"Iterations: {asked.iterations}"
    yield f"FP16: {asked.precision == 'FP16'}"
    yield f"Precision: {asked.precision}"
    yield f"Device: {device.kind}" if device.index is None else f"Device: {device.kind}:{device.index}"
    if rank.world > 1:
        yield f"Local batch size: {local}\nGlobal batch size: {batch}\nWorld size: {rank.world}"
    if asked.accumulation > 1:
        yield f"Optimizer step every {asked.accumulation} iterations"
    if asked.compile_mode is not None:
        yield f"PyTorch Compile: ENABLED (mode={asked.compile_mode})"
    yield from (f"Note: {note}" for note in asked.notes)


def summary_block(found: Figures) -> str:
    memory = "n/a" if found.peak_bytes is None else f"{found.peak_bytes / 1e6:.0f} MB"
    several, per_gpu, compiled = found.world > 1, "", ""
    batches = f"Batch size: {found.local_batch}"
    if found.compile_s is not None:
        compiled = f"\nCompilation time: {found.compile_s:.1f} seconds (first iteration)"
    if several:
        per_gpu = f"\nPer-GPU throughput: {found.per_s / found.world:.1f} samples/sec"
        batches = (
            f"Global batch size: {found.global_batch}\nLocal batch size: {found.local_batch}\nWorld size: {found.world}"
        )
    return f"""{RULE}
Performance Summary{" (GPU 0)" if several else ""}:
{RULE}
Network: {found.network}
{batches}
Iterations: {found.iterations} (excluding warmup)
Precision: {found.precision}

Average time per iteration: {found.mean_s:.6f} seconds
Standard deviation: {found.std_s:.6f} seconds
Throughput: {found.per_s:.1f} samples/sec{" (global)" if several else ""}{per_gpu}
{"Memory usage" if found.device == "cpu" else "GPU Memory Usage"}: {memory}{compiled}

Images per second: {found.per_s:.1f}
Milliseconds per batch: {found.mean_s * 1e3:.3f}
Microseconds per sample: {found.mean_s * 1e6 / found.global_batch:.1f}
{RULE}

--------------------SUMMARY--------------------------
Microbenchmark for network : {found.network}
Num devices: {found.world}
Dtype: {"FP16" if found.precision != "FP32" else "FP32"}
Mini batch size [img] : {found.global_batch}
Mini batch size [img/gpu] : {found.local_batch}
Throughput [img/sec] : {found.per_s}
Time per mini-batch : {found.mean_s}"""


def tables_form(tables: Mapping[str, str], *, on_device: bool) -> str:
    return f"""
{RULE}
PyTorch Profiler Results:
{RULE}

Top 10 operations by total CPU time:
{tables["cpu"]}
Top 10 operations by total {"CUDA" if on_device else "self CPU"} time:
{tables["device"]}
Memory Profiling:
{tables["memory"]}"""


def flops_form(found: Figures, work: WorkCount, seconds: Mapping[str, float], *, step: int) -> Iterator[str]:
    """Yields the profile in the layout that people have known from DeepSpeed."""
    forward_s = found.phases.get("forward", 0.0 if found.training else found.mean_s) or seconds.get("", 0.0)
    backward_s, step_s = found.phases.get("backward", 0.0), found.phases.get("optimizer", 0.0)
    flops, both, iteration_s = work.flops, work.flops + work.backward_flops, forward_s + backward_s + step_s
    facts = {
        "world size": str(found.world),
        "data parallel size": str(found.world),
        "model parallel size": "1",
        "batch size per GPU": str(found.local_batch),
        "params per GPU": _count(work.params),
        "params of model = params per GPU * mp_size": _count(work.params),
        "fwd MACs per GPU": _count(work.macs) + "MACs",
        "fwd FLOPs per GPU": _count(flops),
        "fwd FLOPs of model = fwd FLOPs per GPU * mp_size": _count(flops),
        "fwd latency": _time(forward_s),
        "fwd FLOPS per GPU = fwd FLOPs per GPU / fwd latency": _rate(flops, forward_s),
    }
    if found.training:
        facts |= {
            "bwd latency": _time(backward_s),
            "bwd FLOPS per GPU = bwd FLOPs per GPU / bwd latency": _rate(work.backward_flops, backward_s),
            "fwd+bwd FLOPS per GPU = fwd+bwd FLOPs per GPU / (fwd+bwd latency)": _rate(both, forward_s + backward_s),
            "step latency": _time(step_s),
            "iter latency": _time(iteration_s),
            "FLOPS per GPU = fwd+bwd FLOPs per GPU / iter latency": _rate(both, iteration_s),
            "samples/second": f"{found.local_batch / iteration_s:.2f}",
        }
    yield f"""
{RULE}
FLOPS Profiler Output:
{RULE}

-------------------------- Flops Profiler --------------------------
Profile Summary at step {step}:
Notations: MACs are multiply-accumulate operations, FLOPs floating-point operations, FLOPS those per second;
fwd, bwd and step are the forward pass, the backward pass and the optimizer's step. All of the whole batch.
"""
    yield from (f"{name + ':':<72} {value}" for name, value in facts.items())
    yield "\n----------------------------- Aggregated Profile per GPU -----------------------------"
    yield "Top 3 modules in terms of params, MACs or fwd latency at different model depths:"
    yield from _aggregated(work, seconds)
    yield "\n------------------------------ Detailed Profile per GPU ------------------------------"
    yield "Each module profile is listed after its name in the following order:"
    yield "params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of total fwd latency\n"
    yield from (_detailed(module, work, seconds) for module in work.modules)
    yield "-" * 78


def _aggregated(work: WorkCount, seconds: Mapping[str, float]) -> Iterator[str]:
    for depth in range(max((_depth(module) for module in work.modules), default=-1) + 1):
        yield f"depth {depth}:"
        for word, value, shown in (
            ("params", lambda module: module.params, _count),
            ("MACs", lambda module: module.flops // 2, _count),
            ("fwd latency", lambda module: seconds.get(module.path, 0.0), _time),
        ):
            totals: dict[str, float] = {}
            for module in work.modules:
                if _depth(module) == depth:
                    totals[module.type] = totals.get(module.type, 0) + value(module)
            top = sorted(totals, key=lambda kind: -totals[kind])[:3]
            yield f"    {word:<12} - { {kind: shown(totals[kind]) for kind in top} }"


def _detailed(module: ModuleWork, work: WorkCount, seconds: Mapping[str, float]) -> str:
    name = module.path.rpartition(".")[2] if module.path else module.type
    latency, macs = seconds.get(module.path), module.flops // 2
    took = "n/a, n/a" if latency is None else f"{_time(latency)}, {_share(latency, seconds.get('', 0.0))}"
    held = (
        f"{_count(module.params)}, {_share(module.params, work.params)}, {_count(macs)}MACs, {_share(macs, work.macs)}"
    )
    return f"{'  ' * _depth(module)}{name}: {f'{module.type} ' if module.path else ''}({held}, {took})"


def _depth(module: ModuleWork) -> int:
    return module.path.count(".") + 1 if module.path else 0


def _count(number: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number:.0f} "


def _rate(flops: float, seconds: float) -> str:
    return f"{_count(flops / seconds)}FLOPS" if seconds else "n/a"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.2f} us"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.2%}" if whole else "0.00%"


def write_csv(path: Path, found: Figures) -> None:
    """Writes one row, under a header that is written once."""
    row = {
        "Name": found.network,
        "GPUs": found.world,
        "Mini batch size [img]": found.global_batch,
        "Mini batch size [img/gpu]": found.local_batch,
        "Throughput [img/sec]": found.per_s,
        "Time per mini-batch": found.mean_s,
    }
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, row)
        if not file.tell():
            writer.writeheader()
        writer.writerow(row)


def iteration_line(word: str, one: Iteration) -> str:
    """Returns the line of an iteration, with enough digits to see three figures of a short one."""
    digits = 3 if one.seconds >= 0.1 else 4 if one.seconds >= 0.01 else 6
    return f"{word} {one.number}: Loss = {one.loss:.4f}, Time = {one.seconds:.{digits}f} seconds"


class Printer:
    """A printer writes lines to stdout; each is named after its GPU if there are several."""

    def __init__(self, rank: Rank) -> None:
        self._prefix = f"[GPU {rank.number}] " if rank.world > 1 else ""

    def __call__(self, *texts: str) -> None:
        lines = [line for text in texts for line in text.split("\n")]
        self.plain(*(f"{self._prefix}{line}" if line and self._prefix else line for line in lines))

    def plain(self, *texts: str) -> None:
        # There is one write per call, because several ranks share the terminal.
        sys.stdout.write("".join(f"{printable(line)}\n" for text in texts for line in text.split("\n")))
        sys.stdout.flush()


if __name__ == "__main__":
    script()
