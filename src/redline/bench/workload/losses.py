"""The loss of a training step: the one given, else the output's own, else cross-entropy on fixed random targets.

The contract: `loss(output)` or `loss(output, target)` gives one floating number that depends on the output. Targets are
the user's own; where there are none they are drawn once, at the first call: a later step only reads them, so that it can
be compiled and captured.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add, attrgetter, itemgetter
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.workload.structure import float_tensors, is_plain, map_tensors, named_tensors, part_at
from redline.model.errors import BenchError
from redline.model.note import Note, note

AUXILIARY_WEIGHTS = {"aux": 0.5, "aux_logits": 0.4, "aux_logits1": 0.3, "aux_logits2": 0.3}
"""torchvision trains its segmentation models, Inception and GoogLeNet with these."""

_WANTS_VALUES = {
    "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss", "PoissonNLLLoss",
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "poisson_nll_loss",
}  # fmt: skip
"""Targets of these losses look like the output and name no classes."""

TargetKind = Literal["shares", "labels", "values"]
"""Targets with a value for each output are shares of the classes (one-hot ones too), labels that hold or do not, or values."""
_OF_VALUES: dict[TargetKind, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "shares": ("cross_entropy", F.cross_entropy),
    "labels": ("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits),
    "values": ("mse_loss", F.mse_loss),
}
IGNORED = -100
"""The class that torch's cross-entropy leaves out."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Targets:
    """Random targets are drawn once per output and kept on its device."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: dict[tuple[Any, ...], Tensor] = {}
        self.part: tuple[Sequence[int], int] | None = None
        """For a rank: its rows, and the size of the global batch they are drawn for."""

    def classes(self, name: str, logits: Tensor) -> Tensor:
        """Returns one class per item, per position (N, T, V) or per pixel (N, C, H, W)."""
        axis = 2 if logits.ndim == 3 else 1
        shape = tuple(size for dimension, size in enumerate(logits.shape) if dimension != axis)

        def draw(generator: torch.Generator) -> Tensor:
            return self._part_of(shape, lambda whole: torch.randint(0, logits.shape[axis], whole, generator=generator))

        return self._keep(("classes", name, *logits.shape), logits, draw)

    def values(self, name: str, logits: Tensor) -> Tensor:
        """Returns values of the output's shape between 0 and 1, which suit regression and binary cross-entropy alike."""

        def draw(generator: torch.Generator) -> Tensor:
            return self._part_of(tuple(logits.shape), lambda whole: torch.rand(whole, generator=generator)).to(
                logits.dtype
            )

        return self._keep(("values", name, str(logits.dtype), *logits.shape), logits, draw)

    def _part_of(self, shape: tuple[int, ...], draw: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """Targets of this shape: a rank draws those of the global batch, and keeps its own."""
        if self.part is None or not shape or shape[0] != len(self.part[0]):
            return draw(shape)
        rows, size = self.part
        return draw((size, *shape[1:])).index_select(0, torch.tensor(rows))

    def _keep(self, what: tuple[Any, ...], like: Tensor, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
        key = (*what, str(like.device))
        # What a fake tensor mode draws must not outlive it, and what is kept must not enter it.
        fake = isinstance(like, FakeTensor)
        if not fake and key in self._kept:
            return self._kept[key]
        # inference_mode(False): a tensor made under inference mode could never take part in autograd.
        with torch.inference_mode(False):
            targets = draw(torch.Generator().manual_seed(self._seed)).to(like.device)
        if not fake:
            self._kept[key] = targets
        return targets


class TrainingLoss(ABC):
    """A loss of the output alone.

    A call looks at the output's form and keeps what it did as `chosen`: a function without any choice left, which a timed
    step calls as a plain loop would.
    """

    name: str
    """The record says that this was trained on."""

    def __init__(self, targets: Any = None) -> None:
        self.targets = targets
        """The user's own; None where there are none, or they are drawn."""
        self.weight = 1.0
        """This rank counts so much if ranks have unequal shares of a batch."""
        self.chosen: Callable[[Any], Tensor] | None = None
        """The last call computed this. It is for outputs of the same form."""
        self._is_checked = False

    def __call__(self, output: Any) -> Tensor:
        of, weight = self.choose(output), self.weight
        self.chosen = of if weight == 1.0 else lambda output: of(output) * weight
        loss = self.chosen(output)
        if not self._is_checked:
            self._check(loss, output)
        return loss

    @abstractmethod
    def choose(self, output: Any) -> Callable[[Any], Tensor]:
        """Returns the loss of outputs such as this one as one function that looks for nothing any more."""

    def to(self, device: torch.device | str) -> None:
        """Move the user's own targets."""
        self.targets = map_tensors(self.targets, lambda _, tensor: tensor.to(device))

    def select(self, rows: Sequence[int], size: int) -> None:
        """Takes the user's own targets of these items out of `size`."""

        def chosen(path: str, tensor: Tensor) -> Tensor:
            if tensor.shape[:1] != (size,):
                where = f"targets {path}".rstrip()
                held = f"the {where} of shape {list(tensor.shape)} do not hold the {size} items along axis 0"
                raise BenchError("user", f"{held}: let the factory take batch")
            return tensor.index_select(0, torch.tensor(rows, device=tensor.device))

        self.targets = map_tensors(self.targets, chosen)

    def take(self, rows: Sequence[int], size: int) -> None:
        """Keeps to these items out of `size` from now on. They are the share of one rank."""
        if self.targets is not None:
            self.select(rows, size)

    def _check(self, loss: Any, output: Any) -> None:
        """Raise in one line what is wrong with it; later calls are not looked at, because steps are timed."""
        if not isinstance(loss, Tensor):
            hint = " (return the tensor, not its .item())" if isinstance(loss, float) else ""
            raise BenchError("user", f"the loss {self.name} gave {type(loss).__name__} where a tensor belongs{hint}")
        if loss.numel() != 1:
            shape = list(loss.shape)
            raise BenchError("user", f"the loss {self.name} gave {shape} values, not one: reduce them with .mean()")
        if not loss.is_floating_point():
            raise BenchError("user", f"the loss {self.name} gave {loss.dtype}, which has no gradient")
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for _, tensor in named_tensors(output))
        if trains and not loss.requires_grad:
            raise BenchError("user", f"the loss {self.name} does not depend on the output: was it detached?")
        self._is_checked = not isinstance(loss, FakeTensor)


def training_loss(given: Callable[..., Tensor] | None = None, seed: int = 0, targets: Any = None) -> TrainingLoss:
    """`given` may be `loss(output)` or `loss(output, target)`; `targets` are the user's own."""
    if given is None:
        return DefaultLoss(seed) if targets is None else TargetLoss(None, targets)
    wanted = required_arguments(given)
    if wanted is not None and wanted > 2:
        raise BenchError(
            "user", f"the loss {_name_of(given)} must be given {wanted} things: it may take the output and the target"
        )
    if targets is not None:
        if wanted is not None and wanted < 2 and not _may_take_two(given):
            raise BenchError("user", f"targets were given, but the loss {_name_of(given)} takes the output alone")
        return TargetLoss(given, targets)
    return RandomTargetLoss(given, seed) if takes_targets(given) else OutputLoss(given)


def loss_on_data(of: TrainingLoss) -> TargetLoss:
    """Returns the same loss against targets that come with every batch."""
    if isinstance(of, OutputLoss):
        raise BenchError("user", f"the loss {of.name} takes no targets: on data it must be loss(output, target)")
    return TargetLoss(of.given if isinstance(of, TargetLoss | RandomTargetLoss) else None)


class OutputLoss(TrainingLoss):
    """The user's `loss(output)`."""

    def __init__(self, given: Callable[..., Tensor]) -> None:
        super().__init__()
        self.given = given
        self.name = _name_of(given)

    def choose(self, output: Any) -> Callable[[Any], Tensor]:
        return self.given


@dataclass(frozen=True)
class Answers:
    right: Tensor
    judged: Tensor
    classes: Tensor
    """The targets that were judged; where one was not, the number of classes, which no target has."""
    known: int
    """How many classes there are."""


class TargetLoss(TrainingLoss):
    """A loss against targets: the user's `loss(output, target)`, else the output's own, else the one that fits the targets.

    The targets of a training on data change from step to step.
    """

    def __init__(self, given: Callable[..., Tensor] | None, targets: Any = None) -> None:
        super().__init__(targets)
        self.given = given
        self.name = "of the data" if given is None else _name_of(given)
        self.is_static = False
        """A graph reads its targets from where they were when it was recorded: they are then copied there."""
        self._held: dict[tuple[int, ...], Tensor] = {}
        self._kind: TargetKind | None = None if targets is None else kind_of_targets(targets)
        self._cast: tuple[Any, Any] = None, None
        self._own: tuple[str, ...] = ()
        """The model's own loss, or its parts, are there in the output, by the names that `float_tensors` gives."""
        self._has_own = False
        self._can_judge = False
        """The model has a loss of its own, and its answers can be compared with the targets all the same."""

    def put(self, targets: Any) -> None:
        """Take the targets of the next step."""
        if self._kind is None:
            self._kind = kind_of_targets(targets)  # of the first batch: looking at values waits for the device
        if not self.is_static or not isinstance(targets, Tensor):
            self.targets = targets
            return
        held = self._held.setdefault(tuple(targets.shape), torch.empty_like(targets))
        self.targets = held.copy_(targets)

    def choose(self, output: Any) -> Callable[[Any], Tensor]:
        given = self.given
        if given is not None:
            dtype = _half_format(output)
            if dtype is None:
                return lambda output: given(output, self.targets)
            return lambda output: given(output, self._targets_in(dtype))
        if self._own_of(output) is not None:
            return self._the_own
        terms = [
            _weighted(weight, part_at(output, "" if isinstance(output, Tensor) else name), self._comparison(logits))
            for weight, name, logits in weighted_logits(output)
        ]
        if not terms:
            raise BenchError("user", f"no loss to train on: the model returned {_kind_of(output)}; give a loss")
        return terms[0] if len(terms) == 1 else lambda output: reduce(add, (term(output) for term in terms))

    def _targets_in(self, dtype: torch.dtype) -> Any:
        """The targets in the output's number format. They are cast once: a step that is compiled or captured only reads them."""
        if self._cast[0] is not self.targets:
            cast = map_tensors(self.targets, lambda _, each: each.to(dtype) if each.is_floating_point() else each)
            self._cast = self.targets, cast
        return self._cast[1]

    def learn(self, output: Any, other: Any = None) -> list[Note]:
        """Find the model's own loss in an output of the model as it is; `other` is its output for other targets.

        Numbers it returned that are no part of the loss are named in a note.
        """
        if self.given is not None or self._own_of(output) is not None:
            untold = []
        else:
            self._own = own_losses(output, other)
            untold = [name for name, each in float_tensors(output) if not each.ndim and name not in self._own]
        own = self._own_of(output) if self.given is None else None
        if own is not None:
            logits = main_logits(output) if weighted_logits(output) else None
            self._can_judge = logits is not None and self._fits_own(logits, own)
            self._has_own, self.name = True, "the model's own"
        if not untold:
            return []
        told = f"the model also returns a single number ({', '.join(untold)}) that is not trained on"
        return [note("unused-number", f"{told}: give a loss of your own, as loss(output, target), to use it")]

    def takes(self, output: Any) -> bool:
        """True if there is a loss for such an output and the targets at hand."""
        classes = self.given is None and self._own_of(output) is None and isinstance(self.targets, Tensor)
        logits = [each for _, _, each in weighted_logits(output)] if classes else []
        if any(_are_whole(fit(self.targets, each), each) and not are_classes_of(each, self.targets) for each in logits):
            return False  # on a GPU, asking for the loss would end the process
        try:
            self(output)
        except Exception:  # whatever a loss says to a shape that it does not expect
            return False
        return True

    def held_out(self, output: Any) -> Tensor | None:
        """The loss of a held-out batch; None where the model has a loss of its own but returns none in eval mode."""
        return None if self._has_own and self._own_of(output) is None else self(output)

    def answers(self, output: Any) -> Answers | None:
        """How many of the batch's targets the output has right; None where there are no classes to be right about."""
        if not isinstance(self.targets, Tensor):
            return None
        if not self._can_judge and (self._has_own or own_loss(output) is not None):
            return None  # a model with a loss of its own may compare other positions than these
        logits = main_logits(output)
        targets = fit(self.targets, logits)
        axis = class_axis(logits)
        if targets.shape == logits.shape:
            if self._kind != "shares":
                return None
            targets = targets.argmax(axis)
        elif targets.is_floating_point():
            return None
        counted = targets != IGNORED
        right, known = (logits.argmax(axis) == targets) & counted, logits.shape[axis]
        return Answers(right.sum(), counted.sum(), torch.where(counted, targets, known).flatten(), known)

    def class_beyond(self, logits: Tensor) -> int | None:
        """Returns a target of this batch that names no class of the output, or None if all do or the loss is not chosen here."""
        if self.given is not None or self._has_own or not isinstance(self.targets, Tensor):
            return None
        targets = fit(self.targets, logits)
        if not _are_whole(targets, logits):
            return None
        wrong = targets[(targets != IGNORED) & ((targets < 0) | (targets >= logits.shape[class_axis(logits)]))]
        return int(wrong[0]) if len(wrong) else None

    def _own_of(self, output: Any) -> Tensor | None:
        if (own := own_loss(output)) is not None:
            return own
        found = dict(float_tensors(output)) if self._own else {}
        parts = [found[name].reshape(()) for name in self._own if name in found]
        if parts:
            return torch.stack(parts).sum() if len(parts) > 1 else parts[0]
        return sum_of_losses(output)

    def _fits_own(self, logits: Tensor, own: Tensor) -> bool:
        """True if accuracy has a meaning: there is one class per sample, or a loss that compares the positions that are compared here."""
        if not isinstance(self.targets, Tensor) or not are_classes_of(logits, self.targets):
            return False
        return (
            logits.ndim == 2
            or torch.isclose(self._comparison(logits)(logits).float(), own.float(), rtol=1e-3).item() is True
        )

    def _the_own(self, output: Any) -> Tensor:
        own = self._own_of(output)
        assert own is not None
        return own

    def _comparison(self, logits: Tensor) -> Callable[[Tensor], Tensor]:
        """How outputs such as this one are compared with targets such as those at hand, as a plain loop would write it."""
        if not isinstance(self.targets, Tensor):
            kind = type(self.targets).__name__
            raise BenchError("user", f"targets in a {kind} need a loss of their own: give loss(output, target)")
        in_fp32 = not torch.is_autocast_enabled(logits.device.type) and logits.dtype != torch.float32
        targets = fit(self.targets, logits)
        if targets.is_floating_point() or targets.shape == logits.shape:
            if targets.shape != logits.shape:
                shapes = f"targets of {list(targets.shape)} do not fit the output of {list(logits.shape)}"
                raise BenchError("user", f"{shapes}: give a loss of your own, as loss(output, target)")
            self.name, compare = _OF_VALUES[self._kind or "values"]

            def of_values(logits: Tensor) -> Tensor:
                logits = logits.float() if in_fp32 else logits
                return compare(logits, fit(self.targets, logits).to(logits.dtype))

            return of_values
        self.name = "cross_entropy"
        if logits.ndim == 3 and logits.shape[:2] == targets.shape:
            return lambda logits: _of_positions(
                logits.float() if in_fp32 else logits, fit(self.targets, logits).flatten()
            )
        if targets is self.targets and not in_fp32:
            return lambda logits: F.cross_entropy(logits, self.targets)
        return lambda logits: F.cross_entropy(logits.float() if in_fp32 else logits, fit(self.targets, logits))


def _weighted(
    weight: float, take: Callable[[Any], Tensor], compare: Callable[[Tensor], Tensor]
) -> Callable[[Any], Tensor]:
    return (lambda output: compare(take(output))) if weight == 1.0 else lambda output: weight * compare(take(output))


def _half_format(output: Any) -> torch.dtype | None:
    """The half precision of an output whose recipe changed it, and where autocast does not see to the targets."""
    floating = float_tensors(output)
    if not floating or torch.is_autocast_enabled(floating[0][1].device.type):
        return None
    dtype = floating[0][1].dtype
    return dtype if dtype in (torch.float16, torch.bfloat16) else None


class DefaultLoss(TrainingLoss):
    """`output.loss` where there is one, the sum of an output that is all losses, else cross-entropy of all logits."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._drawn = Targets(seed)
        self._found: tuple[str | None] | None = None
        """The output holds its loss there and does not name it. It is None until that was looked for."""
        self.name = "default"

    def take(self, rows: Sequence[int], size: int) -> None:
        self._drawn.part = rows, size

    def choose(self, output: Any) -> Callable[[Any], Tensor]:
        if own_loss(output) is not None:
            self.name = "output.loss"
            return plain_own_loss(output)
        if (path := self._path_of_loss(output)) is not None:
            self.name = f"output {path}"
            return part_at(output, path)
        if sum_of_losses(output) is not None:
            self.name = "sum of the output's losses"
            return lambda output: torch.stack(list(output.values())).sum()
        terms = [self._term(output, weight, name) for weight, name, _ in weighted_logits(output)]
        if not terms:
            raise BenchError("user", f"no loss to train on: the model returned {_kind_of(output)}; give a loss")
        return terms[0] if len(terms) == 1 else lambda output: reduce(add, (term(output) for term in terms))

    def _path_of_loss(self, output: Any) -> str | None:
        """Looks in the first step with gradients: later ones are timed, and a compiler may hide the answer."""
        if self._found is not None:
            return self._found[0]
        path = loss_among(output)
        tensors = [tensor for _, tensor in named_tensors(output)]
        if any(tensor.requires_grad for tensor in tensors) and not any(isinstance(one, FakeTensor) for one in tensors):
            self._found = (path,)
        return path

    def _term(self, output: Any, weight: float, name: str) -> Callable[[Any], Tensor]:
        take = part_at(output, "" if isinstance(output, Tensor) else name)
        logits = take(output)
        if not is_plain(logits):
            kind = "ragged" if logits.is_nested else "sparse"
            raise BenchError("user", f"no loss to train on: the model returned a {kind} tensor; give a loss")
        # Half precision sums many exponentials badly. Autocast has rules of its own for that, and people who train
        # under it leave them alone; a copy in fp32 beside them took a tenth of the largest batch of a transformer.
        casts = not torch.is_autocast_enabled(logits.device.type) and logits.dtype != torch.float32
        if casts:
            logits = logits.float()
        if not _has_classes(logits):
            self.name, compare, targets = "mse on random targets", F.mse_loss, self._drawn.values(name, logits)
        else:
            self.name, targets = "cross_entropy on random targets", self._drawn.classes(name, logits)
            compare = _of_positions if logits.ndim == 3 else F.cross_entropy  # type: ignore[assignment]
            targets = targets.flatten() if logits.ndim == 3 else targets

        def term(output: Any) -> Tensor:
            logits = take(output)
            loss = compare(logits.float() if casts else logits, targets)
            return loss if weight == 1.0 else weight * loss

        return term


def _of_positions(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets)


class RandomTargetLoss(TrainingLoss):
    """The user's `loss(output, target)` without targets: random ones for the first floating tensor of the output."""

    def __init__(self, given: Callable[..., Tensor], seed: int = 0) -> None:
        super().__init__()
        self.given = given
        self._drawn = Targets(seed)
        self._wants_values = _name_of(given) in _WANTS_VALUES
        self.name = f"{_name_of(given)} on random targets"

    def take(self, rows: Sequence[int], size: int) -> None:
        self._drawn.part = rows, size

    def choose(self, output: Any) -> Callable[[Any], Tensor]:
        floating = float_tensors(output)
        if not floating:
            raise BenchError(
                "user", f"the loss takes targets, but {type(output).__name__} holds no floating tensor to match"
            )
        name, logits = floating[0]
        drawn = self._drawn.values if self._wants_values or not _has_classes(logits) else self._drawn.classes
        given, targets = self.given, drawn(name, logits)
        return (lambda output: given(output, targets)) if self._is_checked else partial(self._first, targets)

    def _first(self, targets: Tensor, output: Any) -> Tensor:
        """The first call, which says in one line that the loss does not take what was drawn."""
        try:
            return self.given(output, targets)
        except Exception as error:
            if is_out_of_memory(error) or any(isinstance(each, FakeTensor) for _, each in named_tensors(output)):
                raise
            raise BenchError(
                "user",
                f"the loss {_name_of(self.given)} failed on targets drawn at random ({one_line(error)}): "
                f"give your own, as (module, inputs, loss, targets)",
            ) from error


def own_loss(output: Any) -> Tensor | None:
    """Returns the scalar that the output carries as `loss`, by attribute or key. An output that is one scalar is itself the loss."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, Tensor) and output.ndim == 0:
        found = output
    if isinstance(found, Tensor) and found.is_floating_point() and found.numel() == 1:
        return found.reshape(())
    return None


def plain_own_loss(output: Any) -> Callable[[Any], Tensor]:
    """How a loop takes the loss out of outputs such as this one, which carries it."""
    if isinstance(output, Tensor):
        return lambda output: output
    take = itemgetter("loss") if isinstance(output, Mapping) else attrgetter("loss")
    return take if take(output).ndim == 0 else lambda output: take(output).reshape(())


def loss_among(output: Any) -> str | None:
    """Returns where an output such as `(logits, loss)` holds its loss: the one single number that depends on all that the rest does.

    A scale, or a penalty of some layers, depends on fewer parameters.
    """
    trained = [(path, tensor) for path, tensor in float_tensors(output) if tensor.requires_grad]
    numbers = [(path, tensor) for path, tensor in trained if tensor.ndim == 0]
    rest = [tensor for _, tensor in trained if tensor.ndim > 0]
    if len(numbers) != 1 or not rest:
        return None
    ((path, number),) = numbers
    return path if _leaves_of([number]) >= _leaves_of(rest) else None


def _leaves_of(tensors: list[Tensor]) -> set[int]:
    """Returns the parameters, by their ids, that these depend on. What a compiler has merged depends on nothing that is known."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen, leaves = set(), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return leaves


def sum_of_losses(output: Any) -> Tensor | None:
    """For an output that holds nothing but single numbers by name, as detectors return while they train."""
    if not isinstance(output, Mapping) or not output:
        return None
    parts = list(output.values())
    if not all(isinstance(part, Tensor) and part.is_floating_point() and part.ndim == 0 for part in parts):
        return None
    return torch.stack(parts).sum()


def weighted_logits(output: Any) -> list[tuple[float, str, Tensor]]:
    """Returns what enters the loss, with its weight.

    Where the output names its main part (`logits`, `out`), only that and the auxiliary heads count: the rest is
    hidden states and the like. Otherwise every floating tensor does, so that every parameter gets a gradient.
    """
    floating = float_tensors(output)
    names = [name for name, _ in floating]
    main = next((name for name in ("logits", "out") if name in names), None)
    if main is None:
        return [(1.0, name, tensor) for name, tensor in floating if tensor.ndim > 0]
    weights = {main: 1.0, **AUXILIARY_WEIGHTS}
    return [(weights[name], name, tensor) for name, tensor in floating if name in weights]


def takes_targets(loss: Callable[..., Any]) -> bool:
    """True if a loss must be given a second positional argument."""
    return (required_arguments(loss) or 0) >= 2


def required_arguments(loss: Callable[..., Any]) -> int | None:
    """How many positional arguments a loss must be given; None where that cannot be read."""
    parameters = _parameters(loss)
    if parameters is None:
        return None
    return sum(p.kind in _POSITIONAL and p.default is inspect.Parameter.empty for p in parameters)


def _may_take_two(loss: Callable[..., Any]) -> bool:
    parameters = _parameters(loss) or []
    several = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    return several or sum(p.kind in _POSITIONAL for p in parameters) >= 2


def _parameters(loss: Callable[..., Any]) -> list[inspect.Parameter] | None:
    # The signature of a module is that of its call, which takes anything.
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built in: nothing to read
        return None


def _has_classes(logits: Tensor) -> bool:
    """False if there is one output per item or a single class, which leaves cross-entropy nothing to choose from."""
    axis = 2 if logits.ndim == 3 else 1
    return logits.ndim >= 2 and logits.shape[axis] > 1


def _name_of(loss: Callable[..., Any]) -> str:
    name: str = getattr(loss, "__name__", "") or type(loss).__name__
    return "a lambda" if name == "<lambda>" else name


def _kind_of(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of {str(output.dtype).removeprefix('torch.')}"
    return "nothing" if output is None else f"{type(output).__name__} without a floating tensor"


# Targets of any form


def kind_of_targets(targets: Any) -> TargetKind:
    """Returns what the values of a first batch look like. It is not known yet whether there is one for each output."""
    if not isinstance(targets, Tensor):
        return "values"
    values = targets.float()
    if values.ndim == 2 and values.shape[1] > 1 and (values >= 0).all() and ((values.sum(1) - 1).abs() < 1e-3).all():
        return "shares"
    zeros, ones = (values == 0).sum(), (values == 1).sum()
    is_mixed = bool(zeros and ones) or not targets.is_floating_point()  # a first batch may have but one of them
    return "labels" if is_mixed and int(zeros + ones) == values.numel() else "values"


def fit(targets: Tensor, logits: Tensor) -> Tensor:
    """Targets in the shape of the output where they have a value for each of its numbers, else classes as torch wants them."""
    if targets.numel() == logits.numel():
        return targets.reshape(logits.shape)
    axis = class_axis(logits)
    if targets.ndim == logits.ndim > 1 and targets.shape[axis] == 1:
        targets = targets.squeeze(axis)
    return targets if targets.is_floating_point() else targets.long()


def main_logits(output: Any) -> Tensor:
    """The part of the output that answers."""
    found = weighted_logits(output)
    if not found:
        raise BenchError("user", f"the model returned {type(output).__name__} without a floating tensor")
    return max(found, key=lambda each: each[0])[2]


def class_axis(logits: Tensor) -> int:
    return 2 if logits.ndim == 3 else 1


def are_classes_of(logits: Tensor, targets: Tensor) -> bool:
    """True if the targets name a class of the output for each sample, position or pixel. It waits for the device."""
    if logits.ndim < 2 or targets.is_floating_point():
        return False
    axis, fitted = class_axis(logits), fit(targets, logits)
    if fitted.shape != (*logits.shape[:axis], *logits.shape[axis + 1 :]):
        return False
    counted = fitted[fitted != IGNORED]
    return bool(((counted >= 0) & (counted < logits.shape[axis])).all())


def _are_whole(targets: Tensor, logits: Tensor) -> bool:
    """True if these can only be classes: they are whole numbers, and there is not one for each number of the output."""
    return not targets.is_floating_point() and targets.shape != logits.shape


def own_losses(output: Any, other: Any = None) -> tuple[str, ...]:
    """Returns where an output of the model as it is has its loss, by the names of `float_tensors`. Several are summed.

    A single number is the loss where it changes with the targets (`other` is the output for other ones) or where it is
    computed from the answer beside it. An auxiliary loss of hidden layers is neither.
    """
    floating = float_tensors(output)
    numbers = {name: each for name, each in floating if not each.ndim and each.grad_fn is not None}
    if other is not None:
        others = dict(float_tensors(other))
        found = [name for name, each in numbers.items() if name in others and not torch.equal(each, others[name])]
    else:
        answers = _last_of([each for _, each in floating if each.ndim and each.grad_fn is not None])
        found = [name for name, each in numbers.items() if answers & _nodes(each)]
    whole = [name for name in found if all(numbers[each].grad_fn in _nodes(numbers[name]) for each in found)]
    return tuple(whole[:1] or found)


def _last_of(tensors: Sequence[Tensor]) -> set[Any]:
    """The nodes of those that no other is computed from: answers, not the hidden layers returned beside them."""
    return {
        each.grad_fn
        for each in tensors
        if not any(each.grad_fn in _nodes(other) for other in tensors if other.grad_fn is not each.grad_fn)
    }


def _nodes(tensor: Tensor) -> set[Any]:
    """All of autograd's nodes that a tensor is computed by, its own too."""
    seen: set[Any] = set()
    left = [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [each for each, _ in node.next_functions]
    return seen


def other_targets(targets: Tensor) -> Tensor:
    """Targets that are as valid as these and not the same."""
    if targets.is_floating_point():
        turned = targets.roll(1, 0)
        return turned if not torch.equal(turned, targets) else 0.5 * targets
    valid = targets >= 0
    first = int(targets[valid][0]) if valid.any() else 0
    alike = torch.where(valid, first, targets)
    return alike if not torch.equal(alike, targets) else torch.where(valid, 0 if first else 1, targets)
