"""`redline doctor`: facts about this machine, and how to fix what is wrong. What needs torch is seen by `bench/doctor.py`.

Each check of the table `CHECKS` looks at a `Machine` and yields facts. `ok` of a fact is True where all is well, False where something
is broken, and None where something is absent or could be better and Redline works without it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil

from redline.model.errors import MissingExtra, StoreError, install_command
from redline.model.metrics import Headline, Row, Table
from redline.model.protocol import AskHealth, Health, HealthItem
from redline.model.units import counted, format_bytes
from redline.show.result import Result
from redline.store.database import VARIABLE, describe, file_of, is_sqlite, resolve
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, use

OLDEST_PYTHON = (3, 11)
LEAST_FREE_BYTES = 2**30
"""A traced epoch of a large model can take hundreds of megabytes."""
TOOL_TIMEOUT_S = 10.0
"""Vendors' profilers are Python programs or load drivers; they answer within two seconds where they work."""
CAP_SYS_ADMIN = 1 << 21

PROFILERS = {
    "nsys": ("nvidia", "Nsight Systems"),
    "ncu": ("nvidia", "Nsight Compute"),
    "rocprof": ("amd", "the ROCm package rocprofiler"),
    "rocprofv2": ("amd", "the ROCm package rocprofiler"),
    "rocprofv3": ("amd", "the ROCm package rocprofiler-sdk"),
    "rocprof-compute": ("amd", "the ROCm package rocprofiler-compute"),
}
"""The vendor whose GPU each profiler is for, and where the profiler comes from."""
EXTRAS = {
    "timm": ("timm", "models as timm:NAME"),
    "transformers": ("hf", "models as hf:NAME"),
    "torchao": ("quant", "the steps int8 and fp8"),
    "onnxscript": ("onnx", "the step onnx"),  # onnxruntime has other names on other devices
    "amdsmi": ("amd", "power, clocks and temperature of AMD GPUs"),
}
"""The extra that installs each optional package, and what the package is for."""

NvmlProblem = Literal["package-missing", "library-missing", "version-mismatch", "other"]
DRIVER_FIXES: dict[NvmlProblem, str] = {
    "package-missing": "pip install nvidia-ml-py",
    "library-missing": "install the driver's libraries (libnvidia-ml.so.1); start a container with --gpus all",
    "version-mismatch": "the driver was updated while loaded: reboot, or reload the nvidia kernel modules",
    "other": "nvidia-smi tells more; reload or reinstall the driver",
}
NVML_CODES: dict[str, NvmlProblem] = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": "library-missing",
    "NVML_ERROR_FUNCTION_NOT_FOUND": "library-missing",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "version-mismatch",
}


@dataclass(frozen=True)
class NvidiaDriver:
    """NVML answered this."""

    version: str = ""
    cuda: str = ""
    """The newest CUDA that this driver serves."""
    processes: tuple[int, ...] = ()
    problem: NvmlProblem | None = None
    error: str = ""
    """The driver's library said this about the problem."""


