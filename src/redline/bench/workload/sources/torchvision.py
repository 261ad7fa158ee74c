"""This source has every model of torchvision by name, with random weights. Nothing is downloaded.

Classification and segmentation take a batch of images, detectors a list of them, video models clips, optical flow two
images, quantized models images on a CPU.
"""

from __future__ import annotations

import math
import re
from typing import Any

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

from redline.bench.workload.build import (
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
from redline.model.protocol import ModelName
from redline.model.spec import WorkloadSpec

KINDS = {
    "classification": torchvision.models,
    "segmentation": segmentation,
    "detection": detection,
    "video": video,
    "optical flow": optical_flow,
    "quantized classification": quantization,
}
"""It maps each kind of model to the module that lists its models."""
ITEMS = {"video": "video", "optical flow": "pair"}
"""Models of these kinds count this word instead of images."""
MAXVIT_STEP = 224
"""The image size must be a multiple of this, because the windows of 7 must divide the feature maps of all four stages, the
smallest being 1/32 of the image."""
FLOW_SIZE, FRAMES = 256, 16
"""No size is published for optical flow, which takes whole frames, so we use this one. Video models take clips of this many frames."""
SPREAD = 3.0
"""The scores of a detector's classes get this spread. Fresh from its constructor a detector finds nothing, so the code
behind the scores, which takes a good part of the time of a trained one, would have nothing to do."""


class TorchvisionSource(Source):
    def check(self, spec: WorkloadSpec) -> None:
        kinds = _kinds()
        if bare(spec) not in kinds:
            raise UnknownName("torchvision model", bare(spec), kinds)
        refuse_options(spec, "sequence_length", why="it takes images")
        if spec.stem is not None and not self.has_stem(spec):
            refuse_options(spec, "stem", why="only ResNets begin with one of these stems")
        if refused := _refusal(kinds[bare(spec)], bare(spec), spec):
            raise SpecError(refused)

    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        name, notes = bare(spec), list[Note]()
        kind = _kinds()[name]
        batch = choose_batch(spec.batch, spec.task, notes)
        model = _make(name, spec, notes)
        workload = assemble(
            model,
            (_inputs(model, kind, name, spec, batch), {}),
            task=spec.task,
            source="torchvision",
            identity=f"torchvision {torchvision.__version__} {name}",
            seed=seed,
            batch=batch,
            item=ITEMS.get(kind, "img"),
            loss=flow_loss if kind == "optical flow" else None,
            notes=notes,
        )
        workload.is_cpu_only = kind == "quantized classification"
        return workload

    def has_stem(self, spec: WorkloadSpec) -> bool:
        if _kinds()[bare(spec)] != "classification":
            return False
        # Only shapes are needed here, so the weights get no memory.
        with torch.device("meta"):
            return has_imagenet_stem(_make(bare(spec), msgspec.structs.replace(spec, stem=None), []))

    def example_code(self, spec: WorkloadSpec) -> ExampleCode | None:
        """Returns code if the model takes images and, when training, answers with one tensor, because then one line makes it."""
        name, kind = bare(spec), _kinds()[bare(spec)]
        one_tensor = kind == "classification" and name not in ("inception_v3", "googlenet")
        takes_images = kind in ("classification", "segmentation", "quantized classification")
        if spec.stem == "cifar" or not takes_images or (spec.task == "train" and not one_tensor):
            return None
        batch, size = choose_batch(spec.batch, spec.task, []), spec.image_size or default_size(name)
        options = "".join(f", {option}={value!r}" for option, value in _options(kind, name, spec, []).items())
        return ExampleCode(
            imports=("import torchvision",),
            model=f'torchvision.models.get_model("{name}", weights=None{options})',
            inputs=f"((torch.randn({batch}, 3, {size}, {size}),), {{}})",
            items=batch,
            classes=spec.classes or len(get_model_weights(name).DEFAULT.meta["categories"]),
        )

    def fingerprint(self, spec: WorkloadSpec) -> str:
        return f"torchvision {torchvision.__version__}"

    def models(self) -> list[ModelName]:
        return [ModelName(name=name, source="torchvision", kind=kind) for name, kind in sorted(_kinds().items())]


def _kinds() -> dict[str, str]:
    return {name: kind for kind, module in KINDS.items() for name in list_models(module=module)}


def default_size(name: str) -> int:
    """Returns the crop of the published weights. Of several it is the smallest: vit_h_14 has 518 and 224.

    Only the description of the weights is read. Segmentation has no crop, but a size to resize to.
    """
    settings = [getattr(weights.transforms, "keywords", {}) for weights in get_model_weights(name)]
    crops = [setting.get("crop_size") or setting.get("resize_size", FLOW_SIZE) for setting in settings]
    return int(min(crop if isinstance(crop, int) else min(crop) for crop in crops))


def _refusal(kind: str, name: str, spec: WorkloadSpec) -> str | None:
    """Returns why the options cannot be honoured, for cases where the model itself would not say so in one line."""
    if kind == "quantized classification" and spec.task == "train":
        return f"{name} is quantized already: it can be measured for inference, not trained"
    if kind == "detection" and spec.task == "train":
        return f"{name} trains on boxes, which cannot be drawn: give a factory that returns (model, (images, targets))"
    if kind == "detection" and spec.classes == 1:
        return f"classes must be 2 or more for {name} (one is the background), got 1"
    if kind == "optical flow":
        refuse_options(spec, "classes", why="it answers with movements")
    patch, size = re.fullmatch(r"vit_[a-z]_(\d+)", name), spec.image_size
    step = int(patch[1]) if patch else MAXVIT_STEP if name.startswith("maxvit") else 8 if kind == "optical flow" else 1
    if size is not None and size % step:
        return f"image_size must be a multiple of {step} for {name}, got {size}"
    return None


def _options(kind: str, name: str, spec: WorkloadSpec, notes: list[Note]) -> dict[str, Any]:
    """Returns the arguments that the constructor gets beyond `weights=None`. What a person should know about them goes to the notes."""
    size, trains = spec.image_size, spec.task == "train"
    options: dict[str, Any] = {} if spec.classes is None else {"num_classes": spec.classes}
    if kind in ("segmentation", "detection"):
        options["weights_backbone"] = None
    # torch's own training script trains these with an auxiliary head too.
    if kind == "segmentation" and trains and not name.startswith("lraspp"):
        options["aux_loss"] = True
        notes.append(note("model", "trains with its auxiliary head, weight 0.5"))
    # A detector resizes its images to the size that was asked for.
    if kind == "detection" and size is not None and "ssd" not in name:
        options |= {"min_size": size, "max_size": size}
    if kind == "quantized classification":
        options["quantize"] = True
        notes.append(note("model", "quantized to int8 with random weights: its own output is the reference, not fp32"))
    elif name.startswith("vit_"):
        options["image_size"] = size or default_size(name)
    elif name.startswith("maxvit"):
        options["input_size"] = (size or default_size(name),) * 2
    elif name in ("inception_v3", "googlenet"):
        # Without `init_weights` the constructor warns. With True it draws truncated normals, which makes building take
        # twice as long. Inference never looks at the heads.
        options |= {"init_weights": False, "aux_logits": trains}
        if trains:
            notes.append(note("model", "trains with its auxiliary heads"))
    return options


def _make(name: str, spec: WorkloadSpec, notes: list[Note]) -> nn.Module:
    model: nn.Module = get_model(name, weights=None, **_options(_kinds()[name], name, spec, notes))
    if spec.stem == "cifar":
        give_cifar_stem(model, notes)
    return model


def _inputs(model: nn.Module, kind: str, name: str, spec: WorkloadSpec, batch: int) -> tuple[Any, ...]:
    if kind == "detection":
        return _detector_inputs(model, name, spec, batch)
    size = spec.image_size or default_size(name)
    frames = (FRAMES,) if kind == "video" else ()
    pictures = torch.randn(batch, 3, *frames, size, size)
    return (pictures.tanh(), pictures.tanh().roll(2, -1)) if kind == "optical flow" else (pictures,)


def _detector_inputs(model: Any, name: str, spec: WorkloadSpec, batch: int) -> tuple[Any, ...]:
    """Returns a list of images, of the size to which the model resizes them."""
    fixed = model.transform.fixed_size
    if fixed is not None and spec.image_size not in (None, fixed[0]):
        raise SpecError(f"image_size must be {fixed[0]} for {name}, which resizes every image to that")
    size = int(fixed[0] if fixed is not None else spec.image_size or model.transform.min_size[-1])
    images = [torch.rand(3, size, size) for _ in range(batch)]
    with torch.no_grad():
        for layer in _score_layers(model):
            layer.weight.normal_(std=SPREAD / math.sqrt(layer.weight[0].numel()))
    return (images,)


def _score_layers(model: Any) -> list[Any]:
    """Returns the layers whose outputs are the scores of classes, or tell objects from the background."""
    if hasattr(model, "roi_heads"):
        return [model.roi_heads.box_predictor.cls_score, model.rpn.head.cls_logits]
    head = model.head.classification_head
    layers = [head.cls_logits] if hasattr(head, "cls_logits") else head.module_list
    return [layer[-1] if isinstance(layer, nn.Sequential) else layer for layer in layers]


def flow_loss(flows: list[Tensor]) -> Tensor:
    """Returns RAFT's own loss, with no movement as the target. Later refinements have a larger weight."""
    return torch.stack([0.8**age * flow.abs().mean() for age, flow in enumerate(reversed(flows))]).sum()


SOURCES.register("torchvision")(TorchvisionSource())
