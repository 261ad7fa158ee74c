"""`redline.history`: benchmarks over time; reading the history record by record; and keeping it: tags, notes, back-up,
deleting."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import msgspec
from rich.console import RenderableType

from redline.analyze.history import trend_of
from redline.analyze.summary import RunSummary, summarize
from redline.api.workspace import Workspace, use
from redline.model.conditions import Conditions, conditions_of
from redline.model.errors import UsageError
from redline.model.fields import MOST_ITEMS, MOST_ROWS, Frozen, require_choice, require_range
from redline.model.record import RunRecord
from redline.model.spec import Task
from redline.show.export import JsonDocument
from redline.show.history import Listed, SeriesTrend, TrendChange, TrendPoint, history_json, history_report
from redline.show.notebook import Shown
from redline.store import History, Mark, MarkKind, Point, SeriesSeen
from redline.store.archive import Imported, is_archive, is_history
from redline.store.codec import read_exported
from redline.store.location import describe, file_of, resolve
from redline.store.recover import salvage

SERIES = 20
LONGEST_WORDS = 500
_AGE = re.compile(r"(\d{1,6})\s*(min|h|d|w)")
_SECONDS = {"min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


class HistoryFilters(Frozen):
    """Which series and points to show; what is left out fits all."""

    key: str | None = None
    """Only this series."""
    model: str | None = None
    task: str | None = None
    recipe: str | None = None
    batch: int | None = None
    device: str | None = None
    """A kind such as cuda, or a part of the device's name."""
    torch: str | None = None
    driver: str | None = None
    commit: str | None = None
    """The beginning of a commit."""
    tag: str | None = None
    since: float | None = None
    until: float | None = None

    def fits_series(self, seen: SeriesSeen) -> bool:
        benchmark = seen.series.benchmark
        exact = ("model", "task", "recipe", "batch")
        device = self.device is None or (
            self.device.partition(":")[0] == benchmark.device or self.device.lower() in seen.series.device_name.lower()
        )
        return (
            self.key in (None, seen.key)
            and device
            and all(getattr(self, name) in (None, getattr(benchmark, name)) for name in exact)
        )

    def fits_point(self, point: Point) -> bool:
        return (
            (self.since is None or point.created_at >= self.since)
            and (self.until is None or point.created_at <= self.until)
            and (self.torch is None or (point.torch or "").startswith(self.torch))
            and (self.driver is None or (point.driver or "").startswith(self.driver))
            and (self.commit is None or (point.git_commit or "").startswith(self.commit))
        )


class HistoryResult(Shown, Sequence[SeriesTrend]):
    """The series that fit, the latest measured first."""

    def __init__(self, series: Sequence[SeriesTrend], left_out: int) -> None:
        self.series = list(series)
        self.left_out = left_out
        """Series that fit too and are beyond the limit."""

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, index: Any) -> Any:
        return self.series[index]

    def report(self) -> RenderableType:
        return history_report(self.series, left_out=self.left_out)

    def frame_rows(self) -> Sequence[Any]:
        """One for each point of each series."""
        return [
            {"benchmark": trend.benchmark, "device": trend.device_name, **msgspec.to_builtins(point)}
            for trend in self.series
            for point in trend.points
        ]

    def to_json(self) -> JsonDocument:
        return history_json(self.series, left_out=self.left_out)


def history(
    filters: HistoryFilters | None = None, *, limit: int = SERIES, workspace: Workspace | None = None
) -> HistoryResult:
    """What was measured when, a trend per benchmark and device, and where each changed."""
    require_range("limit", limit, 1, MOST_ROWS)
    filters = filters or HistoryFilters()
    if filters.task is not None:
        require_choice("task", filters.task, Task)
    require_range("batch", filters.batch, 1, MOST_ITEMS)
    if filters.since is not None and filters.until is not None and filters.since > filters.until:
        raise UsageError("since is later than until: no record can fit")
    with use(workspace) as opened, opened.reading() as kept:
        _check_model(filters, kept)
        wanted = [seen for seen in kept.series() if filters.fits_series(seen)]
        tagged = set(kept.tagged(filters.tag)) if filters.tag else None
        shown: list[SeriesTrend] = []
        left_out = 0
        for number, seen in enumerate(wanted):
            if len(shown) >= limit:
                left_out = len(wanted) - number
                break
            points = [point for point in kept.points([seen.key]).get(seen.key, []) if filters.fits_point(point)]
            points = [point for point in points if tagged is None or point.record_id in tagged]
            marks = kept.marks(series=[seen.key]) if points else []
            shown += [_trend(seen, strand, marks, words) for words, strand in _strands(points)]
        return HistoryResult(shown, left_out)


