"""The history: every record ever measured, stored block by block while it is measured."""

from redline.store.codec import (
    Activity,
    CellStatus,
    Mark,
    MarkKind,
    Point,
    Row,
    SeriesSeen,
    SettledCell,
    Status,
    TuneRow,
)
from redline.store.history import History, OnUnreadable
from redline.store.ledgers import CeilingShelf, SweepLedger, TuneLedger

__all__ = [
    "Activity",
    "CeilingShelf",
    "CellStatus",
    "History",
    "Mark",
    "MarkKind",
    "OnUnreadable",
    "Point",
    "Row",
    "SeriesSeen",
    "SettledCell",
    "Status",
    "SweepLedger",
    "TuneLedger",
    "TuneRow",
]
