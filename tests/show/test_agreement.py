"""One history, every output: the figures of a recipe are the same wherever a person reads them, and no doubt is a headline."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reported import ceilings_of, failed_record, fake_door, race_records, shown, sweep_records

from redline.analyze.measurement import over_processes
from redline.analyze.pairs import pairs_of
from redline.analyze.rows import row_of
from redline.model.metrics import Row
from redline.model.protocol import SwitchChoice
from redline.model.record import Failure, RunRecord
from redline.model.spec import RunSpec
from redline.model.units import THIN_SPACE
from redline.show.contents import Contents, contents_of
from redline.show.dashboard import answers_of
from redline.show.payload import payload_of
from redline.show.report import result_of, write_folder
from redline.verbs.tune import tune
from redline.verbs.workspace import Workspace

CRASH = Failure(stage="measure", kind="crash", message="the worker died")


def stalled(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The wall clock says three times what the steps add up to."""
    return [
        msgspec.structs.replace(
            record,
            blocks=tuple(msgspec.structs.replace(block, wall_s=3 * sum(block.samples)) for block in record.blocks),
        )
        for record in records
    ]


def doubted_replicates() -> list[RunRecord]:
    """Two quiet replicates that sit apart, and one in which the card was throttled and slower."""
    quiet = fake_door(offset_sigma=0.05)
    hot = fake_door(throttle=("hw_thermal",), step_s=lambda spec: 0.03 if spec.recipe.switches else 0.05)
    return [*race_records(door=quiet), *race_records(door=hot), *race_records(door=quiet)]


def some_failed() -> list[RunRecord]:
    broken = fake_door(failure=lambda spec: CRASH if str(spec.recipe) == "fp16" else None)
    records = race_records(("baseline", "fp16"), broken)
    later = [msgspec.structs.replace(record, created_at=record.created_at + 1) for record in records]
    return [*race_records(("baseline", "fp16")), *later]


def everywhere() -> list[RunRecord]:
    """Models, batches, tasks, devices and thread counts."""
    return [
        *sweep_records(model=["resnet50", "vit_b_16"], recipe=["baseline", "fp16"], batches=[1, 8]),
        *race_records(task="train", batch=8),
        *sweep_records(device="cpu", recipe="baseline", threads=1, batches=[8]),
        *sweep_records(device="cpu", recipe="baseline", threads=2, batches=[8]),
        *race_records(),
        failed_record(),
    ]


def one_recipe_in_many_ways() -> list[RunRecord]:
    door = fake_door(offset_sigma=0.06)
    return [
        *sweep_records(door, recipe="fp16", batches=[32]),
        *race_records(("baseline", "fp16"), door),
        *race_records(("fp16+compile", "fp16"), door),
        *race_records(("baseline", "fp16", "fp16+compile"), door),
    ]


MIXES: dict[str, Callable[[], list[RunRecord]]] = {
    "doubted replicates": doubted_replicates,
    "some failed": some_failed,
    "everywhere": everywhere,
    "one recipe in many ways": one_recipe_in_many_ways,
    "stalled": lambda: stalled([*race_records(), *race_records()]),
}


def figures(row: Row) -> dict[str, Any]:
    return {metric.name: (metric.value, metric.low, metric.high) for metric in row.metrics}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_every_output_says_the_same(
    mix: Callable[[], list[RunRecord]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redline.show.report.draw_pictures", lambda *_: {})
    contents = contents_of(mix(), ceilings_of=ceilings_of)
    write_folder(contents, tmp_path)
    lines = list(csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text())))
    tables = json.loads((tmp_path / "results.json").read_text())["tables"]
    documents = {row.get("record_id"): row for name, rows in tables.items() if "results" in name for row in rows}
    columns = payload_of(contents, result_of(contents))["columns"]
    markdown = (tmp_path / "report.md").read_text().replace("\\", "")
    for number, (line, cells) in enumerate(zip(contents.lines, lines, strict=True)):
        row = row_of(line.row)
        for name, values in figures(row).items():
            for part, column, value in zip(("value", "low", "high"), (name, f"{name}_low", f"{name}_high"), values, strict=True):  # fmt: skip
                if value is not None:
                    assert float(cells[column]) == documents[row.record_id][name][part] == value
                    assert columns[column][number] == pytest.approx(value, rel=1e-5)
        assert (row.metric("throughput") is None) or row.cell("throughput") in markdown


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_the_first_sentence_is_true_of_its_table(mix: Callable[[], list[RunRecord]]) -> None:
    contents = contents_of(mix(), ceilings_of=ceilings_of)
    for section in contents.sections:
        proven = [row for row in section.table.rows if row.get("verdict") == "faster"]
        best = max(proven, key=lambda row: row.value("ratio"), default=None)
        if best is not None:
            assert f"{best['recipe']} is {best['ratio']} as fast as {best['compared_with']}" in str(section.headline)
        else:
            assert "as fast as" not in str(section.headline)
    assert str(contents.sections[0].headline) in contents.headline