def _strands(points: Sequence[Point]) -> Iterator[tuple[str, Sequence[Point]]]:
    """Points that make one trend, and what tells them from the others of their series.

    An update of torch or the driver is part of a trend, and may be a step in it. Versions that alternate, as when CI
    measures with two of them, are trends of their own.
    """
    versions = [(point.torch, point.driver) for point in points]
    in_a_row = [version for version, _ in groupby(versions)]
    if len(in_a_row) == len(set(in_a_row)):
        if points:
            yield "", points
        return
    same_driver = len({driver for _, driver in in_a_row}) == 1
    for version in dict.fromkeys(in_a_row):
        torch, driver = version
        words = f"torch {torch or 'unknown'}" + ("" if same_driver else f", driver {driver or 'unknown'}")
        yield words, [point for point, own in zip(points, versions, strict=True) if own == version]


def _check_model(filters: HistoryFilters, kept: History) -> None:
    if filters.model is None:
        return
    known = {seen.series.benchmark.model for seen in kept.series()}
    if filters.model not in known:
        raise UsageError(f"nothing of {filters.model!r} was measured yet in {kept.location}")


def _trend(seen: SeriesSeen, points: Sequence[Point], marks: Sequence[Mark], versions: str) -> SeriesTrend:
    words: dict[tuple[str, str], list[str]] = {}
    for mark in marks:
        kind, said = ("note", f"{mark.words} by the gate") if mark.kind == "gate" else (mark.kind, mark.words)
        words.setdefault((mark.record_id, kind), []).append(said)
    found = trend_of([point.step_s for point in points], [point.created_at for point in points])
    return SeriesTrend(
        benchmark=", ".join(part for part in (str(seen.series.benchmark), versions) if part),
        key=seen.key,
        device_name=seen.series.device_name,
        identity=seen.series.benchmark,
        points=tuple(
            TrendPoint(
                record_id=point.record_id,
                at=point.created_at,
                step_s=point.step_s,
                per_s=point.items / point.step_s,
                commit=point.git_commit,
                torch=point.torch,
                driver=point.driver,
                tags=tuple(words.get((point.record_id, "tag"), ())),
                notes=tuple(words.get((point.record_id, "note"), ())),
            )
            for point in points
        ),
        changes=tuple(_change(points, each.index, each.ratio, each.low, each.high) for each in found.changes),
        drift=found.drift,
    )


def _change(points: Sequence[Point], index: int, ratio: float, low: float, high: float) -> TrendChange:
    before, after = points[index - 1], points[index]
    return TrendChange(
        at=after.created_at,
        ratio=ratio,
        low=low,
        high=high,
        record_id=after.record_id,
        commit_before=before.git_commit,
        commit=after.git_commit,
        torch_before=before.torch,
        torch=after.torch,
        driver_before=before.driver,
        driver=after.driver,
    )


def moment_of(words: str, *, now: float | None = None) -> float:
    """A point in time: `30d`, `12h`, `2w` ago, or a date such as 2026-01-31 or 2026-01-31T12:00."""
    if found := _AGE.fullmatch(words.strip()):
        return (time.time() if now is None else now) - int(found[1]) * _SECONDS[found[2]]
    try:
        return datetime.fromisoformat(words.strip()).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(
            f"{words!r} is no time: give an age such as 30d or 12h, or a date such as 2026-01-31"
        ) from None


# Tags and notes


def tag(
    ids: Sequence[str], words: str, *, kind: MarkKind = "tag", remove: bool = False, workspace: Workspace | None = None
) -> list[str]:
    """Tag records, or note something about them; the whole ids of those that were changed."""
    if not words.strip() or len(words) > LONGEST_WORDS or not words.isprintable():
        raise UsageError(f"a {kind} is 1 to {LONGEST_WORDS} printable characters on one line, got {words[:80]!r}")
    if kind == "tag" and (words != words.strip() or ":" in words):
        raise UsageError(f"a tag has no colon and no space at its ends, got {words!r}")
    with use(workspace) as opened:
        found = [opened.history.id_of(each) for each in ids]
        if remove:
            return [each for each in found if opened.history.unmark(each, kind, words)]
        for each in found:
            opened.history.mark(each, kind, words, at=time.time())
        return found


def marks(*, workspace: Workspace | None = None) -> list[Mark]:
    """All tags and notes, oldest first."""
    with use(workspace) as opened, opened.reading() as kept:
        return kept.marks()


# Back-up


