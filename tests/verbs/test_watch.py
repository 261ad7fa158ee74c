"""Watching from inside a program: loops of one's own, Lightning and transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import redline
from redline.model.errors import RedlineError
from redline.model.record import Rates, RunRecord, Watched
from redline.model.spec import RunSpec, WorkloadSpec
from redline.verbs.watch import Alarm, result_of, script_name
from redline.verbs.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Any:
    with Workspace(history=tmp_path / "history.sqlite") as opened:
        yield opened


def samples(count: int = 160) -> TensorDataset:
    return TensorDataset(torch.randn(count, 8), torch.randint(0, 3, (count,)))


def summary(watch: Any) -> dict[str, Any]:
    """The figures of the run by name, its seconds by phase, and the codes of its findings."""
    result = watch.result
    (run,) = result.rows
    return {
        **run.facts,
        **{metric.name: metric.value for metric in run.metrics},
        "phases": {str(row["phase"]): row.value("time") for row in result.table("phases").rows},
        "findings": {str(row["code"]): str(row["text"]) for row in result.table("findings").rows},
        "notes": [str(each) for each in result.notes],
    }


def test_a_loop_is_found_by_its_optimizer(workspace: Workspace) -> None:
    plain_call = nn.Sequential.__call__
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters())
    other = nn.Linear(8, 500)
    beside = torch.optim.SGD(other.parameters(), lr=0.1)  # another model of the program, which is not trained now
    with redline.watch(name="loop", workspace=workspace) as watch:
        for features, targets in DataLoader(samples(), batch_size=16):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), targets).backward()
            optimizer.step()
    told = summary(watch)
    assert (told["steps"], told["exit_code"]) == (10, None)
    assert all(told["phases"][name] > 0 for name in ("data", "forward", "backward", "optimizer"))
    kept = workspace.history.load(watch.record.id)
    assert (kept.spec.workload.model, kept.prepared and kept.prepared.workload.batch) == ("watch:loop", 16)
    assert kept.prepared is not None
    assert kept.prepared.workload.parameters == sum(one.numel() for one in model.parameters())
    assert "loop" in str(watch)
    assert nn.Sequential.__call__ is plain_call  # everything is taken out again
    beside.zero_grad()


def test_a_loop_without_an_optimizer_counts_its_own_steps(workspace: Workspace) -> None:
    with redline.watch(workspace=workspace) as watch:
        for _ in range(12):
            watch.step(samples=5)
    told = summary(watch)
    assert told["steps"] == 12
    assert told["throughput"] == pytest.approx(5 * told["steps_per_s"])


def test_a_watch_that_broke_gives_no_advice(workspace: Workspace) -> None:
    """A few steps were seen of many: what they are made of says nothing of the rest."""
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with redline.watch(workspace=workspace) as watch:
        for number in range(30):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            if number == 5:
                watch._installed.failed(RuntimeError("our own mistake"))
    told = summary(watch)
    assert told["steps"] == 6
    assert (told["findings"], told["phases"]) == ({}, {})
    assert any("our own mistake" in each for each in told["notes"])
    assert "nothing stands out" not in str(watch)


def test_a_watch_within_a_watch_leaves_the_outer_one_in_place(workspace: Workspace) -> None:
    with redline.watch(workspace=workspace) as outer:
        for _ in range(3):
            with redline.watch(workspace=workspace) as inner:
                inner.step(samples=5)
        outer.step(samples=5)
    assert inner.result is None
    assert summary(outer)["steps"] == 4


def test_steps_are_counted_inside_a_watch_only(workspace: Workspace) -> None:
    with redline.watch(workspace=workspace) as watch:
        watch.step()
    with pytest.raises(RedlineError, match="counts inside"):
        watch.step()


def test_samples_that_a_loader_tells_are_not_counted_twice(workspace: Workspace) -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with redline.watch(workspace=workspace) as watch:
        for features, targets in DataLoader(samples(), batch_size=16):
            nn.functional.cross_entropy(model(features), targets).backward()
            optimizer.step()
            watch.step(samples=16)
    told = summary(watch)
    assert told["steps"] == 10
    assert told["throughput"] == pytest.approx(16 * told["steps_per_s"])


class Costly(torch.utils.data.Dataset[Any]):
    """Making a sample takes far longer than training on it."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), sum(range(200_000)) / 1e10)