def test_the_report_says_what_the_terminal_says() -> None:
    door = fake_door(offset_sigma=0.04)
    records = [record for _ in range(3) for record in race_records(door=door)]
    contents = contents_of(records, ceilings_of=ceilings_of)
    measured = {row.recipe: figures(row_of(row)) for row in over_processes(records, ceilings_of)}
    assert {line.row.recipe: figures(row_of(line.row)) for line in contents.lines} == measured
    text = shown(records, ceilings_of=ceilings_of)
    assert " ".join(str(contents.sections[0].headline).split()) in " ".join(text.split())
    (answer,) = answers_of(contents)
    now, reached, _ = answer.stations
    for value in (now.value, reached.value):
        assert value.split(" ")[0].replace(THIN_SPACE, "") in text.replace(THIN_SPACE, "")
    assert answer.switch_on == "fp16+compile"


def inconclusive() -> list[RunRecord]:
    """Processes that sit far apart, of two recipes that take the same time."""
    door = fake_door(offset_sigma=0.5, step_s=lambda spec: 0.01, noise_sigma=0.01)
    return [record for _ in range(2) for record in race_records(("baseline", "fp16"), door)]


UNDECIDED: dict[str, Callable[[], list[RunRecord]]] = {
    "inconclusive": inconclusive,
    "one after the other": lambda: sweep_records(batches=[8]),
    "throttled": lambda: race_records(door=fake_door(throttle=("hw_thermal",))),
}


@pytest.mark.parametrize("records", UNDECIDED.values(), ids=UNDECIDED)
def test_what_is_not_decided_is_no_headline_and_nothing_to_switch_on(records: Callable[[], list[RunRecord]]) -> None:
    contents = contents_of(records(), ceilings_of=ceilings_of)
    assert "as fast as" not in contents.headline
    assert "fastest" not in contents.headline
    for answer in answers_of(contents):
        assert answer.switch_on.startswith("not decided yet")
        assert answer.stations[1].value == "–"


def test_a_baseline_that_is_doubted_decides_nothing() -> None:
    """The recipe's own times are sound; those it is compared with are not."""
    cold = race_records(("baseline", "fp16"))
    hot = race_records(("baseline", "fp16"), fake_door(throttle=("hw_thermal",)))[0].blocks
    looks = {(block.kind, block.round): block.telemetry for block in hot}
    blocks = tuple(
        msgspec.structs.replace(block, telemetry=looks.get((block.kind, block.round), block.telemetry))
        for block in cold[0].blocks
    )
    contents = contents_of([msgspec.structs.replace(cold[0], blocks=blocks), cold[1]], ceilings_of=ceilings_of)
    row = next(line.row for line in contents.lines if line.row.recipe == "fp16")
    assert row.verdict.trusted
    assert "as fast as" not in contents.headline


def test_a_decision_prints_what_the_report_says() -> None:
    records = doubted_replicates()
    pairs = {pair.b: pair for pair in pairs_of([records[at : at + 3] for at in (0, 3, 6)]) if pair.a == "baseline"}
    for line in contents_of(records, ceilings_of=ceilings_of).lines:
        if line.row.recipe in pairs:
            pair = pairs[line.row.recipe]
            assert (pair.ratio, pair.low) == (
                pytest.approx(line.row.vs_first.ratio),
                pytest.approx(line.row.vs_first.low),
            )


def test_a_stalling_machine_is_marked_and_a_price_goes_by_what_it_delivers() -> None:
    """Most steps take 10 ms, some much longer: the median alone would promise what nobody gets."""
    (line,) = contents_of(stalled(sweep_records(recipe="baseline", batches=[8]))).lines
    row = row_of(line.row)
    assert row.value("sustained") < 0.4 * row.value("throughput")
    assert line.row.changed(per_hour=3.6).cost_per_million == pytest.approx(1e3 / row.value("sustained"))


def test_a_search_and_a_later_race_of_its_winner_have_one_ratio(tmp_path: Path) -> None:
    def seconds(spec: RunSpec) -> float:
        return 0.012 * (0.4 if "fp16" in str(spec.recipe) else 1.0)

    choices = tuple(SwitchChoice(switch=name, family=name) for name in ("fp16", "channels-last"))
    door = fake_door(offset_sigma=0.01, step_s=seconds, choices=choices)
    with Workspace(door=door, history=tmp_path / "history.sqlite") as workspace:
        settings: dict[str, Any] = {"batch": 32, "device": "cuda:0", "budget": "30m", "launch": {"door": "fake"}}
        found = tune("resnet50", clock=lambda: door.clock_s, workspace=workspace, **settings)
    recipe = found.summary.leader.recipe
    assert recipe != "baseline"
    records = list(found.recorded.values())
    later = [
        msgspec.structs.replace(one, created_at=one.created_at + 60) for one in race_records(("baseline", recipe), door)
    ]

    def winner(contents: Contents) -> float | None:
        return next(line.row.step_s for line in contents.lines if (line.row.recipe, line.row.batch) == (recipe, 32))

    for measured in (records, [*records, *later]):
        contents = contents_of(measured, tunes=[found.summary], ceilings_of=ceilings_of)
        bar = next(bar for bar in contents.gain_paths[0].bars if bar.kind == "winner")
        assert bar.seconds == pytest.approx(winner(contents))
