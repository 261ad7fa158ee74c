"""One line for all that measured the same."""

from __future__ import annotations

from reported import race_records

from redline.model.record import RunRecord
from redline.show.contents import contents_of


def ratios_of(records: list[RunRecord]) -> dict[str, str | None]:
    """What each recipe's ratio is against."""
    lines = contents_of(records).lines
    return {line.row.recipe: line.row.vs_first.recipe if line.row.vs_first else None for line in lines}


def test_one_table_has_one_measure_and_that_is_the_baseline() -> None:
    """However many recipes an ablation sets against the winner."""
    ablation = race_records(("fp16+compile", "fp16", "channels-last", "bf16"))
    told = ratios_of([*ablation, *race_records(("baseline", "fp16+compile"))])
    assert told == {"baseline": None, "fp16+compile": "baseline", "fp16": None, "channels-last": None, "bf16": None}


def test_without_a_baseline_it_is_what_most_are_against() -> None:
    told = ratios_of([*race_records(("fp16", "channels-last", "bf16")), *race_records(("bf16", "fp16+compile"))])
    assert told["channels-last"] == "fp16"
    assert told["fp16+compile"] is None
