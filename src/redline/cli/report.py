"""`redline report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from redline.cli.options import OUTPUT, WHICH, Exit, Json, opt, print_json

if TYPE_CHECKING:
    from redline.show.folder import ReportFiles


def report(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            help="Records; or files: a back-up, a history or 'history export --raw'. Default: the whole history."
        ),
    ] = None,
    last: Annotated[bool, opt("--last", group=WHICH, help="The last run, with all recipes measured in it.")] = False,
    sweep: Annotated[str | None, opt(group=WHICH, help="The finished cells of a sweep, by its name.")] = None,
    tune: Annotated[str | None, opt(group=WHICH, help="A search for the fastest recipe, by its name.")] = None,
    across: Annotated[
        bool, opt("--across", group=WHICH, help="Also compare across devices and thread counts.")
    ] = False,
    out: Annotated[
        Path | None,
        opt("--out", "-o", group=OUTPUT, metavar="DIR", help="The folder to write. Default: redline-report."),
    ] = None,
    open_: Annotated[bool, opt("--open", group=OUTPUT, help="Open the dashboard in a browser.")] = False,
    json: Json = False,
) -> int:
    """Write a folder: dashboard, Markdown with pictures, CSV, JSON.

    The dashboard is one file.

    \b
    Examples:
      redline report --last --open
      redline report --sweep resnet50-grid -o report
      redline report backup.redline -o report
    """
    from redline.api.report import write_report
    from redline.show.export import json_document

    files = write_report(ids or [], out or Path("redline-report"), last=last, sweep=sweep, tune=tune, across=across)
    if json:
        print_json(json_document("report", files))
    else:
        tell_report(files, on_stderr=False)
    if open_:
        from redline.show.folder import open_in_browser

        open_in_browser(Path(files.dashboard))
    return Exit.DONE


def tell_report(files: ReportFiles, *, on_stderr: bool = True) -> None:
    """What a report says and where it is; beside a measurement on stderr, as stdout is the measurement's."""
    from rich.text import Text

    from redline.show.terminal import make_console, one_line

    console = make_console(stderr=on_stderr)
    console.print(Text(one_line(files.headline), style="bold"))
    for each in files.notes:
        console.print(Text(f"note: {one_line(str(each))}", style="yellow"))
    if not files.records:
        console.print(Text("no record to report; start with 'redline demo'", style="dim"))
    pictures = ", ".join(Path(picture).name for picture in files.pictures) or "no picture"
    console.print(Text(f"dashboard: {files.dashboard}"))
    console.print(Text(f"also written: report.md, {pictures}, results.csv, results.json", style="dim"))
