"""Watching from inside a program: loops of one's own, Lightning and transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import redline
from redline.api.watch import script_name
from redline.api.workspace import Workspace
from redline.model.errors import RedlineError, UsageError


@pytest.fixture
def workspace(tmp_path: Path) -> Any:
    with Workspace(history=tmp_path / "history.sqlite") as opened:
        yield opened


def samples(count: int = 160) -> TensorDataset:
    return TensorDataset(torch.randn(count, 8), torch.randint(0, 3, (count,)))


def summary(watch: Any) -> dict[str, Any]:
    assert watch.result is not None
    found: dict[str, Any] = watch.result.summary
    return found


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
    assert all(told["shares"][name] > 0 for name in ("data", "forward", "backward", "optimizer"))
    assert watch.result is not None
    kept = workspace.history.load(told["record_id"])
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
    assert told["samples_per_s"] == pytest.approx(5 * told["steps_per_s"])


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
    assert (told["findings"], set(told["shares"].values())) == ([], {None})
    assert "our own mistake" in told["notes"][-1]
    assert "nothing stands out" not in str(watch)


def test_a_watch_within_a_watch_leaves_the_outer_one_in_place(workspace: Workspace) -> None:
    with redline.watch(workspace=workspace) as outer:
        for _ in range(3):
            with redline.watch(workspace=workspace) as inner:
                inner.step(samples=5)
        outer.step(samples=5)
    assert inner.result is None
    assert summary(outer)["steps"] == 4


def test_a_watch_whose_training_failed_can_begin_again(workspace: Workspace) -> None:
    """transformers tells its callbacks when a training begins and ends, and not when it fails."""
    watch = redline.watch(workspace=workspace)
    for steps in (7, 3):
        watch.__enter__()
        for _ in range(steps):
            watch.step()
    watch.__exit__(None, None, None)
    assert summary(watch)["steps"] == 3
    watch.__exit__(None, None, None)  # told twice
    with pytest.raises(RedlineError, match="counts inside"):
        watch.step()
    with pytest.raises(UsageError, match="window"):
        redline.watch(profile=True, window=0)


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
    assert told["samples_per_s"] == pytest.approx(16 * told["steps_per_s"])


def test_running_out_of_memory_in_the_loop(workspace: Workspace) -> None:
    """The script gets its own error, and the record says where and who held what."""

    class Greedy(nn.Linear):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return super().forward(features) + torch.empty(2**50 if len(features) > 4 else 1)

    model = Greedy(8, 3)
    optimizer = torch.optim.Adam(model.parameters())
    watch = redline.watch(workspace=workspace)

    def train() -> None:
        with watch:
            for size in (4, 4, 16):
                model(torch.randn(size, 8)).sum().backward()
                optimizer.step()

    with pytest.raises(RuntimeError, match="can't allocate memory"):
        train()
    (found,) = [each for each in summary(watch)["findings"] if each["code"] == "out-of-memory"]
    assert "in the forward pass after step 2, at test_watch.py:" in found["text"]
    assert "optimizer state" in found["text"]


def test_a_profile_is_captured_and_kept(workspace: Workspace) -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with redline.watch(profile=True, window=3, workspace=workspace) as watch:
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    assert watch.result is not None
    (window,) = watch.result.watched.windows
    assert (window.steps, summary(watch)["steps"]) == (3, 30)
    record = workspace.history.load(watch.result.record.id)
    assert record.trace is not None
    assert Path(record.trace.path).is_file()


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
    assert told["shares"]["forward"] > 0 < told["shares"]["backward"]


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
    assert told["samples_per_s"] == pytest.approx(4 * told["steps_per_s"], rel=0.2)


def test_a_step_of_ones_own_is_measured() -> None:
    weights = torch.ones(8, 8)
    settings: dict[str, Any] = {"device": "cpu", "effort": "quick", "launch": {"door": "inline"}}
    with Workspace(keep=False) as nowhere:
        (row,) = redline.run_step(lambda: weights @ weights, workspace=nowhere, **settings)
        assert row.throughput_per_s is not None
        with pytest.raises(UsageError, match="measures a function, got int"):
            redline.run_step(3, workspace=nowhere)  # type: ignore[arg-type]


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
