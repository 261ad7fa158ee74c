"""The table of the dashboard, column by column: what `results.csv` has, and what only the charts want to know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from redline.analyze.subject import is_capture
from redline.analyze.summary import RunSummary
from redline.report.contents import Contents
from redline.report.export import COLUMNS, iso_8601

DIGITS = 6
"""Of numbers in the page; `results.csv` and `results.json` have all of them."""

EXTRA_COLUMNS = (
    "subject",
    "place",
    "setting",
    "kind",
    "item",
    "when",
    "latency_low_s",
    "latency_high_s",
    "start_s",
    "energy_per_item_j",
    "numerics_state",
    "numerics_reason",
    "trust_reasons",
    "bound_evidence",
    "first_recipe",
    "group",
)


def columns_of(contents: Contents) -> dict[str, Any]:
    """Each column as a list, or as a list of distinct texts with an index per row; columns without a value are left out."""
    table: dict[str, list[Any]] = {name: [] for name in (*COLUMNS, *EXTRA_COLUMNS)}
    for number, row in enumerate(contents.rows):
        plain = _plain(contents, number, row)
        for name, column in COLUMNS.items():
            table[name].append(column(plain))
        for name, value in _extra(contents, number, row).items():
            table[name].append(value)
    return {name: _packed(values) for name, values in table.items() if any(value is not None for value in values)}


def _plain(contents: Contents, number: int, row: RunSummary) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(row)
    return {**plain, "created_at": iso_8601(contents.records[number].created_at)}


def _extra(contents: Contents, number: int, row: RunSummary) -> dict[str, Any]:
    record, subject = contents.records[number], contents.subjects[number]
    latency, cold = row.latency_s, row.cold_start_s
    return {
        "subject": str(subject),
        # A failed run never told its device's name; its siblings did.
        "place": subject.device,
        "setting": subject.setting or None,
        "kind": "profile" if is_capture(record) else "run",
        "item": row.item,
        "when": record.created_at,
        "latency_low_s": latency.low if latency else None,
        "latency_high_s": latency.high if latency else None,
        "start_s": cold.start if cold else None,
        "energy_per_item_j": row.energy_per_item_j,
        "numerics_state": _numerics_state(row),
        "numerics_reason": row.numerics.reason or None if row.numerics else None,
        "trust_reasons": "; ".join((*row.verdict.reasons, *row.verdict.notes)) or None,
        "bound_evidence": row.bound.evidence,
        "first_recipe": row.vs_first.recipe if row.vs_first else None,
        "group": row.group,
    }


def _numerics_state(row: RunSummary) -> str | None:
    numerics = row.numerics
    if numerics is None:
        return None
    if not numerics.is_compared:
        return numerics.method
    return "passed" if numerics.passed else "failed"


def _packed(values: Sequence[Any]) -> Any:
    if any(isinstance(value, str) for value in values):
        texts = list(dict.fromkeys(value for value in values if value is not None))
        place = {text: number for number, text in enumerate(texts)}
        return {"texts": texts, "at": [None if value is None else place[value] for value in values]}
    return [short(value) for value in values]


def short(value: Any, digits: int = DIGITS) -> Any:
    """A number with few digits; what is not finite is unknown."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value
