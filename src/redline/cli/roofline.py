"""`redline roofline`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from redline.cli.options import (
    HOW,
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
    ops: Annotated[
        bool, opt("--ops", group=WHAT, help="Time single operators: those the model calls, or the usual ones.")
    ] = False,
    operator: Annotated[
        list[str] | None,
        opt(
            group=WHAT,
            metavar="KIND[:SIZES]",
            help="--ops of this kind: matmul, conv, attention, norm or elementwise, at the usual sizes or at those given, "
            "such as matmul:4096x4096x4096. Repeat for several.",
        ),
    ] = None,
    format: Annotated[
        list[str] | None,
        opt("--format", group=WHAT, metavar="[fp32|tf32|fp16|bf16]", help="--ops in this format; repeatable."),
    ] = None,
    fresh: Annotated[
        bool, opt("--fresh", group=HOW, help="Measure the ceilings again, even if they are known.")
    ] = False,
    plot: Annotated[
        Path | None, opt("--output", "-o", group=OUTPUT, help="Write the plot: .png, .svg or .pdf.")
    ] = None,
    json: Json = False,
) -> int:
    """Show the device's ceilings, and how far a model is from them.

    Without a model it measures what the device can do at most: matrix products, copy bandwidth, launches; next to the
    datasheet. That is done once per device, driver and torch version, and kept in the history. With a model it shows
    intensity, attainable time, efficiency and headroom of each recipe.

    \b
    Examples:
      redline roofline
      redline roofline resnet50 --batch 32 -r baseline -r fp16+channels-last
      redline roofline --operator matmul:4096x4096x4096 --format bf16
    """
    from redline.api.roofline import roofline as roofline_of
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.report.canvas import check_picture
    from redline.report.terminal import make_console

    asked = given | only_set(recipes=recipe, ops=ops or None, operators=operator, formats=format, fresh=fresh or None)
    if last and (asked or model):
        raise UsageError("--last takes the last run, and nothing else")
    if plot is not None:
        check_picture(plot)
        if not last and (model is None or ops):
            raise UsageError("the plot shows a model under the roofs: name one, and leave out --ops")
    with LiveObserver(quiet=last) as observer, Workspace(observer=observer) as workspace:
        result = roofline_of(model, **asked, last=last, workspace=workspace)
        observer.stop()
    if plot is not None:
        result.plot(plot)
    print_json(result.to_json()) if json else make_console().print(result.report())
    if plot is not None:
        tell(f"plot: {plot}")
    # A row above its roof: the count or a ceiling is wrong, and no figure here can be relied on.
    is_broken = result.failures or any(row.error for row in result.rows)
    is_refused = bool(result.operators) and all(row.refusal for row in result.operators)
    return Exit.FAILED_ROW if is_broken or is_refused else Exit.DONE
