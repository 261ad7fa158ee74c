"""This module brings batches of a loader to the device, the next one while this one computes."""

from __future__ import annotations

import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data._utils import signal_handling

from redline.bench.data.batches import augmented
from redline.bench.data.source import ImageData
from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory, loader_trouble, one_line
from redline.bench.workload.inputs import Inputs
from redline.model.errors import BenchError

TARGETS = ("labels", "label", "targets", "target", "y")
EXPECTED = "each batch must be (inputs, targets), or a dict with " + " or ".join(TARGETS)
LONGEST_ALARM_S, SHORTEST_TICK_S = 1e6, 0.05
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
T = TypeVar("T")
Started = tuple[Arrived, Any]
"""A batch that is being copied, with the event that says when it has arrived."""


class ImageArrival:
    """Copies a batch of 8-bit images to the device and does the rest there: a quarter of the bytes, and no host time.

    Where the whole set lies on the device, a batch is that set and its rows.
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
    """Copies what the user's loader gives, whatever it is made of."""

    def __init__(self, device: Device, form: Callable[[Any], Inputs], takes: Collection[str] | None) -> None:
        self._device, self._form, self._takes = device.torch_device, form, takes

    def __call__(self, batch: Any) -> Arrived:
        parted = part_batch(batch, self._takes)
        args, kwargs = self._form(mapped(parted.inputs, Tensor, self._moved))
        return Arrived(args, kwargs, mapped(parted.targets, Tensor, self._moved), parted.count)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Returns the same structure with `change` in place of its leaves of this kind. A lone leaf costs no walk."""
    return change(value) if isinstance(value, kind) else pytree.tree_map_only(kind, change, value)


def with_targets(arrived: Arrived, name: str) -> Arrived:
    """Returns the batch for a model that is given its targets too, under the name its `forward` has for them."""
    return replace(arrived, kwargs={**arrived.kwargs, name: arrived.targets})


@dataclass(frozen=True)
class Parted:
    inputs: Any
    targets: Any
    count: int


def part_batch(batch: Any, takes: Collection[str] | None = None) -> Parted:
    """Splits a batch of the user's loader into inputs and targets. It is a pair, or a dict with one of `TARGETS`.

    `takes`: the names that the model's `forward` takes; None where they are not known or it takes any. Of a dict the
    model gets what it takes, the targets too where it asks for them.
    """
    if isinstance(batch, Mapping):
        inputs, targets = _from_dict(batch, takes)
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = batch
    else:
        many = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        several = "; several inputs go together, as ((a, b), targets)" if many else ""
        raise BenchError("user", f"the loader gave {type(batch).__name__}{many}; {EXPECTED}{several}")
    inputs = _tensors(inputs)
    targets = torch.tensor(targets) if _are_numbers(targets) else _tensors(targets)
    leaves = [targets] if isinstance(targets, Tensor) else pytree.tree_leaves(targets)
    sized = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    if not sized:
        raise BenchError("user", f"the loader gave targets without a tensor; {EXPECTED}")
    if not isinstance(targets, list | tuple) or not all(isinstance(target, Mapping) for target in targets):
        return Parted(inputs, targets, len(sized[0]))
    # One dict for each sample, as detectors are given them: then there is one input for each sample too, in one list.
    is_listed = isinstance(inputs, list | tuple) and len(inputs) == len(targets)
    return Parted((list(inputs),) if is_listed else inputs, list(targets), len(targets))


def _from_dict(batch: Mapping[Any, Any], takes: Collection[str] | None) -> tuple[Any, Any]:
    name = next((name for name in TARGETS if name in batch), None)
    if name is None:
        raise BenchError(
            "user", f"the loader gave a dict of {', '.join(map(str, batch))}, none of which is {' or '.join(TARGETS)}"
        )
    rest = {key: value for key, value in batch.items() if key != name}
    taken = rest if takes is None else {key: value for key, value in rest.items() if key in takes}
    if takes is not None and name in takes:
        taken = {**taken, name: batch[name]}
    if not taken.keys() - {name}:
        # Whatever the model calls it: the one thing there is, or the only one with more than a number per sample.
        sized = [value for value in rest.values() if len(rest) == 1 or getattr(value, "ndim", 0) > 1]
        if len(sized) != 1:
            text = ", ".join(map(str, batch))
            raise BenchError("user", f"the loader gave a dict of {text}; the model takes {', '.join(takes or ())}")
        return sized[0], batch[name]
    return taken, batch[name]


def _tensors(parts: Any) -> Any:
    return parts if isinstance(parts, Tensor) else mapped(parts, np.ndarray, torch.from_numpy)


def _are_numbers(targets: Any) -> bool:
    return (
        isinstance(targets, list | tuple)
        and bool(targets)
        and all(isinstance(target, int | float) for target in targets)
    )


class LoaderWatch:
    """Notices loader workers that die and loaders that hang, and raises only while a batch is waited for.

    torch's own handler of SIGCHLD raises wherever the main thread happens to be: in the middle of a step, or while the
    failure is being told. Only the main thread can be interrupted, by signals, so that a batch that comes costs nothing.
    """

    def __init__(self) -> None:
        self._found: RuntimeError | None = None
        self._since: float | None = None
        """The main thread has waited for a batch since then."""
        self._timeout_s = math.inf
        self._before: Any = None
        self._was_set = False

    def begin(self) -> None:
        """Watch the workers from now on."""
        self._found = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGCHLD, self._look)
            self._was_set = signal_handling._SIGCHLD_handler_set
            signal_handling._SIGCHLD_handler_set = True  # else torch would put its own in place

    def end(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGCHLD, self._before)
            signal_handling._SIGCHLD_handler_set = self._was_set
            self._before = self._found = None

    @contextmanager
    def limited(self, timeout_s: float) -> Iterator[None]:
        """Let no wait take longer while the context is held. A look now and then costs a batch nothing, as a timer for each would."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL or timeout_s > LONGEST_ALARM_S:
            yield
            return
        self._timeout_s, tick_s = timeout_s, max(timeout_s / 4, SHORTEST_TICK_S)
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, tick_s, tick_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def wait(self, get: Callable[[], T]) -> T:
        """Returns what `get` does, which waits for a loader. What broke in the loader is said plainly."""
        self._since = time.monotonic()
        try:
            if self._found is not None:
                raise self._found
            return get()
        except Exception as error:
            if (explained := loader_error(error)) is None:
                raise
            raise explained from error
        finally:
            self._since = None

    def trouble(self, wait_s: float = 0.0) -> RuntimeError | None:
        """Returns what torch says of a worker that is dead, or None while all live. It waits for `wait_s` if one may be dying."""
        until = time.monotonic() + wait_s
        while self._found is None:
            try:
                torch._C._error_if_any_worker_fails()
            except RuntimeError as error:  # it says it but once
                self._found = error
            if time.monotonic() >= until:
                break
            time.sleep(0.02)
        return self._found

    def _look(self, number: int, frame: Any) -> None:
        trouble = self.trouble()
        if self._since is None:
            return
        if trouble is not None:
            raise trouble
        # A loader with workers says it better, and at the same time: hence a second more.
        if time.monotonic() - self._since > self._timeout_s + 1:
            raise BenchError("timeout", hung(self._timeout_s))


