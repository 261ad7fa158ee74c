"""How a command takes a group of options: what it is called with, and what typer reads."""

from __future__ import annotations

import inspect
import re
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from redline.cli.main import filled
from redline.cli.options import MEASURED, WORKLOAD, Given, Json, Options, only_set, takes
from redline.verbs import NAMES

WHOLE = filled(*NAMES)


def called_with(options: Options, *words: str) -> dict[str, Any]:
    """What a command with these options gets when it is typed with these words."""
    seen: dict[str, Any] = {}
    app = typer.Typer()

    @app.command()
    @takes(options)
    def command(*, first: Annotated[int, typer.Option()] = 1, given: Given, json: Json = False) -> None:
        seen.update(first=first, given=given, json=json)

    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen


def test_nothing_set_is_an_empty_table() -> None:
    assert called_with(WORKLOAD | MEASURED) == {"first": 1, "given": {}, "json": False}


def test_what_was_set_is_carried_beside_the_commands_own_options() -> None:
    seen = called_with(WORKLOAD | MEASURED, "-b", "8", "--seed", "0", "--tail", "--first", "2", "--json")
    assert seen == {"first": 2, "given": {"batch": 8, "seed": 0, "tail": True}, "json": True}


def test_the_door_is_a_table_of_the_launch() -> None:
    assert called_with(MEASURED, "--door", "spawn")["given"] == {"launch": {"door": "spawn"}}


def test_a_command_may_read_an_option_in_its_own_way() -> None:
    batches: Options = {"batch": Annotated[list[str] | None, typer.Option("--batch", "-b")]}
    assert called_with(WORKLOAD | batches, "-b", "1..8", "-b", "64")["given"] == {"batch": ["1..8", "64"]}
    assert called_with(WORKLOAD | batches)["given"] == {}


def test_a_group_stands_where_the_command_wrote_given() -> None:
    @takes({"batch": WORKLOAD["batch"], "seed": WORKLOAD["seed"]})
    def command(*, first: int = 1, given: Given, json: Json = False) -> None: ...

    assert list(inspect.signature(command).parameters) == ["first", "batch", "seed", "json"]


@pytest.mark.parametrize(("value", "kept"), [(None, False), ([], False), (False, True), (0, True), ("", True)])
def test_zero_false_and_an_empty_text_were_set_by_someone(value: Any, kept: bool) -> None:
    assert only_set(option=value) == ({"option": value} if kept else {})


@pytest.mark.parametrize("command", sorted(set(typer.main.get_command(WHOLE).commands) - {"micro"}))  # type: ignore[attr-defined]
def test_help_has_examples_and_choices_and_cuts_nothing(command: str) -> None:
    shown = CliRunner().invoke(WHOLE, [*command.split(), "--help"], env={"COLUMNS": "80"}).stdout
    examples = shown.partition("Examples:")[2].partition("\n\n")[0].strip().splitlines()
    assert 1 <= len(examples) <= 3
    assert all(line.strip().startswith(f"redline {command}") for line in examples)
    assert not re.search(r"[a-z]…|\.\.\.\s*$", shown.partition("\n")[2], re.M), "nothing is cut"
    assert not re.search(r"<(list|str|int|float|path)", shown), "no type names of Python"
    assert not re.search(r"\w-$", shown, re.M), "a name such as one-cycle can be copied whole"
    headings = re.findall(r"^(\w[\w ]+):$", shown.partition("Examples:")[2], re.M)
    own, closing = shown.split("Shared options:\n")
    assert headings.count("Shared options") == 1
    assert re.search(r"^  -h, --help", closing, re.M)
    assert not re.search(r"^  (--json|--seed|--door)\b", own, re.M), "what commands share closes the help"
    for option in ("--effort", "--task", "--door", "--optimizer"):
        rows = [line for line in shown.splitlines() if line.strip().startswith(option)]
        assert all("[" in row for row in rows), "choices are shown"
