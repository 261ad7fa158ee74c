"""`redline run`, `redline demo` and `redline micro`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redline.cli.options import (
    CLUSTER,
    HOW,
    MEASURED,
    RANKS,
    WHAT,
    WORKLOAD,
    DeviceName,
    Exit,
    Given,
    Json,
    Models,
    Options,
    Price,
    Recipes,
    Report,
    Trust,
    only_set,
    opt,
    print_json,
    several,
    takes,
    tell,
)
from redline.model.errors import Interrupted, SpecError

if TYPE_CHECKING:
    from redline.api.run import RunResult
    from redline.api.workspace import Workspace

KEPT: Options = {
    "name": Annotated[str | None, opt(group=HOW, help="Name of the grid, for --resume and 'redline compare'.")],
    "resume": Annotated[bool | None, opt("--resume", group=HOW, help="Measure only what the same grid still lacks.")],
    "retry_failed": Annotated[
        bool | None, opt("--retry-failed", group=HOW, help="Resume, and try failed cells again.")
    ],
    "dry_run": Annotated[
        bool | None, opt("--dry-run", group=HOW, help="Show the plan and a time estimate; measure nothing.")
    ],
    "jobs": Annotated[
        int | None, opt("--jobs", group=HOW, help="Workers that may prepare at the same time. Default: one group's.")
    ],
}
"""How a grid is kept and continued."""
DECIDED: Options = {
    "decide": Annotated[
        bool | None,
        opt("--decide", group=HOW, help="Measure in fresh processes until every pair of recipes is decided."),
    ],
    "replicates": Annotated[
        int | None,
        opt(group=HOW, help="Fresh processes to measure in; intervals then cover how they differ. Default: 1."),
    ],
}
"""How sure the comparison must be."""
TARGETS: Options = {
    "slo_ttft": Annotated[
        str | None,
        opt("--slo-ttft", group=HOW, help="Generation: name the fastest cell whose first token comes within this."),
    ],
    "slo_tpot": Annotated[
        str | None,
        opt("--slo-tpot", group=HOW, help="Generation: and whose p95 time per further token is within this: 20ms."),
    ],
}


@takes(several(WORKLOAD | RANKS | MEASURED) | DECIDED | KEPT | TARGETS | CLUSTER)
def run(
    *,
    model: Models = None,
    recipe: Recipes = None,
    amp: Annotated[bool, opt("--amp", group=WHAT, help="Short for the switch amp.")] = False,
    channels_last: Annotated[
        bool, opt("--channels-last", group=WHAT, help="Short for the switch channels-last.")
    ] = False,
    compile_: Annotated[bool, opt("--compile", group=WHAT, help="Short for the switch compile.")] = False,
    given: Given,
    file: Annotated[Path | None, opt("--file", "-f", group=HOW, help="A TOML file with [[run]] tables.")] = None,
    trust: Trust = False,
    price: Price = None,
    report: Report = None,
    json: Json = False,
) -> int:
    """Measure models under recipes; several values make a grid.

    Recipes are measured interleaved, and each is compared with the first.

    Every setting takes several values or a range (-b 1,8 or -b 1..64, which doubles). Rows are kept as they come, and
    --resume continues after Ctrl-C. A cell that fails is a row. --decide measures until every pair is decided.

    Switches: tf32, amp, amp-bf16, fp16, bf16, channels-last, compile[:MODE][,key=value], compile:regional, compile:combine,
    compile:freeze, fused-linear, patch-products, torchscript, graphs, cudnn-benchmark, fold-bn, sdpa:BACKEND, fused-optimizer, overlap-gradients, checkpointing, keep-memory, int4, int8, fp8, onnx,
    tensorrt; with --ranks gradient-as-bucket-view, static-graph, bucket-size:mb=N, fsdp; in generation static-cache,
    decode-kernels. docs/recipes.md says what each does and needs.

    \b
    Examples:
      redline run resnet50 -b 32 -r baseline -r fp16+channels-last+compile
      redline run resnet50 vit_b_16 -b 1..64 -r baseline -r fp16 --resume
      redline run resnet50 -r fp16 -r fp16+channels-last --decide
    """
    from redline.api.run import run as run_models

    short = "+".join(name for name, on in (("amp", amp), ("channels-last", channels_last), ("compile", compile_)) if on)
    recipes = [*(recipe or []), *([short] if short else [])]
    asked = given | only_set(recipes=recipes, file=file, trust=trust, price=price)
    return show_grid(lambda workspace: run_models(model, **asked, workspace=workspace), report, json=json)


def show_grid(measure: Callable[[Workspace], RunResult], report: Path | None, *, json: bool) -> int:
    """Measure, print the rows, also those that were finished before Ctrl-C, and write the report."""
    from redline.api.report import report_records
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveGrid
    from redline.cli.report import tell_report
    from redline.show.folder import check_folder
    from redline.show.terminal import make_console

    if report is not None:
        check_folder(report)

    def show(result: Any) -> None:
        observer.stop()
        print_json(result.to_json()) if json else make_console().print(result.report())

    with LiveGrid() as observer, Workspace(observer=observer) as workspace:
        try:
            result = measure(workspace)
        except Interrupted as interrupted:
            if interrupted.result is None:
                raise
            show(interrupted.result)
            tell("interrupted; finished rows are kept, and the same command with --resume continues")
            return Exit.INTERRUPTED
        if report is not None and not result.records:
            raise SpecError("a dry run measures nothing to report: leave out --report or --dry-run")
        show(result)
        if report is not None:
            written = report_records(result.records, report, across=bool(result.rungs), workspace=workspace)
            tell_report(written)
    return Exit.FAILED_ROW if result.failed else Exit.DONE


def demo(device: DeviceName = "auto", json: Json = False) -> int:
    """Measure a well-known model with good defaults for this machine.

    \b
    Examples:
      redline demo
      redline demo --device cpu
    """
    from redline.api.run import demo as run_demo

    return show_grid(lambda workspace: run_demo(device, workspace=workspace), None, json=json)


def micro(context: typer.Context) -> int:
    """Run micro_benchmarking_pytorch.py with its own flags.

    'redline micro --help' lists them.

    \b
    Examples:
      redline micro --network resnet50 --batch-size 64 --iterations 20
      redline micro --network resnet50 --fp16 1 --flops-prof-step 10
    """
    from redline.compat.micro import main

    return main(context.args)
