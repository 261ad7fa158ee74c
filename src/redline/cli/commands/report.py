"""`redline report` and `redline compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import Json


def report(
    ids: Annotated[
        list[str] | None,
        typer.Argument(help="Records, or files of 'export --raw'; all of the history when none is named."),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="What was measured last, with its siblings.")] = False,
    sweep: Annotated[str | None, typer.Option(help="The settled cells of a sweep, by its name.")] = None,
    tune: Annotated[str | None, typer.Option(help="A search for the fastest recipe, by its name.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder to write.")] = Path(
        "redline-report"
    ),
    open_: Annotated[bool, typer.Option("--open", help="Show the dashboard in a browser.")] = False,
    json: Json = False,
) -> int:
    """Write a folder: a one-file dashboard, a Markdown report with pictures, CSV and JSON. Needs no torch."""
    from redline.cli.report import report_and_print

    return report_and_print(ids or [], out, last=last, sweep=sweep, tune=tune, opens=open_, as_json=json)


def compare(
    first: Annotated[
        str, typer.Argument(metavar="A", help="A record's id, a sweep's name or a file of 'export --raw'; commas join.")
    ],
    other: Annotated[str, typer.Argument(metavar="B", help="The same, to be set against A.")],
    fail_inconclusive: Annotated[
        bool, typer.Option("--fail-inconclusive", help="Exit with 4 where nothing can be said.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown on stdout.")] = False,
    json: Json = False,
) -> int:
    """Is B faster or slower than A? A verdict per benchmark: with an interval, or with the reason why there is none.

    Exit codes: 0 same or faster (or nothing can be said), 1 slower, 3 incomparable, 4 inconclusive when asked, 5 a run
    that failed.
    """
    from redline.cli.compare import compare_and_print

    return compare_and_print(first, other, fail_inconclusive=fail_inconclusive, as_markdown=markdown, as_json=json)
