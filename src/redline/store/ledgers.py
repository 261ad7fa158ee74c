"""What is known of sweeps and of searches, who works on one (a single process at a time), and the ceilings of devices."""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import func, select

from redline.model.errors import StoreError, UsageError
from redline.model.identity import device_key_of_ceilings
from redline.model.record import RunRecord, TelemetrySample
from redline.model.work import Ceilings
from redline.store import queries
from redline.store.codec import Activity, ActivityKind, SettledCell, TuneRow, column_text, read_ceilings
from redline.store.layout import sweep_cells
from redline.store.writer import (
    Holder,
    keep_ceilings,
    put,
    put_meta,
    read_holder,
    save_tune,
    settle_cell,
    write_holder,
)
from redline.system.processes import is_gone, this_process

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from redline.store.database import Database


_HELD: set[str] = set()
"""Tokens that this process holds; a hold that could not be given back is no longer valid."""
LEASE_S = 30.0
"""How long a hold lasts that its holder does not renew."""


@contextmanager
def held(database: Database, what: str, name: str) -> Iterator[str]:
    """Hold a sweep or a search; raises when another process does. Yields the token of the hold, which every write shows.

    The hold ends with the process, however that ends.
    """
    lease = Lease(database, f"{what} {name}")
    if (holder := lease.take()) is not None:
        raise UsageError(f"{what} {name!r} is being run by {holder}: wait for it, or give this one another --name")
    try:
        yield lease.token
    finally:
        lease.give_back()


class Lease:
    """A hold as a row of the history, which all who may write to it can see; a thread renews it.

    A lock of a server's own would end with the connection it was made on. Connections drop and servers are
    restarted while their clients go on, and then a second process would get in.
    """

    def __init__(self, database: Database, what: str) -> None:
        self._database = database
        self._what = what
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name=f"lease of {what}")
        self.token = secrets.token_hex(8)

    def take(self) -> str | None:
        """None, or who has it."""
        digest = hashlib.sha256(self._what.encode()).digest()
        with self._database.writing() as connection:
            if self._database.on_server:
                # One at a time, also where nobody has held it before and there is no row to lock.
                key = int.from_bytes(digest[:8], signed=True)
                connection.execute(select(func.pg_advisory_xact_lock(key)))
            now, started = self._clocks(connection)
            found = read_holder(connection, self._what)
            # A server that was just started has heard of no renewal yet.
            is_over = found is None or max(found.until, started + LEASE_S) <= now
            if found is not None and not is_over and not _is_forgotten(found):
                return _named(found)
            self._write(connection, now)
        _HELD.add(self.token)
        self._thread.start()
        return None

    def give_back(self) -> None:
        self._over.set()
        self._thread.join()
        _HELD.discard(self.token)
        # A server that is away forgets the hold by itself.
        with contextlib.suppress(StoreError), self._database.writing(patient=False) as connection:
            found = read_holder(connection, self._what)
            if found is not None and found.token == self.token:
                write_holder(connection, self._what, None)

    def _renew(self) -> None:
        """Every write of a holder asks whether it still holds, so nothing has to be told from here."""
        while not self._over.wait(LEASE_S / 6):
            try:
                with self._database.writing(patient=False) as connection:
                    found = read_holder(connection, self._what)
                    if found is None or found.token != self.token:
                        return
                    self._write(connection, self._clocks(connection)[0])
            except StoreError:
                continue  # the server is away: try again in a moment

    def _clocks(self, connection: Connection) -> tuple[float, float]:
        """The time now, and when the server was started; a file is there always."""
        if not self._database.on_server:
            return time.time(), -math.inf
        now, started = connection.execute(queries.SERVER_CLOCKS).one()
        return now, started

    def _write(self, connection: Connection, now: float) -> None:
        write_holder(connection, self._what, Holder(token=self.token, process=this_process(), until=now + LEASE_S))


def _is_forgotten(holder: Holder) -> bool:
    if holder.process == this_process():
        return holder.token not in _HELD
    return is_gone(holder.process)


def _named(holder: Holder) -> str:
    machine, pid, _ = holder.process.rsplit(" ", 2)
    return f"process {pid} on {machine.partition('/')[0]}"


OBSERVED_EVERY_S = 1.0


class Announcer:
    """Writes down what this process is at. What cannot be written at once is left: it is only for those who look on."""

    def __init__(self, database: Database, kind: ActivityKind, name: str) -> None:
        self._database = database
        self._said = Activity(kind=kind, name=column_text(name), begun_at=time.time(), process=this_process())
        self._key = f"{queries.ACTIVITY}{kind} {self._said.name}"
        self._written_at = -math.inf

    def tell(self, done: int, total: int | None, now: str, *, done_before: int = 0) -> None:
        self._said = msgspec.structs.replace(
            self._said, done=done, total=total, now=column_text(now), done_before=done_before
        )
        self._write(self._said)

    def observe(self, telemetry: TelemetrySample) -> None:
        """The latest reading of the device; what comes too soon after the one before is not written."""
        self._said = msgspec.structs.replace(self._said, telemetry=telemetry)
        if time.monotonic() - self._written_at >= OBSERVED_EVERY_S:
            self._write(self._said)

    def end(self) -> None:
        self._write(None)

    def _write(self, said: Activity | None) -> None:
        self._written_at = time.monotonic()
        value = None if said is None else msgspec.json.encode(said).decode()
        with contextlib.suppress(StoreError), self._database.writing(patient=False) as connection:
            put_meta(connection, self._key, value)