def ask_nvml() -> NvidiaDriver:
    try:
        import pynvml
    except ImportError:
        return NvidiaDriver(problem="package-missing", error="the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion())
        version = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        pids = {process.pid for handle in handles for process in _processes_on(pynvml, handle)}
        text = version.decode() if isinstance(version, bytes) else str(version)
        return NvidiaDriver(version=text, cuda=f"{cuda // 1000}.{cuda % 1000 // 10}", processes=tuple(sorted(pids)))
    except pynvml.NVMLError as error:
        problems = {getattr(pynvml, code): problem for code, problem in NVML_CODES.items()}
        return NvidiaDriver(problem=problems.get(error.value, "other"), error=str(error))


def _processes_on(nvml: Any, handle: Any) -> list[Any]:
    try:
        return list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:  # some cards, and MIG slices, do not list their processes
        return []


def output_of(command: Sequence[str]) -> str | None:
    """Returns what a command prints, or None when it fails or does not answer."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TOOL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return f"{done.stdout}\n{done.stderr}" if done.returncode == 0 else None


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def our_family() -> set[int]:
    """Returns this process, those it started and those that started it: none of them is a stranger on the GPU."""
    me = psutil.Process()
    return {me.pid, *(one.pid for one in (*me.children(recursive=True), *me.parents()))}


@dataclass(frozen=True)
class Machine:
    """The doctor looks at a machine in these ways; tests hand in a faked one."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    python: tuple[int, ...] = tuple(sys.version_info[:3])
    which: Callable[[str], str | None] = shutil.which
    output_of: Callable[[Sequence[str]], str | None] = output_of
    access: Callable[[Path, int], bool] = os.access
    group_of: Callable[[Path], str] = Path.group
    installed: Callable[[str], str | None] = installed_version
    nvml: Callable[[], NvidiaDriver] = ask_nvml
    family: Callable[[], set[int]] = our_family
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free

    def read(self, path: str) -> str:
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def found(self, path: str, pattern: str) -> str:
        """Returns the first group of what a pattern finds in a file, or nothing."""
        match = re.search(pattern, self.read(path), re.MULTILINE)
        return match[1] if match else ""

    @property
    def vendors(self) -> set[str]:
        nvidia = any(self.root.glob("dev/nvidia[0-9]*")) or (self.root / "proc/driver/nvidia").exists()
        return {*(["nvidia"] if nvidia else []), *(["amd"] if (self.root / "dev/kfd").exists() else [])}


Facts = Iterator[HealthItem]


def fact(name: str, ok: bool | None, seen: str, fix: str = "") -> HealthItem:
    return HealthItem(name=name, ok=ok, seen=seen, mend=fix)


def python_facts(machine: Machine) -> Facts:
    seen, oldest = (".".join(map(str, version)) for version in (machine.python, OLDEST_PYTHON))
    is_new = machine.python[:2] >= OLDEST_PYTHON
    yield fact("Python", is_new, seen, "" if is_new else f"make the environment with Python {oldest} or later")


def nvidia_facts(machine: Machine) -> Facts:
    if "nvidia" not in machine.vendors:
        return
    driver = machine.nvml()
    if driver.problem is not None:
        module = machine.found("proc/driver/nvidia/version", r"\b(\d+\.\d+(?:\.\d+)?)\b")
        seen = f"kernel module {module or 'not seen'}; NVML: {driver.error}"
        yield fact("NVIDIA driver", False, seen, DRIVER_FIXES[driver.problem])
        return
    yield fact("NVIDIA driver", True, f"{driver.version}, serves CUDA up to {driver.cuda}")
    yield _neighbours(driver.processes, "NVIDIA GPU", "CUDA_VISIBLE_DEVICES", machine)


def _neighbours(pids: Sequence[int], where: str, variable: str, machine: Machine) -> HealthItem:
    """Says whether other people's processes are on a GPU."""
    name, others = f"{where} is ours alone", sorted(set(pids) - machine.family())
    if not others:
        return fact(name, True, "no other process on it")
    # The driver counts processes as the host does; in a container those numbers name nobody, or somebody else.
    if any(not (machine.root / f"proc/{pid}").exists() for pid in others):
        seen = f"{len(others)} on it that cannot be told apart from inside this container"
        return fact(name, None, seen, "look at the GPU's processes on the host")
    seen = ", ".join(f"{pid} {machine.read(f'proc/{pid}/comm')}" for pid in others)
    fix = f"stop them, or choose a free GPU with {variable}: numbers taken beside them are not to be trusted"
    return fact(name, False, f"also used by {seen}", fix)


def amd_facts(machine: Machine) -> Facts:
    if "amd" not in machine.vendors:
        return
    yield fact("AMD driver", True, f"amdgpu {machine.read('sys/module/amdgpu/version') or 'of the kernel'}")
    if rocm := machine.read("opt/rocm/.info/version"):
        yield fact("ROCm", True, f"{rocm} in /opt/rocm")
    else:
        seen = "no /opt/rocm: torch brings its own libraries, the profilers are missing"
        yield fact("ROCm", None, seen, "install ROCm to profile with rocprof")
    nodes = [machine.root / "dev/kfd", *sorted(machine.root.glob("dev/dri/renderD*"))]
    closed = [node for node in nodes if not machine.access(node, os.R_OK | os.W_OK)]
    shown = ", ".join(f"/{node.relative_to(machine.root)}" for node in closed or nodes)
    if closed:
        groups = ",".join(sorted({machine.group_of(node) for node in closed}))
        devices = "in a container add --device /dev/kfd --device /dev/dri"
        fix = f"sudo usermod -aG {groups} $USER, then log in again; {devices}"
        yield fact("AMD permissions", False, f"may not open {shown}: they belong to {groups}", fix)
    else:
        yield fact("AMD permissions", True, f"may open {shown}")
    # The kernel lists each process that has the compute device open.
    pids = [int(entry.name) for entry in machine.root.glob("sys/class/kfd/kfd/proc/*") if entry.name.isdigit()]
    yield _neighbours(pids, "AMD GPU", "HIP_VISIBLE_DEVICES", machine)


def governor_facts(machine: Machine) -> Facts:
    files = machine.root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    seen = sorted({machine.read(str(path.relative_to(machine.root))) for path in files})
    if seen:  # virtual machines show none, and there is nothing to set
        is_steady = seen == ["performance"]
        fix = "for steadier CPU timings: sudo cpupower frequency-set -g performance"
        yield fact("CPU governor", is_steady or None, ", ".join(seen), "" if is_steady else fix)


def profiler_facts(machine: Machine) -> Facts:
    """Each profiler that is here, and those missing for the GPU that is here."""
    names = [name for name, (vendor, _) in PROFILERS.items() if vendor in machine.vendors or machine.which(name)]
    with ThreadPoolExecutor(max_workers=len(names) or 1) as pool:  # some are Python programs and take a second
        items = list(pool.map(lambda name: _profiler(name, machine), names))
    for item in items:
        yield item
        if item.name == "ncu" and item.ok and "nvidia" in machine.vendors:
            yield _counters(machine)


def _profiler(name: str, machine: Machine) -> HealthItem:
    path = machine.which(name)
    if path is None:
        return fact(name, None, "not on PATH", f"install {PROFILERS[name][1]} to use it")
    said = machine.output_of([path, "--version"])
    if said is None:
        return fact(name, False, f"{path} does not answer", f"run {path} --version to see why, or take it off PATH")
    version = re.search(r"\d+(?:\.\d+)+", said)
    return fact(name, True, f"{version[0] if version else 'version unknown'}, {path}")


def _counters(machine: Machine) -> HealthItem:
    name = "ncu permissions"
    if machine.found("proc/driver/nvidia/params", r"^RmProfilingAdminOnly:\s*(\d)") != "1":
        return fact(name, True, "hardware counters are open to every user")
    # Being root is not enough: a container's root lacks the capability that the driver asks for.
    if int(machine.found("proc/self/status", r"^CapEff:\s*([0-9a-f]+)") or "0", 16) & CAP_SYS_ADMIN:
        return fact(name, True, "hardware counters are for administrators, and this is one")
    return fact(
        name,
        False,
        "hardware counters are for administrators only (ERR_NVGPUCTRPERM)",
        "write 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' to /etc/modprobe.d/nvidia-profiling.conf, "
        "rebuild the initramfs and reboot; or run with sudo; or start the container with --cap-add=SYS_ADMIN",
    )


def extra_facts(machine: Machine) -> Facts:
    for package, (extra, purpose) in EXTRAS.items():
        if extra == "amd" and "amd" not in machine.vendors:
            continue
        if version := machine.installed(package):
            yield fact(package, True, version)
        else:
            yield fact(package, None, f"not installed: {purpose}", install_command(extra))


def history_facts(machine: Machine) -> Facts:
    elsewhere = f"set {VARIABLE} to another place"
    try:
        location = resolve(machine.environ.get(VARIABLE))
    except StoreError as error:
        yield fact("history", False, str(error), f"set {VARIABLE} to a path or a database URL")
        return
    file = file_of(location)
    if file is None:  # a server: opening it is the store's business
        yield fact("history", True, describe(location))
        return
    # A new history makes its folders: what counts is the nearest one that is there.
    folder = next(parent for parent in file.parents if parent.exists())
    is_writable = machine.access(folder, os.W_OK | os.X_OK) and (not file.exists() or machine.access(file, os.W_OK))
    if file.is_dir():
        yield fact("history", False, f"{file} is a folder", f"set {VARIABLE} to a file in it")
    elif not is_writable:
        yield fact("history", False, f"{file} cannot be written", f"make {folder} writable, or {elsewhere}")
    elif file.exists() and file.stat().st_size and not is_sqlite(file):
        yield fact("history", False, f"{file} is not a database", f"move it away, or {elsewhere}")
    else:
        yield fact("history", True, str(file))
    free = machine.free_bytes(folder)
    is_enough = free >= LEAST_FREE_BYTES
    fix = "" if is_enough else f"free some space, or set {VARIABLE} to another disk"
    yield fact("disk", is_enough, f"{format_bytes(free)} free at {folder}", fix)


BEFORE_TORCH = (python_facts, nvidia_facts, amd_facts)
AFTER_TORCH = (governor_facts, profiler_facts, extra_facts, history_facts)
"""The checks, from the ground up; between the two stands what the bench said of torch."""


def torch_facts(health: Health | None) -> Facts:
    if health is not None:
        yield from health.items
    elif find_spec("torch") is None:
        seen = "not installed: traces, reports and the history work, measuring needs it"
        yield fact("torch", None, seen, install_command("torch"))
    else:
        fix = "see why: python -c 'import torch, torchvision'"
        yield fact("torch", False, "no worker with torch could be started", fix)


def examine(health: Health | None, machine: Machine | None = None) -> list[HealthItem]:
    """Returns all facts about a machine, with what the bench said of torch and the devices."""
    machine = machine or Machine()
    return [
        *(item for check in BEFORE_TORCH for item in check(machine)),
        *torch_facts(health),
        *(item for check in AFTER_TORCH for item in check(machine)),
    ]


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
    return Result(
        verb="doctor",
        headline=Headline(template=f"{told}."),
        tables=(Table(name="facts", rows=tuple(map(_row, items)), columns=("item", "state", "seen", "fix")),),
        next="" if broken else "redline demo",
    )


STATES = {True: "ok", False: "broken", None: "absent"}


def _row(item: HealthItem) -> Row:
    return Row(facts={"item": item.name, "state": STATES[item.ok], "seen": item.seen, "fix": item.mend or None})
