"""Doors to the bench: `inline`, `fork`, `spawn` and `torchrun` speak one protocol, and so does the fake.

`redline.verbs.workspace` opens them; `search/` asks through the sessions that they open.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from redline.launch.door import Door, Session
from redline.launch.inline import InlineDoor
from redline.launch.torchrun import TorchrunDoor
from redline.launch.workers import ForkDoor, SpawnDoor
from redline.model.errors import MissingExtra, UsageError
from redline.model.spec import LaunchSpec

__all__ = ["Door", "Session", "open_door", "require_torch"]


def open_door(launch: LaunchSpec) -> Door:
    """The door a spec asks for. Only `inline` loads torch into this process, when it is opened."""
    if not launch.python:
        require_torch()
    doors: dict[str, Callable[[LaunchSpec], Door]] = {
        "fork": ForkDoor,
        "spawn": SpawnDoor,
        "torchrun": TorchrunDoor,
        "inline": InlineDoor,
    }
    if launch.door in doors:
        return doors[launch.door](launch)
    raise UsageError(f"door {launch.door!r} needs a landscape: make a FakeDoor and hand it over")


def require_torch() -> None:
    """Refuse to measure where torch is not installed. Reading traces, reports and the history works without it."""
    if find_spec("torch") is None:
        raise MissingExtra("measuring a model", "torch", "torch")
