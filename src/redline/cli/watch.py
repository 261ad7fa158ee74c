"""`redline watch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from redline.cli.options import OUTPUT, WAY, opt, tell
from redline.model.errors import UsageError

if TYPE_CHECKING:
    from redline.api.watch import Alarm
    from redline.launch.watch import WindowPlan


def watch(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND", help="Your command, such as python train.py, torchrun or accelerate launch."
        ),
    ] = None,
    profile: Annotated[
        bool, opt("--profile", group=WAY, help="Also capture a few steps with torch's profiler.")
    ] = False,
    window: Annotated[
        int | None, opt("--window", group=WAY, help="With --profile: how many steps to capture. Default: 5.")
    ] = None,
    alert: Annotated[
        str | None,
        opt("--alert", group=WAY, metavar="COMMAND|URL", help="Run this, or post to it, when the throughput falls."),
    ] = None,
    alert_drop: Annotated[
        str | None, opt("--alert-drop", group=WAY, metavar="SHARE", help="How far it must fall. Default: 20%.")
    ] = None,
    name: Annotated[
        str | None, opt(group=WAY, help="What to call it in the history. Default: the script's name.")
    ] = None,
    summary: Annotated[Path | None, opt(group=OUTPUT, metavar="FILE", help="Write the summary as JSON.")] = None,
    quiet: Annotated[
        bool, opt("--quiet", "-q", group=OUTPUT, help="Print nothing but the script's own output.")
    ] = False,
) -> int:
    """Watch your own script, unchanged: its steps, where its time goes.

    At its end Redline says what to change. Its output, exit code and signals pass through; what Redline says goes to stderr. The record goes into the history.

    \b
    Examples:
      redline watch -- python train.py --epochs 3
      redline watch --profile -- torchrun --nproc-per-node 2 train.py
      redline watch --alert 'notify-send slow' -- python train.py
    """
    import sys

    from redline.analyze.watch import Rates
    from redline.api.watch import watch_command
    from redline.launch.watch import end_like
    from redline.model.environment import TelemetrySample
    from redline.show.terminal import make_console
    from redline.show.watch import status_line, watch_report

    plan = _captures(profile, window)
    alarm = _alarm(alert, alert_drop)
    if summary is not None and (summary.is_dir() or not summary.parent.is_dir()):
        why = "it is a folder" if summary.is_dir() else f"there is no folder {summary.parent}"
        raise UsageError(f"cannot write {summary}: {why}")

    def told(rates: Rates, card: TelemetrySample | None) -> None:
        if not quiet and sys.stderr.isatty():
            tell(f"redline: {status_line(rates, card)}")
        if alarm is not None:
            alarm.hear(rates)

    result = watch_command(command or [], plan=plan, name=name, on_rates=told)
    if not quiet:
        make_console(stderr=True).print(watch_report(result.record))
    if summary is not None:
        try:
            summary.write_text(result.to_json(), encoding="utf-8")
        except OSError as error:
            tell(f"redline: cannot write {summary}: {error.strerror}")
    return end_like(result.watched.exit_code or 0)


def _captures(profile: bool, window: int | None) -> WindowPlan | None:
    """Which steps are captured; None: none."""
    from redline.launch.watch import WindowPlan

    if window is not None and window < 1:
        raise UsageError(f"--window must be 1 or more, got {window}")
    if window is not None and not profile:
        raise UsageError("--window says how many steps --profile captures: give --profile as well")
    return WindowPlan(steps=window or 5) if profile else None


def _alarm(alert: str | None, drop: str | None) -> Alarm | None:
    from redline.api.watch import Alarm, parse_share

    if alert is not None and not alert.strip():
        raise UsageError("--alert needs a command or a URL, got nothing")
    if alert is not None and alert.startswith(("http://", "https://")) and not urlsplit(alert).hostname:
        raise UsageError(f"--alert needs a URL with a host, got {alert!r}")
    if drop is not None and alert is None:
        raise UsageError("--alert-drop says when --alert is due: give --alert as well")
    return Alarm(alert, parse_share(drop or "20%")) if alert is not None else None
