"""Random measurements through every printer: the same values everywhere, and no sentence that the rows beside it refute."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reported import CEILINGS, fake_door, race_records, sweep_records
from rich.console import Console

from redline.analyze.rows import FIGURES
from redline.model.metrics import WIDEST, Figure, Metric
from redline.model.record import Numerics
from redline.model.spec import RunSpec
from redline.model.units import THIN_SPACE
from redline.show.result import Result, columns_of, comma_separated, markdown, terminal, web
from redline.show.terminal import as_text
from redline.testing.fake import FakeDoor
from redline.verbs.run import Measured, result_of

RECIPES = ("baseline", "fp16", "bf16", "channels-last")
INTERVAL = re.compile(r"\((\d+\.?\d*)–(\d+\.?\d*)\)")


def door(times: dict[str, float], wrong: str, noise: float, stalls: float) -> FakeDoor:
    def numerics(spec: RunSpec) -> Numerics:
        return Numerics(rel_error=1e-3, rel_l2=2e-3, tolerance=4e-3, passed=str(spec.recipe) != wrong)

    def step_s(spec: RunSpec) -> float:
        return times[str(spec.recipe)] * (1 + 0.1 * (spec.workload.batch or 1))

    return fake_door(step_s=step_s, numerics=numerics, noise_sigma=noise, tail_share=stalls)


CASES = st.fixed_dictionaries(
    {
        "times": st.lists(st.floats(1e-4, 0.05), min_size=4, max_size=4),
        "near": st.none() | st.floats(0.94, 1.06),
        "wrong": st.sampled_from(RECIPES[1:]),
        "noise": st.sampled_from([0.0, 0.02, 0.5, 1.5]),
        "stalls": st.sampled_from([0.0, 0.3]),
        "recipes": st.integers(1, 4),
        "processes": st.integers(0, 3),
        "price": st.sampled_from([None, "2.50/h"]),
    }
)
"""A race of several recipes over one process or several, or (with none) a grid of batches; quiet or disturbed."""


def built(case: dict[str, Any]) -> Result:
    times = dict(zip(RECIPES, case["times"], strict=True))
    if case["near"] is not None:
        times["fp16"] = times["baseline"] * case["near"]  # around the band of what matters
    bench, recipes = door(times, case["wrong"], case["noise"], case["stalls"]), RECIPES[: case["recipes"]]
    records = [record for _ in range(case["processes"]) for record in race_records(recipes, bench)]
    records = records or sweep_records(bench, recipe=list(recipes), batches=[1, 8])
    return result_of(Measured(records=records), lambda _: CEILINGS, price=case["price"])


class Cells(HTMLParser):
    """The texts of a page's table cells, row by row; a row that stands alone is a list of names and values."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._is_in = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.rows += [[]] if tag in ("tr", "dl") else []
        self._is_in = tag in ("td", "dd")
        if self._is_in:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_in = False

    def handle_data(self, data: str) -> None:
        if self._is_in:
            self.rows[-1][-1] += data


def plain(text: str) -> str:
    return re.sub(r"&#\d+;", lambda found: chr(int(found[0][2:-1])), text.replace("\\", ""))


QUICK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@QUICK
@given(CASES)
def test_every_printer_carries_the_same_values(case: dict[str, Any]) -> None:
    found = built(case)
    table = found.tables[0]
    document = json.loads(found.to_json())["tables"]["results"]
    lines = list(csv.DictReader(comma_separated(table).splitlines()))
    page = [cells for cells in Cells(web(found)).rows if len(cells) == len(table.names)]
    marked = [line for line in markdown(found).splitlines() if line.startswith("| ")][2:]
    wide = io.StringIO()
    Console(file=wide, width=4000).print(terminal(found, verbose=True))
    text = wide.getvalue()
    columns = columns_of(table)
    for number, row in enumerate(table.rows):
        cells = [row.cell(name) for name in table.names]
        assert page[number] == cells
        assert [plain(cell.strip()) for cell in marked[number].strip("|").split(" | ")] == [" ".join(cell.split(" ")) for cell in cells]  # fmt: skip
        assert all(cell in text for cell in cells)
        for metric in row.metrics:
            told = document[number][metric.name]
            assert (told["value"], told.get("low"), told.get("high")) == (metric.value, metric.low, metric.high)
            assert float(lines[number][metric.name]) == metric.value == columns[metric.name][number]
            assert ("doubt" in told) == (metric.doubt is not None)


