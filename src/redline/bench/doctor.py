"""This is the bench's answer to `AskHealth`: what torch says about itself and about the machine under it.

`look` asks torch, and the rows of `FACTS` say what follows. Neither opens a GPU, because that would make a context on each, even on
one that others are using.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import re
import shlex
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from redline.bench.device.failure import DriverProblem, driver_problem
from redline.model.protocol import Health
from redline.model.record import DeviceInfo
from redline.system.health import Fact, Machine, judged, otherwise

# This program needs what inductor's CPU code needs: the C++ library, Python's headers, and OpenMP where it is used.
TINY_PROGRAM = """
#include <Python.h>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
extern "C" long tiny() { return (long)std::vector<int>(3).size(); }
"""
DRIVER_FIXES: dict[DriverProblem, str] = {
    "driver-too-old": "update the NVIDIA driver, or install a torch built for an older CUDA",
    "library-mismatch": "driver and its libraries are of different versions: reboot; in a container remove its own libcuda",
    "no-fabric-manager": "this machine joins its GPUs by NVSwitch: sudo systemctl start nvidia-fabricmanager",
    "other": "see what the driver says: nvidia-smi or rocminfo; in a container start it with its GPUs (--gpus all)",
}
HIDING = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""These variables choose GPUs. An empty list, or one that begins with -1, hides all of them."""


def _affinity() -> int:
    # Only Linux tells a process on which processors it may run.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Torch:
    """This holds what torch says of itself, and the machine that it runs on."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    unavailable: str = ""
    """Torch says this if no GPU can be used."""
    devices: tuple[DeviceInfo, ...] = ()
    arch_list: tuple[str, ...] = ()
    dnn: str | None = None
    """This is the version of cuDNN or MIOpen. It is None if the library could not be loaded."""
    triton: str | None = None
    torchvision: str | None = None
    torchvision_needs: str = ""
    """Torchvision's own metadata ask for this version of torch."""
    torchvision_error: str = ""
    threads: int = 1
    cpus: int = field(default_factory=_affinity)
    machine: Machine = field(default_factory=Machine)

    @property
    def build(self) -> str:
        kind = f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}" if self.hip else "CPU only"
        return f"torch {self.version}, {kind}"

    @property
    def served(self) -> bool:
        """True if this build computes on a card of the machine. Some machines have cards of both vendors, and one of them is enough."""
        return ("NVIDIA" if self.cuda else "AMD" if self.hip else "") in self.machine.vendors

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def hidden_by(self) -> str:
        values = {name: self.machine.environ.get(name, "0") for name in HIDING[0 if self.hip else 2 :]}
        return next((name for name, value in values.items() if not value.strip() or value.lstrip().startswith("-")), "")

    @property
    def driver_fix(self) -> str:
        return DRIVER_FIXES[driver_problem(self.unavailable)]

    @property
    def dnn_name(self) -> str:
        return "MIOpen" if self.hip else "cuDNN"

    @property
    def fits_torchvision(self) -> bool:
        # A build from source, such as 2.7.0a0+git1234, counts as the version that it will become.
        base = Version(self.version).base_version
        return Requirement(self.torchvision_needs or "torch").specifier.contains(base)

    @property
    def usable(self) -> int:
        """Returns how many CPUs this process may use. A control group may allow less time than its processors have."""
        quota = self.machine.read("sys/fs/cgroup/cpu.max").split()
        limit = int(quota[0]) / int(quota[1]) if len(quota) == 2 and quota[0].isdecimal() else math.inf
        return min(self.cpus, math.ceil(min(limit, self.cpus)))

    @cached_property
    def compiler(self) -> tuple[str, bool, str]:
        """Returns the compiler of torch.compile, whether it works, and the first error if it does not.

        A compiler that lacks a header fails minutes into a run, so it must compile one tiny file here.
        """
        name = self.machine.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        with tempfile.TemporaryDirectory(prefix="redline-") as folder:
            source = Path(folder, "tiny.cpp")
            source.write_text(TINY_PROGRAM, encoding="utf-8")
            system = {"darwin": ["-undefined", "dynamic_lookup"], "linux": ["-fopenmp"]}.get(sys.platform, [])
            flags = ["-std=c++17", "-shared", "-fPIC", *system, f"-I{sysconfig.get_path('include')}"]
            works, said = self.machine.output_of([*shlex.split(name), *flags, str(source), "-o", f"{folder}/tiny.so"])
        lines = said.strip().splitlines() or ["it said nothing"]
        return name, works, next((line for line in lines if "error" in line), lines[0])


