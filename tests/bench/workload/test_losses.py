from __future__ import annotations

from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from redline.bench.workload.losses import DefaultLoss, takes_targets, training_loss
from redline.model.errors import BenchError


def test_the_loss_given_is_used() -> None:
    assert training_loss(lambda output: output.sum())(torch.ones(3)).item() == 3


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(), F.cross_entropy, lambda output, targets: F.nll_loss(output.log_softmax(1), targets)],
    ids=["module", "function", "lambda"],
)
def test_a_loss_of_two_is_given_class_targets(loss: Any) -> None:
    value = training_loss(loss)(torch.randn(4, 10, requires_grad=True))
    value.backward()
    assert value.isfinite()


@pytest.mark.parametrize("loss", [nn.MSELoss(), F.l1_loss, nn.BCEWithLogitsLoss()], ids=["mse", "l1", "bce"])
def test_losses_between_values_get_targets_like_the_output(loss: Any) -> None:
    assert training_loss(loss)(torch.randn(4, 10)).isfinite()


def test_which_losses_take_targets() -> None:
    assert takes_targets(nn.CrossEntropyLoss())
    assert takes_targets(lambda output, targets: output)
    assert not takes_targets(lambda output: output)
    assert not takes_targets(lambda output, weight=1.0: output)
    assert not takes_targets(lambda *parts: parts[0])


OUTPUT = torch.randn(4, 3, requires_grad=True)


def average(output: Tensor, target: Tensor) -> Tensor:
    return (output.sum(1) - target).square().mean()


@pytest.mark.parametrize(
    ("loss", "targets", "says"),
    [
        (
            lambda output: output.sum().item(),
            None,
            r"gave float where a tensor belongs \(return the tensor, not its .item",
        ),
        (lambda output: output.sum(1), None, r"gave \[4\] values, not one: reduce them with .mean\(\)"),
        (lambda output: output.argmax(), None, "gave torch.int64, which has no gradient"),
        (lambda output: output.detach().sum(), None, "does not depend on the output: was it detached"),
        (lambda output, target, weight: output.sum(), None, "must be given 3 things"),
        (
            lambda output: output.sum(),
            torch.ones(4),
            "targets were given, but the loss a lambda takes the output alone",
        ),
        (None, [torch.ones(4)], "targets in a list need a loss of their own"),
        (
            lambda output, target: output.sum() + target.boxes,
            None,
            "failed on targets drawn at random .* give your own",
        ),
    ],
    ids=["number", "unreduced", "integer", "detached", "three", "unwanted", "structured", "unfit"],
)
def test_the_contract_is_checked_in_one_line(loss: Any, targets: Any, says: str) -> None:
    with pytest.raises(BenchError, match=says) as caught:
        training_loss(loss, targets=targets)(OUTPUT)
    assert caught.value.kind == "user"
    assert "\n" not in str(caught.value)


def test_targets_of_ones_own_are_used() -> None:
    target = torch.tensor([1.0, 2.0, 3.0, 4.0])
    loss = training_loss(average, targets=target)
    assert loss(OUTPUT) == average(OUTPUT, target)
    assert loss.name == "average"
    assert training_loss(targets=torch.tensor([0, 1, 2, 1]))(OUTPUT) == F.cross_entropy(
        OUTPUT, torch.tensor([0, 1, 2, 1])
    )
    assert training_loss(targets=torch.ones(4, 3))(OUTPUT) == F.mse_loss(OUTPUT, torch.ones(4, 3))
    tokens = torch.zeros(2, 5, 7, requires_grad=True)
    assert training_loss(targets=torch.ones(2, 5, dtype=torch.long))(tokens).item() == pytest.approx(
        torch.tensor(7.0).log().item()
    )


def test_targets_follow_the_number_format_of_the_output() -> None:
    loss = training_loss(nn.MSELoss(), targets=torch.ones(4, 3))
    half = OUTPUT.detach().half().requires_grad_()
    value = loss(half)
    value.backward()
    assert value.dtype is torch.float16
    assert loss(OUTPUT).dtype is torch.float32


def test_an_output_that_is_all_losses_is_summed() -> None:
    losses = {"boxes": torch.tensor(2.0, requires_grad=True), "classes": torch.tensor(0.5)}
    loss = training_loss()
    assert loss(losses).item() == 2.5
    assert loss.name == "sum of the output's losses"


def test_the_name_says_what_was_trained_on() -> None:
    for loss, output, name in (
        (training_loss(), OUTPUT, "cross_entropy on random targets"),
        (training_loss(), OUTPUT[:, 0], "mse on random targets"),
        (training_loss(), {"loss": OUTPUT.sum()}, "output.loss"),
        (training_loss(F.l1_loss), OUTPUT, "l1_loss on random targets"),
        (training_loss(nn.CrossEntropyLoss(), targets=torch.zeros(4, dtype=torch.long)), OUTPUT, "CrossEntropyLoss"),
    ):
        loss(output)
        assert loss.name == name


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


def test_the_outputs_own_loss_is_taken() -> None:
    own = torch.tensor(2.5)
    default = DefaultLoss()
    assert default(SimpleNamespace(loss=own)).item() == 2.5
    assert default({"loss": own, "logits": torch.randn(2, 3)}).item() == 2.5
    assert default(Output(own, torch.randn(2, 3))).item() == 2.5
    assert default(own).item() == 2.5, "a model may return its loss"
    assert default({"loss": own.reshape(1)}).ndim == 0


