"""This describes the environment of a measurement: versions, flags, variables and other processes. It also puts flags back afterwards."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from redline import __version__
from redline.bench.device.base import Device
from redline.model.errors import BenchError
from redline.model.record import Environment
from redline.system.telemetry import cpu_name

_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_TELLING_VARIABLES = re.compile(
    r"(TORCH|PYTORCH|OMP_|KMP_|GOMP_|MKL_|OPENBLAS_|ONEDNN_|DNNL_|CUDA_|CUBLAS_|CUDNN_|NVIDIA_TF32|HIP_|ROCR_|HSA_|"
    r"MIOPEN_|NCCL_|RCCL_|TRITON_|TORCHINDUCTOR_|LD_PRELOAD|MALLOC_)"
)
"""These variables may change what is measured, so the record of a run has them."""
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY", re.IGNORECASE)
"""Variables with such a name are never recorded, because records may be shared."""
GIT_TIMEOUT_S = 30.0
"""Git gets this long to answer, because a busy machine may take seconds to look through a checkout."""


def describe(device: Device) -> Environment:
    """Returns everything about this process and machine that may explain a figure."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = {
        "cuda.matmul.allow_tf32": matmul.allow_tf32,
        "cudnn.allow_tf32": cudnn.allow_tf32,
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "mkldnn.enabled": torch.backends.mkldnn.is_available(),
    }
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
        versions={**dict(_versions()), **device.versions()},
        flags={name: str(value) for name, value in flags.items()},
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


def _versions() -> Iterator[tuple[str, str]]:
    yield "torch", str(torch.__version__)
    for package in ("torchvision", "triton", "timm", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            yield package, metadata.version(package)


def _git_state() -> tuple[str | None, float | None, bool | None]:
    """Returns the commit of the user's own project, whose code was measured, when it was made, and whether files were changed since.

    All three are None outside of a repository.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True).stdout

    try:
        name, moment = git("-c", "log.showSignature=false", "log", "-1", "--format=%H %ct").split()
        return name, float(moment), bool(git("status", "--porcelain").strip())
    except (OSError, subprocess.SubprocessError):
        return None, None, None


def refuse_other_checkout(folder: str) -> None:
    """Fails if a module of the measured commit, which is checked out in `folder`, was imported from another checkout.

    An editable install or an absolute path leads to the person's own checkout, so that the same code would be measured twice.
    """
    own = _repository(Path(folder).resolve(), {})
    known: dict[Path, tuple[Path, Path] | None] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if own is None or not isinstance(file, str) or not os.path.isabs(file) or name.partition(".")[0] == "redline":
            continue
        path = Path(file).resolve()
        if {"site-packages", "dist-packages"} & set(path.parts):
            continue  # it is installed, perhaps into an environment inside the checkout
        other = _repository(path.parent, known)
        if other is not None and other[0] != own[0] and other[1] == own[1]:
            raise BenchError(
                "user",
                f"{name} was imported from {path}, another checkout than the one to measure: name its file by a relative "
                f"path, or give the other commit an environment of its own",
            )


def _repository(folder: Path, known: dict[Path, tuple[Path, Path] | None]) -> tuple[Path, Path] | None:
    """Returns the checkout that a folder is in, and the repository that it shares with other checkouts, or None outside of any."""
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
"""A worker that builds a model for a GPU uses at most this many threads. Several models are built at the same time, and if each has a
thread per processor, they stand in each other's way. On 16 processors Swin V2 took 0.7 s by itself and 8 s beside four others. With
4 threads it took 0.4 s."""


@contextmanager
def few_threads(device: Device) -> Iterator[None]:
    """Within this context, in which a model is built for a GPU, torch uses few threads. On a CPU the threads are measured too, and stay
    as they are."""
    threads = torch.get_num_threads()
    if device.is_accelerator:
        torch.set_num_threads(min(threads, HOST_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def remember_flags() -> Callable[[], None]:
    """Returns a function that puts back all the flags that a recipe or a model may change, as they are now."""
    matmul, cudnn, mha = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mha
    held = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark)
    dynamo: Any = sys.modules.get("torch._dynamo.config")
    versions_of_code = dynamo.cache_size_limit if dynamo is not None else None
    compiling = {
        "freezing": os.environ.get("TORCHINDUCTOR_FREEZING") == "1",
        "pre_grad_custom_pass": None,
        "post_grad_custom_post_pass": None,
        "reorder_for_peak_memory": os.environ.get("TORCHINDUCTOR_REORDER_FOR_PEAK_MEMORY", "1") == "1",
    }
    if (inductor := _inductor()) is not None:
        compiling = {name: getattr(inductor, name) for name in compiling}
    fast_attention = mha.get_fastpath_enabled()
    threads, grad, random = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_rng_state()

    def restore() -> None:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = held
        mha.set_fastpath_enabled(fast_attention)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        torch.set_rng_state(random)
        if (inductor := _inductor()) is not None:
            for name, value in compiling.items():
                setattr(inductor, name, value)
        if dynamo is not None and versions_of_code is not None:
            dynamo.cache_size_limit = versions_of_code

    return restore


def _inductor() -> Any:
    """Returns the compiler's settings if it has been loaded, otherwise None, because loading it costs more than a second."""
    return sys.modules.get("torch._inductor.config")
