"""Every model of torchvision by name, with random weights: nothing is downloaded.

Classification and segmentation take a batch of images, detectors a list of them, video models clips, optical flow two
images, quantized models images on a CPU.
"""

from __future__ import annotations

import math
import re
from types import ModuleType
from typing import Any, ClassVar

import msgspec
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import (
    detection,
    get_model,
    get_model_weights,
    list_models,
    optical_flow,
    quantization,
    segmentation,
    video,
)

from redline.bench.workload.inputs import Inputs
from redline.bench.workload.source import (
    SOURCES,
    ExampleCode,
    Source,
    bare,
    give_cifar_stem,
    has_imagenet_stem,
    refuse_options,
)
from redline.bench.workload.workload import Workload, assemble, choose_batch
from redline.model.errors import SpecError, UnknownName
from redline.model.note import Note, note
from redline.model.questions import ModelName
from redline.model.spec import WorkloadSpec

MAXVIT_STEP = 224
"""Its windows of 7 must divide the feature maps of all four stages, the smallest being 1/32 of the image."""
INCEPTION_TRAINING_SIZE = 299
"""Below it the auxiliary head, which only training uses, runs out of pixels."""
_PATCH = re.compile(r"vit_[a-z]_(\d+)")


class Kind:
    """Image classification, and what the other kinds have in common with it."""

    name: ClassVar[str] = "classification"
    module: ClassVar[ModuleType] = torchvision.models
    item: ClassVar[str] = "img"
    is_one_line: ClassVar[bool] = True
    """A snippet can make model, inputs and loss in a line each."""

    def names(self) -> list[str]:
        return list_models(module=self.module)

    def check(self, name: str, spec: WorkloadSpec) -> None:
        """Refuse options that cannot be honoured; nothing is built."""
        if spec.image_size is not None:
            self.check_size(name, spec.image_size)
        if spec.task == "train":
            _check_training(name, spec)

    def check_size(self, name: str, size: int) -> None:
        patch = _PATCH.fullmatch(name)
        step = int(patch.group(1)) if patch else MAXVIT_STEP if name.startswith("maxvit") else 1
        require_multiple(name, size, step)
        # For these torchvision writes the published size; they take any (Swin pads) or were dealt with above.
        if not patch and not name.startswith(("maxvit", "swin")):
            require_published_minimum(name, size)

    def default_size(self, name: str) -> int:
        """Returns the crop of the published weights, the smallest of several: vit_h_14 has 518 and 224.

        Only the description of the weights is read. Segmentation has no crop, but a size to resize to.
        """
        settings = [weights.transforms.keywords for weights in get_model_weights(name)]
        crops = [setting.get("crop_size") or setting["resize_size"] for setting in settings]
        return int(min(crop if isinstance(crop, int) else min(crop) for crop in crops))

    def options(self, name: str, spec: WorkloadSpec, notes: list[Note]) -> dict[str, Any]:
        """Returns what the constructor gets beyond `weights=None`; what a person should know about it goes to the notes."""
        size, options = spec.image_size or self.default_size(name), _classes(spec)
        if name.startswith("vit_"):
            options["image_size"] = size
        elif name.startswith("maxvit"):
            options["input_size"] = (size, size)
        elif name in ("inception_v3", "googlenet"):
            # Left unsaid it warns; True draws truncated normals, twice as slow to build.
            options["init_weights"] = False
            # Inference never looks at the auxiliary heads; they would only take memory.
            options["aux_logits"] = spec.task == "train"
            if spec.task == "train":
                notes.append(note("model", "trains with its auxiliary heads"))
        return options

    def inputs(self, model: nn.Module, name: str, spec: WorkloadSpec, batch: int) -> Inputs:
        size = spec.image_size or self.default_size(name)
        return (torch.randn(batch, 3, size, size),), {}


class Segmentation(Kind):
    name = "segmentation"
    module = segmentation

    def options(self, name: str, spec: WorkloadSpec, notes: list[Note]) -> dict[str, Any]:
        options = {"weights_backbone": None, **_classes(spec)}
        # torch's own training script trains with the auxiliary head where there is one.
        if spec.task == "train" and not name.startswith("lraspp"):
            options["aux_loss"] = True
            notes.append(note("model", "trains with its auxiliary head, weight 0.5"))
        return options


