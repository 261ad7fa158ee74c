"""What viewers of `redline serve` are sent: how far running sweeps, searches, trainings and watches are.

All of it is read from the history, where the measuring processes write it down; nothing here asks a device.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from redline.analyze.gate import middle_s
from redline.api.tune import kept_searches
from redline.errors import RedlineError
from redline.record import TelemetrySample
from redline.report.live import LiveRecord, LiveSearch, LiveState, LiveSweep, LiveWatch, Readings
from redline.spec import BASELINE
from redline.store import Activity, History, Row

LOOK_EVERY_S = 1.0
MOST_WAITING = 4
"""States that a slow viewer may be behind; older ones are dropped."""
RUNNING = 8
RECENT_S = 600.0
"""A sweep that has settled a cell since then is shown."""
FORGOTTEN_S = 7 * 86400.0
"""So long a sweep that was cut short waits for somebody to go on with it."""


class Live:
    """Looks at the history once for all viewers, while there are any."""

    def __init__(self, look: Callable[[], LiveState]) -> None:
        self._look = look
        self._viewers: set[asyncio.Queue[bytes]] = set()
        self._last: bytes | None = None
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def viewing(self) -> AsyncIterator[asyncio.Queue[bytes]]:
        queue: asyncio.Queue[bytes] = asyncio.Queue(MOST_WAITING)
        self._viewers.add(queue)
        if self._last is not None:
            queue.put_nowait(self._last)
        if self._task is None:
            self._task = asyncio.create_task(self._watch())
        try:
            yield queue
        finally:
            self._viewers.discard(queue)
            if not self._viewers and self._task is not None:
                self._task.cancel()
                self._task, self._last = None, None

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    async def _watch(self) -> None:
        while True:
            try:
                state = msgspec.json.encode(await asyncio.to_thread(self._look))
            except RedlineError:
                state = self._last or b"{}"  # the history is away for a moment: the next look may find it
            if state != self._last:
                self._last = state
                for queue in self._viewers:
                    if queue.full():
                        queue.get_nowait()
                    queue.put_nowait(state)
            await asyncio.sleep(LOOK_EVERY_S)


def live_state(kept: History) -> LiveState:
    """What is being measured now, by what has been written down."""
    rows = kept.rows(limit=1)
    running = kept.rows(status="running", limit=RUNNING)
    alive = [row for row in running if row.status == "running"]
    return LiveState(
        records=tuple(_live_record(row, kept) for row in alive),
        tunes=tuple(_live_searches(kept)),
        sweeps=tuple(_live_sweeps(kept)),
        watches=tuple(_live_watch(each) for each in kept.activities() if each.kind == "watch" and not each.is_over),
        stored=kept.count(),
        latest=rows[0].id if rows else None,
    )


def _live_sweeps(kept: History) -> list[LiveSweep]:
    """Those that go on, those that were cut short, and those that have settled a cell not long ago."""
    said = {
        each.name: each
        for each in kept.activities()
        if each.kind == "sweep" and not (each.is_over and time.time() - each.begun_at > FORGOTTEN_S)
    }
    settled = {name: (number, failed) for name, number, failed in kept.recent_sweeps(time.time() - RECENT_S)}
    found = []
    for name in sorted(said.keys() | settled.keys()):
        activity = said.get(name)
        number, failed = settled.get(name, (activity.done if activity else 0, 0))
        fastest = kept.fastest_cell(name)
        found.append(
            LiveSweep(
                name=name,
                settled=number,
                failed=failed,
                total=activity.total if activity else None,
                state="done" if activity is None else "cut short" if activity.is_over else "running",
                now=activity.now if activity else "",
                left_s=_left_s(activity) if activity and not activity.is_over else None,
                leader=fastest[0] if fastest else None,
                per_s=fastest[1] if fastest else None,
                readings=_readings(activity.telemetry if activity and not activity.is_over else None),
            )
        )
    return found


def _left_s(activity: Activity) -> float | None:
    """At the pace of what this process has done so far; None before there is any."""
    here = activity.done - activity.done_before
    if here <= 0 or activity.total is None:
        return None
    return (time.time() - activity.begun_at) / here * (activity.total - activity.done)


def _live_watch(activity: Activity) -> LiveWatch:
    return LiveWatch(
        name=activity.name,
        since=activity.begun_at,
        steps=activity.done,
        now=activity.now,
        readings=_readings(activity.telemetry),
    )


def _readings(sample: TelemetrySample | None) -> Readings:
    if sample is None:
        return Readings()
    return Readings(
        power_w=sample.power_w,
        temperature_c=sample.temperature_c,
        utilisation=sample.utilisation,
        memory_used_bytes=sample.memory_used_bytes,
    )


def _live_record(row: Row, kept: History) -> LiveRecord:
    record = kept.load(row.id)
    last = record.blocks[-1].telemetry[-1] if record.blocks and record.blocks[-1].telemetry else None
    epochs = record.epochs
    done, total = (epochs[-1].number if epochs else 0, record.spec.train.epochs) if record.spec.train else (0, None)
    spent_s = time.time() - row.created_at
    return LiveRecord(
        id=row.id,
        model=row.model,
        task=row.task,
        recipe=row.recipe,
        batch=row.batch,
        device=row.device_name or row.device,
        since=row.created_at,
        blocks=len(record.blocks),
        step_s=middle_s([record]),
        epochs=done,
        total_epochs=total,
        left_s=spent_s / done * (total - done) if done and total else None,
        readings=_readings(last),
    )


def _live_searches(kept: History) -> list[LiveSearch]:
    names = {row.name for row in kept.tunes().rows() if row.state == "running"}
    found = []
    for search in kept_searches(kept) if names else ():
        if search.name in names:
            leader, ratio = _leader({trial.record_id: trial.recipe for trial in search.trials}, kept)
            found.append(
                LiveSearch(
                    name=search.name,
                    model=search.tune.spec.workload.model,
                    trials=len(search.trials),
                    leader=leader,
                    ratio=ratio,
                    left_s=max(search.budget_s - max(time.time() - search.created_at, 0.0), 0.0),
                )
            )
    return found


def _leader(recipes: dict[str, str], kept: History) -> tuple[str | None, float | None]:
    """The fastest recipe so far that computes the same, and its speed over the baseline's."""
    sound = {
        each: step_s
        for each, record in kept.load_many(recipes).items()
        if record.prepared and not record.prepared.numerics.is_wrong and (step_s := middle_s([record])) is not None
    }
    best = min(sound, key=lambda each: sound[each], default=None)
    first = next((sound[each] for each, recipe in recipes.items() if recipe == BASELINE and each in sound), None)
    if best is None:
        return None, None
    return recipes[best], None if first is None else first / sound[best]