def test_a_profile_is_captured_and_kept_with_each_batch_counted_once(workspace: Workspace) -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with redline.watch(profile=True, workspace=workspace) as watch:
        for batch in DataLoader(Costly(), batch_size=2):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    record, told = workspace.history.load(watch.record.id), summary(watch)
    assert record.watched is not None
    assert ([window.steps for window in record.watched.windows], told["steps"]) == ([5], 30)
    assert told["findings"]["data-wait"].endswith("in 5 batches")
    assert Path(record.trace.path).is_file()


@pytest.mark.parametrize("is_faulty", [True, False])
def test_kept_gradients_and_a_needless_scaler_are_named(workspace: Workspace, is_faulty: bool) -> None:
    model = nn.Linear(1500, 1500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=is_faulty)
    with redline.watch(workspace=workspace) as watch:
        for _ in range(30):
            optimizer.zero_grad(set_to_none=not is_faulty)
            scaler.scale(model(torch.randn(2, 1500)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    codes = set(summary(watch)["findings"])
    named = {"zero-grad-fills", "needless-grad-scaler"}
    assert codes & named == (named if is_faulty else set())


def test_what_the_rate_leaves_out_is_said_with_the_rate_of_the_whole_run_beside_it() -> None:
    watched = Watched(
        steps=300, steps_per_s=271.0, whole_steps_per_s=58.7, first_steps=2, run_s={"forward": 1.1, "first steps": 4.0}
    )
    spec = RunSpec(workload=WorkloadSpec(model="watch:train.py", task="train"))
    text = str(result_of(RunRecord(id="a", spec=spec, watched=watched)))
    assert "271 steps/s; 58.7 steps/s over the whole run" in text
    assert "the first 2 steps are left out of the rate: 4.00 s" in text
    assert "copy" not in text  # nothing was copied to a GPU


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning(workspace: Workspace, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 3)

        def training_step(self, batch: Any, number: int) -> Any:
            return nn.functional.cross_entropy(self.inner(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = redline.lightning_callback(name="lightning", workspace=workspace)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback], default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(samples(), batch_size=16))
    told = summary(callback.watch)
    assert told["steps"] == 20
    assert told["phases"]["forward"] > 0 < told["phases"]["backward"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_trainer(workspace: Workspace, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    one = {"input_ids": torch.arange(8), "labels": torch.tensor(1)}
    callback = redline.trainer_callback(name="trainer", workspace=workspace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.Trainer(
            model=transformers.BertForSequenceClassification(config),
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=15, report_to=[], use_cpu=True,
                save_strategy="no", logging_strategy="no", disable_tqdm=True,
            ),
            train_dataset=[one] * 200,
            callbacks=[callback],
        ).train()  # fmt: skip
    told = summary(callback.watch)
    assert told["steps"] == 15
    assert told["throughput"] == pytest.approx(4 * told["steps_per_s"], rel=0.2)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --lr 1", "train.py"),
        ("python -m package.train", "package.train"),
        ("torchrun --nproc-per-node 2 scripts/main.py", "main.py"),
        ("python -m torch.distributed.run --standalone a.py", "a.py"),
        ("./run.sh", "run.sh"),
    ],
)
def test_a_script_is_called_by_its_name(command: str, name: str) -> None:
    assert script_name(command.split()) == name


@pytest.mark.parametrize(
    ("paces", "alerts"),
    [([10, 10, 9, 7, 7, 7, 10, 5], [3, 7]), ([10, 9, 8.5, 9], []), ([1, 5, 10], [])],
)
def test_an_alert_goes_off_once_per_fall_and_again_after_a_recovery(
    tmp_path: Path, paces: list[float], alerts: list[int]
) -> None:
    """A hundred steps at each of these paces; too few steps, as at the end, say nothing."""
    told = tmp_path / "told"
    alarm, steps, seconds = Alarm(f"cat >> {told}; echo >> {told}", 0.2), 1, 1.0
    for pace in (1.0, *paces):
        alarm.hear(Rates(steps=steps, steps_per_s=steps / seconds))
        steps, seconds = steps + 100, seconds + 100 / pace
    alarm.hear(Rates(steps=steps - 100 + 100, steps_per_s=steps / seconds))
    alarm.hear(Rates(steps=steps + 5, steps_per_s=(steps + 5) / (seconds + 100)))
    events = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    assert [(event["step"] - 1) // 100 - 2 for event in events] == alerts


def test_an_alert_that_fails_harms_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    alarm = Alarm("exit 3", 0.2)
    for steps, seconds in ((1, 1.0), (101, 2.0), (201, 9.0)):
        alarm.hear(Rates(steps=steps, steps_per_s=steps / seconds))
    assert "not delivered" in capsys.readouterr().err
