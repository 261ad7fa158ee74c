"""`hf:NAME` builds architectures of transformers from their config, with random weights. No weights are ever loaded.

NAME is an architecture (`bert`, `gpt2`, `vit`), a folder with a config.json, or a hub id, of which only the config is read.
Inputs are made for what forward names: tokens, pixels, frames, sound or a time series, one shape each, as the config says.
A model that wants anything else, or its images in the middle of a text, is fed by a factory that brings the inputs.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from redline.bench.device.failure import first_line, is_out_of_memory
from redline.bench.workload.build import SOURCES, ExampleCode, Source, bare, refuse_options
from redline.bench.workload.decoder import (
    ENCODER,
    HfDecoder,
    WriterCode,
    cache_argument,
    drawn_prompt,
    generator_workload,
)
from redline.bench.workload.fingerprint import short_hash
from redline.bench.workload.workload import Workload, assemble, choose_batch
from redline.model.errors import MissingExtra, SpecError, UnknownName, closest
from redline.model.note import Note, note
from redline.model.protocol import ModelName
from redline.model.spec import DEFAULT_NEW_TOKENS, DEFAULT_PROMPT, WorkloadSpec

UNFED = Path(__file__).with_name("hf_unfed.txt")
"""The file lists architectures that refuse such inputs or their own default config. `tools/model_names.py --unfed` asks them all."""

IMAGE_SIZE, SEQUENCE_LENGTH, AUDIO_SAMPLES, FRAMES, MEL_FRAMES, CONTEXT = 224, 128, 16_000, 8, 200, 64
"""These sizes are used if neither the person nor the config says one."""
WHOLE = ("input_ids", "pixel_values", "input_features", "input_values")
"""A model that reads several things at once has these inputs, each in a tower of its own."""
ITEMS = {
    "input_ids": "seq",
    "decoder_input_ids": "seq",
    "pixel_values": "img",
    "pixel_values_videos": "video",
    "input_values": "audio",
    "input_features": "audio",
    "past_values": "series",
}
"""Redline can make up these inputs. The key is the name under which forward takes one. The value is what one item is called."""


class HfSource(Source):
    needs_prefix = True
    writes_text = True

    def check(self, spec: WorkloadSpec) -> None:
        refuse_options(spec, "stem", why="it is built from its config")
        config = read_config(bare(spec))
        if spec.task == "generate":
            _generating_head(config, spec)
        else:
            _configure(config, heads_for(config, spec)[0], spec)

    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        notes: list[Note] = []
        batch = choose_batch(spec.batch, spec.task, notes)
        config = read_config(bare(spec))
        if spec.task == "generate":
            return _generator(config, spec, batch, seed, notes)
        head, names, model = choose(config, spec)
        kwargs, vocabulary = make_inputs(config, names, spec, batch)
        if spec.task == "train":
            _add_labels(kwargs, vocabulary, head, config, notes)
        notes.append(note("model", f"{head.kind} from its config"))
        kinds = {ITEMS[name] for name in names if not name.startswith("decoder")}
        return assemble(
            model,
            ((), kwargs),
            task=spec.task,
            source="hf",
            identity=_identity(config),
            seed=seed,
            batch=batch,
            item="pair" if len(kinds) > 1 else kinds.pop(),
            vocabulary=vocabulary,
            notes=notes,
        )

    def writer_code(self, spec: WorkloadSpec) -> WriterCode:
        return WriterCode(spec.new_tokens or DEFAULT_NEW_TOKENS, is_hf=True)

    def example_code(self, spec: WorkloadSpec) -> ExampleCode | None:
        """Returns code for generation with an architecture by name only. The code builds its config, with the fields that were given."""
        name, _, fields = bare(spec).partition("?")
        if spec.task != "generate" or name not in config_names():
            return None
        config = read_config(bare(spec))
        auto, vocabulary = _generating_head(config, spec).auto, int(text_config(config).vocab_size)
        given = "".join(f", {field}={value!r}" for field, value in given_fields(name, fields).items())
        batch, prompt = choose_batch(spec.batch, spec.task, []), spec.prompt or DEFAULT_PROMPT
        return ExampleCode(
            imports=(f"from transformers import AutoConfig, {auto}",),
            model=f'{auto}.from_config(AutoConfig.for_model("{name}"{given})).float()',
            inputs=f"(torch.randint(0, {vocabulary}, ({batch}, {prompt})),), {{}}",
            items=batch * (spec.new_tokens or DEFAULT_NEW_TOKENS),
        )

    def fingerprint(self, spec: WorkloadSpec) -> str:
        return _identity(read_config(bare(spec)))

    def models(self) -> list[ModelName]:
        """Returns the architectures that can be fed by name. Parts of a model and backbones are left out."""
        tables, unfed = auto_tables(), set(UNFED.read_text().split())
        kinds = {
            name: next((head.kind for head in HEADS if name in tables[head.table]), None) for name in config_names()
        }
        return [
            ModelName(name=f"hf:{name}", source="hf", kind=kind)
            for name, kind in kinds.items()
            if kind and name not in unfed
        ]


def choose(config: Any, spec: WorkloadSpec) -> tuple[Head, list[str], nn.Module]:
    """Returns the first way to use the architecture that can be built and fed, the names of its inputs, and the model."""
    why: Exception | str = "transformers has no model for it"
    for head in heads_for(config, spec):
        kind = getattr(load_transformers(), head.auto)._model_mapping[type(config)]
        kind = kind[0] if isinstance(kind, tuple | list) else kind
        names = _inputs_of(kind, head, config)
        if not names or not ITEMS.keys() >= set(names):
            why = f"it needs {', '.join(name for name in names if name not in ITEMS) or 'inputs without a name'}"
            continue
        config.architectures = [kind.__name__]
        _configure(config, head, spec)
        try:
            return head, names, _built(config, head, spec)
        except SpecError as error:
            why = error
    if isinstance(why, SpecError):
        raise why
    raise SpecError(f"{spec.model} cannot be fed by name: {why}; wrap it in a factory that brings inputs")


def _inputs_of(model: type[nn.Module], head: Head, config: Any) -> list[str]:
    """Returns the names of what forward must be given: the main input and what goes with it."""
    if head.is_text_alone:
        return ["input_ids"]
    parameters = inspect.signature(model.forward).parameters
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = [
        name
        for name, one in parameters.items()
        if one.default is one.empty and one.kind not in variable and name != "self"
    ]
    main = getattr(model, "main_input_name", "input_ids")
    names = [*([main] if isinstance(main, str) else main), *required, *(WHOLE if len(head.reads) > 1 else ())]
    if getattr(config, "is_encoder_decoder", False):
        names.append("decoder_input_ids")
    return [name for name in dict.fromkeys(names) if name in parameters]


def make_inputs(
    config: Any, names: list[str], spec: WorkloadSpec, batch: int
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Returns the inputs of these names, and how many values each input of tokens may take."""
    inputs, vocabulary = {}, {}
    # Tokens that stand for images, frames and sounds would ask for such an input, so they are replaced.
    held = (*vars(config).items(), *vars(text_config(config)).items())
    special = torch.tensor([value for name, value in held if _is_special(name, value)])
    for name in names:
        if not name.endswith("input_ids"):
            inputs[name] = torch.randn(batch, *_shape(config, name, spec))
            continue
        part = get(config, "decoder") if name.startswith("decoder") else None
        vocabulary[name] = int(look_up(part, "vocab_size") or look_up(config, "vocab_size") or 1000)
        limit = look_up(config, "max_position_embeddings", "n_positions", "max_length", "max_target_positions")
        length = spec.sequence_length or min(SEQUENCE_LENGTH, limit if limit and limit > 0 else SEQUENCE_LENGTH)
        tokens = torch.randint(0, vocabulary[name], (batch, int(length)))
        plain = next(token for token in range(len(special) + 1) if token not in special)
        inputs[name] = tokens.masked_fill(torch.isin(tokens, special), plain)
    return inputs, vocabulary


