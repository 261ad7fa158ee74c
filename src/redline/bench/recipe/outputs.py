"""How far one set of outputs is from another, whatever they are made of; and one loss path from another.

Numbers with fractions are compared over the part that depends on the input. Integers, booleans and texts are compared
exactly: the share that is unequal, over the share that another input changes. Where an output holds both, the integers
follow from the numbers (a class from its scores), and the numbers decide. Lists of finds with a score each, as detectors
give them, may have another length and order: their scores are compared in order, the rest by the nearest find.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

from redline.bench.workload.structure import children

SMALLEST_SIGNAL = 1e-5
"""Of the output's size: less than this moves with the input, and fp32 itself could not tell."""
GROSS = 0.8
"""Integers that are wrong by more than this are wrong, whatever the numbers beside them say."""
SCORES = "scores"
"""The name under which a list of finds has its scores."""
PROJECTIONS = 16
MOST_SKETCHED = 1 << 18
"""Elements of one tensor that a sketch is made of, evenly spaced."""


@dataclass
class Answer:
    """An output, as far as it can be compared."""

    numbers: list[Tensor] = field(default_factory=list)
    """Floating tensors; complex numbers as pairs of real ones."""
    exact: list[Tensor] = field(default_factory=list)
    """Integers, booleans and texts."""
    lists: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)
    """Scores, largest first, and what else is known of each find: one row for each."""

    @property
    def form(self) -> tuple[int, ...]:
        return len(self.numbers), len(self.exact), len(self.lists), *(len(rows) for _, rows in self.lists)

    @property
    def is_empty(self) -> bool:
        return not (self.numbers or self.exact or self.lists)

    @property
    def is_finite(self) -> bool:
        tensors = [*self.numbers, *(tensor for scores, rows in self.lists for tensor in (scores, *rows))]
        return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@dataclass(frozen=True)
class Difference:
    rel_l2: float
    """Relative to what depends on the input: of numbers the distance, of integers the share that is unequal."""
    cosine: float | None
    top1_agreement: float | None
    finite: bool
    degenerate: bool
    equal_share: float | None = None
    """Share of integers, booleans and texts; None where there are none."""
    by_equality: bool = False
    """There is nothing else to go by."""
    rel_error: float | None = None
    """The distance of all numbers over their own size, ‖Δ‖/‖y‖. None where only integers or texts are compared."""

    def told(self) -> dict[str, Any]:
        """As a record holds it: without NaN and infinity."""
        return {
            **vars(self),
            "rel_l2": finite_or_none(self.rel_l2),
            "cosine": finite_or_none(self.cosine),
            "rel_error": finite_or_none(self.rel_error),
        }


