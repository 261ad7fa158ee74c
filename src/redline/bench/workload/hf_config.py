"""What transformers says of an architecture: its config, from a name, a folder or the hub, and what it is used for."""

from __future__ import annotations

import ast
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from redline.bench.device.failure import first_line
from redline.model.errors import MissingExtra, SpecError, UnknownName, closest
from redline.model.spec import WorkloadSpec

REACH_SECONDS = 3.0


class Head(NamedTuple):
    """One way to use an architecture: the table of transformers that lists it, and the auto class that builds it."""

    kind: str
    table: str
    auto: str
    reads: tuple[str, ...]
    """What it reads: text, images, sound. It is empty if only the model itself says."""
    labels: Literal["class", "tokens", "pixels", "none"] = "none"
    """What its own loss is made of, if Redline can make that up."""
    is_text_alone: bool = False
    """Its images stand in the middle of its text, which nothing but its own processor makes: only text goes through it."""


TEXT_CLASSES = Head(
    "text classification", "SEQUENCE_CLASSIFICATION", "AutoModelForSequenceClassification", ("text",), "class"
)
BARE = Head("features", "", "AutoModel", ())
HEADS = (
    Head("image and text towers", "ZERO_SHOT_IMAGE_CLASSIFICATION", "AutoModel", ("image", "text")),
    Head("image classification", "IMAGE_CLASSIFICATION", "AutoModelForImageClassification", ("image",), "class"),
    Head("video classification", "VIDEO_CLASSIFICATION", "AutoModelForVideoClassification", ("image",), "class"),
    Head("speech to text", "SPEECH_SEQ_2_SEQ", "AutoModelForSpeechSeq2Seq", ("audio",), "tokens"),
    Head("speech recognition", "CTC", "AutoModelForCTC", ("audio",)),
    Head("audio classification", "AUDIO_CLASSIFICATION", "AutoModelForAudioClassification", ("audio",), "class"),
    Head(
        "image and text to text, text only: its other towers are not run,",
        "IMAGE_TEXT_TO_TEXT",
        "AutoModelForImageTextToText",
        ("image", "text"),
        "tokens",
        is_text_alone=True,
    ),
    Head("visual questions", "VISUAL_QUESTION_ANSWERING", "AutoModelForVisualQuestionAnswering", ("image", "text")),
    Head("sequence to sequence", "SEQ_TO_SEQ_CAUSAL_LM", "AutoModelForSeq2SeqLM", ("text",), "tokens"),
    Head("masked language model", "MASKED_LM", "AutoModelForMaskedLM", ("text",), "tokens"),
    Head("causal language model", "CAUSAL_LM", "AutoModelForCausalLM", ("text",), "tokens"),
    Head("object detection", "OBJECT_DETECTION", "AutoModelForObjectDetection", ("image",)),
    Head("semantic segmentation", "SEMANTIC_SEGMENTATION", "AutoModelForSemanticSegmentation", ("image",), "pixels"),
    Head("segmentation", "UNIVERSAL_SEGMENTATION", "AutoModelForUniversalSegmentation", ("image",)),
    Head("depth estimation", "DEPTH_ESTIMATION", "AutoModelForDepthEstimation", ("image",)),
    Head("mask generation", "MASK_GENERATION", "AutoModelForMaskGeneration", ("image",)),
    Head("keypoint detection", "KEYPOINT_DETECTION", "AutoModelForKeypointDetection", ("image",)),
    Head("time series", "TIME_SERIES_PREDICTION", "AutoModelForTimeSeriesPrediction", ("time",)),
    TEXT_CLASSES,
)
"""In order of preference: BERT is in two of these tables, and means the masked one; CLIP is two towers, not one."""


