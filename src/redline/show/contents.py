"""The contents are what a report is about: its records, and for each subject the table and the sentence that follow from them.

A subject is a model with its task, its setting and its device. Rows of one subject may be compared; rows of two never are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from redline.analyze.batch import Curve, curves_of
from redline.analyze.load import LoadSummary
from redline.analyze.measurement import CeilingsOf, Line, Measurement, lines_of, measurements
from redline.analyze.profile import Profile, profile_of
from redline.analyze.rows import columns_for, headline_of, row_of, table_of
from redline.analyze.train import TrainingSummary
from redline.model.errors import TraceError
from redline.model.identity import Subject, is_capture, subjects_of
from redline.model.metrics import Fact, Headline, Row, Table
from redline.model.note import Note, note
from redline.model.record import RunRecord
from redline.model.units import counted
from redline.model.work import MemoryRow
from redline.search.tune.summary import TuneSummary
from redline.show.roofline import RooflineChart, roofline_charts
from redline.show.searches import GainPath, gain_path_of, with_search_ratios
from redline.trace.decode import read_trace
from redline.trace.lanes import Lanes, lanes_of

TIMELINES = 4
"""Only the newest profiles are drawn step by step, since each takes up to a megabyte of the page."""


METHOD = (
    "Every spec ran in its own process. Warm-up ended when two windows of steps agreed; timing stopped when the 95 % "
    "interval of the median was narrow enough, or the record says why it was not.",
    "Latency waits for the device after every step. Throughput and training run without waiting and are timed by device "
    "events; on a CPU the host clock serves both.",
    "An interval of one process holds within that process: another process may sit a few percent apart. Intervals over several "
    "processes cover what differs between them.",
    "A ratio with an interval comes from blocks measured interleaved, in random order. Records that merely followed each "
    "other are shown side by side and carry none.",
    "p95 needs 130 samples and p99 662; with fewer they are not told. The outputs of every recipe were compared with strict "
    "fp32 on fixed inputs; a recipe that is too far away is shown and never recommended.",
    "The knee is where throughput reaches 90 % of what larger batches near, by the fit t = a + c·b on batches that the "
    "device, not the host, limits.",
)
"""These sentences say how the numbers of every report were taken."""


@dataclass(frozen=True)
class Section:
    """A section has what was measured of one subject."""

    subject: Subject
    table: Table
    headline: Headline
    numbers: tuple[int, ...]
    """Its rows have these places among the lines of the report."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    title: str
    headline: str
    records: Sequence[RunRecord]
    rows: Sequence[Measurement]
    """There is one row for each record, in the same order."""
    lines: Sequence[Line]
    """There is one line for each recipe and batch of a subject, over all processes that measured it."""
    sections: Sequence[Section]
    curves: Sequence[Curve]
    profiles: Sequence[Profile]
    lanes: Mapping[str, Lanes]
    """These are the captured steps of the newest profiles, by record."""
    notes: Sequence[Note]
    """They say what a reader must know about the report itself: that records could not be read, or that traces are gone."""
    searches: Sequence[TuneSummary]
    gain_paths: Sequence[GainPath]
    rooflines: Sequence[RooflineChart]
    memories: Sequence[MemoryRow] = ()

    @property
    def trainings(self) -> list[TrainingSummary]:
        return [row.training for row in self.rows if row.training is not None]

    @property
    def loads(self) -> list[LoadSummary]:
        return [row.load for row in self.rows if row.load is not None and row.load.points]


def contents_of(
    records: Sequence[RunRecord],
    *,
    title: str = "",
    sentence: str = "",
    notes: Sequence[Note] = (),
    profiles: Sequence[Profile] | None = None,
    tunes: Sequence[TuneSummary] = (),
    ceilings_of: CeilingsOf | None = None,
    memories: Sequence[MemoryRow] = (),
) -> Contents:
    """Returns everything that a report shows of these records.

    `profiles` are those that are at hand already; with None the traces that the records name are read. `tunes` are the searches for
    which the records were made, newest last. Without `ceilings_of` nothing is said of headroom. `sentence` replaces the headline that
    the rows suggest.
    """
    rows = measurements(records, ceilings_of)
    lines = with_search_ratios(lines_of(rows), tunes)
    sections = _sections(lines)
    gone: list[Note] = []
    if profiles is None:
        profiles, gone = _profiles(records, ceilings_of)
    # A search's winner has the speed that the tables say it has.
    of_winners = [line.row.changed(record_id=record.id) for line in lines for record, _ in line.processes]
    paths = [path for tune in tunes if (path := gain_path_of(tune, of_winners)) is not None]
    return Contents(
        title=title or _title(subjects_of(records)),
        headline=sentence or _headline(sections),
        records=records,
        rows=rows,
        lines=lines,
        sections=sections,
        curves=curves_of(lines),
        profiles=profiles,
        lanes=_lanes(profiles),
        notes=[*notes, *gone],
        searches=tunes,
        gain_paths=sorted(paths, key=lambda path: -len(path.bars)),
        rooflines=roofline_charts(lines, ceilings_of) if ceilings_of else [],
        memories=memories,
    )