class Detection(Kind):
    """A list of images in, a list of finds out; in training also what is to be found, and losses come out."""

    name = "detection"
    module = detection
    is_one_line = False

    BOXES: ClassVar[int] = 4
    """How many objects each image holds, in training."""
    SPREAD: ClassVar[float] = 3.0
    """The spread of the classes' scores. Fresh from its constructor a detector finds nothing, and what comes behind the scores, which
    takes a good part of the time of a trained one, has nothing to do."""

    def check(self, name: str, spec: WorkloadSpec) -> None:
        if spec.classes is not None and spec.classes < 2:
            raise SpecError(f"classes must be 2 or more for {name} (one is the background), got {spec.classes}")

    def options(self, name: str, spec: WorkloadSpec, notes: list[Note]) -> dict[str, Any]:
        options = {"weights_backbone": None, **_classes(spec)}
        if spec.image_size is not None and "ssd" not in name:
            # It resizes whatever it is given: to the size asked for.
            options |= {"min_size": spec.image_size, "max_size": spec.image_size}
        return options

    def inputs(self, model: nn.Module, name: str, spec: WorkloadSpec, batch: int) -> Inputs:
        size = self._size(model, name, spec)
        images = [torch.rand(3, size, size) for _ in range(batch)]
        if spec.task == "train":
            return (images, [self._target(model, size) for _ in images]), {}
        with torch.no_grad():
            for layer in _score_layers(model):
                layer.weight.normal_(std=self.SPREAD / math.sqrt(layer.weight[0].numel()))
        return (images,), {}

    def _size(self, model: Any, name: str, spec: WorkloadSpec) -> int:
        """Returns the size that the model itself resizes images to."""
        fixed = model.transform.fixed_size
        if fixed is None:
            return spec.image_size or int(model.transform.min_size[-1])
        if spec.image_size not in (None, fixed[0]):
            raise SpecError(f"image_size must be {fixed[0]} for {name}, which resizes every image to that")
        return int(fixed[0])

    def _target(self, model: Any, size: int) -> dict[str, Tensor]:
        corners = torch.rand(self.BOXES, 2) * 0.6 * size
        boxes = torch.cat([corners, corners + size * (0.1 + 0.3 * torch.rand(self.BOXES, 2))], dim=1)
        target = {"boxes": boxes, "labels": torch.ones(self.BOXES, dtype=torch.int64)}
        heads = getattr(model, "roi_heads", None)
        if heads is not None and heads.has_mask():
            target["masks"] = torch.ones(self.BOXES, size, size, dtype=torch.uint8)
        if heads is not None and heads.has_keypoint():
            count = heads.keypoint_predictor.kps_score_lowres.out_channels
            middle = (boxes[:, None, :2] + boxes[:, None, 2:]) / 2
            target["keypoints"] = torch.cat([middle, torch.ones(self.BOXES, 1, 1)], dim=2).repeat(1, count, 1)
        return target


class Video(Kind):
    name = "video"
    module = video
    item = "video"
    FRAMES: ClassVar[int] = 16
    is_one_line = False

    def check_size(self, name: str, size: int) -> None:
        if name.startswith("mvit") and size != self.default_size(name):
            raise SpecError(
                f"image_size must be {self.default_size(name)} for {name}, whose positions fit no other size"
            )
        require_published_minimum(name, size)

    def inputs(self, model: nn.Module, name: str, spec: WorkloadSpec, batch: int) -> Inputs:
        size = spec.image_size or self.default_size(name)
        return (torch.randn(batch, 3, self.FRAMES, size, size),), {}


class OpticalFlow(Kind):
    """Two images in, the movement between them out, refined step by step."""

    name = "optical flow"
    module = optical_flow
    item = "pair"
    is_one_line = False

    def check(self, name: str, spec: WorkloadSpec) -> None:
        refuse_options(spec, "classes", why="it answers with movements")
        super().check(name, spec)

    def check_size(self, name: str, size: int) -> None:
        require_multiple(name, size, 8)
        require_published_minimum(name, size)

    def default_size(self, name: str) -> int:
        return 256  # no size is published; it takes whole frames

    def options(self, name: str, spec: WorkloadSpec, notes: list[Note]) -> dict[str, Any]:
        return {}

    def inputs(self, model: nn.Module, name: str, spec: WorkloadSpec, batch: int) -> Inputs:
        size = spec.image_size or self.default_size(name)
        first = 2 * torch.rand(batch, 3, size, size) - 1
        return (first, first.roll(2, -1)), {}


class Quantized(Kind):
    """Classification in int8, which torch computes on CPUs alone."""

    name = "quantized classification"
    module = quantization

    def check(self, name: str, spec: WorkloadSpec) -> None:
        if spec.task == "train":
            raise SpecError(f"{name} is quantized already: it can be measured for inference, not trained")
        super().check(name, spec)

    def options(self, name: str, spec: WorkloadSpec, notes: list[Note]) -> dict[str, Any]:
        notes.append(note("model", "quantized to int8 with random weights: its own output is the reference, not fp32"))
        return {"quantize": True, **_classes(spec)}


KINDS: tuple[Kind, ...] = (Kind(), Segmentation(), Detection(), Video(), OpticalFlow(), Quantized())


def flow_loss(flows: list[Tensor]) -> Tensor:
    """RAFT's own loss, with no movement as the target: later refinements count more."""
    return torch.stack([0.8**age * flow.abs().mean() for age, flow in enumerate(reversed(flows))]).sum()


def _classes(spec: WorkloadSpec) -> dict[str, Any]:
    return {} if spec.classes is None else {"num_classes": spec.classes}


