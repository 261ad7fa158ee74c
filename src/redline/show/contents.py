"""What a report is about: records, and everything derived from them that more than one of its files shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from redline.analyze.load import LoadSummary
from redline.analyze.profile import Profile, profile_of
from redline.analyze.recommend import Advice, headline, recommend
from redline.analyze.recommend.evidence import Curve, curves_of
from redline.analyze.replicates import Line, lines_of
from redline.analyze.summary import CeilingsOf, RunSummary, summarize
from redline.analyze.train import TrainingSummary
from redline.model.environment import Environment
from redline.model.errors import TraceError
from redline.model.fields import Frozen
from redline.model.identity import Subject, subjects_of
from redline.model.note import Note, note
from redline.model.record import RunRecord
from redline.model.units import format_bytes
from redline.model.work import MemoryRow
from redline.search.tune.gains import GainPath, gain_path_of, with_search_ratios, with_winners
from redline.search.tune.result import TuneSummary
from redline.show.roofline import RooflineChart, roofline_charts
from redline.trace.decode import read_trace
from redline.trace.lanes import Lanes, lanes_of

MOST_NOTES = 8
"""So that a history full of damaged records takes a few lines."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    title: str
    headline: str
    """What to conclude, in one sentence."""
    records: Sequence[RunRecord]
    rows: Sequence[RunSummary]
    """One per record, in their order, as are the subjects."""
    subjects: Sequence[Subject]
    lines: Sequence[Line]
    """One per recipe and batch of a subject, over all of its processes: what tables, charts and exports show."""
    curves: Sequence[Curve]
    advice: Sequence[Advice]
    profiles: Sequence[Profile]
    lanes: Mapping[str, Lanes]
    """By record, the captured steps as lanes of boxes; of the newest profiles only."""
    notes: Sequence[Note]
    """What the reader must know about the report itself: records that could not be read, traces that are gone."""
    searches: Sequence[TuneSummary]
    gain_paths: Sequence[GainPath]
    """The ways to the fastest recipes, where someone looked for them; the best known first."""
    rooflines: Sequence[RooflineChart]
    across: bool = False
    """Whether different devices and thread counts are set side by side: only where somebody asks for it."""
    memories: Sequence[MemoryRow] = ()
    """What steps held in memory, where `redline profile --memory` looked at that."""

    @property
    def trainings(self) -> list[TrainingSummary]:
        """Of the records that trained on data."""
        return [row.training for row in self.rows if row.training is not None]

    @property
    def loads(self) -> list[LoadSummary]:
        """Of the records that served requests."""
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
    across: bool = False,
    memories: Sequence[MemoryRow] = (),
) -> Contents:
    """`profiles`: those that are already there; None reads the traces that the records name.

    `tunes`: the searches that records were made for, newest last. `ceilings_of`: what is known of the devices' limits;
    without it nothing is said of headroom. `across`: set different devices and thread counts side by side. `sentence`:
    the one at the top, if the caller knows a better one than the records suggest.
    """
    rows, subjects = summarize(records, ceilings_of), subjects_of(records)
    lines = with_search_ratios(lines_of(records, rows), tunes)
    curves = curves_of(lines)
    advice = recommend(curves, lines, {record.id: record.spec for record in records})
    joined = _row_by_record(lines) if tunes else {}
    if tunes:
        by_record = {record.id: subject for record, subject in zip(records, subjects, strict=True)}
        advice = with_winners(advice, tunes, by_record, joined, lines)
    told = list(notes)
    if profiles is None:
        profiles, gone = _profiles(records, ceilings_of)
        told += gone
    return Contents(
        title=title or _title(subjects),
        headline=sentence or headline(advice, lines),
        records=records,
        rows=rows,
        subjects=subjects,
        lines=lines,
        curves=curves,
        advice=advice,
        profiles=profiles,
        lanes=_lanes(profiles),
        notes=_first(told),
        searches=tunes,
        gain_paths=_gain_paths(tunes, list(joined.values())),
        rooflines=roofline_charts(lines, ceilings_of) if ceilings_of else [],
        across=across,
        memories=memories,
    )


def _row_by_record(lines: Sequence[Line]) -> dict[str, RunSummary]:
    """For each record the line it is part of: a search's winner has the speed that the tables say it has."""
    return {
        record.id: msgspec.structs.replace(line.row, record_id=record.id)
        for line in lines
        for record, _ in line.processes
    }


def _gain_paths(tunes: Sequence[TuneSummary], rows: Sequence[RunSummary]) -> list[GainPath]:
    """The longest first."""
    found = [path for tune in tunes if (path := gain_path_of(tune, rows)) is not None]
    return sorted(found, key=lambda path: -len(path.switches))


def _first(notes: Sequence[Note]) -> list[Note]:
    left = len(notes) - MOST_NOTES
    return list(notes) if left <= 0 else [*notes[:MOST_NOTES], note("more", f"and {left} more notes like these")]


