"""`redline`: the app, its commands in the groups of `--help`, and what a mistake prints."""

from __future__ import annotations

import copy
import errno
import functools
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ParamSpec

import typer

from redline.cli.verb import Command, CommandGroup, command_of
from redline.model.errors import BenchError, DoorError, Exit, Interrupted, RedlineError, UsageError
from redline.model.units import printable
from redline.verbs import COMMANDS, GROUPS, NAMES

RENAMED: dict[str, str] = {
    "sweep": "run",
    "race": "run --decide",
    "ladder": "study ladder",
    "show": "history show",
    "tag": "history tag",
    "export": "history export",
    "import": "history import",
    "delete": "history delete",
    "prune": "history prune",
    "loader": "train --find-workers",
    "bisect": "gate --bisect",
    "checklist": "workshop --checklist",
    "memory": "profile --memory",
    "ceilings": "roofline",
    "ops": "roofline --ops",
}
"""Commands that were removed, and what to type instead."""

app = typer.Typer(
    name="redline",
    cls=CommandGroup,
    help="How fast is your PyTorch model, what is in the way, and what to switch on.",
    epilog="'redline COMMAND -h' shows the options of a command and examples.",
    subcommand_metavar="COMMAND",
    options_metavar="",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # rich's help costs as much time as everything else together
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)

P = ParamSpec("P")

UNNAMEABLE = (errno.ENAMETOOLONG, errno.ELOOP)
"""These errors mean that no file can be called so, wherever it is asked for."""
LONGEST_COMPLAINT = 2000
"""A complaint has at most so many characters, because a value that is quoted may be as long as a command line."""
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
"""Writing to stdout raises one of these when it takes no more."""


def one_line_errors(command: Callable[P, int | None]) -> Callable[P, None]:
    """A mistake is one line and exit code 2; a broken bench one line and 5; a bug keeps its traceback.

    What the command returns is its exit code.
    """

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except KeyboardInterrupt as error:
            kept = (
                "; what was measured is kept: 'redline history show' lists it" if isinstance(error, Interrupted) else ""
            )
            _complain(f"interrupted{kept}")
            raise typer.Exit(Exit.INTERRUPTED) from None
        except RedlineError as error:
            is_broken = isinstance(error, BenchError | DoorError)
            _complain(" ".join(str(error).splitlines()))
            if isinstance(error, BenchError) and error.kind == "crash" and error.traceback:
                sys.stderr.write(f"{error.traceback.rstrip()}\n")  # our bug, or a worker that died: print everything
            raise typer.Exit(Exit.FAILED_ROW if is_broken else Exit.USAGE) from None
        raise typer.Exit(code or 0)

    return guarded


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from redline import __version__

        typer.echo(__version__)
        raise typer.Exit


CONTEXTS: dict[str, dict[str, Any]] = {
    # The words after the first are the script's own: in `redline watch -m package.train` the module is watched.
    "watch": {"allow_interspersed_args": False, "ignore_unknown_options": True},
    # Its flags are read by the program behind it, `--help` among them.
    "micro": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
}
"""Commands that pass their words on to a program read them so."""


def micro(context: typer.Context) -> int:
    """Run micro_benchmarking_pytorch.py with its own flags.

    'redline micro --help' lists them.

    \b
    Examples:
      redline micro --network resnet50 --batch-size 64 --iterations 20
      redline micro --network resnet50 --fp16 1 --flops-prof-step 10
    """
    from redline.compat.micro import main as script

    return script(context.args)


def command_named(name: str) -> Callable[..., int | None]:
    """Returns the command as typer reads it: that of a verb is made from its declarations."""
    if name == "micro":
        return micro
    command: Callable[..., int | None] = command_of(name)
    return command


def _listed(name: str) -> Callable[..., int | None]:
    """Returns what stands for a command where commands are only listed: it has a name and a line of help."""

    def command() -> None:
        raise AssertionError(f"{name} was listed and not loaded")

    command.__doc__ = COMMANDS[name]
    return command


