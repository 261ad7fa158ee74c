"""Watching from inside a program: loops of one's own, Lightning and transformers."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import redline
from redline.model.errors import RedlineError, UsageError
from redline.model.record import Rates
from redline.verbs.watch import Alarm, deliver_alert, parse_share, script_name
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
    assert told["throughput"] == pytest.approx(16 * told["steps_per_s"])


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
    text = summary(watch)["findings"]["out-of-memory"]
    assert "in the forward pass after step 2, at test_watch.py:" in text
    assert "optimizer state" in text


def test_a_profile_is_captured_and_kept(workspace: Workspace) -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with redline.watch(profile=True, window=3, workspace=workspace) as watch:
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    record = workspace.history.load(watch.record.id)
    assert record.watched is not None
    assert ([window.steps for window in record.watched.windows], summary(watch)["steps"]) == ([3], 30)
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


def rates(steps: int, seconds: float) -> Rates:
    return Rates(steps=steps, steps_per_s=steps / seconds)


def heard(paces: list[float], drop: float = 0.2) -> list[int]:
    """At which of these paces, a hundred steps each, it goes off."""
    told: list[bytes] = []
    alarm = Alarm("target", drop, deliver=lambda target, body: told.append(body))
    seconds, at = 1.0, []
    alarm.hear(rates(1, seconds))
    for number, pace in enumerate(paces):
        seconds += 100 / pace
        before = len(told)
        alarm.hear(rates(1 + 100 * (number + 1), seconds))
        at += [number] if len(told) > before else []
    return at


def test_it_goes_off_once_per_fall_and_again_after_a_recovery() -> None:
    assert heard([10, 10, 9, 7, 7, 7, 10, 5]) == [3, 7]
    assert heard([10, 9, 8.5, 9]) == []
    assert heard([1, 5, 10]) == []


def test_too_few_steps_say_nothing() -> None:
    told: list[bytes] = []
    alarm = Alarm("target", 0.2, deliver=lambda target, body: told.append(body))
    for steps, seconds in ((100, 10.0), (200, 20.0), (205, 40.0)):
        alarm.hear(rates(steps, seconds))
    assert told == []


def test_a_command_gets_the_message_on_its_stdin(tmp_path: Path) -> None:
    deliver_alert(
        f'{sys.executable} -c \'import sys; open("{tmp_path}/told", "w").write(sys.stdin.read())\'', b'{"step": 3}'
    )
    assert json.loads((tmp_path / "told").read_text()) == {"step": 3}


def test_an_alert_that_fails_harms_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    deliver_alert("exit 3", b"{}")
    deliver_alert("http://127.0.0.1:1/nobody", b"{}")
    assert capsys.readouterr().err.count("not delivered") == 2


@pytest.mark.parametrize(("text", "share"), [("20%", 0.2), ("0.35", 0.35)])
def test_shares_are_read(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["much", "0", "120%", "-0.1"])
def test_other_shares_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--alert-drop must be"):
        parse_share(text)
