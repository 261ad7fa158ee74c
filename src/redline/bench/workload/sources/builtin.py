"""This source has small models that are always there: `simple_cnn`, and `transformer` for tokens or, given an image size, for images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import redline
from redline.bench.workload.build import SOURCES, ExampleCode, Source, bare, refuse_options
from redline.bench.workload.workload import Workload, assemble, choose_batch
from redline.model.errors import SpecError, UnknownName
from redline.model.names import BUILTIN_MODELS
from redline.model.note import Note
from redline.model.protocol import ModelName
from redline.model.spec import WorkloadSpec

VOCABULARY = 8192
IMAGE_SIZE, SMALLEST_IMAGE, CLASSES, SEQUENCE_LENGTH = 32, 8, 10, 128
PATCHES = 8
"""An image has this many patches per side, so that one of any size is 64 tokens to the transformer."""


class SimpleCNN(nn.Module):
    """This is the usual first network for CIFAR-10: three stages of convolution, BatchNorm and ReLU, each halving the image."""

    def __init__(self, classes: int = CLASSES, width: int = 32) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        channels = 3
        for out in (width, 2 * width, 4 * width):
            stages += [_convolution(channels, out), _convolution(out, out), nn.MaxPool2d(2)]
            channels = out
        self.features = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).mean(dim=(2, 3)))
        return logits


def _convolution(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True))


class TransformerBlock(nn.Module):
    """This is a pre-norm block: attention and a feed-forward network, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attention(self.norm_attention(hidden))
        return hidden + self.feed(self.norm_feed(hidden))

    def _attention(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = self.query_key_value(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        projected: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class Transformer(nn.Module):
    """This is a compact encoder without dropout. It maps token ids (B, T) to logits (B, T, V), or with an image size images to classes."""

    def __init__(
        self,
        sequence_length: int = SEQUENCE_LENGTH,
        image_size: int | None = None,
        classes: int = CLASSES,
        width: int = 256,
        depth: int = 4,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.embedding: nn.Module = nn.Embedding(VOCABULARY, width)
        length, answers, self.reads_images = sequence_length, VOCABULARY, image_size is not None
        if image_size is not None:
            patch, length, answers = image_size // PATCHES, PATCHES**2, classes
            self.embedding = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.position_embedding = nn.Parameter(0.02 * torch.randn(1, length, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, answers, bias=self.reads_images)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embedding(inputs)
        if self.reads_images:
            hidden = hidden.flatten(2).transpose(1, 2)
        hidden = self.norm(self.blocks(hidden + self.position_embedding[:, : hidden.shape[1]]))
        logits: Tensor = self.head(hidden.mean(dim=1) if self.reads_images else hidden)
        return logits


class BuiltinSource(Source):
    def check(self, spec: WorkloadSpec) -> None:
        name = bare(spec)
        if name not in BUILTIN_MODELS:
            raise UnknownName("built-in model", name, BUILTIN_MODELS)
        refuse_options(spec, "stem", why="only ResNets begin with one of these stems")
        if _is_text(spec):
            why = "it reads tokens and answers with the vocabulary; with an image_size it reads images"
            refuse_options(spec, "classes", why=why)
            return
        refuse_options(spec, "sequence_length", why="it takes images")
        if name == "transformer" and spec.image_size is not None and spec.image_size % PATCHES:
            raise SpecError(f"image_size must be a multiple of {PATCHES} for {name}, got {spec.image_size}")
        if spec.image_size is not None and spec.image_size < SMALLEST_IMAGE:
            raise SpecError(f"image_size must be {SMALLEST_IMAGE} or more for {name}, got {spec.image_size}")

    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        notes: list[Note] = []
        batch = choose_batch(spec.batch, spec.task, notes)
        length, size = spec.sequence_length or SEQUENCE_LENGTH, spec.image_size or IMAGE_SIZE
        is_text, classes = _is_text(spec), spec.classes or CLASSES
        model = Transformer(length, spec.image_size, classes) if bare(spec) == "transformer" else SimpleCNN(classes)
        return assemble(
            model,
            ((torch.randint(0, VOCABULARY, (batch, length)) if is_text else torch.randn(batch, 3, size, size),), {}),
            task=spec.task,
            source="builtin",
            identity=f"redline {redline.__version__} {bare(spec)}",
            seed=seed,
            batch=batch,
            item="seq" if is_text else "img",
            vocabulary={"0": VOCABULARY} if is_text else {},
            notes=notes,
        )

    def example_code(self, spec: WorkloadSpec) -> ExampleCode | None:
        if _is_text(spec) and spec.task == "train":
            return None  # its loss takes more than one line
        batch, size = choose_batch(spec.batch, spec.task, []), spec.image_size or IMAGE_SIZE
        classes, length = spec.classes or CLASSES, spec.sequence_length or SEQUENCE_LENGTH
        name, given = (
            ("Transformer", f"{length}, {spec.image_size}, ") if bare(spec) == "transformer" else ("SimpleCNN", "")
        )
        text = f"randint(0, {VOCABULARY}, ({batch}, {length}))"
        return ExampleCode(
            imports=(f"from {__name__} import {name}",),
            model=f"{name}({given}{classes})",
            inputs=f"((torch.{text if _is_text(spec) else f'randn({batch}, 3, {size}, {size})'},), {{}})",
            items=batch,
            classes=classes,
        )

    def fingerprint(self, spec: WorkloadSpec) -> str:
        return f"redline {redline.__version__}"

    def models(self) -> list[ModelName]:
        return [ModelName(name=name, source="builtin", kind=kind) for name, kind in BUILTIN_MODELS.items()]


def _is_text(spec: WorkloadSpec) -> bool:
    return bare(spec) == "transformer" and spec.image_size is None


SOURCES.register("builtin")(BuiltinSource())
