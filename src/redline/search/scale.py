"""This module measures one number of ranks after the other: each is timed, then profiled and probed for what the ranks send each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from redline.analyze.scale import Communication, ScaleRun
from redline.launch.door import Door, Session
from redline.model.errors import TraceError
from redline.model.protocol import AllReduce, AllReduced, Profile, TraceReply
from redline.model.record import Prepared
from redline.model.spec import RunSpec
from redline.search.group import Group
from redline.search.observer import Journal, Observer
from redline.search.run import UntilPrecise
from redline.trace.decode import read_trace
from redline.trace.host import HostView
from redline.trace.replay import device_runs
from redline.trace.timeline import DeviceTime, host_time
from redline.trace.window import recorded

PROFILED_STEPS = 3
"""Communication is taken from a profile of this many steps, which is made after the timing."""
SMALLEST_MESSAGE = 1 << 20
"""The link is probed with at least this many bytes, because inference has no gradients to send that would say how many."""


def measure_scale(
    specs: Sequence[RunSpec], door_of: Callable[[RunSpec], Door], journal: Journal, folder: Path, observer: Observer
) -> list[ScaleRun]:
    """Measures one run per spec, in their order. What breaks becomes a failed record, and the next run goes on."""
    runs = []
    for number, spec in enumerate(specs):
        told = Communication()
        with Group(door_of(spec), journal, observer, random.Random(spec.seed), is_shared=False) as group:
            entry = group.open(spec, 0)
            group.measure(UntilPrecise())
            if entry is not None and entry.is_sound and entry.record.prepared is not None and spec.ranks > 1:
                told = _communication(spec, entry.session, entry.record.prepared, folder / str(number))
        runs.append(ScaleRun(record=group.done[0], communication=told))
    return runs


def _communication(spec: RunSpec, session: Session, prepared: Prepared, folder: Path) -> Communication:
    """Measures communication outside of the timing. A rank that breaks here leaves the timed record as it is."""
    probe = session.ask(AllReduce(message_bytes=max(prepared.gradient_bytes or 0, SMALLEST_MESSAGE)))
    told = Communication()
    if isinstance(probe, AllReduced):
        told = Communication(probe_s=median(probe.seconds), probe_bytes=probe.message_bytes)
    if spec.workload.task != "train":
        return told
    reply = session.ask(Profile(path=str(folder / "trace.json.gz"), active=PROFILED_STEPS))
    if not isinstance(reply, TraceReply):
        return told
    try:
        times = [time for path in (reply.trace.path, *reply.trace.others) for time in _times(Path(path))]
    except TraceError:
        return told
    if not times:
        return told
    # The last rank to arrive at a collective waits for nobody, so that its time there is communication and nothing else.
    last = min(times, key=lambda time: time.exposed_communication)
    most = max(time.exposed_communication for time in times)
    step_ns = 1e9 * PROFILED_STEPS
    return msgspec.structs.replace(
        told,
        total_s=last.communication / step_ns,
        exposed_s=last.exposed_communication / step_ns,
        waited_s=(most - last.exposed_communication) / step_ns,
        span_s=max(time.span for time in times) / step_ns,
    )


def _times(path: Path) -> list[DeviceTime]:
    """Returns the time that each device took in one rank's trace; it is that of the host if the host is the device."""
    one = recorded(read_trace(path))
    runs = device_runs(one, HostView(one.links))
    return [run.time for run in runs] or [host_time(one.trace, one.steps)]