GET_TORCH = "choose {0} at pytorch.org/get-started and reinstall torch and torchvision together"
REINSTALL = "reinstall them together, from one place: pip install --force-reinstall torch torchvision"
GET_COMPILER = "install a C++ compiler, Python's headers and OpenMP (sudo apt-get install g++ python3-dev libgomp1), or set CXX to a compiler that works"

FACTS = (
    Fact("torch", lambda it: it.served or not it.machine.vendors, True, "{0.build}"),
    Fact(
        "torch",
        otherwise,
        False,
        "{0.build}; this machine has an {0.machine.vendors[0]} GPU, which this build cannot use",
        GET_TORCH.format("the build for this GPU"),
    ),
    Fact("GPU", lambda it: it.devices, True, "{0.count} usable by torch"),
    Fact("GPU", lambda it: not it.served, None, "none that this torch could use; Redline measures on the CPU"),
    Fact("GPU", lambda it: it.hidden_by, False, "{0.hidden_by} hides every GPU", "unset {0.hidden_by}, or list device numbers in it"),
    Fact("GPU", otherwise, False, "{0.unavailable}", "{0.driver_fix}"),
    Fact("{0.dnn_name}", lambda it: it.dnn, True, "{0.dnn}"),
    Fact(
        "{0.dnn_name}",
        lambda it: it.devices,
        False,
        "does not load",
        "take other copies of {0.dnn_name} off LD_LIBRARY_PATH, or reinstall torch",
    ),
    Fact("Triton", lambda it: it.triton, True, "{0.triton}"),
    Fact("Triton", lambda it: it.devices, False, "not importable: torch.compile needs it on a GPU", "pip install triton; for ROCm reinstall torch"),
    Fact("Triton", otherwise, None, "not importable: torch.compile needs it on a GPU"),
    Fact("C++ compiler", lambda it: it.compiler[1], True, "{0.compiler[0]} compiles with Python's headers"),
    Fact("C++ compiler", otherwise, False, "{0.compiler[0]} fails, and torch.compile needs it: {0.compiler[2]}", GET_COMPILER),
    Fact("torchvision", lambda it: it.torchvision is None, False, "not installed", "pip install torchvision"),
    Fact("torchvision", lambda it: it.torchvision_error, False, "{0.torchvision} with torch {0.version}: {0.torchvision_error}", REINSTALL),
    Fact("torchvision", lambda it: it.fits_torchvision, True, "{0.torchvision}, matches torch"),
    Fact("torchvision", otherwise, False, "{0.torchvision} asks for {0.torchvision_needs}, but torch is {0.version}", REINSTALL),
    Fact(
        "threads",
        lambda it: it.threads > it.usable,
        False,
        "{0.threads} inside operators, on {0.usable} CPUs",
        "pass --threads {0.usable}: more threads than CPUs wait for each other",
    ),
    # Half of the logical CPUs is one thread per core, which is torch's own choice.
    Fact("threads", lambda it: it.threads * 2 >= it.usable, True, "{0.threads} inside operators, on {0.usable} CPUs"),
    Fact(
        "threads",
        otherwise,
        None,
        "{0.threads} inside operators, on {0.usable} CPUs",
        "pass --threads {0.usable}, or look at OMP_NUM_THREADS and MKL_NUM_THREADS",
    ),
)  # fmt: skip


