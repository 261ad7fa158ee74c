"""A fact that the doctor knows is a row of a table. The row says when it holds, what was seen, whether that is well, and how to mend it.

Both sides of the door use it: `verbs/doctor.py` for what the system and the drivers tell, `bench/doctor.py` for what only torch knows.
Of the rows of one name the first that holds is the answer, so that the surest sign comes first and the last needs no condition.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from redline.model.protocol import HealthItem

TOOL_TIMEOUT_S = 60.0
"""A compiler or a profiler that loads drivers from a slow disk answers within this time; most need a second."""
NVIDIA_ON_BUS = "0x10de"
"""NVIDIA's number on the PCI bus, where a card is seen without a driver, too."""
NODES = {
    "NVIDIA": ("dev/nvidia[0-9]*", "dev/nvidiactl", "dev/nvidia-uvm"),
    "AMD": ("dev/kfd", "dev/dri/renderD*"),
}
"""These are the device files that computing on a GPU of this vendor has to open."""
GRAPHICS = ("0x03", "0x12")
"""The classes of display controllers and of accelerators begin with these. A vendor of GPUs may sell network cards, too."""


class Fact(NamedTuple):
    """A fact is one row. `seen`, `mend` and the name may have gaps such as {0.version}, which the thing that was looked at fills."""

    name: str
    holds: Callable[[Any], object]
    ok: bool | None
    """It is True where all is well, False where something is broken, and None where it is absent or could be better and Redline works
    without it."""
    seen: str
    mend: str = ""


def otherwise(thing: Any) -> bool:
    """Returns true: this is the condition of a last row."""
    return True


def judged(facts: Iterable[Fact], thing: Any) -> Iterator[HealthItem]:
    """Yields what the rows say of a thing: for each name the first row that holds, if one does."""
    told = set()
    for fact in facts:
        if fact.name not in told and fact.holds(thing):
            told.add(fact.name)
            name, seen, mend = (text.format(thing) for text in (fact.name, fact.seen, fact.mend))
            yield HealthItem(name=name, ok=fact.ok, seen=seen, mend=mend)


def output_of(command: Sequence[str]) -> tuple[bool, str]:
    """Returns whether a command succeeded, and what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TOOL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@dataclass(frozen=True)
class Machine:
    """This is a machine as its files show it. Tests hand in a faked one, which lies in a folder of its own."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    access: Callable[[Path, int], bool] = os.access
    which: Callable[[str], str | None] = shutil.which
    output_of: Callable[[Sequence[str]], tuple[bool, str]] = output_of

    def read(self, path: str | Path) -> str:
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def search(self, path: str, pattern: str) -> str:
        """Returns the first group of what a pattern finds in a file, or nothing."""
        match = re.search(pattern, self.read(path), re.MULTILINE)
        return match[1] if match else ""

    @property
    def vendors(self) -> list[str]:
        """Returns the vendors whose GPUs are here, with a driver or without."""
        nvidia = [*self.root.glob("dev/nvidia[0-9]*"), *self.root.glob("proc/driver/nvidia")] or [
            device
            for device in self.root.glob("sys/bus/pci/devices/*")
            if self.read(device / "vendor") == NVIDIA_ON_BUS and self.read(device / "class").startswith(GRAPHICS)
        ]
        # Servers without a GPU may have /dev/kfd, too: their topology then lists nothing but CPUs.
        topology = [self.read(node) for node in self.root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")]
        computes = not topology or any(re.search(r"^simd_count [1-9]", node, re.MULTILINE) for node in topology)
        amd = computes and (self.root / "dev/kfd").exists()
        return [vendor for vendor, is_here in (("NVIDIA", nvidia), ("AMD", amd)) if is_here]

    @property
    def closed_nodes(self) -> list[Path]:
        """Returns the device files of GPUs that this user may not open."""
        nodes = [node for vendor in self.vendors for pattern in NODES[vendor] for node in self.root.glob(pattern)]
        return [node for node in sorted(nodes) if not self.access(node, os.R_OK | os.W_OK)]
