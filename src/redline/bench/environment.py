"""Where a measurement ran (versions, flags, variables, other processes), and what torch says about itself and its devices."""

from __future__ import annotations

import importlib
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from redline import __version__
from redline.bench.device.base import Device
from redline.model.environment import DeviceInfo, Environment
from redline.model.errors import BenchError
from redline.system.telemetry import cpu_name

_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_TELLING_VARIABLES = re.compile(
    r"(TORCH|PYTORCH|OMP_|KMP_|GOMP_|MKL_|OPENBLAS_|ONEDNN_|DNNL_|CUDA_|CUBLAS_|CUDNN_|NVIDIA_TF32|HIP_|ROCR_|HSA_|"
    r"MIOPEN_|NCCL_|RCCL_|TRITON_|TORCHINDUCTOR_|LD_PRELOAD|MALLOC_)"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY", re.IGNORECASE)
GIT_TIMEOUT_S = 30.0
"""A busy machine may take seconds to look through a checkout."""


def describe(device: Device) -> Environment:
    commit, committed_at, dirty = _git_state()
    return Environment(
        device=device.info(),
        hostname=socket.gethostname(),
        platform=platform.platform(),
        python=platform.python_version(),
        redline=__version__,
        cpu=cpu_name(),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(),
        affinity=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        governor=_GOVERNOR.read_text().strip() if _GOVERNOR.exists() else None,
        memory_bytes=psutil.virtual_memory().total,
        threads=torch.get_num_threads(),
        interop_threads=torch.get_num_interop_threads(),
        versions={**_versions(), **device.versions()},
        flags=torch_flags(),
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if _TELLING_VARIABLES.match(name) and not _SECRET.search(name)
        },
        git_commit=commit,
        git_dirty=dirty,
        git_committed_at=committed_at,
        neighbours=device.neighbours(),
    )


