"""Ledgers say who works on what, what is known of sweeps and of searches, and the ceilings of devices.

A `Hold` is a row of the history that a thread renews, so all who may write to the history see it. A lock of a server's own
would end with the connection it was made on: connections drop and servers are restarted while their clients go on.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import and_, delete, false, or_, select, true, update
from sqlalchemy.dialects import postgresql, sqlite

from redline.model.errors import StoreError, UsageError
from redline.model.identity import device_key_of_ceilings
from redline.model.record import RunRecord, TelemetrySample
from redline.model.work import Ceilings
from redline.store.codec import Activity, ActivityKind, SettledCell, TuneRow, column_text, read_ceilings
from redline.store.schema import ceilings, holders, put, sweep_cells, tunes, write_record
from redline.system.processes import is_gone, this_process

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection

    from redline.store.database import Database

LEASE_S = 30.0
"""How long a hold lasts that its holder does not renew."""
RENEWALS = 6
"""How often a hold is renewed while it lasts: a server that is away for a moment does not end it."""
OBSERVED_EVERY_S = 1.0
_HELD: set[str] = set()
"""Tokens that this process holds; a hold that could not be given back, as its server was away, is none."""
KEYS_AT_ONCE = 500
"""SQLite takes some thousand parameters in one statement."""


class Hold:
    """A hold says that this process works on something, and how far it is. It ends with the process, however that ends."""

    def __init__(self, database: Database, kind: ActivityKind, name: str) -> None:
        self._database = database
        self._activity = Activity(kind=kind, name=column_text(name), begun_at=time.time(), process=this_process())
        self._what = f"{kind} {self._activity.name}"
        self._token = secrets.token_hex(8)
        self._mine = and_(holders.c.name == self._what, holders.c.token == self._token)
        self._written_at = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name=f"hold of {self._what}")

    @contextmanager
    def held(self, *, alone: bool = True) -> Iterator[Hold]:
        """Hold it while the block lasts; raises when another process does, unless several may."""
        _HELD.add(self._token)
        if (holder := self._database.write(lambda connection: self._take(connection, alone=alone))) is not None:
            _HELD.discard(self._token)
            kind, name = self._activity.kind, self._activity.name
            raise UsageError(f"{kind} {name!r} is being run by {holder}: wait for it, or give this one another --name")
        self._thread.start()
        try:
            yield self
        finally:
            _HELD.discard(self._token)
            self._is_over.set()
            self._thread.join()
            # If a server is away now, the hold ends by itself.
            with contextlib.suppress(StoreError):
                self._database.write(
                    lambda connection: connection.execute(delete(holders).where(self._mine)), patient=False
                )

    def _take(self, connection: Connection, *, alone: bool) -> str | None:
        """Take the hold in one statement, so that of two who try one gets it; returns who has it otherwise."""
        now, started = self._database.clocks(connection)
        asked = select(holders).where(holders.c.name == self._what)
        found = connection.execute(asked).first()
        row: dict[str, Any] = {
            "name": self._what,
            "token": self._token,
            "process": self._activity.process,
            "said": self._said(),
        }
        row |= {"until": now + LEASE_S}
        free: ColumnElement[bool] = false() if alone else true()
        if found is not None and _is_forgotten(found.process, found.token):
            free = or_(free, holders.c.token == found.token)
        if started + LEASE_S <= now:  # a server that was just started has heard of no renewal yet
            free = or_(free, holders.c.until <= now)
        insert: Any = (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(holders)
        taken = insert.values(row).on_conflict_do_update(index_elements=["name"], set_=row, where=free)
        if connection.execute(taken.returning(holders.c.token)).first() is not None:
            return None
        machine, pid, _ = connection.execute(asked).one().process.rsplit(" ", 2)
        return f"process {pid} on {machine.partition('/')[0]}"

    def tell(self, done: int, total: int | None, now: str, *, done_before: int = 0) -> None:
        """Say how far the work is, for those who look on."""
        told = {"done": done, "total": total, "now": column_text(now), "done_before": done_before}
        self._activity = msgspec.structs.replace(self._activity, **told)
        self._write()

    def observe(self, telemetry: TelemetrySample) -> None:
        """Passes on the latest reading of the device. One that comes too soon after the last is not written."""
        self._activity = msgspec.structs.replace(self._activity, telemetry=telemetry)
        if time.monotonic() - self._written_at >= OBSERVED_EVERY_S:
            self._write()

    def require(self, connection: Connection) -> None:
        """Raise where another process works on it by now. Who asks keeps others from taking it until the transaction ends."""
        if connection.execute(select(holders.c.name).where(self._mine).with_for_update()).first() is None:
            kind, name = self._activity.kind, self._activity.name
            raise StoreError(
                f"another process has taken over {kind} {name!r}: this one stops, and its last result is not kept"
            )

    def _said(self) -> str:
        return msgspec.json.encode(self._activity).decode()

    def _renew(self) -> None:
        while not self._is_over.wait(LEASE_S / RENEWALS):
            self._write()

    def _write(self) -> None:
        """Renew the hold. What cannot be written at once is left: every write of a holder asks whether it still holds."""
        self._written_at = time.monotonic()

        def renew(connection: Connection) -> None:
            until = self._database.clocks(connection)[0] + LEASE_S
            connection.execute(update(holders).where(self._mine).values(until=until, said=self._said()))

        with contextlib.suppress(StoreError):
            self._database.write(renew, patient=False)


def _is_forgotten(process: str, token: str) -> bool:
    return token not in _HELD if process == this_process() else is_gone(process)


def activities(database: Database) -> list[Activity]:
    """Returns what processes are at. Where the process is gone, or silent for too long, it is over."""
    with database.reading() as connection:
        now, started = database.clocks(connection)
        rows = connection.execute(select(holders).where(holders.c.said.is_not(None)).order_by(holders.c.name)).all()
    found = []
    for row in rows:
        with contextlib.suppress(msgspec.MsgspecError):  # of another Redline
            said = msgspec.json.decode(row.said, type=Activity)
            is_over = is_gone(row.process) or max(row.until or now, started + LEASE_S) < now
            found.append(msgspec.structs.replace(said, is_over=is_over))
    return found


SETTLED = tuple(
    sweep_cells.c["cell_key" if name == "key" else name].label(name) for name in SettledCell.__struct_fields__
)
"""These are the columns of a `SettledCell`, by its names."""


class SweepLedger:
    """The ledger of one sweep knows its settled cells."""

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._hold: Hold | None = None
        self.name = column_text(name)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Only one process at a time works on a sweep."""
        with Hold(self._database, "sweep", self.name).held() as self._hold:
            try:
                yield
            finally:
                self._hold = None

    def announce(self, done: int, total: int, now: str, *, done_before: int) -> None:
        """Say how far the sweep is, for those who look on."""
        if self._hold is not None:
            self._hold.tell(done, total, now, done_before=done_before)

    def observe(self, telemetry: TelemetrySample) -> None:
        """Passes on the latest reading of the device, for those who look on."""
        if self._hold is not None:
            self._hold.observe(telemetry)

    def cells(self) -> dict[str, SettledCell]:
        with self._database.reading() as connection:
            found = connection.execute(select(*SETTLED).where(sweep_cells.c.sweep == self.name))
            return {cell.key: cell for cell in self._database.readable(found.mappings(), SettledCell)}

    def settle(self, key: str, record: RunRecord) -> None:
        """Write the record and that it settles this cell; on disk, not only in the system's memory, when it returns."""
        failure = record.failure
        cell = SettledCell(
            key=key,
            status="failed" if failure else "done",
            record_id=record.id,
            failure_kind=failure.kind if failure else None,
            failure_stage=column_text(failure.stage) if failure else None,
            failure_message=column_text(failure.told) if failure else None,
        )

        def settle(connection: Connection) -> None:
            if self._hold is not None:
                self._hold.require(connection)
            write_record(connection, record, over=True)
            self._put(connection, [cell])

        self._database.write(settle, durable=True)

    def elsewhere(self, keys: Sequence[str], is_welcome: Callable[[str], bool]) -> dict[str, SettledCell]:
        """Cells that other sweeps, of which the name says whether they may be asked, have measured already."""
        found: dict[str, SettledCell] = {}
        done = select(sweep_cells.c.sweep, *SETTLED).where(sweep_cells.c.status == "done")
        with self._database.reading() as connection:
            for first in range(0, len(keys), KEYS_AT_ONCE):
                asked = done.where(sweep_cells.c.cell_key.in_(keys[first : first + KEYS_AT_ONCE]))
                for sweep, *values in connection.execute(asked):
                    if is_welcome(sweep):
                        cell = SettledCell(**dict(zip(SettledCell.__struct_fields__, values, strict=True)))
                        found[cell.key] = cell
        return found

    def adopt(self, cells: Iterable[SettledCell]) -> None:
        """Settle cells by the records of other sweeps."""
        self._database.write(lambda connection: self._put(connection, cells))

    def _put(self, connection: Connection, cells: Iterable[SettledCell]) -> None:
        for cell in cells:
            values = msgspec.structs.asdict(cell)
            put(connection, sweep_cells, {"sweep": self.name, "cell_key": values.pop("key"), **values})

    def forget(self) -> None:
        """Start over: no cell is settled any more. The records stay in the history."""
        own = delete(sweep_cells).where(sweep_cells.c.sweep == self.name)
        self._database.write(lambda connection: connection.execute(own))