@QUICK
@given(CASES)
def test_ratios_agree_with_the_speeds_beside_them(case: dict[str, Any]) -> None:
    found = built(case)
    firsts = {(row["batch"], row["recipe"]): row for row in found if "ratio" not in row}
    for row in found:
        if (ratio := row.metric("ratio")) is None:
            continue
        first = firsts[row["batch"], row["compared_with"]]
        assert row.value("throughput") / first.value("throughput") == pytest.approx(ratio.value, rel=1e-6)
        shown = [number_of(each["throughput"]) for each in (row, first)]
        assert ratio.low is None or ratio.low <= ratio.value <= ratio.high  # type: ignore[operator]
        if None not in shown and not ratio.is_too_noisy:
            printed = float(re.findall(r"[\d.]+", str(ratio))[0])
            assert shown[0] / shown[1] == pytest.approx(printed, rel=0.011, abs=0.006)  # type: ignore[operator]


def number_of(metric: Any) -> float | None:
    """What is printed of a speed."""
    assert isinstance(metric, Metric)
    return None if metric.is_too_noisy else float(str(metric).replace(THIN_SPACE, "").lstrip("~"))


@QUICK
@given(CASES)
def test_no_number_is_printed_that_nobody_can_use(case: dict[str, Any]) -> None:
    found = built(case)
    for text in (as_text(terminal(found, verbose=True)), as_text(terminal(found)), markdown(found), web(found)):
        for low, high in INTERVAL.findall(plain(text)):
            assert float(high) <= WIDEST * float(low) + 0.05
    for row in found:
        for metric in row.metrics:
            assert ("too noisy" in str(metric)) == metric.is_too_noisy


@QUICK
@given(CASES)
def test_the_headline_holds_over_all_rows(case: dict[str, Any]) -> None:
    found = built(case)
    told, figures = found.headline.template, found.headline.figures
    rows = [row for row in found if not row.failure]
    sound = [row for row in rows if row.get("verdict") == "faster" and row.get("numerics") == "passed"]
    if "{ratio} as fast as" in told and "but" not in told:
        (best,) = [row for row in rows if row.get("ratio") == figures["ratio"]]
        assert best in sound
        assert all(row.value("ratio") <= best.value("ratio") for row in sound)
        batches = {row["batch"] for row in rows}
        assert (f"batch {best['batch']}" in str(found.headline)) == (len(batches) > 1), (
            "conditions that differ are named"
        )
    else:
        assert not sound, "a recipe that is proven faster is the answer"
    if "No recipe here is faster" in told:
        assert not [row for row in rows if row.get("verdict") in ("faster", "undecided") and row.get("numerics") == "passed"]  # fmt: skip
    if "highest throughput" in told:
        assert figures["speed"].value == max(row.value("throughput") for row in rows)  # type: ignore[union-attr]


def test_a_new_figure_is_one_line_and_stands_in_every_output(monkeypatch: pytest.MonkeyPatch) -> None:
    added = Figure(name="samples_dropped", doc="Steps that are not counted.")
    monkeypatch.setattr("redline.analyze.rows.FIGURES", (*FIGURES, (added, "latency_s.n")))
    found = result_of(Measured(records=race_records()))
    assert found[0].value("samples_dropped") == found[0].value("samples") > 0
    assert "samples_dropped" in comma_separated(found.tables[0]).splitlines()[0]
    assert "samples_dropped" in found.to_json()
    for text in (as_text(terminal(found, verbose=True)), markdown(found), web(found)):
        assert "samples dropped" in text
