"""Are the numbers still right? Every recipe is compared with strict fp32 on fixed inputs before it is timed.

Inference compares outputs on two sets of inputs (one where the model takes no second), over the part of the output
that depends on the input: a recipe that ignores its input must not pass because the model's output hardly moves.
Training compares the loss over some steps, over the distance the loss travelled. Both are judged against a floor: fp32
arithmetic on weights and inputs rounded to the recipe's number format. Sound recipes sit at 1 to 2 times the floor; 4 times is the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.recipe.fastpath import NOT_COMPARED, hidden_positions
from redline.bench.recipe.judging import (
    ANOTHER_SEED,
    ASKING_TWICE,
    FEW_BITS,
    SMALLEST_LOSS_TOLERANCE,
    as_reference,
    judged,
    not_finite,
)
from redline.bench.recipe.outputs import (
    Answer,
    Difference,
    answer_of,
    difference,
    finite_or_none,
    path_difference,
    relative_path_error,
    stands_still,
)
from redline.bench.recipe.rounding import (
    own_format,
    own_unit,
    rounded_inputs,
    rounded_weights,
    unchanged_afterwards,
    unchanged_buffers,
)
from redline.bench.workload.inputs import Inputs, copied, input_tensors
from redline.bench.workload.step import InferenceStep, Setup, TrainingStep
from redline.bench.workload.workload import Second, Workload
from redline.model.note import note
from redline.model.record import Numerics, SecondInputs
from redline.model.spec import OptimizerName

DRAWS_FOR_EQUALITY = 3
ANSWER_SEED = 0
LONGER_PATH = 4
"""Times the steps that were asked for: where the loss stands still over those."""
NOTHING_TO_COMPARE = Numerics(
    method="unchecked",
    reason=note("unchecked", "not checked: the model returns neither tensors nor numbers that could be compared"),
)


@dataclass
class OutputReference:
    """Strict fp32's answers on two sets of inputs, and how far mere rounding of numbers moves them."""

    inputs: list[Inputs]
    outputs: list[Answer]
    """One for each set of inputs."""
    floor: float
    number_format: str
    second: SecondInputs | None
    """Where the second set came from; None where there is one set alone."""
    mover: str = "rounding"
    """What sets the floor: rounding, or asking twice where a model keeps state."""
    seed_floor: float | None = None
    """How far another seed moves the outputs of a model that draws random numbers; None where it draws none."""
    own_format: str = "fp32"
    """What the reference itself computes in."""
    hidden: list[list[Tensor | None]] = field(default_factory=list)
    """For each set of inputs and each floating output: positions that are not compared, as a mask hides them."""

    @property
    def is_repeatable(self) -> bool:
        """Whether no chance is in these outputs."""
        return self.seed_floor is None and self.mover == "rounding"

    @classmethod
    def of(cls, workload: Workload, device: Device, number_format: str, seed: int) -> OutputReference:
        step = InferenceStep(_strict(workload, device))
        keep_if_written(workload, step.context)
        inputs: list[Inputs] = [workload.originals or (workload.args, workload.kwargs)]
        torch.manual_seed(ANSWER_SEED)
        fresh = device.random_state()
        outputs = [_answers(step, inputs[0])]
        draws_random_numbers = not torch.equal(fresh, device.random_state())
        second = workload.second_inputs(seed + 1)
        answers = None if second is None else _second_answers(step, second, outputs[0], workload)
        if second is not None and answers is not None:
            inputs, outputs = [*inputs, second.inputs], [*outputs, answers]
        how = second.how if second is not None and answers is not None else None
        floor = max(_floor(step, inputs, outputs, number_format), own_unit(workload.model))
        repeated = difference([_answers(step, each) for each in inputs], outputs).rel_l2
        # Where the same question twice moves them as much, that is the cause, and rounding only asks once more.
        mover = ASKING_TWICE if repeated > floor / 2 else "rounding"
        seed_floor = None
        if draws_random_numbers:
            seed_floor = difference([_answers(step, each, ANSWER_SEED + 1) for each in inputs], outputs).rel_l2
        floor, own = max(floor, repeated), own_format(workload.model)
        hidden = [
            hidden_positions(workload.model, answer, partial(_answers, step, each))
            for each, answer in zip(inputs, outputs, strict=True)
        ]
        if any(each is not None for positions in hidden for each in positions):
            workload.notes.append(NOT_COMPARED)
        return cls(inputs, outputs, floor, number_format, how, mover, seed_floor, own, hidden)

    def judge(self, step: InferenceStep, setup: Setup) -> Numerics:
        found = [_answers(step, setup.prepared_inputs(*given)) for given in self.inputs]
        if [answer.form for answer in found] != [answer.form for answer in self.outputs]:
            why = note("other-structure", "the outputs have another structure than the reference's")
            return Numerics(number_format=self.number_format, reason=why, second_inputs=self.second)
        if self.outputs[0].is_empty:
            return NOTHING_TO_COMPARE
        self._leave_out_hidden(found)
        apart = difference(found, self.outputs)
        verdict = judged(apart, self.floor, self.number_format, mover=self.mover)
        if not verdict.passed and apart.finite and self.seed_floor is not None and self.seed_floor > self.floor:
            # A compiler or another number format draws other numbers from the same seed.
            verdict = judged(apart, self.seed_floor, self.number_format, mover=ANOTHER_SEED)
        return msgspec.structs.replace(verdict, second_inputs=self.second)

    def _leave_out_hidden(self, found: list[Answer]) -> None:
        """Where nobody is meant to look, the reference's own numbers stand for what was found."""
        for own, answer, positions in zip(found, self.outputs, self.hidden, strict=True):
            for number, mask in enumerate(positions):
                if mask is not None and own.numbers[number].shape == answer.numbers[number].shape:
                    own.numbers[number][mask] = answer.numbers[number][mask]

    def as_numerics(self) -> Numerics:
        """For the baseline, which is the reference."""
        if self.outputs[0].is_empty:
            return NOTHING_TO_COMPARE
        own = difference(self.outputs, self.outputs)
        return Numerics(
            **own.told(),
            method="reference",
            number_format=self.own_format,
            passed=own.finite,
            reason=as_reference(self.own_format) if own.finite else not_finite(self.own_format, "output"),
            second_inputs=self.second,
        )


