"""`redline run` and `redline demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import MEASURED, WORKLOAD, Given, Json, Models, Recipes, Report, ThatDevice, only_set, takes


@takes(WORKLOAD | MEASURED)
def run(
    *,
    model: Models = None,
    recipe: Recipes = None,
    amp: Annotated[bool, typer.Option("--amp", help="Sugar: the step amp.")] = False,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Sugar: the step channels-last.")] = False,
    compile_: Annotated[bool, typer.Option("--compile", help="Sugar: the step compile.")] = False,
    given: Given,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A TOML file with [[run]] tables.")] = None,
    report: Report = None,
    json: Json = False,
) -> int:
    """Measure models under one or more recipes, interleaved, each set against the first.

    Recipe steps: baseline (strict fp32), tf32, amp, amp-bf16, fp16, bf16, channels-last, compile[:MODE][,key=value],
    compile:freeze, torchscript, graphs, cudnn-benchmark, fold-bn, sdpa:BACKEND, fused-optimizer, int8, fp8, onnx,
    tensorrt.
    """
    from redline.cli.measure import run_and_print
    from redline.spec_table import load_specs, specs_from_table

    sugar = "+".join(name for name, on in (("amp", amp), ("channels-last", channels_last), ("compile", compile_)) if on)
    recipes = [*(recipe or []), *([sugar] if sugar else [])]
    table = given | only_set(model=model, recipe=recipes)
    specs = load_specs(file, table) if file else specs_from_table(table, where="run")
    return run_and_print(specs, as_json=json, report=report)


def demo(device: ThatDevice = "auto", json: Json = False) -> int:
    """A first look with good defaults for whatever device is here."""
    from redline.cli.measure import demo_specs, run_and_print

    return run_and_print(demo_specs(device), as_json=json)
