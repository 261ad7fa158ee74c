"""`redline batch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from redline.cli.options import (
    ANY_BATCH,
    CLUSTER,
    HOW,
    ISOLATED,
    OUTPUT,
    Exit,
    Given,
    Json,
    Model,
    Options,
    Recipes,
    TrialEffort,
    only_set,
    opt,
    print_json,
    takes,
)

LIMITS: Options = {
    "slo_p95": Annotated[
        str | None,
        opt(
            "--slo-p95",
            group=HOW,
            help="Also find the best batch whose p95 step time stays within this limit, such as 20ms.",
        ),
    ],
    "slo_ttft": Annotated[
        str | None,
        opt(
            "--slo-ttft",
            group=HOW,
            help="Generation: keep the time to the first token within this limit, such as 200ms.",
        ),
    ],
    "slo_tpot": Annotated[
        str | None,
        opt(
            "--slo-tpot",
            group=HOW,
            help="Generation: keep p95 of the time per further token within this limit, such as 20ms.",
        ),
    ],
    "max_batch": Annotated[int | None, opt(group=HOW, help="Try no batch larger than this.")],
}
"""What the batch must keep."""


@takes(LIMITS | ANY_BATCH | ISOLATED | CLUSTER)
def batch(
    *,
    model: Model,
    recipe: Recipes = None,
    given: Given,
    effort: TrialEffort = "quick",
    plot: Annotated[Path | None, opt(group=OUTPUT, help="Write throughput, latency and memory as a PNG.")] = None,
    json: Json = False,
) -> int:
    """Find the largest batch, the knee, the best for a latency target.

    The knee is the batch from which on more items a step bring little more throughput. Every batch is tried in its own process. Numerics are not checked on the way ('redline run' does that).

    \b
    Examples:
      redline batch resnet50 -r fp16+channels-last
      redline batch resnet50 --task train -r amp --plot batches.png
      redline batch hf:gpt2 --task generate --slo-ttft 200ms --slo-tpot 20ms
    """
    from redline.api.batch import find_batch
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveBatches
    from redline.report.batch import found_report
    from redline.report.canvas import check_picture
    from redline.report.terminal import make_console

    if plot is not None:
        check_picture(plot)
    asked = given | only_set(recipes=recipe, effort=effort)
    with LiveBatches(on_stdout=not json) as observer, Workspace(observer=observer) as workspace:
        result = find_batch(model, **asked, workspace=workspace)
        observer.stop()
    if plot is not None:
        result.plot(plot)
    if json:
        print_json(result.to_json())
    else:
        console = make_console()
        console.print(found_report(result.rows))
        if plot is not None:
            console.print(f"plot: {plot}", markup=False)
    return Exit.FAILED_ROW if any(found.max_batch is None for found in result) else Exit.DONE
