"""Where batches come from and how they reach the device: DataLoader, `Tensor.to`, `Tensor.cuda`, `Tensor.copy_`."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import dataloader as loaders

from .clock import ENTER_COPY, ENTER_DATA, EXHAUSTED, GOT_BATCH, LEAVE
from .events import MOST_EVENTS
from .listener import Listener, is_compiling, is_traced
from .samples import batch_samples


class Loading(Listener):
    def __init__(self) -> None:
        super().__init__()
        self._fresh: tuple[int, int, float] | None = None
        """Of an iterator that has not delivered yet: its id, the loader's, and when it was asked for."""

    def _install_loading(self) -> None:
        self._wrap(loaders._BaseDataLoaderIter, "__next__", self._next_batch)
        self._wrap(loaders.DataLoader, "__iter__", self._new_iterator)
        if torch.version.cuda or torch.version.hip:
            self._wrap(torch.Tensor, "to", self._copy)
            self._wrap(torch.Tensor, "cuda", self._copy)

    def _new_iterator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(loader: Any) -> Any:
            clock = self.heard()
            if clock is None:
                return original(loader)
            began = perf_counter()
            clock.data_thread = get_ident()
            clock.put_time(began)
            clock.put(ENTER_DATA)
            self._work_through(clock)
            self._try(clock.begin_pass)
            try:
                iterator = original(loader)
            finally:
                if clock.thread in (None, get_ident()):
                    clock.put_time(perf_counter())
                    clock.put(LEAVE)
                    self._work_through(clock)
            self._fresh = (id(iterator), id(loader), began)
            if self.facts is not None:
                self._try(self.facts.saw_loader, loader)
            return iterator

        return wrapper

    def _next_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(iterator: Any) -> Any:
            clock = self.clock
            if is_traced() or clock is None or (clock.thread != get_ident() and not clock.hears()):
                return original(iterator)
            clock.put_time(perf_counter())
            clock.put(ENTER_DATA)
            if clock.is_direct or len(clock.events) > MOST_EVENTS:
                self._work_through(clock)
            was_inside, clock.is_inside = clock.is_inside, True  # transforms may be modules, and are no models
            try:
                batch = original(iterator)
            except BaseException as error:
                if clock.thread not in (None, get_ident()):
                    raise
                clock.is_inside = was_inside
                clock.put_time(perf_counter())
                clock.put(EXHAUSTED if isinstance(error, StopIteration) else LEAVE)
                self._work_through(clock)
                raise
            if clock.thread not in (None, get_ident()):
                return batch  # meanwhile another thread has begun to train: this one loads ahead for it
            at, clock.is_inside = perf_counter(), was_inside
            try:
                samples = batch_samples(batch, iterator)
                clock.put_time(at)
                clock.put((GOT_BATCH, samples))
                if clock.is_direct:
                    self._has_loader = True
                    clock.work_through()
                if self._fresh is not None and self._fresh[0] == id(iterator):
                    self._saw_first_batch(*self._fresh)
            except Exception as error:
                self.failed(error)
            return batch

        return wrapper

    def _saw_first_batch(self, iterator: int, loader: int, began: float) -> None:
        self._fresh = None
        if self.facts is not None:
            self.facts.saw_first_batch(loader, perf_counter() - began)

    def _copy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or tensor.is_cuda:
                return original(tensor, *args, **kwargs)
            return self._timed_copy(tensor, original, (tensor, *args), kwargs)

        return wrapper

    def _copy_into(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Into the buffers of a recorded graph, which is how its batches reach the device."""

        def wrapper(tensor: torch.Tensor, source: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not tensor.is_cuda or not isinstance(source, torch.Tensor) or source.is_cuda:
                return original(tensor, source, *args, **kwargs)
            return self._timed_copy(source, original, (tensor, source, *args), kwargs)

        return wrapper

    def _timed_copy(self, source: torch.Tensor, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        clock = self.clock
        if clock is None or clock.is_resting or clock.is_inside or (clock.thread != get_ident() and not clock.hears()):
            return original(*args, **kwargs)
        if clock.device is None and not torch.cuda.is_initialized():
            return original(*args, **kwargs)
        clock.put_time(perf_counter())
        clock.put(ENTER_COPY)
        if clock.is_direct:
            self._work_through(clock)
        try:
            moved = original(*args, **kwargs)
        finally:
            clock.put_time(perf_counter())
            clock.put(LEAVE)
            if clock.is_direct or len(clock.events) > MOST_EVENTS:
                self._work_through(clock)
        # Asking the driver takes a few microseconds. Before the first step it is the model that moves.
        if 0 < clock.steps < 64 or (clock.steps and clock.steps % 64 == 0):
            self._try(self._saw_copy, source, moved, args, kwargs)
        return moved

    def _saw_copy(self, source: torch.Tensor, moved: Any, args: Any, kwargs: Any) -> None:
        if self.facts is not None:
            self.facts.saw_copy(source, moved, args, kwargs)
