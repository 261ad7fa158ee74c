"""Doors to the bench: `inline`, `fork`, `spawn` and `torchrun` speak one protocol, and so does the fake.

`redline.verbs.workspace` opens them; `search/` asks through the sessions that they open.
"""

from __future__ import annotations

from importlib.util import find_spec

from redline.launch.door import Door, Session
from redline.launch.inline import InlineDoor
from redline.launch.workers import WorkerDoor
from redline.model.errors import MissingExtra, UsageError
from redline.model.spec import LaunchSpec

__all__ = ["Door", "Session", "open_door", "require_torch"]


def open_door(launch: LaunchSpec) -> Door:
    """Returns the door a spec asks for. Only `inline` loads torch into this process, when it is opened."""
    if not launch.python:
        require_torch()
    if launch.door == "fake":
        raise UsageError("door 'fake' needs a landscape: make a FakeDoor and hand it over")
    return InlineDoor() if launch.door == "inline" else WorkerDoor(launch)


def require_torch() -> None:
    """Refuse to measure where torch is not installed. Reading traces, reports and the history works without it."""
    if find_spec("torch") is None:
        raise MissingExtra("measuring a model", "torch", "torch")
