"""`redline`: one function per command. Whatever takes time to import is imported by the command that needs it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from redline.errors import BenchError, DoorError, RedlineError, UsageError

EXIT_USAGE = 2
EXIT_FAILED_ROW = 5
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="redline",
    help="How fast is your PyTorch model here, how fast could it be, what is in the way, what to switch on.",
    rich_markup_mode=None,  # rich's help costs as much time as everything else together
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)

P = ParamSpec("P")
T = TypeVar("T")

MaxMemory = Annotated[
    str | None,
    typer.Option(
        "--max-memory", help="Measure as if the device had this much, e.g. 16GiB or 14GB; on a CPU: stay within it."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")]
Report = Annotated[
    Path | None, typer.Option("--report", metavar="DIR", help="Also write a report there: dashboard, Markdown, CSV.")
]


def one_line_errors(command: Callable[P, T]) -> Callable[P, T]:
    """A mistake is one line and exit code 2; a broken bench one line and 5; a bug keeps its traceback."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            _complain("interrupted; what was measured is kept: 'redline show' lists it")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except RedlineError as error:
            is_broken = isinstance(error, BenchError | DoorError)
            # What broke on the bench without being anybody's mistake comes with its traceback.
            _complain(str(error) if is_broken else " ".join(str(error).splitlines()))
            raise typer.Exit(EXIT_FAILED_ROW if is_broken else EXIT_USAGE) from None

    return guarded


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        from redline import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command()
@one_line_errors
def run(
    model: Annotated[list[str] | None, typer.Argument(help="Names, timm:NAME, hf:NAME, file.py:factory.")] = None,
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "-r", help="Steps joined by '+'; give it again to compare.")
    ] = None,
    amp: Annotated[bool, typer.Option("--amp", help="Sugar: the step amp.")] = False,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Sugar: the step channels-last.")] = False,
    compile_: Annotated[bool, typer.Option("--compile", help="Sugar: the step compile.")] = False,
    batch: Annotated[int | None, typer.Option("--batch", "-b", help="Items per step.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels per side.")] = None,
    classes: Annotated[int | None, typer.Option(help="Output classes.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    task: Annotated[str | None, typer.Option(help="infer or train.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw, for training.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, rocm.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads inside operators.")] = None,
    effort: Annotated[str | None, typer.Option(help="quick, normal or strict.")] = None,
    tail: Annotated[bool, typer.Option("--tail", help="Go on until p99 exists (662 samples).")] = False,
    max_memory: MaxMemory = None,
    door: Annotated[str | None, typer.Option(help="fork, spawn or inline: how the worker is started.")] = None,
    seed: Annotated[int | None, typer.Option(help="For weights and inputs.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A TOML file with [[run]] tables.")] = None,
    report: Report = None,
    json: Json = False,
) -> None:
    """Measure models under one or more recipes, interleaved, each set against the first.

    Recipe steps: baseline (strict fp32), tf32, amp, amp-bf16, fp16, bf16, channels-last, compile[:MODE][,key=value],
    compile:freeze, torchscript, cudnn-benchmark, fold-bn, sdpa:BACKEND, int8, fp8, onnx, tensorrt.
    """
    from redline.cli.measure import run_and_print
    from redline.spec import load_specs, specs_from_table

    sugar = "+".join(name for name, on in (("amp", amp), ("channels-last", channels_last), ("compile", compile_)) if on)
    recipes = [*(recipe or []), *([sugar] if sugar else [])]
    table: dict[str, Any] = {
        "batch": batch,
        "image_size": image_size,
        "classes": classes,
        "sequence_length": sequence_length,
        "task": task,
        "optimizer": optimizer,
        "device": device,
        "threads": threads,
        "effort": effort,
        "tail": tail or None,
        "max_memory": max_memory,
        "launch": {"door": door} if door else None,
        "seed": seed,
        "model": model or None,
        "recipe": recipes or None,
    }
    given = {name: value for name, value in table.items() if value is not None}
    specs = load_specs(file, given) if file else specs_from_table(given, where="run")
    raise typer.Exit(run_and_print(specs, as_json=json, report=report))


@app.command()
@one_line_errors
def sweep(
    model: Annotated[list[str] | None, typer.Argument(help="Names, timm:NAME, hf:NAME, file.py:factory.")] = None,
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "-r", help="Steps joined by '+'; again for more.")
    ] = None,
    batch: Annotated[list[str] | None, typer.Option("--batch", "-b", help="8, 1,8,16 or 16..512 (doubling).")] = None,
    task: Annotated[list[str] | None, typer.Option(help="infer, train; again for both.")] = None,
    threads: Annotated[list[int] | None, typer.Option(help="CPU threads inside operators; again for more.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A TOML file with a [sweep] table.")] = None,
    preset: Annotated[str | None, typer.Option(help="fp16-torchscript or amp-batches.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the sweep; by default derived from its grid.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; old records stay in the history.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try failed cells again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show plan and time estimate, measure nothing.")] = False,
    image_size: Annotated[int | None, typer.Option(help="Pixels per side.")] = None,
    classes: Annotated[int | None, typer.Option(help="Output classes.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw, for training.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, rocm.")] = None,
    effort: Annotated[str | None, typer.Option(help="quick, normal or strict.")] = None,
    tail: Annotated[bool, typer.Option("--tail", help="Go on until p99 exists (662 samples).")] = False,
    max_memory: MaxMemory = None,
    door: Annotated[str | None, typer.Option(help="fork, spawn or inline: how workers are started.")] = None,
    seed: Annotated[int | None, typer.Option(help="For weights and inputs.")] = None,
    report: Report = None,
    json: Json = False,
) -> None:
    """Measure a grid of models, recipes, batches, tasks and threads; run again, it goes on where it stopped.

    Every cell has a process of its own and is kept the moment it is done. A cell that fails is a row too, and is tried
    again only with --retry-failed. Cells are measured one after the other: for ratios with intervals use 'run'.
    """
    from redline.cli.sweep import sweep_and_print, sweep_table

    given: dict[str, Any] = {
        "model": model or None,
        "recipe": recipe or None,
        "batch": batch or None,
        "task": task or None,
        "threads": threads or None,
        "image_size": image_size,
        "classes": classes,
        "sequence_length": sequence_length,
        "optimizer": optimizer,
        "device": device,
        "effort": effort,
        "tail": tail or None,
        "max_memory": max_memory,
        "launch": {"door": door} if door else None,
        "seed": seed,
        "name": name,
    }
    table = sweep_table({key: value for key, value in given.items() if value is not None}, file, preset)
    raise typer.Exit(
        sweep_and_print(table, fresh=fresh, retry_failed=retry_failed, dry_run=dry_run, as_json=json, report=report)
    )


