"""`redline show` and `redline export` over a history that is there already."""

from __future__ import annotations

import csv
from io import StringIO
from typing import Any

import pytest
from invoking import document, invoke
from reported import race_records

from redline.record import RunRecord
from redline.store import History


@pytest.fixture
def raced() -> list[RunRecord]:
    """Three recipes measured together."""
    records = race_records()
    with History.open() as history:
        for record in records:
            history.finish(record)
    return records


def test_the_ratio_of_a_record_is_the_same_wherever_it_is_told(raced: list[RunRecord]) -> None:
    wanted = raced[2].id
    (whole,) = [row for row in document(invoke("export", "--format", "json"))["results"] if row["record_id"] == wanted]
    ratio: dict[str, Any] = whole["vs_first"]
    assert ratio["recipe"] == "baseline"
    assert f"{ratio['ratio']:.2f}×" in invoke("show", wanted).stdout
    for told in (document(invoke("show", wanted, "--json")), document(invoke("export", wanted, "--format", "json"))):
        assert [row["record_id"] for row in told["results"]] == [wanted], "and of nothing else"
        assert told["results"][0]["vs_first"] == ratio
    (row,) = csv.DictReader(StringIO(invoke("export", wanted).stdout))
    assert float(row["ratio"]) == ratio["ratio"]
    two = document(invoke("export", wanted, raced[1].id, "--format", "json"))["results"]
    assert [row["record_id"] for row in two] == [wanted, raced[1].id]
    assert two[0]["vs_first"] == ratio


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ("0", "limit must be 1 or more, got 0"),
        ("-3", "limit must be 1 or more, got -3"),
        ("99999999999999999999", "limit must be 1000000 or less"),
    ],
)
def test_a_limit_out_of_range_is_a_mistake(raced: list[RunRecord], limit: str, says: str) -> None:
    result = invoke("show", "--limit", limit)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
