"""The loss of a training step: the one given, else the output's own, else cross-entropy on fixed random targets.

The contract: `loss(output)` or `loss(output, target)` gives one floating number that depends on the output. Targets are
the user's own; where there are none they are drawn once, at the first call: a later step only reads them, so that it can
be compiled and captured.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import add, attrgetter, itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.workload.structure import float_tensors, is_plain, map_tensors, named_tensors, part_at
from redline.model.errors import BenchError

AUXILIARY_WEIGHTS = {"aux": 0.5, "aux_logits": 0.4, "aux_logits1": 0.3, "aux_logits2": 0.3}
"""As torchvision trains its segmentation models, Inception and GoogLeNet."""

_WANTS_VALUES = {
    "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss", "PoissonNLLLoss",
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "poisson_nll_loss",
}  # fmt: skip
"""Losses of torch whose targets look like the output instead of naming classes."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Targets:
    """Random targets, drawn once per output and kept on its device."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: dict[tuple[Any, ...], Tensor] = {}
        self.part: tuple[Sequence[int], int] | None = None
        """For a rank: its rows, and the size of the global batch they are drawn for."""

    def classes(self, name: str, logits: Tensor) -> Tensor:
        """One class per item, per position (N, T, V) or per pixel (N, C, H, W)."""
        axis = 2 if logits.ndim == 3 else 1
        shape = tuple(size for dimension, size in enumerate(logits.shape) if dimension != axis)

        def draw(generator: torch.Generator) -> Tensor:
            return self._part_of(shape, lambda whole: torch.randint(0, logits.shape[axis], whole, generator=generator))

        return self._keep(("classes", name, *logits.shape), logits, draw)

    def values(self, name: str, logits: Tensor) -> Tensor:
        """Values of the output's shape between 0 and 1, which suit regression and binary cross-entropy alike."""

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
    """What the record says was trained on."""

    def __init__(self, targets: Any = None) -> None:
        self.targets = targets
        """The user's own; None where there are none, or they are drawn."""
        self.weight = 1.0
        """Of this rank, where ranks have unequal shares of a batch."""
        self.chosen: Callable[[Any], Tensor] | None = None
        """What the last call computed, for outputs of the same form."""
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
        """The loss of outputs such as this one, as one function that looks for nothing any more."""

    def to(self, device: torch.device | str) -> None:
        """Move the user's own targets."""
        self.targets = map_tensors(self.targets, lambda _, tensor: tensor.to(device))

    def select(self, rows: Sequence[int], size: int) -> None:
        """Take the user's own targets of these items out of `size`."""

        def chosen(path: str, tensor: Tensor) -> Tensor:
            if tensor.shape[:1] != (size,):
                where = f"targets {path}".rstrip()
                held = f"the {where} of shape {list(tensor.shape)} do not hold the {size} items along axis 0"
                raise BenchError("user", f"{held}: let the factory take batch")
            return tensor.index_select(0, torch.tensor(rows, device=tensor.device))

        self.targets = map_tensors(self.targets, chosen)

    def take(self, rows: Sequence[int], size: int) -> None:
        """Keep to these items out of `size` from now on: the share of one rank."""
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
        return DefaultLoss(seed) if targets is None else TargetLoss(default_of(targets), targets)
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


class OutputLoss(TrainingLoss):
    """The user's `loss(output)`."""

    def __init__(self, given: Callable[..., Tensor]) -> None:
        super().__init__()
        self.given = given
        self.name = _name_of(given)

    def choose(self, output: Any) -> Callable[[Any], Tensor]:
        return self.given


class TargetLoss(TrainingLoss):
    """`loss(output, target)` with the user's own targets."""

    def __init__(self, given: Callable[..., Tensor], targets: Any) -> None:
        super().__init__(targets)
        self.given = given
        self._cast: tuple[Any, torch.dtype, Any] | None = None
        self.name = _name_of(given)

    def choose(self, output: Any) -> Callable[[Any], Tensor]:
        given, targets = self.given, self._like(output)
        return lambda output: given(output, targets)

    def _like(self, output: Any) -> Any:
        """Floating targets in the output's number format, where a recipe changed that and autocast does not see to it."""
        floating = float_tensors(output)
        if not floating or torch.is_autocast_enabled(floating[0][1].device.type):
            return self.targets
        dtype = floating[0][1].dtype
        if dtype not in (torch.float16, torch.bfloat16):
            return self.targets
        # Cast once: a step that is compiled or captured only reads them.
        if self._cast is None or self._cast[0] is not self.targets or self._cast[1] != dtype:
            cast = map_tensors(self.targets, lambda _, each: each.to(dtype) if each.is_floating_point() else each)
            self._cast = (self.targets, dtype, cast)
        return self._cast[2]


def default_of(targets: Any) -> Callable[..., Tensor]:
    """The loss for targets that come without one: cross-entropy of classes, or the squared distance of values."""
    if not isinstance(targets, Tensor):
        kind = type(targets).__name__
        raise BenchError("user", f"targets in a {kind} need a loss of their own: give loss(output, target)")

    def cross_entropy(output: Any, target: Tensor) -> Tensor:
        logits = _main_logits(output)
        if logits.ndim == target.ndim + 1 and logits.ndim == 3 and logits.shape[:2] == target.shape:
            return F.cross_entropy(logits.flatten(0, 1), target.flatten())
        return F.cross_entropy(logits, target)

    def mse(output: Any, target: Tensor) -> Tensor:
        return F.mse_loss(_main_logits(output), target)

    return mse if targets.is_floating_point() else cross_entropy


def _main_logits(output: Any) -> Tensor:
    weighted = weighted_logits(output)
    if not weighted:
        raise BenchError("user", f"no loss to train on: the model returned {type(output).__name__}; give a loss")
    return weighted[0][2]


class DefaultLoss(TrainingLoss):
    """`output.loss` where there is one, the sum of an output that is all losses, else cross-entropy of all logits."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._drawn = Targets(seed)
        self._found: tuple[str | None] | None = None
        """Where the output holds its loss without naming it, once that was looked for."""
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
        """Looked for in the first step with gradients: later ones are timed, and a compiler may hide the answer."""
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
    """The scalar the output carries as `loss`, by attribute or key; an output that is one scalar is itself the loss."""
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
    """Where an output such as `(logits, loss)` holds its loss: the one single number that depends on all that the rest does.

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
    """The parameters, by their ids, that these depend on. What a compiler has merged depends on nothing that is known."""
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
    """What enters the loss, with its weight.

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
    """Whether a loss must be given a second positional argument."""
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
    """One output per item, or a single class, leaves cross-entropy nothing to choose from."""
    axis = 2 if logits.ndim == 3 else 1
    return logits.ndim >= 2 and logits.shape[axis] > 1


def _name_of(loss: Callable[..., Any]) -> str:
    name: str = getattr(loss, "__name__", "") or type(loss).__name__
    return "a lambda" if name == "<lambda>" else name


def _kind_of(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of {str(output.dtype).removeprefix('torch.')}"
    return "nothing" if output is None else f"{type(output).__name__} without a floating tensor"
