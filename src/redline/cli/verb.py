"""This module makes a command of a verb: the options, the help and the printing all come from the verb's own declarations."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from redline.model.errors import Exit, Interrupted, UsageError
from redline.model.fields import Frozen
from redline.model.settings import HOW, OUTPUT, WHAT, Declared, setting, settings_of
from redline.model.spec import DataSpec, TrainSpec
from redline.model.spec_table import SHARED
from redline.verbs import verb_of


class Output(Frozen):
    """This says how a result is shown, and what else is written. Every verb that returns a result has the last three; of the others it has
    those that its `also` names."""

    plot: Annotated[
        Path | None, setting("Also draw the figure into this file: PNG, SVG or PDF.", group=OUTPUT, shape="PATH")
    ] = None
    html: Annotated[Path | None, setting("Also write the result as one page.", group=OUTPUT, shape="FILE.html")] = None
    summary: Annotated[
        Path | None,
        setting(
            "Also write Markdown for a pull request; what $GITHUB_STEP_SUMMARY names is appended to.",
            group=OUTPUT,
            shape="FILE.md",
        ),
    ] = None
    save: Annotated[
        Path | None,
        setting(
            "Write the records to a file for 'compare', 'gate', 'report' and 'history import'.",
            group=OUTPUT,
            shape="FILE.redline",
        ),
    ] = None
    report: Annotated[
        Path | None,
        setting("Also write a report there: dashboard, Markdown, CSV.", group=OUTPUT, shape="DIR"),
    ] = None
    log: Annotated[
        str | None,
        setting("Also write the figures to this experiment tracker.", group=OUTPUT, shape="[wandb|mlflow|tensorboard]"),
    ] = None
    json: Annotated[bool, setting("Print one JSON document on stdout and nothing else there.", group=OUTPUT)] = False
    verbose: Annotated[bool, setting("Show every column, table and note.", short="-v", group=OUTPUT)] = False
    quiet: Annotated[bool, setting("Show the answer alone.", short="-q", group=OUTPUT)] = False


ALWAYS = ("json", "verbose", "quiet")
ONE_VALUE = ("batch_axis", "items", "door", "rendezvous")
"""Settings that have a single value in every grid."""
TASKS = {
    "infer": "inference",
    "train": "a training step",
    "step": "a function of yours timed as it is (file.py:step)",
    "generate": "text generation",
}


def command_of(name: str) -> Callable[..., int]:
    """Returns the command of a verb, as typer reads it."""
    function = verb_of(name)
    always = () if inspect.signature(function).return_annotation == "int" else ALWAYS
    outputs = {
        key: declared for key, declared in settings_of(Output).items() if key in always or key in function.verb.also
    }

    def command(**words: Any) -> int:
        given = {key: value for key, value in words.items() if value is not None and value != []}
        output = Output(**{key: given.pop(key) for key in outputs if key in given})
        return run_verb(function, given, output)

    described: Any = command
    described.__name__ = name
    described.__signature__ = inspect.Signature(
        [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for key, default, annotation in _parameters(function, outputs)
        ]
    )
    examples = "\n".join(f"  {line}" for line in function.verb.examples)
    described.__doc__ = f"{inspect.getdoc(function)}\n\n\b\nExamples:\n{examples}\n"
    return command


def _parameters(function: Any, outputs: dict[str, Declared]) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, default and annotation of each word of the command. What was not given is None."""
    from redline.verbs.verb import options_of

    given, known = inspect.signature(function).parameters, function.verb
    for name, declared in {**options_of(function), **outputs}.items():
        if declared.setting.is_argument:
            is_required = given[name].default is inspect.Parameter.empty
            kind = list[str] if declared.takes_several else str
            annotation = typer.Argument(help=declared.setting.doc, metavar=declared.setting.shape or name.upper())
            yield name, inspect.Parameter.empty if is_required else None, Annotated[kind | None, annotation]
        else:
            shown = _of_tasks(declared, known.tasks) if name == "task" and known.tasks else declared
            yield name, None, option_of(shown, is_axis=name in known.grid and name not in ONE_VALUE)