def activities(database: Database) -> list[Activity]:
    """What processes are at; those whose process is gone are over."""
    with database.reading() as connection:
        values = connection.execute(queries.ACTIVITIES).all()
    found = []
    for _, value in values:
        with contextlib.suppress(msgspec.MsgspecError):  # of another Redline
            said = msgspec.json.decode(value, type=Activity)
            found.append(msgspec.structs.replace(said, is_over=is_gone(said.process)))
    return found


KEYS_AT_ONCE = 500
"""SQLite takes some thousand parameters in one statement."""


class SweepLedger:
    """The settled cells of one sweep, by name."""

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._token: str | None = None
        self._announcer: Announcer | None = None
        self.name = column_text(name)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Only one process at a time works on a sweep; the hold ends with the process, however that ends."""
        with held(self._database, "sweep", self.name) as self._token:
            self._announcer = Announcer(self._database, "sweep", self.name)
            try:
                yield
            finally:
                self._announcer.end()
                self._token = self._announcer = None

    def announce(self, done: int, total: int, now: str, *, done_before: int) -> None:
        """Say how far the sweep is, for those who look on."""
        if self._announcer is not None:
            self._announcer.tell(done, total, now, done_before=done_before)

    def observe(self, telemetry: TelemetrySample) -> None:
        """The latest reading of the device, for those who look on."""
        if self._announcer is not None:
            self._announcer.observe(telemetry)

    def cells(self) -> dict[str, SettledCell]:
        with self._database.reading() as connection:
            found = connection.execute(queries.CELLS_OF_SWEEP, {"name": self.name})
            return {cell.key: cell for cell in self._database.readable(found.mappings(), SettledCell)}

    def settle(self, key: str, record: RunRecord) -> None:
        """Write the record and that it settles this cell; on disk, not only in the system's memory, when it returns."""
        self._database.write(
            lambda connection, _: settle_cell(connection, self.name, key, record, self._token), durable=True
        )

    def elsewhere(self, keys: Sequence[str], is_welcome: Callable[[str], bool]) -> dict[str, SettledCell]:
        """Cells that other sweeps, of which the name says whether they may be asked, have measured already."""
        found: dict[str, SettledCell] = {}
        with self._database.reading() as connection:
            for first in range(0, len(keys), KEYS_AT_ONCE):
                rows = connection.execute(queries.DONE_CELLS, {"keys": list(keys[first : first + KEYS_AT_ONCE])})
                for row in rows.mappings():
                    values = dict(row)
                    if is_welcome(values.pop("sweep")):
                        found[row["key"]] = SettledCell(**values)
        return found

    def adopt(self, cells: Iterable[SettledCell]) -> None:
        """Settle cells by the records of other sweeps."""
        columns = ("status", "record_id", "failure_kind", "failure_stage", "failure_message")
        with self._database.writing() as connection:
            for cell in cells:
                values = {column: getattr(cell, column) for column in columns}
                put(connection, sweep_cells, {"sweep": self.name, "cell_key": cell.key, **values})

    def forget(self) -> None:
        """Start over: no cell is settled any more. The records stay in the history."""
        with self._database.writing() as connection:
            connection.execute(queries.DELETE_CELLS, {"name": self.name})


class TuneLedger:
    """All searches of a history, by name."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tokens: dict[str, str | None] = {}

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Only one process at a time works on a search; the hold ends with the process, however that ends."""
        with held(self._database, "tune", name) as self._tokens[name]:
            announcer = Announcer(self._database, "tune", name)
            announcer.tell(0, None, "")
            try:
                yield
            finally:
                announcer.end()
                del self._tokens[name]

    def save(self, row: TuneRow, body: bytes) -> None:
        token = self._tokens.get(row.name)
        self._database.write(lambda connection, _: save_tune(connection, row, body, token))

    def load(self, name: str) -> bytes | None:
        """None where there is no search of that name."""
        with self._database.reading() as connection:
            found: bytes | None = connection.execute(queries.TUNE, {"this_name": column_text(name)}).scalar()
            return found

    def rows(self) -> list[TuneRow]:
        """Newest first."""
        with self._database.reading() as connection:
            return self._database.readable(connection.execute(queries.TUNES).mappings(), TuneRow)


class CeilingShelf:
    """One entry per device; a new one replaces the old."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, device_key: str) -> Ceilings | None:
        """None where there are none, or only some that were measured in another way."""
        with self._database.reading() as connection:
            body = connection.execute(queries.CEILINGS_OF, {"this_key": device_key}).scalar()
        return None if body is None else read_ceilings(body)

    def put(self, ceilings: Ceilings) -> None:
        key = device_key_of_ceilings(ceilings)
        self._database.write(lambda connection, _: keep_ceilings(connection, key, ceilings))
