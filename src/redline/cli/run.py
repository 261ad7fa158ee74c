"""`redline run`, `redline demo` and `redline micro`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import (
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
    Price,
    Processes,
    Recipes,
    Report,
    Trust,
    only_set,
    opt,
    print_json,
    takes,
)


@takes(WORKLOAD | RANKS | MEASURED)
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
    replicates: Processes = 1,
    price: Price = None,
    report: Report = None,
    json: Json = False,
) -> int:
    """Measure models under one or more recipes, interleaved, each compared with the first.

    Switches: tf32, amp, amp-bf16, fp16, bf16, channels-last, compile[:MODE][,key=value], compile:regional, compile:combine,
    compile:freeze, fused-linear, patch-products, torchscript, graphs, graphs:parts, cudnn-benchmark, fold-bn, sdpa:BACKEND, fused-optimizer, overlap-gradients, pool-gradients, checkpointing, keep-memory, int4, int8, fp8, onnx,
    tensorrt; with --ranks gradient-as-bucket-view, static-graph, bucket-size:mb=N, fsdp; in generation static-cache, cache-dtype:FORMAT,
    prefill-chunk:tokens=N, decode-kernels. docs/recipes.md says what each does and needs.

    \b
    Examples:
      redline run resnet50 -b 32 -r baseline -r fp16+channels-last+compile
      redline run my_model.py:build --task train --effort quick
      redline run resnet50 --task train --ranks 4 --batch 256
    """
    from redline.api.report import report_records
    from redline.api.run import run as run_models
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.cli.report import tell_report
    from redline.report.folder import check_folder
    from redline.report.run import RunReport
    from redline.report.terminal import make_console

    if report is not None:
        check_folder(report)
    short = "+".join(name for name, on in (("amp", amp), ("channels-last", channels_last), ("compile", compile_)) if on)
    recipes = [*(recipe or []), *([short] if short else [])]
    asked = given | only_set(recipes=recipes, file=file, trust=trust, price=price)
    with LiveObserver() as observer, Workspace(observer=observer) as workspace:
        result = run_models(model, **asked, replicates=replicates, workspace=workspace)
        observer.stop()
        print_json(result.to_json()) if json else make_console().print(RunReport(result.rows))
        if report is not None:
            tell_report(report_records(result.records, report, workspace=workspace))
    return Exit.FAILED_ROW if result.failed else Exit.DONE


def demo(device: DeviceName = "auto", json: Json = False) -> int:
    """Measure a well-known model with good defaults for this machine.

    \b
    Examples:
      redline demo
      redline demo --device cpu
    """
    from redline.api.run import demo as run_demo
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.report.run import RunReport
    from redline.report.terminal import make_console

    with LiveObserver() as observer, Workspace(observer=observer) as workspace:
        result = run_demo(device, workspace=workspace)
        observer.stop()
    print_json(result.to_json()) if json else make_console().print(RunReport(result.rows))
    return Exit.FAILED_ROW if result.failed else Exit.DONE


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
