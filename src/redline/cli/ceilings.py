"""`redline ceilings` and `redline ops`."""

from __future__ import annotations

from typing import Annotated

import typer

from redline.cli.options import (
    HOW,
    WHAT,
    WORKLOAD,
    DeviceName,
    Exit,
    Given,
    Json,
    Recipe,
    Threads,
    only_set,
    opt,
    print_json,
    takes,
)
from redline.model.errors import UsageError


def ceilings(
    device: DeviceName = "auto",
    threads: Threads = None,
    fresh: Annotated[bool, opt("--fresh", group=HOW, help="Measure again, even if they are known.")] = False,
    json: Json = False,
) -> int:
    """Measure what the device can do at most: matrix products, copy bandwidth, launches; next to the datasheet.

    Measured once per device, driver and torch version, and kept in the history.

    \b
    Examples:
      redline ceilings
      redline ceilings --device cuda:1 --fresh
    """
    from redline.api.ceilings import ceilings as measure_ceilings
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.report.ceilings import ceilings_report
    from redline.report.terminal import make_console

    if threads is not None and threads < 1:
        raise UsageError(f"threads must be 1 or more, got {threads}")
    with LiveObserver() as observer, Workspace(observer=observer) as workspace:
        result = measure_ceilings(device, threads=threads, fresh=fresh, workspace=workspace)
        observer.stop()
    print_json(result.to_json()) if json else make_console().print(ceilings_report(result.summary))
    return Exit.DONE


@takes(WORKLOAD)
def ops(
    *,
    operator: Annotated[
        list[str] | None, typer.Argument(help="matmul, conv, attention, norm or elementwise. Default: all five.")
    ] = None,
    shape: Annotated[
        list[str] | None, opt(group=WHAT, help="Sizes joined by x, such as 4096x4096x4096; repeat for several.")
    ] = None,
    format: Annotated[
        list[str] | None, opt("--format", group=WHAT, metavar="[fp32|tf32|fp16|bf16]", help="Repeat for several.")
    ] = None,
    model: Annotated[
        str | None, opt(group=WHAT, help="Take operators and shapes from one forward of this model.")
    ] = None,
    recipe: Recipe = None,
    given: Given,
    json: Json = False,
) -> int:
    """Time single operators over shapes and number formats, and compare them with the roofline.

    \b
    Examples:
      redline ops
      redline ops matmul --shape 4096x4096x4096 --format bf16
      redline ops --model resnet50 --batch 32 -r fp16
    """
    from redline.api.ceilings import ops as time_operators
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.report.terminal import make_console

    asked = given | only_set(model=model, recipe=recipe, shapes=shape, formats=format)
    with LiveObserver() as observer, Workspace(observer=observer) as workspace:
        result = time_operators(operator or [], **asked, workspace=workspace)
        observer.stop()
    if json:
        print_json(result.to_json())
    else:
        make_console().print(result.report())
    return Exit.FAILED_ROW if all(row.refusal for row in result) else Exit.DONE
