"""A few timed blocks without the profiler, then a few steps under it: what it costs is known, and nothing else suffers."""

from __future__ import annotations

import time

import msgspec

from redline.launch.session import Door, Session
from redline.protocol import (
    BlockReply,
    Measure,
    Prepare,
    PreparedReply,
    Profile,
    Progress,
    Reply,
    TraceReply,
)
from redline.record import RunRecord, key_of_record, new_id
from redline.search.interleave import Journal, Observer, failure_of
from redline.spec import MeasureSpec, RunSpec

TIMED_BLOCKS = 3
TIMED_SECONDS = 1.0
"""The ceiling written into the spec: a record of a profile is not taken for one of a run."""


def as_profiled(spec: RunSpec) -> RunSpec:
    """The spec with as much measuring as a profile needs."""
    quick = msgspec.structs.replace(MeasureSpec.for_effort("quick"), max_seconds=TIMED_SECONDS)
    return msgspec.structs.replace(spec, measure=quick)


def capture(
    spec: RunSpec,
    request: Profile,
    door: Door,
    journal: Journal,
    observer: Observer | None = None,
    *,
    record_id: str | None = None,
) -> RunRecord:
    """One record with its trace; what breaks is in its failure."""
    observer = observer or Observer()
    record = RunRecord(id=record_id or new_id(), spec=spec, created_at=time.time())
    observer.opened(record)
    session = door.open(spec)
    closed = None
    try:
        record = _captured(record, request, session, journal, observer)
    finally:
        closed = session.close()
        record = msgspec.structs.replace(record, closed=closed, stopped=record.stopped or "interrupted")
        journal.finish(record)
        observer.closed(record)
    return record


def _captured(record: RunRecord, request: Profile, session: Session, journal: Journal, observer: Observer) -> RunRecord:
    reply = session.ask(
        Prepare(spec=record.spec, modules=request.modules), lambda progress: observer.progress(record, progress)
    )
    if not isinstance(reply, PreparedReply):
        return _failed(record, reply)
    prepared = reply.prepared
    record = msgspec.structs.replace(record, prepared=prepared, key=key_of_record(record.spec, prepared))
    journal.begin(record)
    observer.progress(record, Progress(stage="timing"))
    for number in range(TIMED_BLOCKS):
        reply = session.ask(_block(record.spec, number))
        if not isinstance(reply, BlockReply):
            return _failed(record, reply)
        journal.append(record.id, reply.block)
        record = msgspec.structs.replace(record, blocks=(*record.blocks, reply.block))
    observer.progress(record, Progress(stage="profile"))
    reply = session.ask(request)
    if not isinstance(reply, TraceReply):
        return _failed(record, reply)
    return msgspec.structs.replace(record, trace=reply.trace, stopped="target")


def _block(spec: RunSpec, number: int) -> Measure:
    measure = spec.measure
    return Measure(
        kind="throughput", seconds=measure.block_seconds, settle_seconds=measure.settle_seconds, round=number
    )


def _failed(record: RunRecord, reply: Reply) -> RunRecord:
    return msgspec.structs.replace(record, failure=failure_of(reply), stopped="failed")
