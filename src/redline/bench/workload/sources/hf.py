"""`hf:NAME`: architectures of transformers from their config, with random weights; no weights are ever loaded.

NAME is an architecture (`bert`, `gpt2`, `vit`), a folder with a config.json, or a hub id, of which only the config is read.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline.bench.device.failure import first_line, is_out_of_memory
from redline.bench.workload.decoder import WriterCode, drawn_prompt, generator_workload
from redline.bench.workload.fingerprint import short_hash
from redline.bench.workload.hf_config import (
    HEADS,
    TEXT_CLASSES,
    Head,
    auto_tables,
    config_names,
    given_fields,
    heads_for,
    load_transformers,
    read_config,
    text_config,
    vision_config,
)
from redline.bench.workload.hf_decoder import HfDecoder, cache_argument, hf_writer
from redline.bench.workload.inputs import Inputs, seeded
from redline.bench.workload.modalities import MODALITIES, Offer, Shape, Shapes, get, item_of, look_up, reads
from redline.bench.workload.source import SOURCES, ExampleCode, Source, refuse_options
from redline.bench.workload.structure import named_tensors
from redline.bench.workload.workload import Workload, assemble, choose_batch
from redline.model.errors import SpecError
from redline.model.note import Note, note
from redline.model.questions import ModelName
from redline.model.spec import DEFAULT_NEW_TOKENS, DEFAULT_PROMPT, WorkloadSpec

UNFED = Path(__file__).with_name("hf_unfed.txt")
"""Architectures that refuse what Redline can make up, or their own default config; `check_model_names.py --unfed` asks them."""


class HfSource(Source):
    needs_prefix = True
    writes_text = True

    def check(self, spec: WorkloadSpec) -> None:
        refuse_options(spec, "stem", why="it is built from its config")
        config = read_config(_bare(spec.model))
        if spec.task == "generate":
            _generating_head(config, spec)
            return
        heads = heads_for(config, spec)
        _configure(config, heads[0], spec)

    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        notes: list[Note] = []
        batch = choose_batch(spec.batch, spec.task, notes)
        config = read_config(_bare(spec.model))
        if spec.task == "generate":
            return _generator(config, spec, batch, seed, notes)
        choice = choose(config, spec, batch)
        head = choice.head
        # A config of the hub may ask for bf16; the reference is fp32.
        model: nn.Module = getattr(load_transformers(), head.auto).from_config(choice.config).float()
        kwargs = choice.draw()
        _check_positions(model, kwargs.get("input_ids"), spec)
        vocabulary = {name: shape.vocabulary for name, shape in choice.shapes.items() if shape.vocabulary}
        if spec.task == "train":
            _add_labels(kwargs, vocabulary, choice, notes)
        notes.append(note("model", f"{choice.described} from its config"))
        workload = assemble(
            model,
            ((), kwargs),
            task=spec.task,
            source="hf",
            identity=_identity(config),
            seed=seed,
            batch=batch,
            item=item_of(list(choice.shapes)),
            inputs_are_free=choice.image_tokens == 0,
            vocabulary=vocabulary,
            notes=notes,
        )
        if choice.image_tokens:  # drawn anew, tokens would no longer say where the image belongs
            workload.again = lambda seed, _: choice.again(seed, kwargs)
        return workload

    def writer_code(self, spec: WorkloadSpec) -> WriterCode:
        return hf_writer(read_config(_bare(spec.model)), spec.new_tokens or DEFAULT_NEW_TOKENS)

    def example_code(self, spec: WorkloadSpec) -> ExampleCode | None:
        """For generation with architectures by name: the config with its fields."""
        name, _, fields = _bare(spec.model).partition("?")
        if spec.task != "generate" or name not in config_names():
            return None
        config = read_config(_bare(spec.model))
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
        return _identity(read_config(_bare(spec.model)))

    def models(self) -> list[ModelName]:
        """Those that can be fed by name; parts of a model and backbones are left out."""
        tables, unfed = auto_tables(), set(UNFED.read_text().split())
        kinds = {
            name: next((head.kind for head in HEADS if name in tables[head.table]), None)
            for name in config_names()
            if name not in unfed
        }
        return [ModelName(name=f"hf:{name}", source="hf", kind=kind) for name, kind in kinds.items() if kind]


def _identity(config: Any) -> str:
    return f"transformers {load_transformers().__version__} {short_hash(config.to_json_string())}"


@dataclass
class Choice:
    """How an architecture is built and fed."""

    head: Head
    config: Any
    shapes: Shapes
    is_partial: bool = False
    """Only its text goes through it: nothing could be made up for its other towers."""
    image_tokens: int = 0
    """How many positions in front of the text each image takes."""

    @property
    def described(self) -> str:
        return f"{self.head.kind}, text only: its other towers are not run," if self.is_partial else self.head.kind

    def draw(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {name: shape.draw() for name, shape in self.shapes.items()}
        if (tokens := kwargs.get("input_ids")) is not None and (self.image_tokens or self.is_partial):
            special = _special_tokens(self.config)
            plain = next(number for number in range(len(special) + 1) if number not in special)
            kwargs["input_ids"] = tokens.masked_fill(torch.isin(tokens, torch.tensor(sorted(special))), plain)
        if self.image_tokens:
            kwargs["input_ids"][:, : self.image_tokens] = _image_token(self.config)
        return kwargs

    def again(self, seed: int, like: dict[str, Any]) -> Inputs:
        """Other inputs of the same kind; labels stay."""
        with seeded(seed):
            return (), {**like, **self.draw()}


def choose(config: Any, spec: WorkloadSpec, batch: int) -> Choice:
    """The first way to use the architecture whose inputs can be made up; the model says so on a copy without memory."""
    reasons: list[str] = []
    for head in heads_for(config, spec):
        own = copy.deepcopy(config)
        _configure(own, head, spec)
        try:
            with torch.device("meta"):
                model = getattr(load_transformers(), head.auto).from_config(own).eval()
        except Exception as error:  # an architecture may refuse its own defaults, each in its own way
            reasons.append(first_line(error))
            continue
        offer = Offer(own, batch, spec)
        names = reads(model, head.is_whole)
        strange = [name for name in names if name not in MODALITIES]
        if strange:
            reasons.append(f"it needs {', '.join(strange)}")
            continue
        tokens = _image_tokens(model, offer, names) if head.is_whole else 0
        if tokens and (found := offer.accepted_by(_LongerText(model, tokens), names)) is not None:
            longer = {**found, "input_ids": _longer(found["input_ids"], tokens)}
            return Choice(head, own, longer, image_tokens=tokens)
        if (found := offer.accepted_by(model, names)) is not None:
            return Choice(head, own, found)
        reasons += offer.refusals[:1]
        if head.is_whole and "input_ids" in names and (found := offer.accepted_by(model, ["input_ids"])) is not None:
            return Choice(head, own, found, is_partial=True)
    told = reasons[0] if reasons else "transformers has no model for it"
    raise SpecError(f"{spec.model} cannot be fed by name: {told}; wrap it in a factory that brings inputs")


def _generating_head(config: Any, spec: WorkloadSpec) -> Head:
    """How the architecture writes text; a `SpecError` where it does not, or not so much."""
    tables, kind = auto_tables(), config.model_type
    table = "SEQ_TO_SEQ_CAUSAL_LM" if getattr(config, "is_encoder_decoder", False) else "CAUSAL_LM"
    if kind in tables["SPEECH_SEQ_2_SEQ"] and kind not in tables[table]:
        raise SpecError(
            f"{spec.model} writes text from sound, and --task generate reads a prompt of tokens; without it one forward "
            "of encoder and decoder is measured"
        )
    if kind not in tables[table]:
        raise SpecError(f"{spec.model} writes no text: transformers has no causal or text-to-text model of it")
    _require_caches_by_config()
    prompt, new_tokens = spec.prompt or DEFAULT_PROMPT, spec.new_tokens or DEFAULT_NEW_TOKENS
    limit = getattr(text_config(config), "max_position_embeddings", None)
    needed = max(prompt, new_tokens) if table != "CAUSAL_LM" else prompt + new_tokens - 1
    if isinstance(limit, int) and 0 < limit < needed:
        raise SpecError(
            f"prompt {prompt} and new_tokens {new_tokens} need {needed} positions; {spec.model} has {limit}: "
            f"ask for fewer, or for more with ?max_position_embeddings={needed}"
        )
    return next(head for head in HEADS if head.table == table)


def _require_caches_by_config() -> None:
    transformers = load_transformers()
    if "config" not in inspect.signature(transformers.DynamicCache.__init__).parameters:
        raise SpecError(
            f"transformers {transformers.__version__} is too old for --task generate: its caches are not made from a config; "
            "install 4.56 or later"
        )


def _generator(config: Any, spec: WorkloadSpec, batch: int, seed: int, notes: list[Note]) -> Workload:
    head = _generating_head(config, spec)
    for part in (config, text_config(config)):
        if hasattr(part, "use_cache"):
            part.use_cache = True
    try:
        with _without_first_weights():
            model: nn.Module = getattr(load_transformers(), head.auto).from_config(config).float()
    except Exception as error:  # fields that do not fit together are found out in many ways
        if is_out_of_memory(error):
            raise
        raise SpecError(f"{spec.model} cannot be built from its config: {first_line(error)}") from error
    model.tie_weights()  # type: ignore[operator]  # which goes with the first weights
    if cache_argument(model) is None:
        raise SpecError(f"{spec.model}: its forward takes no cache of transformers, so that it cannot be decoded here")
    _fill(model, getattr(text_config(config), "initializer_range", None) or 0.02)
    vocabulary = int(text_config(config).vocab_size)
    decoder = HfDecoder(model, drawn_prompt(spec, batch, vocabulary, seed), spec.new_tokens or DEFAULT_NEW_TOKENS)
    notes.append(note("model", f"{head.kind} from its config"))
    return generator_workload(decoder, source="hf", identity=_identity(config), seed=seed, notes=notes)


def _without_first_weights() -> Any:
    """Drawing a billion weights one by one takes longer than measuring them: they are filled in afterwards."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        from transformers.modeling_utils import no_init_weights
    return no_init_weights()


