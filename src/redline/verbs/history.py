"""`redline history`: benchmarks over time, and below it what keeps the records: show, tag, export, import, delete, prune."""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from gzip import GzipFile
from pathlib import Path
from typing import IO, Annotated, Any, Literal, cast

import msgspec
import numpy as np

from redline.analyze.history import SMALLEST_CHANGE, Trend, trend_of
from redline.analyze.measurement import Measurement, measurements
from redline.analyze.rows import columns_for, row_of
from redline.model.errors import SpecError, UsageError
from redline.model.fields import MOST_ITEMS, MOST_ROWS
from redline.model.identity import condition_words, conditions_of
from redline.model.metrics import THROUGHPUT, Block, Fact, Figure, Headline, Row, Table
from redline.model.note import Note, note
from redline.model.record import RunRecord
from redline.model.settings import OUTPUT, WAY, WHICH, setting
from redline.model.spec import Recipe, Task
from redline.model.units import counted
from redline.show.canvas import label_text, new_figure
from redline.show.export import json_document
from redline.show.result import Result, comma_separated, row_document
from redline.store import History, Mark, Point, SeriesSeen
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, use

SHORT_ID = 13
"""This many characters of an id are shown: they tell records apart, and every command accepts them."""
LONGEST_WORDS = 500
"""A tag or a note has at most so many characters, because it is shown on one line."""
SPARKS = "▁▂▃▄▅▆▇█"
_SECONDS = {"min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}

STEP = Figure(name="step", unit="s", better="lower")
CHANGE = Figure(name="change", unit="change", header="time", better="lower", doc="Of a step, after over before.")
DRIFT = Figure(name="drift", unit="change")
RECORDS = Figure(name="records")


def moment_of(name: str, words: str) -> float:
    """Returns a point in time: `30d`, `12h`, `2w` ago, or a date such as 2026-01-31 or 2026-01-31T12:00."""
    if found := re.fullmatch(r"\s*(\d{1,6})\s*(min|h|d|w)\s*", words):
        return time.time() - int(found[1]) * _SECONDS[found[2]]
    try:
        return datetime.fromisoformat(words.strip()).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(
            f"{words!r} is no time: give an age such as 30d or 12h, or a date such as 2026-01-31"
        ) from None


def which(doc: str, **known: Any) -> Any:
    return setting(doc, group=WHICH, **known)


Ids = Annotated[Any, setting("Records, by their ids or the start of them.", is_argument=True, kind=list[str])]
DryRun = Annotated[bool, setting("Say what would be deleted, and delete nothing.", group=WAY)]
Moment = Annotated[Any, which("Only records since then: 30d or 12h ago, or a date.", kind=str, read=moment_of)]


@verb(examples=("redline history", "redline history resnet50 --since 90d --plot trend.png"), also=("plot",))
def history(
    model: Annotated[str | None, setting("Only this model.", is_argument=True)] = None,
    *,
    task: Annotated[Task | None, which("Only this task.")] = None,
    recipe: Annotated[str | None, which("Only this recipe.", short="-r")] = None,
    batch: Annotated[int | None, which("Only this batch.", short="-b", least=1, most=MOST_ITEMS)] = None,
    device: Annotated[str | None, which("Only devices of this kind, or with this in their name.")] = None,
    tag: Annotated[str | None, which("Only records with this tag.")] = None,
    since: Moment = None,
    limit: Annotated[
        int, setting("How many series to show, the latest measured first.", group=OUTPUT, least=1, most=MOST_ROWS)
    ] = 20,
    key: str | None = None,
    workspace: Workspace | None = None,
) -> Result:
    """Show benchmarks over time, and where each got faster or slower.

    A series is one benchmark on one device, across commits and versions. Each change is listed with when, how much and how certain; slow drift is
    listed separately. Times are compared: +5 % is slower.
    """
    asked = {"model": model, "task": task, "recipe": recipe and Recipe.parse(recipe).canonical(), "batch": batch}

    def fits(seen: SeriesSeen) -> bool:
        benchmark, name = seen.series.benchmark, seen.series.device_name.lower()
        is_device = device is None or device.partition(":")[0] == benchmark.device or device.lower() in name
        is_asked = all(value in (None, getattr(benchmark, name)) for name, value in asked.items())
        return key in (None, seen.key) and is_device and is_asked

    with use(workspace) as opened, opened.reading() as kept:
        every = kept.series()
        if model is not None and all(seen.series.benchmark.model != model for seen in every):
            raise UsageError(f"nothing of {model!r} was measured yet in {kept.location}")
        tagged = set(kept.tagged(tag)) if tag else None
        waiting = iter([seen for seen in every if fits(seen)])
        trends: list[_Trend] = []
        while len(trends) < limit and (seen := next(waiting, None)):
            measured = [
                point
                for point in kept.points(seen.key)
                if (since is None or point.created_at >= since) and (tagged is None or point.record_id in tagged)
            ]
            marks = kept.marks(series=[seen.key]) if measured else []
            trends += [_Trend(seen, versions, strand, marks) for versions, strand in _strands(measured).items()]
        left_out = len(list(waiting))
    changes = tuple(row for trend in trends for row in trend.change_rows())
    points = tuple(row for trend in trends for row in trend.point_rows())
    title = "benchmarks over time; the line shows speed, higher is faster"
    columns = ("benchmark", "trend", "last_change", "step", "records", "device")
    found = f"{counted(len(trends), 'benchmark')}, {counted(len(changes), 'change')}."
    return Result(
        verb="history",
        headline=Headline(
            template=found if trends else "no record fits; 'redline history show' lists what was measured"
        ),
        tables=(
            Table(name="series", title=title, rows=tuple(trend.row() for trend in trends), columns=columns),
            Table(
                name="changes", title="changes", rows=changes, columns=("benchmark", "change", "from", "what_changed")
            ),
            Table(name="points", title="records", rows=points, is_detail=True),
        ),
        notes=(note("left-out", f"{left_out} more series: name a model, or raise --limit"),) if left_out else (),
        picture=(lambda: _figure(trends)) if trends else None,
    )


def _strands(points: Sequence[Point]) -> dict[str, Sequence[Point]]:
    """Returns the points of each trend, by what tells it from the others of its series.

    An update of torch or the driver is part of a trend, and may be a step in it. Versions that alternate, as when CI measures with two of them,
    are trends of their own.
    """
    words = [f"torch {point.torch or 'unknown'}, driver {point.driver or 'unknown'}" for point in points]
    in_a_row = [version for version, _ in itertools.groupby(words)]
    if len(in_a_row) == len(set(in_a_row)):
        return {"": points} if points else {}
    pairs = list(zip(words, points, strict=True))
    return {version: [point for word, point in pairs if word == version] for version in dict.fromkeys(words)}


@dataclass(frozen=True)
class _Trend:
    """This is one benchmark on one device, over time."""

    seen: SeriesSeen
    versions: str
    points: Sequence[Point]
    marks: Sequence[Mark]

    @cached_property
    def name(self) -> str:
        return ", ".join(filter(None, (str(self.seen.series.benchmark), self.versions)))

    @cached_property
    def found(self) -> Trend:
        return trend_of([point.step_s for point in self.points], [point.created_at for point in self.points])

    def row(self) -> Row:
        first, latest, drift = self.points[0], self.points[-1], self.found.drift
        last = [
            f"{1 / change.ratio - 1:+.1%} on {day(self.points[change.index])}" for change in self.found.changes[-1:]
        ]
        facts: dict[str, Fact] = {
            "benchmark": self.name,
            "device": self.seen.series.device_name,
            "key": self.seen.key,
            "trend": sparkline([point.step_s for point in self.points]),
            "last_change": "".join(last) or "none found",
            "first": day(first),
            "latest": day(latest),
        }
        drifted = [DRIFT(*_change(drift))] if drift is not None else []
        return Row(facts=facts, metrics=(RECORDS(len(self.points)), STEP(latest.step_s), *drifted))

    def change_rows(self) -> Iterator[Row]:
        for change in self.found.changes:
            after = self.points[change.index]
            old, new = _versions(self.points[change.index - 1]), _versions(after)
            told = [f"{name} {str(old[name])[:12]} → {str(new[name])[:12]}" for name in new if old[name] != new[name]]
            facts: dict[str, Fact] = {
                "benchmark": self.name,
                "from": day(after),
                "what_changed": ", ".join(told) or "same commit, torch and driver",
                "at": after.created_at,
                **{f"{name}_before": value for name, value in old.items()},
                **new,
            }
            yield Row(facts=facts, metrics=(CHANGE(*_change(change)),), record_id=after.record_id)

    def point_rows(self) -> Iterator[Row]:
        """Yields a row for each record, with what somebody said of it."""
        said: dict[tuple[str, str], list[str]] = {}
        for mark in self.marks:
            said.setdefault((mark.record_id, "tags" if mark.kind == "tag" else "notes"), []).append(mark.words)
        for point in self.points:
            marks = {kind: ", ".join(said.get((point.record_id, kind), ())) or None for kind in ("tags", "notes")}
            when: dict[str, Fact] = {"benchmark": self.name, "when": day(point), "at": point.created_at}
            metrics = (STEP(point.step_s), THROUGHPUT(point.items / point.step_s))
            yield Row(facts={**when, **_versions(point), **marks}, metrics=metrics, record_id=point.record_id)


def _versions(point: Point) -> dict[str, str | None]:
    return {"commit": point.git_commit, "torch": point.torch, "driver": point.driver}


def _change(found: Any) -> tuple[float, float, float]:
    """Turns a ratio of times before over after, and its interval, into the change of the time."""
    return 1 / found.ratio - 1, 1 / found.high - 1, 1 / found.low - 1


def _figure(trends: Sequence[_Trend]) -> Any:
    """Draws throughput over time, each series relative to its first record, and changes as vertical lines."""
    figure, axes = new_figure(9, 4)
    for trend in trends:
        times = [datetime.fromtimestamp(point.created_at) for point in trend.points]
        speeds = [trend.points[0].step_s / point.step_s for point in trend.points]
        name = label_text(f"{trend.name} ({trend.seen.series.device_name})", 110)
        (line,) = axes.plot(times, speeds, ".-", linewidth=0.8, label=name)
        for change in trend.found.changes:
            axes.axvline(times[change.index], color=line.get_color(), linestyle="--")
    axes.set_ylabel("speed, the first record is 1")
    axes.legend(fontsize=7)
    return figure


def day(measured: Any) -> str:
    return datetime.fromtimestamp(measured.created_at).strftime("%Y-%m-%d %H:%M")


def sparkline(seconds: Sequence[float], width: int = 24) -> str:
    """Returns the speed over time, higher is faster: medians of equally many records each."""
    if not seconds:
        return ""
    speeds = np.array([1 / np.median(part) for part in np.array_split(seconds, min(width, len(seconds)))])
    low, high = speeds.min(), speeds.max()
    if high / low < 1 + SMALLEST_CHANGE:
        return SPARKS[len(SPARKS) // 2] * speeds.size
    heights = np.minimum((speeds - low) / (high - low) * len(SPARKS), len(SPARKS) - 1)
    return "".join(SPARKS[int(height)] for height in heights)


# Single records


RUNNING = (
    "running: still being measured, or killed on another machine or under an older Redline (these cannot be told apart)"
)


@verb(examples=("redline history show", "redline history show 19f1a2"))
def show(
    id: Annotated[str | None, setting("A record's id, or the start of it.", is_argument=True)] = None,
    *,
    limit: Annotated[int, which("How many of the latest records to list.", least=1, most=MOST_ROWS)] = 20,
    workspace: Workspace | None = None,
) -> Result:
    """List the latest records, or show everything about one."""
    with use(workspace) as opened, opened.reading() as kept:
        if id is not None:
            record = kept.load(id)
            (row,), (summary,) = kept.rows(id=record.id), rows_of([record], kept, opened)
            return _of_one(record, summary, row.status)
        listed = kept.rows(limit=limit)
        records = kept.load_many(row.id for row in listed)
        summaries = {row.record_id: row for row in rows_of(list(records.values()), kept, opened)}
        location = kept.location
    rows = []
    for row in listed:
        known, found = records.get(row.id), summaries.get(row.id)
        made = row_of(found) if found is not None and found.failure is None else Row(facts={})
        words = condition_words(conditions_of(known), row.device).values() if known is not None else ()
        facts: dict[str, Fact] = {
            "record": row.id[:SHORT_ID],
            **{name: getattr(row, name) for name in ("model", "recipe", "batch", "task", "status", "created_at")},
            "when": day(row),
            "conditions": ", ".join(words),
            "device": row.device_name or row.device,
        }
        rows.append(Row(facts={**made.facts, **facts}, metrics=made.metrics, record_id=row.id))
    none = f"nothing measured yet in {location}; start with 'redline demo'"
    columns = "record model recipe throughput trust status batch ratio task when conditions"
    return Result(
        verb="history show",
        headline=None if rows else Headline(template="{none}", figures={"none": none}),
        tables=(Table(name="records", rows=tuple(rows), columns=tuple(columns.split())),),
        notes=(note("interrupted", RUNNING),) if any(row.status == "running" for row in listed) else (),
        record_ids=tuple(row.id for row in listed),
    )


def rows_of(records: Sequence[RunRecord], kept: History, workspace: Workspace) -> list[Measurement]:
    """Their rows, each compared with the first of its group even where that one is not among them."""
    first = {record.group for record in records if record.position == 0}
    others = [record.id for record in records if record.group not in first]
    known = {record.id: record for record in (*records, *kept.load_with_groups(others))}
    rows = {row.record_id: row for row in measurements(list(known.values()), workspace.ceilings_of(records))}
    return [rows[record.id] for record in records]


def _of_one(record: RunRecord, row: Measurement, status: str) -> Result:
    """Returns everything about one record, in plain words."""
    failure, closed = record.failure, record.closed
    texts = {"": failure and failure.traceback, "printed": closed and closed.printed}
    facts = [Row(facts={"fact": name, "value": value}) for name, value in _facts(record, row, status)]
    return Result(
        verb="history show",
        headline=Headline(template="record {id}", figures={"id": record.id}),
        tables=(
            Table(name="record", rows=(row_of(row),), columns=("recipe", *columns_for([row]))),
            Table(name="facts", rows=tuple(facts)),
        ),
        blocks=tuple(Block(title=title, text=text) for title, text in texts.items() if text),
        record_ids=(record.id,),
    )


def _facts(record: RunRecord, row: Measurement, status: str) -> Iterator[tuple[str, str]]:
    """Yields where the numbers come from and why to believe them; the numbers themselves are in the row."""
    ended = "cut off: the measuring process ended" if status == "cut off" else record.stopped or "running"
    yield "stopped", f"{ended} after {len(record.blocks)} blocks"
    if record.failure:
        yield "failed", f"{record.failure.kind} at {record.failure.stage}: {record.failure.told}"
    yield "conditions", ", ".join(condition_words(row.conditions, row.device).values())
    yield "bound", f"{row.bound.label}: {row.bound.evidence}"
    yield "trust", ", ".join(row.verdict.labels)
    yield from (("because", str(reason)) for reason in row.verdict.reasons)
    notes: list[Note | None] = [*row.verdict.notes]
    if (prepared := record.prepared) is not None:
        environment = prepared.environment
        for part in (environment.device, environment, prepared.workload, prepared.cold_start, prepared.warmup):
            plain = msgspec.structs.asdict(part).items()
            yield from (
                (name.replace("_", " "), str(value))
                for name, value in plain
                if value and isinstance(value, str | int | float)
            )
        yield from environment.versions.items()
        notes += [prepared.numerics.reason, *prepared.workload.notes, *prepared.recipe_notes]
    yield from (("note", f"{told.about or ''} {told}".strip()) for told in dict.fromkeys(filter(None, notes)))
    yield "key", record.key or "n/a"


# Tags and notes


@verb(
    examples=("redline history tag 19f1a2 19f1b7 v1.2", 'redline history tag --note 19f1a2 "after the driver update"')
)
def tag(
    words: Annotated[
        Any,
        setting("Records, then the tag. Nothing: list all tags.", is_argument=True, kind=list[str], shape="ID TAG"),
    ] = (),
    *,
    note: Annotated[bool, setting("The last word is a note instead of a tag.", group=WAY)] = False,
    remove: Annotated[bool, setting("Remove the tag or note.", group=WAY)] = False,
    workspace: Workspace | None = None,
) -> Result:
    """Tag records, or note something about them; without arguments, list all tags and notes.

    A tag names a baseline ('redline gate --baseline tag:NAME') and keeps its records from being pruned.
    """
    kind: Any = "note" if note else "tag"
    if not words:
        with use(workspace) as opened, opened.reading() as kept:
            marks = kept.marks()
        rows = [Row(facts={"record": mark.record_id, "kind": mark.kind, "words": mark.words}) for mark in marks]
        return Result(verb="history tag", tables=(Table(name="marks", rows=tuple(rows)),))
    if len(words) < 2:
        raise UsageError("give at least one record and a tag: redline history tag ID TAG")
    *ids, said = words
    if not 0 < len(said.strip()) <= LONGEST_WORDS or not said.isprintable() or (kind == "tag" and ":" in said):
        rule = f"1 to {LONGEST_WORDS} printable characters on one line, and a tag has no colon"
        raise UsageError(f"a {kind} is {rule}, got {said[:80]!r}")
    said = said.strip()
    with use(workspace) as opened:
        kept = opened.history
        found = [kept.id_of(prefix) for prefix in ids]
        if remove:
            found = [record_id for record_id in found if kept.unmark(record_id, kind, said)]
        else:
            for record_id in found:
                kept.mark(record_id, kind, said, at=time.time())
    done = f"{'removed from' if remove else 'set on'} {counted(len(found), 'record')}"
    return _done("tag", f"{{words}} {done}", found, words=repr(said))


def _done(verb_name: str, text: str, ids: Sequence[str], **figures: Fact) -> Result:
    about = {name: value for name, value in figures.items() if isinstance(value, int)}
    headline = Headline(template=text, figures=figures)
    return Result(verb=f"history {verb_name}", headline=headline, record_ids=tuple(ids), about=about)


# Back-up


@verb(
    examples=(
        "redline history export > results.csv",
        "redline history export --format json --raw -o records.json",
        "redline history export --format archive -o backup.redline.gz",
    )
)
def export(
    ids: Annotated[Any, setting("Records. Default: all of them.", is_argument=True, kind=list[str])] = (),
    *,
    format: Annotated[
        Literal["csv", "json", "archive"],
        setting("Format of the file; archive is a back-up for 'history import'.", group=OUTPUT),
    ] = "csv",
    output: Annotated[
        Path | None, setting("A file; compressed if it ends in .gz. Default: stdout.", short="-o", group=OUTPUT)
    ] = None,
    raw: Annotated[bool, setting("JSON: include every raw sample.", group=OUTPUT)] = False,
    workspace: Workspace | None = None,
) -> int:
    """Write the history as CSV or JSON."""
    with use(workspace) as opened, opened.reading() as kept:
        if format == "archive":
            if output is None:
                raise SpecError("a back-up is not text: name a file with --output")
            _write(output, lambda file: kept.export_archive(file, [kept.id_of(prefix) for prefix in ids]))
            return 0
        records = [kept.load(prefix) for prefix in ids] if ids else kept.find(newest_first=False)
        rows = rows_of(records, kept, opened)
    made = []
    for record, row in zip(records, map(row_of, rows), strict=True):
        created_at = datetime.fromtimestamp(record.created_at, UTC).isoformat(timespec="milliseconds")
        made.append(msgspec.structs.replace(row, facts={**row.facts, "created_at": created_at}))
    if format == "csv":
        text: str = comma_separated(Table(name="results", rows=tuple(made)))
    else:  # raw samples are not indented: it would be one line for each
        fields = {"results": list(map(row_document, made)), **({"records": records} if raw else {})}
        text = json_document("export", fields, indent=not raw)
    if output is None:
        sys.stdout.write(text)
    else:
        _write(output, lambda file: file.write(text.encode()))
    return 0


def _write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Writes a file. An older one of this name stays until there is a whole new one."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        if path.exists() and not path.is_file():  # a device would be replaced by the file
            raise SpecError(f"cannot write {path}: it is there, and no file")
        # Without a time in it, so that the same records give the same file.
        packed = path.suffix == ".gz"
        with cast(IO[bytes], GzipFile(unfinished, "wb", mtime=0)) if packed else unfinished.open("wb") as file:
            fill(file)
        unfinished.replace(path)
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror}") from None
    finally:
        with suppress(OSError):  # it was renamed, or could not be made
            unfinished.unlink()


@verb(examples=("redline history import backup.redline",))
def import_(
    file: Annotated[
        Any, setting("What --save or 'history export' wrote, or another history.", is_argument=True, kind=str)
    ],
    *,
    workspace: Workspace | None = None,
) -> Result:
    """Add the records of a file to the history. Records that are already there are not changed."""
    with use(workspace) as opened:
        found = opened.history.add_file(Path(file))
    text = "{added} records added, {known} were there already"
    return _done("import", text, (), added=found.added, known=found.known)


# Deleting


@verb(examples=("redline history delete 19f1a2",))
def delete(ids: Ids, *, dry_run: DryRun = False, workspace: Workspace | None = None) -> Result:
    """Delete records with their samples, tags and traces."""
    if not ids:
        raise UsageError("name the records to delete")
    with use(workspace) as opened:
        return _deleted("delete", list(dict.fromkeys(map(opened.history.id_of, ids))), dry_run, opened)


@verb(examples=("redline history prune --older-than 365d --keep 50 --dry-run",))
def prune(
    *,
    older_than: Annotated[Any, which("Only records older than this: 90d, or a date.", kind=str, read=moment_of)] = None,
    keep: Annotated[
        int | None, which("Keep this many of the latest records of each series.", least=1, most=MOST_ROWS)
    ] = None,
    failed: Annotated[bool, which("Only records that failed or were interrupted.")] = False,
    dry_run: DryRun = False,
    workspace: Workspace | None = None,
) -> Result:
    """Delete old records. Several conditions must all hold; tagged records always stay."""
    if older_than is None and keep is None and not failed:
        raise UsageError("say what to prune: --older-than, --keep or --failed")
    with use(workspace) as opened:
        kept = opened.history
        tagged = {mark.record_id for mark in kept.marks() if mark.kind == "tag"}
        beyond = {
            point.record_id
            for seen in (kept.series() if keep else ())
            for point in kept.points(seen.key)[: -(keep or 1)]
        }
        chosen = [
            row.id
            for row in kept.rows()
            if row.status != "running"
            and row.id not in tagged
            and (older_than is None or row.created_at < older_than)
            and (not failed or row.status in ("failed", "cut off", "interrupted"))
            and (keep is None or row.id in beyond)
        ]
        return _deleted("prune", sorted(chosen), dry_run, opened)


def _deleted(verb_name: str, ids: Sequence[str], dry_run: bool, workspace: Workspace) -> Result:
    sweeps = [] if dry_run or not ids else workspace.history.delete(ids)
    again = "; these sweeps measure what is gone again: {sweeps}" if sweeps else ""
    text = f"{len(ids)} records {'would be deleted' if dry_run else 'deleted'}{again}"
    return _done(verb_name, text, ids, sweeps=", ".join(sweeps))
