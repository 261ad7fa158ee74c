"""Inputs for a model that names what it reads: tokens, images, frames, sound, time series.

What a model of transformers reads stands in its forward; how large it is stands in its config, under names that differ
from family to family, and so does the order of its axes. So several shapes are offered, and the model itself is asked, on a
copy without memory, which of them it takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from redline.bench.device.failure import is_of_two_devices, one_line
from redline.model.spec import WorkloadSpec

IMAGE_SIZE, SEQUENCE_LENGTH, AUDIO_SAMPLES, FRAMES, MEL_FRAMES, CONTEXT = 224, 128, 16_000, 8, 200, 64
"""Where neither the person nor the config says."""
MOST_SHAPES = 24

TOWERS = ("text_config", "vision_config", "audio_config", "backbone_config", "encoder", "decoder")
MODALITIES = {
    "input_ids": "text",
    "decoder_input_ids": "text",
    "pixel_values": "image",
    "pixel_values_videos": "video",
    "input_values": "audio",
    "input_features": "audio",
    "decoder_input_values": "audio",
    "past_values": "time",
}
"""What can be made up, by the name under which forward takes it."""
ITEMS = {"image": "img", "video": "video", "audio": "audio", "text": "seq", "time": "series"}


@dataclass(frozen=True)
class Shape:
    sizes: tuple[int, ...]
    vocabulary: int | None = None
    """Of tokens; None: numbers."""

    def draw(self) -> Tensor:
        return torch.randn(self.sizes) if self.vocabulary is None else torch.randint(0, self.vocabulary, self.sizes)

    def without_memory(self) -> Tensor:
        kind = torch.float32 if self.vocabulary is None else torch.int64
        return torch.zeros(self.sizes, dtype=kind, device="meta")


Shapes = dict[str, Shape]


@dataclass
class Offer:
    """What Redline can give a model, and what came of offering it."""

    config: Any
    batch: int
    spec: WorkloadSpec
    refusals: list[str] = field(default_factory=list)

    def accepted_by(self, model: nn.Module, names: Sequence[str]) -> Shapes | None:
        """The first shapes that the model, on the meta device, computes with; None where it refuses all."""
        for shapes in self.combinations(names):
            why = refusal(model, shapes)
            if why is None:
                return shapes
            self.refusals.append(why)
        return None

    def combinations(self, names: Sequence[str]) -> Iterator[Shapes]:
        of_each = [self.shapes(name) for name in names]
        for chosen, _ in zip(product(*of_each), range(MOST_SHAPES), strict=False):
            yield dict(zip(names, chosen, strict=True))

    def shapes(self, name: str) -> list[Shape]:
        """In the order in which they are likely."""
        if name in ("input_ids", "decoder_input_ids"):
            return [Shape((self.batch, self.length(name)), self.vocabulary(name))]
        if name in ("pixel_values", "pixel_values_videos"):
            return self._pictures(name)
        if name == "past_values":
            return self._series()
        return self._sound(name)

    def vocabulary(self, name: str = "input_ids") -> int:
        """The size of the vocabulary; a decoder's own where it has one (speech in, tokens out)."""
        parts = (get(self.config, "decoder"), self.config) if name.startswith("decoder") else (self.config,)
        found = next((size for part in parts if (size := look_up(part, "vocab_size"))), None)
        return int(found or 1000)

    def length(self, name: str = "input_ids") -> int:
        own = ("max_target_positions",) if name.startswith("decoder") else ()
        limit = look_up(self.config, *own, "max_position_embeddings", "n_positions", "max_length") or 0
        wanted = self.spec.sequence_length or SEQUENCE_LENGTH
        return wanted if self.spec.sequence_length or not 0 < limit < wanted else int(limit)

    def _pictures(self, name: str) -> list[Shape]:
        size = self.spec.image_size or look_up(self.config, "image_size", "img_size", "crop_size") or IMAGE_SIZE
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        channels = look_up(self.config, "num_channels", "in_chans", "in_channels") or 3
        frames = look_up(self.config, "num_frames", "frames_per_clip")
        picture = Shape((self.batch, channels, height, width))
        film = Shape((self.batch, frames or FRAMES, channels, height, width))
        if name == "pixel_values_videos":
            return [film]
        return [film, picture] if frames else [picture, film]

    def _sound(self, name: str) -> list[Shape]:
        samples = self.spec.sequence_length or AUDIO_SAMPLES
        bands = look_up(
            self.config, "num_mel_bins", "feature_size", "input_feat_per_channel", "num_mel_features", "n_mels"
        )
        wide = look_up(self.config, "feature_projection_input_dim", "input_dim") or bands
        frames = look_up(self.config, "max_source_positions", "max_length")
        raw = [Shape((self.batch, samples)), Shape((self.batch, look_up(self.config, "audio_channels") or 1, samples))]
        if not bands and not wide:
            return raw
        long = 2 * int(frames or MEL_FRAMES)
        mel = [
            Shape((self.batch, bands or wide, long)),
            Shape((self.batch, int(frames or MEL_FRAMES), bands or wide)),
            Shape((self.batch, MEL_FRAMES, wide or bands)),
            Shape((self.batch, bands or wide, MEL_FRAMES)),
            Shape((self.batch, 1, look_up(self.config, "spec_size") or MEL_FRAMES, bands or wide)),
        ]
        return [*raw, *mel] if name == "input_values" and not frames else [*mel, *raw]

    def _series(self) -> list[Shape]:
        steps = look_up(self.config, "context_length") or CONTEXT
        channels = look_up(self.config, "num_input_channels", "input_size") or 1
        return [Shape((self.batch, steps, channels)), Shape((self.batch, steps))]