def export_archive(out: IO[bytes], ids: Sequence[str] = (), *, workspace: Workspace | None = None) -> int:
    """Write the history, or some of its records, byte by byte."""
    with use(workspace) as opened, opened.reading() as kept:
        return kept.export_archive(out, [kept.id_of(each) for each in ids])


@contextmanager
def history_in(path: Path) -> Iterator[History | None]:
    """The history that a file is, or that a back-up holds, for reading; None for any other file."""
    if is_history(path):
        with History.open(path, only_to_read=True) as history:
            yield history
    elif is_archive(path):
        with History.open(":memory:") as history:
            history.import_archive(path)
            yield history
    else:
        yield None


def import_records(path: str | Path, *, workspace: Workspace | None = None) -> Imported:
    """Add the records of a back-up, of another history or of an exported document that are not there yet."""
    path = Path(path)
    with use(workspace) as opened:
        if is_archive(path):
            return opened.history.import_archive(path)
        if is_history(path):
            with History.open(path, only_to_read=True) as other, tempfile.NamedTemporaryFile() as file:
                other.export_archive(file)
                file.flush()
                return opened.history.import_archive(Path(file.name))
        found = read_exported(path)
        known = opened.history.load_many((record.id for record in found), blocks=False)
        new = [record for record in found if record.id not in known]
        for record in new:
            opened.history.finish(record)
        return Imported(added=len(new), known=len(found) - len(new))


# A damaged history


class Recovered(Frozen):
    """What was written to the new file."""

    path: str
    added: int
    cut: tuple[str, ...] = ()
    """Records that have lost some of their blocks."""
    unreadable: tuple[str, ...] = ()
    """Records of which only the id could be read."""


def recover(output: str | Path, *, history: str | Path | None = None) -> Recovered:
    """Write every record that can be read of a damaged SQLite history to a new file. The damaged file stays as it is."""
    url = resolve(None if history is None else str(history))
    path, output = file_of(url), Path(output).absolute()
    if path is None:
        raise UsageError(f"only a SQLite file can be recovered, and the history is at {describe(url)}")
    if output.exists():
        raise UsageError(f"{output} is already there: name a new file")
    if not output.parent.is_dir():
        raise UsageError(f"cannot write {output}: there is no folder {output.parent}")
    found = salvage(path)
    if not found.records:
        raise UsageError(f"no record can be read in {path}")
    unfinished = output.with_name(f"{output.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    with History.open(unfinished) as opened:
        opened.add_salvage(found, path.parent)
    unfinished.rename(output)
    return Recovered(
        path=str(output), added=len(found.records), cut=tuple(found.cut), unreadable=tuple(found.unreadable)
    )


# Deleting


class Deleted(Frozen):
    ids: tuple[str, ...]
    sweeps: tuple[str, ...] = ()
    """Sweeps that have lost a cell by it and would measure it again."""
    dry_run: bool = False


def delete(ids: Sequence[str], *, dry_run: bool = False, workspace: Workspace | None = None) -> Deleted:
    """Delete records with their blocks, tags and traces."""
    if not ids:
        raise UsageError("name the records to delete")
    with use(workspace) as opened:
        return _deleted(list(dict.fromkeys(opened.history.id_of(each) for each in ids)), dry_run, opened)


def prune(
    *,
    before: float | None = None,
    keep: int | None = None,
    failed: bool = False,
    dry_run: bool = False,
    workspace: Workspace | None = None,
) -> Deleted:
    """Delete records that are older than a time, beyond the latest `keep` of each series, or failed; tagged ones stay."""
    if before is None and keep is None and not failed:
        raise UsageError("say what to prune: --older-than, --keep or --failed")
    require_range("keep", keep, 1, MOST_ROWS)
    with use(workspace) as opened:
        kept = opened.history
        tagged = {mark.record_id for mark in kept.marks() if mark.kind == "tag"}
        rows = [row for row in kept.rows() if row.id not in tagged and row.status != "running"]
        chosen = {row.id for row in rows}
        if before is not None:
            chosen &= {row.id for row in rows if row.created_at < before}
        if failed:
            chosen &= {row.id for row in rows if row.status in ("failed", "cut off", "interrupted")}
        if keep is not None:
            points = kept.points(seen.key for seen in kept.series())
            chosen &= {point.record_id for series in points.values() for point in series[:-keep]}
        return _deleted(sorted(chosen), dry_run, opened)


def _deleted(ids: Sequence[str], dry_run: bool, workspace: Workspace) -> Deleted:
    sweeps = [] if dry_run or not ids else workspace.history.delete(ids)
    return msgspec.structs.replace(Deleted(ids=tuple(ids), dry_run=dry_run), sweeps=tuple(sweeps))


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
