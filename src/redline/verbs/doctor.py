"""`redline doctor`: facts about this machine, and how to mend what is wrong. What needs torch is in the table of `bench/doctor.py`."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from typing import NamedTuple

from redline.model.errors import MissingExtra, StoreError, install_command
from redline.model.metrics import Headline, Row, Table
from redline.model.protocol import AskHealth, Health, HealthItem
from redline.model.units import counted
from redline.show.result import Result
from redline.store.database import VARIABLE, describe, file_of, resolve
from redline.store.history import History
from redline.system.health import Fact, Machine, judged, otherwise
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, use

OLDEST_PYTHON = (3, 11)
DRIVER_FIXES = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": "install the driver with its libraries (libnvidia-ml.so.1); start a container with --gpus all",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the driver was updated while loaded: reboot, or reload the nvidia kernel modules",
}
"""These mend the errors of NVIDIA's management library that have a cause of their own."""
CAP_SYS_ADMIN = 1 << 21
"""The driver asks for this capability, which the root of a container need not have."""
PROFILERS = {
    "nsys": ("NVIDIA", "Nsight Systems"),
    "ncu": ("NVIDIA", "Nsight Compute"),
    "rocprof": ("AMD", "the ROCm package rocprofiler"),
    "rocprofv2": ("AMD", "the ROCm package rocprofiler"),
    "rocprofv3": ("AMD", "the ROCm package rocprofiler-sdk"),
    "rocprof-compute": ("AMD", "the ROCm package rocprofiler-compute"),
}
"""The vendor whose GPU each profiler is for, and where the profiler comes from."""
EXTRAS = {
    "timm": ("timm", "models as timm:NAME"),
    "transformers": ("hf", "models as hf:NAME"),
    "torchao": ("quant", "the steps int8 and fp8"),
    "onnxscript": ("onnx", "the step onnx"),  # onnxruntime has other names on other devices
    "amdsmi": ("amd", "power, clocks and temperature of AMD GPUs"),
}
"""Each optional package has the extra that installs it, and what it is for."""


# What is looked at


@dataclass(frozen=True)
class Driver:
    """NVIDIA's management library answered this, or says why it cannot."""

    version: str = ""
    cuda: str = ""
    """This is the newest CUDA that this driver serves."""
    error: str = ""
    mend: str = ""


