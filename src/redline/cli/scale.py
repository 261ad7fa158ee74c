"""`redline scale`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from redline.cli.options import (
    ANY_BATCH,
    MEASURED,
    OUTPUT,
    RANKS,
    WHAT,
    Exit,
    Given,
    Json,
    Models,
    Recipe,
    only_set,
    opt,
    print_json,
    takes,
    task_option,
)

_SCALED = ANY_BATCH | {"task": task_option("infer", "train", "generate")}
_MEASURED = {name: option for name, option in MEASURED.items() if name not in ("no_check", "tail")}


@takes(_SCALED | _MEASURED | {"rendezvous": RANKS["rendezvous"]})
def scale(
    *,
    model: Models = None,
    ranks: Annotated[str, opt(group=WHAT, help="Numbers of ranks, such as 1,2,4,8 or 1..8 (doubling).")] = "1,2",
    batch_per_rank: Annotated[
        str | None,
        opt(
            "--batch-per-rank",
            group=WHAT,
            help="Weak scaling: items per step on every rank; several, such as 16,32,64.",
        ),
    ] = None,
    batch: Annotated[
        int | None, opt("--batch", "-b", group=WHAT, help="Strong scaling: items per step, split over the ranks.")
    ] = None,
    recipe: Recipe = None,
    given: Given,
    plot: Annotated[Path | None, opt(group=OUTPUT, help="Write throughput and efficiency as a PNG.")] = None,
    json: Json = False,
) -> int:
    """Measure 1, 2, 4 and more ranks: throughput against the ideal.

    Training averages gradients with DDP (or the switch fsdp); inference runs one replica per rank. Ranks that would share
    a GPU are refused; more threads than processors are marked and not counted as scaling.

    \b
    Examples:
      redline scale resnet50 --task train --ranks 1,2,4,8 --batch-per-rank 32,64
      redline scale resnet50 --task train --ranks 1,2,4,8 --batch 256
      redline scale my_model.py:build --ranks 1,2 --device cpu --threads 1
    """
    from redline.api.scale import scale as measure_scaling
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.model.errors import UsageError
    from redline.show.canvas import check_picture
    from redline.show.scale import scale_report
    from redline.show.terminal import make_console

    if not model:
        raise UsageError("name at least one model")
    if plot is not None:
        check_picture(plot)
    asked = given | only_set(batch=batch, batch_per_rank=batch_per_rank, recipe=recipe)
    with LiveObserver() as observer, Workspace(observer=observer) as workspace:
        result = measure_scaling(list(model), ranks=ranks, **asked, workspace=workspace)
        observer.stop()
    print_json(result.to_json()) if json else make_console().print(
        scale_report(result.points, result.findings, result.mode)
    )
    if plot is not None:
        result.plot(plot)
    return Exit.FAILED_ROW if result.failed else Exit.DONE
