"""`redline profile`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from redline.cli.options import (
    HOW,
    ISOLATED,
    MODEL_HELP,
    ONE_STEP,
    OUTPUT,
    RANKS,
    WORKLOAD,
    Exit,
    Given,
    Json,
    Options,
    Recipes,
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
    "stacks": Annotated[bool | None, opt("--stacks", group=HOW, help="Record Python stacks too.")],
}
"""How a model is captured; traces that are read were captured before."""
FILES: Options = {
    "html": Annotated[Path | None, opt(group=OUTPUT, help="Write an HTML page of the profile to this file.")],
    "csv": Annotated[
        Path | None,
        opt(group=OUTPUT, help="Write the kernel table, laid out like rocprof --stats; on a CPU, operators."),
    ],
}
"""What is written of a profile, wherever it comes from."""


What = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL|TRACE...",
        help=f"{MODEL_HELP} Or traces from anywhere, one per rank: a path to a file is a trace ('-' reads stdin), and so are a "
        "path to a folder with a slash in it and the id of a record.",
    ),
]
Memory = Annotated[
    bool, opt("--memory", group=HOW, help="Show what a step of each model under each recipe holds in memory instead.")
]
MemoryPlot = Annotated[
    Path | None, opt("--plot", group=OUTPUT, help="With --memory: write memory over a step as a PNG.")
]
ByShape = Annotated[
    bool, opt("--by-shape", group=OUTPUT, help="List operators separately by the shapes of their inputs.")
]
Imports = Annotated[
    list[str] | None,
    opt("--import", group=HOW, help="Read a file of rocprof, rocprofv2, rocprofv3, nsys or ncu; repeat for several."),
]
Pair = Annotated[tuple[str, str] | None, opt(group=HOW, metavar="A B", help="Compare two traces, folders or records.")]
Folder = Annotated[Path | None, opt(group=OUTPUT, help="A folder for the trace, as TensorBoard reads it.")]
Open = Annotated[bool, opt("--open", group=OUTPUT, help="Write an HTML page of the profile and open it.")]
Rows = Annotated[int, opt(group=OUTPUT, help="Rows of each table.")]
Sort = Annotated[
    str | None,
    opt(
        group=OUTPUT,
        metavar="[device|host|memory|calls]",
        help="Order of the operator table; memory also records allocations.",
    ),
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
    recipe: Recipes = None,
    given: Given,
    memory: Memory = False,
    by_shape: ByShape = False,
    import_: Imports = None,
    diff: Pair = None,
    out: Folder = None,
    open_: Open = False,
    rows: Rows = 12,
    sort: Sort = None,
    plot: MemoryPlot = None,
    report: Report = None,
    json: Json = False,
) -> int:
    """Show where a step's time and memory go, and what is in the way.

    \b
    Examples:
      redline profile resnet50 -r fp16+channels-last --batch 32
      redline profile rank0.json.gz rank1.json.gz --html page.html
      redline profile resnet50 --task train --memory -r baseline -r amp-bf16
    """
    from redline.api.report import report_records
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.cli.report import tell_report
    from redline.model.fields import MOST_ROWS, require_range
    from redline.show.export import json_document
    from redline.show.folder import check_folder
    from redline.show.profile import ProfileReport, sort_named
    from redline.show.terminal import make_console

    require_range("steps", given.get("steps"), 1, MOST_ROWS)
    require_range("rows", rows, 0, MOST_ROWS)
    files: dict[str, Path] = {name: given.pop(name) for name in FILES if name in given}
    order = sort_named(sort)
    words = what or []
    traces = [word for word in words if is_trace(word)]
    if memory:
        read = {"import": import_, "diff": diff, "trace": traces}
        flags = {"open": open_ or None, "by_shape": by_shape or None}
        _refuse_beside_memory(given | files | only_set(out=out, sort=sort, report=report, **read, **flags))
        return _show_memory(words, recipe, given, plot, json)
    if plot is not None:
        raise UsageError("--plot draws memory over a step: give --memory as well")
    capture = only_set(recipe=recipe, **given, folder=out)
    _refuse_mixtures(words, traces, import_, diff, capture, report)
    if import_ and by_shape:
        raise UsageError("--by-shape is of operators, and a table of kernels has none: leave it out")
    if diff is not None and (by_shape or open_ or files):
        raise UsageError("--diff prints a comparison; --by-shape, --open, --html and --csv are of one profile")
    if diff is not None:
        return _compare(diff, rows, json)
    if report is not None:
        check_folder(report)
    capture |= {"recipe": (recipe or ["baseline"])[0], "allocations": sort == "memory"}
    with LiveObserver(quiet=bool(traces or import_)) as observer, Workspace(observer=observer) as workspace:
        found, record = _profiled(words, traces, import_, capture, by_shape, workspace)
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


def is_trace(word: str) -> bool:
    """Whether a word names what was captured before, and not a model: a path, stdin, or the id of a record."""
    if word == "-" or word.endswith((".json", ".json.gz")) or re.fullmatch(r"[0-9a-f]{6,}", word):
        return True
    path = Path(word).expanduser()
    return (path.exists() and not path.is_dir()) or (path.is_dir() and os.sep in word)


def _refuse_beside_memory(given: Given) -> None:
    """Memory is looked at in two plain steps: nothing is traced."""
    of_traces = next((name for name in given if name not in ONE_STEP and name not in ISOLATED), None)
    if of_traces is not None:
        option = of_traces.replace("_", "-")
        raise UsageError(f"--memory runs steps of models and traces nothing: leave out {option}")


def _show_memory(models: Sequence[str], recipes: list[str] | None, given: Given, plot: Path | None, json: bool) -> int:
    from redline.api.memory import profile_memory
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.show.canvas import check_picture
    from redline.show.memory import draw_memory
    from redline.show.terminal import make_console

    if not models:
        raise UsageError("name a model, such as resnet50")
    if plot is not None:
        check_picture(plot)
    with LiveObserver() as observer, Workspace(observer=observer) as workspace:
        result = profile_memory(list(models), **given, **only_set(recipes=recipes), workspace=workspace)
        observer.stop()
    print_json(result.to_json()) if json else make_console().print(result.report())
    if plot is not None:
        draw_memory(result.rows, plot)
    return Exit.FAILED_ROW if result.failures else Exit.DONE


def _refuse_mixtures(
    what: Sequence[str],
    traces: Sequence[str],
    import_: Sequence[str] | None,
    diff: tuple[str, str] | None,
    capture: Given,
    report: Path | None,
) -> None:
    """Options that do not go together: a profile is captured, read, or compared with another."""
    if diff is not None and (what or import_):
        raise UsageError("--diff takes two profiles and nothing else")
    if traces and len(traces) < len(what):
        model = next(word for word in what if word not in traces)
        raise UsageError(f"{traces[0]} is a trace and {model} a model: profile one of them")
    reads = "--diff" if diff is not None else "--import" if import_ else traces[0] if traces else None
    if reads is None:
        if len(what) != 1:
            raise UsageError("name one model, or trace files, or --diff A B")
        if len(capture.get("recipe", ())) > 1:
            raise UsageError("a profile is of one recipe: 'redline profile --diff A B' compares two")
        return
    _refuse_settings(capture, reads)
    if report is not None:
        raise UsageError(f"--report needs records, and {reads} has none; --html writes a page of a profile")


def _compare(diff: tuple[str, str], rows: int, json: bool) -> int:
    from redline.api.profile import compare_profiles
    from redline.api.workspace import Workspace
    from redline.show.export import json_document
    from redline.show.profile_diff import DiffReport
    from redline.show.terminal import make_console

    with Workspace() as workspace:
        changed = compare_profiles(*diff, workspace=workspace)
    print_json(json_document("profile-diff", changed)) if json else make_console().print(DiffReport(changed, rows))
    return Exit.DONE


def _profiled(
    what: Sequence[str],
    traces: Sequence[str],
    import_: Sequence[str] | None,
    capture: Given,
    by_shape: bool,
    workspace: Workspace,
) -> tuple[Profile, RunRecord | None]:
    """The profile read from files or captured now; captured, with its record."""
    from redline.api.profile import import_profile, read_profile
    from redline.api.profile import profile as profile_model

    if import_:
        return import_profile(*import_, *what), None
    if traces:
        return read_profile(*traces, by_shape=by_shape, workspace=workspace), None
    result = profile_model(what[0], **capture, by_shape=by_shape, workspace=workspace)
    return result.profile, result.record


def _write_files(found: Profile, *, csv: Path | None = None, html: Path | None = None) -> list[str]:
    """Write what was asked for; returns the line that says where the page is."""
    from redline.api.profile import captured_lanes
    from redline.show.folder import write_text
    from redline.show.profile_files import kernel_csv, profile_page

    told = []
    if csv is not None:
        write_text(csv, kernel_csv(found))
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
        option = {"folder": "out"}.get(named, named).replace("_", "-")
        raise UsageError(f"--{option} is about capturing a model, and {mode} reads what was captured: leave it out")


def _stem(found: Profile) -> str:
    if found.capture is not None:
        return f"{found.capture.tool}-{found.capture.record_id}" if not found.ranks else found.capture.record_id
    return Path(found.sources[0]).name.partition(".")[0] or "trace"
