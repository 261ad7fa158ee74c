"""The loss fits the targets that the data have, whatever their form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from redline.bench.train.steps import BatchLoss
from redline.bench.workload.losses import training_loss
from redline.errors import BenchError

LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 3, 1, 2, 2, 0])
ONE_HOT = F.one_hot(CLASSES, 4)
LABELS = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]])
ENTROPY = F.cross_entropy(LOGITS, CLASSES)
RIGHT = int((LOGITS.argmax(1) == CLASSES).sum())


def on(targets: Any) -> BatchLoss:
    loss = BatchLoss(training_loss())
    loss.put(targets)
    return loss


@pytest.mark.parametrize(
    "targets",
    [CLASSES, CLASSES[:, None], CLASSES.int(), CLASSES.to(torch.uint8), ONE_HOT, ONE_HOT.float(), ONE_HOT.double()],
)
def test_classes_in_any_form_are_the_same_classes(targets: Tensor) -> None:
    loss = on(targets)
    assert loss(LOGITS).item() == pytest.approx(ENTROPY.item())
    answers = loss.answers(LOGITS)
    assert answers is not None
    assert (int(answers.right), int(answers.judged)) == (RIGHT, 6)


@pytest.mark.parametrize("targets", [LABELS, LABELS.float(), LABELS.bool()])
def test_labels_that_hold_or_not_have_a_loss_each(targets: Tensor) -> None:
    loss = on(targets)
    assert loss(LOGITS).item() == pytest.approx(F.binary_cross_entropy_with_logits(LOGITS, LABELS.float()).item())
    assert loss.answers(LOGITS) is None  # how many must be right is not said


def test_values_are_met_by_their_distance() -> None:
    values = torch.linspace(-1, 3, 6)
    loss = on(values)
    assert loss(LOGITS[:, :1]).item() == pytest.approx(F.mse_loss(LOGITS[:, 0], values).item())
    assert loss.answers(LOGITS[:, :1]) is None


def test_pixels_that_are_not_to_be_judged_are_not() -> None:
    maps = torch.randint(0, 4, (2, 5, 5), generator=torch.Generator().manual_seed(1))
    maps[:, 0] = -100
    answers = on(maps).answers(F.one_hot(maps.clamp(min=0), 4).permute(0, 3, 1, 2).float())
    assert answers is not None
    assert (int(answers.right), int(answers.judged)) == (40, 40)


def test_a_model_with_a_loss_of_its_own_is_trained_on_that() -> None:
    loss = on(CLASSES)
    assert loss({"loss": torch.tensor(0.25), "logits": LOGITS}).item() == 0.25
    assert loss.answers({"loss": torch.tensor(0.25), "logits": LOGITS}) is None


@pytest.mark.parametrize(
    ("targets", "complaint"),
    [(torch.linspace(0, 5, 6), r"targets of \[6\] do not fit"), ({"boxes": CLASSES}, "targets in a dict need a loss")],
)
def test_targets_without_a_loss_that_fits_are_told(targets: Any, complaint: str) -> None:
    with pytest.raises(BenchError, match=complaint):
        on(targets)(LOGITS)
