"""What torch says about itself and about the machine under it: the bench's answer to `AskHealth`.

First look (`look` asks torch, `Machine` reads files), then judge: every rule is a plain function of what was seen.
"""

from __future__ import annotations

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
from pathlib import Path

from redline.bench.device.failure import DriverProblem, driver_problem
from redline.bench.environment import TorchDevice, TorchView, look
from redline.model.questions import Health, HealthItem
from redline.model.units import format_bytes

GET_TORCH = "choose {what} at pytorch.org/get-started and reinstall torch and torchvision together"
COMPILE_TIMEOUT_S = 60.0
OPENMP = ("-fopenmp",) if sys.platform == "linux" else ()

# What inductor's CPU code needs: the C++ library, Python's headers, OpenMP where it is used.
TINY_PROGRAM = """
#include <Python.h>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
extern "C" long tiny() { return (long)std::vector<int>(3).size(); }
"""


@dataclass(frozen=True)
class Machine:
    """The few ways in which rules look at the machine; tests hand in a faked one."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    access: Callable[[Path, int], bool] = os.access
    cpus: int = field(default_factory=lambda: len(_affinity()))

    def nvidia(self) -> bool:
        nodes = any(self.root.glob("dev/nvidia[0-9]*"))
        return nodes or (self.root / "proc/driver/nvidia").exists() or self.on_bus("0x10de")

    def amd(self) -> bool:
        # Servers without a GPU may have /dev/kfd too; their topology then lists CPU nodes only.
        if not (self.root / "dev/kfd").exists():
            return False
        nodes = list(self.root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"))
        return not nodes or any(re.search(r"^simd_count [1-9]", _read(node), re.MULTILINE) for node in nodes)

    def on_bus(self, vendor: str) -> bool:
        """Whether a display controller or accelerator of this vendor is on the PCI bus, driver or not."""
        for device in self.root.glob("sys/bus/pci/devices/*"):
            if _read(device / "vendor") == vendor and _read(device / "class")[:4] in ("0x03", "0x12"):
                return True
        return False

    def cpu_limit(self) -> float | None:
        """Cores' worth of time that control groups allow; None without a limit."""
        return min(_quotas(self.root), default=None)


def health(machine: Machine | None = None, view: TorchView | None = None) -> Health:
    machine = machine or Machine()
    view = view or look()
    items = (
        judge_build(view, machine),
        judge_gpu(view, machine),
        *(judge_device(device, view.arch_list) for device in view.devices),
        *judge_number_formats(view, machine),
        *judge_gpu_libraries(view),
        judge_compiler(machine),
        judge_torchvision(view),
        judge_threads(view, machine),
    )
    return Health(items=items, devices=tuple(device.info for device in view.devices))


def judge_build(view: TorchView, machine: Machine) -> HealthItem:
    here = [name for name, found in (("CUDA", machine.nvidia()), ("ROCm", machine.amd())) if found]
    serves = "CUDA" if view.cuda else "ROCm" if view.hip else None
    seen = f"torch {view.version}, {view.build}"
    # Machines with a GPU of each vendor exist; a build for either of them is fine.
    if not here or serves in here:
        return HealthItem(name="torch", ok=True, seen=seen)
    vendor = {"CUDA": "an NVIDIA", "ROCm": "an AMD"}[here[0]]
    return HealthItem(
        name="torch",
        ok=False,
        seen=f"{seen}; this machine has {vendor} GPU, which this build cannot use",
        mend=GET_TORCH.format(what=here[0]),
    )


def judge_gpu(view: TorchView, machine: Machine) -> HealthItem:
    if view.devices:
        return HealthItem(name="GPU", ok=True, seen=f"{len(view.devices)} usable by torch")
    here = (machine.nvidia() and view.cuda) or (machine.amd() and view.hip)
    if not here:
        return HealthItem(name="GPU", ok=None, seen="none that this torch could use; Redline measures on the CPU")
    seen, mend = _why_hidden(view, machine)
    return HealthItem(name="GPU", ok=False, seen=seen, mend=mend)


def _why_hidden(view: TorchView, machine: Machine) -> tuple[str, str]:
    """The cause and the mend, the surest sign first."""
    variables = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if view.hip else ()
    for name in (*variables, "CUDA_VISIBLE_DEVICES"):
        value = machine.environ.get(name)
        # A list ends at its first invalid entry, so a leading -1 hides everything.
        if value is not None and (not value.strip() or value.lstrip().startswith("-")):
            return f"{name}={value!r} hides every GPU", f"unset {name}, or list device numbers in it"
    closed = [node for node in _device_nodes(view, machine) if not machine.access(node, os.R_OK | os.W_OK)]
    if closed:
        names = ", ".join(f"/{node.relative_to(machine.root)}" for node in closed)
        groups = "the groups that own them (often render and video)" if view.hip else "the group that owns them"
        return f"no permission to open {names}", f"add yourself to {groups}: sudo usermod -aG GROUP $USER; log in again"
    if view.cuda and not (machine.root / "proc/driver/nvidia").exists():
        mend = "install the NVIDIA driver; inside a container start it with --gpus all"
        return "an NVIDIA GPU is on the bus but its driver is not loaded", mend
    return view.unavailable, _mend_for(driver_problem(view.unavailable), view)