def _floor(step: InferenceStep, inputs: list[Inputs], outputs: list[Answer], number_format: str) -> float:
    """How far rounding alone moves the outputs.

    Few integers either flip or do not, and one draw says little about how often: they are asked several times, the
    weights slightly moved before each rounding.
    """
    floors = []
    for draw in range(1 + DRAWS_FOR_EQUALITY):
        with rounded_weights(step.workload.model, number_format, draw=draw):
            rounded = [_rounded_answers(step, each, number_format) for each in inputs]
        if [answer.form for answer in rounded] != [answer.form for answer in outputs]:
            return math.inf
        found = difference(rounded, outputs)
        floors.append(found.rel_l2)
        if not found.by_equality:
            break
    return max(floors)


def _answers(step: InferenceStep, inputs: Inputs, seed: int = ANSWER_SEED) -> Answer:
    """On copies, because a model may write into its inputs and buffers, and with the same random numbers each time."""
    torch.manual_seed(seed)
    with unchanged_buffers(step.workload.model):
        return answer_of(step.on(*copied(inputs)))


def _rounded_answers(step: InferenceStep, inputs: Inputs, number_format: str) -> Answer:
    """On rounded inputs, or on exact ones where rounded the model refuses them: shares that no longer sum to one."""
    try:
        return _answers(step, rounded_inputs(inputs, number_format))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return _answers(step, inputs)


def _second_answers(step: InferenceStep, second: Second, first: Answer, workload: Workload) -> Answer | None:
    """The answers to the second set; None, with a note, where the model does not take it or answers in another form."""
    why, answers = "", None
    try:
        answers = _answers(step, second.inputs)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        why = f"the model fails on a second one: {one_line(error)}"
    if answers is not None and answers.form != first.form:
        why = "the outputs of a second one have another structure"
    elif answers is not None and first.is_finite and not answers.is_finite:
        why = "the outputs of a second one are not finite"
    if why:
        workload.notes.append(note("one-input-set", f"outputs are compared on one set of inputs: {why}"))
    return None if why else answers


