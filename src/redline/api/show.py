"""Reading the history: the latest records, one record, or all of them with their rows."""

from __future__ import annotations

from collections.abc import Sequence

from redline.analyze.summary import RunSummary, summarize
from redline.api.workspace import Workspace, use
from redline.conditions import Conditions, conditions_of
from redline.record import RunRecord
from redline.report.show import Listed
from redline.spec import MOST_ROWS, require_range
from redline.store import History


def latest(limit: int = 20, *, workspace: Workspace | None = None) -> tuple[list[Listed], str]:
    """The latest records, newest first, each with what tells it from its neighbours, and where the history is."""
    require_range("limit", limit, 1, MOST_ROWS)
    with use(workspace) as opened, opened.reading() as history:
        rows = history.rows(limit=limit)
        records = history.load_many(row.id for row in rows)
        results = {row.record_id: row for row in _rows_of(list(records.values()), history, opened)}
        known = {record_id: conditions_of(record) for record_id, record in records.items()}
        listed = [Listed(row, known.get(row.id, Conditions()), results.get(row.id)) for row in rows]
        return listed, history.location


def record_and_row(record_id: str, *, workspace: Workspace | None = None) -> tuple[RunRecord, RunSummary, bool]:
    """One record by the start of its id, its row, and whether its writer died before finishing it."""
    with use(workspace) as opened, opened.reading() as history:
        record = history.load(record_id)
        (row,) = _rows_of([record], history, opened)
        return record, row, history.is_cut_off(record.id)


def records_and_rows(
    ids: Sequence[str] = (), *, workspace: Workspace | None = None
) -> tuple[list[RunRecord], list[RunSummary]]:
    """The named records, or all of them, oldest first."""
    with use(workspace) as opened, opened.reading() as history:
        records = [history.load(record_id) for record_id in ids] if ids else history.find(newest_first=False)
        return records, _rows_of(records, history, opened)


def _rows_of(records: Sequence[RunRecord], history: History, workspace: Workspace) -> list[RunSummary]:
    """Their rows, each compared with the first of its group even where that one is not among them."""
    known = {record.id: record for record in records}
    with_first = {record.group for record in records if record.position == 0}
    for record in records:
        if record.group not in with_first:
            with_first.add(record.group)
            known |= {sibling.id: sibling for sibling in history.group_of(record)}
    rows = {row.record_id: row for row in summarize(list(known.values()), workspace.ceilings_of(records))}
    return [rows[record.id] for record in records]
