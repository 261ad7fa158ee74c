"""`redline memory`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from redline.cli.options import (
    ISOLATED,
    ONE_STEP,
    OUTPUT,
    Exit,
    Given,
    Json,
    Models,
    Recipes,
    only_set,
    opt,
    print_json,
    takes,
)
from redline.model.errors import UsageError


@takes(ONE_STEP | ISOLATED)
def memory(
    *,
    model: Models = None,
    recipe: Recipes = None,
    given: Given,
    plot: Annotated[Path | None, opt(group=OUTPUT, help="Write memory over a step as a PNG.")] = None,
    json: Json = False,
) -> int:
    """Show what a step holds in memory: weights, gradients, optimizer state, activations, and which modules.

    \b
    Examples:
      redline memory resnet50 --batch 32
      redline memory resnet50 --task train --batch 32 -r checkpointing
    """
    from redline.api.memory import memory as look_at_memory
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.report.canvas import check_picture
    from redline.report.memory import draw_memory
    from redline.report.terminal import make_console

    if not model:
        raise UsageError("name a model, such as resnet50")
    if plot is not None:
        check_picture(plot)
    with LiveObserver() as observer, Workspace(observer=observer) as workspace:
        result = look_at_memory(model, **given, **only_set(recipes=recipe), workspace=workspace)
        observer.stop()
    print_json(result.to_json()) if json else make_console().print(result.report())
    if plot is not None:
        draw_memory(result.rows, plot)
    return Exit.FAILED_ROW if result.failures else Exit.DONE
