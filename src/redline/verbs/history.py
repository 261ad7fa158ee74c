"""`redline history`: benchmarks over time, and below it what keeps the records: show, tag, export, import, delete, prune, recover."""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from gzip import GzipFile
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import IO, Annotated, Any, cast

import msgspec

from redline.analyze.history import SMALLEST_CHANGE, Trend, trend_of
from redline.analyze.rows import columns_for, row_of
from redline.analyze.summary import RunSummary, summarize
from redline.model.errors import SpecError, UsageError
from redline.model.fields import MOST_ITEMS, MOST_ROWS, require_choice, require_range
from redline.model.identity import condition_words, conditions_of
from redline.model.metrics import THROUGHPUT, Block, Fact, Figure, Headline, Row, Table
from redline.model.note import note
from redline.model.record import BatchOrigin, RunRecord
from redline.model.settings import OUTPUT, WAY, WHICH, setting
from redline.model.spec import Recipe, Task
from redline.model.units import counted, format_bytes, format_seconds
from redline.show.canvas import label_text, new_figure
from redline.show.export import JsonDocument, export_csv, export_json, safe_document
from redline.show.result import Result
from redline.store import History, Point, SeriesSeen
from redline.store.database import describe, file_of, resolve
from redline.store.recover import salvage
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, use

SHORT_ID = 13
"""How many characters of an id are shown: they tell records apart, and every command accepts them."""
LONGEST_WORDS = 500
_AGE = re.compile(r"(\d{1,6})\s*(min|h|d|w)")
_SECONDS = {"min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
SPARKS = "▁▂▃▄▅▆▇█"

STEP = Figure(name="step", unit="s", better="lower")
CHANGE = Figure(name="change", unit="change", header="time", better="lower", doc="Of a step, after over before.")
RECORDS = Figure(name="records")


def moment_of(name: str, words: str) -> float:
    """A point in time: `30d`, `12h`, `2w` ago, or a date such as 2026-01-31 or 2026-01-31T12:00."""
    if found := _AGE.fullmatch(words.strip()):
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
    task: Annotated[str | None, which("Only this task.", shape="[infer|train|step|generate]")] = None,
    recipe: Annotated[str | None, which("Only this recipe.", short="-r")] = None,
    batch: Annotated[int | None, which("Only this batch.", short="-b")] = None,
    device: Annotated[str | None, which("Only devices of this kind, or with this in their name.")] = None,
    torch: Annotated[str | None, which("Only records of torch versions that start with this.")] = None,
    driver: Annotated[str | None, which("Only records of drivers that start with this.")] = None,
    commit: Annotated[str | None, which("Only records of commits that start with this.")] = None,
    tag: Annotated[str | None, which("Only records with this tag.")] = None,
    since: Moment = None,
    until: Annotated[Any, which("Only records until then.", kind=str, read=moment_of)] = None,
    limit: Annotated[int, setting("How many series to show, the latest measured first.", group=OUTPUT)] = 20,
    key: str | None = None,
    with_points: bool = True,
    workspace: Workspace | None = None,
) -> Result:
    """Show benchmarks over time, and where each got faster or slower.

    A series is one benchmark on one device, across commits and versions. Each change is listed with when, how much and how certain; slow drift is
    listed separately. Times are compared: +5 % is slower.
    """
    require_range("limit", limit, 1, MOST_ROWS)
    require_range("batch", batch, 1, MOST_ITEMS)
    if task is not None:
        require_choice("task", task, Task)
    if since is not None and until is not None and since > until:
        raise UsageError("since is later than until: no record can fit")
    exact = {"model": model, "task": task, "recipe": recipe and Recipe.parse(recipe).canonical(), "batch": batch}
    begins = {"torch": torch, "driver": driver, "git_commit": commit}

    def fits_series(seen: SeriesSeen) -> bool:
        benchmark, name = seen.series.benchmark, seen.series.device_name.lower()
        is_device = device is None or device.partition(":")[0] == benchmark.device or device.lower() in name
        is_asked = all(value in (None, getattr(benchmark, name)) for name, value in exact.items())
        return key in (None, seen.key) and is_device and is_asked

    def fits_point(point: Point) -> bool:
        is_between = (since is None or point.created_at >= since) and (until is None or point.created_at <= until)
        return is_between and all(
            value is None or (getattr(point, name) or "").startswith(value) for name, value in begins.items()
        )

    with use(workspace) as opened, opened.reading() as kept:
        every = kept.series()
        if model is not None and model not in {seen.series.benchmark.model for seen in every}:
            raise UsageError(f"nothing of {model!r} was measured yet in {kept.location}")
        wanted = [seen for seen in every if fits_series(seen)]
        tagged = set(kept.tagged(tag)) if tag else None
        trends: list[_Trend] = []
        left_out = 0
        for number, seen in enumerate(wanted):
            if len(trends) >= limit:
                left_out = len(wanted) - number
                break
            points = [point for point in kept.points([seen.key]).get(seen.key, []) if fits_point(point)]
            points = [point for point in points if tagged is None or point.record_id in tagged]
            marks = _marks(kept, seen.key) if points else {}
            trends += [_Trend(seen, strand, marks, words) for words, strand in _strands(points)]
    return _trends_result(trends, left_out, with_points=with_points)


