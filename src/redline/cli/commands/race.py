"""`redline race`."""

from __future__ import annotations

from typing import Annotated

import typer

from redline.cli.options import ISOLATED, WORKLOAD, Given, Json, Model, TrialEffort, only_set, takes


@takes(WORKLOAD | ISOLATED)
def race(
    *,
    model: Model,
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "-r", help="Steps joined by '+'; two or more.")
    ] = None,
    replicates: Annotated[int, typer.Option(help="Heats of fresh processes before the first extension.")] = 3,
    given: Given,
    effort: TrialEffort = "quick",
    json: Json = False,
) -> int:
    """Which recipe is faster, and is that sure? Fresh processes measured in turns, until every pair is decided.

    Verdicts are faster, slower, same (within 3 %) or inconclusive; the interval covers what differs between processes.
    """
    from redline.cli.race import race_and_print
    from redline.spec import MOST_HEATS, require_range

    require_range("replicates", replicates, 1, MOST_HEATS)
    table = given | only_set(model=model, recipe=recipe, effort=effort)
    return race_and_print(table, replicates=replicates, as_json=json)