def _is_special(name: str, value: Any) -> bool:
    is_mark = name.endswith(("_token_id", "_token_index")) and not name.startswith(("bos", "eos", "pad"))
    return is_mark and isinstance(value, int) and value >= 0


def _shape(config: Any, name: str, spec: WorkloadSpec) -> tuple[int, ...]:
    """Returns the shape of one item of an input that is not text, by the names that configs have for its sizes."""
    bands, steps = look_up(config, "num_mel_bins"), look_up(config, "context_length") or CONTEXT
    if name.startswith("pixel_values"):
        size = spec.image_size or look_up(config, "image_size", "img_size", "crop_size") or IMAGE_SIZE
        sides = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        picture = (look_up(config, "num_channels", "in_chans", "in_channels") or 3, *sides)
        frames = look_up(config, "num_frames", "frames_per_clip")
        return (frames or FRAMES, *picture) if frames or name != "pixel_values" else picture
    if name == "past_values":
        channels = look_up(config, "num_input_channels", "input_size")
        return (steps, channels) if channels else (steps,)
    # `input_values` are a spectrogram with one row per frame, or the wave itself.
    if name == "input_values":
        if bands and (frames := look_up(config, "max_length")):
            return frames, bands
        channels = look_up(config, "audio_channels")
        return (*([channels] if channels else []), spec.sequence_length or AUDIO_SAMPLES)
    if bands and (frames := look_up(config, "max_source_positions")):
        return bands, 2 * int(frames)  # a convolution halves the frames
    wide = look_up(config, "feature_projection_input_dim", "input_feat_per_channel", "feature_size", "input_dim")
    return MEL_FRAMES, wide or bands or 80


