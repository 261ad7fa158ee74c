"""`redline profile`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from redline.cli.options import (
    HOW,
    ISOLATED,
    MODEL_HELP,
    OUTPUT,
    RANKS,
    WORKLOAD,
    Exit,
    Given,
    Json,
    Options,
    Recipe,
    Report,
    only_set,
    opt,
    print_json,
    takes,
    tell,
)
from redline.model.errors import UsageError

if TYPE_CHECKING:
    from redline.analyze.profile import Profile
    from redline.api.workspace import Workspace
    from redline.model.record import RunRecord


CAPTURE: Options = {
    "steps": Annotated[int | None, opt(group=HOW, help="Steps to capture. Default: 3, or what the tool needs.")],
    "tool": Annotated[
        str | None,
        opt(group=HOW, metavar="[nsys|ncu|rocprof|rocprofv2|rocprofv3|rocprof-compute]", help="A vendor profiler."),
    ],
    "memory": Annotated[bool | None, opt("--memory", group=HOW, help="Record allocations too.")],
    "stacks": Annotated[bool | None, opt("--stacks", group=HOW, help="Record Python stacks too.")],
    "wait": Annotated[int | None, opt(group=HOW, help="Steps to skip before the profiler starts. Default: 1.")],
    "warmup": Annotated[int | None, opt(group=HOW, help="Profiled steps that are not kept. Default: 2.")],
}
"""How a model is captured; traces that are read were captured before."""
FILES: Options = {
    "html": Annotated[Path | None, opt(group=OUTPUT, help="Write an HTML page of the profile to this file.")],
    "csv": Annotated[
        Path | None,
        opt(group=OUTPUT, help="Write the kernel table, laid out like rocprof --stats; on a CPU, operators."),
    ],
    "tables": Annotated[
        Path | None, opt(group=OUTPUT, help="Write all tables: FILE.xlsx, or a folder that gets Parquet files.")
    ],
}
"""What is written of a profile, wherever it comes from."""


What = Annotated[list[str] | None, typer.Argument(help=f"{MODEL_HELP} After --trace: more files.")]
Shapes = Annotated[bool, opt(group=HOW, help="Record the shapes of inputs.")]
ByShape = Annotated[
    bool, opt("--by-shape", group=OUTPUT, help="List operators separately by the shapes of their inputs.")
]
Traces = Annotated[list[str] | None, opt(group=HOW, help="Read Kineto traces from anywhere, one per rank.")]
Imports = Annotated[
    list[str] | None,
    opt("--import", group=HOW, help="Read a file of rocprof, rocprofv2, rocprofv3, nsys or ncu; repeat for several."),
]
Pair = Annotated[tuple[str, str] | None, opt(group=HOW, metavar="A B", help="Compare two traces, folders or records.")]
Folder = Annotated[Path | None, opt(group=OUTPUT, help="A folder for the trace, as TensorBoard reads it.")]
Open = Annotated[bool, opt("--open", group=OUTPUT, help="Write an HTML page of the profile and open it.")]
Rows = Annotated[int, opt(group=OUTPUT, help="Rows of each table.")]
Sort = Annotated[
    str | None, opt(group=OUTPUT, metavar="[device|host|memory|calls]", help="Order of the operator table.")
]


@takes(
    CAPTURE
    | FILES
    | WORKLOAD
    | {name: RANKS[name] for name in ("ranks", "batch_per_rank")}
    | {"max_memory": ISOLATED["max_memory"]}
)
def profile(
    *,
    what: What = None,
    recipe: Recipe = None,
    given: Given,
    shapes: Shapes = True,
    by_shape: ByShape = False,
    trace: Traces = None,
    import_: Imports = None,
    diff: Pair = None,
    out: Folder = None,
    open_: Open = False,
    rows: Rows = 12,
    sort: Sort = None,
    report: Report = None,
    json: Json = False,
) -> int:
    """Show where a step's time goes, and what is in the way.

    \b
    Examples:
      redline profile resnet50 -r fp16+channels-last --batch 32
      redline profile --trace rank0.json.gz rank1.json.gz --html page.html
      redline profile --import results.stats.csv
    """
    from redline.api.report import report_records
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.cli.report import tell_report
    from redline.model.fields import MOST_ROWS, require_range
    from redline.report.export import json_document
    from redline.report.folder import check_folder
    from redline.report.profile import ProfileReport, sort_named
    from redline.report.terminal import make_console

    for name, least in (("steps", 1), ("wait", 0), ("warmup", 0)):
        require_range(name, given.get(name), least, MOST_ROWS)
    require_range("rows", rows, 0, MOST_ROWS)
    files: dict[str, Path] = {name: given.pop(name) for name in FILES if name in given}
    order = sort_named(sort)
    capture = only_set(recipe=recipe, **given, folder=out, shapes=None if shapes else "off")
    _refuse_mixtures(what or [], trace, import_, diff, capture, report)
    if import_ and by_shape:
        raise UsageError("--by-shape is of operators, and a table of kernels has none: leave it out")
    if diff is not None and (by_shape or open_ or files):
        raise UsageError(
            "--diff prints a comparison; --by-shape, --open, --html, --csv and --tables are of one profile"
        )
    if diff is not None:
        return _compare(diff, rows, json)
    if report is not None:
        check_folder(report)
    with LiveObserver(quiet=bool(trace or import_)) as observer, Workspace(observer=observer) as workspace:
        found, record = _profiled(what or [], trace, import_, capture | {"shapes": shapes}, by_shape, workspace)
        observer.stop()
        if open_:
            files.setdefault("html", Path.cwd() / f"{_stem(found)}.profile.html")
        written = _write_files(found, **files)
        print_json(json_document("profile", found)) if json else make_console().print(ProfileReport(found, rows, order))
        for line in written:
            tell(line)
        if open_:
            open_in_browser(files["html"])
        if report is not None and record is not None:
            tell_report(report_records([record], report, profiles=[found], workspace=workspace))
    return Exit.DONE


def _refuse_mixtures(
    what: Sequence[str],
    trace: Sequence[str] | None,
    import_: Sequence[str] | None,
    diff: tuple[str, str] | None,
    capture: Given,
    report: Path | None,
) -> None:
    """Options that do not go together: a profile is captured, read, or compared with another."""
    if diff is not None and (what or trace or import_):
        raise UsageError("--diff takes two profiles and nothing else")
    if trace and import_:
        raise UsageError("give --trace or --import, not both")
    reads = "--diff" if diff is not None else "--trace" if trace else "--import" if import_ else None
    if reads is None:
        if len(what) != 1:
            raise UsageError("name one model, or --trace FILE…, or --diff A B")
        return
    _refuse_settings(capture, reads)
    if report is not None:
        raise UsageError(f"--report needs records, and {reads} has none; --html writes a page of a profile")


def _compare(diff: tuple[str, str], rows: int, json: bool) -> int:
    from redline.api.profile import compare_profiles
    from redline.api.workspace import Workspace
    from redline.report.compare import DiffReport
    from redline.report.export import json_document
    from redline.report.terminal import make_console

    with Workspace() as workspace:
        changed = compare_profiles(*diff, workspace=workspace)
    print_json(json_document("profile-diff", changed)) if json else make_console().print(DiffReport(changed, rows))
    return Exit.DONE


def _profiled(
    what: Sequence[str],
    trace: Sequence[str] | None,
    import_: Sequence[str] | None,
    capture: Given,
    by_shape: bool,
    workspace: Workspace,
) -> tuple[Profile, RunRecord | None]:
    """The profile read from files or captured now; captured, with its record."""
    from redline.api.profile import import_profile, read_profile
    from redline.api.profile import profile as profile_model

    if trace:
        return read_profile(*trace, *what, by_shape=by_shape, workspace=workspace), None
    if import_:
        return import_profile(*import_, *what), None
    result = profile_model(what[0], **capture, by_shape=by_shape, workspace=workspace)
    return result.profile, result.record


def _write_files(
    found: Profile, *, csv: Path | None = None, tables: Path | None = None, html: Path | None = None
) -> list[str]:
    """Write what was asked for; returns the lines that say where tables and page are."""
    from redline.api.profile import captured_lanes
    from redline.report.folder import write_text
    from redline.report.profile_files import kernel_csv, profile_page, write_tables

    told = []
    if csv is not None:
        write_text(csv, kernel_csv(found))
    if tables is not None and write_tables(found, tables):
        told.append(f"tables: {tables}")
    if html is not None:
        write_text(html, profile_page(found, captured_lanes(found)))
        told.append(f"page: {html}")
    return told


def open_in_browser(page: Path) -> None:
    """Only where there is a screen: a text browser would take over the terminal."""
    has_screen = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if has_screen and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(page.absolute().as_uri())


def _refuse_settings(settings: Given, mode: str) -> None:
    """What is already captured cannot be captured differently."""
    if settings:
        named = next(iter(settings))
        option = {"folder": "out", "shapes": "no-shapes"}.get(named, named).replace("_", "-")
        raise UsageError(f"--{option} is about capturing a model, and {mode} reads what was captured: leave it out")


def _stem(found: Profile) -> str:
    if found.capture is not None:
        return f"{found.capture.tool}-{found.capture.record_id}" if not found.ranks else found.capture.record_id
    return Path(found.sources[0]).name.partition(".")[0] or "trace"
