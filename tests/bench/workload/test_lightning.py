"""Modules of the real Lightning library, by their own training step and optimizer, or refused in one line."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.bench.workload.called import TrainsItself
from redline.bench.workload.handed import sort_out, workload_of
from redline.bench.workload.step import Setup, TrainingStep
from redline.bench.workload.workload import Workload
from redline.model.errors import BenchError
from redline.model.spec import WorkloadSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch")

BATCH = (torch.randn(4, 8), torch.randint(0, 3, (4,)))


class Plain(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is nobody to log to
            self.log("train_loss", loss)
        return loss if self.current_epoch == self.global_step == 0 else None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Scheduled(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class MadeLate(Plain):
    def configure_model(self) -> None:
        self.head = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": F.cross_entropy(self.head(self(batch[0])), batch[1])}


class Several(Plain):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[2])]


class ByHand(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ReadsItsTrainer(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) * (1 + self.trainer.max_epochs)


class ReadsItsOptimizer(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers()
        return F.cross_entropy(self(batch[0]), batch[1])


class PlansWithItsTrainer(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]


class WithoutOptimizer(Plain):
    def configure_optimizers(self) -> None:
        return None


class Augments(Plain):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class ForwardAlone(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def workload(module: Any, inputs: Any = BATCH) -> Workload:
    handed = sort_out((module, inputs), "factory")
    spec = WorkloadSpec(model="live:net", task="train")
    return workload_of(handed, spec, whose="factory", source="user", identity="", seed=0, notes=[])


def trained(module: Any, inputs: Any = BATCH) -> tuple[Workload, list[float]]:
    from redline.bench.device.cpu import CpuDevice

    made = workload(module, inputs)
    setup = Setup(workload=made, device=CpuDevice(), model=made.model, args=made.args, kwargs=made.kwargs)
    step = TrainingStep(setup, "sgd")
    with step.context():
        return made, [float(step()) for _ in range(3)]


@pytest.mark.parametrize(
    ("module", "optimizer"), [(Plain, "AdamW"), (Scheduled, "SGD"), (MadeLate, "AdamW")], ids=lambda each: str(each)
)
def test_its_own_step_and_optimizer_train_it(module: type, optimizer: str) -> None:
    net = module()
    before = net.net[0].weight.detach().clone()
    made, losses = trained(net)
    assert isinstance(made.model, TrainsItself)
    assert made.info().optimizer == f"{optimizer} of its own"
    assert losses[2] < losses[0]
    assert not torch.equal(net.net[0].weight, before)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Several, "Several has 2 optimizers: measure its loop as a function (--task step)"),
        (ByHand, "ByHand optimizes by hand: measure its loop as a function (--task step)"),
        (
            ReadsItsTrainer,
            "training_step of ReadsItsTrainer asks for its Trainer, and a bare step has none: measure its loop as a "
            "function (--task step)",
        ),
        (ReadsItsOptimizer, "training_step of ReadsItsOptimizer asks for its Trainer, and a bare step has none"),
        (PlansWithItsTrainer, "configure_optimizers of PlansWithItsTrainer asks for its Trainer"),
        (WithoutOptimizer, "configure_optimizers of WithoutOptimizer gave NoneType, not an optimizer"),
    ],
)
def test_what_a_bare_step_cannot_do_is_refused_in_one_line(module: type, says: str) -> None:
    with pytest.raises(BenchError) as told:
        trained(module())
    assert says in str(told.value)
    assert "\n" not in str(told.value)


def test_a_hook_that_is_not_called_is_named() -> None:
    (told,) = workload(Augments()).notes
    assert "on_after_batch_transfer of Augments not called" in str(told)


def test_without_a_training_step_it_is_a_module_like_any_other() -> None:
    made, losses = trained(ForwardAlone(), torch.randn(4, 8))
    assert made.loss.name == "cross_entropy on random targets"
    assert losses[2] < losses[0]
