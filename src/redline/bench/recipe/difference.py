"""How far one set of answers is from another, whatever they are made of, and how far two loss paths lie apart.

Floating-point numbers are compared over the part that depends on the input. Integers, booleans and texts are compared
exactly: the share that is unequal, over the share that another input changes. Where an output holds both, the integers
follow from the numbers (a class from its scores), so the numbers decide. Detectors return lists of objects with a score
each, of any length and in any order: scores are compared in descending order, everything else by the nearest object.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.bench.workload.structure import children

SMALLEST_SIGNAL = 1e-5
"""Smallest share of an output that must depend on the input. fp32 itself could not resolve less."""
GROSS = 0.8
"""Integers with a larger error than this are wrong, whatever the numbers beside them say."""
PROJECTIONS = 16
MOST_SKETCHED = 1 << 18
"""Number of elements of one tensor, evenly spaced, that a sketch is made of."""
Objects = tuple[Tensor, list[Tensor]]
"""Scores in descending order, and whatever else is known of each object: one row for each."""


@dataclass
class Answer:
    """The part of an output that can be compared."""

    numbers: list[Tensor] = field(default_factory=list)
    """Floating-point tensors; complex numbers are pairs of real ones."""
    exact: list[Tensor] = field(default_factory=list)
    """Integers, booleans and texts."""
    lists: list[Objects] = field(default_factory=list)

    @property
    def form(self) -> tuple[int, ...]:
        return len(self.numbers), len(self.exact), *(1 + len(rows) for _, rows in self.lists)

    @property
    def is_empty(self) -> bool:
        return self.form == (0, 0)

    @property
    def is_finite(self) -> bool:
        listed = [tensor for scores, rows in self.lists for tensor in (scores, *rows)]
        return all(bool(tensor.isfinite().all()) for tensor in (*self.numbers, *listed))


@dataclass(frozen=True)
class Difference:
    """The fields are those of `redline.model.record.Numerics`."""

    rel_l2: float
    finite: bool
    degenerate: bool
    rel_error: float | None = None
    cosine: float | None = None
    top1_agreement: float | None = None
    equal_share: float | None = None
    by_equality: bool = False

    def as_fields(self) -> dict[str, Any]:
        """The fields as a record holds them: None in place of NaN and infinity."""
        return {
            name: finite_or_none(value) if isinstance(value, float) else value for name, value in vars(self).items()
        }


def answer_of(output: Any) -> Answer:
    """Returns the comparable part of an output. Tensors are cloned, because a graph's next replay overwrites its outputs."""
    answer = Answer()
    _collect(output, answer)
    if not any(tensor.dim() for tensor in answer.numbers):  # a single number is the whole answer, not a loss beside it
        answer.numbers = [tensor.reshape(1) for tensor in answer.numbers]
    return answer


def _collect(value: Any, answer: Answer) -> None:
    if isinstance(value, Tensor):
        _add_tensor(value.detach(), answer)
    elif isinstance(value, str):
        answer.exact.append(torch.tensor(list(value.encode()), dtype=torch.uint8))
    elif isinstance(value, int):
        answer.exact.append(torch.tensor([value], dtype=torch.float64))
    elif isinstance(value, float):
        answer.numbers.append(torch.tensor(value))
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        _add_tensor(torch.as_tensor(value), answer)
    elif (objects := _objects_in(value)) is not None:
        answer.lists.append(objects)
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


def _objects_in(value: Any) -> Objects | None:
    """Returns scores and rows sorted by score, where a mapping holds one of its `scores` for each row of its tensors."""
    if not isinstance(value, Mapping) or not isinstance(value.get("scores"), Tensor):
        return None
    scores = value["scores"].detach().float()
    others = [tensor.detach() for name, tensor in value.items() if name != "scores" and isinstance(tensor, Tensor)]
    if scores.dim() != 1 or not others or any(other.shape[:1] != scores.shape for other in others):
        return None
    order = scores.argsort(descending=True, stable=True)
    return scores[order], [other[order].float().reshape(len(scores), other[:1].numel()) for other in others]


def difference(found: Sequence[Answer], reference: Sequence[Answer]) -> Difference:
    """Returns the largest difference over all parts of the output and all sets of inputs; both sides have the same form."""

    def parts(name: str) -> Iterator[tuple[Any, Any]]:
        sides = ([getattr(answer, name) for answer in side] for side in (found, reference))
        return zip(*(zip(*side, strict=True) for side in sides), strict=True)

    numbers, exact, shares, gross = _Worst(), _Worst(), list[float](), list[float]()
    for got, want in parts("numbers"):
        if want[0].dim():  # a loss among the outputs says less than the outputs that it was made from
            _compare_numbers(numbers, got, want)
    for got, want in parts("lists"):
        _compare_lists(numbers, got, want)
    for got, want in parts("exact"):
        equal, error = _compare_exactly(exact, got, want)
        shares += equal
        gross += [error] if error > GROSS else []
    by_equality = not numbers.has_signal and exact.has_signal
    return Difference(
        rel_l2=float(np.max([*numbers.errors, *(exact.errors if by_equality else gross)])),  # NaN is the largest
        rel_error=None if by_equality else float(np.max(numbers.rel_errors)),
        cosine=float(np.min(numbers.cosines)) if numbers.cosines else None if by_equality else 1.0,
        top1_agreement=min(numbers.agreements, default=None),
        finite=all(answer.is_finite for answer in found),
        degenerate=not numbers.has_signal and not exact.has_signal,
        equal_share=min(shares, default=None),
        by_equality=by_equality,
    )