class Tuple(nn.Module):
    """Returns its logits with a number of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.body, self.head, self.scale = (
            kind,
            nn.Linear(4, 4),
            nn.Linear(4, 3),
            nn.Parameter(torch.ones(())),
        )

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        logits = self.head(hidden)
        numbers = {"loss": logits.logsumexp(1).mean(), "scale": self.scale.exp(), "penalty": hidden.square().mean()}
        return logits, numbers[self.kind]


def test_a_loss_beside_the_logits_is_the_number_that_depends_on_all_that_they_do() -> None:
    x = torch.randn(2, 4)
    for fake in (False, True):  # one model after the other, as a count comes after a step
        loss = DefaultLoss()
        with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
            output = Tuple("loss")(x)
            assert loss(output) is output[1]
        assert loss.name == "output 1"


@pytest.mark.parametrize("kind", ["scale", "penalty"])
def test_another_number_beside_the_logits_is_no_loss(kind: str) -> None:
    loss = DefaultLoss()
    loss(Tuple(kind)(torch.randn(2, 4)))
    assert loss.name == "cross_entropy on random targets"


def test_the_same_loss_is_found_again_without_gradients() -> None:
    loss, model, x = DefaultLoss(), Tuple("loss"), torch.randn(2, 4)
    with torch.no_grad():
        loss(model(x))
    loss(model(x))
    with torch.no_grad():
        loss(model(x))
    assert loss.name == "output 1"


def test_an_output_without_its_own_loss_is_trained_on_its_logits() -> None:
    logits = torch.randn(2, 3)
    assert DefaultLoss()(Output(None, logits)).item() == pytest.approx(DefaultLoss()({"logits": logits}).item())


@pytest.mark.parametrize("shape", [(4, 10), (2, 6, 50), (2, 5, 4, 4), (2, 3, 2, 2, 2)])
def test_cross_entropy_finds_the_classes(shape: tuple[int, ...]) -> None:
    """Even logits cost the logarithm of the number of classes, and there is a gradient for each."""
    logits = torch.zeros(shape, requires_grad=True)
    loss = DefaultLoss()(logits)
    classes = shape[2] if len(shape) == 3 else shape[1]
    assert loss.item() == pytest.approx(torch.tensor(float(classes)).log().item(), rel=1e-5)
    loss.backward()
    assert logits.grad is not None
    assert (logits.grad != 0).all()


def test_outputs_without_classes_are_trained_as_values() -> None:
    for shape in ((4,), (4, 1)):
        output = torch.randn(shape, requires_grad=True)
        DefaultLoss()(output).backward()
        assert output.grad is not None
        assert (output.grad != 0).all()


Inception = namedtuple("Inception", ["logits", "aux_logits"])
GoogLeNet = namedtuple("GoogLeNet", ["logits", "aux_logits2", "aux_logits1"])


def test_auxiliary_heads_weigh_as_torchvision_trains_them() -> None:
    even = torch.zeros(2, 10)
    unit = torch.tensor(10.0).log().item()
    default = DefaultLoss()
    assert default(Inception(even, even)).item() == pytest.approx(1.4 * unit)
    assert default(GoogLeNet(even, even, even)).item() == pytest.approx(1.6 * unit)
    assert default(Inception(even, None)).item() == pytest.approx(unit)
    assert default({"out": torch.zeros(2, 10, 4, 4), "aux": torch.zeros(2, 10, 4, 4)}).item() == pytest.approx(
        1.5 * unit
    )


def test_every_part_of_an_unnamed_structure_counts() -> None:
    parts = [torch.zeros(2, 10, requires_grad=True), torch.zeros(2, 4, 8, 8, requires_grad=True)]
    DefaultLoss()({"features": parts, "note": "text"}).backward()
    assert all(part.grad is not None for part in parts)


def test_logits_are_judged_in_single_precision() -> None:
    assert DefaultLoss()(torch.randn(2, 10, dtype=torch.float16)).dtype is torch.float32


def test_an_output_with_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(BenchError, match="no loss to train on") as caught:
        DefaultLoss()({"ids": torch.ones(2, dtype=torch.int64)})
    assert caught.value.kind == "user"


def test_targets_are_drawn_once_and_by_seed() -> None:
    logits = torch.randn(64, 10)
    default = DefaultLoss(seed=1)
    assert default(logits) == default(logits) == DefaultLoss(seed=1)(logits)
    assert default(logits) != DefaultLoss(seed=2)(logits)


def test_the_loss_compiles_whole_once_its_targets_are_there() -> None:
    default = DefaultLoss()
    logits = torch.randn(4, 10)
    expected = default(logits)
    torch._dynamo.reset()
    compiled = torch.compile(lambda output: default(output), backend="eager", fullgraph=True)
    assert compiled(logits) == expected


def test_fake_targets_neither_stay_nor_meet_real_ones() -> None:
    default = DefaultLoss()
    with FakeTensorMode():
        default(torch.randn(4, 10))
    assert default(torch.randn(4, 10)).isfinite()
    with FakeTensorMode():
        default(torch.randn(4, 10))


def test_targets_first_drawn_under_inference_mode_still_train() -> None:
    default = DefaultLoss()
    with torch.inference_mode():
        default(torch.randn(4, 10))
    logits = torch.randn(4, 10, requires_grad=True)
    default(logits).backward()
    assert logits.grad.abs().sum() > 0
