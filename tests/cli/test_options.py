"""What a command takes, and what its help shows."""

from __future__ import annotations

import re

import pytest
import typer
from typer.testing import CliRunner

from redline.cli.main import filled
from redline.verbs import NAMES

WHOLE = filled(*NAMES)


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
        rows = re.findall(rf"^  (?:-\w, )?{option}.*", shown, re.M)
        assert all("[" in row for row in rows), "choices are shown"