@app.command()
@one_line_errors
def batch(
    model: Annotated[str, typer.Argument(help="A name, timm:NAME, hf:NAME or file.py:factory.")],
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "-r", help="Steps joined by '+'; give it again to compare.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="infer or train.")] = None,
    slo_p95: Annotated[
        str | None, typer.Option("--slo-p95", help="Also the best batch whose p95 step stays within, e.g. 20ms.")
    ] = None,
    max_memory: MaxMemory = None,
    max_batch: Annotated[int | None, typer.Option(help="Look no further than this batch.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels per side.")] = None,
    classes: Annotated[int | None, typer.Option(help="Output classes.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw, for training.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, rocm.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads inside operators.")] = None,
    effort: Annotated[str, typer.Option(help="quick, normal or strict: how long each trial is timed.")] = "quick",
    door: Annotated[str | None, typer.Option(help="fork or spawn: how workers are started.")] = None,
    seed: Annotated[int | None, typer.Option(help="For weights and inputs.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write throughput, latency and memory as a PNG.")] = None,
    json: Json = False,
) -> None:
    """The largest batch that fits, the throughput knee, and the best batch under a latency target.

    Every batch is tried in a process of its own; numerics are not checked on the way ('run' does that).
    """
    from redline.cli.batch import find_and_print

    given: dict[str, Any] = {
        "model": model,
        "recipe": recipe or None,
        "task": task,
        "max_memory": max_memory,
        "image_size": image_size,
        "classes": classes,
        "sequence_length": sequence_length,
        "optimizer": optimizer,
        "device": device,
        "threads": threads,
        "effort": effort,
        "launch": {"door": door} if door else None,
        "seed": seed,
    }
    table = {key: value for key, value in given.items() if value is not None}
    raise typer.Exit(find_and_print(table, slo_p95=slo_p95, max_batch=max_batch, plot=plot, as_json=json))


