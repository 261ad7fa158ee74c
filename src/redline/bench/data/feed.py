"""This module brings batches of a loader to the device, the next one while this one computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from redline.bench.data.batches import augmented
from redline.bench.data.source import ImageData
from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory, loader_trouble, one_line
from redline.bench.workload.inputs import Inputs
from redline.model.errors import BenchError

TARGETS = ("labels", "label", "targets", "target", "y")
EXPECTED = "each batch must be (inputs, targets), or a dict with " + " or ".join(TARGETS)
AHEAD = 2
"""The prefetching thread keeps this many batches on the device."""


@dataclass(frozen=True)
class Arrived:
    """This is a batch on the device, in the form in which the model takes it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any
    count: int

    def tensors(self) -> list[Tensor]:
        leaves = pytree.tree_leaves((self.args, self.kwargs, self.targets))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


Arrive = Callable[[Any], Arrived]
Started = tuple[Arrived, Any]
"""This is a batch that is being copied, with the event that says when it has arrived."""


class ImageArrival:
    """It copies a batch of 8-bit images to the device and converts it there: that copies a quarter of the bytes and costs no host time.

    If the whole set lies on the device, a batch is that set and its rows.
    """

    def __init__(self, data: ImageData, device: Device, size: int, form: Callable[[Tensor], Inputs]) -> None:
        self._device, self._size, self._form = device.torch_device, size, form
        std = torch.tensor(data.std).view(1, -1, 1, 1)
        self._scale = (1 / (255 * std)).to(self._device)
        self._offset = (-torch.tensor(data.mean).view(1, -1, 1, 1) / std).to(self._device)

    def __call__(self, batch: Any) -> Arrived:
        images, classes, draws = batch
        if isinstance(images, tuple):
            images, classes = (part.index_select(0, classes) for part in images)
        else:
            images, classes, draws = (part.to(self._device, non_blocking=True) for part in batch)
        if draws.numel():
            images = augmented(images, draws)
        pixels = images.float().mul_(self._scale).add_(self._offset)
        if pixels.shape[-1] != self._size:
            pixels = torch.nn.functional.interpolate(pixels, size=(self._size, self._size), mode="bilinear")
        args, kwargs = self._form(pixels)
        return Arrived(args, kwargs, classes, len(images))