def health(seen: Torch | None = None) -> Health:
    """Returns the facts about torch and about each GPU that it sees."""
    seen = seen or look()

    def runs(info: DeviceInfo) -> bool:
        return runs_on(info.capability or "", seen.arch_list)

    name, about = "{0.kind}:{0.index}", "{0.name}, {0.capability}"
    lacks = f"{about}; torch carries no code for it, only for {', '.join(seen.arch_list) or 'nothing'}"
    gpu = Fact(name, runs, True, about), Fact(name, otherwise, False, lacks, GET_TORCH.format("a build for this GPU"))
    items = [*judged(FACTS, seen), *(item for info in seen.devices for item in judged(gpu, info))]
    return Health(items=tuple(items), devices=seen.devices)


def runs_on(capability: str, arch_list: tuple[str, ...]) -> bool:
    """Returns whether code that was built for `arch_list` runs on a device of this capability, such as '9.0' or 'gfx942'."""
    if capability.startswith("gfx"):
        return capability in arch_list
    own = tuple(int(part) for part in capability.split("."))
    for arch in arch_list:
        if match := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch):
            built = int(match[2]), int(match[3])
            # Binary code runs on later minor revisions, PTX (compute_) runs on everything later, and 'a' code runs nowhere else.
            is_later = built < own and (match[1] == "compute" or built[0] == own[0])
            if built == own or (is_later and match[4] != "a"):
                return True
    return False


# The functions below ask torch.


def look() -> Torch:
    """Returns what torch says of itself. Whatever is broken is left out or told as a text, because a broken install must be described."""
    error, dnn, triton = "", None, None
    try:
        torch.cuda.init()
        error = "" if torch.cuda.device_count() else "no device is visible"
    except (RuntimeError, AssertionError) as raised:  # an AssertionError says that torch was built without CUDA
        error = str(raised).splitlines()[0]
    devices = () if error else tuple(map(_device, range(torch.cuda.device_count())))
    # A cuDNN on the library path may be older than the one torch was built with.
    with contextlib.suppress(RuntimeError):
        dnn = dotted(torch.backends.cudnn.version() or 0) if devices else None
    with contextlib.suppress(Exception):  # a broken install raises anything; which one does not matter here
        triton = str(importlib.import_module("triton").__version__)
    vision, needs, vision_error = _look_at_torchvision()
    return Torch(
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


def _device(index: int) -> DeviceInfo:
    about, is_amd = torch.cuda.get_device_properties(index), torch.version.hip is not None
    return DeviceInfo(
        kind="rocm" if is_amd else "cuda",
        index=index,
        name=about.name,
        memory_bytes=about.total_memory,
        capability=about.gcnArchName.partition(":")[0] if is_amd else f"{about.major}.{about.minor}",
        multiprocessors=about.multi_processor_count,
    )


def dotted(number: int) -> str | None:
    """Returns a library's number as a version: 92600 is cuDNN 9.26.0, 8902 is cuDNN 8.9.2, and 3002000 is MIOpen 3.2.0."""
    major, minor = (1_000_000, 1000) if number >= 1_000_000 else (10_000, 100) if number >= 10_000 else (1000, 100)
    return f"{number // major}.{number % major // minor}.{number % minor}" if number else None


def _look_at_torchvision() -> tuple[str | None, str, str]:
    """Returns torchvision's version, which torch it asks for, and why it does not work."""
    try:
        requirements = metadata.requires("torchvision") or []
    except metadata.PackageNotFoundError:
        return None, "", ""
    needs = next((text for text in requirements if re.match(r"torch\b(?!-)", text)), "")
    try:
        import torchvision

        loaded = hasattr(torch.ops.torchvision, "nms")
        return torchvision.__version__, needs, "" if loaded else "its compiled operators do not load"
    except Exception as error:  # one built for another torch raises anything from ImportError to RuntimeError
        return metadata.version("torchvision"), needs, str(error).splitlines()[0]