@app.command()
@one_line_errors
def race(
    model: Annotated[str, typer.Argument(help="A name, timm:NAME, hf:NAME or file.py:factory.")],
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "-r", help="Steps joined by '+'; two or more.")
    ] = None,
    replicates: Annotated[int, typer.Option(help="Heats of fresh processes before the first extension.")] = 3,
    batch: Annotated[int | None, typer.Option("--batch", "-b", help="Items per step.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels per side.")] = None,
    classes: Annotated[int | None, typer.Option(help="Output classes.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    task: Annotated[str | None, typer.Option(help="infer or train.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw, for training.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, rocm.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads inside operators.")] = None,
    effort: Annotated[str, typer.Option(help="quick, normal or strict: how long each heat is timed.")] = "quick",
    max_memory: MaxMemory = None,
    door: Annotated[str | None, typer.Option(help="fork or spawn: how workers are started.")] = None,
    seed: Annotated[int | None, typer.Option(help="For weights and inputs.")] = None,
    json: Json = False,
) -> None:
    """Which recipe is faster, and is that sure? Fresh processes measured in turns, until every pair is decided.

    Verdicts are faster, slower, same (within 3 %) or inconclusive; the interval covers what differs between processes.
    """
    from redline.cli.race import race_and_print

    given: dict[str, Any] = {
        "model": model,
        "recipe": recipe or None,
        "batch": batch,
        "image_size": image_size,
        "classes": classes,
        "sequence_length": sequence_length,
        "task": task,
        "optimizer": optimizer,
        "device": device,
        "threads": threads,
        "effort": effort,
        "max_memory": max_memory,
        "launch": {"door": door} if door else None,
        "seed": seed,
    }
    table = {key: value for key, value in given.items() if value is not None}
    raise typer.Exit(race_and_print(table, replicates=replicates, as_json=json))


@app.command()
@one_line_errors
def tune(
    model: Annotated[str, typer.Argument(help="A name, timm:NAME, hf:NAME or file.py:factory.")],
    task: Annotated[str | None, typer.Option(help="infer or train.")] = None,
    batch: Annotated[str | None, typer.Option("--batch", "-b", help="Items per step, or auto to look for it.")] = None,
    budget: Annotated[str, typer.Option(help="Time it may take, e.g. 5m; it usually ends well before.")] = "10m",
    objective: Annotated[str, typer.Option(help="throughput or latency.")] = "throughput",
    slo_p95: Annotated[str | None, typer.Option("--slo-p95", help="Keep the p95 step within, e.g. 20ms.")] = None,
    tolerance: Annotated[
        str | None, typer.Option(help="Numerics: a factor on rounding's own error such as 2x, or a relative error.")
    ] = None,
    allow_quantized: Annotated[
        bool, typer.Option("--allow-quantized", help="Try int8 and fp8 too; recommended only with --check.")
    ] = False,
    check: Annotated[
        str | None, typer.Option(help="file.py:function, a metric of the model; higher is better.")
    ] = None,
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "-r", help="A recipe to try first; again for more.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Use only these steps, e.g. fp16,compile,graphs.")] = None,
    without: Annotated[str | None, typer.Option(help="Leave these steps out, e.g. compile.")] = None,
    replicates: Annotated[int, typer.Option(help="Heats of the last race.")] = 3,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the same search where it stopped.")] = False,
    name: Annotated[str | None, typer.Option(help="Of the search; by default derived from what is asked.")] = None,
    max_memory: MaxMemory = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels per side.")] = None,
    classes: Annotated[int | None, typer.Option(help="Output classes.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw, for training.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, rocm.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads inside operators.")] = None,
    door: Annotated[str | None, typer.Option(help="fork or spawn: how workers are started.")] = None,
    seed: Annotated[int | None, typer.Option(help="For weights and inputs.")] = None,
    report: Report = None,
    json: Json = False,
) -> None:
    """Find the fastest recipe that keeps the numbers right, prove it, say what each step brings, hand over the code.

    Every recipe's numerics are checked before it is timed. Ctrl-C keeps what is known and prints the best so far.
    """
    from redline.cli.tune import tune_and_print

    given: dict[str, Any] = {
        "model": model,
        "task": task,
        "batch": batch,
        "budget": budget,
        "objective": objective,
        "slo_p95": slo_p95,
        "tolerance": tolerance,
        "allow_quantized": allow_quantized,
        "check": check,
        "recipes": recipe or None,
        "steps": steps,
        "without": without,
        "replicates": replicates,
        "resume": resume,
        "name": name,
        "max_memory": max_memory,
        "image_size": image_size,
        "classes": classes,
        "sequence_length": sequence_length,
        "optimizer": optimizer,
        "device": device,
        "threads": threads,
        "launch": {"door": door} if door else None,
        "seed": seed,
    }
    asked = {key: value for key, value in given.items() if value is not None}
    raise typer.Exit(tune_and_print(asked, as_json=json, report=report))