def _fill(model: nn.Module, scale: float) -> None:
    """Matrices get a stretch of normal numbers over and over, each begun elsewhere; other weights ones, biases zeros."""
    stretch = torch.randn(2**20 + 7) * scale
    with torch.no_grad():
        for number, (name, weight) in enumerate(model.named_parameters()):
            if weight.ndim < 2:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            flat, shifted = weight.view(-1), stretch.roll(-7919 * number)
            for first in range(0, flat.numel(), shifted.numel()):
                part = flat[first : first + shifted.numel()]
                part.copy_(shifted[: part.numel()])


def _configure(config: Any, head: Head, spec: WorkloadSpec) -> None:
    """Put the spec's options into the config, or say which of them cannot be honoured."""
    if head.reads == ("image",):
        refuse_options(spec, "sequence_length", why="it takes images")
    if "image" in head.reads:
        _set_image_size(config, spec)
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
        config.pad_token_id = 0  # decoders look for it to find the last token of each row
    for part in (config, text_config(config)):
        if getattr(part, "use_cache", None):
            part.use_cache = False


def _set_image_size(config: Any, spec: WorkloadSpec) -> None:
    holder = vision_config(config)
    if spec.image_size is None or not hasattr(holder, "image_size"):
        return
    patch = getattr(holder, "patch_size", None)
    if isinstance(patch, int) and spec.image_size % patch:
        raise SpecError(f"image_size must be a multiple of {patch} for {spec.model}, got {spec.image_size}")
    holder.image_size = spec.image_size


