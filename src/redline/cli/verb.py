"""From a verb to its command: the options, the help and the printing all come from the verb's own declarations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from redline.cli.options import OUTPUT, Exit, opt, option_of, print_json, task_option

VERBS: dict[str, str] = {
    "batch": "Find the largest batch that fits, and the knee.",
}
"""The verbs in `redline/verbs/` and what `redline --help` says of each, so that it need not load them."""

PRINTED: dict[str, Any] = {
    "plot": Annotated[
        Path | None, opt("--plot", group=OUTPUT, help="Also draw the figure into this file: PNG, SVG or PDF.")
    ],
    "json": Annotated[
        bool, opt("--json", group=OUTPUT, help="Print one JSON document on stdout and nothing else there.")
    ],
    "verbose": Annotated[bool, opt("--verbose", "-v", group=OUTPUT, help="Show every column, table and note.")],
    "quiet": Annotated[bool, opt("--quiet", "-q", group=OUTPUT, help="Show the answer alone.")],
}
"""How the result is shown: the same for every verb."""

OBSERVERS = {"batch": "LiveBatches"}
"""The live display of verbs that have one of their own."""


def command_of(name: str) -> Callable[..., int]:
    """The command of a verb, as typer reads it."""
    from redline.verbs.verb import options_of

    function = getattr(import_module(f"redline.verbs.{name}"), name)
    options = options_of(function)

    def command(**words: Any) -> int:
        printed = {key: words.pop(key) for key in PRINTED}
        asked = {key: value for key, value in words.items() if value is not None and value != []}
        return run_verb(name, lambda workspace: function(**asked, workspace=workspace), **printed)

    parameters = []
    for key, declared in options.items():
        annotation = option_of(declared)
        if declared.setting.is_argument:
            annotation = Annotated[str, typer.Argument(help=declared.setting.doc)]
        elif key == "task" and function.verb.tasks:
            annotation = task_option(*function.verb.tasks)
        default: Any = inspect.Parameter.empty if declared.setting.is_argument else None
        parameters.append(
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    for key, annotation in PRINTED.items():
        default = None if key == "plot" else False
        parameters.append(
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    described: Any = command
    described.__name__ = name
    described.__signature__ = inspect.Signature(parameters)
    examples = "\n".join(f"  {line}" for line in function.verb.examples)
    described.__doc__ = f"{inspect.getdoc(function)}\n\n\b\nExamples:\n{examples}\n"
    return command


def run_verb(
    name: str, call: Callable[[Any], Any], *, plot: Path | None, json: bool, verbose: bool, quiet: bool
) -> int:
    """Call it in a workspace with a live display, and print what it found."""
    from redline.api.workspace import Workspace
    from redline.cli import progress
    from redline.report.canvas import check_picture
    from redline.report.terminal import make_console
    from redline.show.result import terminal

    if plot is not None:
        check_picture(plot)
    observer = getattr(progress, OBSERVERS.get(name, "LiveObserver"))()
    with observer, Workspace(observer=observer) as workspace:
        result = call(workspace)
        observer.stop()
    if json:
        print_json(result.to_json())
    else:
        make_console().print(terminal(result, verbose=verbose, quiet=quiet))
    if plot is not None:
        result.plot(plot)
    return Exit(result.exit_code)
