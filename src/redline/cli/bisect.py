"""`redline bisect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import HOW, WHAT, Exit, Json, Trust, only_set, opt, print_json


def bisect(
    file: Annotated[Path, typer.Argument(metavar="BENCH.toml", help="A file of benchmarks, as for 'redline gate'.")],
    good: Annotated[str | None, opt("--good", group=WHAT, metavar="REF", help="A commit that was fast.")] = None,
    bad: Annotated[str | None, opt("--bad", group=WHAT, metavar="REF", help="A later commit that is slow.")] = None,
    python: Annotated[
        list[str] | None,
        opt("--python", group=WHAT, metavar="PATH", help="Instead of commits: interpreters of environments, in order."),
    ] = None,
    recipe: Annotated[
        list[str] | None, opt("--recipe", "-r", group=WHAT, help="Instead of commits: recipes, in order.")
    ] = None,
    benchmark: Annotated[str | None, opt("--benchmark", group=WHAT, help="Which benchmark of the file.")] = None,
    device: Annotated[
        str | None, opt(group=WHAT, metavar="[auto|cpu|cuda|cuda:N|rocm|rocm:N]", help="Instead of the file's.")
    ] = None,
    threshold: Annotated[float | None, opt(group=HOW, help="The slowdown that is looked for: 0.05 is 5 %.")] = None,
    budget: Annotated[float, opt(group=HOW, help="Seconds for all gates together.")] = 3600.0,
    trust: Trust = False,
    json: Json = False,
) -> int:
    """Find the commit, environment or recipe that made a benchmark slower, by gates half way between two ends.

    Exit codes: 0 found; 2 a mistake in what was asked; 3 not found: the last is not slower, or a gate was not decided.

    \b
    Examples:
      redline bisect bench.toml --good v1.0 --bad main
      redline bisect bench.toml --python torch27/bin/python --python torch28/bin/python
    """
    from redline.api.bisect import bisect as run_bisect
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveRace
    from redline.report.terminal import make_console

    with LiveRace() as observer, Workspace(observer=observer) as workspace:
        result = run_bisect(
            file,
            good,
            bad,
            pythons=python or [],
            recipes=recipe or [],
            benchmark=benchmark,
            threshold=threshold,
            budget_s=budget,
            trust=trust,
            workspace=workspace,
            **only_set(device=device),
        )
        observer.stop()
    print_json(result.to_json()) if json else make_console().print(str(result), markup=False, end="")
    return Exit.DONE if result.culprit is not None else Exit.INCOMPARABLE
