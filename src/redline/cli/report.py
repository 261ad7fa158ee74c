"""`redline report` and `--report DIR`: write the folder, say what lies where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from redline.analyze.profile import Profile
from redline.analyze.tune.finding import TuneFinding
from redline.cli.document import print_document
from redline.record import RunRecord
from redline.report.folder import ReportFiles
from redline.report.one_line import one_line
from redline.report.terminal import make_console
from redline.reporting import report_records, write_report


def report_and_print(
    ids: Sequence[str], folder: Path, *, last: bool, sweep: str | None, tune: str | None, opens: bool, as_json: bool
) -> int:
    files = write_report(ids, folder, last=last, sweep=sweep, tune=tune)
    if as_json:
        print_document(files)
    else:
        _tell(files, on_stderr=False)
    if opens:
        from redline.cli.profile import open_in_browser

        open_in_browser(Path(files.dashboard))
    return 0


def report_beside(
    records: Sequence[RunRecord],
    folder: Path | None,
    profiles: Sequence[Profile] | None = None,
    tunes: Sequence[TuneFinding] = (),
) -> None:
    """What `--report DIR` adds to a command that measures; stdout stays the command's own."""
    if folder is not None:
        _tell(report_records(records, folder, profiles=profiles, tunes=tunes), on_stderr=True)


def _tell(files: ReportFiles, *, on_stderr: bool) -> None:
    console = make_console(stderr=on_stderr)
    console.print(Text(one_line(files.headline), style="bold"))
    for note in files.notes:
        console.print(Text(f"note: {one_line(note)}", style="yellow"))
    if not files.records:
        console.print(Text("no record to report; start with 'redline demo'", style="dim"))
    pictures = ", ".join(Path(picture).name for picture in files.pictures) or "no picture"
    console.print(Text(f"dashboard: {files.dashboard}"))
    console.print(Text(f"beside it: report.md, {pictures}, results.csv, results.json", style="dim"))
