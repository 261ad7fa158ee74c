"""`redline flops`, `redline ceilings` and `redline roofline`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import (
    WORKLOAD,
    Given,
    Json,
    Model,
    Options,
    Recipe,
    Recipes,
    ThatDevice,
    Threads,
    only_set,
    takes,
)
from redline.errors import UsageError

WITH_LATENCY: Options = {
    "device": Annotated[str | None, typer.Option(help="With --latency: auto, cpu, cuda, cuda:1, rocm.")],
    "threads": Annotated[int | None, typer.Option(help="With --latency: CPU threads.")],
}
"""Counting needs no device."""


@takes(WORKLOAD | WITH_LATENCY)
def flops(
    *,
    model: Model,
    recipe: Recipe = None,
    given: Given,
    depth: Annotated[int | None, typer.Option(help="How deep the tree goes; 2 by default.")] = None,
    latency: Annotated[bool, typer.Option("--latency", help="Run and profile a few steps: time per module.")] = False,
    json: Json = False,
) -> int:
    """Parameters, MACs, FLOPs and bytes, module by module, forward and backward; nothing runs, no memory is needed."""
    from redline.cli.limits import show_flops
    from redline.spec import MOST_DEPTH, require_range

    require_range("depth", depth, 0, MOST_DEPTH)
    settings = given | only_set(model=model, recipe=recipe, latency=latency)
    return show_flops(settings, depth=depth, as_json=json)


def ceilings(
    device: ThatDevice = "auto",
    threads: Threads = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, also where they are known.")] = False,
    json: Json = False,
) -> int:
    """What the device can do at most: products per number format, copy bandwidth, launches; beside the datasheet.

    Measured once per device, driver and torch, and kept in the history.
    """
    from redline.cli.limits import show_ceilings

    return show_ceilings(device, threads, fresh=fresh, as_json=json)


@takes(WORKLOAD)
def roofline(
    *,
    model: Annotated[str | None, typer.Argument(help="A name, timm:NAME, hf:NAME or file.py:factory.")] = None,
    recipe: Recipes = None,
    given: Given,
    last: Annotated[bool, typer.Option("--last", help="Of what was measured last, without measuring again.")] = False,
    plot: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plot: .png, .svg or .pdf.")] = None,
    json: Json = False,
) -> int:
    """How far a model is from the device's limits: intensity, attainable time, efficiency, headroom, what is in the way."""
    from redline.cli.limits import show_roofline

    settings = given | only_set(model=model, recipes=recipe)
    if last and settings:
        raise UsageError("--last takes what was measured last, and nothing else")
    if not last and model is None:
        raise UsageError("name one model, or --last")
    return show_roofline(None if last else settings, plot=plot, as_json=json)