def _device_nodes(view: TorchView, machine: Machine) -> list[Path]:
    patterns = ("dev/kfd", "dev/dri/renderD*") if view.hip else ("dev/nvidia[0-9]*", "dev/nvidiactl", "dev/nvidia-uvm")
    return sorted(node for pattern in patterns for node in machine.root.glob(pattern))


def _mend_for(problem: DriverProblem, view: TorchView) -> str:
    if problem == "driver-too-old":
        return f"update the NVIDIA driver, or install a torch built for an older CUDA than {view.cuda}"
    if problem == "library-mismatch":
        return "driver and its libraries are of different versions: reboot; in a container remove its own libcuda"
    if problem == "no-fabric-manager":
        return "this machine joins its GPUs by NVSwitch: sudo systemctl start nvidia-fabricmanager"
    return f"see what the driver says: {'rocminfo' if view.hip else 'nvidia-smi'}"


def judge_device(device: TorchDevice, arch_list: tuple[str, ...]) -> HealthItem:
    info = device.info
    seen = f"{info.name}, {info.capability}, {format_bytes(info.memory_bytes)}"
    name = f"{info.kind}:{info.index}"
    if runs_on(info.capability or "", arch_list):
        return HealthItem(name=name, ok=True, seen=seen)
    built = ", ".join(arch_list) or "nothing"
    return HealthItem(
        name=name,
        ok=False,
        seen=f"{seen}; torch carries no code for it (built for {built})",
        mend=GET_TORCH.format(what="a build that lists this GPU"),
    )


def runs_on(capability: str, arch_list: tuple[str, ...]) -> bool:
    """Whether code built for `arch_list` runs on a device of this capability ('9.0' or 'gfx942')."""
    if capability.startswith("gfx"):
        return capability in arch_list
    major, minor = (int(part) for part in capability.split("."))
    for arch in arch_list:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if match is None:
            continue
        built = int(match[2]), int(match[3])
        exact, same_major = built == (major, minor), built[0] == major and built[1] <= minor
        # Binary code runs on later minor revisions, PTX (compute_) on everything later, 'a' code nowhere else.
        if exact or (match[4] != "a" and (same_major or (match[1] == "compute" and built < (major, minor)))):
            return True
    return False


def judge_number_formats(view: TorchView, machine: Machine) -> Iterator[HealthItem]:
    for name, has in (("bf16", lambda device: device.bf16), ("TF32", lambda device: device.tf32)):
        without = [f"{device.info.kind}:{device.info.index}" for device in view.devices if not has(device)]
        if without:
            yield HealthItem(name=name, ok=None, seen=f"not native on {', '.join(without)}: expect no gain there")
        elif view.devices:
            yield HealthItem(name=name, ok=True, seen="native on every GPU")
    flags = set(
        re.findall(r"\b(?:avx512_bf16|amx_bf16|avx512_fp16|amx_fp16|bf16|fphp)\b", _read(machine.root / "proc/cpuinfo"))
    )
    if flags:
        yield HealthItem(name="half precision on the CPU", ok=True, seen=", ".join(sorted(flags)))
    else:
        seen = "no such instructions: fp16 and bf16 recipes run slower than fp32 here"
        yield HealthItem(name="half precision on the CPU", ok=None, seen=seen)


def judge_gpu_libraries(view: TorchView) -> Iterator[HealthItem]:
    if view.devices:
        name = "MIOpen" if view.hip else "cuDNN"
        mend = f"take other copies of {name} off LD_LIBRARY_PATH, or reinstall torch"
        yield HealthItem(name=name, ok=bool(view.dnn), seen=view.dnn or "does not load", mend="" if view.dnn else mend)
    if view.triton:
        yield HealthItem(name="Triton", ok=True, seen=view.triton)
    else:
        ok = False if view.devices else None
        mend = "pip install triton" if view.cuda else "reinstall torch: its ROCm build brings its own Triton"
        yield HealthItem(name="Triton", ok=ok, seen="not importable: torch.compile needs it on a GPU", mend=mend)


