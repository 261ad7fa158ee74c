"""`micro_benchmarking_pytorch.py`: its flags in both spellings, its printed forms, Redline's numbers.

`redline micro …`, `python -m redline.compat.micro …` and the script at the top of the repository are the same program.
"""

from __future__ import annotations

import argparse
import ast
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from redline.compat.forms import (
    Figures,
    Printer,
    echo,
    flops_form,
    is_finite,
    iteration_line,
    public_lines,
    summary_block,
    tables_form,
    write_csv,
    write_json,
)
from redline.launch import require_torch
from redline.model.errors import BenchError, Exit, RedlineError, SpecError, UsageError
from redline.model.units import printable

if TYPE_CHECKING:
    from redline.bench.micro import Iteration, MicroBench
    from redline.bench.workload.ranks import Rank

WARMUP_ITERATIONS = 5
PROFILED_ITERATIONS = 5

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
"""Names of the public script that torchvision spells differently or does not have."""

AMP_LEVELS = {0: "", 1: "amp", 2: "amp", 3: "fp16"}
"""What APEX called O0 to O3, in today's words."""

COMPILE_KEYS = ("mode", "fullgraph", "dynamic", "backend", "options", "disable")


@dataclass(frozen=True)
class Asked:
    """The command line, read and checked."""

    network: str
    model: str
    batch: int
    """Global under torchrun, per process otherwise."""
    iterations: int
    training: bool
    recipe: str
    precision: str
    accumulation: int
    compile_mode: str | None
    tables: bool
    trace: str | None
    flops_step: int
    device: str
    image_size: int | None
    csv: Path | None
    json: Path | None
    notes: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)}; '--help' lists the flags\n")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="micro_benchmarking_pytorch.py", description="Time a network, training or inference, on one or more GPUs."
    )
    made.add_argument("--network", required=True, help="a torchvision name, timm:NAME, hf:NAME, or an old alias")
    made.add_argument("--batch-size", "--batch_size", type=int, default=64, help="split over the ranks under torchrun")
    made.add_argument("--iterations", type=int, default=20, help="timed iterations")
    made.add_argument("--mode", choices=("training", "inference"), default="training")
    made.add_argument("--fp16", type=int, choices=(0, 1), default=0, help="1: weights, inputs and arithmetic in fp16")
    made.add_argument("--amp", action="store_true", help="fp16 autocast, with GradScaler in training")
    made.add_argument("--amp-opt-level", "--amp_opt_level", type=int, choices=tuple(AMP_LEVELS), help="old APEX levels")
    made.add_argument("--nhwc", action="store_true", help="channels-last")
    made.add_argument("--opt-step", "--opt_step", type=int, default=1, help="iterations per optimizer step")
    made.add_argument("--autograd-profiler", "--autograd_profiler", action="store_true", help="print operator tables")
    made.add_argument("--kineto", action="store_true", help="also write a Chrome trace")
    made.add_argument("--profiler-output", "--profiler_output", default="", help="name of that trace")
    made.add_argument("--flops-prof-step", "--flops_prof_step", type=int, default=0, help="0: no FLOPs profile")
    made.add_argument("--compile", action="store_true", help="torch.compile")
    made.add_argument("--compileContext", "--compile-context", default="{}", help="a dict of torch.compile's arguments")
    made.add_argument("--distributed_dataparallel", "--distributed-dataparallel", action="store_true")
    made.add_argument("--dataparallel", action="store_true", help="refused: use torchrun, one process per GPU")
    made.add_argument("--device_ids", "--device-ids", default="", help="with manual DDP: 0,1")
    made.add_argument("--rank", type=int, default=None)
    made.add_argument("--world-size", "--world_size", type=int, default=None)
    made.add_argument("--dist-backend", "--dist_backend", choices=("nccl", "gloo", "mpi", "ucc"), default=None)
    made.add_argument("--dist-url", "--dist_url", default="tcp://127.0.0.1:4332")
    made.add_argument("--csv-file", "--csv_file", default=None, help="append one row; default benchmark_summary.csv")
    made.add_argument("--output-dir", "--output_dir", default=None, help="folder of the CSV and JSON files")
    made.add_argument("--output-file", "--output_file", default=None, help="write the result as JSON")
    made.add_argument("--device", default="auto", help="auto, cpu, cuda, rocm")
    made.add_argument("--image-size", type=int, default=None, help="pixels per side; the network's own by default")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Run it. A mistake is one line and exit code 2; a failed run one line and 5."""
    given = parser().parse_args(words)
    try:
        require_torch()
        return _run(_asked(given), _rank(given))
    except RedlineError as error:
        print(f"micro_benchmarking_pytorch.py: {printable(' '.join(str(error).splitlines()))}", file=sys.stderr)  # noqa: T201
        return Exit.FAILED_ROW if isinstance(error, BenchError) else Exit.USAGE


def _asked(given: argparse.Namespace) -> Asked:
    for name, least in (("batch_size", 1), ("iterations", 1), ("opt_step", 1), ("flops_prof_step", 0)):
        if getattr(given, name) < least:
            raise SpecError(f"--{name.replace('_', '-')} must be {least} or more, got {getattr(given, name)}")
    notes: list[str] = []
    precision = _precision(given, notes)
    compile_switch, mode = _compile_switch(given)
    switches = [precision, "channels-last" if given.nhwc else "", compile_switch]
    folder = Path(given.output_dir) if given.output_dir else None
    wants_csv = given.csv_file is not None or folder is not None
    csv = _in(folder, given.csv_file or "benchmark_summary.csv") if wants_csv else None
    json, trace = _in(folder, given.output_file) if given.output_file else None, _trace_name(given)
    _check_places(folder, [each for each in (csv, json, Path(trace) if trace else None) if each is not None])
    return Asked(
        network=given.network,
        model=ALIASES.get(given.network, given.network),
        batch=given.batch_size,
        iterations=given.iterations,
        training=given.mode == "training",
        recipe="+".join(switch for switch in switches if switch) or "baseline",
        precision={"": "FP32", "amp": "AMP (FP16)"}.get(precision, "FP16"),
        accumulation=given.opt_step,
        compile_mode=mode,
        tables=given.autograd_profiler or given.kineto,
        trace=trace,
        flops_step=min(given.flops_prof_step, max(given.iterations - 1, 1)) if given.flops_prof_step else 0,
        device=given.device,
        image_size=given.image_size,
        csv=csv,
        json=json,
        notes=tuple(notes),
    )


def _check_places(folder: Path | None, files: Sequence[Path]) -> None:
    """Before anything is measured: what cannot be written is told at once."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"cannot make the folder {folder}: {error.strerror}") from None
    for file in files:
        if file.is_dir() or not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            why = "it is a folder" if file.is_dir() else "no such folder, or it cannot be written"
            raise SpecError(f"cannot write {file}: {why}")


