"""`redline show` and `redline export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import OUTPUT, WHICH, Exit, Json, opt, print_json
from redline.errors import SpecError


def show(
    id: Annotated[str | None, typer.Argument(help="A record's id, or the start of it.")] = None,
    limit: Annotated[int, opt(group=WHICH, help="How many of the latest records to list.")] = 20,
    json: Json = False,
) -> int:
    """List the latest records, or show everything about one.

    \b
    Examples:
      redline show
      redline show 19f1a2
    """
    from redline.api.show import latest, record_and_row
    from redline.report.export import export_json, json_document
    from redline.report.show import detail, listing
    from redline.report.terminal import make_console

    if id is None:
        rows, location = latest(limit)
        if json:
            print_json(json_document("show", {"records": [each.plain() for each in rows]}))
        elif rows:
            make_console().print(listing(rows))
        else:
            make_console().print(f"nothing measured yet in {location}; start with 'redline demo'", markup=False)
        return Exit.DONE
    record, row, is_cut_off = record_and_row(id)
    if json:
        print_json(export_json([record], raw=True, summarize=lambda _: [row], kind="show"))
    else:
        make_console().print(detail(row, record, is_cut_off=is_cut_off))
    return Exit.DONE


def export(
    ids: Annotated[list[str] | None, typer.Argument(help="Records. Default: all of them.")] = None,
    format: Annotated[
        str,
        opt(
            "--format",
            group=OUTPUT,
            metavar="[csv|json|archive]",
            help="Format of the file; archive is a back-up for 'redline import'.",
        ),
    ] = "csv",
    output: Annotated[Path | None, opt("--output", "-o", group=OUTPUT, help="A file. Default: stdout.")] = None,
    raw: Annotated[bool, opt("--raw", group=OUTPUT, help="JSON: include every raw sample.")] = False,
) -> int:
    """Write the history as CSV or JSON.

    \b
    Examples:
      redline export > results.csv
      redline export --format json --raw -o records.json
      redline export --format archive -o backup.redline
    """
    from redline.api.show import records_and_rows
    from redline.report.export import export_csv, export_json

    if format not in ("csv", "json", "archive"):
        raise SpecError(f"format must be csv, json or archive, got {format!r}")
    if format == "archive":
        return _back_up(ids or [], output)
    records, rows = records_and_rows(ids or [])
    if format == "csv":
        text = export_csv(records, summarize=lambda _: rows)
    else:
        text = export_json(records, raw=raw, summarize=lambda _: rows)
    if output is None:
        sys.stdout.write(text)
        return Exit.DONE
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"cannot write {output}: {error.strerror}") from None
    return Exit.DONE


def _back_up(ids: list[str], output: Path | None) -> int:
    from redline.api.history import export_archive

    if output is None:
        raise SpecError("a back-up is not text: name a file with --output")
    try:
        with output.open("wb") as file:
            export_archive(file, ids)
    except OSError as error:
        raise SpecError(f"cannot write {output}: {error.strerror}") from None
    return Exit.DONE
