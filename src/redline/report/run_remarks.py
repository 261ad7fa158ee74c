"""What stands below the table of a run: what to know about single rows, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from redline.analyze.summary import RunSummary
from redline.analyze.trust import IN_COMPANY, SPREAD
from redline.record import QUANTIZED_FORMATS

APART = 1.05
"""Two ways to the same ratio differ by this factor on a machine that keeps its pace, and not by more."""


def remarks(rows: Sequence[RunSummary]) -> list[Text]:
    """Why rows failed, why numbers are not to be trusted, why numerics did not pass."""
    told = []
    for row in rows:
        if row.failure:
            about = "" if row.failure.message.startswith(f"{row.recipe}:") else f"{row.recipe}: "
            told.append(Text(f"  {about}{row.failure.message}", style="red"))
            continue
        if not row.verdict.trusted:
            told += [Text(f"  {row.recipe}: {reason}", style="yellow") for reason in row.verdict.reasons]
        if row.numerics and row.numerics.is_wrong:
            told.append(Text(f"  {row.recipe}: numerics: {row.numerics.reason}", style="red"))
        elif _is_quantized(row):
            told.append(
                Text(f"  {row.recipe}: quantized: only a check on your own data tells whether the model bears it")
            )
        told += _contradiction(row, rows)
        told += [
            Text(f"  {row.recipe}: {note}", style="dim")
            for note in row.verdict.notes
            if "without a ratio" in note or note.startswith(IN_COMPANY) or (row.verdict.trusted and SPREAD in note)
        ]
    return told


def _contradiction(row: RunSummary, rows: Sequence[RunSummary]) -> list[Text]:
    """Ratios compare rounds, the column beside them pools all: where the pace changes in between they say two things."""
    versus = row.vs_first
    first = next((each for each in rows if versus is not None and each.recipe == versus.recipe), None)
    if versus is None or versus.low is None or versus.high is None or first is None:
        return []
    if row.throughput_per_s is None or not first.throughput_per_s:
        return []
    pooled = row.throughput_per_s / first.throughput_per_s
    if versus.low / APART <= pooled <= versus.high * APART:
        return []
    said = f"{pooled:.2f}× by its speed in all, {versus.ratio:.2f}× in turns"
    return [Text(f"  {row.recipe}: {said}: the machine changed pace between rounds, rely on neither", style="yellow")]


def next_step(rows: Sequence[RunSummary]) -> str:
    measured = [row for row in rows if row.failure is None]
    if not measured:
        return "next: nothing could be measured; 'redline doctor' looks at the machine, 'redline show ID' tells the whole error"
    best = max(
        (row for row in measured if row.vs_first and (row.vs_first.low or 0) > 1 and _may_be_recommended(row)),
        key=lambda row: row.vs_first.ratio if row.vs_first else 0.0,
        default=None,
    )
    if best and best.vs_first:
        told = f"next: {best.recipe} is the fastest here that keeps the numbers right ({best.vs_first.ratio:.2f}×)"
        if any(reason.startswith("throughput:") for reason in best.verdict.reasons):
            told += ", but its times are noisy: look again on a quieter machine or with a larger batch"
        return (
            f"{told}; it is host-bound: a CUDA graph (graphs) takes Python out of the way"
            if (best.bound.label == "host")
            else f"{told}; 'redline show {best.record_id[:13]}' tells all about it"
        )
    host = next((row for row in measured if row.bound.label == "host"), None)
    if host:
        return f"next: {host.recipe} is host-bound: try it with +graphs, or a larger batch"
    if not any(row.vs_first for row in measured):
        return "next: set it against other recipes, e.g. -r baseline -r channels-last -r channels-last+compile"
    if any(row.vs_first and (row.vs_first.low or 0) > 1 and _is_quantized(row) for row in measured):
        return "next: only quantized recipes are faster than the first here; check them on your own data, or try others"
    return "next: no recipe here is faster than the first; try others ('redline run --help' lists the steps)"


def _may_be_recommended(row: RunSummary) -> bool:
    return row.numerics is not None and row.numerics.passed and not _is_quantized(row)


def _is_quantized(row: RunSummary) -> bool:
    return row.numerics is not None and row.numerics.number_format in QUANTIZED_FORMATS
