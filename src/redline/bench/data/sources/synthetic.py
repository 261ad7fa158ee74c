"""Pictures that are made up: noise, and noise in which classes can be told apart."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from redline.bench.data.source import DATA, DataSource, ImageData, InMemory
from redline.model.spec import DataSpec, WorkloadSpec

SIZE, CLASSES = 32, 10
TRAIN_SAMPLES, VAL_SAMPLES = 10_240, 2_048
"""Sizes where none are given."""
GRATINGS = 3
"""Waves that make up the texture of a class."""
SIGNAL, NOISE = 0.08, 0.22
"""These are the standard deviations of texture and noise in a pixel that goes from 0 to 1."""
MEAN, STD = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)
CHUNK = 1024
DATA_SEED = 20_260
"""Data are the same whatever the seed of the training: seeds of trainings can then be compared."""


class Synthetic(DataSource):
    """Random pictures with random classes: as much work as real ones, and nothing to learn."""

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
    """Textures under noise: each class has waves of its own, each picture its own phases.

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
            images = torch.cat([_pictures(each, waves, colours, size, random) for each in labels.split(CHUNK)])
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
