"""These sources give pictures with classes: made-up ones, in which classes can be told apart or not, a folder per class, and
CIFAR-10 from its files."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.datasets.utils import check_integrity
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from redline.bench.data.source import DATA, DataSource, ImageData, InMemory, Samples
from redline.model.errors import BenchError, SpecError
from redline.model.note import note
from redline.model.spec import DataSpec, WorkloadSpec

SIZE, CLASSES = 32, 10
TRAIN_SAMPLES, VAL_SAMPLES = 10_240, 2_048
"""These sizes are used if none are given."""
GRATINGS = 3
"""The texture of a class is made of this many waves."""
SIGNAL, NOISE = 0.08, 0.22
"""These are the standard deviations of texture and noise in a pixel that goes from 0 to 1."""
MEAN, STD = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)
CHUNK = 1024
DATA_SEED = 20_260
"""Data are the same whatever the seed of the training: seeds of trainings can then be compared."""


class Synthetic(DataSource):
    """This source gives random pictures with random classes: as much work as real ones, and nothing to learn."""

    def open(self, spec: DataSpec, workload: WorkloadSpec) -> ImageData:
        size, classes = workload.image_size or SIZE, workload.classes or CLASSES
        parts: dict[str, Any] = {}
        for part, count in _counts(spec).items():
            random = torch.Generator().manual_seed(DATA_SEED + (part == "validation"))
            images = torch.randint(0, 256, (count, 3, size, size), generator=random, dtype=torch.uint8)
            parts[part] = InMemory(images, torch.randint(0, classes, (count,), generator=random))
        return ImageData(
            name="synthetic", classes=classes, size=size, mean=MEAN, std=(0.29, 0.29, 0.29), random_labels=True, **parts
        )


class SyntheticLearnable(DataSource):
    """This source gives textures under noise: a class has waves of its own, and a picture its own phases.

    Nothing is at a fixed place, so a model must learn the texture and not the picture; the held-out part has new phases
    and new noise. Mirror images and shifts keep the class.
    """

    def open(self, spec: DataSpec, workload: WorkloadSpec) -> ImageData:
        size, classes = workload.image_size or SIZE, workload.classes or CLASSES
        waves, colours = _textures(classes)
        parts: dict[str, Any] = {}
        for part, count in _counts(spec).items():
            random = torch.Generator().manual_seed(DATA_SEED + 2 + (part == "validation"))
            labels = torch.arange(count) % classes
            labels = labels[torch.randperm(count, generator=random)]
            images = torch.cat([_pictures(chunk, waves, colours, size, random) for chunk in labels.split(CHUNK)])
            parts[part] = InMemory(images, labels)
        return ImageData(name="synthetic-learnable", classes=classes, size=size, mean=MEAN, std=STD, **parts)


def _counts(spec: DataSpec) -> dict[str, int]:
    return {"train": spec.train_samples or TRAIN_SAMPLES, "validation": spec.val_samples or VAL_SAMPLES}


def _textures(classes: int) -> tuple[Tensor, Tensor]:
    """Returns for each class the waves' vectors (classes, GRATINGS, 2), in radians per pixel, and their colours."""
    random = torch.Generator().manual_seed(DATA_SEED)
    angles = math.pi * torch.rand(classes, GRATINGS, generator=random)
    periods = 3.0 + 9.0 * torch.rand(classes, GRATINGS, generator=random)
    vectors = torch.stack((angles.cos(), angles.sin()), dim=-1) * (2 * math.pi / periods)[..., None]
    colours = torch.randn(classes, GRATINGS, 3, generator=random)
    return vectors, colours / colours.norm(dim=(1, 2), keepdim=True)


def _pictures(labels: Tensor, waves: Tensor, colours: Tensor, size: int, random: torch.Generator) -> Tensor:
    phases = 2 * math.pi * torch.rand(len(labels), GRATINGS, generator=random)
    steps = torch.arange(size, dtype=torch.float32)
    rows = waves[labels][..., 0, None] * steps
    columns = waves[labels][..., 1, None] * steps + phases[..., None]
    gratings = (rows[..., :, None] + columns[..., None, :]).cos()
    # A cosine has variance 1/2, and the colours of a class have length 1 over all channels and waves.
    texture = torch.einsum("nghw,ngc->nchw", gratings, colours[labels]) * (SIGNAL * math.sqrt(2 * 3))
    noise = NOISE * torch.randn(texture.shape, generator=random)
    return ((0.5 + texture + noise).clamp(0, 1) * 255).round().to(torch.uint8)


DATA.register("synthetic")(Synthetic())
DATA.register("synthetic-learnable")(SyntheticLearnable())


FOLDER_SIZE = 224
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HELD_OUT = 0.1
PARTS = ("train", "val")
"""These are the folders of the two parts. Without them a tenth is held out."""


