"""Cells that several tables have: how far off, what limits it, whether to believe it."""

from __future__ import annotations

from rich.text import Text

from redline.analyze.accuracy import error_text
from redline.analyze.summary import RunSummary
from redline.analyze.trust import SPREAD
from redline.record import Numerics

TRUST_STYLE = {"valid": "green", "invalid": "red"}


def error_cell(numerics: Numerics | None, *, with_steps: bool = False) -> Text:
    told = error_text(numerics, with_steps=with_steps)
    dim = numerics is None or not numerics.is_compared
    return Text(told, style="red" if told.endswith("✗") else "dim" if dim else "")


def bound_word(row: RunSummary) -> str:
    if row.bound.label != "unknown":
        return row.bound.label
    return "not host" if "not the host" in row.bound.evidence else "unknown"


def bound_cell(row: RunSummary) -> Text:
    if row.bound.label != "unknown":
        return Text(row.bound.label, style="yellow" if row.bound.label == "host" else "")
    return Text(bound_word(row), style="dim")


def trust_cell(row: RunSummary) -> Text:
    told = ", ".join(row.verdict.labels)
    if row.verdict.labels == ("noisy",) and all(reason.startswith("latency:") for reason in row.verdict.reasons):
        told = "noisy (latency)"  # the throughput beside it is sound
    if row.verdict.trusted and any(SPREAD in note for note in row.verdict.notes):
        told = "valid, noted"  # how wide it scatters stands below the table
    return Text(told, style=TRUST_STYLE.get(row.verdict.labels[0], "yellow"))
