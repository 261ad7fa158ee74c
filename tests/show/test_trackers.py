"""Figures arrive in the trackers that people use, by their names and with their intervals."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from redline.model.errors import MissingExtra, UnknownName, UsageError
from redline.model.metrics import LATENCY_P50, THROUGHPUT, Row, Table
from redline.model.note import note
from redline.show import trackers
from redline.show.result import Result
from redline.show.trackers import entries_of, log_result

NOISY = note("noisy", "another process disturbed it")


def row(recipe: str, speed: float, **facts: int) -> Row:
    figures = (THROUGHPUT(speed, 0.9 * speed, 1.1 * speed, item="img"), LATENCY_P50(1 / speed, doubt=NOISY))
    return Row(facts={"model": "resnet18", "recipe": recipe, **facts}, metrics=figures)


RESULT = Result(
    verb="train",
    about={"device": "cpu"},
    tables=(
        Table(name="recipes", rows=(row("baseline", 100.0), row("bf16", 200.0))),
        Table(name="epochs", rows=(row("bf16", 150.0, epoch=0), row("bf16", 250.0, epoch=1))),
    ),
)


def test_a_row_is_a_run_and_an_epoch_is_a_step() -> None:
    plain, fast = entries_of(RESULT)
    assert (plain.name, fast.name) == ("resnet18 · baseline", "resnet18 · bf16")
    assert fast.facts == {"device": "cpu", "model": "resnet18", "recipe": "bf16"}
    assert fast.values["throughput"] == 200.0
    assert (fast.values["throughput_low"], fast.values["throughput_high"]) == pytest.approx((180.0, 220.0))
    assert fast.doubts == {"latency_p50": "noisy"}
    assert [(step, values["epoch/throughput"]) for step, values in fast.steps] == [(0, 150.0), (1, 250.0)]
    assert plain.steps == []


def test_tensorboard_reads_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(log_result(RESULT, "tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(run: str, figure: str) -> list[tuple[int, float]]:
        events = EventAccumulator(str(folder / run)).Reload()
        return [(each.step, each.tensor_proto.float_val[0]) for each in events.Tensors(f"redline/{figure}")]

    assert read("resnet18-baseline", "throughput") == [(0, 100.0)]
    assert read("resnet18-bf16", "epoch/throughput") == [(0, 150.0), (1, 250.0)]


def test_mlflow_keeps_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    log_result(RESULT, "mlflow")
    experiment = mlflow.get_experiment_by_name("redline")
    runs = {run.info.run_name: run.data for run in mlflow.MlflowClient().search_runs([experiment.experiment_id])}
    fast = runs["resnet18 · bf16"]
    assert fast.metrics["throughput"] == 200.0
    assert fast.params["recipe"] == "bf16"
    assert fast.metrics["epoch/throughput"] == 250.0
    assert fast.tags["doubt.latency_p50"] == "noisy"


def test_wandb_keeps_the_figures_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    where = log_result(RESULT, "wandb")
    importlib.import_module("wandb").teardown()  # its service writes the last run after `finish` has returned
    kept = [file.read_bytes() for file in tmp_path.rglob("*.wandb")]
    assert len(kept) == 2
    assert str(tmp_path) in where
    for name, recipe in (("resnet18 · baseline", "baseline"), ("resnet18 · bf16", "bf16")):
        (data,) = (run for run in kept if name.encode() in run)
        assert {part in data for part in (recipe.encode(), b"throughput_low", b"doubt:noisy")} == {True}
        assert (b"epoch/throughput" in data) == (recipe == "bf16")


def test_a_tracker_that_cannot_be_used_is_refused_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName, match="tensorboard"):
        log_result(RESULT, "tensorbord")
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'torch-redline\[mlflow\]'"):
        log_result(RESULT, "mlflow")


def test_a_result_without_figures_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing was measured"):
        log_result(Result(verb="run"), "tensorboard")
