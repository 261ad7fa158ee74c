"""What is wrong with this machine and how to fix it: everything that can be seen without torch.

`ok` is True where all is well, False where something is broken, None where something is absent or could be better
and Redline works without it.
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

from redline.api.workspace import Workspace, use
from redline.model.errors import MissingExtra, StoreError, install_command
from redline.model.questions import AskHealth, Health, HealthItem
from redline.model.units import format_bytes
from redline.store.location import VARIABLE, describe, file_of, resolve

OLDEST_PYTHON = (3, 11)
LEAST_FREE_BYTES = 2**30
TOOL_TIMEOUT_S = 10.0
SQLITE = b"SQLite format 3\x00"
CAP_SYS_ADMIN = 1 << 21

NVIDIA_PROFILERS = {"nsys": "Nsight Systems", "ncu": "Nsight Compute"}
AMD_PROFILERS = {
    "rocprof": "the ROCm package rocprofiler",
    "rocprofv2": "the ROCm package rocprofiler",
    "rocprofv3": "the ROCm package rocprofiler-sdk",
    "rocprof-compute": "the ROCm package rocprofiler-compute",
}
EXTRAS = {
    "timm": ("timm", "models as timm:NAME"),
    "transformers": ("hf", "models as hf:NAME"),
    "torchao": ("quant", "the steps int8 and fp8"),
    "onnxscript": ("onnx", "the step onnx"),  # onnxruntime has other names on other devices
}
AMD_EXTRAS = {"amdsmi": ("amd", "power, clocks and temperature of AMD GPUs")}


NvmlProblem = Literal["package-missing", "library-missing", "version-mismatch", "other"]
MENDING: dict[NvmlProblem, str] = {
    "package-missing": "pip install nvidia-ml-py",
    "library-missing": "install the driver's libraries (libnvidia-ml.so.1); start a container with --gpus all",
    "version-mismatch": "the driver was updated while loaded: reboot, or reload the nvidia kernel modules",
    "other": "nvidia-smi tells more; reload or reinstall the driver",
}


@dataclass(frozen=True)
class NvidiaDriver:
    """What NVML answered."""

    version: str = ""
    cuda: str = ""
    """The newest CUDA that this driver serves."""
    processes: tuple[int, ...] = ()
    problem: NvmlProblem | None = None
    error: str = ""
    """What the driver's library said about the problem."""


def ask_nvml() -> NvidiaDriver:
    try:
        import pynvml
    except ImportError:
        return NvidiaDriver(problem="package-missing", error="the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NvidiaDriver(problem=_problem(pynvml, error), error=str(error))
    try:
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        pids = {process.pid for handle in handles for process in _processes_on(pynvml, handle)}
        version = pynvml.nvmlSystemGetDriverVersion()
        text = version.decode() if isinstance(version, bytes) else str(version)
        return NvidiaDriver(version=text, cuda=f"{cuda // 1000}.{cuda % 1000 // 10}", processes=tuple(sorted(pids)))
    except pynvml.NVMLError as error:
        return NvidiaDriver(problem=_problem(pynvml, error), error=str(error))
    finally:
        pynvml.nvmlShutdown()


def _problem(nvml: Any, error: Any) -> NvmlProblem:
    """By the code that NVML returns."""
    known: dict[int, NvmlProblem] = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "library-missing",
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND: "library-missing",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "version-mismatch",
    }
    return known.get(error.value, "other")


def _processes_on(nvml: Any, handle: Any) -> list[Any]:
    try:
        return list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:  # some cards, and MIG, do not tell
        return []


def output_of(command: Sequence[str]) -> str | None:
    """What a command says; None when it fails or does not answer."""
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


