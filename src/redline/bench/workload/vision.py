"""The kinds of models that torchvision has: how each is built at a size, and what it is fed with.

Classification and segmentation take a batch of images, detectors a list of them, video models clips, optical flow two
images, quantized models images on a CPU.
"""

from __future__ import annotations

import math
import re
from types import ModuleType
from typing import Any, ClassVar

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import (
    detection,
    get_model_weights,
    list_models,
    optical_flow,
    quantization,
    segmentation,
    video,
)

from redline.bench.workload.batch import LIST, Axes
from redline.bench.workload.inputs import Inputs
from redline.bench.workload.source import refuse_options
from redline.model.errors import SpecError
from redline.model.note import Note, note
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
        """The crop of the published weights, the smallest where several were published: vit_h_14 has 518 and 224.

        Only the description of the weights is read. Segmentation has no crop, but a size to resize to.
        """
        settings = [weights.transforms.keywords for weights in get_model_weights(name)]
        crops = [setting.get("crop_size") or setting["resize_size"] for setting in settings]
        return int(min(crop if isinstance(crop, int) else min(crop) for crop in crops))

    def options(self, name: str, spec: WorkloadSpec, notes: list[Note]) -> dict[str, Any]:
        """What the constructor is told beyond `weights=None`; what a person should know about it goes to the notes."""
        size = spec.image_size or self.default_size(name)
        options: dict[str, Any] = {} if spec.classes is None else {"num_classes": spec.classes}
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

    def axes(self, inputs: Inputs) -> Axes | None:
        """Where the items are; None: in dimension 0 of every tensor that has it."""
        return None

    def loss(self, spec: WorkloadSpec) -> Any:
        """Its own loss, where cross-entropy of the outputs would make no sense."""
        return None


class Segmentation(Kind):
    name = "segmentation"
    module = segmentation

    def options(self, name: str, spec: WorkloadSpec, notes: list[Note]) -> dict[str, Any]:
        options: dict[str, Any] = {"weights_backbone": None}
        if spec.classes is not None:
            options["num_classes"] = spec.classes
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
    """To be found in each image, in training."""
    SPREAD: ClassVar[float] = 3.0
    """Of the classes' scores. Fresh from its constructor a detector finds nothing, and what comes behind the scores, which
    takes a good part of the time of a trained one, has nothing to do."""

    def check(self, name: str, spec: WorkloadSpec) -> None:
        if spec.classes is not None and spec.classes < 2:
            raise SpecError(f"classes must be 2 or more for {name} (one is the background), got {spec.classes}")

    def options(self, name: str, spec: WorkloadSpec, notes: list[Note]) -> dict[str, Any]:
        options: dict[str, Any] = {"weights_backbone": None}
        if spec.classes is not None:
            options["num_classes"] = spec.classes
        if spec.image_size is not None and "ssd" not in name:
            # It resizes whatever it is given: to the size asked for.
            options |= {"min_size": spec.image_size, "max_size": spec.image_size}
        return options

    def inputs(self, model: nn.Module, name: str, spec: WorkloadSpec, batch: int) -> Inputs:
        size = self._size(model, name, spec)
        images = [torch.rand(3, size, size) for _ in range(batch)]
        if spec.task == "train":
            return (images, [self._target(model, size) for _ in images]), {}
        _spread_scores(model, self.SPREAD)
        return (images,), {}

    def _size(self, model: Any, name: str, spec: WorkloadSpec) -> int:
        """What the model itself resizes images to."""
        fixed = model.transform.fixed_size
        if fixed is None:
            return spec.image_size or int(model.transform.min_size[-1])
        if spec.image_size not in (None, fixed[0]):
            raise SpecError(f"image_size must be {fixed[0]} for {name}, which resizes every image to that")
        return int(fixed[0])

    def _target(self, model: Any, size: int) -> dict[str, Tensor]:
        corners = torch.rand(self.BOXES, 2) * 0.6 * size
        boxes = torch.cat([corners, corners + size * (0.1 + 0.3 * torch.rand(self.BOXES, 2))], dim=1)
        target = {"boxes": boxes, "labels": torch.randint(1, _classes_of(model), (self.BOXES,))}
        heads = getattr(model, "roi_heads", None)
        if heads is not None and heads.has_mask():
            target["masks"] = torch.stack([_filled(box, size) for box in boxes])
        if heads is not None and heads.has_keypoint():
            count = heads.keypoint_predictor.kps_score_lowres.out_channels
            points = boxes[:, None, :2] + torch.rand(self.BOXES, count, 2) * (boxes[:, None, 2:] - boxes[:, None, :2])
            target["keypoints"] = torch.cat([points, torch.ones(self.BOXES, count, 1)], dim=2)
        return target

    def axes(self, inputs: Inputs) -> Axes | None:
        return {str(index): LIST for index in range(len(inputs[0]))}


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

    def options(self, name: str, spec: WorkloadSpec, notes: list[Note]) -> dict[str, Any]:
        return {} if spec.classes is None else {"num_classes": spec.classes}

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

    def loss(self, spec: WorkloadSpec) -> Any:
        return flow_loss


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
        options = {} if spec.classes is None else {"num_classes": spec.classes}
        return {"quantize": True, **options}


KINDS: tuple[Kind, ...] = (Kind(), Segmentation(), Detection(), Video(), OpticalFlow(), Quantized())


def flow_loss(flows: list[Tensor]) -> Tensor:
    """RAFT's own loss, with no movement as the target: later refinements count more."""
    steps = len(flows)
    return torch.stack([0.8 ** (steps - step - 1) * flow.abs().mean() for step, flow in enumerate(flows)]).sum()


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


def _score_layers(model: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    """The layers whose outputs are the scores of classes."""
    found = []
    for name, module in model.named_modules():
        is_last = name.endswith(("cls_score", "cls_logits")) or re.search(
            r"classification_head\.module_list\.\d+(\.1)?$", name
        )
        if is_last and isinstance(module, nn.Linear | nn.Conv2d):
            found.append(module)
    return found


def _spread_scores(model: nn.Module, spread: float) -> None:
    with torch.no_grad():
        for layer in _score_layers(model):
            layer.weight.normal_(std=spread / math.sqrt(layer.weight[0].numel()))


def _classes_of(model: Any) -> int:
    """How many classes it tells apart, the background among them."""
    anchors = getattr(getattr(model, "head", None), "classification_head", None)
    if anchors is None:  # the layer of the same kind in front of it only tells objects from the background
        return int(model.roi_heads.box_predictor.cls_score.out_features)
    columns = getattr(anchors, "num_columns", None) or anchors.num_classes
    return int(columns)


def _filled(box: Tensor, size: int) -> Tensor:
    mask = torch.zeros(size, size, dtype=torch.uint8)
    left, top, right, bottom = box.long().tolist()
    mask[top : bottom + 1, left : right + 1] = 1
    return mask
