"""The contradictions that a new user once saw, one test each: what is printed in any form follows from the figures beside it.

`tests/show/test_printers.py` asks the same of random results.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from by_hand import make_block, make_record
from reported import ceilings_of, fake_door, race_records, sweep_records
from rich.console import Console

import redline
from redline.analyze.compare import compare_records
from redline.analyze.gate import GateRow
from redline.analyze.pairs import TIME_BAND
from redline.model.metrics import DOUBTED, WIDEST, Row
from redline.model.protocol import SwitchChoice
from redline.model.record import Numerics, RunRecord
from redline.model.spec import RunSpec
from redline.model.units import THIN_SPACE
from redline.show.contents import contents_of
from redline.show.dashboard import answers_of
from redline.show.result import Result, comma_separated, markdown, terminal, web
from redline.store import History
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.compare import result_of as compared
from redline.verbs.gate import result_of as gated
from redline.verbs.run import Measured, result_of
from redline.verbs.workshop import checklist_of
from redline.verbs.workspace import Workspace

NUMBER = re.compile(r"[-+]?\d[\d.]*")


def read_forms(result: Result) -> dict[str, str]:
    """What people read, as one line of text for each printer."""
    wide = io.StringIO()
    Console(file=wide, width=4000).print(terminal(result, verbose=True))
    texts = {"terminal": wide.getvalue(), "Markdown": markdown(result).replace("\\", ""), "HTML": web(result)}
    return {form: html.unescape(text).replace(THIN_SPACE, "") for form, text in texts.items()}


def rows_of(result: Result, table: str = "") -> Iterator[tuple[Row, dict[str, Any], dict[str, str]]]:
    """Each row of a table with what JSON and CSV have of it; it stands whole in every form that people read."""
    shown = result.table(table) if table else result.tables[0]
    documents = json.loads(result.to_json())["tables"][shown.name]
    lines = list(csv.DictReader(comma_separated(shown).splitlines()))
    texts = read_forms(result)
    for row, document, line in zip(shown.rows, documents, lines, strict=True):
        for metric in row.metrics:
            raw = line[metric.name]
            assert (float(raw) if raw else None) == document[metric.name]["value"] == metric.value
            cell = str(metric).replace(THIN_SPACE, "")
            assert all(cell in text for text in texts.values()), (metric.name, cell)
        yield row, document, line


def number_in(cell: str) -> float:
    """The first number of a cell, without its unit."""
    return float(NUMBER.findall(cell.replace(THIN_SPACE, "").lstrip(DOUBTED))[0])


def drifting(recipe: str, steps_s: list[float], position: int) -> RunRecord:
    blocks = tuple(make_block(step_s, round=number, seed=number) for number, step_s in enumerate(steps_s))
    return make_record(recipe, id=recipe, group="g", position=position, blocks=blocks)


@pytest.mark.parametrize("pace", [1.0, 3.0, 10.0])
def test_the_speeds_of_two_rows_are_as_far_apart_as_the_ratio_beside_them(pace: float) -> None:
    """The machine changed its pace while the first alone was timed."""
    first = drifting("baseline", [0.010] * 8 + [0.010 * pace] * 9, 0)
    other = drifting("fp16", [0.005] * 8, 1)
    result = result_of(Measured(records=[first, other]))
    (before, _, _), (after, _, _) = rows_of(result)
    ratio = after.metric("ratio")
    assert ratio is not None
    speeds = [number_in(row.cell("throughput")) for row in (before, after) if row.cell("throughput") != "too noisy"]
    assert len(speeds) < 2 or speeds[1] / speeds[0] == pytest.approx(number_in(str(ratio)), rel=0.01)
    assert after.value("throughput") / before.value("throughput") == pytest.approx(ratio.value)
    assert number_in(str(ratio)) == pytest.approx(2.0, rel=0.02), "and it is that of the rounds that both have"


@pytest.mark.parametrize("sigma", [0.001, 0.3, 0.8])
@pytest.mark.parametrize("speed", [1.0, 2.11, 9.0])
def test_a_comparison_says_what_its_interval_its_times_and_its_picture_say(speed: float, sigma: float) -> None:
    """An interval that excludes the band decides, however noisy a side is; one that includes it does not."""
    sides = [
        make_record(recipe, id=recipe, group="g", position=at, stopped="ceiling",
                    blocks=tuple(make_block(step_s, round=number, seed=100 * at + number, sigma=sigma) for number in range(12)))
        for at, (recipe, step_s) in enumerate((("baseline", 0.171), ("fp16", 0.171 / speed)))
    ]  # fmt: skip
    result = compared(compare_records(sides[:1], sides[1:]), "a", "b", (sides[:1], sides[1:]))
    ((row, document, _),) = rows_of(result, "benchmarks")
    low, high = document["ratio"]["low"], document["ratio"]["high"]
    wanted = "faster" if low > 1 + TIME_BAND else "slower" if high < 1 / (1 + TIME_BAND) else None
    assert row["verdict"] == (wanted or row["verdict"])
    assert wanted or row["verdict"] in ("same", "inconclusive")
    assert f"verdict of B: {row['verdict']}" in str(result.headline)
    if "first" in row:
        assert number_in(row.cell("first")) / number_in(row.cell("other")) == pytest.approx(
            document["ratio"]["value"], rel=0.01
        )
    ours, theirs = (line.get_xdata() for line in result.plot().axes[0].lines)
    assert ours[50] / theirs[50] == pytest.approx(document["ratio"]["value"], rel=0.05 + sigma)


def test_a_headline_names_the_conditions_in_which_rows_differ_and_holds_over_all_of_them() -> None:
    """Seen: "Stay with baseline" beside "runs 2.38×", of one thread and of two; a "lowest latency" with lower ones beside it."""
    records = [
        *race_records(("baseline", "fp16"), device="cpu", threads=1),
        *race_records(("baseline", "fp16"), fake_door(step_s=lambda spec: 0.01), device="cpu", threads=2),
    ]
    result = result_of(Measured(records=records))
    faster = [row for row, _, _ in rows_of(result) if row.get("verdict") == "faster"]
    (best,) = faster
    assert str(result.headline).startswith(f"fp16 is {best['ratio']} as fast as baseline (threads 1)")
    contents = contents_of(records, ceilings_of=ceilings_of)
    for section in contents.sections:
        assert "thread" in str(section.subject), "a card of the dashboard carries them too"
    assert contents.headline.startswith(str(contents.sections[0].subject))
    told = {answer.title: answer.switch_on for answer in answers_of(contents)}
    assert {"1 thread" in title: "fp16" in words for title, words in told.items()} == {True: True, False: False}
    grid = result_of(Measured(records=sweep_records(recipe="baseline", batches=[1, 8, 64])))
    speeds = [row.value("throughput") for row, _, _ in rows_of(grid)]
    assert grid.headline is not None
    assert grid.headline.figures["speed"].value == max(speeds)  # type: ignore[union-attr]


CHOICES = tuple(SwitchChoice(switch=name, family=name) for name in ("fp16", "channels-last", "compile"))


@pytest.mark.parametrize(("gain", "noise"), [(0.4, 0.005), (1.0, 0.005), (0.9, 0.4)])
def test_the_answer_of_a_search_follows_from_its_ranking(gain: float, noise: float) -> None:
    """Seen: "nothing surely is faster" above "5.37× … faster", and "there was no time" beside "53 s left"."""
    door = fake_door(
        choices=CHOICES, noise_sigma=noise, step_s=lambda spec: 0.01 * (gain if "fp16" in str(spec.recipe) else 1.0)
    )
    with Workspace(door=door, history="sqlite://") as workspace:
        found = redline.tune(
            "resnet50", batch=32, device="cuda:0", budget="10m", clock=lambda: door.clock_s, workspace=workspace
        )
    ranking = [row for row, _, _ in rows_of(found, "ranking")]
    rejected = {row["recipe"] for row in found.table("rejected").rows}
    proven = [row for row in ranking if row["verdict"] in ("faster", "winner") and row["recipe"] not in rejected]
    told = str(found.headline)
    assert ("winner" in told.split(":")[0] and "no winner" not in told) == bool(proven)
    if proven:
        winner = next(row for row in ranking if row["verdict"] == "winner")
        assert str(winner["vs_baseline"]) in told
    left_s = 600.0 - float(str(found.about["seconds"]))
    assert left_s <= 0 or "no time" not in told


def test_what_a_search_has_proved_the_checklist_knows() -> None:
    with (
        History.open("sqlite://") as history,
        Workspace(door=fake_door(choices=CHOICES[:1]), history=history) as workspace,
    ):
        found = redline.tune("resnet50", batch=32, budget="10m", workspace=workspace)
        steps = checklist_of("resnet50", workspace)
    assert found.winner is not None
    (done,) = [text for text in re.split(r"[\n|<>]", str(steps)) if "a recipe is faster" in text]
    assert "[x]" in done
    assert all("[x] a recipe is faster" in text for text in read_forms(steps).values())


@pytest.mark.parametrize("ratio", [0.468, 0.9, 1.0, 2.0])
def test_the_percentage_of_a_gate_is_that_of_the_figures_beside_it(ratio: float) -> None:
    """Seen: 618 µs to 1.32 ms printed as +133 %."""
    row = GateRow(
        name="fast", verdict="slower", threshold=0.05, basis="interleaved", ratio=ratio, low=ratio * 0.98,
        high=ratio * 1.02, baseline_s=618e-6, candidate_s=618e-6 / ratio, baseline_processes=5, candidate_processes=5,
    )  # fmt: skip
    ((made, document, _),) = rows_of(gated([row], "main"), "benchmarks")
    before, now = document["baseline"]["value"], document["now"]["value"]
    assert document["change"]["value"] == pytest.approx(now / before - 1, abs=1e-9)
    assert number_in(made.cell("change")) == pytest.approx(100 * (now / before - 1), abs=0.06)


@pytest.mark.parametrize("step_s", [0.002, 0.02, 0.3])
def test_the_verdict_on_a_rate_follows_from_its_row(step_s: float) -> None:
    """Seen: rate 476, done 488, p99 37 ms of 50: "falls behind"; and "sustains 283" next to "knee 519"."""
    door = FakeDoor(Landscape(step_s=lambda spec: step_s * (1 + 0.1 * (spec.workload.batch or 1)), noise_sigma=0.1))
    with Workspace(door=door, history="sqlite://") as workspace:
        result = redline.load("resnet18", rate="20..320", max_batch=8, slo_p99="50ms", workspace=workspace)
    sustained = []
    for row, document, _ in rows_of(result, "rates"):
        behind = bool(row.value("unfinished")) or row.value("achieved_rate") < 0.97 * row.value("offered_rate")
        above = (row.value("latency_p99") or row.value("largest")) > 0.050
        wanted = ("falls behind",) if behind else ("above the target",) if above else ("kept", "sustained")
        assert document["verdict"] in wanted
        sustained += [row.value("rate")] if row["verdict"] == "sustained" else []
    (answer, _, _) = next(rows_of(result, "recipes"))
    assert [answer.value("sustainable_rate")] == (sustained or [0.0])
    assert not sustained or f"{answer['sustainable_rate']} req/s" in str(result.headline)


@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_a_number_that_nobody_can_use_is_printed_by_nobody(sigma: float) -> None:
    """Seen: ±2626 %, 0.06–>100. CSV and JSON keep the raw values, with the doubt."""
    result = result_of(Measured(records=race_records(door=fake_door(noise_sigma=sigma))))
    for row, document, line in rows_of(result):
        for metric in row.metrics:
            spans = metric.low is not None and metric.high is not None and metric.unit not in ("share", "change", "")
            is_wide = spans and metric.low != metric.high and (metric.low <= 0 or metric.high > WIDEST * metric.low)  # type: ignore[operator]
            assert (str(metric) == "too noisy") == bool(is_wide), metric
            if is_wide and metric.name == "throughput":
                assert document[metric.name]["doubt"]["code"] == line[f"{metric.name}_doubt"]
    for text in read_forms(result).values():
        assert not re.search(r"±\d{3,}", text)
        for low, high in re.findall(r"\((\d+\.?\d*)–>?(\d+\.?\d*)\)", text):
            assert float(high) <= WIDEST * float(low) + 0.05


def test_the_relative_error_is_what_an_engineer_reads_by_that_name() -> None:
    """Seen: 0.44 where ‖Δ‖/‖y‖ is 0.0019. The stricter measure has a name of its own, and the verdict says why it passes."""

    def numerics(spec: RunSpec) -> Numerics:
        return Numerics(rel_error=0.0019, rel_l2=0.44, floor=0.2, tolerance=0.8, passed=True)

    result = result_of(Measured(records=race_records(("baseline", "bf16"), fake_door(numerics=numerics))))
    row, document, line = list(rows_of(result))[1]
    assert (row.cell("rel_error"), line["rel_error"], document["rel_error"]["value"]) == ("1.9e-03", "0.0019", 0.0019)
    assert (row.cell("signal_error"), row["numerics"]) == ("4.4e-01", "passed")


def test_progress_ends_with_the_figure_of_the_table() -> None:
    """Seen: a line of progress one percent off, because it counted all rounds and the table those that are paired."""
    from redline.show.course import Course, ended_words

    first = drifting("baseline", [0.010] * 8 + [0.0101] * 4, 0)
    other = drifting("fp16", [0.005] * 8, 1)
    course = Course()
    lines = [ended_words(course.closed(record)) for record in (first, other)]
    for (row, _, _), line in zip(rows_of(result_of(Measured(records=[first, other]))), lines, strict=True):
        assert row["throughput"].in_words == line  # type: ignore[union-attr]


def test_the_records_of_any_form_are_those_that_were_measured() -> None:
    records = race_records()
    result = result_of(Measured(records=records))
    ids = [record.id for record in records]
    assert [row.record_id for row in result] == ids
    assert [row["record_id"] for row in json.loads(result.to_json())["tables"]["results"]] == ids
    assert [line["record_id"] for line in csv.DictReader(comma_separated(result.tables[0]).splitlines())] == ids
