"""The loss fits the targets that the data have, whatever their form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from redline.bench.workload.losses import TargetLoss, other_targets, own_losses, training_loss
from redline.model.errors import BenchError

LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 3, 1, 2, 2, 0])
ONE_HOT = F.one_hot(CLASSES, 4)
LABELS = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]])
ENTROPY = F.cross_entropy(LOGITS, CLASSES)
RIGHT = int((LOGITS.argmax(1) == CLASSES).sum())


def on(targets: Any) -> TargetLoss:
    loss = training_loss(targets=targets)
    assert isinstance(loss, TargetLoss)
    return loss


@pytest.mark.parametrize(
    "targets",
    [CLASSES, CLASSES[:, None], CLASSES.int(), CLASSES.to(torch.uint8), ONE_HOT, ONE_HOT.float(), ONE_HOT.double()],
)
def test_classes_in_any_form_are_the_same_classes(targets: Tensor) -> None:
    loss = on(targets)
    assert loss(LOGITS).item() == pytest.approx(ENTROPY.item())
    answers = loss.answers(LOGITS)
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


class TestOwnLoss:
    """Found in the output of a model as it is, whatever it is called."""

    HIDDEN = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).requires_grad_() * 1.0
    ANSWER = HIDDEN @ torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    LOSS = F.cross_entropy(ANSWER, CLASSES)
    AUXILIARY = HIDDEN.softmax(1).square().sum()

    @pytest.mark.parametrize(
        ("output", "found"),
        [
            ((ANSWER, LOSS), ("1",)),
            ((LOSS, ANSWER, HIDDEN), ("0",)),
            ({"logits": ANSWER, "total": LOSS, "balance": AUXILIARY}, ("total",)),
            ((ANSWER, AUXILIARY), ()),
            ((ANSWER, HIDDEN, AUXILIARY), ()),
            ((ANSWER, LOSS, LOSS + AUXILIARY), ("2",)),  # the whole of which the other is a part
            ((ANSWER, LOSS.detach()), ()),  # a number to look at
        ],
    )
    def test_is_computed_from_the_answer(self, output: Any, found: tuple[str, ...]) -> None:
        assert own_losses(output) == found

    def test_or_changes_with_the_targets(self) -> None:
        shown, other = self.ANSWER.softmax(1), F.cross_entropy(self.ANSWER, other_targets(CLASSES))
        assert own_losses((shown, self.LOSS, self.AUXILIARY), (shown, other, self.AUXILIARY)) == ("1",)

    def test_a_number_that_is_no_part_of_it_is_named(self) -> None:
        loss = on(CLASSES)
        (told,) = loss.learn((self.ANSWER, self.AUXILIARY))
        assert "a single number (1) that is not trained on" in str(told)
        assert loss((self.ANSWER, self.AUXILIARY)).item() == pytest.approx(self.LOSS.item())

    def test_its_answers_are_judged_where_it_compares_the_same_positions(self) -> None:
        logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_() * 1.0
        tokens = torch.randint(0, 4, (2, 3), generator=torch.Generator().manual_seed(0))
        same = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        shifted = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        judged = []
        for own in (same, shifted):
            loss = on(tokens)
            loss.learn({"loss": own, "logits": logits})
            judged.append(loss.answers({"loss": own, "logits": logits}))
        assert int(judged[0].judged) == 6
        assert judged[1] is None


@pytest.mark.parametrize("targets", [CLASSES, torch.zeros(3, dtype=torch.long), ONE_HOT.float(), torch.ones(4)])
def test_other_targets_are_others(targets: Tensor) -> None:
    other = other_targets(targets)
    assert other.shape == targets.shape
    assert not torch.equal(other, targets)
    assert 0 <= int(other.min()) <= int(other.max()) <= int(targets.max()) + 1


def test_a_first_batch_with_one_kind_of_label_only_has_labels_all_the_same() -> None:
    loss = on(torch.zeros(6, dtype=torch.long))
    assert loss(LOGITS[:, :1]).item() == pytest.approx(
        F.binary_cross_entropy_with_logits(LOGITS[:, 0], torch.zeros(6)).item()
    )
