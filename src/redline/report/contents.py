"""What a report is about: records, and everything derived from them that more than one of its files shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from redline.analyze.curves import Curve, curves_of
from redline.analyze.headroom import Headroom
from redline.analyze.profile import Profile, profile_of
from redline.analyze.recommend import Advice, headline, recommend
from redline.analyze.subject import Subject, subjects_of
from redline.analyze.summary import CeilingsOf, RunSummary, first_of_each_group, summarize
from redline.analyze.tune.advice import with_winners
from redline.analyze.tune.finding import TuneFinding
from redline.analyze.tune.headroom import headroom_of
from redline.errors import TraceError
from redline.record import RunRecord
from redline.report.roofline_chart import RooflineChart, roofline_charts

MOST_NOTES = 8
"""A history full of damaged records is told of in a few lines."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    title: str
    headline: str
    """The finding, in one sentence."""
    records: Sequence[RunRecord]
    rows: Sequence[RunSummary]
    """One per record, in their order, as are the subjects."""
    subjects: Sequence[Subject]
    curves: Sequence[Curve]
    advice: Sequence[Advice]
    profiles: Sequence[Profile]
    notes: Sequence[str]
    """What the reader must know about the report itself: records that could not be read, traces that are gone."""
    headrooms: Sequence[Headroom]
    """The ways to the fastest recipes, where someone looked for them; the best known first."""
    rooflines: Sequence[RooflineChart]


def contents_of(
    records: Sequence[RunRecord],
    *,
    title: str = "",
    finding: str = "",
    notes: Sequence[str] = (),
    profiles: Sequence[Profile] | None = None,
    tunes: Sequence[TuneFinding] = (),
    ceilings_of: CeilingsOf | None = None,
) -> Contents:
    """`profiles`: those that are already there; None reads the traces that the records name.

    `tunes`: the searches that records were made for, newest last. `ceilings_of`: what is known of the devices' limits;
    without it nothing is said of headroom. `finding`: the sentence at the top, where whoever asks knows a better one
    than the records alone suggest.
    """
    rows, subjects = summarize(records, ceilings_of), subjects_of(records)
    curves = curves_of(records, rows)
    firsts = {group: record.id for group, record in first_of_each_group(records).items()}
    specs = {record.id: record.spec for record in records}
    advice = recommend(curves, rows, subjects, firsts, specs)
    if tunes:
        by_record = {record.id: subject for record, subject in zip(records, subjects, strict=True)}
        advice = with_winners(advice, tunes, by_record, {row.record_id: row for row in rows})
    told = list(notes)
    if profiles is None:
        profiles, gone = _profiles(records, ceilings_of)
        told += gone
    return Contents(
        title=title or _title(subjects),
        headline=finding or headline(advice, rows),
        records=records,
        rows=rows,
        subjects=subjects,
        curves=curves,
        advice=advice,
        profiles=profiles,
        notes=_first(told),
        headrooms=sorted(
            [found for tune in tunes if (found := headroom_of(tune, rows)) is not None],
            key=lambda headroom: -len(headroom.steps),
        ),
        rooflines=roofline_charts(records, rows, ceilings_of) if ceilings_of else [],
    )


def _first(notes: Sequence[str]) -> list[str]:
    left = len(notes) - MOST_NOTES
    return list(notes) if left <= 0 else [*notes[:MOST_NOTES], f"and {left} more notes like these"]


def _title(subjects: Sequence[Subject]) -> str:
    """The models and devices, as far as a title can name them."""
    models = list(dict.fromkeys(subject.model for subject in subjects))
    devices = list(dict.fromkeys(subject.device for subject in subjects))
    parts = [_some(models, "models"), _some(devices, "devices")]
    return " on ".join(part for part in parts if part) or "nothing measured yet"


def _some(names: Sequence[str], what: str, most: int = 3) -> str:
    return ", ".join(names) if len(names) <= most else f"{len(names)} {what}"


def _profiles(records: Sequence[RunRecord], ceilings_of: CeilingsOf | None) -> tuple[list[Profile], list[str]]:
    """Of the traces that still lie where they were written; a report goes without the others and says so."""
    from redline.trace.decode import read_trace

    found, gone = [], []
    for record in records:
        if record.trace is None or record.failure is not None:
            continue
        path = Path(record.trace.path)
        try:
            if path.exists():
                known = ceilings_of(record) if ceilings_of else None
                found.append(profile_of([read_trace(path)], record, ceilings=known))
            else:
                gone.append(f"no kernels of record {record.id}: its trace is not here any more")
        except TraceError as error:
            gone.append(f"no kernels of record {record.id}: {error}")
    return found, gone
