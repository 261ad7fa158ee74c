"""`redline profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import WORKLOAD, Given, Json, Recipe, Report, only_set, takes
from redline.errors import UsageError


@takes(WORKLOAD)
def profile(
    *,
    what: Annotated[list[str] | None, typer.Argument(help="A model, as for run; or more files after --trace.")] = None,
    recipe: Recipe = None,
    given: Given,
    steps: Annotated[int | None, typer.Option(help="Steps to capture; 3 unless a tool wants otherwise.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Record allocations too.")] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="Record Python stacks too.")] = False,
    shapes: Annotated[bool, typer.Option(help="Record the shapes of inputs.")] = True,
    wait: Annotated[
        int | None, typer.Option(help="Steps to let pass before the profiler starts; 1 by default.")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Steps under the profiler that are not kept; 2 by default.")
    ] = None,
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
) -> int:
    """What a step does with its time and what is in the way: of a model, of traces, or of two profiles side by side."""
    from redline.cli.profile import Output, compare, profile_model, profile_traces
    from redline.spec import MOST_ROWS, require_range

    for name, count, least in (("steps", steps, 1), ("wait", wait, 0), ("warmup", warmup, 0), ("rows", rows, 0)):
        require_range(name, count, least, MOST_ROWS)
    output = Output(as_json=json, rows=rows, sort=sort, page=html, opens=open_, csv=csv, report=report)
    what = what or []
    settings = given | only_set(
        recipe=recipe,
        steps=steps,
        tool=tool,
        out=out,
        memory=memory,
        stacks=stacks,
        wait=wait,
        warmup=warmup,
        no_shapes=not shapes,
    )
    if diff is not None:
        if what or trace or by_shape:
            raise UsageError("--diff takes two profiles and nothing else")
        _refuse_settings(settings, "--diff")
        return compare(*diff, output)
    if trace:
        _refuse_settings(settings, "--trace")
        return profile_traces([*trace, *what], output, by_shape=by_shape)
    if len(what) != 1:
        raise UsageError("name one model, or --trace FILE…, or --diff A B")
    settings["folder"] = settings.pop("out", None)
    settings["shapes"] = not settings.pop("no_shapes", False)
    return profile_model(only_set(model=what[0], by_shape=by_shape) | settings, output)


def _refuse_settings(settings: Given, mode: str) -> None:
    """What is already captured cannot be captured differently."""
    if settings:
        option = next(iter(settings)).replace("_", "-")
        raise UsageError(f"--{option} is about capturing a model, and {mode} reads what was captured: leave it out")
