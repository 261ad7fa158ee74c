"""Why a device was idle: each gap between two pieces of work has one cause."""

from __future__ import annotations

from dataclasses import dataclass

from redline.spec import Spec
from redline.trace.columns import UNKNOWN, DeviceWork, Ints, seconds
from redline.trace.intervals import Intervals, gaps, overlap, union

LAUNCH_GAP_NS = 10_000
"""From one kernel to the next that was already waiting: 1–2 µs on NVIDIA, up to 10 µs on AMD. Longer has a cause."""


class Idle(Spec):
    """The device's idle time by cause."""

    host_wait_s: float
    """The next work was launched only after the device had run dry: Python, or the loader, was late."""
    launch_gap_s: float
    """The next work was launched in time and the gap is short: the price of one kernel after another."""
    other_s: float
    """Launched in time, yet the gap is long: a dependency between streams, a synchronisation, another process."""
    data_wait_s: float = 0.0
    """Part of the host's waiting that it spent inside a data loader."""


@dataclass(frozen=True)
class IdleTime:
    """The same in nanoseconds, for one device."""

    host_wait: int
    launch_gap: int
    other: int
    data_wait: int


def idle_time(work: DeviceWork, launched_at: Ints, loading: Intervals) -> IdleTime:
    """`loading`: when the host sat in a data loader."""
    idle = gaps(union(work.start, work.end))
    length = idle.end - idle.start
    launched = launched_at[idle.first]
    late = (launched != UNKNOWN) & (launched > idle.start)
    short = ~late & (length <= LAUNCH_GAP_NS)
    waiting = Intervals(idle.start[late], idle.end[late], idle.first[late])
    return IdleTime(
        host_wait=int(length[late].sum()),
        launch_gap=int(length[short].sum()),
        other=int(length[~late & ~short].sum()),
        data_wait=overlap(waiting, loading) if len(loading) and len(waiting) else 0,
    )


def idle_of(times: list[IdleTime]) -> Idle:
    return Idle(
        host_wait_s=seconds(sum(time.host_wait for time in times)),
        launch_gap_s=seconds(sum(time.launch_gap for time in times)),
        other_s=seconds(sum(time.other for time in times)),
        data_wait_s=seconds(sum(time.data_wait for time in times)),
    )
