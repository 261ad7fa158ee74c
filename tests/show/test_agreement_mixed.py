"""Histories as they grow in practice: whatever was mixed, every output says the same of a recipe, and no doubt is a headline."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reported import ceilings_of, failed_record, fake_door, race_records, sweep_records

from redline.analyze.pairs import pairs_of
from redline.analyze.recommend import is_surely_faster
from redline.analyze.replicates import Line, replicate_rows
from redline.analyze.summary import RunSummary, with_price
from redline.api.tune import tune
from redline.api.workspace import Workspace
from redline.model.questions import SwitchChoice
from redline.model.record import Failure, RunRecord
from redline.model.spec import RunSpec
from redline.model.units import THIN_SPACE
from redline.search.tune.gains import waterfall
from redline.show.answers import answers_of
from redline.show.contents import Contents, contents_of
from redline.show.dashboard import tiles_of
from redline.show.folder import write_folder
from redline.show.markdown import markdown
from redline.show.payload import payload_of
from redline.show.plots import bars_of, throughput_of


def later(records: Sequence[RunRecord], seconds: float) -> list[RunRecord]:
    return [msgspec.structs.replace(record, created_at=record.created_at + seconds) for record in records]


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
    return [*race_records(("baseline", "fp16")), *later(race_records(("baseline", "fp16"), broken), 1.0)]


CRASH = Failure(stage="measure", kind="crash", message="the worker died")


def everywhere() -> list[RunRecord]:
    """Models, batches, tasks, devices and thread counts."""
    return [
        *sweep_records(model=["resnet50", "vit_b_16"], recipe=["baseline", "fp16"], batches=[1, 8]),
        *race_records(task="train", batch=8),
        *sweep_records(device="cpu", recipe="baseline", threads=1, batches=[8]),
        *sweep_records(device="cpu", recipe="baseline", threads=2, batches=[8]),
        *sweep_records(device="cuda:1", recipe="fp16", batches=[8]),
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


def figures(row: RunSummary) -> dict[str, Any]:
    interval, versus = row.throughput_interval, row.vs_first
    return {
        "throughput_per_s": row.throughput_per_s,
        "throughput_low": interval.low if interval else None,
        "throughput_high": interval.high if interval else None,
        "sustained_per_s": row.sustained_per_s,
        "ratio": versus.ratio if versus else None,
        "ratio_low": versus.low if versus else None,
        "ratio_high": versus.high if versus else None,
        "latency_p50_s": row.latency_s.p50 if row.latency_s else None,
        "energy_per_item_j": row.energy_per_item_j,
        "headroom": row.roofline.headroom if row.roofline else None,
    }


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_every_output_says_the_same(mix: Any, tmp_path: Path) -> None:
    contents = contents_of(mix(), ceilings_of=ceilings_of)
    write_folder(contents, tmp_path)
    files_agree(contents, tmp_path)
    payload_agrees(contents)
    pictures_agree(contents)
    markdown_agrees(contents)
    headlines_are_decided(contents)


def files_agree(contents: Contents, folder: Path) -> None:
    rows = list(csv.DictReader(io.StringIO((folder / "results.csv").read_text())))
    decoded = json.loads((folder / "results.json").read_text())["results"]
    for line, row, plain in zip(contents.lines, rows, decoded, strict=True):
        told = figures(line.row)
        assert {name: float(row[name]) if row[name] else None for name in told} == told
        assert (row["record_id"], row["bound"]) == (line.row.record_id, line.row.bound.label)
        assert plain["throughput_per_s"] == line.row.throughput_per_s
        assert plain["sustained_per_s"] == line.row.sustained_per_s
        assert plain["vs_first"] == msgspec.to_builtins(line.row.vs_first)
        assert plain["bound"]["label"] == line.row.bound.label


def payload_agrees(contents: Contents) -> None:
    columns = payload_of(contents)["columns"]
    for number, line in enumerate(contents.lines):
        for name, value in figures(line.row).items():
            found = columns[name][number] if name in columns else None
            assert found == (pytest.approx(value, rel=1e-5) if value is not None else None), name
        interval = line.row.throughput_interval
        half = columns["half_width"][number]
        assert half == (pytest.approx(interval.half_width, rel=1e-5) if interval else None)
        assert columns["decided"][number] == is_surely_faster(line.row)


def pictures_agree(contents: Contents) -> None:
    by_id = {line.row.record_id: line.row for line in contents.lines}
    found = bars_of(contents)
    assert found is not None
    assert all(by_id[bar.record_id] == bar for bar in found[2])
    for curve in contents.curves:
        for row in curve.measured:
            assert by_id[row.record_id] == row
            point = throughput_of(row)
            assert point is not None
            assert point.value == row.throughput_per_s


def markdown_agrees(contents: Contents) -> None:
    text = plain(markdown(contents, {}))
    for line in contents.lines:
        row = line.row
        if row.throughput_per_s is None:
            continue
        section = text[text.index(f"### {line.subject}", text.index("## Results")) :]
        shown = next(each for each in section.splitlines() if each.startswith(f"| {row.recipe} | {row.batch} |"))
        assert any(f" {figure} " in shown.replace("|", " ") for figure in spellings(row.throughput_per_s))
        assert row.bound.label in shown
        if row.vs_first is not None and row.vs_first.low is not None:
            assert f"{row.vs_first.ratio:.2f}× ({row.vs_first.low:.2f}–" in shown
        if row.sustained_per_s is not None:
            assert any(f"(sustained {figure})" in shown for figure in spellings(row.sustained_per_s))


def spellings(value: float) -> list[str]:
    return [f"{value:.0f}", f"{value:.1f}", f"{value:.2f}"]


def plain(text: str) -> str:
    return text.replace(THIN_SPACE, "").replace("\\", "")


def headlines_are_decided(contents: Contents) -> None:
    """A ratio in large letters is that of a line that was decided, with its interval."""
    proven = {
        f"{row.vs_first.ratio:.2f}×" for row in map(row_of, contents.lines) if row.vs_first and is_surely_faster(row)
    }
    reached = [answer.stations[1] for answer in answers_of(contents)]
    large = [contents.headline, *(tile.value for tile in tiles_of(contents)), *(each.about for each in reached)]
    for text in large:
        for ratio in re.findall(r"(\d+\.\d\d)×", text):
            assert f"{ratio}×" in proven, text


def row_of(line: Line) -> RunSummary:
    return line.row


def test_a_doubted_baseline_decides_nothing() -> None:
    """The recipe's own times are sound; those it is set against are not."""
    records = race_records(("baseline", "fp16"))
    blocks = tuple(
        msgspec.structs.replace(
            block, telemetry=tuple(msgspec.structs.replace(look, throttle=("hw_thermal",)) for look in block.telemetry)
        )
        for block in race_records(("baseline", "fp16"), fake_door(throttle=("hw_thermal",)))[0].blocks
    )
    contents = contents_of([msgspec.structs.replace(records[0], blocks=blocks), records[1]], ceilings_of=ceilings_of)
    row = next(line.row for line in contents.lines if line.row.recipe == "fp16")
    assert row.verdict.trusted
    assert row.vs_first is not None
    assert row.vs_first.first_doubted
    assert not is_surely_faster(row)
    assert "×" not in contents.headline


