"""Ledgers say who works on what, and what is known of sweeps and of searches.

A `Hold` is a row of the history that a thread renews, so all who may write to the history see it. A lock of a server's own
would end with the connection it was made on: connections drop and servers are restarted while their clients go on.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from sqlalchemy import Connection, and_, delete, select, true, update

from redline.model.errors import StoreError, UsageError
from redline.model.record import RunRecord
from redline.store.database import Database
from redline.store.schema import (
    Activity,
    ActivityKind,
    SettledCell,
    TuneRow,
    column_text,
    columns_of,
    holders,
    put,
    sweep_cells,
    tunes,
    write_record,
)
from redline.system.processes import is_gone, this_process

LEASE_S = 30.0
"""A hold lasts this long if its holder does not renew it: another may take over after this from a killed process elsewhere."""
RENEWALS = 6
"""A hold is renewed this often while it lasts, so that a server that is away for a moment does not end it."""
_HELD: set[str] = set()
"""This process holds these tokens; that of a hold that could not be given back, because its server was away, is not among them."""


class Hold:
    """A hold says that this process works on something, and how far it is. It ends with the process, however that ends."""

    def __init__(self, database: Database, kind: ActivityKind, name: str) -> None:
        self.name = column_text(name)
        self._database = database
        self._activity = Activity(kind=kind, name=self.name, begun_at=time.time())
        self._token = secrets.token_hex(8)
        # Several may watch scripts of one name, so each of them has a row of its own.
        self._what = f"{kind} {self.name}{f' {self._token}' if kind == 'watch' else ''}"
        self._mine = and_(holders.c.name == self._what, holders.c.token == self._token)

    @contextmanager
    def held(self) -> Iterator[Hold]:
        """Holds it while the block lasts; raises a `UsageError` if another process does."""
        _HELD.add(self._token)
        if (holder := self._database.write(self._take)) is not None:
            _HELD.discard(self._token)
            machine, pid, _ = holder.rsplit(" ", 2)
            by = f"process {pid} on {machine.partition('/')[0]}"
            raise UsageError(
                f"{self._activity.kind} {self.name!r} is being run by {by}: wait for it, or give this one another --name"
            )
        is_over = threading.Event()
        thread = threading.Thread(target=self._renew, args=[is_over], daemon=True, name=f"hold of {self._what}")
        thread.start()
        try:
            yield self
        finally:
            _HELD.discard(self._token)
            is_over.set()
            thread.join()
            self._write_if_there(lambda connection: connection.execute(delete(holders).where(self._mine)))

    def _take(self, connection: Connection) -> str | None:
        """Takes the hold if nobody has it any more, and returns who has it otherwise. If two try, one gets it."""
        now, started = self._database.clocks(connection)
        own = holders.c.name == self._what
        found = connection.execute(select(holders).where(own)).first()
        if found is not None:
            is_ours = found.process == this_process()
            is_gone_by = found.token not in _HELD if is_ours else is_gone(found.process)
            # A server that was just started has heard of no renewal yet, so nothing is expired there.
            expired = holders.c.until <= (now if started + LEASE_S <= now else -1.0)
            free = true() if is_gone_by else expired
            connection.execute(delete(holders).where(own, holders.c.token == found.token, free))
        row = {"name": self._what, "token": self._token, "process": this_process(), **self._signed(now)}
        if put(connection, holders, row, replace=False):
            return None
        holder: str | None = connection.scalar(select(holders.c.process).where(own))
        return holder or self._take(connection)

    def _signed(self, now: float) -> dict[str, Any]:
        return {"until": now + LEASE_S, "said": msgspec.json.encode(self._activity).decode()}

    def tell(self, done: int, total: int | None, now: str, *, done_before: int = 0) -> None:
        """Says how far the work is, for those who look on."""
        told = {"done": done, "total": total, "now": column_text(now), "done_before": done_before}
        self._activity = msgspec.structs.replace(self._activity, **told)
        self._sign()

    def require(self, connection: Connection) -> None:
        """Raises a `StoreError` if another process has taken what this one held. Nobody can take it then until the transaction ends."""
        mine = select(holders.c.name).where(self._mine).with_for_update()
        if self._token in _HELD and connection.execute(mine).first() is None:
            raise StoreError(
                f"another process has taken over {self._activity.kind} {self.name!r}: this one stops, and its last result is not kept"
            )

    def _renew(self, is_over: threading.Event) -> None:
        while not is_over.wait(LEASE_S / RENEWALS):
            self._sign()

    def _sign(self) -> None:
        def sign(connection: Connection) -> None:
            now, _ = self._database.clocks(connection)
            connection.execute(update(holders).where(self._mine).values(self._signed(now)))

        self._write_if_there(sign)

    def _write_if_there(self, deed: Callable[[Connection], object]) -> None:
        """Writes what can be written at once and drops the rest, which does no harm.

        Every result of a holder asks whether it still holds, and a hold ends by itself.
        """
        with contextlib.suppress(StoreError):
            self._database.write(deed, patient=False)


def activities(connection: Connection, now: float, started: float) -> list[Activity]:
    """Returns what processes are at. Where the process is gone, or silent for too long, it is over."""
    found = []
    for row in connection.execute(select(holders).where(holders.c.said.is_not(None)).order_by(holders.c.name)):
        with contextlib.suppress(msgspec.MsgspecError):  # another version of Redline may have written it
            said = msgspec.json.decode(row.said, type=Activity)
            is_over = is_gone(row.process) or max(row.until or now, started + LEASE_S) < now
            found.append(msgspec.structs.replace(said, is_over=is_over))
    return found


class SweepLedger(Hold):
    """The ledger of one sweep keeps its settled cells. Only one process at a time works on a sweep."""

    def __init__(self, database: Database, name: str) -> None:
        super().__init__(database, "sweep", name)

    def cells(self) -> dict[str, SettledCell]:
        own = select(*_CELL).where(sweep_cells.c.sweep == self.name)
        return {cell.key: cell for cell in self._database.rows(own, SettledCell)}

    def settle(self, key: str, record: RunRecord) -> None:
        """Writes the record, and that it settles this cell. Either both are there afterwards or neither is."""

        def settle(connection: Connection) -> None:
            self.require(connection)
            write_record(connection, record, over=True)
            put(connection, sweep_cells, {"sweep": self.name, **msgspec.to_builtins(SettledCell.by(key, record))})

        self._database.write(settle, durable=True)

    def forget(self) -> None:
        """Starts the sweep over: no cell is settled any more. The records stay in the history."""
        self._database.execute(delete(sweep_cells).where(sweep_cells.c.sweep == self.name))


class TuneLedger:
    """This ledger has all searches of a history by name. Only one process at a time works on each."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._hold: Hold | None = None

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        with Hold(self._database, "tune", name).held() as self._hold:
            try:
                yield
            finally:
                self._hold = None

    def save(self, row: TuneRow, body: bytes, now: str = "") -> None:
        """Writes a search as far as it has come, and says that in words for those who look on."""
        hold = self._hold

        def save(connection: Connection) -> None:
            if hold is not None:
                hold.require(connection)
            put(connection, tunes, {**msgspec.structs.asdict(row), "body": body})

        self._database.write(save)
        if hold is not None:
            hold.tell(0, None, now)

    def load(self, name: str) -> bytes | None:
        """Returns a search as bytes; None if there is no search of that name."""
        return next(iter(self._database.values(select(tunes.c.body).where(tunes.c.name == column_text(name)))), None)

    def rows(self) -> list[TuneRow]:
        """Returns all searches; the newest comes first."""
        asked = select(*columns_of(tunes, TuneRow)).order_by(tunes.c.created_at.desc(), tunes.c.name)
        return self._database.rows(asked, TuneRow)


_CELL = columns_of(sweep_cells, SettledCell)
