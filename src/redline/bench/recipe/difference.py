"""This tells how far one set of answers is from another, whatever they are made of, and how far two loss paths lie apart.

Floating-point numbers are compared over the part that depends on the input. Integers, booleans and texts are compared
exactly: the share that is unequal is set over the share that another input changes. If an output holds both, the integers
follow from the numbers, as a class follows from its scores, so the numbers decide. Detectors return lists of objects with a
score each, of any length and in any order. Scores are compared in descending order, and everything else by the nearest object.
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
"""At least this share of an output must depend on the input, because fp32 itself could not resolve less."""
GROSS = 0.8
"""Integers with a larger error than this are wrong, whatever the numbers beside them say."""
PROJECTIONS = 16
"""A sketch has this many sums. More would tell distances more exactly, and every record holds them."""
MOST_SKETCHED = 1 << 18
"""A sketch is made of at most this many evenly spaced elements of one tensor."""
Objects = tuple[Tensor, list[Tensor]]
"""Objects have their scores in descending order, and tensors with whatever else is known of them, with one row for each object."""


@dataclass
class Answer:
    """An answer is the part of an output that can be compared."""

    numbers: list[Tensor] = field(default_factory=list)
    """These are the floating-point tensors. Complex numbers are pairs of real ones."""
    exact: list[Tensor] = field(default_factory=list)
    """These are the integers, booleans and texts."""
    lists: list[Objects] = field(default_factory=list)
    """These are the lists of objects that a detector returns."""

    @property
    def form(self) -> tuple[int, ...]:
        """Returns how many tensors of each kind there are. Only answers of one form can be compared."""
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
    """A difference says how far answers are apart. Its fields are those of `redline.model.record.Numerics`."""

    rel_l2: float
    finite: bool
    degenerate: bool
    rel_error: float | None = None
    cosine: float | None = None
    top1_agreement: float | None = None
    equal_share: float | None = None
    by_equality: bool = False

    def as_fields(self) -> dict[str, Any]:
        """Returns the fields as a record holds them, with None in place of NaN and infinity."""
        return {
            name: finite_or_none(value) if isinstance(value, float) else value for name, value in vars(self).items()
        }


def answer_of(output: Any) -> Answer:
    """Returns the comparable part of an output. Tensors are cloned, because a graph's next replay overwrites its outputs."""
    answer = Answer()
    _collect(output, answer)
    if not any(tensor.dim() for tensor in answer.numbers):  # a single number is the whole answer and no loss beside it
        answer.numbers = [tensor.reshape(1) for tensor in answer.numbers]
    return answer


