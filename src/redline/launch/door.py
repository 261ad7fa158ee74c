"""What a door opens: a session that answers the messages of `redline.model.protocol`, and the door itself."""

from __future__ import annotations

from typing import Protocol

from redline.model.protocol import OnProgress, Reply, Request
from redline.model.record import Closed
from redline.model.spec import RunSpec


class Session(Protocol):
    """A bench to talk to. A failure is a reply, never an exception."""

    def ask(self, request: Request, on_progress: OnProgress | None = None) -> Reply:
        """Send a request and wait for its reply."""
        self.begin(request)
        reply = self.wait(on_progress)
        assert reply is not None  # without a limit of its own it waits for a reply or a failure
        return reply

    def begin(self, request: Request) -> None:
        """Send a request without waiting: several sessions can prepare at the same time. `wait` has the reply."""

    def wait(self, on_progress: OnProgress | None = None, timeout_s: float | None = None) -> Reply | None:
        """The reply to what was begun; None where it has not come after `timeout_s` seconds (None: however long)."""

    def pause(self) -> None:
        """Keep the bench still while a sibling is measured, also in the middle of a request."""

    def resume(self) -> None: ...

    def close(self) -> Closed: ...

    def kill(self) -> None:
        """End it now, whatever it is doing."""


class Door(Protocol):
    """Opens sessions of one kind."""

    def open(self, spec: RunSpec | None = None) -> Session:
        """A fresh bench; `spec` says what it will be asked, for those doors that must know beforehand."""

    def close(self) -> None: ...
