"""What is kept of searches for a fastest recipe: a row each, rewritten whenever more is known.

The body is bytes to this room: `redline.analyze.tune.record` says what they mean. Records a search refers to lie in the
history like all others, and are there before the row that names them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from redline.errors import UsageError

if TYPE_CHECKING:
    from redline.store.database import Database


class TuneRow(msgspec.Struct, frozen=True, kw_only=True):
    """A search in a listing."""

    name: str
    created_at: float
    model: str
    task: str
    state: str


class TuneLedger:
    """All searches of a history, by name."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Only one process at a time works on a search; the hold ends with the process, however that ends."""
        from redline.store.hold import hold

        with hold(self._database, f"tune {name}") as holder:
            if holder is not None:
                raise UsageError(
                    f"tune {name!r} is being run by {holder}: wait for it, or give this one another --name"
                )
            yield

    def save(self, row: TuneRow, body: bytes) -> None:
        from redline.store import queries

        with self._database.writing() as connection:
            connection.execute(queries.DELETE_TUNE, {"this_name": row.name})
            connection.execute(queries.INSERT_TUNE, {**msgspec.to_builtins(row), "body": body})

    def load(self, name: str) -> bytes | None:
        """None where there is no search of that name."""
        from redline.store import queries

        with self._database.reading() as connection:
            found: bytes | None = connection.execute(queries.TUNE, {"this_name": name}).scalar()
            return found

    def rows(self) -> list[TuneRow]:
        """Newest first."""
        from redline.store import queries

        with self._database.reading() as connection:
            return [TuneRow(**row) for row in connection.execute(queries.TUNES).mappings()]
