"""Are the numbers still right? Every recipe is compared with strict fp32 on fixed inputs before it is timed.

Inference compares outputs on two sets of inputs (one where the model takes no second), over the part of the output
that depends on the input: a recipe that ignores its input must not pass because the model's output hardly moves.
Training compares the loss over some steps, over the distance the loss travelled. Both are judged against a floor: fp32 arithmetic on weights and inputs
rounded to the recipe's number format. Sound recipes sit at 1 to 2 times the floor; 4 times is the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.recipe.rounding import rounded_inputs, rounded_weights, unchanged_afterwards, unchanged_buffers
from redline.bench.workload.inputs import Inputs, copied
from redline.bench.workload.step import InferenceStep, Setup, TrainingStep
from redline.bench.workload.structure import named_tensors
from redline.bench.workload.workload import Second, Workload
from redline.note import Note, note
from redline.record import Numerics, SecondInputs
from redline.spec import OptimizerName

TOLERANCE_OVER_FLOOR = 4.0
SMALLEST_TOLERANCE = 1e-5
SMALLEST_LOSS_TOLERANCE = 0.02
LARGEST_TOLERANCE = 0.8
"""Beyond this a recipe that ignores its input (error 1 and more) would come close to passing."""
UNRESOLVED_FLOOR = 0.5
"""Above this the number format cannot resolve the signal of this model, and nothing can be judged."""
SMALLEST_SIGNAL = 1e-5
"""Of the output's size: less than this moves with the input, and fp32 itself could not tell."""

Outputs = list[list[torch.Tensor]]
"""For each set of inputs, the floating tensors of the output."""


REFERENCE = note("reference", "the strict fp32 reference itself")


@dataclass
class OutputReference:
    """Strict fp32's answers on two sets of inputs, and how far mere rounding of numbers moves them."""

    inputs: list[Inputs]
    outputs: Outputs
    floor: float
    number_format: str
    second: SecondInputs | None
    """Where the second set came from; None where there is one set alone."""
    mover: str = "rounding"
    """What sets the floor: rounding, or asking twice where a model keeps state or draws random numbers."""

    @classmethod
    def of(
        cls, workload: Workload, device: Device, number_format: str, seed: int, given: Inputs | None = None
    ) -> OutputReference:
        """`given`: the user's own second inputs, for which nothing else is put in."""
        step = InferenceStep(_strict(workload, device))
        inputs: list[Inputs] = [(workload.args, workload.kwargs)]
        outputs = [_answers(step, inputs[0])]
        second = Second(given, "given") if given is not None else workload.second_inputs(seed + 1)
        answers = None if second is None else _second_answers(step, second, outputs[0], workload)
        if second is not None and answers is not None:
            inputs, outputs = [*inputs, second.inputs], [*outputs, answers]
        with rounded_weights(workload.model, number_format):
            rounded = [_rounded_answers(step, each, number_format) for each in inputs]
        how = second.how if second is not None and answers is not None else None
        floor = difference(rounded, outputs).rel_l2
        repeated = difference([_answers(step, each) for each in inputs], outputs).rel_l2
        mover = "asking twice" if repeated > floor else "rounding"
        return cls(inputs, outputs, max(floor, repeated), number_format, how, mover)

    def judge(self, step: InferenceStep, setup: Setup) -> Numerics:
        found = [_answers(step, setup.prepared_inputs(*given)) for given in self.inputs]
        if [len(tensors) for tensors in found] != [len(tensors) for tensors in self.outputs]:
            why = note("other-structure", "the outputs have another structure than the reference's")
            return Numerics(number_format=self.number_format, reason=why, second_inputs=self.second)
        verdict = judged(difference(found, self.outputs), self.floor, self.number_format, mover=self.mover)
        return msgspec.structs.replace(verdict, second_inputs=self.second)

    def as_numerics(self) -> Numerics:
        """For the baseline, which is the reference."""
        own = difference(self.outputs, self.outputs)
        return Numerics(
            method="reference",
            rel_l2=_told(own.rel_l2),
            cosine=_told(own.cosine),
            top1_agreement=own.top1_agreement,
            finite=own.finite,
            degenerate=own.degenerate,
            passed=own.finite,
            reason=REFERENCE if own.finite else note("not-finite", "the fp32 output is not finite"),
            second_inputs=self.second,
        )


def _answers(step: InferenceStep, inputs: Inputs) -> list[torch.Tensor]:
    """On copies: a model may write into its inputs, and into its buffers."""
    with unchanged_buffers(step.workload.model):
        return _floats(step.on(*copied(inputs)))


def _rounded_answers(step: InferenceStep, inputs: Inputs, number_format: str) -> list[torch.Tensor]:
    """On rounded inputs, or on exact ones where rounded the model refuses them: shares that no longer sum to one."""
    try:
        return _answers(step, rounded_inputs(inputs, number_format))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return _answers(step, inputs)


