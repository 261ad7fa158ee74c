"""Where batches come from and how they reach the device: DataLoader, `Tensor.to`, `Tensor.cuda`, `Tensor.copy_`."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import dataloader as loaders

from .clock import BACKWARD, COPY, DATA, FORWARD
from .facts import batch_samples
from .listener import Listener, is_compiling, is_traced


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
            began = time.perf_counter()
            clock.data_thread = get_ident()
            self._enter(clock, DATA)
            try:
                iterator = original(loader)
            finally:
                self._leave(clock)
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
            try:
                clock.enter(DATA)
            except Exception as error:
                self.failed(error)
            try:
                batch = original(iterator)
            except StopIteration:
                self._try(clock.leave_exhausted)
                raise
            except BaseException:
                self._leave(clock)
                raise
            try:
                clock.leave()
                clock.saw_batch(batch_samples(batch, iterator))
                self._has_loader = True
                if self._fresh is not None and self._fresh[0] == id(iterator):
                    self._saw_first_batch(*self._fresh)
            except Exception as error:
                self.failed(error)
            return batch

        return wrapper

    def _saw_first_batch(self, iterator: int, loader: int, began: float) -> None:
        self._fresh = None
        if self.facts is not None:
            self.facts.saw_first_batch(loader, time.perf_counter() - began)

    def _copy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or tensor.is_cuda or not torch.cuda.is_initialized():
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
        clock = self.heard()
        if clock is None or clock.phase in (FORWARD, BACKWARD, COPY):
            return original(*args, **kwargs)
        self._enter(clock, COPY)
        try:
            moved = original(*args, **kwargs)
        finally:
            self._leave(clock)
        if self.facts is not None and self.facts.asks_about_copies(clock.steps):
            self._try(self.facts.saw_copy, source, moved, args, kwargs)
        return moved
