"""A door opens a session, which answers the messages of `redline.model.protocol`. This module says what both can do."""

from __future__ import annotations

from typing import Protocol

from redline.model.protocol import OnProgress, Reply, Request
from redline.model.record import Closed
from redline.model.spec import RunSpec


class Session(Protocol):
    """A session is a bench to talk to. A failure is a reply, never an exception."""

    def ask(self, request: Request, on_progress: OnProgress | None = None) -> Reply:
        """Sends a request and waits for its reply."""
        self.begin(request)
        reply = self.wait(on_progress)
        assert reply is not None  # without a limit of its own it waits for a reply or a failure
        return reply

    def begin(self, request: Request) -> None:
        """Sends a request without waiting: several sessions can prepare at the same time. `wait` has the reply."""

    def wait(self, on_progress: OnProgress | None = None, timeout_s: float | None = None) -> Reply | None:
        """Returns the reply to what was begun, or None where it has not come after `timeout_s` seconds (with None it waits however long)."""

    def pause(self) -> None:
        """Keeps the bench still while a sibling is measured, also in the middle of a request."""

    def resume(self) -> None: ...

    def close(self) -> Closed: ...

    def kill(self) -> None:
        """Ends it now, whatever it is doing."""


class Door(Protocol):
    """A door opens sessions of one kind."""

    def open(self, spec: RunSpec | None = None) -> Session:
        """Returns a session with a fresh bench. `spec` says what it will be asked, for those doors that must know beforehand."""

    def close(self) -> None: ...