def refusal(model: nn.Module, shapes: Shapes) -> str | None:
    """Why the model cannot compute with inputs of these shapes; None where it can, or where it cannot be told here."""
    try:
        with torch.no_grad(), _ValuesAreMissed():
            model(**{name: shape.without_memory() for name, shape in shapes.items()})
    except (NotImplementedError, _NeedsValues):
        return None  # an operator that needs real numbers, or a branch on them: with real ones it may well run
    except Exception as error:
        # A tensor that the model makes itself has memory and cannot meet those without: with real inputs it can.
        return None if is_of_two_devices(error) else one_line(error)
    return None


class _NeedsValues(Exception):
    """The model looked at a value, which tensors without memory do not have."""


class _ValuesAreMissed(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise _NeedsValues
        return func(*args, **(kwargs or {}))


def reads(model: nn.Module, whole: bool) -> list[str]:
    """The inputs to give it: the main one and what goes with it. `whole`: all of its modalities."""
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    names = [main] if isinstance(main, str) and main in parameters else []
    required = [name for name, each in parameters.items() if _is_required(each)]
    names += [name for name in required if name not in names]
    if whole:
        pairs = ("input_ids", "pixel_values", "input_features", "input_values")
        names += [name for name in pairs if name in parameters and name not in names]
    if getattr(model.config, "is_encoder_decoder", False):
        partners = ("decoder_input_ids", "decoder_input_values")
        names += [name for name in partners if name in parameters and name not in names][:1]
    return names


def _is_required(parameter: inspect.Parameter) -> bool:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in kinds


def item_of(names: Sequence[str]) -> str:
    kinds = dict.fromkeys(MODALITIES[name] for name in names if not name.startswith("decoder"))
    return "pair" if len(kinds) > 1 else ITEMS[next(iter(kinds))]


def look_up(config: Any, *names: str) -> Any:
    """The first of these settings that the config has, or one of its towers; None where it has none."""
    for part in (config, *(tower for name in TOWERS if (tower := get(config, name)) is not None)):
        for name in names:
            value = get(part, name)
            if value is not None and value is not False:
                return value
    return None


def get(config: Any, name: str) -> Any:
    """As an attribute or a key; a config may answer to a name only to complain."""
    if isinstance(config, Mapping):
        return config.get(name)
    try:
        return getattr(config, name, None)
    except Exception:
        return None
