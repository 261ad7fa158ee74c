"""`redline train` and `redline train --find-workers` from the outside: documents, exit codes, resuming after a kill."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from invoking import Redline, results
from typer.testing import Result

from redline.model.protocol import SwitchChoice
from redline.model.record import Failure
from redline.model.spec import RunSpec
from redline.store import History
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape


def failure(spec: RunSpec) -> Failure | None:
    if spec.workload.model == "resnet50":
        return Failure(stage="epoch", kind="crash", message="a worker of the loader died: killed by signal 9")
    return None


@pytest.fixture
def door() -> FakeDoor:
    return FakeDoor(
        Landscape(step_s=0.01, load_s=0.012, cores=8, failure=failure, fails_after_epochs=1, unknown_models={"nosuch"})
    )


def printed(result: Result) -> str:
    return " ".join(result.stdout.split())


def epochs_of(told: Any) -> list[Any]:
    return told["tables"]["epochs"]


class TestTrain:
    def test_the_document_has_epochs_accuracy_and_the_stem(self, redline: Redline) -> None:
        result = redline("train resnet18 --epochs 3 --target-accuracy 0.99 --json")
        assert result.exit_code == 0
        assert "epoch 2/3" in result.stderr
        told = json.loads(result.stdout)
        (training,) = told["tables"]["trainings"]
        assert {"best_accuracy", "epoch_time", "throughput", "data_wait", "memory"} <= set(training)
        assert training["stem"] == "cifar"
        assert any(each["about"] == "target_accuracy" for each in training["notes"])
        assert [epoch["epoch"] for epoch in epochs_of(told)] == [1, 2, 3]
        wanted = "seconds throughput train_loss val_loss accuracy data_wait memory"
        assert set(wanted.split()) <= set(epochs_of(told)[0])
        with History.open() as history:
            assert len(history.load(told["record_ids"][0]).epochs) == 3

    def test_several_models_stand_side_by_side_and_a_failed_one_is_a_row(self, redline: Redline) -> None:
        result = redline("train simple_cnn resnet50 transformer --epochs 2")
        assert result.exit_code == 5
        for word in ("simple_cnn", "resnet50", "transformer", "accuracy", "a worker of the loader died"):
            assert word in printed(result)
        told = json.loads(redline("train simple_cnn transformer --epochs 2 --json").stdout)
        assert [row["model"] for row in told["tables"]["trainings"]] == ["simple_cnn", "transformer"]

    def test_a_failed_training_keeps_its_epochs(self, redline: Redline) -> None:
        first = redline("train resnet50 --epochs 3")
        assert first.exit_code == 5
        assert "1 of 3 epochs are kept in the history" in printed(first)

    def test_a_price_becomes_the_cost_of_a_million_samples(self, redline: Redline) -> None:
        told = json.loads(redline("train resnet18 --epochs 2 --price 3.60/h --json").stdout)
        (training,) = told["tables"]["trainings"]
        assert training["cost_per_million"]["value"] == pytest.approx(1e3 / training["throughput"]["value"])


class TestReported:
    """What a training leaves in a report folder; its pictures, which take longest, are looked at elsewhere."""

    @pytest.fixture(autouse=True)
    def without_pictures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("redline.show.report.draw_pictures", lambda *_: {})

    def test_each_epoch_is_a_row_of_the_report_and_of_a_csv(self, redline: Redline, tmp_path: Path) -> None:
        told = redline("train resnet18 --epochs 2 --report", str(tmp_path / "r"), "--json")
        (record_id,) = json.loads(told.stdout)["record_ids"]
        text = (tmp_path / "r" / "report.md").read_text()
        assert "### Epochs" in text
        assert "synthetic" in text
        with (tmp_path / "r" / "epochs.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [(row["record_id"], row["epoch"]) for row in rows] == [(record_id, "1"), (record_id, "2")]
        page = (tmp_path / "r" / "dashboard.html").read_text()
        assert "chart-learning" in page
        assert "chart-epochs" in page


class TestLoader:
    def test_the_document_tells_rates_verdict_and_workers(self, redline: Redline) -> None:
        result = redline("train resnet18 --find-workers --json")
        assert result.exit_code == 0
        told = json.loads(result.stdout)
        (loader,) = told["tables"]["loader"]
        assert {"loader", "model_alone", "together", "without_prefetch", "data_wait"} <= set(loader)
        assert (loader["verdict"], loader["best_workers"]) == ("data-bound", 2)
        assert told["record_ids"] == [], "nothing goes into the history"
        assert told["next"].startswith("train with --workers 2")


def rung_s(spec: RunSpec) -> float:
    """Threads divide a CPU's time; a GPU has its own, and half of it with any recipe."""
    if spec.device == "cpu":
        return 0.4 / (spec.threads or 1)
    items = (spec.workload.batch or 64) / 64
    return (0.002 + 0.004 * items) * (0.5 if spec.recipe.switches else 1.0)


