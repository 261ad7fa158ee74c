"""One history, every output: speeds, ratios, intervals and bounds of a recipe are the same wherever a person reads them."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reported import ceilings_of, fake_door, race_records, shown, sweep_records

from redline.analyze.replicates import replicate_rows
from redline.analyze.rows import row_of
from redline.analyze.summary import RunSummary, summarize
from redline.model.record import RunRecord
from redline.model.spec import RunSpec, WorkloadSpec
from redline.model.training import DataSpec, TrainSpec
from redline.model.units import THIN_SPACE
from redline.search.observer import NoJournal
from redline.search.train import train_spec
from redline.show.contents import Contents, contents_of
from redline.show.dashboard import tiles_of
from redline.show.folder import write_folder
from redline.show.payload import payload_of
from redline.show.plots import bars_of
from redline.show.result import terminal
from redline.show.terminal import as_text
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.train import EPOCH_COLUMNS
from redline.verbs.train import result_of as train_result

RECIPES = ("baseline", "fp16", "fp16+compile", "channels-last")


def history(count: int = 3, **changes: Any) -> list[RunRecord]:
    """Replicates that differ from process to process, as real ones do."""
    door = fake_door(offset_sigma=0.04, **changes)
    return [record for _ in range(count) for record in race_records(RECIPES, door)]


def plain(text: str) -> str:
    return text.replace(THIN_SPACE, "").replace("\\", "")


def uneven_training() -> RunRecord:
    """Epochs of which no two have a figure in common, the first slow and the last cut."""
    data = DataSpec(name="synthetic-learnable", train_samples=1000)
    workload = WorkloadSpec(model="resnet18", task="train", batch=100)
    spec = RunSpec(workload=workload, device="cuda:0", train=TrainSpec(data=data, epochs=4))
    record = train_spec(spec, FakeDoor(Landscape(step_s=0.0123, load_s=0.0137)), NoJournal())
    epochs = [
        msgspec.structs.replace(
            epoch,
            seconds=epoch.seconds * 1.37 / number,
            train_s=epoch.train_s * 1.31 / number,
            train_loss=2.345678 / number,
            val_loss=None if number == 2 else 2.456789 / number,
            val_accuracy=1 - 0.654321 / number,
            peak_bytes=(epoch.peak_bytes or 0) + 12345678 * number,
            utilisation=0.54321 / number,
            energy_j=123.456 * number,
            is_cut=number == 4,
        )
        for number, epoch in enumerate(record.epochs, start=1)
    ]
    return msgspec.structs.replace(record, epochs=tuple(epochs))


def test_a_training_has_one_set_of_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.show.folder.draw_pictures", lambda *_: {})
    record = uneven_training()
    contents = contents_of([record])
    write_folder(contents, tmp_path)
    result = train_result([record], summarize([record]))
    told = json.loads(str(result.to_json()))["tables"]
    epochs = list(csv.DictReader(io.StringIO((tmp_path / "epochs.csv").read_text())))
    (panel,) = payload_of(contents)["trainings"]
    shown, markdown = plain(as_text(terminal(result))), plain((tmp_path / "report.md").read_text())
    assert [int(each["epoch"]) for each in epochs] == panel["epoch"] == [1, 2, 3, 4]
    in_rows = {"seconds": "seconds", "samples_per_s": "throughput", "train_loss": "train_loss", "val_loss": "val_loss",
               "val_accuracy": "accuracy", "data_wait_share": "data_wait", "peak_bytes": "memory"}  # fmt: skip
    for number, epoch in enumerate(record.epochs):
        document, row = told["epochs"][number], epochs[number]
        truth = {name: getattr(epoch, name) for name in (
            "seconds", "train_s", "samples", "samples_per_s", "train_loss", "val_loss", "val_accuracy", "data_wait_share",
            "peak_bytes", "utilisation", "energy_j")}  # fmt: skip
        assert {name: document[key]["value"] for name, key in in_rows.items() if key in document} == {
            name: truth[name] for name in in_rows if truth[name] is not None
        }
        assert {name: float(row[name]) if row[name] else None for name in truth} == truth
        for name, values in panel["series"].items():
            assert values[number] == (pytest.approx(truth[name], rel=1e-5) if truth[name] is not None else None)
    for row in result.table("epochs").rows:
        for name in EPOCH_COLUMNS:
            assert plain(row.cell(name)) in shown
            assert plain(row.cell(name)) in markdown
    (whole,) = csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text()))
    (document,) = json.loads((tmp_path / "results.json").read_text())["results"]
    (training,) = told["trainings"]
    for column, name, key in (("throughput_per_s", "samples_per_s", "throughput"), ("epoch_s", "epoch_s", "epoch_time"),
                              ("val_accuracy", "accuracy", "accuracy"), ("train_loss", "train_loss", "train_loss"),
                              ("data_wait_share", "data_wait_share", "data_wait"),
                              ("energy_per_item_j", "energy_per_sample_j", "energy_per_item")):  # fmt: skip
        assert float(whole[column]) == training[key]["value"] == document["training"][name]
    assert document["throughput_per_s"] == training["throughput"]["value"]


@pytest.fixture(scope="module")
def records() -> list[RunRecord]:
    return history()


@pytest.fixture(scope="module")
def contents(records: list[RunRecord]) -> Contents:
    return contents_of(records, ceilings_of=ceilings_of)


@pytest.fixture(scope="module")
def truth(records: list[RunRecord]) -> dict[str, RunSummary]:
    """What the terminal has."""
    return {row.recipe: row for row in replicate_rows(records, ceilings_of)}


@pytest.fixture(scope="module")
def folder(contents: Contents, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    write_folder(contents, out)
    return out


def figures(row: RunSummary) -> tuple[Any, ...]:
    interval, versus = row.throughput_interval, row.vs_first
    assert interval is not None
    ratio = (versus.ratio, versus.low, versus.high) if versus else (None, None, None)
    return row.throughput_per_s, interval.low, interval.high, interval.half_width, *ratio, row.bound.label


def test_lines_are_the_rows_of_the_terminal(contents: Contents, truth: dict[str, RunSummary]) -> None:
    assert {line.row.recipe: figures(line.row) for line in contents.lines} == {
        recipe: figures(row) for recipe, row in truth.items()
    }
    assert all(len(line.rates) == 3 for line in contents.lines)


def test_csv_and_json_have_them(folder: Path, truth: dict[str, RunSummary]) -> None:
    rows = list(csv.DictReader(io.StringIO((folder / "results.csv").read_text())))
    assert [row["recipe"] for row in rows] == list(RECIPES)
    for row in rows:
        speed, low, high, _, ratio, ratio_low, ratio_high, bound = figures(truth[row["recipe"]])
        assert [float(row[name]) for name in ("throughput_per_s", "throughput_low", "throughput_high")] == [
            speed,
            low,
            high,
        ]
        told = [float(row[name]) if row[name] else None for name in ("ratio", "ratio_low", "ratio_high")]
        assert told == [ratio, ratio_low, ratio_high]
        assert (row["bound"], row["processes"]) == (bound, "3")
    results = json.loads((folder / "results.json").read_text())["results"]
    decoded = {row["recipe"]: row for row in results}
    for recipe, row in truth.items():
        assert decoded[recipe]["throughput_per_s"] == row.throughput_per_s
        assert decoded[recipe]["throughput_interval"] == msgspec.to_builtins(row.throughput_interval)
        assert decoded[recipe]["bound"]["label"] == row.bound.label
    assert len((folder / "records.csv").read_text().splitlines()) == 3 * len(RECIPES) + 1


def test_the_dashboard_has_them(contents: Contents, truth: dict[str, RunSummary]) -> None:
    payload = payload_of(contents)
    columns = payload["columns"]
    texts = {name: [columns[name]["texts"][at] for at in columns[name]["at"]] for name in ("recipe", "bound")}
    numeric = (
        "throughput_per_s",
        "throughput_low",
        "throughput_high",
        "half_width",
        "ratio",
        "ratio_low",
        "ratio_high",
    )
    for number, recipe in enumerate(texts["recipe"]):
        *expected, bound = figures(truth[recipe])
        assert [columns[name][number] for name in numeric] == [
            pytest.approx(each, rel=1e-5) if each is not None else None for each in expected
        ]
        assert texts["bound"][number] == bound
    tiles = {tile.label: plain(tile.value) for tile in tiles_of(contents)}
    best = truth["fp16+compile"]
    assert best.throughput_per_s is not None
    assert best.vs_first is not None
    assert tiles["Highest throughput"] == f"{best.throughput_per_s:.0f} img/s"
    assert tiles["Speed-up"] == f"{best.vs_first.ratio:.2f}×"


def test_the_picture_and_the_markdown_and_the_terminal_have_them(
    contents: Contents, folder: Path, truth: dict[str, RunSummary], records: list[RunRecord]
) -> None:
    _, _, bars = bars_of(contents)
    assert {row.recipe: figures(row) for row in bars} == {recipe: figures(row) for recipe, row in truth.items()}
    markdown = plain((folder / "report.md").read_text())
    terminal = plain(shown(records, ceilings_of=ceilings_of))
    for recipe, row in truth.items():
        speed, _, _, half, ratio, ratio_low, ratio_high, bound = figures(row)
        (line,) = [line for line in markdown.splitlines() if line.startswith(f"| {recipe} | 32 |")]
        assert re.search(rf"\b{half * 100:.2g}%", line.replace(" %", "%"))
        assert bound in line
        printed = next(line for line in terminal.splitlines() if re.match(rf"{re.escape(recipe)} +\d", line))
        for text in (line, printed):
            assert f"{speed:.0f}" in text
            if ratio is not None:
                assert f"{ratio:.2f}× ({ratio_low:.2f}–{ratio_high:.2f})" in text


def test_the_headline_has_its_interval(contents: Contents, truth: dict[str, RunSummary]) -> None:
    best = truth["fp16+compile"].vs_first
    assert best is not None
    assert contents.headline.startswith("fp16+compile runs resnet50 ")
    assert f"({best.low:.2f}–{best.high:.2f})" in contents.headline


def inconclusive() -> list[RunRecord]:
    """Processes that sit far apart, of two recipes that take the same time."""
    door = fake_door(offset_sigma=0.5, step_s=lambda spec: 0.01, noise_sigma=0.01)
    return [record for _ in range(2) for record in race_records(("baseline", "fp16"), door)]


def noisy() -> list[RunRecord]:
    """Stopped before their intervals were narrow enough."""
    records = race_records(("baseline", "fp16"), fake_door(noise_sigma=0.8))
    return [msgspec.structs.replace(record, stopped="ceiling") for record in records]


def test_the_tile_tells_the_gain_of_the_headline() -> None:
    slow = race_records(("baseline", "fp16"), fake_door(step_s={"fp16": 0.008, "*": 0.01}), model="resnet18")
    fast = race_records(("baseline", "fp16"), fake_door(step_s={"fp16": 0.001, "*": 0.01}))
    contents = contents_of([*slow, *fast], ceilings_of=ceilings_of)
    (tile,) = [each for each in tiles_of(contents) if each.label == "Speed-up"]
    assert "resnet50" in contents.headline
    assert float(tile.value.rstrip("×")) == pytest.approx(10, rel=0.1)


UNDECIDED = {
    "inconclusive": inconclusive,
    "one after the other": lambda: sweep_records(batches=[8]),
    "throttled": lambda: race_records(door=fake_door(throttle=("hw_thermal",))),
    "noisy": noisy,
}


@pytest.mark.parametrize("records", UNDECIDED.values(), ids=UNDECIDED)
def test_what_is_not_decided_is_no_headline(records: Any) -> None:
    measured = records()
    contents = contents_of(measured, ceilings_of=ceilings_of)
    assert "as fast as" not in contents.headline
    assert "×" not in contents.headline
    assert "fastest" not in contents.headline
    assert not [each for each in contents.advice if each.kind == "recipe" and each.decided and each.ratio]
    assert "Speed-up" not in {tile.label for tile in tiles_of(contents)}


def test_a_stalling_machine_is_marked_and_recommended_by_what_it_delivers() -> None:
    """Most steps take 10 ms, some much longer: the median alone would promise what nobody gets."""
    (record,) = sweep_records(recipe="baseline", batches=[8])
    blocks = tuple(msgspec.structs.replace(block, wall_s=3 * sum(block.samples)) for block in record.blocks)
    contents = contents_of([msgspec.structs.replace(record, blocks=blocks)])
    (line,) = contents.lines
    row = line.row
    assert row.sustained_per_s is not None
    assert row.throughput_per_s is not None
    assert row.sustained_per_s < 0.4 * row.throughput_per_s
    assert row.delivered_per_s == row.sustained_per_s
    assert "sustained" in [metric.name for metric in row_of(row).metrics]
    assert f"sustained {row.sustained_per_s:.0f}" in plain(contents.headline)
