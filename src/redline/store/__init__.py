"""The history: every record ever measured, written as it comes.

Importing this loads no database library; opening a `History` does.
"""

from redline.store.ceilings import CeilingShelf, ceilings_of, place_of, place_of_ceilings
from redline.store.codec import Row, Status
from redline.store.history import Filters, History, OnUnreadable
from redline.store.sweeps import CellStatus, SettledCell, SweepLedger
from redline.store.tunes import TuneLedger, TuneRow

__all__ = [
    "CeilingShelf",
    "CellStatus",
    "Filters",
    "History",
    "OnUnreadable",
    "Row",
    "SettledCell",
    "Status",
    "SweepLedger",
    "TuneLedger",
    "TuneRow",
    "ceilings_of",
    "place_of",
    "place_of_ceilings",
]
