"""The loss is the one given, else the output's own, else the one that fits the targets, whatever their form."""

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

from redline.bench.workload.losses import TrainingLoss
from redline.model.errors import BenchError
from redline.model.note import Note


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def on(targets: Any) -> TrainingLoss:
    return TrainingLoss(targets=targets)


LOGITS = drawn(6, 4)
CLASSES = torch.tensor([0, 3, 1, 2, 2, 0])
ONE_HOT = F.one_hot(CLASSES, 4)
LABELS = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]])
VALUES = torch.linspace(-1, 3, 6)
TEXT, TOKENS = drawn(2, 5, 7), torch.arange(10).view(2, 5) % 7
OWN = torch.tensor(2.5, requires_grad=True)


def average(output: Tensor, target: Tensor) -> Tensor:
    return (output.sum(1) - target).square().mean()


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


Inception = namedtuple("Inception", ["logits", "aux_logits"])
GoogLeNet = namedtuple("GoogLeNet", ["logits", "aux_logits2", "aux_logits1"])
EVEN, UNIT = torch.zeros(2, 10), torch.tensor(10.0).log().item()

KNOWN: list[tuple[TrainingLoss, Any, Any, str]] = [
    # given by the person
    (TrainingLoss(torch.sum), LOGITS, LOGITS.sum(), "sum"),
    (TrainingLoss(average, targets=VALUES), LOGITS, average(LOGITS, VALUES), "average"),
    (TrainingLoss(nn.CrossEntropyLoss(), targets=CLASSES), LOGITS, F.cross_entropy(LOGITS, CLASSES), "CrossEntropyLoss"),
    # the output's own
    (TrainingLoss(), OWN, 2.5, "output.loss"),
    (TrainingLoss(), SimpleNamespace(loss=OWN), 2.5, "output.loss"),
    (TrainingLoss(), {"loss": OWN.reshape(1), "logits": LOGITS}, 2.5, "output.loss"),
    (on(CLASSES), Output(OWN, LOGITS), 2.5, "output.loss"),
    (TrainingLoss(), {"boxes": OWN, "classes": torch.tensor(0.5)}, 3.0, "sum of the output's losses"),
    # classes and values in any form
    *((on(targets), LOGITS, F.cross_entropy(LOGITS, CLASSES), "cross_entropy")
      for targets in (CLASSES, CLASSES[:, None], CLASSES.int(), CLASSES.to(torch.uint8), ONE_HOT, ONE_HOT.double())),
    *((on(targets), LOGITS, F.binary_cross_entropy_with_logits(LOGITS, LABELS.float()), "binary_cross_entropy_with_logits")
      for targets in (LABELS, LABELS.float(), LABELS.bool())),
    (on(CLASSES * 0), LOGITS[:, :1], F.binary_cross_entropy_with_logits(LOGITS[:, 0], torch.zeros(6)),
     "binary_cross_entropy_with_logits"),
    (on(VALUES), LOGITS[:, :1], F.mse_loss(LOGITS[:, 0], VALUES), "mse"),
    (on(TOKENS), TEXT, F.cross_entropy(TEXT.flatten(0, 1), TOKENS.flatten()), "cross_entropy"),
    (on(CLASSES), Output(None, LOGITS), F.cross_entropy(LOGITS, CLASSES), "cross_entropy"),
    # drawn: even logits cost the logarithm of the number of classes, and torchvision's auxiliary heads have weights
    *((TrainingLoss(), torch.zeros(shape), torch.tensor(float(many)).log(), "cross_entropy on random targets")
      for shape, many in (((4, 10), 10), ((2, 6, 50), 50), ((2, 5, 4, 4), 5), ((2, 3, 2, 2, 2), 3))),
    (TrainingLoss(), Inception(EVEN, EVEN), 1.4 * UNIT, "cross_entropy on random targets"),
    (TrainingLoss(), GoogLeNet(EVEN, EVEN, EVEN), 1.6 * UNIT, "cross_entropy on random targets"),
    (TrainingLoss(), Inception(EVEN, None), UNIT, "cross_entropy on random targets"),
    (TrainingLoss(), {"out": torch.zeros(2, 10, 4, 4), "aux": torch.zeros(2, 10, 4, 4)}, 1.5 * UNIT,
     "cross_entropy on random targets"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "output", "value", "name"), KNOWN)
