"""`redline ceilings`."""

from __future__ import annotations

from typing import Annotated

from redline.cli.options import HOW, DeviceName, Exit, Json, Threads, opt, print_json
from redline.errors import UsageError


def ceilings(
    device: DeviceName = "auto",
    threads: Threads = None,
    fresh: Annotated[bool, opt("--fresh", group=HOW, help="Measure again, even if they are known.")] = False,
    json: Json = False,
) -> int:
    """Measure what the device can do at most: matrix products, copy bandwidth, launches; next to the datasheet.

    Measured once per device, driver and torch version, and kept in the history.

    \b
    Examples:
      redline ceilings
      redline ceilings --device cuda:1 --fresh
    """
    from redline.api.ceilings import ceilings as measure_ceilings
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.report.ceilings import ceilings_report
    from redline.report.terminal import make_console

    if threads is not None and threads < 1:
        raise UsageError(f"threads must be 1 or more, got {threads}")
    with LiveObserver() as observer, Workspace(observer=observer) as workspace:
        result = measure_ceilings(device, threads=threads, fresh=fresh, workspace=workspace)
        observer.stop()
    print_json(result.to_json()) if json else make_console().print(ceilings_report(result.summary))
    return Exit.DONE
