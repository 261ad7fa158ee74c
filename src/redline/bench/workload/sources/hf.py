"""`hf:NAME`: architectures of transformers from their config, with random weights; no weights are ever loaded.

NAME is an architecture (`bert`, `gpt2`, `vit`), a folder with a config.json, or a hub id, of which only the config is read.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from redline.bench.workload.fingerprint import short_hash
from redline.bench.workload.source import SOURCES, Source, refuse_options
from redline.bench.workload.workload import Workload, assemble, choose_batch
from redline.errors import MissingExtra, SpecError, UnknownName
from redline.note import Note, note
from redline.protocol import ModelName
from redline.spec import WorkloadSpec

IMAGE_SIZE, SEQUENCE_LENGTH, AUDIO_SAMPLES = 224, 128, 16_000
REACH_SECONDS = 3.0


@dataclass(frozen=True)
class Head:
    """One way to use an architecture: which auto class builds it and what it reads."""

    kind: str
    auto: str
    reads: str | None
    """The main input; None: the model itself says."""


IMAGE = Head("image classification", "AutoModelForImageClassification", "pixel_values")
SEQ2SEQ = Head("sequence to sequence", "AutoModelForSeq2SeqLM", "input_ids")
MASKED = Head("masked language model", "AutoModelForMaskedLM", "input_ids")
CAUSAL = Head("causal language model", "AutoModelForCausalLM", "input_ids")
TEXT_CLASSES = Head("text classification", "AutoModelForSequenceClassification", "input_ids")
BARE = Head("features", "AutoModel", None)

_TABLES = {
    "IMAGE_CLASSIFICATION": IMAGE,
    "SEQ_TO_SEQ_CAUSAL_LM": SEQ2SEQ,
    "MASKED_LM": MASKED,
    "CAUSAL_LM": CAUSAL,
}
"""In order of preference: BERT is in two of them, and means the masked one."""


class HfSource(Source):
    needs_prefix = True

    def check(self, spec: WorkloadSpec) -> None:
        refuse_options(spec, "stem", why="it is built from its config")
        config = read_config(_bare(spec.model))
        _configure(config, choose_head(config, spec), spec)

    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        notes: list[Note] = []
        batch = choose_batch(spec.batch, spec.task, notes)
        config = read_config(_bare(spec.model))
        head = choose_head(config, spec)
        _configure(config, head, spec)
        # A config of the hub may ask for bf16; the reference is fp32.
        model: nn.Module = getattr(_transformers(), head.auto).from_config(config).float()
        reads = head.reads or str(getattr(model, "main_input_name", ""))
        kwargs, vocabulary = _inputs(config, reads, batch, spec)
        _check_positions(model, kwargs.get("input_ids"), spec)
        if spec.task == "train":
            _add_labels(kwargs, vocabulary, head, config)
        notes.append(note("model", f"{head.kind} from its config"))
        return assemble(
            model,
            ((), kwargs),
            task=spec.task,
            source="hf",
            identity=_identity(config),
            seed=seed,
            batch=batch,
            item="img" if reads == "pixel_values" else "seq",
            vocabulary=vocabulary,
            notes=notes,
        )

    def fingerprint(self, spec: WorkloadSpec) -> str:
        return _identity(read_config(_bare(spec.model)))

    def models(self) -> list[ModelName]:
        tables = _auto_tables()
        names = _config_names()
        kinds = {
            name: next((head.kind for table, head in _TABLES.items() if name in tables[table]), "features")
            for name in names
        }
        return [ModelName(name=f"hf:{name}", source="hf", kind=kinds[name]) for name in names]


def _identity(config: Any) -> str:
    return f"transformers {_transformers().__version__} {short_hash(config.to_json_string())}"


def read_config(name: str) -> Any:
    """The config of an architecture, of a folder or of a hub id; every way to fail ends in one line."""
    auto = _transformers().AutoConfig
    if name in _config_names():
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
        raise UnknownName("model", f"hf:{name}", (f"hf:{known}" for known in _config_names()), hint=hint)
    try:
        return auto.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        _require_hub(name)
    return _read(auto.from_pretrained, name, name)


def choose_head(config: Any, spec: WorkloadSpec) -> Head:
    """What the architecture is mostly used for; asking for classes of a text model means classifying."""
    tables, kind = _auto_tables(), config.model_type
    head = next((head for table, head in _TABLES.items() if kind in tables[table]), BARE)
    if head is CAUSAL and getattr(config, "is_encoder_decoder", False):
        head = BARE  # only its decoder is a causal language model: a speech model, for one
    if spec.classes is not None and head is not IMAGE and kind in tables["SEQUENCE_CLASSIFICATION"]:
        return TEXT_CLASSES
    return head


def _configure(config: Any, head: Head, spec: WorkloadSpec) -> None:
    """Put the spec's options into the config, or say which of them cannot be honoured."""
    if head.reads == "pixel_values":
        refuse_options(spec, "sequence_length", why="it takes images")
        _set_image_size(config, spec)
    elif head.reads == "input_ids":
        refuse_options(spec, "image_size", why="it takes tokens")
        limit = getattr(_text_config(config), "max_position_embeddings", None)
        if spec.sequence_length and limit and 0 < limit < spec.sequence_length:
            raise SpecError(f"sequence_length must be {limit} or less for {spec.model}, got {spec.sequence_length}")
    if spec.classes is not None:
        if head not in (IMAGE, TEXT_CLASSES):
            refuse_options(spec, "classes", why=f"it is built as a {head.kind}")
        config.num_labels = spec.classes
    if head is TEXT_CLASSES and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # decoders look for it to find the last token of each row
    for part in (config, _text_config(config)):
        if getattr(part, "use_cache", None):
            part.use_cache = False


