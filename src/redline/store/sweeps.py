"""What a sweep remembers: which of its cells are settled, and by which record.

A cell's row and its record are written in one transaction, so a sweep that is killed has either both or neither, and
the cell in flight leaves nothing behind that would be measured twice or counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import msgspec

from redline.errors import UsageError
from redline.record import RunRecord

if TYPE_CHECKING:
    from redline.store.database import Database

CellStatus = Literal["done", "failed"]


class SettledCell(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that needs no further look, unless someone asks for one."""

    key: str
    """The plan key: of the spec and of the place, as they were known before anything ran."""
    status: CellStatus
    record_id: str
    failure_kind: str | None
    failure_stage: str | None
    failure_message: str | None


class SweepLedger:
    """The settled cells of one sweep, by name."""

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self.name = name

    @contextmanager
    def held(self) -> Iterator[None]:
        """Only one process at a time works on a sweep; the hold ends with the process, however that ends."""
        from redline.store.hold import hold

        with hold(self._database, f"sweep {self.name}") as holder:
            if holder is not None:
                raise UsageError(
                    f"sweep {self.name!r} is being run by {holder}: wait for it, or give this one another --name"
                )
            yield

    def cells(self) -> dict[str, SettledCell]:
        from redline.store import queries

        with self._database.reading() as connection:
            found = connection.execute(queries.CELLS_OF_SWEEP, {"name": self.name})
            return {row["key"]: SettledCell(**row) for row in found.mappings()}

    def settle(self, key: str, record: RunRecord) -> None:
        """Write the record and that it settles this cell; on disk, not only in the system's memory, when it returns."""
        from redline.store import queries
        from redline.store.history import write_record

        failure = record.failure
        values = {
            "sweep": self.name,
            "cell_key": key,
            "status": "failed" if failure else "done",
            "record_id": record.id,
            "failure_kind": failure.kind if failure else None,
            "failure_stage": failure.stage if failure else None,
            "failure_message": failure.message if failure else None,
        }
        with self._database.writing(durable=True) as connection:
            write_record(connection, record, over=True)
            connection.execute(queries.DELETE_CELL, {"name": self.name, "key": key})
            connection.execute(queries.INSERT_CELL, values)

    def forget(self) -> None:
        """Start over: no cell is settled any more. The records stay in the history."""
        from redline.store import queries

        with self._database.writing() as connection:
            connection.execute(queries.DELETE_CELLS, {"name": self.name})