def line_row(line: Line) -> Row:
    """Returns the row of a line, with where and when it was measured."""
    made = _row(line)
    more: dict[str, Fact] = {
        "setting": line.subject.setting or None,
        "kind": "profile" if is_capture(line.record) else "run",
        "processes": len(line.processes),
        "measured_at": datetime.fromtimestamp(line.measured_at, UTC).strftime("%Y-%m-%d %H:%M"),
    }
    return msgspec.structs.replace(made, facts={**made.facts, **more})


def _row(line: Line) -> Row:
    """Returns the row as it stands beside others of its subject; one that was timed beside a profiler says so."""
    made = row_of(line.row)
    facts = {**made.facts, "device": line.subject.device} | ({"kind": "profile"} if line.is_capture else {})
    return msgspec.structs.replace(made, facts=facts)


def _sections(lines: Sequence[Line]) -> list[Section]:
    """Returns one section for each subject; those with a proven gain come first."""
    numbers: dict[Subject, list[int]] = {}
    for number, line in enumerate(lines):
        numbers.setdefault(line.subject, []).append(number)
    found = []
    for subject, own in numbers.items():
        recipes = {recipe: place for place, recipe in enumerate(dict.fromkeys(lines[at].row.recipe for at in own))}
        own.sort(key=lambda at: (recipes[lines[at].row.recipe], lines[at].row.batch or 0))
        of_rows = [lines[at].row for at in own]
        columns = (*columns_for(of_rows), "latency_p95", "bound", "processes")
        table, _ = table_of([_row(lines[at]) for at in own], "results", columns, str(subject))
        found.append(Section(subject, table, headline_of(table), tuple(own)))
    return sorted(found, key=lambda section: -_gain(section))


def _gain(section: Section) -> float:
    """Returns the largest ratio that is proven in a section; 0 if none is."""
    proven = [row.value("ratio") for row in section.table.rows if row.get("verdict") == "faster"]
    return max(proven, default=0.0)


def _headline(sections: Sequence[Section]) -> str:
    """Returns the sentence of the first section with its subject, since it is read without the table."""
    if not sections:
        return "There is nothing to report yet."
    first = sections[0]
    return f"{first.subject}: {first.headline}"


def _title(subjects: Sequence[Subject]) -> str:
    """Returns the models and devices, as far as a title can name them."""

    def some(names: Sequence[str], what: str) -> str:
        return ", ".join(names) if len(names) <= 3 else f"{len(names)} {what}"

    models = some(list(dict.fromkeys(subject.model for subject in subjects)), "models")
    devices = some(list(dict.fromkeys(subject.device for subject in subjects)), "devices")
    return " on ".join(part for part in (models, devices) if part) or "nothing measured yet"


def _profiles(records: Sequence[RunRecord], ceilings_of: CeilingsOf | None) -> tuple[list[Profile], list[Note]]:
    """Returns the profiles of traces that are still where they were written, and notes about those that are not."""
    found: list[Profile] = []
    notes: list[Note] = []
    gone: list[str] = []
    for record in records:
        if record.trace is None or record.failure is not None:
            continue
        if not record.trace.path or not Path(record.trace.path).exists():
            gone.append(record.id[:13])
            continue
        try:
            known = ceilings_of(record) if ceilings_of else None
            found.append(profile_of([read_trace(Path(record.trace.path))], record, ceilings=known))
        except TraceError as error:
            notes.append(note("unreadable", f"no kernels of record {record.id}: {error}", about=record.id))
    if gone:
        others = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        what = (
            f"no kernels of {counted(len(gone), 'profile')}, because the folder of the history does not hold the traces"
        )
        notes.append(note("trace-gone", f"{what}: record {gone[0]}{others}"))
    return found, notes


def _lanes(profiles: Sequence[Profile]) -> dict[str, Lanes]:
    found: dict[str, Lanes] = {}
    for profile in reversed(profiles):
        capture = profile.capture
        if capture is None or capture.trace is None or len(found) == TIMELINES or not Path(capture.trace).is_file():
            continue
        lanes = lanes_of(read_trace(Path(capture.trace)))
        if lanes is not None:
            found[capture.record_id] = lanes
    return found