@app.command()
@one_line_errors
def profile(
    what: Annotated[list[str] | None, typer.Argument(help="A model, as for run; or more files after --trace.")] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", "-r", help="Steps joined by '+'.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", "-b", help="Items per step.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels per side.")] = None,
    classes: Annotated[int | None, typer.Option(help="Output classes.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    task: Annotated[str | None, typer.Option(help="infer or train.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw, for training.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, rocm.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads inside operators.")] = None,
    seed: Annotated[int | None, typer.Option(help="For weights and inputs.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to capture; 3 unless a tool wants otherwise.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Record allocations too.")] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="Record Python stacks too.")] = False,
    shapes: Annotated[bool, typer.Option(help="Record the shapes of inputs.")] = True,
    wait: Annotated[int, typer.Option(help="Steps to let pass before the profiler starts.")] = 1,
    warmup: Annotated[int, typer.Option(help="Steps under the profiler that are not kept.")] = 2,
    by_shape: Annotated[
        bool, typer.Option("--by-shape", help="Operators apart by the shapes of their inputs.")
    ] = False,
    tool: Annotated[
        str | None, typer.Option(help="nsys, ncu, rocprof, rocprofv2, rocprofv3 or rocprof-compute.")
    ] = None,
    trace: Annotated[list[str] | None, typer.Option(help="Kineto traces from anywhere; one per rank.")] = None,
    diff: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Two traces, folders or records side by side.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for the trace, as TensorBoard reads it.")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Write an HTML page of the profile, and show it.")] = False,
    html: Annotated[Path | None, typer.Option(help="Where that page goes.")] = None,
    csv: Annotated[Path | None, typer.Option(help="The kernel table, laid out like rocprof --stats.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of each table.")] = 12,
    sort: Annotated[str | None, typer.Option(help="Operators by device, host, memory or calls.")] = None,
    report: Report = None,
    json: Json = False,
) -> None:
    """What a step does with its time and what is in the way: of a model, of traces, or of two profiles side by side."""
    from redline.cli.profile import Output, compare, profile_model, profile_traces

    output = Output(as_json=json, rows=rows, sort=sort, page=html, opens=open_, csv=csv, report=report)
    what = what or []
    if diff is not None:
        if what or trace:
            raise UsageError("--diff takes two profiles and nothing else")
        raise typer.Exit(compare(*diff, output))
    if trace:
        raise typer.Exit(profile_traces([*trace, *what], output, by_shape=by_shape))
    if len(what) != 1:
        raise UsageError("name one model, or --trace FILE…, or --diff A B")
    table: dict[str, Any] = {
        "recipe": recipe,
        "batch": batch,
        "image_size": image_size,
        "classes": classes,
        "sequence_length": sequence_length,
        "task": task,
        "optimizer": optimizer,
        "device": device,
        "threads": threads,
        "seed": seed,
        "steps": steps,
        "tool": tool,
        "folder": out,
        "memory": memory,
        "stacks": stacks,
        "shapes": shapes,
        "wait": wait,
        "warmup": warmup,
        "by_shape": by_shape,
    }
    given = {name: value for name, value in table.items() if value is not None}
    raise typer.Exit(profile_model({"model": what[0], **given}, output))


