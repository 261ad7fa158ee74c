"""`redline load`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from redline.cli.options import (
    ANY_BATCH,
    HOW,
    ISOLATED,
    OUTPUT,
    Exit,
    Given,
    Json,
    Model,
    Options,
    Recipes,
    Report,
    only_set,
    opt,
    print_json,
    takes,
)

SERVED: Options = {
    name: option for name, option in ANY_BATCH.items() if name not in ("task", "optimizer", "prompt", "new_tokens")
}
"""Which model is served: always for inference."""

REQUESTS: Options = {
    "rate": Annotated[
        str | None, opt(group=HOW, metavar="RATES", help="Requests per second: 200, 50,100,200 or 50..2000 (doubling).")
    ],
    "arrivals": Annotated[
        Path | None,
        opt(group=HOW, help="Replay recorded arrivals: one time in seconds per line. With --rate, at those rates."),
    ],
    "slo_p99": Annotated[
        str | None,
        opt(
            "--slo-p99",
            group=HOW,
            help="Find the highest rate whose p99 latency stays within this limit, such as 50ms.",
        ),
    ],
    "seconds": Annotated[
        float | None,
        opt(group=HOW, help="Seconds of requests per rate. Default: 2, 5 or 20 by effort, longer at low rates."),
    ],
}
"""Which requests arrive, and what is asked of their latency."""


@takes(REQUESTS | SERVED | ISOLATED)
def load(
    *,
    model: Model,
    recipe: Recipes = None,
    max_batch: Annotated[int, opt(group=HOW, help="Most requests in one batch.")] = 32,
    max_wait: Annotated[
        str, opt(group=HOW, help="The longest a request waits on an idle device for its batch to fill.")
    ] = "5ms",
    given: Given,
    effort: Annotated[
        str, opt(group=HOW, metavar="[quick|normal|strict]", help="How long each rate takes.")
    ] = "normal",
    plot: Annotated[Path | None, opt(group=OUTPUT, help="Write latency and batches against the rate as a PNG.")] = None,
    report: Report = None,
    json: Json = False,
) -> int:
    """Measure latency under load: requests arrive at random.

    They arrive at each of several rates and are batched for the model. Arrivals are a seeded Poisson process and do not wait for earlier answers; latency counts from the intended arrival. The inputs of
    requests are on the device already. This is a measurement, not a server.

    \b
    Examples:
      redline load resnet50 --rate 50..2000 --max-wait 5ms --slo-p99 50ms
      redline load resnet50 --rate 500..16000 -r baseline -r fp16+channels-last
    """
    from redline.api.load import load as load_models
    from redline.api.report import report_records
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveLoad
    from redline.cli.report import tell_report
    from redline.show.canvas import check_picture
    from redline.show.folder import check_folder
    from redline.show.load import load_report
    from redline.show.terminal import make_console

    if plot is not None:
        check_picture(plot)
    if report is not None:
        check_folder(report)
    asked = given | only_set(recipes=recipe, effort=effort)
    with LiveLoad() as observer, Workspace(observer=observer) as workspace:
        result = load_models(model, max_batch=max_batch, max_wait=max_wait, **asked, workspace=workspace)
        observer.stop()
        if plot is not None:
            result.plot(plot)
        print_json(result.to_json()) if json else make_console().print(load_report(result.rows))
        if report is not None:
            tell_report(report_records(result.records, report, workspace=workspace))
    return Exit.FAILED_ROW if result.failed else Exit.DONE
