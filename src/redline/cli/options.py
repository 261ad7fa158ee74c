"""Options that several commands share, written once; help in groups with examples; and printing JSON."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from redline.model.errors import Exit as Exit
from redline.model.settings import HOW as HOW
from redline.model.settings import OUTPUT as OUTPUT
from redline.model.settings import WAY as WAY
from redline.model.settings import WHAT as WHAT
from redline.model.settings import WHICH as WHICH
from redline.model.settings import Declared, settings_of
from redline.model.spec_table import SHARED
from redline.model.training import DataSpec, TrainSpec

if TYPE_CHECKING:  # the report is imported by the commands that print one
    from redline.show.export import JsonDocument

T = TypeVar("T")


def opt(*names: str, group: str = "", **settings: Any) -> Any:
    """An option that the help shows under `group`."""
    return typer.Option(*names, rich_help_panel=group or None, **settings)


def option_of(declared: Declared) -> Any:
    """The annotation that typer reads, from a setting's one declaration. What was not given is None."""
    known = declared.setting
    names = [declared.option, *([known.short] if known.short else [])]
    told, default = known.doc, declared.default
    if declared.is_flag:
        names = [f"{declared.option}/--no-{declared.option[2:]}"] if default else names
        kind: Any = bool
    else:
        kind = (
            declared.kind
            if declared.kind in (int, float, Path, tuple[str, str])
            else list[str]
            if declared.takes_several
            else str
        )
        is_told = default in (None, False, (), [], {}) or "Default" in told
        told += "" if is_told else f" Default: {default}."
    shape = known.shape or (f"[{'|'.join(declared.choices)}]" if declared.choices else None)
    return Annotated[kind | None, opt(*names, group=known.group, metavar=shape, help=told)]


TASKS = {
    "infer": "inference",
    "train": "a training step",
    "step": "a function of yours timed as it is (file.py:step)",
    "generate": "text generation",
}


def task_option(*tasks: str) -> Any:
    """The option `--task` of a command that can do these."""
    *others, last = (TASKS[task] for task in tasks)
    told = f"{', '.join(others)} or {last}. Default: {tasks[0]}."
    return Annotated[str | None, opt(group=WHAT, metavar=f"[{'|'.join(tasks)}]", help=told[0].upper() + told[1:])]


def several(options: dict[str, Any]) -> dict[str, Any]:
    """The same options where each takes several values: repeated, joined by commas, or for numbers a range."""
    return {name: _listed(option) if name not in ONE_VALUE else option for name, option in options.items()}


ONE_VALUE = ("batch_axis", "items", "door", "rendezvous")
"""Options that have a single value in every grid."""


def _listed(option: Any) -> Any:
    kind, info = get_args(option)
    if kind == bool | None:
        return option
    info = copy.copy(info)
    if kind == int | None:
        info.metavar = "N[,N…|N..M]"
    return Annotated[list[str] | None, info]


def print_json(document: JsonDocument) -> None:
    """The one document of `--json`."""
    sys.stdout.write(document)


def tell(words: str) -> None:
    """A line on stderr, which leaves stdout to the result."""
    print(words, file=sys.stderr)  # noqa: T201  (the CLI is the printer)


KINDS = {"str": "TEXT", "int": "NUMBER", "float": "NUMBER", "path": "PATH"}
"""How help calls the values of options that have no name of their own."""
_KINDS = re.compile(r"<(?:list\[)?(str|int|float|path)\]?>")


_UNBROKEN = "\u2011"
"""A hyphen at which no line is broken."""


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


SEARCHED_FIRST = {"batch", "task", "device"}
"""Settings that nearly every call names: they stand among the command's own options."""
COMMON = (SHARED.keys() - settings_of(DataSpec).keys() - settings_of(TrainSpec).keys() - SEARCHED_FIRST) | {
    "json", "report", "save", "plot", "verbose", "quiet", "price", "trust", "cluster", "address", "help",
}  # fmt: skip
"""Options that mean the same in every command that has them."""
CLOSING = "Shared options"


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
        order = ["Arguments", WHAT, HOW, *(name for name in groups if name != CLOSING), CLOSING]
        for name in dict.fromkeys(order):
            if name in groups:
                with formatter.section(name):
                    formatter.write_dl(groups[name])
        siblings = ctx.parent.command.commands if ctx.parent is not None else {}
        under = [command for name, command in siblings.items() if name.startswith(f"{ctx.info_name} ")]
        if under:
            with formatter.section("Commands"):
                formatter.write_dl([(f"redline {command.name}", _first_sentence(command)) for command in under])


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
            row = (str(command.name).ljust(width), _first_sentence(command))
            groups.setdefault(str(getattr(command, "rich_help_panel", "")), []).append(row)
        for panel, rows in groups.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


def _first_sentence(command: Any) -> str:
    return str(command.help or "").partition("\n")[0]
