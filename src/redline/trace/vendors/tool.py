"""What a vendor's profiler is to Redline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from redline.registry import Registry
from redline.trace.counters import Reading
from redline.trace.kernels import NamedTime


@dataclass(frozen=True)
class VendorTable:
    """What a tool told, in Redline's own terms."""

    kernels: Sequence[NamedTime]
    readings: Sequence[Reading] = ()
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class FollowUp:
    """A command to run after the profiled program has ended, and the file that takes what it prints."""

    command: tuple[str, ...]
    output: Path


class VendorTool(ABC):
    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]]
    """Kinds of device it looks at."""
    how_to_get: ClassVar[str]
    also_in: ClassVar[tuple[str, ...]] = ()
    """Folders, as patterns, where it is often installed without being on the PATH."""
    steps: ClassVar[int] = 3
    """How many steps it is shown."""
    sees_everything: ClassVar[bool] = False
    """Cannot be told when to look: its table holds the building and the warm-up of the model too."""
    replays: ClassVar[bool] = False
    """Runs its target several times from the beginning, so that nobody can talk to it on the way."""
    exit_timeout_s: ClassVar[float] = 300.0
    """Until it has written its files once the worker has left."""

    @abstractmethod
    def prefix(self, folder: Path) -> tuple[str, ...]:
        """The words in front of the worker's command; all files go into the folder."""

    def follow_ups(self, folder: Path) -> list[FollowUp]:
        """What turns its own files into readable ones."""
        return []

    @abstractmethod
    def read(self, folder: Path) -> VendorTable:
        """Raises `TraceError` when it wrote nothing of use, with the reason it gave."""


TOOLS: Registry[type[VendorTool]] = Registry("profiler", package="redline.trace.vendors", group="redline.profilers")
"""Those of the house are files beside this one; others register a class under the entry-point group."""
