"""`redline tune`."""

from __future__ import annotations

from typing import Annotated

import typer

from redline.cli.options import ISOLATED, WORKLOAD, Given, Json, Model, Options, Report, only_set, takes

BATCH: Options = {
    "batch": Annotated[str | None, typer.Option("--batch", "-b", help="Items per step, or auto to look for it.")]
}


@takes(WORKLOAD | BATCH | ISOLATED)
def tune(
    *,
    model: Model,
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
    given: Given,
    report: Report = None,
    json: Json = False,
) -> int:
    """Find the fastest recipe that keeps the numbers right, prove it, say what each step brings, hand over the code.

    Every recipe's numerics are checked before it is timed. Ctrl-C keeps what is known and prints the best so far.
    """
    from redline.cli.tune import tune_and_print
    from redline.spec import MOST_HEATS, require_range

    require_range("replicates", replicates, 1, MOST_HEATS)
    asked = given | only_set(
        model=model,
        budget=budget,
        objective=objective,
        slo_p95=slo_p95,
        tolerance=tolerance,
        allow_quantized=allow_quantized,
        check=check,
        recipes=recipe,
        steps=steps,
        without=without,
        replicates=replicates,
        resume=resume,
        name=name,
    )
    return tune_and_print(asked, as_json=json, report=report)
