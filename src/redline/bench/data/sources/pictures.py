"""These sources give pictures with classes.

They are made-up pictures, in which classes can be told apart or not, a folder per class, and CIFAR-10 from its files.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.datasets.utils import check_integrity
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from redline.bench.data.source import DATA, DataSource, ImageData, InMemory, Samples
from redline.bench.device.failure import one_line
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
"""These numbers bring values from 0 to 1 to about zero mean and unit spread."""
CHUNK = 1024
"""This many pictures are made at a time, because the waves of all of them at once would take much memory."""
DATA_SEED = 20_260
"""The data are the same whatever the seed of the training is, so that trainings with different seeds can be compared."""


class Synthetic(DataSource):
    """This source gives random pictures with random classes. They are as much work as real ones, but there is nothing to learn."""

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
    # The factor makes the deviation of the texture equal SIGNAL: a cosine has variance 1/2, and the colours of a class have
    # length 1 over all channels and waves.
    texture = torch.einsum("nghw,ngc->nchw", gratings, colours[labels]) * (SIGNAL * math.sqrt(2 * 3))
    noise = NOISE * torch.randn(texture.shape, generator=random)
    return ((0.5 + texture + noise).clamp(0, 1) * 255).round().to(torch.uint8)


DATA.register("synthetic")(Synthetic())
DATA.register("synthetic-learnable")(SyntheticLearnable())


FOLDER_SIZE = 224
"""Pictures from a folder are scaled to this many pixels per side, if the model's size is not given."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""torchvision's models are trained with this mean and standard deviation of ImageNet."""


class ImageFolders(DataSource):
    """This source reads `train` and `val` below a folder, each with one folder of images per class."""

    def check(self, spec: DataSpec, workload: WorkloadSpec) -> None:
        if spec.download:
            raise SpecError("an image folder cannot be downloaded: leave out --download")
        missing = [part for part in ("train", "val") if not (Path(spec.folder or "").expanduser() / part).is_dir()]
        if spec.folder is None or missing:
            raise SpecError(
                f"imagefolder needs --folder DIR with {' and '.join(missing)}: in train and in val lies one folder per class"
            )

    def open(self, spec: DataSpec, workload: WorkloadSpec) -> ImageData:
        root, size = Path(spec.folder or "").expanduser(), workload.image_size or FOLDER_SIZE
        try:
            train, validation = (ImageFolder(str(root / part)) for part in ("train", "val"))
        # torchvision's message names the class that has no images.
        except FileNotFoundError as error:
            raise SpecError(one_line(error)) from None
        if train.classes != validation.classes:
            raise SpecError(f"{root}: train and val have different classes")
        if workload.classes is not None and workload.classes < len(train.classes):
            raise SpecError(f"{root} has {len(train.classes)} classes, got classes {workload.classes}")
        return ImageData(
            name="imagefolder",
            train=Pictures(train.samples, size),
            validation=Pictures(validation.samples, size),
            classes=workload.classes or len(train.classes),
            size=size,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        )


class Pictures(Samples):
    """This part reads files when they are asked for. It scales the shorter side and cuts out the middle."""

    def __init__(self, files: Sequence[tuple[str, int]], size: int) -> None:
        self._files, self._size = list(files), size
        self._shape = v2.Compose([v2.Resize(size, antialias=True), v2.CenterCrop(size)])

    def __len__(self) -> int:
        return len(self._files)

    def fetch(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        files = [self._files[row] for row in rows]
        return torch.stack([self._picture(path) for path, _ in files]), torch.tensor([label for _, label in files])

    def part(self, rows: Sequence[int]) -> Samples:
        return Pictures([self._files[row] for row in rows], self._size)

    def identity(self) -> bytes:
        """Returns names and sizes only. Reading the pictures would find a damaged one before anybody trains on it."""
        files = ((Path(path), label) for path, label in self._files)
        return "\n".join(f"{path.name} {path.stat().st_size} {label}" for path, label in files).encode()

    def _picture(self, path: str) -> Tensor:
        try:
            with Image.open(path) as picture:
                if picture.mode[0] in "IF":  # PIL would make every value above 255 white
                    raise ValueError("its pixels have more than 8 bits")
                pixels: Tensor = F.pil_to_tensor(self._shape(picture.convert("RGB")))
        # Decoders raise many kinds of errors for a damaged file, without a common base class.
        except Exception as error:
            raise ValueError(f"cannot read the image {path}: {error}") from error
        return pixels


DATA.register("imagefolder")(ImageFolders())


CIFAR_CLASSES = 10
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""These are the mean and standard deviation of each channel of CIFAR-10."""
HOW_TO_GET = (
    "with a network, --download fetches it there (170 MB); without one, copy the folder cifar-10-batches-py from another "
    "machine, or train on synthetic-learnable"
)
_HARMLESS = {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")} | {
    (module, "_reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")
}
"""The published files need no other names than these to be read."""


