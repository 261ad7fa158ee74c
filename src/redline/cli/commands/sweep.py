"""`redline sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import MEASURED, WORKLOAD, Given, Json, Models, Options, Recipes, Report, only_set, takes

AXES: Options = {
    "batch": Annotated[list[str] | None, typer.Option("--batch", "-b", help="8, 1,8,16 or 16..512 (doubling).")],
    "task": Annotated[list[str] | None, typer.Option(help="infer, train; again for both.")],
    "threads": Annotated[list[int] | None, typer.Option(help="CPU threads inside operators; again for more.")],
}
"""Where a run has one value, a sweep has a list."""


@takes(WORKLOAD | MEASURED | AXES)
def sweep(
    *,
    model: Models = None,
    recipe: Recipes = None,
    given: Given,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A TOML file with a [sweep] table.")] = None,
    preset: Annotated[str | None, typer.Option(help="fp16-torchscript or amp-batches.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the sweep; by default derived from its grid.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; old records stay in the history.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try failed cells again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show plan and time estimate, measure nothing.")] = False,
    report: Report = None,
    json: Json = False,
) -> int:
    """Measure a grid of models, recipes, batches, tasks and threads; run again, it goes on where it stopped.

    Every cell has a process of its own and is kept the moment it is done. A cell that fails is a row too, and is tried
    again only with --retry-failed. Cells are measured one after the other: for ratios with intervals use 'run'.
    """
    from redline.cli.sweep import sweep_and_print, sweep_table

    table = sweep_table(given | only_set(model=model, recipe=recipe, name=name), file, preset)
    return sweep_and_print(table, fresh=fresh, retry_failed=retry_failed, dry_run=dry_run, as_json=json, report=report)