def filled(*names: str) -> typer.Typer:
    """Returns an app with these commands and those below them, loaded; without names an app that lists every command."""
    made = copy.copy(app)
    made.registered_commands = []
    for group, commands in GROUPS.items():
        for name in commands:
            if names and name.split()[0] not in names:
                continue
            command = command_named(name) if names else _listed(name)
            register = made.command(
                name,
                cls=Command,
                rich_help_panel=group,
                context_settings=CONTEXTS.get(name),
                options_metavar="[OPTIONS]",
                hidden=" " in name,
            )
            register(one_line_errors(command))
    return made


def _complain(message: str) -> None:
    """Prints what is wrong. If a name that the message quotes has characters that a terminal would obey, they are shown as question
    marks."""
    if len(message) > LONGEST_COMPLAINT:
        message = f"{message[: LONGEST_COMPLAINT * 2 // 3]} … {message[-LONGEST_COMPLAINT // 3 :]}"
    shown = "\n".join(map(printable, message.splitlines()))
    print(f"redline: {shown}", file=sys.stderr)  # noqa: T201  (the CLI is the printer)


# typer carries its own copy of click or uses the installed one, by its version; the ancestor is the same either way.
ArgumentMistake: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def app_for(words: Sequence[str]) -> typer.Typer:
    """Returns the app with only the command that `words` begin with: typer builds every command that is there, for 45 ms."""
    first = words[0] if words else ""
    if first in RENAMED:

        def removed() -> None:
            raise UsageError(f"{first!r} is now {RENAMED[first]!r}")

        narrow = copy.copy(app)
        narrow.registered_commands = []
        narrow.command(first, context_settings=CONTEXTS["micro"])(one_line_errors(removed))
        return narrow
    group = first.partition(" ")[0]  # 'history delete' may also come as one word
    return filled(group) if group in NAMES else filled()


def main() -> None:
    _print_what_can_be()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may be ignored, as in the background
        signal.signal(signal.SIGINT, Interrupts())
    code = _run()
    sys.stderr.flush()
    # Taking the interpreter down in good order keeps the prompt away for half a second. All that was opened is closed by
    # now, and the supervisor ends when it sees this process go.
    os._exit(code)


def _run() -> int:
    """Runs the command and returns its exit code."""
    for word in sys.argv[1:]:
        if not word.isascii() and any("\ud800" <= character <= "\udfff" for character in word):
            _complain(f"{word!r} is not Unicode in this locale: set LC_ALL=C.UTF-8, or rename it")
            return Exit.USAGE
    try:
        code = app_for(sys.argv[1:])(standalone_mode=False)
        sys.stdout.flush()
    except OSError as error:
        if error.errno in UNNAMEABLE and error.filename is not None:
            _complain(f"{error.filename!r}: {error.strerror}")
            return Exit.USAGE
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        if error.errno != errno.EPIPE:  # whoever closes a pipe has read enough
            _complain(f"cannot write to stdout: {error.strerror}")
        return Exit.SLOWER
    except ArgumentMistake as error:
        told = error.format_message() if hasattr(error, "format_message") else str(error)
        if "NoArgs" in type(error).__name__:
            sys.stderr.write(f"{told}\n")  # the help itself
        else:
            _complain(" ".join(told.split()) + " ('--help' lists what there is)")
        return Exit.USAGE
    return code if isinstance(code, int) else 0


class Interrupts:
    """The first Ctrl-C ends the measurement cleanly; a second one, while that still runs, ends the process at once.

    Workers end with it: those who watch over them see it go.
    """

    SAME_S = 0.5
    """Signals so close together are one: a terminal and a wrapper may both pass on what was pressed once."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def __call__(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            raise KeyboardInterrupt
        if now - self._first_at > self.SAME_S:
            show_cursor = "\x1b[?25h" if os.isatty(2) else ""
            os.write(2, f"{show_cursor}\nredline: interrupted again; exiting now\n".encode())
            os._exit(Exit.INTERRUPTED)


def _print_what_can_be() -> None:
    """Makes a character that the terminal's encoding lacks a question mark, rather than the end of a long measurement.

    What is printed to a stream that the person has closed goes nowhere.
    """
    if None in (sys.stdin, sys.stdout, sys.stderr):
        from redline.system.processes import keep_standard_descriptors

        keep_standard_descriptors()
        sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  (for as long as the process lives)
        sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
