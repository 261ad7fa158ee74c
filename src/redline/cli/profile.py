"""`redline profile`: capture, read or compare; print the report or the document; write the page and the CSV."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from redline.analyze.profile import Profile
from redline.cli.document import print_document
from redline.cli.progress import LiveObserver
from redline.cli.report import report_beside
from redline.errors import SpecError, UsageError
from redline.profiling import compare_profiles, profile, read_profile
from redline.report.folder import check_folder
from redline.report.profile import Sort
from redline.report.terminal import make_console


@dataclass(frozen=True)
class Output:
    """What becomes of a profile."""

    as_json: bool = False
    rows: int = 12
    sort: str | None = None
    """What the operator table is ordered by."""
    page: Path | None = None
    """Where the HTML goes; None: beside nothing, none is written."""
    opens: bool = False
    csv: Path | None = None
    report: Path | None = None
    """A folder for the report of what was captured."""


def profile_model(settings: dict[str, Any], output: Output) -> int:
    if output.report is not None:
        check_folder(output.report)
    with LiveObserver() as observer:
        result = profile(**settings, observer=observer)
    show(result.profile, output)
    report_beside([result.record] if result.record is not None else [], output.report, [result.profile])
    return 0


def profile_traces(places: list[str], output: Output, *, by_shape: bool) -> int:
    if output.report is not None:
        raise UsageError("--report is of records, and a trace from elsewhere has none; --html writes a page of it")
    show(read_profile(*places, by_shape=by_shape), output)
    return 0


def compare(before: str, after: str, output: Output) -> int:
    if output.page or output.opens or output.csv or output.report:
        raise UsageError("--diff prints a comparison; --open, --html, --csv and --report are of one profile")
    from redline.report.profile_diff import DiffReport

    diff = compare_profiles(before, after)
    if output.as_json:
        print_document(diff)
    else:
        make_console().print(DiffReport(diff, output.rows))
    return 0


def show(found: Profile, output: Output) -> None:
    if output.csv:
        from redline.report.kernel_csv import kernel_csv

        _write(output.csv, kernel_csv(found.kernels))
    page = _page(found, output) if output.opens or output.page else None
    if output.as_json:
        print_document(found)
    else:
        from redline.report.profile import ProfileReport

        make_console().print(ProfileReport(found, output.rows, _sort(output.sort)))
    if page is not None:
        print(f"page: {page}", file=sys.stderr)  # noqa: T201  (the CLI is the printer)
        if output.opens:
            open_in_browser(page)


def _sort(word: str | None) -> Sort | None:
    if word is None:
        return None
    for known in get_args(Sort):
        if word == known:
            return known  # type: ignore[no-any-return]
    raise SpecError(f"sort must be one of {', '.join(get_args(Sort))}, got {word!r}")


def _page(found: Profile, output: Output) -> Path:
    from redline.report.profile_page import profile_page
    from redline.trace.decode import read_trace
    from redline.trace.strip import strips_of

    files = [Path(source) for source in found.sources if Path(source).is_file()]
    page = output.page or Path.cwd() / f"{_stem(found)}.profile.html"
    _write(page, profile_page(found, strips_of([read_trace(file) for file in files])))
    return page


def _stem(found: Profile) -> str:
    if found.capture is not None:
        return f"{found.capture.tool}-{found.capture.record_id}" if not found.ranks else found.capture.record_id
    return Path(found.sources[0]).name.partition(".")[0] or "trace"


def open_in_browser(page: Path) -> None:
    """In the person's browser, where there is a screen: a text browser would take over the terminal."""
    has_screen = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if has_screen and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(page.absolute().as_uri())


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror}") from None
