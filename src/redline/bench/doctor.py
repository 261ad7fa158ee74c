"""This tells what torch says about itself and about the machine under it: the bench's answer to `AskHealth`.

`look` asks torch and `Machine` reads files. Each check of the table `CHECKS` is a function of what they saw.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from redline.bench.device.failure import DriverProblem, driver_problem
from redline.model.protocol import Health, HealthItem
from redline.model.record import DeviceInfo
from redline.model.units import format_bytes

GET_TORCH = "choose {what} at pytorch.org/get-started and reinstall torch and torchvision together"
COMPILE_TIMEOUT_S = 60.0
# What inductor's CPU code needs: the C++ library, Python's headers, OpenMP where it is used.
TINY_PROGRAM = """
#include <Python.h>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
extern "C" long tiny() { return (long)std::vector<int>(3).size(); }
"""
DRIVER_FIXES: dict[DriverProblem, str] = {
    "driver-too-old": "update the NVIDIA driver, or install a torch built for an older CUDA than {cuda}",
    "library-mismatch": "driver and its libraries are of different versions: reboot; in a container remove its own libcuda",
    "no-fabric-manager": "this machine joins its GPUs by NVSwitch: sudo systemctl start nvidia-fabricmanager",
    "other": "see what the driver says: {tool}",
}


# What is seen


@dataclass(frozen=True)
class TorchDevice:
    info: DeviceInfo
    bf16: bool
    tf32: bool


@dataclass(frozen=True)
class TorchView:
    """A view holds what torch says, so that rules need no torch."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    unavailable: str = ""
    """This is what torch says when no GPU can be used."""
    devices: tuple[TorchDevice, ...] = ()
    arch_list: tuple[str, ...] = ()
    dnn: str | None = None
    """The version of cuDNN or MIOpen; None when it could not be loaded."""
    triton: str | None = None
    torchvision: str | None = None
    torchvision_needs: str = ""
    """This is what torchvision's own metadata asks of torch."""
    torchvision_error: str = ""
    threads: int = 1


def look() -> TorchView:
    error, dnn = "", None
    try:
        torch.cuda.init()
        error = "" if torch.cuda.device_count() else "no device is visible"
    except (RuntimeError, AssertionError) as raised:  # AssertionError: built without CUDA
        error = str(raised).splitlines()[0]
    devices = () if error else tuple(_look_at_device(index) for index in range(torch.cuda.device_count()))
    try:
        number = torch.backends.cudnn.version() if devices else None
        dnn = None if number is None else dotted(number)
    except RuntimeError:
        pass  # a cuDNN on the library path that is older than the one torch was built with
    vision, needs, vision_error = _look_at_torchvision()
    try:
        triton = str(importlib.import_module("triton").__version__)
    except Exception:  # a broken install raises anything; which one does not matter here
        triton = None
    return TorchView(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        unavailable=error,
        devices=devices,
        arch_list=tuple(torch.cuda.get_arch_list()),
        dnn=dnn,
        triton=triton,
        torchvision=vision,
        torchvision_needs=needs,
        torchvision_error=vision_error,
        threads=torch.get_num_threads(),
    )


def _look_at_device(index: int) -> TorchDevice:
    # Properties only: opening a device would make a context on every GPU, also on one that others are using.
    about = torch.cuda.get_device_properties(index)
    is_amd, is_ampere = torch.version.hip is not None, about.major >= 8
    capability = about.gcnArchName.partition(":")[0] if is_amd else f"{about.major}.{about.minor}"
    info = DeviceInfo(
        kind="rocm" if is_amd else "cuda",
        index=index,
        name=about.name,
        memory_bytes=about.total_memory,
        capability=capability,
        multiprocessors=about.multi_processor_count,
    )
    # torch answers for the current device only.
    tf32 = capability.startswith(("gfx94", "gfx95")) if is_amd else is_ampere
    return TorchDevice(info, bf16=is_amd or is_ampere, tf32=tf32)


def dotted(number: int) -> str:
    """92600 is cuDNN 9.26.0, 8902 is cuDNN 8.9.2, 3002000 is MIOpen 3.2.0."""
    major, minor = (1_000_000, 1000) if number >= 1_000_000 else (10_000, 100) if number >= 10_000 else (1000, 100)
    return f"{number // major}.{number % major // minor}.{number % minor}"