def _identity(config: Any) -> str:
    return f"transformers {load_transformers().__version__} {short_hash(config.to_json_string())}"


def _built(config: Any, head: Head, spec: WorkloadSpec) -> nn.Module:
    """Returns the model in fp32, because a config of the hub may ask for bf16 and the reference is fp32."""
    try:
        model: nn.Module = getattr(load_transformers(), head.auto).from_config(config).float()
    # Each config finds fields that do not fit together in its own way, so the error may be of any kind.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise SpecError(f"{spec.model} cannot be built from its config: {first_line(error)}") from error
    return model


def _generating_head(config: Any, spec: WorkloadSpec) -> Head:
    """Returns how the architecture writes text. Raises a `SpecError` if it does not, or not so much."""
    transformers = load_transformers()
    if getattr(config, "is_encoder_decoder", False):
        raise SpecError(f"{spec.model} has an encoder: {ENCODER}")
    if config.model_type not in auto_tables()["CAUSAL_LM"]:
        raise SpecError(f"{spec.model} writes no text: transformers has no causal model of it")
    if "config" not in inspect.signature(transformers.DynamicCache.__init__).parameters:
        raise SpecError(
            f"transformers {transformers.__version__} is too old for --task generate: install 4.56 or later"
        )
    prompt, new_tokens = spec.prompt or DEFAULT_PROMPT, spec.new_tokens or DEFAULT_NEW_TOKENS
    limit = getattr(text_config(config), "max_position_embeddings", None)
    needed = prompt + new_tokens - 1
    if isinstance(limit, int) and 0 < limit < needed:
        raise SpecError(
            f"prompt {prompt} and new_tokens {new_tokens} need {needed} positions; {spec.model} has {limit}: "
            f"ask for fewer, or for more with ?max_position_embeddings={needed}"
        )
    return next(head for head in HEADS if head.table == "CAUSAL_LM")


