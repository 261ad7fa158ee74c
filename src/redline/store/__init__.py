"""The history keeps every record ever measured. Each is stored block by block while it is measured."""

from redline.store.history import History
from redline.store.ledgers import SweepLedger, TuneLedger
from redline.store.schema import Activity, Mark, Point, Row, SeriesSeen, SettledCell, TuneRow

__all__ = [
    "Activity",
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