def _look_at_torchvision() -> tuple[str | None, str, str]:
    try:
        requirements = metadata.requires("torchvision") or []
    except metadata.PackageNotFoundError:
        return None, "", ""
    needs = next((text for text in requirements if re.match(r"torch\b(?!-)", text)), "")
    try:
        import torchvision

        loaded = hasattr(torch.ops.torchvision, "nms")
        return torchvision.__version__, needs, "" if loaded else "its compiled operators do not load"
    except Exception as error:  # built for another torch: anything from ImportError to RuntimeError
        return metadata.version("torchvision"), needs, str(error).splitlines()[0]


def _affinity() -> int:
    # Only Linux tells a process where it may run.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Machine:
    """A machine offers the few ways in which rules look at it; tests hand in a faked one."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    access: Callable[[Path, int], bool] = os.access
    cpus: int = field(default_factory=_affinity)

    def read(self, path: str | Path) -> str:
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def nvidia(self) -> bool:
        nodes = any(self.root.glob("dev/nvidia[0-9]*")) or (self.root / "proc/driver/nvidia").exists()
        return nodes or self._is_on_bus("0x10de")

    def amd(self) -> bool:
        # Servers without a GPU may have /dev/kfd too; their topology then lists CPU nodes only.
        nodes = list(self.root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"))
        has_gpu = any(re.search(r"^simd_count [1-9]", self.read(node), re.MULTILINE) for node in nodes)
        return (self.root / "dev/kfd").exists() and (has_gpu or not nodes)

    def _is_on_bus(self, vendor: str) -> bool:
        """True if a display controller or accelerator of this vendor is on the PCI bus, with a driver or without."""
        devices = self.root.glob("sys/bus/pci/devices/*")
        kinds = [self.read(device / "class")[:4] for device in devices if self.read(device / "vendor") == vendor]
        return "0x03" in kinds or "0x12" in kinds

    def cpu_limit(self) -> float | None:
        """Returns how many cores' worth of time the control groups allow, from this process's own up to the top; None: no limit."""
        limits = []
        for line in self.read("proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            # Inside a container the path may be the host's and not exist here: the top then tells.
            for base in dict.fromkeys(("sys/fs/cgroup", f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu")):
                folder = Path(base, path.lstrip("/"))
                for level in (folder, *folder.parents):
                    quota = self.read(level / "cpu.max").split() or [
                        self.read(level / f"cpu.cfs_{name}_us") for name in ("quota", "period")
                    ]
                    if (
                        level.is_relative_to(base)
                        and len(quota) == 2
                        and all(map(str.isdigit, quota))
                        and int(quota[1])
                    ):
                        limits.append(int(quota[0]) / int(quota[1]))
        return min(limits, default=None)


# What is judged


def health(machine: Machine | None = None, view: TorchView | None = None) -> Health:
    machine, view = machine or Machine(), view or look()
    items = tuple(item for check in CHECKS for item in check(view, machine))
    return Health(items=items, devices=tuple(device.info for device in view.devices))


def well(name: str, seen: str) -> HealthItem:
    return HealthItem(name=name, ok=True, seen=seen)


def lacking(name: str, seen: str, mend: str = "") -> HealthItem:
    """Something is absent or could be better, and Redline works without it."""
    return HealthItem(name=name, ok=None, seen=seen, mend=mend)


def broken(name: str, seen: str, mend: str) -> HealthItem:
    return HealthItem(name=name, ok=False, seen=seen, mend=mend)


def check_build(view: TorchView, machine: Machine) -> Iterator[HealthItem]:
    here = [name for name, is_there in (("CUDA", machine.nvidia()), ("ROCm", machine.amd())) if is_there]
    serves, version = ("CUDA", view.cuda) if view.cuda else ("ROCm", view.hip)
    seen = f"torch {view.version}, {f'{serves} {version}' if version else 'CPU only'}"
    # Machines with a GPU of each vendor exist; a build for either of them is fine.
    if not here or (version and serves in here):
        yield well("torch", seen)
    else:
        vendor = {"CUDA": "an NVIDIA", "ROCm": "an AMD"}[here[0]]
        unused = f"{seen}; this machine has {vendor} GPU, which this build cannot use"
        yield broken("torch", unused, GET_TORCH.format(what=here[0]))


def check_gpu(view: TorchView, machine: Machine) -> Iterator[HealthItem]:
    if view.devices:
        yield well("GPU", f"{len(view.devices)} usable by torch")
    elif (machine.nvidia() and view.cuda) or (machine.amd() and view.hip):
        yield broken("GPU", *_why_hidden(view, machine))
    else:
        yield lacking("GPU", "none that this torch could use; Redline measures on the CPU")


def _why_hidden(view: TorchView, machine: Machine) -> tuple[str, str]:
    """Returns the cause and the fix; the surest sign comes first."""
    variables = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if view.hip else ()
    for name in (*variables, "CUDA_VISIBLE_DEVICES"):
        value = machine.environ.get(name)
        # A list ends at its first invalid entry, so a leading -1 hides everything.
        if value is not None and (not value.strip() or value.lstrip().startswith("-")):
            return f"{name}={value!r} hides every GPU", f"unset {name}, or list device numbers in it"
    patterns = ("dev/kfd", "dev/dri/renderD*") if view.hip else ("dev/nvidia[0-9]*", "dev/nvidiactl", "dev/nvidia-uvm")
    nodes = sorted(node for pattern in patterns for node in machine.root.glob(pattern))
    closed = [f"/{node.relative_to(machine.root)}" for node in nodes if not machine.access(node, os.R_OK | os.W_OK)]
    if closed:
        groups = "the groups that own them (often render and video)" if view.hip else "the group that owns them"
        mend = f"add yourself to {groups}: sudo usermod -aG GROUP $USER; log in again"
        return f"no permission to open {', '.join(closed)}", mend
    if view.cuda and not (machine.root / "proc/driver/nvidia").exists():
        mend = "install the NVIDIA driver; inside a container start it with --gpus all"
        return "an NVIDIA GPU is on the bus but its driver is not loaded", mend
    fix = DRIVER_FIXES[driver_problem(view.unavailable)]
    return view.unavailable, fix.format(cuda=view.cuda, tool="rocminfo" if view.hip else "nvidia-smi")


def check_devices(view: TorchView, _: Machine) -> Iterator[HealthItem]:
    for info in (device.info for device in view.devices):
        name, seen = f"{info.kind}:{info.index}", f"{info.name}, {info.capability}, {format_bytes(info.memory_bytes)}"
        if runs_on(info.capability or "", view.arch_list):
            yield well(name, seen)
        else:
            without = f"{seen}; torch carries no code for it (built for {', '.join(view.arch_list) or 'nothing'})"
            yield broken(name, without, GET_TORCH.format(what="a build that lists this GPU"))


def runs_on(capability: str, arch_list: tuple[str, ...]) -> bool:
    """True if code built for `arch_list` runs on a device of this capability ('9.0' or 'gfx942')."""
    if capability.startswith("gfx"):
        return capability in arch_list
    own = tuple(int(part) for part in capability.split("."))
    for arch in arch_list:
        if match := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch):
            built = int(match[2]), int(match[3])
            # Binary code runs on later minor revisions, PTX (compute_) on everything later, 'a' code nowhere else.
            is_later = built < own and (match[1] == "compute" or built[0] == own[0])
            if built == own or (is_later and match[4] != "a"):
                return True
    return False


def check_number_formats(view: TorchView, machine: Machine) -> Iterator[HealthItem]:
    for name, attribute in (("bf16", "bf16"), ("TF32", "tf32")) if view.devices else ():
        without = [
            f"{device.info.kind}:{device.info.index}" for device in view.devices if not getattr(device, attribute)
        ]
        if without:
            yield lacking(name, f"not native on {', '.join(without)}: expect no gain there")
        else:
            yield well(name, "native on every GPU")
    known = r"\b(?:avx512_bf16|amx_bf16|avx512_fp16|amx_fp16|bf16|fphp)\b"
    flags = sorted(set(re.findall(known, machine.read("proc/cpuinfo"))))
    name, none = "half precision on the CPU", "no such instructions: fp16 and bf16 recipes run slower than fp32 here"
    yield well(name, ", ".join(flags)) if flags else lacking(name, none)


def check_gpu_libraries(view: TorchView, _: Machine) -> Iterator[HealthItem]:
    if view.devices:
        name = "MIOpen" if view.hip else "cuDNN"
        mend = f"take other copies of {name} off LD_LIBRARY_PATH, or reinstall torch"
        yield well(name, view.dnn) if view.dnn else broken(name, "does not load", mend)
    mend = "pip install triton" if view.cuda else "reinstall torch: its ROCm build brings its own Triton"
    missing = "Triton", "not importable: torch.compile needs it on a GPU", mend
    yield well("Triton", view.triton) if view.triton else (broken if view.devices else lacking)(*missing)


def check_compiler(_: TorchView, machine: Machine) -> Iterator[HealthItem]:
    """A compiler that is there but lacks a header fails minutes into a run, so one tiny file is compiled."""
    command = shlex.split(machine.environ.get("CXX", "")) or ["clang++" if sys.platform == "darwin" else "g++"]
    name, path = "C++ compiler", shutil.which(command[0], path=machine.environ.get("PATH"))
    if path is None:
        mend = "sudo apt-get install g++, or set CXX to a C++ compiler"
        yield broken(name, f"{command[0]} not found: torch.compile needs it", mend)
    elif not (error := _compile_error([path, *command[1:]])):
        yield well(name, f"{path} compiles with Python's headers")
    else:
        mend = "fix the compiler, or set CXX to another one"
        if "Python.h" in error:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            mend = f"install Python's headers: sudo apt-get install python{version}-dev (or python3-devel)"
        elif "omp" in error:
            mend = "install OpenMP for this compiler (libgomp or libomp-dev), or set CXX to g++"
        yield broken(name, f"{path} fails: {error}", mend)


def _compile_error(compiler: list[str]) -> str:
    """Returns the first error line of compiling a tiny shared library; empty when it works."""
    with tempfile.TemporaryDirectory(prefix="redline-") as folder:
        source = Path(folder, "tiny.cpp")
        source.write_text(TINY_PROGRAM, encoding="utf-8")
        system = {"darwin": ["-undefined", "dynamic_lookup"], "linux": ["-fopenmp"]}.get(sys.platform, [])
        flags = ["-std=c++17", "-O0", "-shared", "-fPIC", *system, f"-I{sysconfig.get_path('include')}"]
        command = [*compiler, *flags, str(source), "-o", str(Path(folder, "tiny.so"))]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {COMPILE_TIMEOUT_S:.0f} s"
        except OSError as error:
            return str(error)
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return "" if done.returncode == 0 else next((line for line in lines if "error" in line), lines[0])


def check_torchvision(view: TorchView, _: Machine) -> Iterator[HealthItem]:
    name, own = "torchvision", view.torchvision
    # A build of one's own, such as 2.7.0a0+git1234, counts as the version that it will be.
    fits = Requirement(view.torchvision_needs or "torch").specifier.contains(Version(view.version).base_version)
    mend = "reinstall them together, from one place: pip install --force-reinstall torch torchvision"
    if own is None:
        yield broken(name, "not installed", "pip install torchvision")
    elif view.torchvision_error:
        yield broken(name, f"{own} with torch {view.version}: {view.torchvision_error}", mend)
    elif not fits:
        yield broken(name, f"{own} asks for {view.torchvision_needs}, but torch is {view.version}", mend)
    else:
        yield well(name, f"{own}, matches torch")


def check_threads(view: TorchView, machine: Machine) -> Iterator[HealthItem]:
    limit = machine.cpu_limit()
    usable = min(machine.cpus, math.ceil(limit)) if limit else machine.cpus
    allowed = f"{machine.cpus} CPUs" + (f", limited to {limit:g} by its control group" if limit else "")
    seen = f"{view.threads} inside operators on {allowed}"
    if view.threads > usable:
        yield broken("threads", seen, f"pass --threads {usable}: more threads than CPUs wait for each other")
    elif view.threads * 2 >= usable:  # half of the logical CPUs is one thread per physical core, torch's own choice
        yield well("threads", seen)
    else:
        names = [
            f"{name}={machine.environ[name]}"
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
            if name in machine.environ
        ]
        cause = f" ({', '.join(names)})" if names else ""
        yield lacking("threads", seen + cause, f"pass --threads {usable} to use them all")


CHECKS: tuple[Callable[[TorchView, Machine], Iterator[HealthItem]], ...] = (
    check_build, check_gpu, check_devices, check_number_formats, check_gpu_libraries, check_compiler, check_torchvision,
    check_threads,
)  # fmt: skip