def _image_token(config: Any) -> int:
    return int(look_up(config, "image_token_id", "image_token_index"))


def _special_tokens(config: Any) -> set[int]:
    """Tokens that stand for something else than text: images, frames, sounds."""
    parts = (config, text_config(config))
    names = {name for part in parts for name in vars(part) if name.endswith(("_token_id", "_token_index"))}
    found = {get(part, name) for part in parts for name in names}
    return {value for value in found if isinstance(value, int) and value >= 0}


def _image_tokens(model: nn.Module, offer: Offer, names: list[str]) -> int:
    """How many tokens of the text an image takes the place of; 0 where the model knows no such thing."""
    features = getattr(model, "get_image_features", None)
    if (
        features is None
        or "pixel_values" not in names
        or look_up(offer.config, "image_token_id", "image_token_index") is None
    ):
        return 0
    for shape in offer.shapes("pixel_values"):
        try:
            with torch.no_grad():
                found = features(shape.without_memory())
        except Exception:  # it wants more than pixels, or other ones: then only its text can be fed
            continue
        width = look_up(text_config(offer.config), "hidden_size")
        size = sum(tensor.numel() for _, tensor in named_tensors(getattr(found, "pooler_output", found)))
        return size // (width * offer.batch) if width else 0
    return 0


class _LongerText(nn.Module):
    """The model on the meta device, given as many tokens more as an image takes."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        super().__init__()
        self.model, self.tokens = model, tokens

    def forward(self, **inputs: Tensor) -> Any:
        text = inputs["input_ids"]
        longer = text.new_zeros((text.shape[0], text.shape[1] + self.tokens))
        return self.model(**{**inputs, "input_ids": longer})


def _longer(shape: Shape, tokens: int) -> Shape:
    return Shape((shape.sizes[0], shape.sizes[1] + tokens), shape.vocabulary)


def _add_labels(kwargs: dict[str, Any], vocabulary: dict[str, int], choice: Choice, notes: list[Note]) -> None:
    """With labels the model computes its own loss."""
    head, config = choice.head, choice.config
    main = next(iter(kwargs.values()))
    if head.labels == "class":
        vocabulary["labels"] = config.num_labels
        kwargs["labels"] = torch.randint(0, config.num_labels, (main.shape[0],))
    elif head.labels == "pixels":
        vocabulary["labels"] = config.num_labels
        kwargs["labels"] = torch.randint(0, config.num_labels, (main.shape[0], *main.shape[-2:]))
    elif head.labels == "tokens":
        like = "input_ids" if "input_ids" in kwargs else "decoder_input_ids"
        vocabulary["labels"] = vocabulary[like]
        kwargs["labels"] = torch.randint(0, vocabulary["labels"], kwargs[like].shape)
    else:
        notes.append(note("model", "its own loss needs annotations: it is trained on cross-entropy of its outputs"))


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


def _bare(model: str) -> str:
    return model.removeprefix("hf:")


SOURCES.register("hf")(HfSource())