def ask_nvml() -> Driver:
    import pynvml

    try:
        pynvml.nvmlInit()
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion())
        return Driver(str(pynvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}")
    except pynvml.NVMLError as error:
        fixes = (fix for name, fix in DRIVER_FIXES.items() if getattr(pynvml, name) == error.value)
        return Driver(error=str(error), mend=next(fixes, "nvidia-smi tells more; reload or reinstall the driver"))


@dataclass(frozen=True)
class Desk:
    """The machine, and what this Python and its libraries say of it."""

    machine: Machine = field(default_factory=Machine)
    python: tuple[int, ...] = tuple(sys.version_info[:3])
    nvml: Callable[[], Driver] = ask_nvml
    installed: Callable[[str], str | None] = lambda name: next(
        (one.version for one in metadata.Distribution.discover(name=name)), None
    )

    @property
    def version(self) -> str:
        return ".".join(map(str, self.python))

    @cached_property
    def driver(self) -> Driver:
        return self.nvml()

    @property
    def rocm(self) -> str:
        return self.machine.read("opt/rocm/.info/version")

    @property
    def closed(self) -> str:
        return ", ".join(f"/{node.relative_to(self.machine.root)}" for node in self.machine.closed_nodes)

    @property
    def counters_are_closed(self) -> bool:
        is_closed = self.machine.search("proc/driver/nvidia/params", r"^RmProfilingAdminOnly:\s*(\d)") == "1"
        capabilities = int(self.machine.search("proc/self/status", r"^CapEff:\s*([0-9a-f]+)") or "0", 16)
        return is_closed and not capabilities & CAP_SYS_ADMIN


class Tool(NamedTuple):
    """A program or a package that may be here."""

    name: str
    version: str | None
    about: str
    mend: str


# The facts, and how to mend them

ALWAYS = (
    Fact("Python", lambda desk: desk.python >= OLDEST_PYTHON, True, "{0.version}"),
    Fact("Python", otherwise, False, "{0.version}", "make the environment with Python 3.11 or later"),
)
NVIDIA = (
    Fact("NVIDIA driver", lambda desk: desk.driver.error, False, "{0.driver.error}", "{0.driver.mend}"),
    Fact("NVIDIA driver", otherwise, True, "{0.driver.version}, serves CUDA up to {0.driver.cuda}"),
)
AMD = (
    Fact("ROCm", lambda desk: desk.rocm, True, "{0.rocm} in /opt/rocm"),
    Fact("ROCm", otherwise, None, "no /opt/rocm: torch brings its own libraries, the profilers are missing", "install ROCm to profile with rocprof"),
)  # fmt: skip
GPU = (
    Fact(
        "GPU permissions",
        lambda desk: desk.closed,
        False,
        "may not open {0.closed}",
        "join the groups that own them (often render and video): sudo usermod -aG GROUP $USER, then log in again; in a container hand them "
        "in with --device",
    ),
    Fact("GPU permissions", otherwise, True, "may open the device files"),
)
COUNTERS = (
    Fact(
        "ncu permissions",
        lambda desk: desk.counters_are_closed,
        False,
        "hardware counters are for administrators only (ERR_NVGPUCTRPERM)",
        "write 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' to /etc/modprobe.d/nvidia-profiling.conf, "
        "rebuild the initramfs and reboot; or run with sudo; or start the container with --cap-add=SYS_ADMIN",
    ),
    Fact("ncu permissions", otherwise, True, "hardware counters are open to this process"),
)
TOOLS = (
    Fact("{0.name}", lambda tool: tool.version, True, "{0.version}, {0.about}"),
    Fact("{0.name}", lambda tool: tool.version is None, None, "{0.about}", "{0.mend}"),
    Fact(
        "{0.name}",
        otherwise,
        False,
        "{0.about} does not answer",
        "run it with --version to see why, or take it off PATH",
    ),
)
NO_TORCH = HealthItem(
    name="torch",
    ok=None,
    seen="not installed: traces, reports and the history work, measuring needs it",
    mend=install_command("torch"),
)
NO_WORKER = HealthItem(
    name="torch",
    ok=False,
    seen="no worker with torch could be started",
    mend="see why: python -c 'import torch, torchvision'",
)


def examine(health: Health | None, desk: Desk | None = None) -> list[HealthItem]:
    """Returns all facts about a machine, from the ground up, with what the bench said of torch and the devices."""
    desk = desk or Desk()
    vendors = desk.machine.vendors
    names = [name for name, (vendor, _) in PROFILERS.items() if vendor in vendors or desk.machine.which(name)]
    with ThreadPoolExecutor() as pool:  # some are Python programs and take a second
        tools = list(pool.map(lambda name: _profiler(name, desk.machine), names))
    groups = {"NVIDIA": NVIDIA, "AMD": AMD}
    own = [*ALWAYS, *(fact for vendor in vendors for fact in groups[vendor]), *(GPU if vendors else ())]
    silent = NO_TORCH if desk.installed("torch") is None else NO_WORKER
    has_counters = "NVIDIA" in vendors and any(tool.name == "ncu" and tool.version for tool in tools)
    return [
        *judged(own, desk),
        *(health.items if health else [silent]),
        *judged(COUNTERS if has_counters else (), desk),
        *(item for tool in [*tools, *_extras(desk)] for item in judged(TOOLS, tool)),
        _history(desk.machine),
    ]


def _profiler(name: str, machine: Machine) -> Tool:
    path = machine.which(name)
    if path is None:
        return Tool(name, None, "not on PATH", f"install {PROFILERS[name][1]} to use it")
    works, said = machine.output_of([path, "--version"])
    number = re.search(r"\d+(?:\.\d+)+", said)
    return Tool(name, (number[0] if number else "version unknown") if works else "", path, "")


def _extras(desk: Desk) -> Iterator[Tool]:
    for name, (extra, purpose) in EXTRAS.items():
        version = desk.installed(name)
        if extra != "amd" or "AMD" in desk.machine.vendors:
            yield Tool(name, version, purpose if version else f"not installed: {purpose}", install_command(extra))


def _history(machine: Machine) -> HealthItem:
    """Opens the history, as the store says best what is wrong with it. A server may take long to answer, and is only named."""
    try:
        location = resolve(machine.environ.get(VARIABLE))
        file = file_of(location)
        if file is not None and file.exists():
            with History.open(file) as history:
                history.require_writable()
        elif file is not None:  # it is made with the first measurement, and not by looking
            folder = next(parent for parent in file.parents if parent.exists())
            try:
                with tempfile.TemporaryFile(dir=folder):  # which has no name and leaves nothing behind
                    pass
            except OSError as error:
                raise StoreError(f"{file} cannot be made: {error.strerror}") from None
    except StoreError as error:
        return HealthItem(name="history", ok=False, seen=str(error), mend=f"set {VARIABLE} to another place")
    return HealthItem(name="history", ok=True, seen=describe(location))


STATES = {True: "ok", False: "broken", None: "absent"}


@verb(examples=("redline doctor", "redline doctor -v"))
def doctor(*, workspace: Workspace | None = None) -> Result:
    """Check drivers, torch, devices, profilers; say how to fix each.

    Permissions, compilers and optional packages are checked too.
    """
    with use(workspace) as opened:
        try:
            health = opened.ask(AskHealth(), Health)
        except MissingExtra:
            health = None
    items = examine(health)
    broken = [item.name for item in items if item.ok is False]
    told = f"{counted(len(broken), 'thing')} to fix: {', '.join(broken)}" if broken else "Nothing is broken"
    rows = [
        Row(facts={"item": item.name, "state": STATES[item.ok], "seen": item.seen, "fix": item.mend or None})
        for item in items
    ]
    return Result(
        verb="doctor",
        headline=Headline(template=f"{told}."),
        tables=(Table(name="facts", rows=tuple(rows), columns=("item", "state", "seen", "fix")),),
        next="" if broken else "redline demo",
    )
