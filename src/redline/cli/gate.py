"""`redline gate`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from redline.cli.options import HOW, OUTPUT, WHAT, Exit, Given, Json, Options, Trust, only_set, opt, print_json, takes
from redline.model.errors import SpecError, UsageError

BASELINE_HELP = (
    "What to compare with: a git ref such as main (checked out beside this one and measured interleaved with it), a file of "
    "'history export --format json --raw' or a history, 'history', tag:NAME, or recipe:RECIPE."
)
Device = Annotated[
    str | None,
    opt(group=WHAT, metavar="[auto|cpu|cuda|cuda:N|rocm|rocm:N]", help="The device, instead of the one in the file."),
]
GATED: Options = {
    "device": Device,
    "threshold": Annotated[
        float | None,
        opt(group=HOW, help="The slowdown that must be caught, instead of the file's: 0.05 is 5 %. Default: 0.03."),
    ],
    "fail_on": Annotated[
        list[str] | None,
        opt(
            "--fail-on",
            group=HOW,
            metavar="[memory|numerics|compile|graph-breaks|kernels]",
            help="Also fail when this got worse. Repeat for several.",
        ),
    ],
    "effort": Annotated[
        str | None,
        opt(group=HOW, metavar="[quick|normal|strict]", help="How long each process is timed. Default: quick."),
    ],
}
"""What is asked of every benchmark, instead of what the file says."""


@takes(GATED)
def gate(
    *,
    file: Annotated[Path, typer.Argument(metavar="BENCH.toml", help="A file with a [[run]] table per benchmark.")],
    baseline: Annotated[str | None, opt("--baseline", group=WHAT, metavar="REF|FILE", help=BASELINE_HELP)] = None,
    bisect: Annotated[
        list[str] | None,
        opt(
            "--bisect",
            group=WHAT,
            metavar="GOOD..BAD",
            help="Instead of a baseline: find the commit that made it slower, by gates halfway between the two. Or repeat it "
            "with interpreters of environments, or with recipes, in order.",
        ),
    ] = None,
    benchmark: Annotated[
        str | None, opt("--benchmark", group=WHAT, help="With --bisect: which benchmark of the file.")
    ] = None,
    given: Given,
    budget: Annotated[
        float | None, opt(group=HOW, help="Seconds for everything together. Default: 900; 3600 with --bisect.")
    ] = None,
    undecided: Annotated[
        str,
        opt("--undecided", group=HOW, metavar="[fail|ok]", help="Whether an undecided benchmark exits with 3 or 0."),
    ] = "fail",
    trust: Trust = False,
    summary: Annotated[
        Path | None,
        opt("--summary", group=OUTPUT, metavar="FILE.md", help="Write a Markdown summary for a pull request."),
    ] = None,
    junit: Annotated[Path | None, opt("--junit", group=OUTPUT, metavar="FILE.xml", help="Write JUnit XML.")] = None,
    json: Json = False,
) -> int:
    """Fail when a benchmark got slower than a baseline. For CI.

    Fresh processes of both sides are measured interleaved until each benchmark is faster, slower or the same, or the time is up.
    Where the baseline cannot be run, its stored records of the same device and settings are used. In JSON, ratio is time of
    the baseline over time now: below 1 it got slower.

    Exit codes: 0 nothing is slower; 1 something is slower, broken or failed a check; 2 a mistake in what was asked; 3
    undecided or incomparable (0 with --undecided ok). With --bisect: 0 found; 3 not found, as the last is not slower or a
    gate was not decided.

    \b
    Examples:
      redline gate bench.toml --baseline main
      redline gate bench.toml --baseline records.redline --summary gate.md
      redline gate bench.toml --bisect v1.0..main
    """
    from redline.api.gate import gate as run_gate
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveRace
    from redline.show.folder import write_text
    from redline.show.gate import gate_report
    from redline.show.terminal import make_console

    if bisect:
        beside = {"baseline": baseline, "fail-on": given.get("fail_on"), "summary": summary, "junit": junit}
        if needless := next(iter(only_set(**beside)), None):
            raise UsageError(f"--bisect looks for the change and judges nothing: leave out --{needless}")
        return _bisect(file, bisect, given, json, **only_set(benchmark=benchmark, budget_s=budget, trust=trust))
    if baseline is None or benchmark is not None:
        raise UsageError("--benchmark goes with --bisect" if benchmark else "give --baseline, or --bisect GOOD..BAD")
    if undecided not in ("fail", "ok"):
        raise SpecError(f"undecided must be fail or ok, got {undecided!r}")
    for path in (summary, junit):
        if path is not None and not path.absolute().parent.is_dir():
            raise SpecError(f"cannot write {path}: no such folder")
        if path is not None and path.is_dir():
            raise SpecError(f"cannot write {path}: it is a folder")
    with LiveRace() as observer, Workspace(observer=observer) as workspace:
        result = run_gate(file, baseline, trust=trust, workspace=workspace, **given, **only_set(budget_s=budget))
        observer.stop()
    if summary is not None:
        # GitHub shows all that the steps of a job have written to this file, one after the other.
        write_text(summary, result.to_markdown(), append=str(summary) == os.environ.get("GITHUB_STEP_SUMMARY"))
    if junit is not None:
        write_text(junit, result.to_junit(undecided_ok=undecided == "ok"))
    print_json(result.to_json()) if json else make_console().print(gate_report(result.rows, result.baseline))
    if result.failed:
        return Exit.SLOWER
    return Exit.INCOMPARABLE if result.undecided and undecided == "fail" else Exit.DONE


def _bisect(file: Path, between: list[str], given: Given, json: bool, **asked: Any) -> int:
    from redline.api.bisect import bisect
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveRace
    from redline.show.terminal import make_console

    with LiveRace() as observer, Workspace(observer=observer) as workspace:
        result = bisect(file, between, workspace=workspace, **given, **asked)
        observer.stop()
    print_json(result.to_json()) if json else make_console().print(str(result), markup=False, end="")
    return Exit.DONE if result.culprit is not None else Exit.INCOMPARABLE