def option_of(declared: Declared, *, is_axis: bool = False) -> Any:
    """Returns the annotation that typer reads, from a setting's one declaration.

    `is_axis`: it takes several values: repeated, joined by commas, or for numbers a range.
    """
    known, doc, default = declared.setting, declared.setting.doc, declared.default
    names = [declared.option, *([known.short] if known.short else [])]
    shape = known.shape or (f"[{'|'.join(declared.choices)}]" if declared.choices else None)
    kind: Any = declared.kind if declared.kind in (bool, int, float, Path, tuple[str, str]) else str
    if declared.is_flag:
        names = [f"{declared.option}/--no-{declared.option[2:]}"] if default else names
    else:
        doc += "" if default in (None, False, (), [], {}) or "Default" in doc else f" Default: {default}."
        shape = "N[,N…|N..M]" if is_axis and kind is int else shape
        kind = list[str] if is_axis or (declared.takes_several and kind is str) else kind
    return Annotated[kind | None, typer.Option(*names, rich_help_panel=known.group, metavar=shape, help=doc)]


def _of_tasks(declared: Declared, tasks: tuple[str, ...]) -> Declared:
    """Returns the setting `task` for a command that can do only these."""
    *others, last = (TASKS[task] for task in tasks)
    doc = f"{', '.join(others)} or {last}."
    known = replace(declared.setting, doc=doc[0].upper() + doc[1:])
    return replace(declared, kind=Literal[tasks], default=tasks[0], setting=known)


def run_verb(function: Any, asked: dict[str, Any], output: Output) -> int:
    """Calls the verb in a workspace with a live display, and prints what it returns. The value is the exit code.

    A verb without a parameter `workspace` is called as it is. One that returns a number has printed for itself. After Ctrl-C the rows
    that were finished are printed.
    """
    from redline.cli.progress import LiveObserver
    from redline.show.canvas import check_picture
    from redline.show.folder import check_file, check_folder
    from redline.show.result import Result, terminal
    from redline.show.terminal import make_console
    from redline.show.trackers import check_tracker
    from redline.verbs.workspace import Workspace

    def show(result: Result) -> None:
        if output.json:
            sys.stdout.write(result.to_json())
        else:
            make_console().print(terminal(result, verbose=output.verbose, quiet=output.quiet))

    if output.log is not None:
        check_tracker(output.log)
    files = ((path, check_file) for path in (output.html, output.summary, output.save))
    for path, check in ((output.plot, check_picture), *files, (output.report, check_folder)):
        if path is not None:
            check(path)
    if "workspace" not in inspect.signature(function).parameters:
        result = function(**asked)
        if isinstance(result, Result):
            show(result)
        return _code_of(result)
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
            _write(result, output, workspace)
    return _code_of(result)


def _code_of(result: Any) -> int:
    return int(getattr(result, "exit_code", result) or Exit.DONE)


def _write(result: Any, output: Output, workspace: Any) -> None:
    """Writes the files that were asked for beside what is printed."""
    from redline.show.folder import write_text
    from redline.show.page import written_page
    from redline.show.result import markdown
    from redline.show.trackers import log_result

    asked = [option for option, value in (("--save", output.save), ("--report", output.report)) if value is not None]
    if asked and not result.record_ids:
        raise UsageError(f"nothing was measured, so there are no records: leave out {' and '.join(asked)}")
    if output.save is not None:
        try:
            with output.save.open("wb") as file:
                workspace.history.export_archive(file, result.record_ids)
        except OSError as error:
            raise UsageError(f"cannot write {output.save}: {error.strerror}") from None
        tell(f"saved: {output.save}; 'redline compare {output.save} OTHER' compares it")
    if output.report is not None:
        _report(output.report, result, workspace)
    if output.log is not None:
        tell(f"logged: {log_result(result, output.log)}")
    if output.plot is not None:
        result.plot(output.plot)
    if output.html is not None:
        write_text(output.html, written_page(result))
    if output.summary is not None:
        # GitHub shows all that the steps of a job have written to this file, one after the other.
        appends = str(output.summary) == os.environ.get("GITHUB_STEP_SUMMARY")
        write_text(output.summary, markdown(result), append=appends)


