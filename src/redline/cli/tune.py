"""`redline tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from redline.cli.options import (
    CLUSTER,
    HOW,
    ISOLATED,
    OUTPUT,
    WHAT,
    WORKLOAD,
    Exit,
    Given,
    Json,
    Model,
    Options,
    Price,
    Replicates,
    Report,
    only_set,
    opt,
    print_json,
    takes,
    task_option,
)

if TYPE_CHECKING:
    from redline.search.tune.result import TuneSummary

TUNED: Options = WORKLOAD | {
    "batch": Annotated[str | None, opt("--batch", "-b", group=WHAT, help="Items per step, or auto to search it too.")],
    "task": task_option("infer", "train", "generate"),
}
"""What is measured; a function that is timed as it is has no recipe to search."""
SEARCH: Options = {
    "slo_p95": Annotated[
        str | None, opt("--slo-p95", group=HOW, help="Keep p95 of the step time within this limit, such as 20ms.")
    ],
    "tolerance": Annotated[
        str | None, opt(group=HOW, help="Numerics: a factor on the error of rounding such as 2x, or a relative error.")
    ],
    "allow_quantized": Annotated[
        bool | None, opt("--allow-quantized", group=HOW, help="Try int8 and fp8 too; recommended only with --check.")
    ],
    "check": Annotated[
        str | None,
        opt(
            group=HOW,
            help="file.py:function, a metric of the model, higher is better; run on the winner and all finalists.",
        ),
    ],
    "recipes": Annotated[list[str] | None, opt("--recipe", "-r", group=HOW, help="A recipe to try first; repeatable.")],
    "switches": Annotated[str | None, opt(group=HOW, help="Use only these switches, such as fp16,compile,graphs.")],
    "without": Annotated[str | None, opt(group=HOW, help="Leave these switches out, such as compile.")],
    "jobs": Annotated[
        int | None, opt(group=HOW, help="Recipes prepared at the same time. Default: as many as processors allow.")
    ],
    "resume": Annotated[bool | None, opt("--resume", group=HOW, help="Continue the same search where it stopped.")],
    "name": Annotated[str | None, opt(group=HOW, help="Name of the search. Default: derived from what is asked.")],
}
"""What is searched, and how."""
Budget = Annotated[
    str, opt(group=HOW, help="Time for the search once torch is loaded, such as 60s or 5m; it often ends earlier.")
]
Objective = Annotated[
    str,
    opt(
        group=HOW,
        metavar="[throughput|latency|energy|ttft|tpot]",
        help="What to optimize; energy: joules per item; ttft (first token) and tpot (time per further token) with --task generate.",
    ),
]
SnippetFile = Annotated[
    Path | None, opt(group=OUTPUT, metavar="FILE", help="Write the winner as plain PyTorch code to this file.")
]


@takes(SEARCH | TUNED | ISOLATED | CLUSTER)
def tune(
    *,
    model: Model,
    budget: Budget = "10m",
    objective: Objective = "throughput",
    replicates: Replicates = 3,
    given: Given,
    snippet: SnippetFile = None,
    price: Price = None,
    report: Report = None,
    json: Json = False,
) -> int:
    """Find the fastest recipe that keeps the numerics; write its code.

    The winner is proven against the baseline, and each of its switches is measured. Every recipe's numerics are checked before it is timed. Ctrl-C keeps what is known and prints the best so far. A
    --check that raises an error under a recipe rejects that recipe, and the exit code is 5.

    \b
    Examples:
      redline tune resnet50 --batch 32 --budget 5m --snippet fast.py
      redline tune my_model.py:build --task train --objective energy
      redline tune hf:gpt2 --task generate --prompt 512 --objective tpot
    """
    from redline.api.tune import tune as tune_model
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveTune
    from redline.cli.verb import tell_report
    from redline.model.fields import MOST_REPLICATES, require_range
    from redline.show.folder import check_file, check_folder, write_text
    from redline.show.terminal import make_console
    from redline.show.tune import tune_report
    from redline.verbs.report import report_records

    require_range("replicates", replicates, 1, MOST_REPLICATES)
    if report is not None:
        check_folder(report)
    if snippet is not None:
        check_file(snippet)
    with LiveTune() as observer, Workspace(observer=observer) as workspace:
        asked = only_set(price=price) | _settings(given)
        result = tune_model(
            model, budget=budget, objective=objective, replicates=replicates, **asked, workspace=workspace
        )
        observer.stop()
        if snippet is not None and result.snippet is not None:
            write_text(snippet, result.snippet)
        print_json(result.to_json()) if json else make_console().print(tune_report(result.summary, snippet))
        if report is not None:
            tunes = [result.summary]
            tell_report(report_records(list(result.records.values()), report, tunes=tunes, workspace=workspace))
    return _exit_code(result.summary)


def _exit_code(found: TuneSummary) -> int:
    if found.state == "interrupted":
        return Exit.INTERRUPTED
    is_sound = found.leader is not None and not any(metric.failure for metric in found.metrics)
    return Exit.DONE if is_sound else Exit.FAILED_ROW


def _settings(given: Given) -> Given:
    """The options as the function takes them: a number for the batch, lists of switches."""
    settings = dict(given)
    if str(settings.get("batch", "")).isdecimal():
        settings["batch"] = int(settings["batch"])
    for key in ("switches", "without"):
        if words := settings.pop(key, ""):
            settings[key] = [word.strip() for word in words.split(",")]
    return settings