def test_it_is_what_a_person_would_compute(loss: TrainingLoss, output: Any, value: Any, name: str) -> None:
    assert loss(output).item() == pytest.approx(torch.as_tensor(value).item(), rel=1e-5)
    assert loss(output).ndim == 0
    assert loss.name == name
    assert loss.chosen(output) == loss(output), "the plain step computes the same"


@pytest.mark.parametrize(
    ("given", "output", "name"),
    [
        (None, drawn(4), "mse on random targets"),
        (None, drawn(4, 1), "mse on random targets"),
        (None, {"features": [drawn(2, 10), drawn(2, 4, 8, 8)], "note": "text"}, "cross_entropy on random targets"),
        (nn.CrossEntropyLoss(), LOGITS, "CrossEntropyLoss on random targets"),
        (lambda output, targets: F.nll_loss(output.log_softmax(1), targets), LOGITS, "a lambda on random targets"),
        (nn.MSELoss(), LOGITS, "MSELoss on random targets"),
        (F.l1_loss, drawn(4, 4), "l1_loss on random targets"),
        (lambda output, target: F.huber_loss(output, target), LOGITS, "a lambda on random targets"),
        (nn.BCEWithLogitsLoss(), LOGITS, "BCEWithLogitsLoss on random targets"),
    ],
)
def test_targets_that_are_drawn_suit_the_loss_and_reach_every_output(given: Any, output: Any, name: str) -> None:
    loss = TrainingLoss(given)
    leaves = output["features"] if isinstance(output, dict) else [output]
    for gradient in torch.autograd.grad(loss(output), leaves):
        assert gradient.isfinite().all()
        assert gradient.any()
    assert loss.name == name


@pytest.mark.parametrize(
    ("given", "targets", "output", "says"),
    [
        (lambda output: output.sum().item(), None, LOGITS,
         r"gave float where a tensor belongs \(return the tensor, not its .item"),
        (lambda output: output.sum(1), None, LOGITS, r"gave \[6\] values, not one: reduce them with .mean\(\)"),
        (lambda output: output.argmax(), None, LOGITS, "gave torch.int64, which has no gradient"),
        (lambda output: output.detach().sum(), None, LOGITS, "does not depend on the output: was it detached"),
        (lambda output, target, weight: output.sum(), None, LOGITS, "must be given 3 things"),
        (lambda output: output.sum(), CLASSES, LOGITS, "targets were given, but the loss a lambda takes the output alone"),
        (None, [CLASSES], LOGITS, "targets in a list need a loss of their own"),
        (None, {"boxes": CLASSES}, LOGITS, "targets in a dict need a loss of their own"),
        (None, torch.linspace(0, 5, 6), LOGITS, r"targets of \[6\] do not fit"),
        (lambda output, target: output.sum() + target.boxes, None, LOGITS, "failed on targets drawn at random .* give your own"),
        (None, None, {"ids": CLASSES}, "no loss to train on: the model returned dict without a floating tensor"),
        (None, None, (OWN, OWN + 1, OWN * 2), r"nothing but single numbers \(0, 1, 2\), none of which is known to be the loss"),
        (None, None, LOGITS.to(torch.complex64), "no loss to train on: the model returned a tensor of complex64"),
    ],
)  # fmt: skip
def test_what_breaks_the_contract_is_told_in_one_line(given: Any, targets: Any, output: Any, says: str) -> None:
    with pytest.raises(BenchError, match=says) as caught:
        TrainingLoss(given, targets=targets)(output)
    assert caught.value.kind == "user"
    assert "\n" not in str(caught.value)


def test_on_data_a_loss_must_take_targets() -> None:
    with pytest.raises(BenchError, match=r"on data it must be loss\(output, target\)"):
        TrainingLoss(lambda output: output.sum()).start_on_data(CLASSES)
    loss = TrainingLoss(average)
    loss.start_on_data(VALUES)
    assert (loss(LOGITS), loss.name) == (average(LOGITS, VALUES), "average")
    loss.put(VALUES + 1)
    assert loss.chosen(LOGITS) == average(LOGITS, VALUES + 1), "the plain step reads the targets of its batch"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_number_formats_are_those_of_a_plain_loop(dtype: torch.dtype) -> None:
    """Half precision sums badly, hence fp32; a loss of the person's own is left alone, and gets its targets in that format."""
    output = LOGITS.detach().to(dtype)
    assert TrainingLoss()(output).dtype is (torch.float32 if dtype is torch.float16 else torch.float64)
    if dtype is torch.float16:
        assert TrainingLoss(nn.MSELoss(), targets=torch.ones(6, 4))(output).dtype is dtype