def _report(folder: Path, result: Any, workspace: Any) -> None:
    """Write the report of the records, and say on stderr where it is; stdout belongs to the measurement."""
    from redline.verbs.report import report_records

    records = workspace.history.load_many(result.record_ids)
    tunes = [result.summary] if hasattr(result, "summary") else []
    files = report_records(list(records.values()), folder, tunes=tunes, workspace=workspace)
    for line in files.notes:
        tell(str(line))
    tell(f"report: {files.dashboard}, with report.md, pictures, results.csv and results.json beside it")


def tell(words: str) -> None:
    """Writes a line to stderr, which leaves stdout to the result."""
    print(words, file=sys.stderr)  # noqa: T201  (the CLI is the printer)


# Help

KINDS = {"str": "TEXT", "int": "NUMBER", "float": "NUMBER", "path": "PATH"}
"""The help shows these words for values of options that have no name of their own."""
_KINDS = re.compile(r"<(?:list\[)?(str|int|float|path)\]?>")
_UNBROKEN = "\u2011"
"""A hyphen at which no line is broken."""
SEARCHED_FIRST = {"batch", "task", "device"}
"""Nearly every call names these settings: they stand among the command's own options."""
COMMON = (SHARED.keys() - settings_of(DataSpec).keys() - settings_of(TrainSpec).keys() - SEARCHED_FIRST) | {
    "json", "report", "save", "plot", "verbose", "quiet", "price", "trust", "address", "help",
}  # fmt: skip
"""Options that mean the same in every command that has them."""
CLOSING = "Shared options"


class _WholeWords:
    """Help whose lines break at spaces only, so that names such as one-cycle can be copied."""

    def get_help(self, ctx: Any) -> str:
        shown: str = super().get_help(ctx)  # type: ignore[misc]
        return shown.replace(_UNBROKEN, "-")

    def format_help(self, ctx: Any, formatter: Any) -> None:
        write_text, write_dl = formatter.write_text, formatter.write_dl
        formatter.write_text = lambda text: write_text(text.replace("-", _UNBROKEN))
        formatter.write_dl = lambda rows: write_dl([(name, text.replace("-", _UNBROKEN)) for name, text in rows])
        super().format_help(ctx, formatter)  # type: ignore[misc]


class Command(_WholeWords, TyperCommand):
    """Prints the command's own options in groups, and in one closing group those that it shares with others."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None:
                row = (_KINDS.sub(lambda found: KINDS[found[1]], row[0]), row[1])
                own = getattr(parameter, "rich_help_panel", None) or "Options"
                is_argument = parameter.param_type_name == "argument"
                name = "Arguments" if is_argument else CLOSING if parameter.name in COMMON else own
                groups.setdefault(name, []).append(row)
        siblings = ctx.parent.command.commands if ctx.parent is not None else {}
        under = [command for name, command in siblings.items() if name.startswith(f"{ctx.info_name} ")]
        closing = groups.pop(CLOSING, [])
        first = {name: groups.pop(name) for name in ("Arguments", WHAT, HOW) if name in groups}
        commands = [(f"redline {command.name}", _first_line(command)) for command in under]
        _write_groups(formatter, {**first, **groups, CLOSING: closing, "Commands": commands})


class CommandGroup(_WholeWords, TyperGroup):
    """Lists its commands in groups, each with the first line of its help. A command may have two words."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        both = " ".join(args[:2])
        if both in self.commands:
            return both, self.commands[both], args[2:]
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Commands only. The group's own two options are in the epilog, so that all fits on one screen."""
        shown = [command for command in self.commands.values() if not command.hidden]
        width = max(len(str(command.name)) for command in shown)
        groups: dict[str, list[tuple[str, str]]] = {}
        for command in shown:
            row = (str(command.name).ljust(width), _first_line(command))
            groups.setdefault(str(getattr(command, "rich_help_panel", "")), []).append(row)
        _write_groups(formatter, groups)


def _write_groups(formatter: Any, groups: dict[str, list[tuple[str, str]]]) -> None:
    for name, rows in groups.items():
        if rows:
            with formatter.section(name):
                formatter.write_dl(rows)


def _first_line(command: Any) -> str:
    return str(command.help or "").partition("\n")[0]
