"""`redline flops`."""

from __future__ import annotations

from typing import Annotated

from redline.cli.options import (
    OUTPUT,
    WHAT,
    WORKLOAD,
    Exit,
    Given,
    Json,
    Model,
    Options,
    Recipe,
    only_set,
    opt,
    print_json,
    takes,
)
from redline.model.errors import UsageError

WITH_LATENCY: Options = {
    "device": Annotated[
        str | None,
        opt(group=WHAT, metavar="[auto|cpu|cuda|cuda:N|rocm|rocm:N]", help="With --latency: the device."),
    ],
    "threads": Annotated[int | None, opt(group=WHAT, help="With --latency: CPU threads.")],
}
"""Counting needs no device."""


@takes(WORKLOAD | WITH_LATENCY)
def flops(
    *,
    model: Model,
    recipe: Recipe = None,
    given: Given,
    depth: Annotated[int | None, opt(group=OUTPUT, help="How deep the module tree goes. Default: 2.")] = None,
    latency: Annotated[
        bool, opt("--latency", group=WHAT, help="Run and profile a few steps: time per module.")
    ] = False,
    json: Json = False,
) -> int:
    """Count parameters, MACs, FLOPs and bytes per module.

    Forward and backward are counted without running the model.

    \b
    Examples:
      redline flops vit_b_16 --task train --depth 3
      redline flops resnet50 --batch 32 --latency
    """
    from redline.api.flops import flops as count_model
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.model.fields import MOST_DEPTH, require_range
    from redline.report.flops import FlopsReport
    from redline.report.terminal import make_console

    require_range("depth", depth, 0, MOST_DEPTH)
    needless = [name for name in ("device", "threads") if name in given and not latency]
    if needless:
        raise UsageError(f"--{needless[0]} goes with --latency: counting needs no device")
    with LiveObserver() as observer, Workspace(observer=observer) as workspace:
        result = count_model(model, **given, **only_set(recipe=recipe, latency=latency), workspace=workspace)
        observer.stop()
    print_json(result.to_json()) if json else make_console().print(FlopsReport(result.summary, depth))
    return Exit.DONE