class UserArrival:
    """It copies what the user's loader gives, whatever structure that has."""

    def __init__(self, device: Device, form: Callable[[Any], Inputs], takes: Collection[str] | None) -> None:
        self._device, self._form, self._takes = device.torch_device, form, takes

    def __call__(self, batch: Any) -> Arrived:
        parted = part_batch(batch, self._takes)
        args, kwargs = self._form(mapped(parted.inputs, Tensor, self._moved))
        return Arrived(args, kwargs, mapped(parted.targets, Tensor, self._moved), parted.count)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Returns the same structure with `change` applied to its leaves of this kind. A lone leaf is changed without walking a structure."""
    if isinstance(value, Tensor | np.ndarray):
        return change(value) if isinstance(value, kind) else value
    return pytree.tree_map_only(kind, change, value)


@dataclass(frozen=True)
class Parted:
    inputs: Any
    targets: Any
    count: int


def part_batch(batch: Any, takes: Collection[str] | None = None) -> Parted:
    """Splits a batch of the user's loader into inputs and targets. The batch is a pair, or a dict with one of `TARGETS`.

    `takes` holds the names that the model's `forward` takes. It is None if they are not known or if `forward` takes any
    name. The model gets those entries of a dict that it takes, and the targets too if it asks for them.
    """
    if isinstance(batch, Mapping):
        inputs, targets = _from_dict(batch, takes)
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = batch
    else:
        many = (
            f" of {len(batch)}; several inputs go together, as ((a, b), targets)"
            if isinstance(batch, tuple | list)
            else ""
        )
        raise BenchError("user", f"the loader gave {type(batch).__name__}{many}; {EXPECTED}")
    inputs, targets = (mapped(part, np.ndarray, torch.from_numpy) for part in (inputs, targets))
    if isinstance(targets, list | tuple) and targets and all(isinstance(target, int | float) for target in targets):
        targets = torch.tensor(targets)
    sized = [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, Tensor) and leaf.ndim]
    if not sized:
        raise BenchError("user", f"the loader gave targets without a tensor; {EXPECTED}")
    if not isinstance(targets, list | tuple) or not all(isinstance(target, Mapping) for target in targets):
        return Parted(inputs, targets, len(sized[0]))
    # Detectors are given one dict for each sample. Then there is one input for each sample too, in one list.
    is_listed = isinstance(inputs, list | tuple) and len(inputs) == len(targets)
    return Parted((list(inputs),) if is_listed else inputs, list(targets), len(targets))


def _from_dict(batch: Mapping[Any, Any], takes: Collection[str] | None) -> tuple[Any, Any]:
    name, held = next((name for name in TARGETS if name in batch), None), ", ".join(map(str, batch))
    if name is None:
        raise BenchError("user", f"the loader gave a dict of {held}, none of which is {' or '.join(TARGETS)}")
    taken = {key: value for key, value in batch.items() if (key != name if takes is None else key in takes)}
    rest = {key: value for key, value in batch.items() if key != name}
    if taken.keys() & rest:
        return taken, batch[name]
    # The name that the model uses does not matter: the input is the only entry, or the only one with more than a number per sample.
    sized = [value for value in rest.values() if len(rest) == 1 or getattr(value, "ndim", 0) > 1]
    if len(sized) != 1:
        raise BenchError("user", f"the loader gave a dict of {held}; the model takes {', '.join(takes or ())}")
    return sized[0], batch[name]


class Feed:
    """It brings the batches of one epoch to the device. With `prefetch` a batch is copied while the device computes the step before.

    If `threaded` is true, a thread loads up to `AHEAD` batches. That is not possible for loaders that draw from the global
    random state, because a thread would draw from it at unpredictable moments. Such loaders load while the device computes,
    as the host does not wait for it.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        arrive: Arrive,
        device: Device,
        *,
        prefetch: bool,
        threaded: bool,
        timeout_s: float,
    ) -> None:
        self._batches, self._arrive, self._timeout_s = batches, arrive, timeout_s
        self._lane = device.lane() if prefetch else None
        self._made: queue.Queue[Started | BaseException | None] = queue.Queue(maxsize=AHEAD)
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._load, daemon=True)
        self._threaded = prefetch and threaded
        if self._threaded:
            self._thread.start()

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the thread. A thread that hangs in the loader is left to the end of the process."""
        self._stop.set()
        while not self._made.empty():
            self._made.get_nowait()
        if self._threaded:
            self._thread.join(timeout=1.0)

    def next(self) -> Arrived | None:
        """Returns the next batch, or None after the last."""
        started = self._from_thread() if self._threaded else self._started()
        if started is None:
            return None
        arrived, done = started
        if self._lane is not None and done is not None:
            self._lane.join(arrived.tensors(), done)
        return arrived

    def _started(self) -> Started | None:
        batch = next_of(self._batches)
        if batch is None or self._lane is None:
            return None if batch is None else (self._arrive(batch), None)
        return self._lane.run(lambda: self._arrive(batch))

    def _from_thread(self) -> Started | None:
        try:
            started = self._made.get(timeout=self._timeout_s)
        except queue.Empty:
            text = f"the loader gave no batch for {self._timeout_s:g} s: it hangs, or it needs more time (--loader-timeout)"
            raise BenchError("timeout", text) from None
        if isinstance(started, BaseException):
            raise started
        return started

    def _load(self) -> None:
        made: Started | BaseException | None = None
        while not self._stop.is_set():
            try:
                made = self._started()
            except BaseException as error:  # the error is raised where the batch is asked for
                made = error
            self._made.put(made)
            if not isinstance(made, tuple):
                return


@contextmanager
def loader_errors() -> Iterator[None]:
    """States plainly what broke in a loader that is used within the context. torch reports a dead worker wherever the main thread is."""
    try:
        yield
    except Exception as error:
        trouble = None if isinstance(error, BenchError) else loader_trouble(error)
        if trouble is None:
            raise
        raise BenchError(*trouble) from error


def next_of(batches: Iterator[Any]) -> Any:
    """Returns the next batch, or None after the last."""
    try:
        return next(batches, None)
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, BenchError):
            raise
        raise BenchError(*(loader_trouble(error) or ("user", f"the loader raised {one_line(error)}"))) from error
