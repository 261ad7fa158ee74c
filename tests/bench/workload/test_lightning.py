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


def sgd(self: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(self.parameters(), lr=0.1)


def variant(**own: Any) -> type:
    """A module of these methods and attributes beside those of `Plain`."""
    return type("Own", (Plain,), own)


def scheduled(self: Any) -> Any:
    optimizer = sgd(self)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_a_head(self: Any) -> None:
    self.head = nn.Linear(3, 3)


def use_the_head(self: Any, batch: Any, batch_idx: int) -> Any:
    return {"loss": F.cross_entropy(self.head(self(batch[0])), batch[1])}


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
    ("module", "optimizer"),
    [
        (Plain, "AdamW"),
        (variant(configure_optimizers=scheduled), "SGD"),
        (variant(configure_optimizers=lambda self: [sgd(self)]), "SGD"),
        (variant(configure_optimizers=lambda self: ([sgd(self)], [])), "SGD"),
        (variant(configure_optimizers=lambda self: [{"optimizer": sgd(self), "lr_scheduler": None}]), "SGD"),
        (variant(configure_model=make_a_head, training_step=use_the_head), "AdamW"),
    ],
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
    ("own", "says"),
    [
        (
            {"configure_optimizers": lambda self: [sgd(self), sgd(self)]},
            "Own has 2 optimizers: measure its loop as a function",
        ),
        ({"configure_optimizers": lambda self: None}, "Own has 0 optimizers"),
        ({"configure_optimizers": lambda self: torch.optim.LBFGS(self.parameters())}, "LBFGS"),
        ({"automatic_optimization": False}, "Own optimizes by hand: measure its loop as a function (--task step)"),
        ({"configure_gradient_clipping": lambda self: None}, "has its own configure_gradient_clipping"),
    ],
)
def test_what_a_bare_step_cannot_do_is_refused_in_one_line(own: dict[str, Any], says: str) -> None:
    with pytest.raises(BenchError) as told:
        trained(variant(**own)())
    assert says in str(told.value)
    assert "\n" not in str(told.value)


def test_without_a_training_step_it_is_a_module_like_any_other() -> None:
    made, losses = trained(ForwardAlone(), torch.randn(4, 8))
    assert made.loss.name == "cross_entropy on random targets"
    assert losses[2] < losses[0]
