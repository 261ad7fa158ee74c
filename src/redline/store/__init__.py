"""The history: every record ever measured, stored block by block while it is measured."""

from redline.store.codec import Activity, Mark, Point, Row, SeriesSeen, SettledCell, TuneRow
from redline.store.history import History
from redline.store.ledgers import CeilingShelf, SweepLedger, TuneLedger

__all__ = [
    "Activity",
    "CeilingShelf",
    "History",
    "Mark",
    "Point",
    "Row",
    "SeriesSeen",
    "SettledCell",
    "SweepLedger",
    "TuneLedger",
    "TuneRow",
]
