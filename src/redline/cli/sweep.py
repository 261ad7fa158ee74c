"""`redline sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from redline.cli.options import (
    CLUSTER,
    HOW,
    MEASURED,
    WHAT,
    WORKLOAD,
    Exit,
    Given,
    Json,
    Models,
    Options,
    Price,
    Processes,
    Recipes,
    Report,
    Trust,
    only_set,
    opt,
    print_json,
    takes,
    tell,
)
from redline.model.errors import SpecError

AXES: Options = {
    "batch": Annotated[
        list[str] | None, opt("--batch", "-b", group=WHAT, help="Items per step: 8, or 1,8,16, or 16..512 (doubling).")
    ],
    "task": Annotated[
        list[str] | None, opt(group=WHAT, metavar="[infer|train|step|generate]", help="Repeat for several.")
    ],
    "prompt": Annotated[
        list[str] | None,
        opt(group=WHAT, help="Generation: tokens of the prompt: 512, or 128,512, or 128..2048 (doubling)."),
    ],
    "new_tokens": Annotated[list[str] | None, opt(group=WHAT, help="Generation: tokens written, in the same forms.")],
    "threads": Annotated[list[int] | None, opt(group=WHAT, help="CPU threads inside operators; repeat for several.")],
}
"""Where a run has one value, a sweep has a list."""
PLAN: Options = {
    "file": Annotated[Path | None, opt("--file", "-f", group=HOW, help="A TOML file with a [sweep] table.")],
    "preset": Annotated[str | None, opt(group=WHAT, metavar="[fp16-torchscript|amp-batches]", help="A built-in grid.")],
    "name": Annotated[str | None, opt(group=HOW, help="Name of the sweep. Default: derived from its grid.")],
    "fresh": Annotated[bool | None, opt("--fresh", group=HOW, help="Start over; old records stay in the history.")],
    "retry_failed": Annotated[bool | None, opt("--retry-failed", group=HOW, help="Try failed cells again.")],
    "slo_ttft": Annotated[
        str | None,
        opt(
            "--slo-ttft", group=HOW, help="Generation: find the fastest cell whose first token comes within this time."
        ),
    ],
    "slo_tpot": Annotated[
        str | None,
        opt(
            "--slo-tpot",
            group=HOW,
            help="Generation: also require p95 of the time per further token within this limit, such as 20ms.",
        ),
    ],
}
"""Which cells there are, and which of them are measured."""


@takes(PLAN | WORKLOAD | MEASURED | AXES | CLUSTER)
def sweep(
    *,
    model: Models = None,
    recipe: Recipes = None,
    given: Given,
    trust: Trust = False,
    replicates: Processes = 1,
    price: Price = None,
    dry_run: Annotated[
        bool, opt("--dry-run", group=HOW, help="Show the plan and a time estimate; measure nothing.")
    ] = False,
    report: Report = None,
    json: Json = False,
) -> int:
    """Measure a grid of models, recipes, batches, tasks and threads; the same command continues where it stopped.

    Every cell runs in its own process and is kept as soon as it is done. A cell that fails is a row too, and is tried
    again only with --retry-failed. Cells are measured one after the other: for ratios with intervals use 'run'.

    \b
    Examples:
      redline sweep resnet50 vit_b_16 -r baseline -r fp16 --batch 1..64
      redline sweep resnet50 -r baseline -r fp16 --batch 1..64 --launch ray
      redline sweep hf:gpt2 --task generate --batch 1..32 --slo-tpot 20ms
    """
    from redline.api.report import report_records
    from redline.api.sweep import sweep as sweep_models
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveSweep
    from redline.cli.report import tell_report
    from redline.report.folder import check_folder
    from redline.report.sweep import sweep_report
    from redline.report.terminal import make_console

    if report is not None:
        if dry_run:
            raise SpecError("a dry run measures nothing to report: leave out --report or --dry-run")
        check_folder(report)
    lists = {"batch": "batches", "task": "tasks", "threads": "threads"}
    asked = {lists.get(key, key): value for key, value in given.items()}
    asked |= only_set(recipes=recipe, trust=trust, price=price)
    try:
        with LiveSweep() as observer, Workspace(observer=observer) as workspace:
            result = sweep_models(
                model,
                **asked,
                replicates=replicates,
                dry_run=dry_run,
                workspace=workspace,
            )
            observer.stop()
            shown = sweep_report(result.summary, result.rows, result.estimate, result.under_slo)
            print_json(result.to_json()) if json else make_console().print(shown)
            if report is not None:
                tell_report(report_records(list(result.records.values()), report, workspace=workspace))
    except KeyboardInterrupt:
        tell("interrupted; finished cells are kept, and the same command continues")
        return Exit.INTERRUPTED
    return Exit.DONE  # a cell that failed is a row like any other
