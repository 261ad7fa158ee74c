"""Commands that read the history."""

from __future__ import annotations

import sys
from pathlib import Path

from redline.analyze.summary import summarize
from redline.cli.document import print_document
from redline.errors import SpecError
from redline.report.export import export_csv, export_json
from redline.report.history import detail, listing
from redline.report.terminal import make_console
from redline.store import History, ceilings_of


def show_latest(limit: int, *, as_json: bool) -> None:
    with History.open() as history:
        rows = history.rows(limit=limit)
        place = history.place
    if as_json:
        print_document({"records": rows})
        return
    console = make_console()
    if rows:
        console.print(listing(rows))
    else:
        console.print(f"nothing measured yet in {place}; start with 'redline demo'", markup=False)


def show_one(record_id: str, *, as_json: bool) -> None:
    with History.open() as history:
        record = history.load(record_id)
        siblings = history.find(group=record.group) if record.group else [record]
    if as_json:
        sys.stdout.write(export_json([record], raw=True))
        return
    row = next(row for row in summarize(siblings, ceilings_of(siblings)) if row.record_id == record.id)
    make_console().print(detail(row, record))


def export_records(ids: list[str], format: str, output: Path | None, *, raw: bool) -> None:
    if format not in ("csv", "json"):
        raise SpecError(f"format must be csv or json, got {format!r}")
    with History.open() as history:
        records = [history.load(record_id) for record_id in ids] if ids else history.find(newest_first=False)
    rows = summarize(records, ceilings_of(records))
    if format == "csv":
        text = export_csv(records, summarize=lambda _: rows)
    else:
        text = export_json(records, raw=raw, summarize=lambda _: rows)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"cannot write {output}: {error.strerror}") from None
