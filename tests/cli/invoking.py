"""The command line called within this process."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from typer.testing import CliRunner, Result

from redline.cli.main import app_for
from redline.show.export import DocumentKind

Redline = Callable[..., Result]
"""The type of `invoke`, which the fixture `redline` has too."""


def invoke(line: str, *words: str | Path) -> Result:
    """Runs what a person typed: a line as a shell splits it, then words that are taken as they are.

    A bug comes through as the exception it is. The fork server is shared by all that this process invokes.
    """
    typed = [*shlex.split(line), *map(str, words)]
    return CliRunner().invoke(app_for(typed), typed, catch_exceptions=False)


def document(result: Result) -> Any:
    """Every document says what it is."""
    found = json.loads(result.stdout)
    assert list(found)[:2] in (["schema", "kind"], ["schema", "verb"])
    assert found.get("kind", "run") in get_args(DocumentKind)
    return found


def results(result: Result) -> list[dict[str, Any]]:
    """The rows that `redline run --json` printed."""
    found: list[dict[str, Any]] = document(result)["tables"]["results"]
    return found


def about(result: Result) -> Any:
    return document(result)["about"]


def refused(result: Result, says: str) -> None:
    """Checks that the command ended with a mistake in one line that says this, and printed nothing else."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("redline: ")
    assert says in line