def read_config(name: str) -> Any:
    """Returns the config of an architecture, of a folder or of a hub id, with the fields that follow a `?` put in.

    Every way to fail ends in one line.
    """
    name, _, fields = name.partition("?")
    config, given = _plain_config(name), given_fields(name, fields)
    text = text_config(config)
    for field in given:
        if not hasattr(text, field):
            near = closest(field, [known for known in vars(text) if not known.startswith("_")], count=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SpecError(f"hf:{name}: its config has no field {field!r}{hint}")
    if given and text is config and name in config_names():  # made anew, so that what follows from them follows
        return _read(load_transformers().AutoConfig.for_model, name, name, **given)
    for field, value in given.items():
        setattr(text, field, value)
    return config


def given_fields(name: str, fields: str) -> dict[str, Any]:
    """Returns what follows a `?` as values; a value may be a list, with commas of its own."""
    given: dict[str, Any] = {}
    for part in re.split(r",(?=\s*\w+\s*=)", fields) if fields else ():
        field, _, value = (piece.strip() for piece in part.partition("="))
        if not field or not value:
            raise SpecError(
                f"hf:{name}: write config fields as hf:{name}?hidden_size=256,num_hidden_layers=2, got {part!r}"
            )
        try:
            given[field] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            given[field] = {"true": True, "false": False, "none": None}.get(value.lower(), value)
    return given


def _plain_config(name: str) -> Any:
    auto = load_transformers().AutoConfig
    if name in config_names():
        return _read(auto.for_model, name, name)
    folder = Path(name).expanduser()
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise SpecError(f"hf:{name}: the folder has no config.json")
        return _read(auto.from_pretrained, name, str(folder), local_files_only=True)
    if name.startswith((".", "/", "~")):
        raise SpecError(f"hf:{name}: no such folder")
    if "/" not in name:
        hint = "an architecture, a folder with a config.json, or a hub id as owner/name"
        raise UnknownName("model", f"hf:{name}", (f"hf:{known}" for known in config_names()), hint=hint)
    try:
        return auto.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        _require_hub(name)
    return _read(auto.from_pretrained, name, name)


def _read(reader: Callable[..., Any], name: str, where: str, **options: Any) -> Any:
    try:
        return reader(where, **options)
    except Exception as error:  # configs check themselves, each in its own way
        raise SpecError(f"hf:{name}: its config cannot be read: {first_line(error)}") from error


def _require_hub(name: str) -> None:
    """Fail at once where there is no network: the hub's own client tries for half a minute."""
    if any(variable.lower() in ("https_proxy", "all_proxy") for variable in os.environ):
        return  # how far the proxy reaches is not ours to know
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "huggingface.co", port), timeout=REACH_SECONDS).close()
    except OSError as error:
        raise SpecError(
            f"hf:{name}: {address.hostname} cannot be reached ({first_line(error)}); use a local folder"
        ) from error


def heads_for(config: Any, spec: WorkloadSpec) -> list[Head]:
    """Returns what the architecture is mostly used for, first; asking for classes of a text model means classifying."""
    tables, kind = auto_tables(), config.model_type
    heads = [head for head in HEADS if kind in tables[head.table]]
    towers = sum(get(config, name) is not None for name in ("text_config", "vision_config", "qformer_config"))
    if towers < 2:
        heads = [head for head in heads if len(head.reads) == 1 or len(heads) == 1]
    if getattr(config, "is_encoder_decoder", False):
        # Only its decoder is a causal language model: a speech model, for one.
        heads = [head for head in heads if head.table != "CAUSAL_LM"]
    if spec.classes is not None and TEXT_CLASSES in heads and heads[0].reads == ("text",):
        return [TEXT_CLASSES]
    return [*heads, BARE] if kind in tables[""] else heads or [BARE]


TOWERS = ("text_config", "vision_config", "audio_config", "backbone_config", "encoder", "decoder")


def look_up(config: Any, *names: str) -> Any:
    """Returns the first of these settings that the config has, or one of its towers; None if none has it."""
    parts = [config, *(get(config, name) for name in TOWERS)]
    values = (get(part, name) for part in parts if part is not None for name in names)
    return next((value for value in values if value is not None and value is not False), None)


def get(config: Any, name: str) -> Any:
    """Returns an attribute or a key; a config may answer to a name only to complain."""
    if isinstance(config, Mapping):
        return config.get(name)
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def text_config(config: Any) -> Any:
    return getattr(config, "text_config", None) or config


def vision_config(config: Any) -> Any:
    return config if hasattr(config, "image_size") else getattr(config, "vision_config", None) or config


def auto_tables() -> dict[str, Any]:
    load_transformers()
    from transformers.models.auto import modeling_auto

    # A version of transformers may not know all of them.
    named = {head.table: getattr(modeling_auto, f"MODEL_FOR_{head.table}_MAPPING_NAMES", {}) for head in HEADS}
    return {**named, "": modeling_auto.MODEL_MAPPING_NAMES}


def config_names() -> list[str]:
    load_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def load_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtra("hf:NAME", "transformers", "hf") from None
    return transformers