def sketch_of(answer: Answer) -> tuple[tuple[float, ...], float | None]:
    """Sums of the outputs with signs at random, and the size of what varies in them: two sketches are as far apart as the outputs.

    The signs come from a hash of each position, so that every version of torch has the same.
    """
    parts = [*answer.numbers, *(scores for scores, _ in answer.lists)] or answer.exact
    sums, signal = [0.0] * PROJECTIONS, 0.0
    for number, part in enumerate(parts):
        flat = part.flatten()
        flat = flat[:: -(-flat.numel() // MOST_SKETCHED) or 1].double().cpu()
        mixed = (torch.arange(flat.numel()) + number * 1_000_003) * 0x5851F42D4C957F2D + 0x14057B7EF767814F
        mixed = (mixed ^ (mixed >> 31)) * 0x2545F4914F6CDD1D
        for bit in range(PROJECTIONS):
            sums[bit] += float(torch.where((mixed >> (24 + bit)) & 1 == 1, flat, -flat).sum())
        if flat.numel():
            signal += float((flat - flat.mean()).square().sum()) or float(flat.square().sum())
    if not parts or not all(map(math.isfinite, (*sums, signal))) or not signal:
        return (), None
    return tuple(sums), math.sqrt(signal)


def answer_of(output: Any) -> Answer:
    """What of an output can be compared. Tensors are cloned: a graph's next replay overwrites its outputs."""
    answer = Answer()
    _collect(output, answer)
    if not any(tensor.dim() for tensor in answer.numbers):  # one number for all is no loss among other outputs
        answer.numbers = [tensor.reshape(1) for tensor in answer.numbers]
    return answer


def _collect(value: Any, answer: Answer) -> None:
    if isinstance(value, Tensor):
        _add_tensor(value.detach(), answer)
    elif isinstance(value, bool | int | str):
        body = list(value.encode()) if isinstance(value, str) else [value]
        answer.exact.append(torch.tensor(body, dtype=torch.float64 if isinstance(value, int) else torch.uint8))
    elif isinstance(value, float):
        answer.numbers.append(torch.tensor(value))
    elif isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufc":
        _add_tensor(torch.as_tensor(value), answer)
    elif (found := _list_of_finds(value)) is not None:
        answer.lists.append(found)
    else:
        for _, child in children(value) or ():
            _collect(child, answer)


def _add_tensor(tensor: Tensor, answer: Answer) -> None:
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_nested:
        tensor = torch.cat([row.flatten() for row in tensor.unbind()])
    elif tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point():
        answer.numbers.append(tensor.float().clone())
    else:
        answer.exact.append(tensor.clone())


def _list_of_finds(value: Any) -> tuple[Tensor, list[Tensor]] | None:
    """Scores and rows in the order of the scores, where a mapping holds one score for each of its rows."""
    if not isinstance(value, Mapping) or not isinstance(value.get(SCORES), Tensor):
        return None
    scores = value[SCORES].detach().float()
    others = [tensor.detach() for name, tensor in value.items() if name != SCORES and isinstance(tensor, Tensor)]
    if scores.dim() != 1 or not others or any(not other.dim() or len(other) != len(scores) for other in others):
        return None
    order = scores.argsort(descending=True, stable=True)
    return scores[order], [other[order].float().reshape(len(scores), other[:1].numel()) for other in others]


def difference(found: Sequence[Answer], reference: Sequence[Answer]) -> Difference:
    """The worst over all parts of the output and all sets of inputs; both sides have the same form."""
    numbers = _Worst()
    for position in range(len(reference[0].numbers)):
        expected = [answer.numbers[position] for answer in reference]
        if expected[0].dim():  # a loss among the outputs says less than what it was made from
            _compare_numbers(numbers, [answer.numbers[position] for answer in found], expected)
    for position in range(len(reference[0].lists)):
        _compare_lists(numbers, [each.lists[position] for each in found], [each.lists[position] for each in reference])
    exact, shares, gross = _Worst(), [], []
    for position in range(len(reference[0].exact)):
        wanted = [answer.exact[position] for answer in reference]
        equal, error = _compare_exactly(exact, [answer.exact[position] for answer in found], wanted)
        shares += equal
        gross += [error] if error > GROSS else []
    by_equality = not numbers.has_signal and exact.has_signal
    return Difference(
        rel_l2=_worst(max, [*numbers.errors, *(exact.errors if by_equality else gross)]),
        cosine=_worst(min, numbers.cosines) if numbers.cosines or not by_equality else None,
        top1_agreement=min(numbers.agreements, default=None),
        finite=all(answer.is_finite for answer in found),
        degenerate=not numbers.has_signal and not exact.has_signal,
        equal_share=min(shares, default=None),
        by_equality=by_equality,
        rel_error=None if by_equality else _worst(max, numbers.plain),
    )


@dataclass
class _Worst:
    plain: list[float] = field(default_factory=lambda: [0.0])
    """Errors over the size of what is compared."""
    errors: list[float] = field(default_factory=lambda: [0.0])
    cosines: list[float] = field(default_factory=list)
    agreements: list[float] = field(default_factory=list)
    has_signal: bool = False

    def add(self, distance: float, signal: float, size: float) -> bool:
        """An error over the signal; over the size, where hardly anything depends on the input. Says which."""
        self.plain.append(_ratio(distance, size))
        if signal > SMALLEST_SIGNAL * size:
            self.has_signal = True
            self.errors.append(distance / signal)
            return True
        self.errors.append(_ratio(distance, size))
        return False


def _compare_numbers(worst: _Worst, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    centre = _centre(expected)
    for got, want in zip(found, expected, strict=True):
        if got.shape != want.shape:
            worst.errors.append(math.inf)
            worst.plain.append(math.inf)
            worst.has_signal = True
            continue
        middle = centre if centre is not None else want.mean()
        signal = _norm(want - middle)
        if worst.add(_norm(got - want), signal, _norm(want)):
            worst.cosines.append(_ratio(_dot(got - middle, want - middle), _norm(got - middle) * signal))
        if want.dim() >= 2:
            worst.agreements.append(_top1_agreement(got, want))


def _centre(expected: Sequence[Tensor]) -> Tensor | None:
    """What all items have in common; None where each can only be set against its own mean."""
    alone = len(expected) == 1 and len(expected[0]) == 1
    if alone or any(tensor.shape[1:] != expected[0].shape[1:] for tensor in expected):
        return None
    return torch.cat(list(expected)).mean(dim=0, keepdim=True)


def _compare_exactly(worst: _Worst, found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[list[float], float]:
    """The shares that are equal, and the error over all sets of inputs: of two classes one may hang on a single bit."""
    changed = _unequal(expected[0], expected[1]) if len(expected) > 1 else float(len(expected[0].unique()) > 1)
    shares = []
    for got, want in zip(found, expected, strict=True):
        share = _unequal(got, want)
        worst.add(share, changed, 1.0)
        shares.append(1 - share)
    return shares, _ratio(1 - sum(shares) / len(shares), changed or 1.0)


def _compare_lists(
    worst: _Worst, found: Sequence[tuple[Tensor, list[Tensor]]], expected: Sequence[tuple[Tensor, list[Tensor]]]
) -> None:
    for index, ((scores, rows), (wanted, wanted_rows)) in enumerate(zip(found, expected, strict=True)):
        other, other_rows = expected[1 - index] if len(expected) > 1 else (wanted.mean().expand_as(wanted), None)
        worst.add(_distance(scores, wanted), _distance(other, wanted), _norm(wanted))
        for position, (got, want) in enumerate(zip(rows, wanted_rows, strict=True)):
            centre = want.mean(dim=0, keepdim=True) if other_rows is None else other_rows[position]
            worst.add(_apart(got, want), _apart(centre, want), _norm(want) / math.sqrt(max(len(want), 1)))


def _distance(one: Tensor, other: Tensor) -> float:
    """Between two sorted rows of scores; what one of them has not is 0."""
    longest = max(len(one), len(other))
    padded = [torch.nn.functional.pad(each, (0, longest - len(each))) for each in (one, other)]
    return _norm(padded[0] - padded[1])


def _apart(one: Tensor, other: Tensor) -> float:
    """How far finds lie from the nearest one of the other list: the root of the mean square, both ways."""
    if not len(one) or not len(other):
        return 0.0 if len(one) == len(other) else math.inf
    nearest = torch.cdist(one.double(), other.double())
    return float(torch.cat([nearest.amin(0), nearest.amin(1)]).square().mean().sqrt())


def _unequal(one: Tensor, other: Tensor) -> float:
    """The share of elements; where shapes differ, of as many as both have, and all others are unequal."""
    if one.shape == other.shape:
        return float((one != other).double().mean()) if one.numel() else 0.0
    most = max(one.numel(), other.numel())
    shared = tuple(slice(0, min(sizes)) for sizes in zip(one.shape, other.shape, strict=False))
    if one.dim() != other.dim():
        return 1.0
    return 1 - float((one[shared] == other[shared]).double().sum()) / most


def _ratio(over: float, under: float) -> float:
    if math.isnan(over) or math.isnan(under):
        return math.nan
    if under == 0:
        return 0.0 if over == 0 else math.inf
    return over / under


def _top1_agreement(found: Tensor, reference: Tensor) -> float:
    classes = -1 if reference.dim() == 3 else 1  # (batch, time, words) for language, (batch, classes, …) else
    return float((found.argmax(classes) == reference.argmax(classes)).float().mean())


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).sum())


def _worst(choose: Callable[[list[float]], float], values: list[float]) -> float:
    """NaN is worse than anything; `max` and `min` would pass it over."""
    if any(map(math.isnan, values)):
        return math.nan
    return choose(values) if values else 1.0


def path_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """How far two loss paths lie apart, over how far the reference came."""
    if not all(map(math.isfinite, losses)):
        return math.inf
    return _ratio(_path_distance(losses, reference), _travelled(reference))


def relative_path_error(losses: Sequence[float], reference: Sequence[float]) -> float:
    """How far two loss paths lie apart, over the losses themselves."""
    if not all(map(math.isfinite, losses)):
        return math.inf
    return _ratio(_path_distance(losses, reference), math.sqrt(sum(loss**2 for loss in reference)))


def _path_distance(losses: Sequence[float], reference: Sequence[float]) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(losses, reference, strict=True)))


def stands_still(losses: Sequence[float]) -> bool:
    return all(map(math.isfinite, losses)) and _travelled(losses) < SMALLEST_SIGNAL * abs(losses[0])


def _travelled(losses: Sequence[float]) -> float:
    return math.sqrt(sum((loss - losses[0]) ** 2 for loss in losses))


def finite_or_none(value: float | None) -> float | None:
    """Records hold no NaN and no infinity: those are `finite=False` and None."""
    return value if value is not None and math.isfinite(value) else None