def _set_image_size(config: Any, spec: WorkloadSpec) -> None:
    holder = _vision_config(config)
    if spec.image_size is None or not hasattr(holder, "image_size"):
        return
    patch = getattr(holder, "patch_size", None)
    if isinstance(patch, int) and spec.image_size % patch:
        raise SpecError(f"image_size must be a multiple of {patch} for {spec.model}, got {spec.image_size}")
    holder.image_size = spec.image_size


def _inputs(config: Any, reads: str, batch: int, spec: WorkloadSpec) -> tuple[dict[str, Tensor], dict[str, int]]:
    if reads == "pixel_values":
        holder = _vision_config(config)
        size = spec.image_size or getattr(holder, "image_size", None) or IMAGE_SIZE
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        return {reads: torch.randn(batch, getattr(holder, "num_channels", 3), height, width)}, {}
    text = _text_config(config)
    if reads == "input_ids" and isinstance(getattr(text, "vocab_size", None), int):
        limit = getattr(text, "max_position_embeddings", None) or 0
        length = spec.sequence_length or (min(SEQUENCE_LENGTH, limit) if limit > 0 else SEQUENCE_LENGTH)
        names = [reads, "decoder_input_ids"] if getattr(config, "is_encoder_decoder", False) else [reads]
        vocabulary = dict.fromkeys(names, int(text.vocab_size))
        return {name: torch.randint(0, vocabulary[name], (batch, length)) for name in names}, vocabulary
    if reads == "input_values":
        return {reads: torch.randn(batch, spec.sequence_length or AUDIO_SAMPLES)}, {}
    raise SpecError(
        f"{spec.model} reads {reads or 'something unknown'}, which Redline cannot make up: wrap it in a factory"
    )


def _add_labels(kwargs: dict[str, Tensor], vocabulary: dict[str, int], head: Head, config: Any) -> None:
    """With labels the model computes its own loss."""
    if head in (IMAGE, TEXT_CLASSES):
        batch = next(iter(kwargs.values())).shape[0]
        vocabulary["labels"] = config.num_labels
        kwargs["labels"] = torch.randint(0, config.num_labels, (batch,))
    elif head is not BARE:
        vocabulary["labels"] = vocabulary["input_ids"]
        kwargs["labels"] = torch.randint(0, vocabulary["labels"], kwargs["input_ids"].shape)


def _check_positions(model: nn.Module, tokens: Tensor | None, spec: WorkloadSpec) -> None:
    """RoBERTa and its kin begin counting behind the padding index: past the table, a GPU dies without a word."""
    for name, module in model.named_modules():
        if (
            tokens is None
            or not isinstance(module, nn.Embedding)
            or module.padding_idx is None
            or "position" not in name
        ):
            continue
        limit = module.num_embeddings - module.padding_idx - 1
        if tokens.shape[1] > limit:
            raise SpecError(f"sequence_length must be {limit} or less for {spec.model}, got {tokens.shape[1]}")


def _read(reader: Callable[..., Any], name: str, where: str, **options: Any) -> Any:
    try:
        return reader(where, **options)
    except Exception as error:  # configs check themselves, each in its own way
        raise SpecError(f"hf:{name}: its config cannot be read: {_first_line(error)}") from error


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
            f"hf:{name}: {address.hostname} cannot be reached ({_first_line(error)}); use a local folder"
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__  # some list every architecture there is


def _text_config(config: Any) -> Any:
    return getattr(config, "text_config", None) or config


def _vision_config(config: Any) -> Any:
    return config if hasattr(config, "image_size") else getattr(config, "vision_config", None) or config


def _auto_tables() -> dict[str, Any]:
    _transformers()
    from transformers.models.auto import modeling_auto

    return {
        name: getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES")
        for name in (*_TABLES, "SEQUENCE_CLASSIFICATION")
    }


def _config_names() -> list[str]:
    _transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtra("hf:NAME", "transformers", "hf") from None
    return transformers


def _bare(model: str) -> str:
    return model.removeprefix("hf:")


SOURCES.register("hf")(HfSource())
