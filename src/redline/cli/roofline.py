"""`redline roofline`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from redline.cli.options import (
    ONE_STEP,
    OUTPUT,
    WHAT,
    Exit,
    Given,
    Json,
    MaybeModel,
    Recipes,
    only_set,
    opt,
    print_json,
    takes,
    tell,
)
from redline.model.errors import UsageError


@takes(ONE_STEP)
def roofline(
    *,
    model: MaybeModel = None,
    recipe: Recipes = None,
    given: Given,
    last: Annotated[bool, opt("--last", group=WHAT, help="Use the last run; measure nothing.")] = False,
    plot: Annotated[
        Path | None, opt("--output", "-o", group=OUTPUT, help="Write the plot: .png, .svg or .pdf.")
    ] = None,
    json: Json = False,
) -> int:
    """Show how far a model is from the device's limits.

    \b
    Examples:
      redline roofline resnet50 --batch 32 -r baseline -r fp16+channels-last
      redline roofline --last -o roofline.png
    """
    from redline.api.roofline import roofline as roofline_of
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.report.canvas import check_picture
    from redline.report.roofline import RooflineReport
    from redline.report.terminal import make_console

    asked = given | only_set(recipes=recipe)
    if last and (asked or model):
        raise UsageError("--last takes the last run, and nothing else")
    if not last and model is None:
        raise UsageError("name one model, or --last")
    if plot is not None:
        check_picture(plot)
    with LiveObserver(quiet=last) as observer, Workspace(observer=observer) as workspace:
        result = roofline_of(model, **asked, last=last, workspace=workspace)
        observer.stop()
    if plot is not None:
        result.plot(plot)
    print_json(result.to_json()) if json else make_console().print(RooflineReport(result.rows, result.failures))
    if plot is not None:
        tell(f"plot: {plot}")
    beaten = any(row.error for row in result.rows)  # the count or a ceiling is wrong: no figure here can be relied on
    return Exit.FAILED_ROW if result.failures or beaten else Exit.DONE