def _second_answers(
    step: InferenceStep, second: Second, first: list[torch.Tensor], workload: Workload
) -> list[torch.Tensor] | None:
    """The answers to the second set; None, with a note, where the model does not take it or answers in another shape."""
    why = ""
    try:
        answers = _answers(step, second.inputs)
    except Exception as error:
        if second.how == "given" or is_out_of_memory(error):
            raise
        answers, why = [], f"the model fails on a second one: {one_line(error)}"
    if not why and [tensor.shape for tensor in answers] != [tensor.shape for tensor in first]:
        why = "the outputs of a second one have other shapes"
    if not why and _all_finite(first) and not _all_finite(answers):
        why = "the outputs of a second one are not finite"
    if why:
        workload.notes.append(note("one-input-set", f"outputs are compared on one set of inputs: {why}"))
    return None if why else answers


def _all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@dataclass
class LossReference:
    """Strict fp32's loss over some steps from the same start, and how far rounding the start moves it."""

    losses: list[float]
    floor: float
    seed_floor: float | None
    """How far another seed moves it, where the model draws random numbers."""
    number_format: str
    seed: int
    run: Callable[[TrainingStep], torch.Tensor] = field(repr=False)

    @classmethod
    def of(
        cls, workload: Workload, device: Device, number_format: str, seed: int, steps: int, optimizer: OptimizerName
    ) -> LossReference:
        def path(step: TrainingStep, seed: int = seed) -> torch.Tensor:
            torch.manual_seed(seed)
            with step.context():
                # Cloned: a graph's next replay overwrites its loss.
                return torch.stack([step().clone() for _ in range(steps)]).detach()

        def strict() -> TrainingStep:
            return TrainingStep(_strict(workload, device), optimizer)

        torch.manual_seed(seed)
        fresh = device.random_state()
        with unchanged_afterwards(workload.model):
            losses = _values(path(strict()))
        draws_random_numbers = not torch.equal(fresh, device.random_state())
        with rounded_weights(workload.model, number_format):
            floor = path_difference(_values(path(strict())), losses)
        seed_floor = None
        if draws_random_numbers:
            with unchanged_afterwards(workload.model):
                seed_floor = path_difference(_values(path(strict(), seed + 1)), losses)
        return cls(losses, floor, seed_floor, number_format, seed, path)

    def judge(self, step: TrainingStep, setup: Setup) -> Numerics:
        path = self.run(step)
        losses, floor = _values(path), max(self.floor, self._told_in(path.dtype))
        finite = all(map(math.isfinite, losses))
        found = Difference(
            rel_l2=path_difference(losses, self.losses),
            cosine=None,
            top1_agreement=None,
            finite=finite,
            degenerate=_travelled(self.losses) < SMALLEST_SIGNAL * abs(self.losses[0]),
        )
        verdict = judged(found, floor, self.number_format, SMALLEST_LOSS_TOLERANCE, "loss-path")
        if not verdict.passed and finite and self.seed_floor is not None and self.seed_floor > floor:
            # A compiler draws dropout masks in another order: as far apart as two seeds is still sound.
            verdict = judged(
                found, self.seed_floor, self.number_format, SMALLEST_LOSS_TOLERANCE, "loss-path", "another seed"
            )
        return self._with_paths(verdict, losses)

    def _told_in(self, dtype: torch.dtype) -> float:
        """How far losses move at most by being told in fewer bits: a loss of the person's own stays in the model's format."""
        half_unit = torch.finfo(dtype).eps / 2
        return path_difference([loss * (1 + half_unit) for loss in self.losses], self.losses)

    def as_numerics(self) -> Numerics:
        finite = all(map(math.isfinite, self.losses))
        reason = REFERENCE if finite else note("not-finite", "the fp32 loss is not finite")
        reference = Numerics(
            method="reference", rel_l2=0.0 if finite else None, finite=finite, passed=finite, reason=reason
        )
        return self._with_paths(reference, self.losses)

    def _with_paths(self, numerics: Numerics, losses: list[float]) -> Numerics:
        return msgspec.structs.replace(
            numerics,
            steps=len(losses),
            losses=tuple(map(_told, losses)),
            reference_losses=tuple(map(_told, self.losses)),
        )


@dataclass(frozen=True)
class Difference:
    rel_l2: float
    cosine: float | None
    top1_agreement: float | None
    finite: bool
    degenerate: bool


