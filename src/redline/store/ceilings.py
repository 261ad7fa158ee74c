"""The ceilings of devices, measured once and kept: by device, driver, torch and, on a CPU, threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from redline.identity import device_key_of_ceilings
from redline.note import notes_from_texts
from redline.store import queries
from redline.store.writer import KeepCeilings
from redline.work import CEILINGS_SCHEMA, Ceilings

if TYPE_CHECKING:
    from redline.store.database import Database


class CeilingShelf:
    """One entry per device; a new one replaces the old."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, device_key: str) -> Ceilings | None:
        """None where there are none, or only some that were measured in another way."""
        with self._database.reading() as connection:
            body = connection.execute(queries.CEILINGS_OF, {"this_key": device_key}).scalar()
        if body is None:
            return None
        try:
            plain = msgspec.msgpack.decode(body)
            # Early ceilings of this schema have notes without codes.
            found = msgspec.convert({**plain, "notes": notes_from_texts(plain["notes"])}, Ceilings)
        except (msgspec.MsgspecError, LookupError, TypeError):
            return None
        return found if found.schema == CEILINGS_SCHEMA else None

    def put(self, ceilings: Ceilings) -> None:
        self._database.write(KeepCeilings(device_key=device_key_of_ceilings(ceilings), ceilings=ceilings))
