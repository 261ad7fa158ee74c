"""The inline door opens the bench in this process. Nothing is isolated, and the verdict says so.

It is for live objects that cannot travel, for debugging, and for a caller that is a worker itself.
"""

from __future__ import annotations

from typing import Any

from redline.launch.door import Session
from redline.model.protocol import Close, ClosedReply, OnProgress, Progress, Reply, Request
from redline.model.record import Closed
from redline.model.spec import RunSpec


class InlineSession(Session):
    def __init__(self, handed_over: dict[str, Any]) -> None:
        from redline.bench.session import BenchSession

        self._on_progress: OnProgress | None = None
        self._begun: Request | None = None
        self._bench = BenchSession(on_progress=self._progress, isolated=False, handed_over=handed_over)

    def begin(self, request: Request) -> None:
        """In one process nothing runs beside the caller, so the work is done in `wait`."""
        self._begun = request

    def wait(self, on_progress: OnProgress | None = None, timeout_s: float | None = None) -> Reply:
        assert self._begun is not None
        self._on_progress = on_progress
        return self._bench.handle(self._begun)

    def pause(self) -> None:
        """Does nothing, because nothing runs between two questions."""

    def resume(self) -> None:
        """Does nothing, because nothing was paused."""

    def close(self) -> Closed:
        reply = self.ask(Close())
        return reply.closed if isinstance(reply, ClosedReply) else Closed()

    def kill(self) -> None:
        self.close()

    def _progress(self, progress: Progress) -> None:
        if self._on_progress:
            self._on_progress(progress)


class InlineDoor:
    def __init__(self, handed_over: dict[str, Any] | None = None) -> None:
        self._handed_over = handed_over or {}

    def open(self, spec: RunSpec | None = None) -> InlineSession:
        return InlineSession(self._handed_over)

    def close(self) -> None:
        """Sessions close themselves."""
