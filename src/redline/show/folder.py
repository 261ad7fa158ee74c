"""A report as a folder: dashboard.html, report.md, pictures, results.csv, results.json.

Results have one row per recipe and batch, over all of its processes; records.csv has one per record where that is more.
"""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redline.model.errors import SpecError
from redline.model.fields import Frozen
from redline.model.note import Note
from redline.show.contents import Contents
from redline.show.dashboard import dashboard
from redline.show.export import export_csv, export_epochs_csv, export_json
from redline.show.markdown import markdown
from redline.show.plots import draw_pictures


class ReportFiles(Frozen):
    """What was written."""

    folder: str
    headline: str
    dashboard: str
    markdown: str
    csv: str
    json: str
    pictures: tuple[str, ...]
    records: int
    notes: tuple[Note, ...] = ()
    trace: str | None = None
    """Where the report of a quick profile holds its trace."""


def check_folder(folder: Path) -> None:
    """Whether a report could be written there: asked before the long measurement, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file, not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise SpecError(f"cannot write the report to {folder}: {why}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SpecError(f"cannot write the report to {folder}: the folder is not writable")


def check_file(path: Path) -> None:
    """Whether a file could be written there, likewise."""
    if path.is_dir():
        raise SpecError(f"cannot write to {path}: it is a folder")
    check_folder(path.parent)


def write_text(path: Path, text: str, *, append: bool = False) -> None:
    try:
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror}") from None


def open_in_browser(page: Path) -> None:
    """Only where there is a screen: a text browser would take over the terminal."""
    has_screen = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if has_screen and sys.stdout.isatty():
        webbrowser.open(page.absolute().as_uri())


def write_folder(contents: Contents, folder: Path) -> ReportFiles:
    check_folder(folder)
    chosen = [line.record for line in contents.lines]

    def lines(records: Any) -> Any:
        return [line.row for line in contents.lines]

    def of_records(records: Any) -> Any:
        return contents.rows  # summaries are expensive: they are made once

    several = len(contents.lines) < len(contents.records)
    try:
        pictures = draw_pictures(contents, folder)
        names = {title: path.name for title, path in pictures.items()}
        texts: dict[str, Callable[[], str]] = {
            "dashboard.html": lambda: dashboard(contents),
            "report.md": lambda: markdown(contents, names),
            "results.csv": lambda: export_csv(chosen, summarize=lines),
            **({"records.csv": lambda: export_csv(contents.records, summarize=of_records)} if several else {}),
            **({"epochs.csv": lambda: export_epochs_csv(contents.trainings)} if contents.trainings else {}),
            "results.json": lambda: export_json(chosen, summarize=lines),
        }
        for name, make in texts.items():
            (folder / name).write_text(make(), encoding="utf-8")
    except OSError as error:
        raise SpecError(f"cannot write the report to {folder}: {error.strerror}") from None
    return ReportFiles(
        folder=str(folder),
        headline=contents.headline,
        dashboard=str(folder / "dashboard.html"),
        markdown=str(folder / "report.md"),
        csv=str(folder / "results.csv"),
        json=str(folder / "results.json"),
        pictures=tuple(str(path) for path in pictures.values()),
        records=len(contents.records),
        notes=tuple(contents.notes),
    )