@dataclass
class LossReference:
    """Strict fp32's loss over some steps from the same start, and how far rounding the start moves it."""

    losses: list[float]
    floor: float
    seed_floor: float | None
    """How far another seed moves it, where the model draws random numbers."""
    number_format: str
    own_format: str
    seed: int
    run: Callable[[TrainingStep], torch.Tensor] = field(repr=False)

    @classmethod
    def of(
        cls,
        workload: Workload,
        device: Device,
        number_format: str,
        seed: int,
        steps: int,
        optimizer: OptimizerName,
        distribute: Callable[[Setup], None] = lambda setup: None,
        any_of: Callable[[bool], bool] = bool,
    ) -> LossReference:
        """`distribute`: as in `apply_recipe`; ranks are compared with ranks. `any_of`: whether it is so on any of them."""

        count = steps

        def path(step: TrainingStep, seed: int = seed) -> torch.Tensor:
            torch.manual_seed(seed)
            with step.context():
                # Cloned: a graph's next replay overwrites its loss.
                return torch.stack([step().clone() for _ in range(count)]).detach()

        def strict() -> TrainingStep:
            setup = _strict(workload, device)
            distribute(setup)
            return TrainingStep(setup, optimizer)

        keep_if_written(workload, torch.enable_grad)
        torch.manual_seed(seed)
        fresh = device.random_state()
        with unchanged_afterwards(workload.model):
            losses = _values(path(strict()))
        if any_of(stands_still(losses)):  # a model that learns slowly at first: a longer way may show it moving
            count = LONGER_PATH * steps
            torch.manual_seed(seed)
            with unchanged_afterwards(workload.model):
                losses = _values(path(strict()))
        draws_random_numbers = not torch.equal(fresh, device.random_state())
        with rounded_weights(workload.model, number_format):
            floor = path_difference(_values(path(strict())), losses)
        seed_floor = None
        if any_of(draws_random_numbers):
            with unchanged_afterwards(workload.model):
                seed_floor = path_difference(_values(path(strict(), seed + 1)), losses)
        return cls(losses, floor, seed_floor, number_format, own_format(workload.model), seed, path)

    def judge(self, step: TrainingStep, setup: Setup) -> Numerics:
        path = self.run(step)
        losses, told_in = _values(path), self._told_in(path.dtype)
        floor, mover = (told_in, FEW_BITS) if told_in > self.floor else (self.floor, "rounding")
        finite = all(map(math.isfinite, losses))
        found = Difference(
            rel_l2=path_difference(losses, self.losses),
            cosine=None,
            top1_agreement=None,
            finite=finite,
            degenerate=stands_still(self.losses),
            rel_error=relative_path_error(losses, self.losses),
        )
        verdict = judged(found, floor, self.number_format, SMALLEST_LOSS_TOLERANCE, "loss-path", mover)
        if not verdict.passed and finite and self.seed_floor is not None and self.seed_floor > floor:
            # A compiler draws dropout masks in another order: as far apart as two seeds is still sound.
            verdict = judged(
                found, self.seed_floor, self.number_format, SMALLEST_LOSS_TOLERANCE, "loss-path", ANOTHER_SEED
            )
        return self._with_paths(verdict, losses)

    def _told_in(self, dtype: torch.dtype) -> float:
        """How far losses move at most by being told in fewer bits: a loss of the person's own stays in the model's format."""
        half_unit = torch.finfo(dtype).eps / 2
        return path_difference([loss * (1 + half_unit) for loss in self.losses], self.losses)

    def as_numerics(self) -> Numerics:
        finite = all(map(math.isfinite, self.losses))
        reason = as_reference(self.own_format) if finite else not_finite(self.own_format, "loss")
        reference = Numerics(
            method="reference",
            number_format=self.own_format,
            rel_l2=0.0 if finite else None,
            rel_error=0.0 if finite else None,
            finite=finite,
            degenerate=stands_still(self.losses),
            passed=finite,
            reason=reason,
        )
        return self._with_paths(reference, self.losses)

    def _with_paths(self, numerics: Numerics, losses: list[float]) -> Numerics:
        return msgspec.structs.replace(
            numerics,
            steps=len(losses),
            losses=tuple(map(finite_or_none, losses)),
            reference_losses=tuple(map(finite_or_none, self.losses)),
        )


def _values(path: torch.Tensor) -> list[float]:
    values: list[float] = path.float().tolist()
    return values


def forward(workload: Workload, device: Device) -> Answer:
    """One forward pass of strict fp32, on copies of the inputs."""
    return _answers(InferenceStep(_strict(workload, device)), (workload.args, workload.kwargs))


def _strict(workload: Workload, device: Device) -> Setup:
    """The workload as it is: fp32, eager."""
    device.allow_tf32(False)
    setup = Setup(workload=workload, device=device, model=workload.model, args=workload.args, kwargs=workload.kwargs)
    setup.begin_with_originals()
    return setup


def keep_if_written(workload: Workload, context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Look whether the model writes into its inputs; a second step would then see others than the first."""
    args, kwargs = copied((workload.args, workload.kwargs))
    tensors = [tensor for _, tensor in input_tensors((args, kwargs)) if not tensor.is_leaf or not tensor.requires_grad]
    before = [tensor._version for tensor in tensors]
    with unchanged_buffers(workload.model), context():
        workload.model(*args, **kwargs)
    if [tensor._version for tensor in tensors] != before:
        workload.keep_originals()