def _collect(value: Any, answer: Answer) -> None:
    """Adds what can be compared of a value to the answer. Texts become their bytes."""
    if isinstance(value, str):
        value = torch.tensor(list(value.encode()), dtype=torch.uint8)
    elif isinstance(value, int):
        value = torch.tensor([value])
    elif isinstance(value, float) or (isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc"):
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        tensor = _plain(value.detach())
        (answer.numbers if tensor.is_floating_point() else answer.exact).append(tensor)
    elif (objects := _objects_in(value)) is not None:
        answer.lists.append(objects)
    else:
        for _, child in children(value) or ():
            _collect(child, answer)


def _plain(tensor: Tensor) -> Tensor:
    """Returns a copy as an ordinary tensor, in fp32 if it holds real numbers."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_nested:
        tensor = torch.cat([row.flatten() for row in tensor.unbind()])
    elif tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _objects_in(value: Any) -> Objects | None:
    """Returns scores and rows sorted by score if a mapping holds one of its `scores` for each row of its tensors, otherwise None."""
    if not isinstance(value, Mapping) or not isinstance(value.get("scores"), Tensor):
        return None
    scores = value["scores"].detach().float()
    others = [tensor.detach() for name, tensor in value.items() if name != "scores" and isinstance(tensor, Tensor)]
    if scores.dim() != 1 or not others or any(other.shape[:1] != scores.shape for other in others):
        return None
    order = scores.argsort(descending=True, stable=True)
    return scores[order], [other[order].float().reshape(len(scores), other[:1].numel()) for other in others]


@dataclass
class Part:
    """This is one part of an output on one set of inputs, compared with the same part of the reference."""

    distance: float
    """This is the size of what differs from the reference."""
    signal: float
    """This is the size of what depends on the input."""
    size: float
    """This is the size of the reference itself."""
    cosine: float | None = None
    agreement: float | None = None

    @property
    def has_signal(self) -> bool:
        return self.signal > SMALLEST_SIGNAL * self.size

    @property
    def error(self) -> float:
        """Returns the distance over the signal, or over the size if hardly anything depends on the input."""
        return _ratio(self.distance, self.signal if self.has_signal else self.size)


def difference(found: Sequence[Answer], reference: Sequence[Answer]) -> Difference:
    """Returns the largest difference over all parts of the output and all sets of inputs. Both sides must have the same form."""

    def pairs(name: str) -> Iterator[tuple[Any, Any]]:
        sides = ([getattr(answer, name) for answer in side] for side in (found, reference))
        return zip(*(zip(*side, strict=True) for side in sides), strict=True)

    # A loss among the outputs says less than the outputs that it was made from.
    numbers = [part for got, want in pairs("numbers") if want[0].dim() for part in _compared(got, want)]
    numbers += [part for got, want in pairs("lists") for part in _compared_lists(got, want)]
    groups = [_compared_exactly(got, want) for got, want in pairs("exact")]
    exact = [part for group in groups for part in group]
    # Integers are judged over all inputs together, because one class of two may depend on a single bit.
    means = [_ratio(float(np.mean([part.distance for part in group])), group[0].signal or 1.0) for group in groups]
    has_signal, changes = (any(part.has_signal for part in parts) for parts in (numbers, exact))
    by_equality = changes and not has_signal
    integers = [part.error for part in exact] if by_equality else [error for error in means if error > GROSS]
    cosines = [part.cosine for part in numbers if part.cosine is not None]
    return Difference(
        rel_l2=float(np.max([0.0, *(part.error for part in numbers), *integers])),  # NaN is the largest
        rel_error=None
        if by_equality
        else float(np.max([0.0, *(_ratio(part.distance, part.size) for part in numbers)])),
        cosine=float(np.min(cosines)) if cosines else None if by_equality else 1.0,
        top1_agreement=min((part.agreement for part in numbers if part.agreement is not None), default=None),
        finite=all(answer.is_finite for answer in found),
        degenerate=not has_signal and not changes,
        equal_share=min((1 - part.distance for part in exact), default=None),
        by_equality=by_equality,
    )


def _compared(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Iterator[Part]:
    """Yields a part for each set of inputs. What items have in common, their mean, does not count as signal."""
    # A single item has nothing in common with others, and neither have items of several shapes. Then each has its own mean.
    is_alone = len({tensor.shape[1:] for tensor in expected}) > 1 or sum(map(len, expected)) == 1
    common = None if is_alone else torch.cat(list(expected)).mean(dim=0, keepdim=True)
    for got, want in zip(found, expected, strict=True):
        if got.shape != want.shape:
            yield Part(math.inf, 1.0, 1.0)
            continue
        centre = want.mean() if common is None else common
        part = Part(_norm(got - want), _norm(want - centre), _norm(want))
        if part.has_signal:
            product = float(((got - centre).double() * (want - centre).double()).sum())
            part.cosine = _ratio(product, _norm(got - centre) * part.signal)
        if want.dim() >= 2:
            classes = -1 if want.dim() == 3 else 1  # (batch, time, words) for language, (batch, classes, …) otherwise
            part.agreement = float((got.argmax(classes) == want.argmax(classes)).float().mean())
        yield part


def _compared_exactly(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[Part]:
    """Returns a part for each set of inputs, in which a distance is the share of elements that are unequal."""
    changed = _unequal(expected[0], expected[1]) if len(expected) > 1 else float(len(expected[0].unique()) > 1)
    return [Part(_unequal(got, want), changed, 1.0) for got, want in zip(found, expected, strict=True)]


def _compared_lists(found: Sequence[Objects], expected: Sequence[Objects]) -> Iterator[Part]:
    """Yields parts for the scores and the rows of each list. The signal is the distance to the list of the other inputs."""
    for index, ((scores, rows), (wanted, wanted_rows)) in enumerate(zip(found, expected, strict=True)):
        other, other_rows = wanted.mean().expand_as(wanted), [want.mean(dim=0, keepdim=True) for want in wanted_rows]
        if len(expected) > 1:
            other, other_rows = expected[1 - index]
        yield Part(_between_scores(scores, wanted), _between_scores(other, wanted), _norm(wanted))
        for got, want, centre in zip(rows, wanted_rows, other_rows, strict=True):
            yield Part(_between_rows(got, want), _between_rows(centre, want), _norm(want) / math.sqrt(len(want) or 1))


def _between_scores(one: Tensor, other: Tensor) -> float:
    """Returns the distance of two sorted rows of scores. A score that one of them lacks counts as 0."""
    first, second = torch.nn.utils.rnn.pad_sequence([one, other]).unbind(1)
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
    most = max(one.numel(), other.numel())
    return 1 - int((one[shared] == other[shared]).sum()) / most if most else 0.0


def _ratio(over: float, under: float) -> float:
    """Returns the quotient; that of nothing by nothing is nothing, and NaN stays NaN."""
    return over / under if under else over * math.inf if over else 0.0


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def path_difference(losses: Sequence[float], reference: Sequence[float]) -> Difference:
    """Returns the distance of two loss paths: `rel_l2` is over how far the reference came, and `rel_error` over the losses themselves."""
    apart = math.dist(losses, reference)
    return Difference(
        rel_l2=_ratio(apart, _travelled(reference)),
        rel_error=_ratio(apart, math.hypot(*reference)),
        finite=all(map(math.isfinite, losses)),
        degenerate=stands_still(reference),
    )


def stands_still(losses: Sequence[float]) -> bool:
    """Returns whether the losses change so little that a path says nothing."""
    return _travelled(losses) < SMALLEST_SIGNAL * abs(losses[0])


def _travelled(losses: Sequence[float]) -> float:
    return math.dist(losses, [losses[0]] * len(losses))


def sketch_of(answer: Answer) -> tuple[tuple[float, ...], float | None]:
    """Returns sums of the outputs with random signs, and the size of what varies in them.

    Two sketches are about as far apart as the outputs. The signs come from a hash of each position, so that every version of torch
    has the same ones.
    """
    sums, signal = torch.zeros(PROJECTIONS, dtype=torch.float64), 0.0
    for number, part in enumerate([*answer.numbers, *(scores for scores, _ in answer.lists)] or answer.exact):
        flat = part.flatten()
        flat = flat[:: -(-flat.numel() // MOST_SKETCHED) or 1].double().cpu()
        mixed = (torch.arange(flat.numel()) + number * 1_000_003) * 0x5851F42D4C957F2D + 0x14057B7EF767814F
        mixed = (mixed ^ (mixed >> 31)) * 0x2545F4914F6CDD1D
        signs = (mixed[:, None] >> torch.arange(24, 24 + PROJECTIONS) & 1) * 2 - 1
        sums += flat @ signs.double()
        if flat.numel():
            signal += float((flat - flat.mean()).square().sum()) or float(flat.square().sum())
    if not signal or not math.isfinite(signal) or not bool(sums.isfinite().all()):
        return (), None
    return tuple(sums.tolist()), math.sqrt(signal)


def finite_or_none(value: float | None) -> float | None:
    """Returns the value, or None in place of NaN and infinity, which no record holds."""
    return value if value is not None and math.isfinite(value) else None