class ImageFolders(DataSource):
    def check(self, spec: DataSpec, workload: WorkloadSpec) -> None:
        if spec.folder is None:
            raise SpecError("imagefolder needs the folder it lies in: --folder DIR with one folder per class")
        if spec.download:
            raise SpecError("an image folder cannot be downloaded: leave out --download")
        root = Path(spec.folder).expanduser()
        if not root.is_dir():
            raise SpecError(f"no such folder: {root}")
        found = [part for part in PARTS if (root / part).is_dir()]
        if len(found) == 1:
            missing = PARTS[1 - PARTS.index(found[0])]
            raise SpecError(f"{root} has {found[0]} but no {missing}: give both, or one folder per class")

    def open(self, spec: DataSpec, workload: WorkloadSpec) -> ImageData:
        assert spec.folder is not None
        train: Samples
        validation: Samples
        root, size = Path(spec.folder).expanduser(), workload.image_size or FOLDER_SIZE
        if (root / PARTS[0]).is_dir():
            listed = [_listed(root / part) for part in PARTS]
            if listed[0].classes != listed[1].classes:
                raise SpecError(f"{root}: train and val have different classes")
            train, validation = (Pictures(part.samples, size) for part in listed)
            classes = len(listed[0].classes)
        else:
            every = _listed(root)
            train, validation = _split(every.samples, size)
            classes = len(every.classes)
        if workload.classes is not None and workload.classes < classes:
            raise SpecError(f"{root} has {classes} classes, got classes {workload.classes}")
        return ImageData(
            name="imagefolder",
            train=train,
            validation=validation,
            classes=workload.classes or classes,
            size=size,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        )


class Pictures(Samples):
    """This part reads files when they are asked for. It scales the shorter side and cuts out the middle."""

    def __init__(self, files: Sequence[tuple[str, int]], size: int) -> None:
        self._files = list(files)
        self._shape = v2.Compose([v2.Resize(size, antialias=True), v2.CenterCrop(size)])

    def __len__(self) -> int:
        return len(self._files)

    def fetch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        images = torch.stack([self._picture(self._files[index][0]) for index in indices])
        return images, torch.tensor([self._files[index][1] for index in indices])

    def identity(self) -> bytes:
        """Returns names and sizes, because reading the pictures would find a damaged one before anybody trains on it."""
        files = ((Path(path), label) for path, label in self._files)
        return "\n".join(f"{path.name} {path.stat().st_size} {label}" for path, label in files).encode()

    def _picture(self, path: str) -> Tensor:
        try:
            with Image.open(path) as picture:
                pixels: Tensor = F.pil_to_tensor(self._shape(_eight_bits(picture).convert("RGB")))
        except Exception as error:  # what a damaged file makes a decoder raise has no common name
            raise ValueError(f"cannot read the image {path}: {error}") from error
        return pixels


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Takes the upper eight of 16 bits per pixel: PIL's own conversion makes everything above 255 white."""
    if picture.mode == "F":
        raise ValueError("its pixels are floats of an unknown range; store them in 8 or 16 bits")
    if not picture.mode.startswith("I"):
        return picture
    values = np.asarray(picture)
    if values.min() < 0 or values.max() >= 2**16:
        raise ValueError("its pixels are 32-bit numbers of an unknown range; store them in 8 or 16 bits")
    return Image.fromarray((values // 256).astype(np.uint8))


def _listed(folder: Path) -> ImageFolder:
    try:
        listed = ImageFolder(str(folder), allow_empty=True)
    except FileNotFoundError:
        listed = None
    filled = {label for _, label in listed.samples} if listed else set()
    if listed is None or not filled:
        kinds = ", ".join(IMG_EXTENSIONS)
        raise SpecError(f"{folder} must hold one folder per class, each with images ({kinds})")
    empty = [name for name, label in listed.class_to_idx.items() if label not in filled]
    if empty:
        raise SpecError(f"{folder / empty[0]} is a class without images: remove the folder, or fill it")
    if len(filled) == 1:
        only = folder / listed.classes[0]
        below = _folders(only)
        inside = f"; name {only} if its folders are the classes" if below else ""
        raise SpecError(f"{folder} has but one class, {only.name}: there is nothing to tell apart{inside}")
    parts = [_folders(folder / name) for name in listed.classes]
    if len(parts[0]) > 1 and all(part == parts[0] for part in parts):
        held, inner = (", ".join(names[:3]) for names in (listed.classes, parts[0]))
        raise SpecError(
            f"each folder in {folder} ({held}) holds the same folders ({inner}), which look like the classes: name one of "
            f"them, or call the parts {' and '.join(PARTS)}"
        )
    return listed


def _folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def _split(files: Sequence[tuple[str, int]], size: int) -> tuple[Samples, Samples]:
    """Mixes the files and holds a tenth of them out for validation."""
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = max(1, round(HELD_OUT * len(files)))
    if len(files) < 2:
        raise SpecError("an image folder needs two images at least: one to train on and one to hold out")
    mixed = [files[index] for index in order]
    return Pictures(mixed[held_out:], size), Pictures(mixed[:held_out], size)


DATA.register("imagefolder")(ImageFolders())


CIFAR_CLASSES, CIFAR_SIZE = 10, 32
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PER_IMAGE = 3 * CIFAR_SIZE * CIFAR_SIZE
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
"""The published files need no more than these to be read."""


class Cifar10(DataSource):
    def check(self, spec: DataSpec, workload: WorkloadSpec) -> None:
        if workload.classes not in (None, CIFAR_CLASSES):
            raise SpecError(f"cifar10 has {CIFAR_CLASSES} classes, got classes {workload.classes}")
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
            classes=CIFAR_CLASSES,
            size=CIFAR_SIZE,
            mean=CIFAR_MEAN,
            std=CIFAR_STD,
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
        and all(isinstance(label, int) and 0 <= label < CIFAR_CLASSES for label in labels)
    )
    if not is_sound:
        raise BenchError(
            "user", f"{path} is not a batch of CIFAR-10: expected data (N, {PER_IMAGE}) in 8 bits and N labels below 10"
        )
    assert data is not None
    assert labels is not None
    return torch.from_numpy(data.reshape(-1, 3, CIFAR_SIZE, CIFAR_SIZE).copy()), torch.tensor(labels)


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
