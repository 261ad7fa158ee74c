"""`redline batch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import ANY_BATCH, ISOLATED, Given, Json, Model, Recipes, TrialEffort, only_set, takes


@takes(ANY_BATCH | ISOLATED)
def batch(
    *,
    model: Model,
    recipe: Recipes = None,
    slo_p95: Annotated[
        str | None, typer.Option("--slo-p95", help="Also the best batch whose p95 step stays within, e.g. 20ms.")
    ] = None,
    max_batch: Annotated[int | None, typer.Option(help="Look no further than this batch.")] = None,
    given: Given,
    effort: TrialEffort = "quick",
    plot: Annotated[Path | None, typer.Option(help="Write throughput, latency and memory as a PNG.")] = None,
    json: Json = False,
) -> int:
    """The largest batch that fits, the throughput knee, and the best batch under a latency target.

    Every batch is tried in a process of its own; numerics are not checked on the way ('run' does that).
    """
    from redline.cli.batch import find_and_print

    table = given | only_set(model=model, recipe=recipe, effort=effort)
    return find_and_print(table, slo_p95=slo_p95, max_batch=max_batch, plot=plot, as_json=json)