def judged(
    found: Difference,
    floor: float,
    number_format: str,
    smallest: float = SMALLEST_TOLERANCE,
    method: Any = "outputs",
    mover: str = "rounding",
) -> Numerics:
    """The verdict on a difference, given what `mover` alone would do."""
    unresolved = not math.isfinite(floor) or floor > UNRESOLVED_FLOOR
    tolerance = LARGEST_TOLERANCE if unresolved else min(max(TOLERANCE_OVER_FLOOR * floor, smallest), LARGEST_TOLERANCE)
    passed = found.finite and not found.degenerate and not unresolved and found.rel_l2 <= tolerance
    return Numerics(
        method=method,
        number_format=number_format,
        rel_l2=_told(found.rel_l2),
        cosine=_told(found.cosine),
        top1_agreement=found.top1_agreement,
        finite=found.finite,
        degenerate=found.degenerate or unresolved,
        floor=_told(floor),
        tolerance=tolerance,
        passed=passed,
        reason=_reason(found, floor, tolerance, number_format, mover if unresolved else None),
    )


def _reason(found: Difference, floor: float, tolerance: float, number_format: str, hidden_by: str | None) -> Note:
    if not found.finite:
        return note("not-finite", "the output is not finite")
    if found.degenerate:
        return note("no-signal", "the reference carries no signal: its output does not depend on the input")
    if hidden_by:
        text = f"{number_format} cannot resolve this model's signal: {hidden_by} alone moves it by {floor:.2g}"
        return note("unresolved", text)
    over = f" ({found.rel_l2 / floor:.1f}× the floor)" if floor > 0 else ""
    if found.rel_l2 <= tolerance:
        return note("within-tolerance", f"error {found.rel_l2:.2g} is within the tolerance {tolerance:.2g}{over}")
    return note("above-tolerance", f"error {found.rel_l2:.2g} is above the tolerance {tolerance:.2g}{over}")


def difference(found: Outputs, reference: Outputs) -> Difference:
    """The worst over all output tensors and input sets."""
    finite = all(map(_all_finite, found))
    errors, cosines, agreements, signals = [0.0], [1.0], [], []
    for position in range(len(reference[0])):
        expected = [tensors[position] for tensors in reference]
        if expected[0].dim() == 0:
            continue  # a loss among the outputs says less than what it was made from
        # One item alone has nothing to differ from: then its own values must do.
        alone = len(expected) == 1 and len(expected[0]) == 1
        centre = expected[0].mean() if alone else torch.cat(expected).mean(dim=0, keepdim=True)
        for got, want in zip((tensors[position] for tensors in found), expected, strict=True):
            if got.shape != want.shape:
                return Difference(math.inf, None, None, finite, degenerate=False)
            signal = _norm(want - centre)
            signals.append(signal / max(_norm(want), 1e-30))
            errors.append(_ratio(_norm(got - want), signal))
            cosines.append(_ratio(_dot(got - centre, want - centre), _norm(got - centre) * signal))
            if want.dim() >= 2:
                agreements.append(_top1_agreement(got, want))
    degenerate = not signals or not all(signal > SMALLEST_SIGNAL for signal in signals)  # NaN is no signal either
    return Difference(_worst(max, errors), _worst(min, cosines), min(agreements, default=None), finite, degenerate)


def path_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """How far two loss paths lie apart, over how far the reference came."""
    if not all(map(math.isfinite, losses)):
        return math.inf
    apart = math.sqrt(sum((a - b) ** 2 for a, b in zip(losses, reference, strict=True)))
    return _ratio(apart, _travelled(reference))


def _values(path: torch.Tensor) -> list[float]:
    values: list[float] = path.float().tolist()
    return values


def _travelled(losses: Sequence[float]) -> float:
    return math.sqrt(sum((loss - losses[0]) ** 2 for loss in losses))


def _strict(workload: Workload, device: Device) -> Setup:
    """The workload as it is: fp32, eager."""
    device.allow_tf32(False)
    return Setup(workload=workload, device=device, model=workload.model, args=workload.args, kwargs=workload.kwargs)


def _floats(output: Any) -> list[torch.Tensor]:
    """The floating tensors of an output; complex numbers as pairs of real ones, and one number for all as a row."""
    # Cloned: a graph's next replay overwrites its outputs.
    found = [_real(tensor.detach()).float().clone() for _, tensor in named_tensors(output) if _has_fractions(tensor)]
    return found if any(tensor.dim() for tensor in found) else [tensor.reshape(1) for tensor in found]


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _top1_agreement(found: torch.Tensor, reference: torch.Tensor) -> float:
    classes = -1 if reference.dim() == 3 else 1  # (batch, time, words) for language, (batch, classes, …) else
    return float((found.argmax(classes) == reference.argmax(classes)).float().mean())


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() * b.double()).sum())


def _worst(choose: Callable[[list[float]], float], values: list[float]) -> float:
    """NaN is worse than anything; `max` and `min` would pass it over."""
    return math.nan if any(map(math.isnan, values)) else choose(values)


def _ratio(over: float, under: float) -> float:
    if math.isnan(over) or math.isnan(under):
        return math.nan
    if under == 0:
        return 0.0 if over == 0 else math.inf
    return over / under


def _told(value: float | None) -> float | None:
    """Records hold no NaN and no infinity: those are `finite=False` and None."""
    return value if value is not None and math.isfinite(value) else None
