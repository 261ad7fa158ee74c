"""The command line called within this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from typer.testing import CliRunner, Result

from redline.cli.main import app_for
from redline.show.export import DocumentKind


def invoke(*words: str | Path) -> Result:
    """A bug comes through as the exception it is. The fork server is shared by all that this process invokes."""
    typed = [*map(str, words)]
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