class Numbers(nn.Module):
    """Returns its logits with single numbers of some kinds."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = kinds
        self.body, self.head, self.scale = nn.Linear(4, 4), nn.Linear(4, 3), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        logits = self.head(hidden)
        loss, penalty = logits.logsumexp(1).mean(), hidden.square().mean()
        parts = {
            "loss": loss, "scale": self.scale.exp(), "penalty": penalty, "whole": loss + penalty,
            "logits": logits, "shown": logits.detach().softmax(1), "watched": loss.detach(),
        }  # fmt: skip
        return tuple(parts[kind] for kind in self.kinds)


@pytest.mark.parametrize(
    ("kinds", "name", "untrained"),
    [
        (("logits", "loss"), "output 1", ""),
        (("loss", "logits"), "output 0", ""),
        (("logits", "loss", "penalty"), "output 1", "2"),
        (("logits", "loss", "whole"), "output 2", "1"),
        (("shown", "loss", "penalty"), "output 1", "2"),
        (("logits", "penalty"), "cross_entropy on random targets", "1"),
        (("logits", "scale"), "cross_entropy on random targets", "1"),
        (("logits", "watched"), "cross_entropy on random targets", ""),
    ],
)
def test_a_loss_beside_the_logits_is_the_number_that_depends_on_all_that_they_do(
    kinds: tuple[str, ...], name: str, untrained: str
) -> None:
    model, x = Numbers(*kinds), torch.randn(2, 4)
    for fake in (False, True):  # one model after the other, as a count comes after a step
        notes: list[Note] = []
        loss = TrainingLoss(notes=notes)
        with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
            loss(Numbers(*kinds)(x))
        assert loss.name == name
        loss(model(x))
        with torch.no_grad():
            loss(model(x))
        assert loss.name == name, "it is found again without gradients"
        assert [str(one).startswith(f"the model also returns a single number ({untrained})") for one in notes] == [
            True
        ] * bool(untrained)


def test_answers_are_judged_where_they_and_the_loss_are_about_the_same_positions() -> None:
    maps = torch.randint(0, 4, (2, 5, 5), generator=torch.Generator().manual_seed(1))
    maps[:, 0] = -100  # not to be judged
    right = int((LOGITS.argmax(1) == CLASSES).sum())
    shifted = F.cross_entropy(TEXT[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    for targets, output, judged in (
        (CLASSES, LOGITS, (right, 6)),
        (ONE_HOT.float(), LOGITS, (right, 6)),
        (maps, F.one_hot(maps.clamp(min=0), 4).permute(0, 3, 1, 2).float(), (40, 40)),
        (LABELS, LOGITS, None),  # how many must be right is not said
        (VALUES, LOGITS[:, :1], None),
        (CLASSES, {"loss": OWN, "logits": LOGITS}, (right, 6)),
        (TOKENS, {"loss": shifted, "logits": TEXT}, None),
    ):
        loss = on(targets)
        loss.learn(output)
        answers = loss.answers(output)
        found = None if answers is None else (int(answers.right), int((answers.classes < answers.known).sum()))
        assert found == judged


def test_an_output_of_another_shape_at_each_call_has_no_targets_to_draw() -> None:
    for given in (None, nn.CrossEntropyLoss()):
        loss = TrainingLoss(given)
        loss(drawn(6, 4))
        with pytest.raises(
            BenchError, match=r"another shape at each call \(its targets would be \[6\], then \[5\]\): give a loss"
        ):
            loss(drawn(5, 4))


def test_targets_are_drawn_once_and_by_seed_and_stay_out_of_fake_and_inference_modes() -> None:
    logits, loss = torch.randn(64, 10), TrainingLoss(seed=1)
    for mode in (FakeTensorMode, torch.inference_mode):
        with mode():
            loss(torch.randn(64, 10))
    assert loss(logits) == loss(logits) == TrainingLoss(seed=1)(logits) != TrainingLoss(seed=2)(logits)
    logits.requires_grad_()
    loss(logits).backward()
    assert logits.grad.any()


def test_the_loss_compiles_whole_once_its_targets_are_there() -> None:
    loss, logits = TrainingLoss(), torch.randn(4, 10)
    expected = loss(logits)
    torch._dynamo.reset()
    assert torch.compile(lambda output: loss(output), backend="eager", fullgraph=True)(logits) == expected
