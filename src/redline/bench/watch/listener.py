"""What every part of the watch shares: the clock, the facts, and how a function is wrapped and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from .clock import Clock
from .facts import Facts
from .models import Models

is_compiling = torch.compiler.is_compiling
is_traced = torch.compiler.is_dynamo_compiling
"""While the compiler follows the script's code, every wrapper is the function it wraps."""


class Listener:
    """If one of our own lines fails, watching ends, the reason is written down, and the script goes on."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._has_loader = False
        self._models: Models
        self.clock: Clock | None = None
        self.facts: Facts | None = None

    def heard(self) -> Clock | None:
        """The clock, where this call counts."""
        clock = self.clock
        if is_traced() or clock is None or (clock.thread != get_ident() and not clock.hears()):
            return None
        return clock

    def failed(self, error: BaseException) -> None:
        """Our mistake, not the script's: write it down and stop listening."""
        clock, self.clock = self.clock, None
        if clock is not None:
            try:
                clock.spool.fact("broken", error=repr(error))
            except OSError:
                return  # a full disk, which the script will notice by itself

    def _wrap(self, owner: Any, name: str, around: Callable[[Any], Callable[..., Any]]) -> None:
        """Replace a function by what `around` makes of it."""
        original = getattr(owner, name)
        own = vars(owner).get(name)
        setattr(owner, name, functools.wraps(original)(around(original)))
        self._undo.append(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def _try(self, call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            self.failed(error)

    def _work_through(self, clock: Clock) -> None:
        try:
            clock.work_through()
        except Exception as error:
            self.failed(error)