def require_multiple(name: str, size: int, step: int) -> None:
    if size % step:
        below, above = size // step * step, (size // step + 1) * step
        nearest = " or ".join(str(candidate) for candidate in (below, above) if candidate)
        raise SpecError(f"image_size must be a multiple of {step} for {name}, got {size}: try {nearest}")


def require_published_minimum(name: str, size: int) -> None:
    smallest = max(max(weights.meta.get("min_size", (1, 1))) for weights in get_model_weights(name))
    if size < smallest:
        raise SpecError(f"image_size must be {smallest} or more for {name}, got {size}")


def _check_training(name: str, spec: WorkloadSpec) -> None:
    pools_to_one_value = name == "inception_v3" or name.startswith("deeplabv3")
    if spec.batch == 1 and pools_to_one_value:
        raise SpecError(
            f"batch must be 2 or more to train {name}, got 1: BatchNorm needs more than one value per channel"
        )
    if name == "inception_v3" and spec.image_size is not None and spec.image_size < INCEPTION_TRAINING_SIZE:
        raise SpecError(
            f"image_size must be {INCEPTION_TRAINING_SIZE} or more to train {name} (its auxiliary head), got {spec.image_size}"
        )


def _score_layers(model: Any) -> list[Any]:
    """Returns the layers whose outputs are the scores of classes, or tell objects from the background."""
    if hasattr(model, "roi_heads"):
        return [model.roi_heads.box_predictor.cls_score, model.rpn.head.cls_logits]
    head = model.head.classification_head
    layers = [head.cls_logits] if hasattr(head, "cls_logits") else head.module_list
    return [layer[-1] if isinstance(layer, nn.Sequential) else layer for layer in layers]


class TorchvisionSource(Source):
    def check(self, spec: WorkloadSpec) -> None:
        name = bare(spec)
        known = _kinds()
        if name not in known:
            raise UnknownName("torchvision model", name, known)
        refuse_options(spec, "sequence_length", why="it takes images")
        if spec.stem is not None and not self.has_stem(spec):
            refuse_options(spec, "stem", why="only ResNets begin with one of these stems")
        known[name].check(name, spec)

    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        name = bare(spec)
        notes: list[Note] = []
        kind = _kinds()[name]
        batch = choose_batch(spec.batch, spec.task, notes)
        model = _make(name, spec, notes)
        inputs = kind.inputs(model, name, spec, batch)
        workload = assemble(
            model,
            inputs,
            task=spec.task,
            source="torchvision",
            identity=f"torchvision {torchvision.__version__} {name}",
            seed=seed,
            batch=batch,
            item=kind.item,
            loss=flow_loss if isinstance(kind, OpticalFlow) else None,
            # What is to be found in an image cannot be drawn: boxes have corners.
            inputs_are_free=spec.task == "infer" or not isinstance(kind, Detection),
            notes=notes,
        )
        workload.is_cpu_only = isinstance(kind, Quantized)
        return workload

    def has_stem(self, spec: WorkloadSpec) -> bool:
        name = bare(spec)
        if type(_kinds()[name]) is not Kind:
            return False
        with torch.device("meta"):  # shapes only
            return has_imagenet_stem(_make(name, msgspec.structs.replace(spec, stem=None), []))

    def example_code(self, spec: WorkloadSpec) -> ExampleCode | None:
        name = bare(spec)
        if spec.stem == "cifar":
            return None  # the model is changed after it is built
        kind = _kinds()[name]
        several_outputs = isinstance(kind, Segmentation) or name in ("inception_v3", "googlenet")
        if not kind.is_one_line or (spec.task == "train" and several_outputs):
            return None  # the inputs or the loss are more than one line
        batch, size = choose_batch(spec.batch, spec.task, []), spec.image_size or kind.default_size(name)
        options = "".join(f", {option}={value!r}" for option, value in kind.options(name, spec, []).items())
        categories = len(get_model_weights(name).DEFAULT.meta["categories"])
        return ExampleCode(
            imports=("import torchvision",),
            model=f'torchvision.models.get_model("{name}", weights=None{options})',
            inputs=f"((torch.randn({batch}, 3, {size}, {size}),), {{}})",
            items=batch,
            classes=spec.classes or categories,
        )

    def fingerprint(self, spec: WorkloadSpec) -> str:
        return f"torchvision {torchvision.__version__}"

    def models(self) -> list[ModelName]:
        return [ModelName(name=name, source="torchvision", kind=kind.name) for name, kind in sorted(_kinds().items())]


def _make(name: str, spec: WorkloadSpec, notes: list[Note]) -> nn.Module:
    model: nn.Module = get_model(name, weights=None, **_kinds()[name].options(name, spec, notes))
    if spec.stem == "cifar":
        give_cifar_stem(model)
        notes.append(note("model", "CIFAR stem: a 3×3 convolution without pooling, for small images"))
    return model


def _kinds() -> dict[str, Kind]:
    return {name: kind for kind in KINDS for name in kind.names()}


SOURCES.register("torchvision")(TorchvisionSource())