WATCH = LoaderWatch()
"""There is but one handler of a signal."""


class Feed:
    """Brings the batches of one epoch to the device. With `prefetch` a batch is copied while the device computes the step before.

    `threaded`: load in a thread, up to `AHEAD` batches; not for loaders that draw from the global random state, which a thread
    would draw from at moments that nobody knows. These load while the device computes, as the host does not wait for it.
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
        self._queue: queue.Queue[Started | BaseException | None] | None = None
        self._stop, self._limit = threading.Event(), WATCH.limited(timeout_s)
        if prefetch and threaded:
            self._queue = queue.Queue(maxsize=AHEAD)
            self._thread = threading.Thread(target=self._load, name="redline-prefetch", daemon=True)
            self._thread.start()

    def __enter__(self) -> Feed:
        self._limit.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread; one that hangs in the loader is left to the end of the process."""
        self._limit.__exit__(None, None, None)
        self._stop.set()
        if self._queue is not None:
            while not self._queue.empty():
                self._queue.get_nowait()
            self._thread.join(timeout=1.0)

    def next(self) -> Arrived | None:
        """Returns the next batch, or None after the last."""
        return WATCH.wait(self._next)

    def _next(self) -> Arrived | None:
        if self._lane is None:
            batch = next_of(self._batches)
            return None if batch is None else self._arrive(batch)
        started = self._started() if self._queue is None else self._from_thread(self._queue)
        if started is None:
            return None
        arrived, done = started
        if done is not None:
            self._lane.join(arrived.tensors(), done)
        return arrived

    def _started(self) -> Started | None:
        assert self._lane is not None
        batch = next_of(self._batches)
        return None if batch is None else self._lane.run(lambda: self._arrive(batch))

    def _from_thread(self, made: queue.Queue[Started | BaseException | None]) -> Started | None:
        try:
            started = made.get(timeout=self._timeout_s)
        except queue.Empty:
            raise BenchError("timeout", hung(self._timeout_s)) from None
        if isinstance(started, BaseException):
            raise started
        return started

    def _load(self) -> None:
        try:
            while not self._stop.is_set():
                started = self._started()
                self._put(started)
                if started is None:
                    return
        except BaseException as error:  # told where the batch is asked for
            self._put(error)

    def _put(self, made: Started | BaseException | None) -> None:
        assert self._queue is not None
        while not self._stop.is_set():
            try:
                self._queue.put(made, timeout=0.1)
                return
            except queue.Full:
                continue


def hung(timeout_s: float) -> str:
    return (
        f"the loader gave no batch for {timeout_s:g} s: a worker of it hangs, or it needs more time (--loader-timeout)"
    )


def loader_error(error: Exception) -> BenchError | None:
    """Returns what broke in a loader, or None if something else did."""
    if isinstance(error, BenchError):
        return None
    # Reading what a dead worker has sent breaks in many ways: that it is dead is what matters.
    is_cut_off = isinstance(error, ConnectionError | EOFError)
    trouble = loader_trouble(WATCH.trouble(wait_s=1.0 if is_cut_off else 0.0) or error)
    return None if trouble is None else BenchError(*trouble)


@contextmanager
def loader_errors() -> Iterator[None]:
    """Say plainly what broke in a loader that is used within the context."""
    try:
        yield
    except Exception as error:
        if (explained := loader_error(error)) is None:
            raise
        raise explained from error


def next_of(batches: Iterator[Any]) -> Any:
    """Returns the next batch, or None after the last."""
    try:
        return next(batches, None)
    except Exception as error:
        if loader_trouble(error) is not None or is_out_of_memory(error) or isinstance(error, BenchError):
            raise
        raise (loader_error(error) or BenchError("user", f"the loader raised {one_line(error)}")) from error
