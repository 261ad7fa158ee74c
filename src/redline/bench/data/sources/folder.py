"""Data may be any folder of images with one folder per class, as torchvision's `ImageFolder` reads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from redline.bench.data.source import DATA, DataSource, ImageData, Samples
from redline.model.errors import SpecError
from redline.model.spec import DataSpec, WorkloadSpec

SIZE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HELD_OUT = 0.1
PARTS = ("train", "val")
"""Folders of the two parts; without them a tenth is held out."""


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
        root, size = Path(spec.folder).expanduser(), workload.image_size or SIZE
        if (root / PARTS[0]).is_dir():
            listed = [_listed(root / part) for part in PARTS]
            if listed[0].classes != listed[1].classes:
                raise SpecError(f"{root}: train and val have different classes")
            train, validation = (Pictures(each.samples, size) for each in listed)
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
            mean=MEAN,
            std=STD,
        )


class Pictures(Samples):
    """Files that are read when they are asked for: the shorter side scaled, the middle cut out."""

    def __init__(self, files: Sequence[tuple[str, int]], size: int) -> None:
        self._files = list(files)
        self._shape = v2.Compose([v2.Resize(size, antialias=True), v2.CenterCrop(size)])

    def __len__(self) -> int:
        return len(self._files)

    def fetch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        images = torch.stack([self._picture(self._files[index][0]) for index in indices])
        return images, torch.tensor([self._files[index][1] for index in indices])

    def identity(self) -> bytes:
        """Names and sizes: reading the pictures would find a damaged one before anybody trains on it."""
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
    return sorted(each.name for each in folder.iterdir() if each.is_dir())


def _split(files: Sequence[tuple[str, int]], size: int) -> tuple[Samples, Samples]:
    """Mixes the files and holds a tenth of them out for validation."""
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = max(1, round(HELD_OUT * len(files)))
    if len(files) < 2:
        raise SpecError("an image folder needs two images at least: one to train on and one to hold out")
    mixed = [files[index] for index in order]
    return Pictures(mixed[held_out:], size), Pictures(mixed[:held_out], size)


DATA.register("imagefolder")(ImageFolders())
