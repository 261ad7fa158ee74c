"""From a verb to its command: the options, the help and the printing all come from the verb's own declarations."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from redline.cli.options import OUTPUT, Exit, opt, option_of, print_json, several, task_option, tell
from redline.verbs import verb_of

OUTPUTS: dict[str, Any] = {
    "plot": Annotated[
        Path | None, opt("--plot", group=OUTPUT, help="Also draw the figure into this file: PNG, SVG or PDF.")
    ],
    "html": Annotated[
        Path | None, opt("--html", group=OUTPUT, metavar="FILE.html", help="Also write the result as one page.")
    ],
    "summary": Annotated[
        Path | None,
        opt(
            "--summary",
            group=OUTPUT,
            metavar="FILE.md",
            help="Also write Markdown for a pull request; what $GITHUB_STEP_SUMMARY names is appended to.",
        ),
    ],
    "save": Annotated[
        Path | None,
        opt(
            "--save",
            group=OUTPUT,
            metavar="FILE.redline",
            help="Write the records to a file for 'compare', 'gate', 'report' and 'history import'.",
        ),
    ],
    "report": Annotated[
        Path | None,
        opt("--report", group=OUTPUT, metavar="DIR", help="Also write a report there: dashboard, Markdown, CSV."),
    ],
    "log": Annotated[
        str | None,
        opt(
            "--log",
            group=OUTPUT,
            metavar="[wandb|mlflow|tensorboard]",
            help="Also write the figures to this experiment tracker.",
        ),
    ],
    "json": Annotated[
        bool, opt("--json", group=OUTPUT, help="Print one JSON document on stdout and nothing else there.")
    ],
    "verbose": Annotated[bool, opt("--verbose", "-v", group=OUTPUT, help="Show every column, table and note.")],
    "quiet": Annotated[bool, opt("--quiet", "-q", group=OUTPUT, help="Show the answer alone.")],
}
"""How a result is shown. Every verb that returns a result has the last three; it has the others that its `also` names."""
ALWAYS = ("json", "verbose", "quiet")


def command_of(name: str) -> Callable[..., int]:
    """The command of a verb, as typer reads it."""
    function = verb_of(name)
    always = () if inspect.signature(function).return_annotation == "int" else ALWAYS
    outputs = [key for key in OUTPUTS if key in always or key in function.verb.also]

    def command(**words: Any) -> int:
        printed = {key: words.pop(key) for key in outputs}
        asked = {key: value for key, value in words.items() if value is not None and value != []}
        return run_verb(function, asked, **printed)

    parameters = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for key, default, annotation in _parameters(function, outputs)
    ]
    described: Any = command
    described.__name__ = name
    described.__signature__ = inspect.Signature(parameters)
    examples = "\n".join(f"  {line}" for line in function.verb.examples)
    described.__doc__ = f"{inspect.getdoc(function)}\n\n\b\nExamples:\n{examples}\n"
    return command


def _parameters(function: Any, outputs: list[str]) -> Iterator[tuple[str, Any, Any]]:
    """Name, default and annotation of each word of the command. What was not given is None."""
    from redline.verbs.verb import options_of

    given = inspect.signature(function).parameters
    for name, declared in options_of(function).items():
        known = declared.setting
        if known.is_argument:
            is_required = given[name].default is inspect.Parameter.empty
            kind = list[str] if declared.takes_several else str
            annotation = typer.Argument(help=known.doc, metavar=known.shape or name.upper())
            yield name, inspect.Parameter.empty if is_required else None, Annotated[kind | None, annotation]
        else:
            option = (
                task_option(*function.verb.tasks) if name == "task" and function.verb.tasks else option_of(declared)
            )
            yield name, None, several({name: option})[name] if name in function.verb.grid else option
    for name in outputs:
        kind, option = get_args(OUTPUTS[name])
        yield name, False if kind is bool else None, Annotated[kind, copy.copy(option)]


def run_verb(
    function: Any,
    asked: dict[str, Any],
    *,
    plot: Path | None = None,
    html: Path | None = None,
    summary: Path | None = None,
    save: Path | None = None,
    report: Path | None = None,
    log: str | None = None,
    json: bool = False,
    verbose: bool = False,
    quiet: bool = False,
) -> int:
    """Call the verb in a workspace with a live display, and print what it returns. The value is the exit code.

    A verb without a parameter `workspace` is called as it is. One that returns a number has printed for itself. After Ctrl-C the rows
    that were finished are printed.
    """
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.model.errors import Interrupted
    from redline.show.canvas import check_picture
    from redline.show.folder import check_file, check_folder, write_text
    from redline.show.result import Result, markdown, terminal
    from redline.show.terminal import make_console
    from redline.show.trackers import check_tracker, log_result

    def show(result: Result) -> None:
        if json:
            print_json(result.to_json())
        else:
            make_console().print(terminal(result, verbose=verbose, quiet=quiet))

    if log is not None:
        check_tracker(log)
    files = ((path, check_file) for path in (html, summary, save))
    for path, check in ((plot, check_picture), *files, (report, check_folder)):
        if path is not None:
            check(path)
    if "workspace" not in inspect.signature(function).parameters:
        result = function(**asked)
        if isinstance(result, Result):
            show(result)
            return Exit(result.exit_code)
        return int(result or Exit.DONE)
    observer = LiveObserver()
    with observer, Workspace(observer=observer) as workspace:
        try:
            result = function(**asked, workspace=workspace)
        except Interrupted as interrupted:
            if not isinstance(interrupted.result, Result):
                raise
            observer.stop()
            show(interrupted.result)
            tell("redline: interrupted; finished rows are kept")
            return Exit.INTERRUPTED
        observer.stop()
        if isinstance(result, Result):
            show(result)
        if save is not None:
            _save(save, result, workspace)
        if report is not None:
            _report(report, result, workspace)
        if log is not None:
            tell(f"logged: {log_result(result, log)}")
        if plot is not None:
            result.plot(plot)
        if html is not None:
            from redline.show.page import written_page

            write_text(html, written_page(result))
        if summary is not None:
            # GitHub shows all that the steps of a job have written to this file, one after the other.
            write_text(summary, markdown(result), append=str(summary) == os.environ.get("GITHUB_STEP_SUMMARY"))
    return Exit(result.exit_code) if isinstance(result, Result) else int(result or Exit.DONE)


def _save(path: Path, result: Any, workspace: Any) -> None:
    """Write the result's records as an archive of the history."""
    from redline.model.errors import UsageError

    if not result.record_ids:
        raise UsageError(f"nothing was measured, so there is no record to save in {path}")
    try:
        with path.open("wb") as file:
            workspace.history.export_archive(file, result.record_ids)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    tell(f"saved: {path}; 'redline compare {path} OTHER' compares it")


def _report(folder: Path, result: Any, workspace: Any) -> None:
    from redline.model.errors import UsageError
    from redline.verbs.report import report_records

    if not result.record_ids:
        raise UsageError("nothing was measured, so there is nothing to report: leave out --report")
    records = workspace.history.load_many(result.record_ids)
    tunes = [result.summary] if hasattr(result, "summary") else []
    tell_report(report_records(list(records.values()), folder, tunes=tunes, workspace=workspace))


def tell_report(files: Any) -> None:
    """Say on stderr where a report is; stdout belongs to the measurement."""
    for line in (
        *files.notes,
        f"report: {files.dashboard}, with report.md, pictures, results.csv and results.json beside it",
    ):
        tell(str(line))
