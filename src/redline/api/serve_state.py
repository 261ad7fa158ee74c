"""What viewers of `redline serve` are sent: how far running sweeps, searches, trainings and watches are.

All of it is read from the history, where the measuring processes write it down; nothing here asks a device.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

from redline.analyze.gate import middle_s
from redline.model.environment import TelemetrySample
from redline.model.errors import RecordError, RedlineError, StoreError
from redline.model.spec import BASELINE
from redline.search.tune.record import decode_tune
from redline.show.serve import LiveRecord, LiveSearch, LiveState, LiveSweep, LiveWatch, Readings
from redline.store import Activity, History, Row

LOOK_EVERY_S = 1.0
CROWD = 50
"""As many viewers are told half as often: each of them costs a little, and the measurement comes first."""
SIGN_OF_LIFE_S = 15.0
SIGN_OF_LIFE = b": still here\n\n"
MOST_WAITING = 4
"""States that a slow viewer may be behind; older ones are dropped."""
RUNNING = 8
RECENT_BLOCKS = 16
"""For a record that is being measured: more are not read, however long it takes."""
MOST_KNOWN = 10_000
"""Records whose step is remembered."""
RECENT_S = 600.0
"""A sweep that has settled a cell since then is shown."""
FORGOTTEN_S = 7 * 86400.0
"""How long a sweep that was cut short is still listed as unfinished."""


class Live:
    """Looks at the history once for all viewers, while there are any; each message is encoded once.

    `on_records` is called when a record has begun or ended, so that tables have changed.
    """

    def __init__(self, look: Callable[[], LiveState], on_records: Callable[[], None] = lambda: None) -> None:
        self._look = look
        self._on_records = on_records
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        self._last: bytes | None = None
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def viewing(self) -> AsyncIterator[asyncio.Queue[bytes | None]]:
        """A queue of server-sent events as bytes; None ends it."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_WAITING)
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

    async def events(self) -> AsyncIterator[bytes]:
        """What happens, as server-sent events for one viewer; now and then a sign of life."""
        async with self.viewing() as queue:
            while (message := await queue.get()) is not None:
                yield message

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    async def _watch(self) -> None:
        told_at, records = time.monotonic(), None
        try:
            while True:
                try:
                    state = await asyncio.to_thread(self._look)
                except RedlineError as error:  # the history is away for a moment: the next look may find it
                    state = LiveState(problem=" ".join(str(error).split()))
                event = b"data: " + msgspec.json.encode(state) + b"\n\n"
                if records != (records := (state.stored, state.latest, len(state.records), bool(state.problem))):
                    self._on_records()
                if event != self._last:
                    self._last, told_at = event, time.monotonic()
                    self._tell(event)
                elif time.monotonic() - told_at > SIGN_OF_LIFE_S:
                    told_at = time.monotonic()
                    self._tell(SIGN_OF_LIFE)
                await asyncio.sleep(LOOK_EVERY_S * (1 + len(self._viewers) / CROWD))
        except Exception:  # nobody would look any more: viewers are sent away, come back, and another look is tried
            logging.getLogger(__name__).exception("cannot look at what is being measured")
            self._task, self._last = None, None
            self._tell(None)

    def _tell(self, event: bytes | None) -> None:
        for queue in self._viewers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)


class Looker:
    """Reads what is being measured now. What is known of records that are over is not read again."""

    def __init__(self) -> None:
        self._steps: dict[str, float | None] = {}

    def look(self, kept: History) -> LiveState:
        rows = kept.rows(limit=1)
        running = [row for row in kept.rows(status="running", limit=RUNNING) if row.status == "running"]
        activities = kept.activities()
        return LiveState(
            records=tuple(record for row in running if (record := _live_record(row, kept)) is not None),
            tunes=tuple(self._searches(kept, {each.name: each for each in activities if each.kind == "tune"})),
            sweeps=tuple(_live_sweeps(kept, [each for each in activities if each.kind == "sweep"])),
            watches=tuple(_live_watch(each) for each in activities if each.kind == "watch" and not each.is_over),
            stored=kept.count(),
            latest=rows[0].id if rows else None,
        )

    def _searches(self, kept: History, activities: dict[str, Activity]) -> Iterator[LiveSearch]:
        ledger = kept.tunes()
        for row in ledger.rows():
            activity = activities.get(row.name)
            goes_on = activity is not None and not activity.is_over
            if row.state != "running" or (not goes_on and time.time() - row.created_at > FORGOTTEN_S):
                continue
            with suppress(RecordError):  # of a newer Redline, or damaged: there is nothing to say about it
                search = decode_tune(ledger.load(row.name) or b"")
                leader, ratio = self._leader({trial.record_id: trial.recipe for trial in search.trials}, kept)
                yield LiveSearch(
                    name=search.name,
                    model=search.tune.spec.workload.model,
                    trials=len(search.trials),
                    state="running" if goes_on else "cut short",
                    leader=leader,
                    ratio=ratio,
                    left_s=round(max(search.budget_s - max(time.time() - search.created_at, 0.0), 0.0)),
                )

    def _leader(self, recipes: dict[str, str], kept: History) -> tuple[str | None, float | None]:
        """The fastest recipe so far that computes the same, and its speed over the baseline's."""
        found = self._steps_of(recipes, kept)
        sound = {each: step_s for each in recipes if (step_s := found.get(each)) is not None}
        best = min(sound, key=lambda each: sound[each], default=None)
        first = next((sound[each] for each, recipe in recipes.items() if recipe == BASELINE and each in sound), None)
        if best is None:
            return None, None
        return recipes[best], None if first is None else first / sound[best]

    def _steps_of(self, ids: Iterable[str], kept: History) -> dict[str, float | None]:
        """The step of each record that computes the same; None for the others."""
        if len(self._steps) > MOST_KNOWN:
            self._steps.clear()
        read = kept.load_many(each for each in ids if each not in self._steps)
        found = {
            each: middle_s([record]) if record.prepared and not record.prepared.numerics.is_wrong else None
            for each, record in read.items()
        }
        self._steps |= {each: found[each] for each, record in read.items() if record.stopped or record.failure}
        return found | {each: self._steps[each] for each in ids if each in self._steps}


def _live_sweeps(kept: History, activities: Sequence[Activity]) -> list[LiveSweep]:
    """Those that go on, those that were cut short, and those that have settled a cell not long ago."""
    said = {each.name: each for each in activities if not (each.is_over and time.time() - each.begun_at > FORGOTTEN_S)}
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
    return round((time.time() - activity.begun_at) / here * (activity.total - activity.done))


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


def _live_record(row: Row, kept: History) -> LiveRecord | None:
    """None for a record that cannot be read, or was deleted just now."""
    try:
        record, blocks = kept.load_recent(row.id, RECENT_BLOCKS)
    except (RecordError, StoreError):
        return None
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
        blocks=blocks,
        step_s=middle_s([record]),
        epochs=done,
        total_epochs=total,
        left_s=round(spent_s / done * (total - done)) if done and total else None,
        readings=_readings(last),
    )