@dataclass
class _Worst:
    rel_errors: list[float] = field(default_factory=lambda: [0.0])
    """Errors over the size of the reference."""
    errors: list[float] = field(default_factory=lambda: [0.0])
    """Errors over the signal: the part of the reference that depends on the input."""
    cosines: list[float] = field(default_factory=list)
    agreements: list[float] = field(default_factory=list)
    has_signal: bool = False

    def add(self, distance: float, signal: float, size: float) -> bool:
        """Add an error. Where hardly anything depends on the input, it is taken over the size. Returns whether something does."""
        has_signal = signal > SMALLEST_SIGNAL * size
        self.has_signal |= has_signal
        self.rel_errors.append(_ratio(distance, size))
        self.errors.append(_ratio(distance, signal if has_signal else size))
        return has_signal


def _compare_numbers(worst: _Worst, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    # A single item has nothing in common with others, and items of several shapes neither: each has its own mean.
    shapes = {tensor.shape[1:] for tensor in expected}
    is_alone = len(shapes) > 1 or sum(map(len, expected)) == 1
    common = None if is_alone else torch.cat(list(expected)).mean(dim=0, keepdim=True)
    for got, want in zip(found, expected, strict=True):
        if got.shape != want.shape:
            worst.add(math.inf, 1.0, 1.0)
            continue
        centre = want.mean() if common is None else common
        signal = _norm(want - centre)
        if worst.add(_norm(got - want), signal, _norm(want)):
            product = float(((got - centre).double() * (want - centre).double()).sum())
            worst.cosines.append(_ratio(product, _norm(got - centre) * signal))
        if want.dim() >= 2:
            classes = -1 if want.dim() == 3 else 1  # (batch, time, words) for language, (batch, classes, …) otherwise
            worst.agreements.append(float((got.argmax(classes) == want.argmax(classes)).float().mean()))


def _compare_exactly(worst: _Worst, found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[list[float], float]:
    """Returns the shares that are equal, and the error over all inputs: a class of two may hang on a single bit."""
    changed = _unequal(expected[0], expected[1]) if len(expected) > 1 else float(len(expected[0].unique()) > 1)
    unequal = [_unequal(got, want) for got, want in zip(found, expected, strict=True)]
    for share in unequal:
        worst.add(share, changed, 1.0)
    return [1 - share for share in unequal], _ratio(sum(unequal) / len(unequal), changed or 1.0)


def _compare_lists(worst: _Worst, found: Sequence[Objects], expected: Sequence[Objects]) -> None:
    for index, ((scores, rows), (wanted, wanted_rows)) in enumerate(zip(found, expected, strict=True)):
        other, other_rows = wanted.mean().expand_as(wanted), [want.mean(dim=0, keepdim=True) for want in wanted_rows]
        if len(expected) > 1:
            other, other_rows = expected[1 - index]
        worst.add(_between_scores(scores, wanted), _between_scores(other, wanted), _norm(wanted))
        for got, want, centre in zip(rows, wanted_rows, other_rows, strict=True):
            worst.add(_between_rows(got, want), _between_rows(centre, want), _norm(want) / math.sqrt(len(want) or 1))


def _between_scores(one: Tensor, other: Tensor) -> float:
    """Returns the distance of two sorted rows of scores; a score that one of them lacks is 0."""
    longest = max(len(one), len(other))
    first, second = (torch.nn.functional.pad(scores, (0, longest - len(scores))) for scores in (one, other))
    return _norm(first - second)


def _between_rows(one: Tensor, other: Tensor) -> float:
    """Returns the root of the mean squared distance from each object to the nearest one of the other list, both ways."""
    if not len(one) or not len(other):
        return 0.0 if len(one) == len(other) else math.inf
    apart = torch.cdist(one.double(), other.double())
    return float(torch.cat([apart.amin(0), apart.amin(1)]).square().mean().sqrt())


def _unequal(one: Tensor, other: Tensor) -> float:
    """Returns the share of elements that differ. Elements that only one of the shapes has are unequal."""
    if one.dim() != other.dim():
        return 1.0
    shared = tuple(slice(min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
    return 1 - _ratio(int((one[shared] == other[shared]).sum()), max(one.numel(), other.numel()), none=1.0)


def _ratio(over: float, under: float, none: float = 0.0) -> float:
    """Returns the quotient; `none` is that of nothing by nothing."""
    if under == 0:
        return over * math.inf if over else none  # NaN stays NaN
    return over / under


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def path_difference(losses: Sequence[float], reference: Sequence[float]) -> Difference:
    """Returns the distance of two loss paths: `rel_l2` over how far the reference came, `rel_error` over the losses themselves."""
    apart = math.dist(losses, reference)
    return Difference(
        rel_l2=_ratio(apart, _travelled(reference)),
        rel_error=_ratio(apart, math.hypot(*reference)),
        finite=all(map(math.isfinite, losses)),
        degenerate=stands_still(reference),
    )


def stands_still(losses: Sequence[float]) -> bool:
    return _travelled(losses) < SMALLEST_SIGNAL * abs(losses[0])


def _travelled(losses: Sequence[float]) -> float:
    return math.dist(losses, [losses[0]] * len(losses))


def sketch_of(answer: Answer) -> tuple[tuple[float, ...], float | None]:
    """Returns sums of the outputs with random signs, and the size of what varies in them: two sketches are as far apart as the outputs.

    The signs come from a hash of each position, so every version of torch has the same ones.
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
    if not signal or not all(map(math.isfinite, (*sums, signal))):
        return (), None
    return tuple(sums), math.sqrt(signal)


def finite_or_none(value: float | None) -> float | None:
    """Records hold neither NaN nor infinity."""
    return value if value is not None and math.isfinite(value) else None