class TuneLedger:
    """All searches of a history, by name."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._holds: dict[str, Hold] = {}

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Only one process at a time works on a search."""
        with Hold(self._database, "tune", name).held() as self._holds[name]:
            try:
                yield
            finally:
                del self._holds[name]

    def save(self, row: TuneRow, body: bytes) -> None:
        """Write a search, as far as it has come."""
        plain: dict[str, Any] = msgspec.structs.asdict(row)
        values = {name: column_text(value) if isinstance(value, str) else value for name, value in plain.items()}

        def save(connection: Connection) -> None:
            if (hold := self._holds.get(row.name)) is not None:
                hold.require(connection)
            put(connection, tunes, {**values, "body": body})

        self._database.write(save)

    def load(self, name: str) -> bytes | None:
        """None where there is no search of that name."""
        with self._database.reading() as connection:
            found: bytes | None = connection.scalar(select(tunes.c.body).where(tunes.c.name == column_text(name)))
            return found

    def rows(self) -> list[TuneRow]:
        """Newest first."""
        columns = [tunes.c[name] for name in TuneRow.__struct_fields__]
        with self._database.reading() as connection:
            found = connection.execute(select(*columns).order_by(tunes.c.created_at.desc(), tunes.c.name))
            return self._database.readable(found.mappings(), TuneRow)


class CeilingShelf:
    """The shelf has what each device can do at most. A new entry replaces the old one."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, device_key: str) -> Ceilings | None:
        """None where there are none, or only some that were measured in another way."""
        with self._database.reading() as connection:
            body = connection.scalar(select(ceilings.c.body).where(ceilings.c.device_key == device_key))
        return None if body is None else read_ceilings(body)

    def put(self, measured: Ceilings) -> None:
        row = {
            "device_key": device_key_of_ceilings(measured),
            "device_name": column_text(measured.name),
            "measured_at": measured.measured_at,
            "body": msgspec.msgpack.encode(measured),
        }
        self._database.write(lambda connection: put(connection, ceilings, row))
