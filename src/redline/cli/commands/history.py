"""`redline show` and `redline export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import Json


def show(
    id: Annotated[str | None, typer.Argument(help="A record's id, or the start of it.")] = None,
    limit: Annotated[int, typer.Option(help="How many of the latest to list.")] = 20,
    json: Json = False,
) -> None:
    """The latest records, or all about one."""
    from redline.cli.history import show_latest, show_one

    if id is None:
        show_latest(limit, as_json=json)
    else:
        show_one(id, as_json=json)


def export(
    ids: Annotated[list[str] | None, typer.Argument(help="Records; all of them when none is named.")] = None,
    format: Annotated[str, typer.Option("--format", help="csv or json.")] = "csv",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; stdout when left out.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="JSON: with every raw sample.")] = False,
) -> None:
    """The history as CSV or JSON."""
    from redline.cli.history import export_records

    export_records(ids or [], format, output, raw=raw)