def _generator(config: Any, spec: WorkloadSpec, batch: int, seed: int, notes: list[Note]) -> Workload:
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # older versions have it there
        from transformers.modeling_utils import no_init_weights
    head = _generating_head(config, spec)
    for part in (config, text_config(config)):
        if hasattr(part, "use_cache"):
            part.use_cache = True
    # Drawing a billion weights one by one would take longer than measuring them.
    with no_init_weights():
        model: Any = _built(config, head, spec)
    # transformers ties weights when it draws them, which was left out above.
    model.tie_weights()
    if cache_argument(model) is None:
        raise SpecError(f"{spec.model}: its forward takes no cache of transformers, so that it cannot be decoded here")
    _fill(model, getattr(text_config(config), "initializer_range", None) or 0.02)
    vocabulary = int(text_config(config).vocab_size)
    decoder = HfDecoder(model, drawn_prompt(spec, batch, vocabulary, seed), spec.new_tokens or DEFAULT_NEW_TOKENS)
    notes.append(note("model", f"{head.kind} from its config"))
    return generator_workload(decoder, source="hf", identity=_identity(config), seed=seed, notes=notes)


def _fill(model: nn.Module, scale: float) -> None:
    """Fills matrices with a repeated stretch of normal numbers that begins elsewhere in each, biases with zeros, and other
    weights with ones."""
    stretch = torch.randn(2**20 + 7) * scale
    with torch.no_grad():
        for number, (name, weight) in enumerate(model.named_parameters()):
            if weight.ndim < 2:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            shifted = stretch.roll(-7919 * number)
            for part in weight.view(-1).split(len(shifted)):
                part.copy_(shifted[: len(part)])


def _configure(config: Any, head: Head, spec: WorkloadSpec) -> None:
    """Puts the spec's options into the config, or says which of them cannot be honoured."""
    if head.reads == ("image",):
        refuse_options(spec, "sequence_length", why="it takes images")
    if "image" in head.reads:
        holder = vision_config(config)
        patch = getattr(holder, "patch_size", None)
        if spec.image_size is not None and hasattr(holder, "image_size"):
            if isinstance(patch, int) and spec.image_size % patch:
                raise SpecError(f"image_size must be a multiple of {patch} for {spec.model}, got {spec.image_size}")
            holder.image_size = spec.image_size
    elif head.reads:
        refuse_options(spec, "image_size", why="it takes no images")
    if "text" in head.reads:
        limit = getattr(text_config(config), "max_position_embeddings", None)
        if spec.sequence_length and limit and 0 < limit < spec.sequence_length:
            raise SpecError(f"sequence_length must be {limit} or less for {spec.model}, got {spec.sequence_length}")
    if spec.classes is not None:
        if head.labels not in ("class", "pixels"):
            refuse_options(spec, "classes", why=f"it is built for {head.kind}")
        config.num_labels = spec.classes
    if head is TEXT_CLASSES and getattr(config, "pad_token_id", None) is None:
        # Decoders look for this token to find the last token of each row.
        config.pad_token_id = 0
    for part in (config, text_config(config)):
        if getattr(part, "use_cache", None):
            part.use_cache = False


def _add_labels(kwargs: dict[str, Any], vocabulary: dict[str, int], head: Head, config: Any, notes: list[Note]) -> None:
    """Adds labels, with which the model computes its own loss."""
    if head.labels == "none":
        notes.append(note("model", "its own loss needs annotations: it is trained on cross-entropy of its outputs"))
        return
    main, like = next(iter(kwargs.values())), "input_ids" if "input_ids" in kwargs else "decoder_input_ids"
    shape = {"class": main.shape[:1], "pixels": (*main.shape[:1], *main.shape[-2:])}.get(head.labels)
    vocabulary["labels"] = config.num_labels if shape is not None else vocabulary[like]
    kwargs["labels"] = torch.randint(0, vocabulary["labels"], kwargs[like].shape if shape is None else shape)


SOURCES.register("hf")(HfSource())


REACH_SECONDS = 3.0
"""A hub that does not answer within this time counts as out of reach. The hub's own client would try for half a minute."""