def _marks(kept: History, key: str) -> dict[tuple[str, str], str]:
    """Returns what was said of each record of a series, by the record and by whether it is a tag or a note."""
    words: dict[tuple[str, str], str] = {}
    for mark in kept.marks(series=[key]):
        kind, said = ("notes", f"{mark.words} by the gate") if mark.kind == "gate" else (f"{mark.kind}s", mark.words)
        words[mark.record_id, kind] = ", ".join(filter(None, (words.get((mark.record_id, kind)), said)))
    return words


def _strands(points: Sequence[Point]) -> Iterator[tuple[str, Sequence[Point]]]:
    """Yields points that make one trend, and what tells them from the others of their series.

    An update of torch or the driver is part of a trend, and may be a step in it. Versions that alternate, as when CI measures with two of them,
    are trends of their own.
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


class _Trend:
    """One benchmark on one device, over time."""

    def __init__(
        self, seen: SeriesSeen, points: Sequence[Point], marks: dict[tuple[str, str], str], versions: str
    ) -> None:
        self.points, self.marks = points, marks
        self.name = ", ".join(part for part in (str(seen.series.benchmark), versions) if part)
        self.facts: dict[str, Fact] = {"benchmark": self.name}
        self.about: dict[str, Fact] = {"device": seen.series.device_name, "key": seen.key}
        self.found: Trend = trend_of([point.step_s for point in points], [point.created_at for point in points])

    def row(self) -> Row:
        steps = [point.step_s for point in self.points]
        last = self.found.changes[-1] if self.found.changes else None
        told = f"{1 / last.ratio - 1:+.1%} on {day(self.points[last.index].created_at)}" if last else "none found"
        times = {"first": day(self.points[0].created_at), "latest": day(self.points[-1].created_at)}
        drift = self.found.drift
        return Row(
            facts={**self.facts, **self.about, "trend": sparkline(steps), "last_change": told, **times},
            metrics=(
                RECORDS(len(steps)),
                STEP(steps[-1]),
                *([Figure(name="drift", unit="change")(*_change(drift))] if drift is not None else []),
            ),
        )

    def changes(self) -> Iterator[Row]:
        for change in self.found.changes:
            before, after = self.points[change.index - 1], self.points[change.index]
            names = {"commit": "git_commit", "torch": "torch", "driver": "driver"}
            pairs = {name: (getattr(before, field), getattr(after, field)) for name, field in names.items()}
            told = [f"{name} {_short(a)} → {_short(b)}" for name, (a, b) in pairs.items() if a != b]
            yield Row(
                facts={
                    **self.facts,
                    "from": day(after.created_at),
                    "what_changed": ", ".join(told) or "same commit, torch and driver",
                    "at": after.created_at,
                    **{f"{name}_before": a for name, (a, _) in pairs.items()},
                    **{name: b for name, (_, b) in pairs.items()},
                },
                metrics=(CHANGE(*_change(change)),),
                record_id=after.record_id,
            )

    def point_rows(self, *, every: bool) -> Iterator[Row]:
        """Yields a row for each record, or only for those that somebody tagged or noted something about."""
        marked = {record_id for record_id, _ in self.marks}
        for point in self.points if every else [point for point in self.points if point.record_id in marked]:
            said = {kind: self.marks.get((point.record_id, kind)) for kind in ("tags", "notes")}
            yield Row(
                facts={
                    "benchmark": self.name,
                    "when": day(point.created_at),
                    "at": point.created_at,
                    "commit": point.git_commit,
                    "torch": point.torch,
                    "driver": point.driver,
                    **said,
                },
                metrics=(STEP(point.step_s), THROUGHPUT(point.items / point.step_s)),
                record_id=point.record_id,
            )


def _change(found: Any) -> tuple[float, float, float]:
    """Turns a ratio of times before over after, and its interval, into the change of the time."""
    return 1 / found.ratio - 1, 1 / found.high - 1, 1 / found.low - 1


def _trends_result(trends: Sequence[_Trend], left_out: int, *, with_points: bool) -> Result:
    points = tuple(row for trend in trends for row in trend.point_rows(every=with_points))
    marked = tuple(row for row in points if row["tags"] or row["notes"])
    changes = tuple(row for trend in trends for row in trend.changes())
    more = f"{left_out} more series: name a model, or raise --limit"
    none = "no record fits; 'redline history show' lists what was measured"
    return Result(
        verb="history",
        headline=Headline(
            template=f"{counted(len(trends), 'benchmark')}, {counted(len(changes), 'change')}." if trends else none
        ),
        tables=(
            Table(
                name="series",
                title="benchmarks over time; the line shows speed, higher is faster",
                rows=tuple(trend.row() for trend in trends),
                columns=("benchmark", "trend", "last_change", "step", "records", "device"),
            ),
            Table(
                name="changes", title="changes", rows=changes, columns=("benchmark", "change", "from", "what_changed")
            ),
            Table(
                name="marked", title="tags and notes", rows=marked[-5:], columns=("benchmark", "when", "tags", "notes")
            ),
            Table(name="points", title="records", rows=points, is_detail=True),
        ),
        notes=(note("left-out", more),) if left_out else (),
        picture=(lambda: _figure(trends)) if trends else None,
    )


def _figure(trends: Sequence[_Trend]) -> Any:
    """One panel per series: throughput over time, changes as vertical lines."""
    figure, _ = new_figure(9, 2.4 * len(trends))
    figure.clear()
    for axes, trend in zip(figure.subplots(len(trends), 1, squeeze=False)[:, 0], trends, strict=True):
        times = [datetime.fromtimestamp(point.created_at) for point in trend.points]
        axes.plot(times, [point.items / point.step_s for point in trend.points], ".-", linewidth=0.8)
        for change in trend.found.changes:
            axes.axvline(times[change.index], color="tab:red" if change.ratio < 1 else "tab:green", linestyle="--")
        axes.set_title(label_text(f"{trend.name} ({trend.about['device']})", 110), fontsize=8, loc="left")
        axes.set_ylabel("per second", fontsize=8)
        axes.tick_params(labelsize=7)
    return figure


def day(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")


def _short(value: str | None) -> str:
    return "unknown" if value is None else value[:12]


def sparkline(seconds: Sequence[float], width: int = 24) -> str:
    """The speed over time, higher is faster: medians of equally many records each."""
    count = min(width, len(seconds))
    edges = [round(index * len(seconds) / count) for index in range(count + 1)] if count else []
    speeds = [1 / median(seconds[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(speeds, default=1.0), max(speeds, default=1.0)
    if high / low < 1 + SMALLEST_CHANGE:
        return SPARKS[len(SPARKS) // 2] * count
    return "".join(SPARKS[min(int((speed - low) / (high - low) * len(SPARKS)), len(SPARKS) - 1)] for speed in speeds)


# Single records


RUNNING = (
    "running: still being measured, or killed on another machine or under an older Redline (these cannot be told apart)"
)
BATCH_WORDS: dict[BatchOrigin, str] = {
    "asked": "as the factory was told",
    "scaled": "found by asking the model which axis holds items",
    "declared": "declared",
    "source": "made so",
    "unknown": "no axis is known to hold items",
    "guessed": "guessed from dimension 0 of the first input, as older versions did",
}


@dataclass(frozen=True, kw_only=True)
class OneRecord(Result):
    """A record with all that was measured, which its document carries whole."""

    record: RunRecord

    def to_json(self) -> JsonDocument:
        fields = {**msgspec.json.decode(super().to_json()), "records": [self.record]}
        return safe_document(msgspec.json.encode(fields).decode())


@verb(examples=("redline history show", "redline history show 19f1a2"))
def show(
    id: Annotated[str | None, setting("A record's id, or the start of it.", is_argument=True)] = None,
    *,
    limit: Annotated[int, which("How many of the latest records to list.")] = 20,
    workspace: Workspace | None = None,
) -> Result:
    """List the latest records, or show everything about one."""
    require_range("limit", limit, 1, MOST_ROWS)
    with use(workspace) as opened, opened.reading() as kept:
        if id is not None:
            record = kept.load(id)
            (summary,) = rows_of([record], kept, opened)
            return _record_result(record, summary, is_cut_off=kept.is_cut_off(record.id))
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
            "model": row.model,
            "recipe": row.recipe,
            "batch": row.batch,
            "task": row.task,
            "status": row.status,
            "when": day(row.created_at),
            "conditions": ", ".join(words),
            "device": row.device_name or row.device,
            "trust": made.facts.get("trust"),
            "created_at": row.created_at,
        }
        rows.append(Row(facts={**made.facts, **facts}, metrics=made.metrics, record_id=row.id))
    none = f"nothing measured yet in {location}; start with 'redline demo'"
    columns = (
        "record",
        "model",
        "recipe",
        "throughput",
        "trust",
        "status",
        "batch",
        "ratio",
        "task",
        "when",
        "conditions",
    )
    return Result(
        verb="history show",
        headline=None if rows else Headline(template="{none}", figures={"none": none}),
        tables=(Table(name="records", rows=tuple(rows), columns=columns),),
        notes=(note("interrupted", RUNNING),) if any(row.status == "running" for row in listed) else (),
        record_ids=tuple(row.id for row in listed),
    )


def rows_of(records: Sequence[RunRecord], kept: History, workspace: Workspace) -> list[RunSummary]:
    """Their rows, each compared with the first of its group even where that one is not among them."""
    known = {record.id: record for record in records}
    with_first = {record.group for record in records if record.position == 0}
    for record in records:
        if record.group not in with_first:
            with_first.add(record.group)
            known |= {sibling.id: sibling for sibling in kept.load_with_groups([record.id])}
    rows = {row.record_id: row for row in summarize(list(known.values()), workspace.ceilings_of(records))}
    return [rows[record.id] for record in records]


def _record_result(record: RunRecord, row: RunSummary, *, is_cut_off: bool = False) -> OneRecord:
    """Everything about one record, in plain words."""
    failure = record.failure
    facts = tuple(
        Row(facts={"fact": name, "value": value}) for name, value in _lines(record, row, is_cut_off=is_cut_off)
    )
    blocks = [Block(title="", text=failure.traceback)] if failure and failure.traceback else []
    printed = record.closed.printed if record.closed else ""
    blocks += [Block(title="printed", text=printed)] if printed else []
    return OneRecord(
        verb="history show",
        headline=Headline(template="record {id}", figures={"id": record.id}),
        tables=(
            Table(name="record", rows=(row_of(row),), columns=("recipe", *columns_for([row]))),
            Table(name="facts", rows=facts),
        ),
        blocks=tuple(blocks),
        record_ids=(record.id,),
        record=record,
    )


def _lines(record: RunRecord, row: RunSummary, *, is_cut_off: bool) -> Iterator[tuple[str, str]]:
    yield "key", record.key or "n/a"
    prepared = record.prepared
    if prepared is not None:
        environment, workload, warmup = prepared.environment, prepared.workload, prepared.warmup
        yield "device", f"{environment.device.name} ({row.device}), driver {environment.device.driver or 'n/a'}"
        cores = f"{counted(environment.logical_cores or 0, 'core')}, {counted(environment.threads or 0, 'thread')}"
        yield "host", f"{environment.cpu}, {cores}"
        versions = (f"{name} {version}" for name, version in environment.versions.items())
        yield "versions", ", ".join((f"python {environment.python}", *versions))
        yield "model", f"{workload.class_name} from {workload.source}, {workload.parameters:,} parameters"
        yield "inputs", ", ".join(workload.input_shapes)
        yield "batch", f"{workload.batch or 'unknown'}: {BATCH_WORDS[workload.batch_from]}"
        yield "counted", f"{workload.items_per_step} {workload.item} per step"
        if record.spec.workload.task == "train":
            yield "trained", f"{row.conditions['optimizer']} on {workload.loss or 'the default loss'}"
        yield "settings", f"seed {row.conditions['seed']}, effort {row.conditions['effort']}"
        yield "warm-up", f"{len(warmup.samples)} steps in {warmup.seconds:.1f} s: {warmup.reason}"
        yield "numerics", str(prepared.numerics.reason or "")
        yield from (("note", str(told)) for told in workload.notes)
        yield from ((f"switch {told.about}", str(told)) for told in prepared.recipe_notes)
    unfinished = "cut off: the measuring process ended" if is_cut_off else "running"
    yield "stopped", f"{record.stopped or unfinished} after {len(record.blocks)} blocks"
    if row.generation is not None:
        yield (
            "text",
            f"prompt {row.conditions['prompt']}, {row.conditions['new_tokens']} new tokens, {row.generation.cache} cache",
        )
    if (latency := row.latency_s) is not None:
        names = ("p50", "p90", "p95", "p99", "mean", "std")
        tails = ", ".join(f"{name} {format_seconds(getattr(latency, name))}" for name in names)
        yield "latency", f"{tails} ({latency.n} samples, {latency.clock} clock)"
    if (memory := row.memory) is not None:
        sizes = {
            "allocated": memory.peak_allocated_bytes,
            "reserved": memory.peak_reserved_bytes,
            "context and libraries": memory.context_bytes,
            "resident on the host": memory.peak_rss_bytes,
        }
        yield (
            "peak memory",
            ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size is not None),
        )
    yield "bound", f"{row.bound.label}: {row.bound.evidence}"
    yield "trust", ", ".join(row.verdict.labels)
    yield from (("because", str(reason)) for reason in row.verdict.reasons)
    own = {told.code for told in prepared.workload.notes} if prepared is not None else set()
    yield from (("note", str(told)) for told in row.verdict.notes if told.code not in own)
    if record.failure:
        yield "failed", f"{record.failure.kind} at {record.failure.stage}: {record.failure.told}"


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
    if not said.strip() or len(said) > LONGEST_WORDS or not said.isprintable():
        raise UsageError(f"a {kind} is 1 to {LONGEST_WORDS} printable characters on one line, got {said[:80]!r}")
    if kind == "tag" and (said != said.strip() or ":" in said):
        raise UsageError(f"a tag has no colon and no space at its ends, got {said!r}")
    with use(workspace) as opened:
        kept = opened.history
        found = [kept.id_of(prefix) for prefix in ids]
        if remove:
            found = [record_id for record_id in found if kept.unmark(record_id, kind, said)]
        for record_id in [] if remove else found:
            kept.mark(record_id, kind, said, at=time.time())
    done = f"{'removed from' if remove else 'set on'} {counted(len(found), 'record')}"
    return _ids_result("tag", f"{{words}} {done}", found, words=repr(said))


def _ids_result(verb_name: str, text: str, ids: Sequence[str], **figures: Fact) -> Result:
    return Result(verb=f"history {verb_name}", headline=Headline(template=text, figures=figures), record_ids=tuple(ids))


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
        str,
        setting(
            "Format of the file; archive is a back-up for 'history import'.", group=OUTPUT, shape="[csv|json|archive]"
        ),
    ] = "csv",
    output: Annotated[
        Path | None, setting("A file; compressed if it ends in .gz. Default: stdout.", short="-o", group=OUTPUT)
    ] = None,
    raw: Annotated[bool, setting("JSON: include every raw sample.", group=OUTPUT)] = False,
    workspace: Workspace | None = None,
) -> int:
    """Write the history as CSV or JSON."""
    if format not in ("csv", "json", "archive"):
        raise SpecError(f"format must be csv, json or archive, got {format!r}")
    with use(workspace) as opened, opened.reading() as kept:
        if format == "archive":
            if output is None:
                raise SpecError("a back-up is not text: name a file with --output")
            _write(output, lambda file: kept.export_archive(file, [kept.id_of(prefix) for prefix in ids]))
            return 0
        records = [kept.load(prefix) for prefix in ids] if ids else kept.find(newest_first=False)
        rows = rows_of(records, kept, opened)
    text = (
        export_csv(records, summarize=lambda _: rows)
        if format == "csv"
        else export_json(records, raw=raw, summarize=lambda _: rows)
    )
    if output is None:
        sys.stdout.write(text)
    else:
        _write(output, lambda file: file.write(text.encode()))
    return 0


def _write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """An older file of this name stays until there is a whole new one."""
    is_other = path.exists() and not path.is_file()  # such as /dev/stdout
    unfinished = path if is_other else path.with_name(f"{path.name}.unfinished")
    try:
        # Without a time in it, so that the same records give the same file.
        packed = path.suffix == ".gz"
        with cast(IO[bytes], GzipFile(unfinished, "wb", mtime=0)) if packed else unfinished.open("wb") as file:
            fill(file)
        if not is_other:
            unfinished.replace(path)
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror}") from None
    finally:
        if not is_other:
            with suppress(FileNotFoundError, NotADirectoryError):  # it was renamed, or could not be made
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
    result = _ids_result("import", f"{found.added} records added, {found.known} were there already", ())
    return replace(result, about={"added": found.added, "known": found.known})


@verb(examples=("redline history recover -o recovered.sqlite",))
def recover(
    output: Annotated[Path, setting("The new file.", short="-o", group=OUTPUT)] = Path("recovered.sqlite"),
    *,
    history: str | Path | None = None,
) -> Result:
    """Write every record that can be read of a damaged history to a new file, and leave the damaged one as it is."""
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
    told = {"without some of their samples": found.cut, "could not be read": found.unreadable}
    rows = [Row(facts={"record": record_id, "state": what}) for what, ids in told.items() for record_id in ids]
    return Result(
        verb="history recover",
        headline=Headline(
            template=f"{counted(len(found.records), 'record')} written to {{path}}", figures={"path": str(output)}
        ),
        tables=(Table(name="damaged", rows=tuple(rows)),),
        about={"added": len(found.records), "path": str(output)},
        next="put it in the place of the damaged file, or set REDLINE_STORE to it",
    )


# Deleting


@verb(examples=("redline history delete 19f1a2",))
def delete(ids: Ids, *, dry_run: DryRun = False, workspace: Workspace | None = None) -> Result:
    """Delete records with their samples, tags and traces."""
    if not ids:
        raise UsageError("name the records to delete")
    with use(workspace) as opened:
        chosen = dict.fromkeys(opened.history.id_of(prefix) for prefix in ids)
        return _deleted("delete", list(chosen), dry_run, opened)


@verb(examples=("redline history prune --older-than 365d --keep 50 --dry-run",))
def prune(
    *,
    older_than: Annotated[Any, which("Only records older than this: 90d, or a date.", kind=str, read=moment_of)] = None,
    keep: Annotated[int | None, which("Keep this many of the latest records of each series.")] = None,
    failed: Annotated[bool, which("Only records that failed or were interrupted.")] = False,
    dry_run: DryRun = False,
    workspace: Workspace | None = None,
) -> Result:
    """Delete old records. Several conditions must all hold; tagged records always stay."""
    if older_than is None and keep is None and not failed:
        raise UsageError("say what to prune: --older-than, --keep or --failed")
    require_range("keep", keep, 1, MOST_ROWS)
    with use(workspace) as opened:
        kept = opened.history
        tagged = {mark.record_id for mark in kept.marks() if mark.kind == "tag"}
        rows = [row for row in kept.rows() if row.id not in tagged and row.status != "running"]
        chosen = {row.id for row in rows if older_than is None or row.created_at < older_than}
        if failed:
            chosen &= {row.id for row in rows if row.status in ("failed", "cut off", "interrupted")}
        if keep is not None:
            points = kept.points(seen.key for seen in kept.series())
            chosen &= {point.record_id for series in points.values() for point in series[:-keep]}
        return _deleted("prune", sorted(chosen), dry_run, opened)


def _deleted(verb_name: str, ids: Sequence[str], dry_run: bool, workspace: Workspace) -> Result:
    sweeps = [] if dry_run or not ids else workspace.history.delete(ids)
    again = "; these sweeps measure what is gone again: {sweeps}" if sweeps else ""
    text = f"{len(ids)} records {'would be deleted' if dry_run else 'deleted'}{again}"
    return _ids_result(verb_name, text, ids, sweeps=", ".join(sweeps))
