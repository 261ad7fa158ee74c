"""This module makes the loss of a training step. It is the one that was given, else the output's own, else the one that
fits the targets.

The contract: `loss(output)` or `loss(output, target)` gives one floating number that depends on the output. Targets are the
user's own or those of a batch of data. Where there are none they are drawn once, at the first call: a later step only reads
them, so that it can be compiled and captured.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
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
"""torchvision trains its segmentation models, Inception and GoogLeNet with these weights."""
IGNORED = -100
"""torch's cross-entropy leaves out targets of this class."""
HALF = (torch.float16, torch.bfloat16)

TargetKind = Literal["shares", "labels", "values"]
"""Targets with a value for each output are of three kinds: shares of the classes (such as one-hot ones), labels that are
true or false, or values."""
Compare = Callable[[Tensor, Tensor], Tensor]
LossOf = Callable[[Any], Tensor]
_OF_VALUES: dict[TargetKind, tuple[str, Compare]] = {
    "shares": ("cross_entropy", F.cross_entropy),
    "labels": ("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits),
    "values": ("mse", F.mse_loss),
}
ON_RANDOM = " on random targets"
OWN = "output.loss", "sum of the output's losses"


@dataclass(frozen=True)
class Answers:
    right: Tensor
    """This many of the judged targets are answered right."""
    classes: Tensor
    """These are the targets that were judged. A target that was not judged has the number of classes here, which no real target has."""
    known: int
    """There are this many classes."""


class TrainingLoss:
    """This computes the loss of an output alone.

    A call looks at the output's form and keeps what it did as `chosen`: a function without any choice left, which a timed
    step calls as a plain loop would. The targets of a training on data change from step to step, which `chosen` allows.
    """

    def __init__(
        self,
        given: Callable[..., Tensor] | None = None,
        seed: int = 0,
        targets: Any = None,
        notes: list[Note] | None = None,
    ) -> None:
        """`given` may be `loss(output)` or `loss(output, target)`. What a person should know is added to `notes`."""
        self.given, self.targets, self._seed = given, targets, seed
        """`targets` are the user's own, or those of the batch. It is None if they are drawn."""
        self._notes = [] if notes is None else notes
        least, self._most = (0.0, math.inf) if given is None else _arguments(given)
        self._name_given = "" if given is None else _name_of(given)
        if least > 2:
            text = f"the loss {self._name_given} must be given {least} things"
            raise BenchError("user", f"{text}: it may take the output and the target")
        if targets is not None and self._most < 2:
            text = f"targets were given, but the loss {self._name_given} takes the output alone"
            raise BenchError("user", text)
        self._takes_targets = least == 2 or targets is not None
        self.name = self._name_given + ON_RANDOM * self._draws if given else "default"
        """The record gives this name to the loss that was trained on."""
        self.weight = 1.0
        """This rank's loss counts this much if ranks have unequal shares of a batch."""
        self.chosen: LossOf | None = None
        """This is the function that the last call computed. It is for outputs of the same form."""
        self.is_static = False
        """It is true if a graph reads its targets from where they were when it was recorded. New targets are then copied there."""
        self._is_checked = False
        self._part: tuple[Sequence[int], int] | None = None
        """A rank has these rows of a global batch of this size. Targets are drawn for the whole batch."""
        self._drawn: dict[tuple[Any, ...], Tensor] = {}
        self._held: dict[tuple[int, ...], Tensor] = {}
        self._kind: TargetKind | None = None if given or targets is None else kind_of_targets(targets)
        self._cast: tuple[Any, Any] = None, None
        self._has_classes: bool | None = None
        """It says whether a loss that takes targets takes classes. It is None until one was tried."""
        self._number: tuple[str | None] | None = None
        """The output holds its loss at this path without naming it. The field is None until we have looked for it."""
        self._has_own = False
        """It is true if the model trains on a loss of its own."""

    @property
    def _draws(self) -> bool:
        return self._takes_targets and self.targets is None

    def __call__(self, output: Any) -> Tensor:
        of, weight = self.choose(output), self.weight
        self.chosen = of if weight == 1.0 else lambda output: of(output) * weight
        try:
            loss = self.chosen(output)
        except Exception as error:
            if not self._draws or self._is_checked or is_out_of_memory(error) or _is_fake(output):
                raise
            raise BenchError(
                "user",
                f"the loss {self._name_given} failed on targets drawn at random ({one_line(error)}): "
                f"give your own, as (module, inputs, loss, targets)",
            ) from error
        if not self._is_checked:
            self._check(loss, output)
        return loss

    def choose(self, output: Any) -> LossOf:
        """Returns the loss of outputs such as this one as one function that makes no more choices."""
        given = self.given
        if given is not None:
            if not self._takes_targets:
                return given
            if self._draws:
                drawn = self._drawn_for(given, output)
                return lambda output: given(output, drawn)
            if (dtype := _half_format(output)) is None:
                return lambda output: given(output, self.targets)
            return lambda output: given(output, self._targets_in(dtype))
        if (own := self._own(output)) is not None:
            self.name, take = own
            return take
        terms = [
            self._term(weight, part_at(output, "" if isinstance(output, Tensor) else name), name, logits)
            for weight, name, logits in weighted_logits(output)
        ]
        if not terms:
            raise BenchError("user", f"no loss to train on: the model returned {_kind_of(output)}; give a loss")
        return terms[0] if len(terms) == 1 else lambda output: reduce(add, (term(output) for term in terms))

    def _term(self, weight: float, take: LossOf, name: str, logits: Tensor) -> LossOf:
        """Returns the loss of one part of the output, as a plain loop would write it."""
        if not is_plain(logits):
            kind = "ragged" if logits.is_nested else "sparse"
            raise BenchError("user", f"no loss to train on: the model returned a {kind} tensor; give a loss")
        # Half precision sums many exponentials badly, so the loss gets a copy in fp32. Autocast has rules of its own for that, and
        # people who train under it leave them alone; a copy in fp32 beside them took a tenth of the largest batch of a transformer.
        in_fp32 = _half_format(logits) is not None
        logits = logits.float() if in_fp32 else logits
        is_drawn = self.targets is None
        targets = self._draw(name, logits, classes=_has_classes(logits)) if is_drawn else self.targets
        kind, compare, shaped = self._comparison(logits, targets)
        self.name, fixed = kind + ON_RANDOM * is_drawn, shaped(targets, logits)
        has_form = fixed is targets

        def term(output: Any) -> Tensor:
            logits = take(output).float() if in_fp32 else take(output)
            targets = fixed if is_drawn else self.targets if has_form else shaped(self.targets, logits)
            loss = compare(logits, targets)
            return loss if weight == 1.0 else weight * loss

        return term

    def _comparison(self, logits: Tensor, targets: Any) -> tuple[str, Compare, Compare]:
        """Returns the name of the comparison for such logits and targets, the comparison itself, and the function that
        brings targets into the form it wants."""
        if not isinstance(targets, Tensor):
            kind = type(targets).__name__
            raise BenchError("user", f"targets in a {kind} need a loss of their own: give loss(output, target)")
        fitted = fit(targets, logits)
        if fitted.shape == logits.shape:
            return *_OF_VALUES[self._kind or "values"], lambda targets, logits: fit(targets, logits).to(logits.dtype)
        if fitted.is_floating_point():
            shapes = f"targets of {list(targets.shape)} do not fit the output of {list(logits.shape)}"
            raise BenchError("user", f"{shapes}: give a loss of your own, as loss(output, target)")
        if logits.ndim == 3 and logits.shape[:2] == fitted.shape:
            return "cross_entropy", _of_positions, lambda targets, logits: fit(targets, logits).flatten()
        return "cross_entropy", F.cross_entropy, fit

    def _own(self, output: Any) -> tuple[str, LossOf] | None:
        """Returns the name of the loss that the model itself computes, and how a loop takes it out of such outputs."""
        if (own := own_loss(output)) is not None:
            return own
        if self._number is None:
            # We look in the first step with gradients, because later steps are timed and a compiler may hide the answer.
            path, others = loss_among(output)
            if _has_gradient(output) and not _is_fake(output):
                self._number = (path,)
                if others:
                    text = f"the model also returns a single number ({', '.join(others)}) that is not trained on"
                    advice = "give a loss of your own, as loss(output, target), to use it"
                    self._notes.append(note("unused-number", f"{text}: {advice}"))
        else:
            (path,) = self._number
        if path is None or path not in dict(float_tensors(output)):
            return None
        return f"output {path}", part_at(output, path)

    # The next methods are about the targets.

    def put(self, targets: Any) -> None:
        """Takes the targets of the next step."""
        if self._kind is None and self.given is None:
            # Only the targets of the first batch are looked at, because looking at values waits for the device.
            self._kind = kind_of_targets(targets)
        if not self.is_static or not isinstance(targets, Tensor):
            self.targets = targets
            return
        held = self._held.setdefault(tuple(targets.shape), torch.empty_like(targets))
        self.targets = held.copy_(targets)

    def to(self, device: torch.device | str) -> None:
        """Moves the user's own targets."""
        self.targets = map_tensors(self.targets, lambda _, tensor: tensor.to(device))

    def select(self, rows: Sequence[int], size: int) -> None:
        """Takes the user's own targets of these items, which are some of `size` items."""

        def chosen(path: str, tensor: Tensor) -> Tensor:
            if tensor.shape[:1] != (size,):
                where = f"targets {path}".rstrip()
                held = f"the {where} of shape {list(tensor.shape)} do not hold the {size} items along axis 0"
                raise BenchError("user", f"{held}: let the factory take batch")
            return tensor.index_select(0, torch.tensor(rows, device=tensor.device))

        self.targets = map_tensors(self.targets, chosen)

    def take(self, rows: Sequence[int], size: int) -> None:
        """Keeps only these of `size` items from now on. They are the share of one rank."""
        self._part = rows, size
        self.select(rows, size)

    def _targets_in(self, dtype: torch.dtype) -> Any:
        """Returns the targets in the output's number format. They are cast once, so that a compiled or captured step only reads them."""
        if self._cast[0] is not self.targets:

            def cast(_: str, tensor: Tensor) -> Tensor:
                return tensor.to(dtype) if tensor.is_floating_point() else tensor

            self._cast = self.targets, map_tensors(self.targets, cast)
        return self._cast[1]

    def _drawn_for(self, given: Callable[..., Tensor], output: Any) -> Tensor:
        """Returns random targets for the first floating tensor of the output. They are classes, or values if the loss takes no classes."""
        floating = float_tensors(output)
        if not floating:
            raise BenchError(
                "user", f"the loss takes targets, but {type(output).__name__} holds no floating tensor to match"
            )
        name, logits = floating[0]
        takes_classes = self._has_classes
        if takes_classes is None:
            takes_classes = _has_classes(logits) and _accepts(given, output, self._draw(name, logits, classes=True))
            self._has_classes = None if _is_fake(output) else takes_classes
        return self._draw(name, logits, classes=takes_classes)

    def _draw(self, name: str, logits: Tensor, *, classes: bool) -> Tensor:
        """Returns random targets, which are drawn once per output and kept on its device.

        They are one class per item, per position (N, T, V) or per pixel (N, C, H, W), or values of the output's shape
        between 0 and 1, which suit regression and binary cross-entropy alike.
        """
        key, shape = (classes, name, logits.dtype, logits.device), list(logits.shape)
        many = shape.pop(class_axis(logits)) if classes else 0
        known = None if isinstance(logits, FakeTensor) else self._drawn.get(key)
        if known is not None:
            if list(known.shape) != shape:
                forms = f"its targets would be {list(known.shape)}, then {shape}"
                raise BenchError(
                    "user", f"the model's output has another shape at each call ({forms}): give a loss, as loss(output)"
                )
            return known
        # A rank draws the targets of the global batch and keeps its own, so that all ranks together train on the same
        # targets as one would.
        rows, size = self._part if self._part and shape[:1] == [len(self._part[0])] else (None, 0)
        # Inference mode is off here, because a tensor made under it could never take part in autograd.
        with torch.inference_mode(False):
            whole = shape if rows is None else [size, *shape[1:]]
            generator = torch.Generator().manual_seed(self._seed)
            drawn = (
                torch.randint(0, many, whole, generator=generator)
                if classes
                else torch.rand(whole, generator=generator)
            )
            drawn = drawn if rows is None else drawn[list(rows)]
            drawn = drawn.to(logits.device, drawn.dtype if classes else logits.dtype)
        # Targets that are drawn under a fake tensor mode must not outlive it, and real ones that are kept must not enter it.
        if not isinstance(logits, FakeTensor):
            self._drawn[key] = drawn
        return drawn

    # The next methods are for training on data.

    def start_on_data(self, targets: Any) -> None:
        """Takes the targets that come with every batch from now on. These are the first ones."""
        if self.given is not None and self._most < 2:
            text = f"the loss {self._name_given} takes no targets"
            raise BenchError("user", f"{text}: on data it must be loss(output, target)")
        self._takes_targets, self._kind = self.given is not None, None
        self.name = self._name_given or "of the data"
        self.put(targets)

    def learn(self, output: Any) -> None:
        """Looks at an output of the unchanged model, before a recipe changes it."""
        self(output)
        self._has_own = self.given is None and self._own(output) is not None

    def _classes(self, logits: Tensor) -> Tensor | None:
        """Returns the classes that the targets name, one for each sample, position or pixel. Returns None if they name none."""
        if not isinstance(self.targets, Tensor) or logits.ndim < 2:
            return None
        targets = fit(self.targets, logits)
        if targets.shape == logits.shape:
            return targets.argmax(class_axis(logits)) if self._kind == "shares" else None
        return None if targets.is_floating_point() else targets

    def held_out(self, output: Any) -> Tensor | None:
        """Returns the loss of a held-out batch. Returns None if the model trains on a loss of its own but returns none in eval mode."""
        return None if self._has_own and self._own(output) is None else self(output)

    def answers(self, output: Any) -> Answers | None:
        """Returns how many of the batch's targets the output has right. Returns None if the targets name no classes."""
        logits = main_logits(output)
        classes = None if logits is None else self._classes(logits)
        if logits is None or classes is None:
            return None
        if self.given is None and self._own(output) is not None and classes.ndim > 1:
            # A model with a loss of its own may compare other positions than we would.
            return None
        counted, axis = classes != IGNORED, class_axis(logits)
        right, known = (logits.argmax(axis) == classes) & counted, logits.shape[axis]
        return Answers(right.sum(), torch.where(counted, classes, known).flatten(), known)

    def class_beyond(self, logits: Tensor) -> int | None:
        """Returns a target of this batch that names no class of the output. Returns None if all do, or if our own loss is not used."""
        classes = None if self.given is not None or self._has_own else self._classes(logits)
        if classes is None:
            return None
        wrong = classes[(classes != IGNORED) & ((classes < 0) | (classes >= logits.shape[class_axis(logits)]))]
        return int(wrong[0]) if len(wrong) else None

    def _check(self, loss: Any, output: Any) -> None:
        """Raises an error in one line if the loss cannot be trained on. Later calls are not checked, because steps are timed."""
        wrong = ""
        if not isinstance(loss, Tensor):
            hint = " (return the tensor, not its .item())" if isinstance(loss, float) else ""
            wrong = f"gave {type(loss).__name__} where a tensor belongs{hint}"
        elif loss.numel() != 1:
            wrong = f"gave {list(loss.shape)} values, not one: reduce them with .mean()"
        elif not loss.is_floating_point():
            wrong = f"gave {loss.dtype}, which has no gradient"
        elif torch.is_grad_enabled() and _has_gradient(output) and not loss.requires_grad:
            wrong = "does not depend on the output: was it detached?"
        if wrong:
            raise BenchError("user", f"the loss {self.name} {wrong}")
        self._is_checked = not isinstance(loss, FakeTensor)


# The functions below read outputs of any form.


def own_loss(output: Any) -> tuple[str, LossOf] | None:
    """Returns the name of the loss that an output carries, and a function that takes it out of outputs such as this one.

    It stands there as `loss`, by attribute or key. An output that is one number is itself the loss, and one that holds
    nothing but single numbers by name, as detectors return while they train, is summed.
    """
    if isinstance(output, Tensor):
        is_loss = output.ndim == 0 and output.is_floating_point()
        return (OWN[0], lambda output: output) if is_loss else None
    is_mapping = isinstance(output, Mapping)
    found = output.get("loss") if is_mapping else getattr(output, "loss", None)
    if isinstance(found, Tensor) and found.is_floating_point() and found.numel() == 1:
        take: LossOf = itemgetter("loss") if is_mapping else attrgetter("loss")
        return OWN[0], take if found.ndim == 0 else lambda output: take(output).reshape(())
    if not is_mapping or not output:
        return None
    if not all(isinstance(part, Tensor) and part.is_floating_point() and not part.ndim for part in output.values()):
        return None
    return OWN[1], lambda output: torch.stack(list(output.values())).sum()


def loss_among(output: Any) -> tuple[str | None, list[str]]:
    """Returns where an output such as `(logits, loss)` holds its loss, and the other single numbers in it.

    The loss is the number that depends on every parameter that any part of the output depends on. If several do, it is the
    one that is computed from the others. A scale, or a penalty of some layers, depends on fewer parameters.
    """
    graphs = {path: _graph_of(tensor) for path, tensor in float_tensors(output) if tensor.requires_grad}
    numbers = {path: tensor.grad_fn for path, tensor in float_tensors(output) if path in graphs and not tensor.ndim}
    every = {node for nodes in graphs.values() for node in nodes if hasattr(node, "variable")} if numbers else set()
    whole = [path for path in numbers if graphs[path] >= every]
    last = [path for path in whole if all(numbers[other] in graphs[path] for other in whole)]
    loss = last[0] if len(last) == 1 else None
    return loss, [path for path in numbers if path != loss]


def _graph_of(tensor: Tensor) -> set[Any]:
    """Returns all of autograd's nodes that a tensor is computed by, including its own and those of the parameters."""
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        if (node := waiting.pop()) is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen


def weighted_logits(output: Any) -> list[tuple[float, str, Tensor]]:
    """Returns the parts of the output that enter the loss, each with its weight.

    If the output names its main part (`logits`, `out`), only that and the auxiliary heads count: the rest is hidden states
    and the like. Otherwise every floating tensor counts, so that every parameter gets a gradient.
    """
    floating = float_tensors(output)
    names = [name for name, _ in floating]
    main = next((name for name in ("logits", "out") if name in names), None)
    if main is None:
        return [(1.0, name, tensor) for name, tensor in floating if tensor.ndim > 0]
    weights = {main: 1.0, **AUXILIARY_WEIGHTS}
    return [(weights[name], name, tensor) for name, tensor in floating if name in weights]


def main_logits(output: Any) -> Tensor | None:
    """Returns the part of the output that answers, or None if there is none."""
    return max(weighted_logits(output), key=itemgetter(0), default=(0.0, "", None))[2]


def class_axis(logits: Tensor) -> int:
    return 2 if logits.ndim == 3 else 1


def _has_classes(logits: Tensor) -> bool:
    """Returns False for one output per item or a single class, because cross-entropy then has nothing to choose from."""
    return logits.ndim >= 2 and logits.shape[class_axis(logits)] > 1


def _of_positions(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets)


def _half_format(output: Any) -> torch.dtype | None:
    """Returns the half precision of an output. Returns None if it has none, or if autocast chooses the number format of the loss."""
    floating = float_tensors(output)
    if not floating or torch.is_autocast_enabled(floating[0][1].device.type):
        return None
    dtype = floating[0][1].dtype
    return dtype if dtype in HALF else None


def _has_gradient(output: Any) -> bool:
    return any(tensor.requires_grad for _, tensor in named_tensors(output))


def _is_fake(output: Any) -> bool:
    return any(isinstance(tensor, FakeTensor) for _, tensor in named_tensors(output))


def _kind_of(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of {str(output.dtype).removeprefix('torch.')}"
    if numbers := [name for name, _ in float_tensors(output)]:
        return f"nothing but single numbers ({', '.join(numbers)}), none of which is known to be the loss"
    return "nothing" if output is None else f"{type(output).__name__} without a floating tensor"


# The functions below handle losses and targets of any form.


def _arguments(loss: Callable[..., Any]) -> tuple[float, float]:
    """Returns how many positional arguments a loss must be given, and how many it may be given. The first is at least one
    if that cannot be read."""
    # The signature of a module is that of its call, which takes anything, so we read that of `forward`.
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function that is built in may have no signature
        return 1, math.inf
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    takes_any = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    return sum(one.default is one.empty for one in positional), math.inf if takes_any else len(positional)


def _accepts(loss: Callable[..., Any], output: Any, targets: Tensor) -> bool:
    with warnings.catch_warnings():
        # Losses of values only warn when they are given classes, so the warning is raised as an error.
        warnings.filterwarnings("error", message="Using a target size")
        try:
            loss(output, targets)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False
    return True


def _name_of(loss: Callable[..., Any]) -> str:
    name: str = getattr(loss, "__name__", "") or type(loss).__name__
    return "a lambda" if name == "<lambda>" else name


def kind_of_targets(targets: Any) -> TargetKind:
    """Returns what the values of a first batch look like. It is not known yet whether there is a value for each output."""
    if not isinstance(targets, Tensor):
        return "values"
    values = targets.float()
    if values.ndim == 2 and values.shape[1] > 1 and (values >= 0).all() and ((values.sum(1) - 1).abs() < 1e-3).all():
        return "shares"
    zeros, ones = (values == 0).sum(), (values == 1).sum()
    # Labels are zeros and ones, but a first batch may have only one of the two.
    is_mixed = bool(zeros and ones) or not targets.is_floating_point()
    return "labels" if is_mixed and int(zeros + ones) == values.numel() else "values"


def fit(targets: Tensor, logits: Tensor) -> Tensor:
    """Returns targets in the shape of the output if they have a value for each of its numbers. Otherwise returns classes as
    torch wants them."""
    if targets.numel() == logits.numel():
        return targets.reshape(logits.shape)
    axis = class_axis(logits)
    if targets.ndim == logits.ndim > 1 and targets.shape[axis] == 1:
        targets = targets.squeeze(axis)
    return targets if targets.is_floating_point() else targets.long()
