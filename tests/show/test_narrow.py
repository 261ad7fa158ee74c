"""Tables of a run on narrow terminals: fewer columns, never a number cut off or a recipe that nobody can read."""

from __future__ import annotations

import io
import re

import pytest
from reported import race_records, sweep_records
from rich.console import Console, RenderableType

from redline.model.record import RunRecord
from redline.show.result import Result, terminal
from redline.store import History
from redline.verbs.history import show
from redline.verbs.run import Measured, result_of

RECIPES = ("baseline", "fp16+channels-last+compile:reduce-overhead", "amp+channels-last")
RECORDS = race_records(RECIPES)


def found(records: list[RunRecord]) -> Result:
    return result_of(Measured(records=records))


def lines_of(report: RenderableType, width: int) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width, highlight=False).print(report)
    return text.getvalue().splitlines()


def headers_of(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("recipe")]


@pytest.mark.parametrize("width", [160, 100, 80, 70, 60, 50])
def test_what_matters_stays_readable_in_any_width(width: int) -> None:
    lines = lines_of(terminal(found(RECORDS)), width)
    assert all(len(line) <= width for line in lines)
    (header,) = headers_of(lines)
    assert re.match(r"recipe {8,}img/s", header)
    assert ("vs baseline" in header) == (width >= 60)
    assert len(header.split("   ")) <= 40
    assert not any("…" in line for line in lines)
    left_out = "not shown at this width: " in " ".join(lines)
    assert left_out == (width < 100), "what is left out is named"


@pytest.mark.parametrize("width", [50, 80, 160])
def test_verbose_leaves_nothing_out_in_any_width(width: int) -> None:
    """Columns that do not fit stand in further tables, each with what tells the rows apart."""
    result = found(RECORDS)
    text = "\n".join(lines_of(terminal(result, verbose=True), width))
    assert "not shown" not in text
    table = result.tables[0]
    for name in table.names:
        assert re.search(rf"(^|   ){re.escape(table.header(name))}( |$)", text, re.M), name
    assert text.count("\nrecipe") == text.count("\nbaseline ") >= 2


def test_models_and_batches_stand_in_front_where_they_differ() -> None:
    records = [*sweep_records(model=["resnet50"]), *sweep_records(model=["vit_b_16"], recipe=["bf16"])]
    lines = lines_of(terminal(found(records)), 80)
    header = next(line for line in lines if line.startswith("model"))
    assert re.match(r"model +recipe +batch +img/s +trust", header)
    assert sum("✗" in line for line in lines if line.startswith("vit_b_16")) == 3, "wrong outputs are marked here too"


@pytest.mark.parametrize("width", [110, 90, 75])
def test_the_list_of_records_keeps_the_speed_longer_than_most(width: int) -> None:
    with History.open() as history:
        for record in RECORDS:
            history.finish(record)
    header = lines_of(terminal(show()), width)[0]
    assert all(name in header for name in ("record", "model", "recipe", "img/s"))
    assert "conditions" not in header


def test_all_about_one_record_cuts_nothing() -> None:
    with History.open() as history:
        for record in RECORDS:
            history.finish(record)
    lines = lines_of(terminal(show(RECORDS[1].id)), 80)
    (header,) = (line for line in lines if line.startswith("recipe"))
    for name in ("recipe", "img/s", "vs baseline", "trust"):
        assert name in header
    assert not any("…" in line for line in lines[:6])