def judge_compiler(machine: Machine) -> HealthItem:
    """A compiler that is there but lacks a header fails minutes into a run, so one tiny file is compiled."""
    command = shlex.split(machine.environ.get("CXX", "")) or ["clang++" if sys.platform == "darwin" else "g++"]
    name = "C++ compiler"
    found = shutil.which(command[0], path=machine.environ.get("PATH"))
    if found is None:
        mend = "sudo apt-get install g++, or set CXX to a C++ compiler"
        return HealthItem(name=name, ok=False, seen=f"{command[0]} not found: torch.compile needs it", mend=mend)
    error = _compile_error([found, *command[1:]])
    if not error:
        return HealthItem(name=name, ok=True, seen=f"{found} compiles with Python's headers")
    if "Python.h" in error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        mend = f"install Python's headers: sudo apt-get install python{version}-dev (or python3-devel)"
    elif "omp" in error:
        mend = "install OpenMP for this compiler (libgomp or libomp-dev), or set CXX to g++"
    else:
        mend = "fix the compiler, or set CXX to another one"
    return HealthItem(name=name, ok=False, seen=f"{found} fails: {error}", mend=mend)


def _compile_error(compiler: list[str]) -> str:
    """The first error line of compiling a tiny shared library; empty when it works."""
    with tempfile.TemporaryDirectory(prefix="redline-") as folder:
        source = Path(folder, "tiny.cpp")
        source.write_text(TINY_PROGRAM, encoding="utf-8")
        undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        flags = ["-std=c++17", "-O0", "-shared", "-fPIC", *OPENMP, *undefined, f"-I{sysconfig.get_path('include')}"]
        try:
            done = subprocess.run(
                [*compiler, *flags, str(source), "-o", str(Path(folder, "tiny.so"))],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMPILE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {COMPILE_TIMEOUT_S:.0f} s"
        except OSError as error:
            return str(error)
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return "" if done.returncode == 0 else next((line for line in lines if "error" in line), lines[0])


def judge_torchvision(view: TorchView) -> HealthItem:
    mend = "reinstall them together, from one place: pip install --force-reinstall torch torchvision"
    if view.torchvision is None:
        return HealthItem(name="torchvision", ok=False, seen="not installed", mend="pip install torchvision")
    if view.torchvision_error:
        seen = f"{view.torchvision} with torch {view.version}: {view.torchvision_error}"
        return HealthItem(name="torchvision", ok=False, seen=seen, mend=mend)
    if not satisfies(view.version, view.torchvision_needs):
        seen = f"{view.torchvision} asks for {view.torchvision_needs}, but torch is {view.version}"
        return HealthItem(name="torchvision", ok=False, seen=seen, mend=mend)
    return HealthItem(name="torchvision", ok=True, seen=f"{view.torchvision}, matches torch")


def satisfies(version: str, requirement: str) -> bool:
    """Whether a version meets the `==` and `>=` of a requirement such as 'torch (==2.6.0)'."""
    have = _release(version)
    for relation, wanted in re.findall(r"(==|>=)\s*(\d+(?:\.\d+)*)", requirement):
        want = _release(wanted)
        if have < want or (relation == "==" and have[: len(want)] != want):
            return False
    return True


def judge_threads(view: TorchView, machine: Machine) -> HealthItem:
    limit = machine.cpu_limit()
    usable = min(machine.cpus, math.ceil(limit)) if limit else machine.cpus
    allowed = f"{machine.cpus} CPUs" + (f", limited to {limit:g} by its control group" if limit else "")
    seen = f"{view.threads} inside operators on {allowed}"
    if view.threads > usable:
        mend = f"pass --threads {usable}: more threads than CPUs wait for each other"
        return HealthItem(name="threads", ok=False, seen=seen, mend=mend)
    # Half of the logical CPUs is one thread per physical core, which is torch's own choice.
    if view.threads * 2 < usable:
        names = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in machine.environ]
        cause = f" ({', '.join(f'{name}={machine.environ[name]}' for name in names)})" if names else ""
        return HealthItem(name="threads", ok=None, seen=seen + cause, mend=f"pass --threads {usable} to use them all")
    return HealthItem(name="threads", ok=True, seen=seen)


def _quotas(root: Path) -> Iterator[float]:
    """Every CPU quota on the way from this process's control group up to the top, in cores."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Inside a container the path may be the host's and not exist here: the top then tells.
        for base in (root / "sys/fs/cgroup", root / "sys/fs/cgroup" / controllers, root / "sys/fs/cgroup/cpu"):
            folder = base / path.lstrip("/")
            for level in (folder, *folder.parents):
                if level.is_relative_to(base):
                    yield from _quota(level)


def _quota(folder: Path) -> Iterator[float]:
    words = _read(folder / "cpu.max").split() or [_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:
        yield int(words[0]) / int(words[1])


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].strip(".").split(".") if part)  # type: ignore[index]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _affinity() -> set[int]:
    # Only Linux tells a process where it may run.
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
