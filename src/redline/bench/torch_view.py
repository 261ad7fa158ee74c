"""What torch says about itself and its devices, asked once and kept as plain data: rules about it need no torch."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib import metadata

from redline.record import DeviceInfo


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
