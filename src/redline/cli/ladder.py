"""`redline ladder`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from redline.cli.options import (
    HOW,
    OUTPUT,
    WHAT,
    DeviceName,
    Exit,
    Given,
    Json,
    Model,
    Options,
    Report,
    only_set,
    opt,
    print_json,
    takes,
)
from redline.cli.train import DATA_OPTIONS, TRAINED_MODEL, DataName

_CHOSEN_BY_RUNGS = ("workers", "on_device", "prefetch")
LADDER_OPTIONS: Options = {
    name: option
    for name, option in (DATA_OPTIONS | TRAINED_MODEL).items()
    if name not in (*_CHOSEN_BY_RUNGS, "device", "threads", "classes")
}
"""What all rungs have in common."""


@takes(LADDER_OPTIONS)
def ladder(
    *,
    model: Model = "resnet18",
    data: DataName = "synthetic-learnable",
    quick: Annotated[bool, opt("--quick", group=HOW, help="Spend only seconds on each rung: a first look.")] = False,
    epochs: Annotated[
        int | None, opt("--epochs", "-e", group=HOW, help="Epochs per rung. Default: 3, with --quick 1.")
    ] = None,
    batch: Annotated[int, opt("--batch", "-b", group=WHAT, help="Batch of the rungs that do not search for one.")] = 64,
    device: DeviceName = "auto",
    given: Given,
    plot: Annotated[Path | None, opt(group=OUTPUT, help="Write the ladder as a PNG.")] = None,
    report: Report = None,
    json: Json = False,
) -> int:
    """Climb from one CPU thread through fp32 and AMP on the GPU to the best recipe: what each rung gains, and what limits it.

    Every rung trains the same model on the same samples. Rungs whose device is not here are skipped.

    \b
    Examples:
      redline ladder resnet18 --quick
      redline ladder resnet18 --data cifar10 --folder ~/data --plot ladder.png
    """
    from redline.api.ladder import ladder as climb
    from redline.api.report import report_records
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveTrain
    from redline.cli.report import tell_report
    from redline.report.canvas import check_picture
    from redline.report.folder import check_folder
    from redline.report.ladder import ladder_report
    from redline.report.terminal import make_console

    if plot is not None:
        check_picture(plot)
    if report is not None:
        check_folder(report)
    asked = given | only_set(quick=quick, epochs=epochs)
    with LiveTrain() as observer, Workspace(observer=observer) as workspace:
        result = climb(model, data=data, batch=batch, device=device, **asked, workspace=workspace)
        observer.stop()
        print_json(result.to_json()) if json else make_console().print(ladder_report(result.rungs))
        if plot is not None:
            result.plot(plot)
        if report is not None:
            written = report_records(result.records, report, profiles=result.profiles, across=True, workspace=workspace)
            tell_report(written)
    return Exit.FAILED_ROW if result.failed else Exit.DONE
