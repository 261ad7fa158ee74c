"""Commands that read the history."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from redline.analyze.summary import RunSummary, summarize
from redline.cli.document import print_document
from redline.errors import SpecError
from redline.record import RunRecord
from redline.report.export import export_csv, export_json
from redline.report.history import detail, listing
from redline.report.terminal import make_console
from redline.spec import MOST_ROWS, require_range
from redline.store import History, ceilings_of


def show_latest(limit: int, *, as_json: bool) -> None:
    require_range("limit", limit, 1, MOST_ROWS)
    with History.open(only_to_read=True) as history:
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
    with History.open(only_to_read=True) as history:
        record = history.load(record_id)
        (row,) = _rows_of([record], history)
        is_cut_off = history.is_cut_off(record.id)
    if as_json:
        sys.stdout.write(export_json([record], raw=True, summarize=lambda _: [row]))
        return
    make_console().print(detail(row, record, is_cut_off=is_cut_off))


def export_records(ids: list[str], format: str, output: Path | None, *, raw: bool) -> None:
    if format not in ("csv", "json"):
        raise SpecError(f"format must be csv or json, got {format!r}")
    with History.open(only_to_read=True) as history:
        records = [history.load(record_id) for record_id in ids] if ids else history.find(newest_first=False)
        rows = _rows_of(records, history)
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


def _rows_of(records: Sequence[RunRecord], history: History) -> list[RunSummary]:
    """Their rows, each set against the first of its group, also where that is not among them."""
    known = {record.id: record for record in records}
    with_first = {record.group for record in records if record.position == 0}
    for record in records:
        if record.group not in with_first:
            with_first.add(record.group)
            known |= {sibling.id: sibling for sibling in history.group_of(record)}
    rows = {row.record_id: row for row in summarize(list(known.values()), ceilings_of(records))}
    return [rows[record.id] for record in records]