def free_bytes_at(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def our_family() -> set[int]:
    """This process, those it started and those that started it: none of them is a stranger on the GPU."""
    me = psutil.Process()
    return {me.pid, *(one.pid for one in (*me.children(recursive=True), *me.parents()))}


@dataclass(frozen=True)
class Machine:
    """Every way in which the doctor looks at a machine; tests hand in a faked one."""

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
    free_bytes: Callable[[Path], int] = free_bytes_at

    def read(self, path: str) -> str:
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def nvidia(self) -> bool:
        return any(self.root.glob("dev/nvidia[0-9]*")) or (self.root / "proc/driver/nvidia").exists()

    def amd(self) -> bool:
        return (self.root / "dev/kfd").exists()


def examine(bench_health: Health | None, machine: Machine | None = None) -> list[HealthItem]:
    """All items, from the ground up: Python, drivers, what the bench said, tools, extras, the location of the history."""
    machine = machine or Machine()
    return [
        python_item(machine),
        *nvidia_items(machine),
        *amd_items(machine),
        *bench_items(bench_health),
        *governor_items(machine),
        *profiler_items(machine),
        *extra_items(machine),
        *history_items(machine),
    ]


def python_item(machine: Machine) -> HealthItem:
    seen = ".".join(str(part) for part in machine.python)
    if machine.python[:2] >= OLDEST_PYTHON:
        return HealthItem(name="Python", ok=True, seen=seen)
    oldest = ".".join(str(part) for part in OLDEST_PYTHON)
    return HealthItem(name="Python", ok=False, seen=seen, mend=f"make the environment with Python {oldest} or later")


def bench_items(bench_health: Health | None) -> Sequence[HealthItem]:
    if bench_health is not None:
        return bench_health.items
    if find_spec("torch") is None:
        seen = "not installed: traces, reports and the history work, measuring needs it"
        return [HealthItem(name="torch", ok=None, seen=seen, mend=install_command("torch"))]
    mend = "see why: python -c 'import torch, torchvision'"
    return [HealthItem(name="torch", ok=False, seen="no worker with torch could be started", mend=mend)]


def nvidia_items(machine: Machine) -> Iterator[HealthItem]:
    if not machine.nvidia():
        return
    driver = machine.nvml()
    if driver.problem is not None:
        seen = f"{_kernel_module(machine)}; NVML: {driver.error}"
        yield HealthItem(name="NVIDIA driver", ok=False, seen=seen, mend=MENDING[driver.problem])
        return
    yield HealthItem(name="NVIDIA driver", ok=True, seen=f"{driver.version}, serves CUDA up to {driver.cuda}")
    yield _strangers(driver.processes, "NVIDIA GPU", "CUDA_VISIBLE_DEVICES", machine)


def _kernel_module(machine: Machine) -> str:
    match = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", machine.read("proc/driver/nvidia/version"))
    return f"kernel module {match[0]}" if match else "kernel module not seen"


def _strangers(pids: Sequence[int], where: str, variable: str, machine: Machine) -> HealthItem:
    name = f"{where} is ours alone"
    others = sorted(set(pids) - machine.family())
    if not others:
        return HealthItem(name=name, ok=True, seen="no other process on it")
    # The driver counts processes as the host does; in a container those numbers name nobody, or somebody else.
    if any(not (machine.root / f"proc/{pid}").exists() for pid in others):
        seen = f"{len(others)} on it that cannot be told apart from inside this container"
        return HealthItem(name=name, ok=None, seen=seen, mend="look at the GPU's processes on the host")
    seen = ", ".join(f"{pid} {machine.read(f'proc/{pid}/comm')}" for pid in others)
    mend = f"stop them, or choose a free GPU with {variable}: numbers taken beside them are not to be trusted"
    return HealthItem(name=name, ok=False, seen=f"also used by {seen}", mend=mend)


def amd_items(machine: Machine) -> Iterator[HealthItem]:
    if not machine.amd():
        return
    version = machine.read("sys/module/amdgpu/version")
    yield HealthItem(name="AMD driver", ok=True, seen=f"amdgpu {version or 'of the kernel'}")
    rocm = machine.read("opt/rocm/.info/version")
    if rocm:
        yield HealthItem(name="ROCm", ok=True, seen=f"{rocm} in /opt/rocm")
    else:
        seen = "no /opt/rocm: torch brings its own libraries, the profilers are missing"
        yield HealthItem(name="ROCm", ok=None, seen=seen, mend="install ROCm to profile with rocprof")
    yield _amd_permission(machine)
    # The kernel lists each process that has the compute device open.
    pids = [int(entry.name) for entry in machine.root.glob("sys/class/kfd/kfd/proc/*") if entry.name.isdigit()]
    yield _strangers(pids, "AMD GPU", "HIP_VISIBLE_DEVICES", machine)


def _amd_permission(machine: Machine) -> HealthItem:
    nodes = [machine.root / "dev/kfd", *sorted(machine.root.glob("dev/dri/renderD*"))]
    closed = [node for node in nodes if not machine.access(node, os.R_OK | os.W_OK)]
    shown = ", ".join(f"/{node.relative_to(machine.root)}" for node in closed or nodes)
    if not closed:
        return HealthItem(name="AMD permissions", ok=True, seen=f"may open {shown}")
    groups = ",".join(sorted({machine.group_of(node) for node in closed}))
    return HealthItem(
        name="AMD permissions",
        ok=False,
        seen=f"may not open {shown}: they belong to {groups}",
        mend=f"sudo usermod -aG {groups} $USER, then log in again; in a container add --device /dev/kfd --device /dev/dri",
    )


def governor_items(machine: Machine) -> Iterator[HealthItem]:
    found = {
        machine.read(str(path.relative_to(machine.root)))
        for path in machine.root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    }
    if found == {"performance"}:
        yield HealthItem(name="CPU governor", ok=True, seen="performance")
    elif found:  # virtual machines show none, and there is nothing to set
        mend = "for steadier CPU timings: sudo cpupower frequency-set -g performance"
        yield HealthItem(name="CPU governor", ok=None, seen=", ".join(sorted(found)), mend=mend)


def profiler_items(machine: Machine) -> Iterator[HealthItem]:
    """Each profiler that is here, and those missing for the GPU that is here."""
    wanted = {**(NVIDIA_PROFILERS if machine.nvidia() else {}), **(AMD_PROFILERS if machine.amd() else {})}
    names = [name for name in (*NVIDIA_PROFILERS, *AMD_PROFILERS) if name in wanted or machine.which(name)]
    with ThreadPoolExecutor(max_workers=len(names) or 1) as pool:  # some are Python programs and take a second
        items = pool.map(lambda name: _profiler_item(name, wanted.get(name, ""), machine), names)
    for item in items:
        yield item
        if item.name == "ncu" and item.ok and machine.nvidia():
            yield _counter_item(machine)


def _profiler_item(name: str, source: str, machine: Machine) -> HealthItem:
    path = machine.which(name)
    if path is None:
        return HealthItem(name=name, ok=None, seen="not on PATH", mend=f"install {source} to use it")
    said = machine.output_of([path, "--version"])
    if said is None:
        mend = f"run {path} --version to see why, or take it off PATH"
        return HealthItem(name=name, ok=False, seen=f"{path} does not answer", mend=mend)
    version = re.search(r"\d+(?:\.\d+)+", said)
    return HealthItem(name=name, ok=True, seen=f"{version[0] if version else 'version unknown'}, {path}")


def _counter_item(machine: Machine) -> HealthItem:
    name = "ncu permissions"
    restricted = re.search(r"^RmProfilingAdminOnly:\s*1", machine.read("proc/driver/nvidia/params"), re.MULTILINE)
    if not restricted:
        return HealthItem(name=name, ok=True, seen="hardware counters are open to every user")
    # Being root is not it: a container's root lacks the capability that the driver asks for.
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", machine.read("proc/self/status"), re.MULTILINE)
    if effective and int(effective[1], 16) & CAP_SYS_ADMIN:
        return HealthItem(name=name, ok=True, seen="hardware counters are for administrators, and this is one")
    return HealthItem(
        name=name,
        ok=False,
        seen="hardware counters are for administrators only (ERR_NVGPUCTRPERM)",
        mend="write 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' to /etc/modprobe.d/nvidia-profiling.conf, "
        "rebuild the initramfs and reboot; or run with sudo; or start the container with --cap-add=SYS_ADMIN",
    )


def extra_items(machine: Machine) -> Iterator[HealthItem]:
    for package, (extra, purpose) in {**EXTRAS, **(AMD_EXTRAS if machine.amd() else {})}.items():
        version = machine.installed(package)
        if version:
            yield HealthItem(name=package, ok=True, seen=version)
        else:
            mend = install_command(extra)
            yield HealthItem(name=package, ok=None, seen=f"not installed: {purpose}", mend=mend)


def _may_be_a_history(file: Path) -> bool:
    """Whether it is not there yet, is empty, or begins as databases of SQLite do."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(SQLITE)) in (b"", SQLITE)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def history_items(machine: Machine) -> Iterator[HealthItem]:
    try:
        location = resolve(machine.environ.get(VARIABLE))
    except StoreError as error:
        yield HealthItem(name="history", ok=False, seen=str(error), mend=f"set {VARIABLE} to a path or a database URL")
        return
    file = file_of(location)
    if file is None:  # a server: opening it is the store's business
        yield HealthItem(name="history", ok=True, seen=describe(location))
        return
    # A new history makes its folders: what counts is the nearest one that is there.
    folder = next(parent for parent in file.parents if parent.exists())
    writable = machine.access(folder, os.W_OK | os.X_OK) and (not file.exists() or machine.access(file, os.W_OK))
    if file.is_dir():
        seen, mend = f"{file} is a folder", f"set {VARIABLE} to a file in it"
    elif not writable:
        seen, mend = f"{file} cannot be written", f"make {folder} writable, or set {VARIABLE} to another place"
    elif not _may_be_a_history(file):
        seen, mend = f"{file} is not a database", f"move it away, or set {VARIABLE} to another place"
    else:
        seen, mend = str(file), ""
    yield HealthItem(name="history", ok=not mend, seen=seen, mend=mend)
    free = machine.free_bytes(folder)
    enough = free >= LEAST_FREE_BYTES
    mend = "" if enough else f"free some space, or set {VARIABLE} to another disk"
    yield HealthItem(name="disk", ok=enough, seen=f"{format_bytes(free)} free at {folder}", mend=mend)


def doctor(*, workspace: Workspace | None = None) -> list[HealthItem]:
    """What is wrong with this machine and how to fix it."""
    with use(workspace) as opened:
        try:
            health = opened.ask(AskHealth(), Health)
        except MissingExtra:
            health = None
        return examine(health)