def _in(folder: Path | None, name: str) -> Path:
    return folder / name if folder is not None else Path(name)


def _trace_name(given: argparse.Namespace) -> str | None:
    if not given.kineto:
        return None
    name: str = given.profiler_output or f"{given.network.replace(':', '_')}_trace"
    return name if name.endswith((".json", ".json.gz")) else f"{name}.json"


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
    """The switch, and the mode as the echo prints it."""
    try:
        context = ast.literal_eval(given.compileContext)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        context = None
    if not isinstance(context, dict) or not all(isinstance(key, str) for key in context):
        raise SpecError(
            f"--compileContext must be a dict such as \"{{'mode': 'max-autotune'}}\", got {given.compileContext}"
        )
    unknown = [key for key in context if key not in COMPILE_KEYS]
    if unknown:
        raise SpecError(f"--compileContext has no {unknown[0]!r}: use {', '.join(COMPILE_KEYS)}")
    if context and not given.compile:
        raise UsageError("--compileContext goes with --compile")
    context = {
        key: {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value
        for key, value in context.items()
    }
    if not given.compile or context.get("disable") is True:
        return "", None
    mode, options = context.get("mode"), context.get("options") or {}
    if mode and options:
        raise UsageError("--compileContext: mode and options exclude each other")
    if not isinstance(options, dict):
        raise SpecError(f"--compileContext: options must be a dict, got {options!r}")
    pairs = {
        **{key: context[key] for key in ("fullgraph", "dynamic", "backend") if context.get(key) is not None},
        **options,
    }
    words = [mode] if mode and mode != "default" else []
    words += [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in pairs.items()]
    return f"compile:{','.join(map(str, words))}" if words else "compile", str(mode or "default")


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
    from redline.bench.micro import MicroBench, MicroSpec

    by_torchrun = rank.world > 1 and rank.url == "env://"
    local = asked.batch // rank.world + (rank.number < asked.batch % rank.world) if by_torchrun else asked.batch
    if local < 1:
        raise SpecError(f"--batch-size {asked.batch} leaves nothing for rank {rank.number} of {rank.world}")
    say = Printer(rank)
    if by_torchrun and rank.number == 0:
        say.plain("**** Launching with torchrun ****", "Setting up process group...")
    spec = MicroSpec(
        network=asked.model,
        batch=local,
        training=asked.training,
        recipe=asked.recipe,
        accumulation=asked.accumulation,
        device=asked.device,
        image_size=asked.image_size,
    )
    try:
        with MicroBench(spec, rank) as bench:
            say(*echo(asked.network, asked, local, bench, rank))
            _measure(asked, bench, rank, local, say)
    except RedlineError:
        raise
    except Exception as error:
        failure = failure_from(error, "run")
        raise BenchError(failure.kind, failure.told) from error
    return 0


def _measure(asked: Asked, bench: MicroBench, rank: Rank, local: int, say: Printer) -> None:
    say("", "Loading model...")
    bench.prepare()
    say("Model loaded successfully.", "")
    if asked.compile_mode is not None:
        say("Compiling model...")
    say(f"Warming up ({WARMUP_ITERATIONS} iterations)...")
    compile_s, warmup = None, []
    for each in bench.warm_up(WARMUP_ITERATIONS):
        warmup.append(each.seconds)
        if each.number == 0 and asked.compile_mode is not None:
            compile_s = each.seconds
            say("Compilation complete.")
        say(iteration_line("Warmup iteration", each))
    say("Warmup complete.", "", "Running timed iterations...")
    timed = []
    for each in bench.timed(asked.iterations):
        timed.append(each)
        say(iteration_line("Epoch", each))
    figures = _figures(asked, bench, rank, local, timed, compile_s, tuple(warmup))
    if rank.number == 0:
        say.plain(*summary_block(figures), "", *public_lines(figures))
        _write(asked, figures)
    if asked.tables:
        tables = bench.operator_tables(
            min(asked.iterations, PROFILED_ITERATIONS), asked.trace if rank.number == 0 else None
        )
        if rank.number == 0:
            say.plain(*tables_form(tables, on_device=bench.device.is_accelerator))
            if asked.trace:
                say.plain(f"Trace written to {asked.trace}")
    if asked.flops_step:
        work, seconds = bench.count(), bench.module_seconds()
        if rank.number == 0:
            say.plain(*flops_form(figures, work, seconds, step=asked.flops_step))


def _figures(
    asked: Asked,
    bench: MicroBench,
    rank: Rank,
    local: int,
    timed: list[Iteration],
    compile_s: float | None,
    warmup_times: tuple[float, ...],
) -> Figures:
    times = [each.seconds for each in timed]
    if not all(map(is_finite, (each.loss for each in timed))):
        print("warning: the loss is not finite", file=sys.stderr)  # noqa: T201
    mean = statistics.fmean(times)
    slowest = max(bench.gathered(mean))
    locals_ = [int(size) for size in bench.gathered(float(local))]
    info = bench.device.info()
    return Figures(
        network=asked.network,
        device=f"{info.kind}:{info.index}" if info.index is not None else info.kind,
        device_name=info.name,
        precision=asked.precision,
        training=asked.training,
        iterations=len(times),
        local_batch=local,
        global_batch=sum(locals_),
        world=rank.world,
        mean_s=slowest,
        std_s=statistics.stdev(times) if len(times) > 1 else 0.0,
        peak_bytes=bench.peak_bytes(),
        compile_s=compile_s,
        phases={name: statistics.fmean(each.phases[name] for each in timed) for name in (timed[0].phases or {})},
        losses=tuple(each.loss for each in timed),
        times=tuple(times),
        warmup_times=warmup_times,
    )


def _write(asked: Asked, figures: Figures) -> None:
    try:
        if asked.csv is not None:
            write_csv(asked.csv, figures)
        if asked.json is not None:
            write_json(asked.json, figures)
    except OSError as error:
        raise SpecError(f"cannot write {error.filename}: {error.strerror}") from None


def script() -> None:
    """What the script at the top of the repository calls."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    ranks = sys.modules.get("redline.bench.workload.ranks")
    if ranks is not None and ranks.GLOO_JOINED.is_set():
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    script()