def _title(subjects: Sequence[Subject]) -> str:
    """The models and devices, as far as a title can name them."""
    models = list(dict.fromkeys(subject.model for subject in subjects))
    devices = list(dict.fromkeys(subject.device for subject in subjects))
    parts = [_some(models, "models"), _some(devices, "devices")]
    return " on ".join(part for part in parts if part) or "nothing measured yet"


def _some(names: Sequence[str], what: str, most: int = 3) -> str:
    return ", ".join(names) if len(names) <= most else f"{len(names)} {what}"


def _profiles(records: Sequence[RunRecord], ceilings_of: CeilingsOf | None) -> tuple[list[Profile], list[Note]]:
    """Of the traces that are still where they were written; a report says which are missing."""
    found, gone = [], []
    for record in records:
        if record.trace is None or record.failure is not None:
            continue
        if not record.trace.path:
            text = f"no kernels of record {record.id}: its trace is not in the folder of this history"
            gone.append(note("trace-gone", text, about=record.id))
            continue
        path = Path(record.trace.path)
        try:
            if path.exists():
                known = ceilings_of(record) if ceilings_of else None
                found.append(profile_of([read_trace(path)], record, ceilings=known))
            else:
                text = f"no kernels of record {record.id}: its trace file is gone"
                gone.append(note("trace-gone", text, about=record.id))
        except TraceError as error:
            gone.append(note("unreadable", f"no kernels of record {record.id}: {error}", about=record.id))
    return found, gone


TIMELINES = 4
"""How many of the newest profiles are drawn step by step: each takes up to a megabyte of the page."""


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


METHOD = (
    "Every spec ran in its own process. Warm-up ended when two windows of steps agreed; timing stopped when the 95 % "
    "interval of the median was narrow enough, or the verdict says why it was not.",
    "Latency waits for the device after every step. Throughput and training run without waiting and are timed by device "
    "events; on a CPU the host clock serves both.",
    "Intervals are order statistics of the median, widened where samples depend on each other, and hold within one "
    "process: another process may sit a few percent apart.",
    "A ratio with an interval comes from blocks measured in turns, in random order. Records that merely followed each "
    "other are shown side by side and carry none.",
    "p95 needs 130 samples and p99 662; with fewer they are not told. Every recipe's answers were compared with strict "
    "fp32 on fixed inputs; one that is too far away is shown and never recommended.",
    "The knee is where throughput reaches 90 % of what larger batches near, by the fit t = a + c·b on batches that the "
    "device, not the host, limits; the smallest are left out where one line does not describe all.",
)


VERSIONS_FIRST = ("torch", "torchvision", "cuda", "hip", "cudnn", "triton")


class Machine(Frozen):
    device: str
    facts: tuple[tuple[str, str], ...]
    records: int


def machines_of(records: Sequence[RunRecord]) -> list[Machine]:
    counts: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
    for record in records:
        if record.prepared is not None:
            environment = record.prepared.environment
            machine = (environment.device.name or environment.device.kind, tuple(_facts(environment)))
            counts[machine] = counts.get(machine, 0) + 1
    return [Machine(device=device, facts=facts, records=count) for (device, facts), count in counts.items()]


def _facts(environment: Environment) -> list[tuple[str, str]]:
    device = environment.device
    limit = f", {device.power_limit_w:.0f} W" if device.power_limit_w else ""
    memory = format_bytes(device.memory_bytes) if device.memory_bytes else ""
    cores = f"{environment.logical_cores} logical cores" if environment.logical_cores else ""
    names = sorted(environment.versions, key=lambda name: (_rank(name), name))
    told = (
        ("device", f"{device.kind}, {memory}{limit}" if memory else f"{device.kind}{limit}"),
        ("driver", device.driver or ""),
        ("CPU", ", ".join(part for part in (environment.cpu, cores) if part)),
        ("threads", str(environment.threads) if environment.threads else ""),
        ("platform", environment.platform),
        ("Python", environment.python),
        ("versions", ", ".join(f"{name} {environment.versions[name]}" for name in names)),
        ("Redline", environment.redline),
        ("variables", ", ".join(_variables(environment))),
        ("code", _code(environment)),
    )
    return [(name, value) for name, value in told if value]


def _variables(environment: Environment) -> list[str]:
    """Without paths, which change no speed and may be private."""
    told = sorted(environment.variables.items())
    return [f"{name}={value}" for name, value in told if not name.endswith(("_DIR", "_PATH", "_HOME"))]


def _rank(name: str) -> int:
    return VERSIONS_FIRST.index(name) if name in VERSIONS_FIRST else len(VERSIONS_FIRST)


def _code(environment: Environment) -> str:
    if environment.git_commit is None:
        return ""
    return f"{environment.git_commit[:12]}{' with local changes' if environment.git_dirty else ''}"
