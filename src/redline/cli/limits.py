"""`redline flops`, `ceilings` and `roofline`: ask, print the report or the document, write the plot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from redline.cli.main import EXIT_FAILED_ROW
from redline.cli.progress import LiveObserver
from redline.errors import UsageError
from redline.report.terminal import make_console


def show_flops(settings: dict[str, Any], *, depth: int | None, as_json: bool) -> int:
    from redline.limits import flops
    from redline.report.flops import FlopsReport

    if depth is not None and depth < 0:
        raise UsageError(f"depth must be 0 or more, got {depth}")
    if not settings.get("latency"):
        needless = [name for name in ("device", "threads") if name in settings]
        if needless:
            raise UsageError(f"--{needless[0]} goes with --latency: counting needs no device")
    with LiveObserver() as observer:
        result = flops(**settings, observer=observer)
    if as_json:
        sys.stdout.write(result.to_json())
    else:
        make_console().print(FlopsReport(result.summary, depth))
    return 0


def show_ceilings(device: str, threads: int | None, *, fresh: bool, as_json: bool) -> int:
    from redline.limits import ceilings
    from redline.report.ceilings import ceilings_report

    if threads is not None and threads < 1:
        raise UsageError(f"threads must be 1 or more, got {threads}")
    with LiveObserver() as observer:
        result = ceilings(device, threads=threads, fresh=fresh, observer=observer)
    if as_json:
        sys.stdout.write(result.to_json())
    else:
        make_console().print(ceilings_report(result.summary))
    return 0


def show_roofline(settings: dict[str, Any] | None, *, plot: Path | None, as_json: bool) -> int:
    """`settings` None: of what was measured last."""
    from redline.limits import roofline, roofline_of_last
    from redline.report.batch_plot import check_place
    from redline.report.roofline import RooflineReport

    if plot is not None:
        check_place(plot)
    if settings is None:
        result = roofline_of_last()
    else:
        with LiveObserver() as observer:
            result = roofline(**settings, observer=observer)
    if plot is not None:
        result.plot(plot)
    if as_json:
        sys.stdout.write(result.to_json())
    else:
        make_console().print(RooflineReport(result.rows, result.failures))
    if plot is not None:
        print(f"plot: {plot}", file=sys.stderr)  # noqa: T201  (the CLI is the printer)
    return EXIT_FAILED_ROW if result.failures else 0