class Cifar10(DataSource):
    def check(self, spec: DataSpec, workload: WorkloadSpec) -> None:
        if workload.classes not in (None, CIFAR_CLASSES):
            raise SpecError(f"cifar10 has {CIFAR_CLASSES} classes, got classes {workload.classes}")
        if spec.folder is None:
            raise SpecError(f"cifar10 needs the folder it lies in (--folder DIR): {HOW_TO_GET}")
        if not spec.download and not (folder := _batches_folder(spec)).is_dir():
            raise SpecError(f"no {folder.name} in {folder.parent}: {HOW_TO_GET}")

    def open(self, spec: DataSpec, workload: WorkloadSpec) -> ImageData:
        folder = _batches_folder(spec)
        if spec.download and not folder.is_dir():
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                CIFAR10(root=str(folder.parent), download=True)
            except Exception as error:  # urllib, tarfile and torchvision each raise their own errors
                raise BenchError(
                    "user", f"cannot download CIFAR-10 to {folder.parent}: {error}; {HOW_TO_GET}"
                ) from error
        lists = CIFAR10.train_list, CIFAR10.test_list
        train, validation = (_read_all([folder / name for name, _ in files]) for files in lists)
        published = all(check_integrity(folder / name, md5) for files in lists for name, md5 in files)
        other = note("other-data", f"not the published CIFAR-10 in {folder}: checksums differ")
        return ImageData(
            name="cifar10",
            train=train,
            validation=validation,
            classes=CIFAR_CLASSES,
            size=32,
            mean=CIFAR_MEAN,
            std=CIFAR_STD,
            notes=() if published else (other,),
        )


def _batches_folder(spec: DataSpec) -> Path:
    """Returns the folder with the batches. The person may name that folder itself, or the one it lies in."""
    root = Path(spec.folder or "").expanduser()
    return root if root.name == CIFAR10.base_folder else root / CIFAR10.base_folder


def _read_all(paths: Sequence[Path]) -> InMemory:
    images, labels = zip(*map(_read, paths), strict=True)
    return InMemory(torch.cat(images), torch.cat(labels))


def _read(path: Path) -> tuple[Tensor, Tensor]:
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="latin1").load()
        images, labels = torch.from_numpy(content["data"]).view(-1, 3, 32, 32).clone(), torch.tensor(content["labels"])
        if (
            images.dtype != torch.uint8
            or len(images) != len(labels)
            or set(labels.tolist()) - set(range(CIFAR_CLASSES))
        ):
            raise ValueError("it does not hold pictures in 8 bits with as many labels below 10")
    # Reading a damaged pickle can raise any error, because its bytes are instructions.
    except Exception as error:
        raise BenchError("user", f"{path} is no whole file of CIFAR-10: {one_line(error)}; {HOW_TO_GET}") from error
    return images, labels


class _Unpickler(pickle.Unpickler):
    """It reads arrays, lists and texts, and refuses to call anything else, because a pickle from elsewhere may hold any program."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch of CIFAR-10 does")
        return super().find_class(module, name)


DATA.register("cifar10")(Cifar10())
