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
        self.tune: TuneFinding | None = None

    def left_out(self, record_id: str, error: RecordError) -> None:
        self.notes.append(f"left out record {record_id}: {error}")

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
    with nullcontext(history) if history is not None else History.open() as opened:
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
    return report_records(chosen.records, folder, title=chosen.title, notes=chosen.notes, tune=chosen.tune)


def report_records(
    records: Sequence[RunRecord],
    folder: str | Path,
    *,
    title: str = "",
    notes: Sequence[str] = (),
    profiles: Sequence[Profile] | None = None,
    tune: TuneFinding | None = None,
) -> ReportFiles:
    """`profiles`: those at hand already; None reads the traces that the records name. `tune`: what they were found by."""
    from redline.report.contents import contents_of
    from redline.report.folder import write_folder
    from redline.store import ceilings_of

    contents = contents_of(
        records, title=title, notes=notes, profiles=profiles, tune=tune, ceilings_of=ceilings_of(records)
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
        with History.open() as opened:
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
        chosen.add(history.latest_group())
    elif what:
        files = [Path(word) for word in what if _is_file(word)]
        _add_files(chosen, files)
        for word in what:
            if not _is_file(word):
                # Its siblings come along: a ratio is against the first of the group.
                chosen.add(history.group_of(history.load(word)))
    else:
        chosen.add(history.find(newest_first=False, on_unreadable=chosen.left_out))
    return chosen


def _tune(name: str, history: History) -> Chosen:
    from redline.tuning import kept_tune

    found = kept_tune(name, history)
    chosen = Chosen(title=f"tune {name}")
    chosen.tune = found.finding
    chosen.add(found.records.values())
    return chosen


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