@app.command()
@one_line_errors
def flops(
    model: Annotated[str, typer.Argument(help="A name, timm:NAME, hf:NAME or file.py:factory.")],
    recipe: Annotated[str | None, typer.Option("--recipe", "-r", help="Steps joined by '+'.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", "-b", help="Items per step.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels per side.")] = None,
    classes: Annotated[int | None, typer.Option(help="Output classes.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    task: Annotated[str | None, typer.Option(help="infer or train.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw, for training.")] = None,
    device: Annotated[str | None, typer.Option(help="With --latency: auto, cpu, cuda, cuda:1, rocm.")] = None,
    threads: Annotated[int | None, typer.Option(help="With --latency: CPU threads.")] = None,
    seed: Annotated[int | None, typer.Option(help="For weights and inputs.")] = None,
    depth: Annotated[int | None, typer.Option(help="How deep the tree goes; 2 by default.")] = None,
    latency: Annotated[bool, typer.Option("--latency", help="Run and profile a few steps: time per module.")] = False,
    json: Json = False,
) -> None:
    """Parameters, MACs, FLOPs and bytes, module by module, forward and backward; nothing runs, no memory is needed."""
    from redline.cli.limits import show_flops

    given: dict[str, Any] = {
        "model": model,
        "recipe": recipe,
        "batch": batch,
        "image_size": image_size,
        "classes": classes,
        "sequence_length": sequence_length,
        "task": task,
        "optimizer": optimizer,
        "device": device,
        "threads": threads,
        "seed": seed,
        "latency": latency or None,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(show_flops(settings, depth=depth, as_json=json))


@app.command()
@one_line_errors
def ceilings(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, rocm.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads inside operators.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, also where they are known.")] = False,
    json: Json = False,
) -> None:
    """What the device can do at most: products per number format, copy bandwidth, launches; beside the datasheet.

    Measured once per device, driver and torch, and kept in the history.
    """
    from redline.cli.limits import show_ceilings

    raise typer.Exit(show_ceilings(device, threads, fresh=fresh, as_json=json))


@app.command()
@one_line_errors
def roofline(
    model: Annotated[str | None, typer.Argument(help="A name, timm:NAME, hf:NAME or file.py:factory.")] = None,
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "-r", help="Steps joined by '+'; again for more.")
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", "-b", help="Items per step.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels per side.")] = None,
    classes: Annotated[int | None, typer.Option(help="Output classes.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    task: Annotated[str | None, typer.Option(help="infer or train.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw, for training.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, rocm.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads inside operators.")] = None,
    seed: Annotated[int | None, typer.Option(help="For weights and inputs.")] = None,
    last: Annotated[bool, typer.Option("--last", help="Of what was measured last, without measuring again.")] = False,
    plot: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plot: .png, .svg or .pdf.")] = None,
    json: Json = False,
) -> None:
    """How far a model is from the device's limits: intensity, attainable time, efficiency, headroom, what is in the way."""
    from redline.cli.limits import show_roofline

    given: dict[str, Any] = {
        "model": model,
        "recipes": recipe or None,
        "batch": batch,
        "image_size": image_size,
        "classes": classes,
        "sequence_length": sequence_length,
        "task": task,
        "optimizer": optimizer,
        "device": device,
        "threads": threads,
        "seed": seed,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    if last and settings:
        raise UsageError("--last takes what was measured last, and nothing else")
    if not last and model is None:
        raise UsageError("name one model, or --last")
    raise typer.Exit(show_roofline(None if last else settings, plot=plot, as_json=json))


@app.command()
@one_line_errors
def demo(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, rocm.")] = "auto",
    json: Json = False,
) -> None:
    """A first look with good defaults for whatever device is here."""
    from redline.cli.measure import demo_specs, run_and_print

    raise typer.Exit(run_and_print(demo_specs(device), as_json=json))


@app.command(name="report")
@one_line_errors
def report_(
    ids: Annotated[
        list[str] | None,
        typer.Argument(help="Records, or files of 'export --raw'; all of the history when none is named."),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="What was measured last, with its siblings.")] = False,
    sweep: Annotated[str | None, typer.Option(help="The settled cells of a sweep, by its name.")] = None,
    tune: Annotated[str | None, typer.Option(help="A search for the fastest recipe, by its name.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder to write.")] = Path(
        "redline-report"
    ),
    open_: Annotated[bool, typer.Option("--open", help="Show the dashboard in a browser.")] = False,
    json: Json = False,
) -> None:
    """Write a folder: a one-file dashboard, a Markdown report with pictures, CSV and JSON. Needs no torch."""
    from redline.cli.report import report_and_print

    raise typer.Exit(report_and_print(ids or [], out, last=last, sweep=sweep, tune=tune, opens=open_, as_json=json))


@app.command(name="compare")
@one_line_errors
def compare_(
    first: Annotated[
        str, typer.Argument(metavar="A", help="A record's id, a sweep's name or a file of 'export --raw'; commas join.")
    ],
    other: Annotated[str, typer.Argument(metavar="B", help="The same, to be set against A.")],
    fail_inconclusive: Annotated[
        bool, typer.Option("--fail-inconclusive", help="Exit with 4 where nothing can be said.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown on stdout.")] = False,
    json: Json = False,
) -> None:
    """Is B faster or slower than A? A verdict per benchmark: with an interval, or with the reason why there is none.

    Exit codes: 0 same or faster (or nothing can be said), 1 slower, 3 incomparable, 4 inconclusive when asked, 5 a run
    that failed.
    """
    from redline.cli.compare import compare_and_print

    raise typer.Exit(
        compare_and_print(first, other, fail_inconclusive=fail_inconclusive, as_markdown=markdown, as_json=json)
    )


@app.command()
@one_line_errors
def models(
    pattern: Annotated[str | None, typer.Argument(help="Part of a name, or a pattern with *.")] = None,
    json: Json = False,
) -> None:
    """Models that go by name."""
    from redline import api
    from redline.report.terminal import make_console, model_listing

    names = api.models(pattern)
    if json:
        _print_json({"models": names.models, "missing": names.missing})
        return
    make_console().print(model_listing(names))
    if pattern and not names.models:
        raise UsageError(f"no model matches {pattern!r}")


@app.command()
@one_line_errors
def doctor(json: Json = False) -> None:
    """Look at drivers, torch, devices, permissions, compilers, profilers and extras; say how to mend each."""
    from redline import api
    from redline.report.terminal import health_report, make_console

    items = api.doctor()
    if json:
        _print_json({"items": items, "ok": all(item.ok is not False for item in items)})
    else:
        make_console().print(health_report(items))


@app.command()
@one_line_errors
def show(
    id: Annotated[str | None, typer.Argument(help="A record's id, or the start of it.")] = None,
    limit: Annotated[int, typer.Option(help="How many of the latest to list.")] = 20,
    json: Json = False,
) -> None:
    """The latest records, or all about one."""
    from redline.cli.history import show_latest, show_one

    if id is None:
        show_latest(limit, as_json=json)
    else:
        show_one(id, as_json=json)


@app.command()
@one_line_errors
def export(
    ids: Annotated[list[str] | None, typer.Argument(help="Records; all of them when none is named.")] = None,
    format: Annotated[str, typer.Option("--format", help="csv or json.")] = "csv",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; stdout when left out.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="JSON: with every raw sample.")] = False,
) -> None:
    """The history as CSV or JSON."""
    from redline.cli.history import export_records

    export_records(ids or [], format, output, raw=raw)


def _print_json(document: Any) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")


def _complain(message: str) -> None:
    print(f"redline: {message}", file=sys.stderr)  # noqa: T201  (the CLI is the printer)


# typer carries its own copy of click or uses the installed one, by its version; the ancestor is the same either way.
ArgumentMistake: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def main() -> None:
    try:
        code = app(standalone_mode=False)
    except ArgumentMistake as error:
        told = error.format_message() if hasattr(error, "format_message") else str(error)
        if "NoArgs" in type(error).__name__:
            sys.stderr.write(f"{told}\n")  # the help itself
        else:
            _complain(" ".join(told.split()) + " ('--help' lists the options)")
        sys.exit(EXIT_USAGE)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
