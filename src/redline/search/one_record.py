"""The record that `load` and `train` fill: what one session answers, in place of a group's timed blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from redline.launch.door import Door, Session
from redline.model.identity import record_key
from redline.model.protocol import Prepare, PreparedReply, Reply, Request
from redline.model.record import RunRecord, StopReason, new_id
from redline.model.spec import RunSpec
from redline.search.group import failure_of
from redline.search.observer import Journal, Observer


class OneRecord:
    """A record on its way that one session fills with something else than timed blocks: epochs, a load.

    What breaks becomes its failure, and whatever was kept until then stays.
    """

    def __init__(self, spec: RunSpec, journal: Journal, observer: Observer, going_on: RunRecord | None = None) -> None:
        """`going_on`: a record that was cut off, which is continued."""
        fresh = RunRecord(id=new_id(), spec=spec, created_at=time.time())
        self.record = msgspec.structs.replace(going_on, failure=None, stopped=None) if going_on else fresh
        self.journal, self.observer = journal, observer
        self.stopped: StopReason | None = None
        observer.opened(self.record)

    def fill(self, door: Door, ask: Callable[[Session], None]) -> RunRecord:
        """Open a session, let `ask` fill the record, and close both."""
        session = door.open(self.record.spec)
        try:
            ask(session)
        except BaseException:
            session.kill()  # it may be in the middle of a long epoch
            raise
        finally:
            self.finish(session)
        return self.record

    def prepare(self, session: Session, **how: Any) -> PreparedReply | None:
        """Prepare the session; None where that failed. `how`: fields of the request beside the spec."""
        reply = self.ask(session, Prepare(spec=self.record.spec, **how))
        if not isinstance(reply, PreparedReply):
            self.fail(reply)
            return None
        self.change(prepared=reply.prepared, key=record_key(self.record.spec, reply.prepared))
        self.journal.begin(self.record)
        return reply

    def ask(self, session: Session, request: Request) -> Reply:
        return session.ask(request, lambda progress: self.observer.progress(self.record, progress))

    def fail(self, reply: Reply) -> None:
        self.change(failure=failure_of(reply))
        self.stopped = "failed"

    def change(self, **fields: object) -> None:
        self.record = msgspec.structs.replace(self.record, **fields)

    def finish(self, session: Session) -> None:
        self.change(closed=session.close(), stopped=self.stopped or "interrupted")
        self.journal.finish(self.record)
        self.observer.closed(self.record)