class Head(NamedTuple):
    """This is one way to use an architecture: the table of transformers that lists it, and the auto class that builds it."""

    kind: str
    table: str
    auto: str
    reads: tuple[str, ...]
    """It reads text, images or sound. The field is empty if only the model itself says what it reads."""
    labels: Literal["class", "tokens", "pixels", "none"] = "none"
    """Its own loss takes labels of this kind, if Redline can make them up."""
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
"""They are in order of preference: BERT is in two of these tables and means the masked one; CLIP is two towers, not one."""


def read_config(name: str) -> Any:
    """Returns the config of an architecture, of a folder or of a hub id, with the fields that follow a `?` put in.

    Every failure is reported in one line.
    """
    name, _, fields = name.partition("?")
    config, given = _plain_config(name), given_fields(name, fields)
    text = text_config(config)
    for field in given:
        if not hasattr(text, field):
            near = closest(field, [known for known in vars(text) if not known.startswith("_")], count=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SpecError(f"hf:{name}: its config has no field {field!r}{hint}")
    # The config is made anew, so that settings which follow from the given fields are worked out again.
    if given and text is config and name in config_names():
        return _read(load_transformers().AutoConfig.for_model, name, name, **given)
    for field, value in given.items():
        setattr(text, field, value)
    return config


def given_fields(name: str, fields: str) -> dict[str, Any]:
    """Returns the fields that follow a `?`, with their values. A value may be a list, with commas of its own."""
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


def _require_hub(name: str) -> None:
    """Fails at once where there is no network, because the hub's own client tries for half a minute. If there is a proxy we
    do not check, because we cannot know how far it reaches."""
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if not {"https_proxy", "all_proxy"} & {variable.lower() for variable in os.environ}:
        try:
            socket.create_connection((address.hostname or "", address.port or 443), timeout=REACH_SECONDS).close()
        except OSError as error:
            unreached = f"{address.hostname} cannot be reached ({first_line(error)})"
            raise SpecError(f"hf:{name}: {unreached}; use a local folder") from error


def _read(reader: Callable[..., Any], name: str, where: str, **options: Any) -> Any:
    try:
        return reader(where, **options)
    # Configs check themselves, each in its own way.
    except Exception as error:
        raise SpecError(f"hf:{name}: its config cannot be read: {first_line(error)}") from error


def heads_for(config: Any, spec: WorkloadSpec) -> list[Head]:
    """Returns the heads of the architecture, beginning with what it is mostly used for. Asking for classes of a text model
    means classifying."""
    tables, kind = auto_tables(), config.model_type
    heads = [head for head in HEADS if kind in tables[head.table]]
    towers = sum(get(config, name) is not None for name in ("text_config", "vision_config", "qformer_config"))
    if towers < 2:
        heads = [head for head in heads if len(head.reads) == 1 or len(heads) == 1]
    if getattr(config, "is_encoder_decoder", False):
        # Only the decoder of such a model is a causal language model. A speech model is an example.
        heads = [head for head in heads if head.table != "CAUSAL_LM"]
    if spec.classes is not None and TEXT_CLASSES in heads and heads[0].reads == ("text",):
        return [TEXT_CLASSES]
    return [*heads, BARE] if kind in tables[""] else heads or [BARE]


TOWERS = ("text_config", "vision_config", "audio_config", "backbone_config", "encoder", "decoder")


def look_up(config: Any, *names: str) -> Any:
    """Returns the first of these settings that the config has, or one of its towers. Returns None if none has it."""
    parts = [config, *(get(config, name) for name in TOWERS)]
    values = (get(part, name) for part in parts if part is not None for name in names)
    return next((value for value in values if value is not None and value is not False), None)


def get(config: Any, name: str) -> Any:
    """Returns an attribute or a key. A config may answer to a name only to complain, so errors count as a missing name."""
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

    # An installed version of transformers may not have all of these tables.
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
