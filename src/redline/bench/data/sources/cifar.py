"""CIFAR-10 is read from its standard folder, `cifar-10-batches-py`, as torchvision lays it out."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision.datasets import CIFAR10
from torchvision.datasets.utils import check_integrity

from redline.bench.data.source import DATA, DataSource, ImageData, InMemory
from redline.model.errors import BenchError, SpecError
from redline.model.note import note
from redline.model.spec import DataSpec, WorkloadSpec

CLASSES, SIZE = 10, 32
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PER_IMAGE = 3 * SIZE * SIZE
HOW_TO_GET = (
    "with a network, --download fetches it there (170 MB); without one, copy the folder cifar-10-batches-py from another "
    "machine, or train on synthetic-learnable"
)
_HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}
"""All that the published files need to be read."""


class Cifar10(DataSource):
    def check(self, spec: DataSpec, workload: WorkloadSpec) -> None:
        if workload.classes not in (None, CLASSES):
            raise SpecError(f"cifar10 has {CLASSES} classes, got classes {workload.classes}")
        if spec.folder is None:
            raise SpecError(f"cifar10 needs the folder it lies in (--folder DIR): {HOW_TO_GET}")
        root = Path(spec.folder).expanduser()
        if not spec.download and not _batches_folder(root).is_dir():
            below = next(iter(sorted(root.glob(f"*/{CIFAR10.base_folder}"))), None) if root.is_dir() else None
            where = f"it lies in {below.parent}: name that" if below else HOW_TO_GET
            raise SpecError(f"no {CIFAR10.base_folder} in {root}: {where}")
        if not spec.download:
            _require_files(_batches_folder(root))

    def open(self, spec: DataSpec, workload: WorkloadSpec) -> ImageData:
        assert spec.folder is not None
        root = Path(spec.folder).expanduser()
        folder = _batches_folder(root)
        if spec.download and not folder.is_dir():
            _download(root)
            folder = _batches_folder(root)
        _require_files(folder)
        published = all(check_integrity(folder / name, md5) for name, md5 in (*CIFAR10.train_list, *CIFAR10.test_list))
        return ImageData(
            name="cifar10",
            train=_read_all(folder, [name for name, _ in CIFAR10.train_list]),
            validation=_read_all(folder, [name for name, _ in CIFAR10.test_list]),
            classes=CLASSES,
            size=SIZE,
            mean=MEAN,
            std=STD,
            notes=()
            if published
            else (note("other-data", f"not the published CIFAR-10 in {folder}: checksums differ"),),
        )


def _batches_folder(root: Path) -> Path:
    """The person may name the folder itself, or the one it lies in."""
    return root if root.name == CIFAR10.base_folder else root / CIFAR10.base_folder


def _require_files(folder: Path) -> None:
    missing = [name for name, _ in (*CIFAR10.train_list, *CIFAR10.test_list) if not (folder / name).is_file()]
    if missing:
        raise SpecError(f"{folder} has no {missing[0]}: CIFAR-10 is not whole there; {HOW_TO_GET}")


def _download(root: Path) -> None:
    try:
        os.makedirs(root, exist_ok=True)
        CIFAR10(root=str(root), download=True)
    except Exception as error:  # urllib, tarfile and torchvision each have their own
        raise BenchError("user", f"cannot download CIFAR-10 to {root}: {error}; {HOW_TO_GET}") from error


def _read_all(folder: Path, names: list[str]) -> InMemory:
    parts = [_read(folder / name) for name in names]
    return InMemory(torch.cat([images for images, _ in parts]), torch.cat([classes for _, classes in parts]))


def _read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    content = _unpickled(path)
    data = content.get("data") if isinstance(content, dict) else None
    labels = content.get("labels") if isinstance(content, dict) else None
    is_sound = (
        isinstance(data, np.ndarray)
        and data.dtype == np.uint8
        and data.ndim == 2
        and data.shape[1] == PER_IMAGE
        and isinstance(labels, list)
        and len(labels) == len(data)
        and all(isinstance(label, int) and 0 <= label < CLASSES for label in labels)
    )
    if not is_sound:
        raise BenchError(
            "user", f"{path} is not a batch of CIFAR-10: expected data (N, {PER_IMAGE}) in 8 bits and N labels below 10"
        )
    assert data is not None
    assert labels is not None
    return torch.from_numpy(data.reshape(-1, 3, SIZE, SIZE).copy()), torch.tensor(labels)


class _Unpickler(pickle.Unpickler):
    """This reads arrays, lists and texts, and refuses to call anything else: a pickle from elsewhere may hold any program."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch of CIFAR-10 does")
        return super().find_class(module, name)


def _unpickled(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _Unpickler(file, encoding="latin1").load()
    except OSError as error:
        raise BenchError("user", f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to mean
        said = str(error) or type(error).__name__
        raise BenchError("user", f"{path} is damaged or cut short: {said}; fetch CIFAR-10 again") from error


DATA.register("cifar10")(Cifar10())