def test_a_decision_prints_what_the_report_says() -> None:
    records = doubted_replicates()
    replicates = [records[number : number + 3] for number in (0, 3, 6)]
    racers = {row.recipe: row for row in replicate_rows(records, ceilings_of)}
    lines = {line.row.recipe: line.row for line in contents_of(records, ceilings_of=ceilings_of).lines}
    pairs = {pair.b: pair for pair in pairs_of(replicates) if pair.a == "baseline"}
    for recipe, row in lines.items():
        assert figures(racers[recipe]) == figures(row)
        if recipe in pairs:
            assert row.vs_first is not None
            assert (pairs[recipe].ratio, pairs[recipe].low) == (
                pytest.approx(row.vs_first.ratio),
                pytest.approx(row.vs_first.low),
            )


def test_what_works_now_and_then_says_how_often_it_failed() -> None:
    contents = contents_of(some_failed(), ceilings_of=ceilings_of)
    row = next(line.row for line in contents.lines if line.row.recipe == "fp16" and line.row.failure is None)
    assert [str(each) for each in row.verdict.noted("also-failed")] == ["1 more process failed: crash at measure"]


def test_a_price_goes_by_what_is_delivered() -> None:
    (line,) = contents_of(stalled(sweep_records(recipe="baseline", batches=[8]))).lines
    (priced,) = with_price([line.row], 3.6)
    assert line.row.sustained_per_s is not None
    assert priced.cost_per_million == pytest.approx(1e3 / line.row.sustained_per_s)


def test_a_search_and_a_later_race_of_its_winner_have_one_ratio(tmp_path: Path) -> None:
    def seconds(spec: RunSpec) -> float:
        return 0.012 * (0.4 if "fp16" in str(spec.recipe) else 1.0)

    choices = tuple(SwitchChoice(switch=name, family=name) for name in ("fp16", "channels-last"))
    door = fake_door(offset_sigma=0.01, step_s=seconds, choices=choices)
    with Workspace(door=door, history=tmp_path / "history.sqlite") as workspace:
        settings = {"batch": 32, "device": "cuda:0", "budget": "30m", "launch": {"door": "fake"}}
        found = tune("resnet50", clock=lambda: door.clock_s, workspace=workspace, **settings)  # type: ignore[arg-type]
        assert found.summary.leader is not None
        recipe = found.summary.leader.recipe
        assert recipe != "baseline"
        alone = contents_of(list(found.records.values()), tunes=[found.summary], ceilings_of=ceilings_of)
        again = later(race_records(("baseline", recipe), door), 60.0)
        both = contents_of([*found.records.values(), *again], tunes=[found.summary], ceilings_of=ceilings_of)
    for contents in (alone, both):
        payload_agrees(contents)
        headlines_are_decided(contents)
        winner = next(row for row in map(row_of, contents.lines) if row.recipe == recipe and row.batch == 32)
        bar = next(bar for bar in waterfall(contents.gain_paths[0]) if bar.kind == "winner")
        assert bar.seconds == pytest.approx(winner.step_s)
