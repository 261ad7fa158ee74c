"""This module checks the files and folders that a command writes, before the long measurement and not after it."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from redline.model.errors import SpecError


def check_folder(folder: Path) -> None:
    """Refuses a folder that cannot be written. Verbs ask before the long measurement, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file, not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise SpecError(f"cannot write the report to {folder}: {why}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SpecError(f"cannot write the report to {folder}: the folder is not writable")


def check_file(path: Path) -> None:
    """Refuses a file that cannot be written. Verbs ask this before the long measurement, too."""
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
    """Opens a page in a browser if there is a screen; without one, a text browser would take over the terminal."""
    has_screen = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if has_screen and sys.stdout.isatty():
        webbrowser.open(page.absolute().as_uri())