def torch_flags() -> dict[str, str]:
    return {
        "cuda.matmul.allow_tf32": str(torch.backends.cuda.matmul.allow_tf32),
        "cudnn.allow_tf32": str(torch.backends.cudnn.allow_tf32),
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
        "cudnn.deterministic": str(torch.backends.cudnn.deterministic),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "mkldnn.enabled": str(torch.backends.mkldnn.is_available()),
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"torch": str(torch.__version__)}
    for package in ("torchvision", "triton", "timm", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _git_state() -> tuple[str | None, float | None, bool | None]:
    """The commit of the user's own project, whose code was measured; when it was made; whether files were changed since."""
    try:
        asked = ["git", "-c", "log.showSignature=false", "log", "-1", "--format=%H %ct"]
        commit = subprocess.run(asked, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
        if commit.returncode != 0:
            return None, None, None
        looked = ["git", "status", "--porcelain"]
        changes = subprocess.run(looked, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None, None, None
    name, moment = commit.stdout.split()
    return name, float(moment), bool(changes.stdout.strip())


def refuse_other_checkout(folder: str) -> None:
    """Fail where a module of the measured commit, which is checked out in `folder`, was imported from another checkout of it.

    An editable install or an absolute path leads to the person's own checkout: the same code would be measured twice.
    """
    own = _repository(Path(folder).resolve(), {})
    known: dict[Path, tuple[Path, Path] | None] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if own is None or not isinstance(file, str) or not os.path.isabs(file) or name.partition(".")[0] == "redline":
            continue
        path = Path(file).resolve()
        if {"site-packages", "dist-packages"} & set(path.parts):
            continue  # installed, perhaps into an environment inside the checkout
        other = _repository(path.parent, known)
        if other is not None and other[0] != own[0] and other[1] == own[1]:
            raise BenchError(
                "user",
                f"{name} was imported from {path}, another checkout than the one to measure: name its file by a relative "
                f"path, or give the other commit an environment of its own",
            )


def _repository(folder: Path, known: dict[Path, tuple[Path, Path] | None]) -> tuple[Path, Path] | None:
    """The checkout that a folder is in, and the repository that it shares with other checkouts; None outside of any."""
    if folder not in known:
        entry = folder / ".git"
        if entry.is_dir():
            known[folder] = folder, entry.resolve()
        elif entry.is_file():
            store = (folder / entry.read_text().partition("gitdir:")[2].strip()).resolve()
            known[folder] = folder, store.parent.parent if store.parent.name == "worktrees" else store
        else:
            known[folder] = None if folder.parent == folder else _repository(folder.parent, known)
    return known[folder]


HOST_THREADS = 4
"""For a worker that builds a model for a GPU. Several are built at the same time, and with a thread per processor each they
stand in each other's way: Swin V2 took 0.7 s by itself on 16 processors and 8 s beside four others; with 4 threads 0.4 s."""


@contextmanager
def few_threads(device: Device) -> Iterator[None]:
    """While a model is built for a GPU. On a CPU the threads are what is measured, and stay as they are."""
    threads = torch.get_num_threads()
    if device.is_accelerator:
        torch.set_num_threads(min(threads, HOST_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def remember_flags() -> Callable[[], None]:
    """Returns what puts everything back."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    held = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark)
    inductor = _inductor()
    dynamo: Any = sys.modules.get("torch._dynamo.config")
    versions_of_code = dynamo.cache_size_limit if dynamo is not None else None
    compiling = {
        "freezing": os.environ.get("TORCHINDUCTOR_FREEZING") == "1",
        "pre_grad_custom_pass": None,
        "post_grad_custom_post_pass": None,
        "reorder_for_peak_memory": os.environ.get("TORCHINDUCTOR_REORDER_FOR_PEAK_MEMORY", "1") == "1",
    }
    if inductor is not None:
        compiling = {name: getattr(inductor, name) for name in compiling}
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    threads, grad, random = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_rng_state()

    def restore() -> None:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = held
        torch.backends.mha.set_fastpath_enabled(fast_attention)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        torch.set_rng_state(random)
        if (now := _inductor()) is not None:
            for name, value in compiling.items():
                setattr(now, name, value)
        if dynamo is not None and versions_of_code is not None:
            dynamo.cache_size_limit = versions_of_code

    return restore


def _inductor() -> Any:
    """The compiler's settings where it has been loaded: loading it costs more than a second."""
    return sys.modules.get("torch._inductor.config")


@dataclass(frozen=True)
class TorchDevice:
    info: DeviceInfo
    bf16: bool
    tf32: bool


@dataclass(frozen=True)
class TorchView:
    """All that is asked of torch, so that rules need none."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    unavailable: str = ""
    """What torch says when no GPU can be used."""
    devices: tuple[TorchDevice, ...] = ()
    arch_list: tuple[str, ...] = ()
    dnn: str | None = None
    """Version of cuDNN or MIOpen; None when it could not be loaded."""
    triton: str | None = None
    torchvision: str | None = None
    torchvision_needs: str = ""
    """What torchvision's own metadata asks of torch."""
    torchvision_error: str = ""
    threads: int = 1

    @property
    def build(self) -> str:
        return f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}" if self.hip else "CPU only"


def look() -> TorchView:
    import torch

    error = _why_no_gpu()
    devices = () if error else tuple(_look_at_device(index) for index in range(torch.cuda.device_count()))
    vision, needs, vision_error = _look_at_torchvision()
    return TorchView(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        unavailable=error,
        devices=devices,
        arch_list=tuple(torch.cuda.get_arch_list()),
        dnn=_dnn_version() if devices else None,
        triton=_version_of("triton"),
        torchvision=vision,
        torchvision_needs=needs,
        torchvision_error=vision_error,
        threads=torch.get_num_threads(),
    )


def _why_no_gpu() -> str:
    import torch

    try:
        torch.cuda.init()
        return "" if torch.cuda.device_count() else "no device is visible"
    except (RuntimeError, AssertionError) as error:  # AssertionError: built without CUDA
        return str(error).splitlines()[0]


def _look_at_device(index: int) -> TorchDevice:
    import torch

    # Properties only: opening a device would make a context on every GPU, also on one that others are using.
    about = torch.cuda.get_device_properties(index)
    amd = torch.version.hip is not None
    capability = about.gcnArchName.partition(":")[0] if amd else f"{about.major}.{about.minor}"
    info = DeviceInfo(
        kind="rocm" if amd else "cuda",
        index=index,
        name=about.name,
        memory_bytes=about.total_memory,
        capability=capability,
        multiprocessors=about.multi_processor_count,
    )
    # torch answers for the current device only.
    ampere = about.major >= 8
    return TorchDevice(info, bf16=amd or ampere, tf32=capability.startswith(("gfx94", "gfx95")) if amd else ampere)


def _dnn_version() -> str | None:
    import torch

    try:
        number = torch.backends.cudnn.version()
    except RuntimeError:  # a cuDNN on the library path that is older than the one torch was built with
        return None
    return None if number is None else dotted(number)


def dotted(number: int) -> str:
    """92600 is cuDNN 9.26.0, 8902 is cuDNN 8.9.2, 3002000 is MIOpen 3.2.0."""
    major, minor = (1_000_000, 1000) if number >= 1_000_000 else (10_000, 100) if number >= 10_000 else (1000, 100)
    return f"{number // major}.{number % major // minor}.{number % minor}"


def _version_of(module: str) -> str | None:
    try:
        return str(importlib.import_module(module).__version__)
    except Exception:  # a broken install raises anything; which one does not matter here
        return None


def _look_at_torchvision() -> tuple[str | None, str, str]:
    import torch

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
