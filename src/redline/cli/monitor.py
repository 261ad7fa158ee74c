"""`redline monitor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from redline.cli.options import OUTPUT, WAY, Exit, Json, opt, print_json
from redline.model.errors import UsageError


def monitor(
    interval: Annotated[float, opt("--interval", group=WAY, metavar="SECONDS", help="Time between two samples.")] = 1.0,
    duration: Annotated[
        str | None, opt("--duration", group=WAY, metavar="TIME", help="Stop after this long. Default: at Ctrl-C.")
    ] = None,
    attach: Annotated[
        int | None,
        opt("--attach", group=WAY, metavar="PID", help="Watch only the GPUs this process uses, while it runs."),
    ] = None,
    csv: Annotated[Path | None, opt("--csv", group=OUTPUT, metavar="FILE", help="Log every sample as a row.")] = None,
    json: Json = False,
) -> int:
    """Show every GPU and the CPU live: load, memory, power, clocks.

    Throttling, traffic and processes are shown too. Ctrl-C ends it with a summary. What a driver does not report is shown as unknown.

    \b
    Examples:
      redline monitor
      redline monitor --duration 10m --csv gpus.csv
      redline monitor --attach 4711 --json
    """
    import sys

    from rich.live import Live

    from redline.api.monitor import DeviceLook
    from redline.api.monitor import monitor as look_at_machine
    from redline.model.fields import seconds_of
    from redline.show.monitor import looks_table, monitor_report, write_looks
    from redline.show.terminal import make_console

    seconds = seconds_of("--duration", duration) if duration is not None else None
    console = make_console(stderr=True)
    try:
        log = csv.open("w", encoding="utf-8") if csv is not None else None
    except OSError as error:
        raise UsageError(f"cannot write {csv}: {error.strerror}") from None
    is_first = True
    live = Live(console=console, transient=True, auto_refresh=False)

    def show(looks: list[DeviceLook]) -> None:
        nonlocal is_first
        if log is not None:
            write_looks(log, looks, with_header=is_first)
        is_first = False
        if sys.stderr.isatty():
            live.update(looks_table(looks), refresh=True)

    try:
        if sys.stderr.isatty():
            live.start()
        result = look_at_machine(seconds=seconds, interval_s=interval, attach=attach, on_looks=show)
    finally:
        live.stop()
        if log is not None:
            log.close()
    print_json(result.to_json()) if json else make_console().print(monitor_report(result.totals))
    return Exit.DONE