class TestLadder:
    @pytest.fixture
    def door(self, request: pytest.FixtureRequest) -> FakeDoor:
        kind = getattr(request, "param", "cuda")
        choices = (SwitchChoice(switch="amp", family="precision"), SwitchChoice(switch="amp-bf16", family="precision"))
        return FakeDoor(Landscape(step_s=rung_s, cores=8, device_kind=kind, choices=choices))

    def test_each_rung_tells_its_gain_over_the_last_and_over_the_first(self, redline: Redline, tmp_path: Path) -> None:
        rungs = results(redline("study ladder --effort quick --out", str(tmp_path), "--json"))
        names = [rung["run"] for rung in rungs]
        assert names[:3] == ["CPU, 1 thread", "CPU, 8 threads and 4 loader workers", "GPU, fp32"]
        assert [rung["batch"] for rung in rungs if "AMP, batch" in rung["run"]] == [16, 32, 64, 128, 256, 512]
        assert names[-1] == "GPU, AMP, channels-last and compile, data on the GPU"
        assert {"device", "recipe", "batch", "epoch_time", "throughput", "accuracy", "memory"} <= set(rungs[0])
        speeds = [rung["throughput"]["value"] for rung in rungs]
        for number, rung in enumerate(rungs[1:], start=1):
            assert rung["gain"]["value"] == pytest.approx(speeds[number] / speeds[number - 1])
            assert rung["gain_over_first"]["value"] == pytest.approx(speeds[number] / speeds[0])
        assert all(rung["limit"] for rung in rungs)
        assert (tmp_path / "speed.png").stat().st_size > 1000
        page = (tmp_path / "README.md").read_text()
        assert "| CPU, 1 thread |" in page
        assert "accuracy" in page

    def test_a_ladder_resumes_without_training_twice(self, redline: Redline) -> None:
        words = "study ladder --effort quick --json"
        first, again = (results(redline(words, *more)) for more in ([], ["--resume"]))
        assert [rung["record_id"] for rung in again] == [rung["record_id"] for rung in first]

    @pytest.mark.parametrize("door", ["cpu"], indirect=True)
    def test_rungs_without_their_device_are_skipped_and_said_so(self, redline: Redline) -> None:
        for more, why in ([], "there is no GPU here"), (["--device", "cpu"], "only the CPU was asked for"):
            shown = redline("study ladder --effort quick", *more)
            assert shown.exit_code == 0
            assert why in printed(shown)
        document = json.loads(redline("study ladder --effort quick --json").stdout)
        told = document["tables"]["results"]
        assert [rung["run"] for rung in told if "throughput" in rung] == [rung["run"] for rung in told][:2]
        assert ": CPU, 8 threads and 4 loader workers." in document["headline"]["text"]
        assert document["next"].startswith("redline "), "a model by name is measured by a command"
        assert "--threads 8" in document["next"], "it goes on from the fastest rung"
