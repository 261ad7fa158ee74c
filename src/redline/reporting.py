"""Reports and comparisons, as notebooks and the command line ask for them: choose records, write or compare them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from redline.errors import RecordError, UsageError
from redline.record import RunRecord
from redline.store import History

if TYPE_CHECKING:
    from redline.analyze.compare import Comparisons
    from redline.analyze.profile import Profile
    from redline.analyze.tune.finding import TuneFinding
    from redline.report.folder import ReportFiles


class Chosen:
    """The records a report is about, and what could not be had of them."""

    def __init__(self, title: str = "") -> None:
        self.title = title
        self.records: list[RunRecord] = []
        self.notes: list[str] = []
        self.tunes: list[TuneFinding] = []
        """The searches that all of their records are here of, newest last."""

    def left_out(self, record_id: str, error: RecordError) -> None:
        self.notes.append(f"left out record {record_id}: {error}")

    def left_out_search(self, name: str, error: RecordError) -> None:
        self.notes.append(f"left out tune {name!r}: {error}")

    def add(self, records: Iterable[RunRecord]) -> None:
        known = {record.id for record in self.records}
        self.records += [record for record in records if record.id not in known]


def choose(
    what: Sequence[str] = (),
    *,
    last: bool = False,
    sweep: str | None = None,
    tune: str | None = None,
    history: History | None = None,
) -> Chosen:
    """By ids (or beginnings of them), exported files, the name of a sweep or a tune, or the latest group; else all."""
    if sum((bool(what), last, sweep is not None, tune is not None)) > 1:
        raise UsageError("choose records by their ids, by --last, by --sweep or by --tune: one of them")
    files = [Path(word) for word in what if _is_file(word)]
    if what and len(files) == len(what):
        chosen = Chosen()
        _add_files(chosen, files)
        return chosen
    with nullcontext(history) if history is not None else History.open(only_to_read=True) as opened:
        return _tune(tune, opened) if tune is not None else _from_history(what, last, sweep, opened)


def write_report(
    what: str | Sequence[str] = (),
    folder: str | Path = "redline-report",
    *,
    last: bool = False,
    sweep: str | None = None,
    tune: str | None = None,
    history: History | None = None,
) -> ReportFiles:
    """Write the report of the chosen records (see `choose`) into a folder, and say what lies where."""
    chosen = choose([what] if isinstance(what, str) else what, last=last, sweep=sweep, tune=tune, history=history)
    return report_records(chosen.records, folder, title=chosen.title, notes=chosen.notes, tunes=chosen.tunes)


def report_records(
    records: Sequence[RunRecord],
    folder: str | Path,
    *,
    title: str = "",
    notes: Sequence[str] = (),
    profiles: Sequence[Profile] | None = None,
    tunes: Sequence[TuneFinding] = (),
) -> ReportFiles:
    """`profiles`: those at hand already; None reads the traces that the records name. `tunes`: the searches among them."""
    from redline.report.contents import contents_of
    from redline.report.folder import write_folder
    from redline.store import ceilings_of

    contents = contents_of(
        records, title=title, notes=notes, profiles=profiles, tunes=tunes, ceilings_of=ceilings_of(records)
    )
    return write_folder(contents, Path(folder))


def compare(first: str, other: str, *, history: History | None = None) -> Comparisons:
    """Set two records, sweeps or exported files against each other, benchmark by benchmark.

    Several joined by commas are one side: three records of a benchmark or more, each a process, give it an interval.
    """
    from redline.analyze.compare import compare_records

    sides = [_side(word, history) for word in (first, other)]
    return compare_records(*sides)


def _side(words: str, history: History | None) -> list[RunRecord]:
    """Everything that a word names, or that several joined by commas do: replicates of one side."""
    chosen = Chosen()
    for word in [words] if _is_file(words) else words.split(","):
        chosen.add(_named(word.strip(), history))
    return chosen.records


def _named(word: str, history: History | None) -> list[RunRecord]:
    """A file, a sweep of that name, else a record's id; what several could mean is the first of these."""
    if _is_file(word):
        return choose([word]).records
    if history is None:
        with History.open(only_to_read=True) as opened:
            return _named(word, opened)
    if history.sweep(word).cells():
        return choose(sweep=word, history=history).records
    if not re.fullmatch(r"[0-9a-f]{4,}", word):
        raise UsageError(f"{word!r} is neither a file, nor a sweep in {history.place}, nor the id of a record")
    return [history.load(word)]


def _from_history(what: Sequence[str], last: bool, sweep: str | None, history: History) -> Chosen:
    if sweep is not None:
        return _sweep(sweep, history)
    chosen = Chosen()
    if last:
        group = history.latest_group()
        searched = _search_of(group, history)
        if searched is not None:
            return _tune(searched, history)
        chosen.add(group)
    elif what:
        files = [Path(word) for word in what if _is_file(word)]
        _add_files(chosen, files)
        for word in what:
            if not _is_file(word):
                # Its siblings come along: a ratio is against the first of the group.
                chosen.add(history.group_of(history.load(word)))
    else:
        chosen.add(history.find(newest_first=False, on_unreadable=chosen.left_out))
    _add_searches(chosen, history)
    return chosen


def _tune(name: str, history: History) -> Chosen:
    from redline.tuning import kept_tune

    chosen = Chosen(title=f"tune {name}")
    found = kept_tune(name, history, chosen.left_out)
    chosen.tunes.append(found.finding)
    chosen.add(found.records.values())
    return chosen


def _search_of(records: Sequence[RunRecord], history: History) -> str | None:
    """The search that these were measured for, where it is the latest."""
    from redline.tuning import kept_searches

    latest = next(kept_searches(history), None)
    ids = set() if latest is None else set(latest.record_ids)
    return latest.name if latest is not None and any(record.id in ids for record in records) else None


def _add_searches(chosen: Chosen, history: History) -> None:
    """Those that all of their records are chosen of."""
    from redline.tuning import TuneResult, kept_searches

    records = {record.id: record for record in chosen.records}
    for search in reversed(list(kept_searches(history, chosen.left_out_search))):
        if search.record_ids and all(record_id in records for record_id in search.record_ids):
            own = {record_id: records[record_id] for record_id in search.record_ids}
            chosen.tunes.append(TuneResult(search, own).finding)


def _sweep(name: str, history: History) -> Chosen:
    cells = history.sweep(name).cells()
    if not cells:
        raise UsageError(f"no sweep {name!r} with a settled cell in {history.place}")
    chosen = Chosen(title=f"sweep {name}")
    found = history.load_many((cell.record_id for cell in cells.values()), on_unreadable=chosen.left_out)
    chosen.add(sorted(found.values(), key=lambda record: (record.created_at, record.id)))
    return chosen


def _add_files(chosen: Chosen, files: Sequence[Path]) -> None:
    from redline.store.exported import read_exported

    for file in files:
        chosen.add(read_exported(file))


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long for a name, or a zero byte in it
        return False
