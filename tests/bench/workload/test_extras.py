"""Models of timm and transformers, from their configs alone."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.bench.workload.build import build_workload, check_model, list_models
from redline.bench.workload.sources import hf
from redline.bench.workload.workload import Workload
from redline.model.errors import SpecError
from redline.model.spec import WorkloadSpec

SMALL: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99, "n_positions": 64},
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 99},
    "vit": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32},
    "llama": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99,
        "torch_dtype": "bfloat16",
    },
    "clip_text_model": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99,
    },
}  # fmt: skip

NARROW = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
SMALL |= {
    "clip": {
        "projection_dim": 16, "text_config": {**NARROW, "vocab_size": 99, "max_position_embeddings": 20},
        "vision_config": {**NARROW, "image_size": 32, "patch_size": 16},
    },
    "videomae": {
        **NARROW, "image_size": 32, "patch_size": 16, "num_frames": 4, "tubelet_size": 2,
        "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
    },
    "timesformer": {**NARROW, "image_size": 32, "patch_size": 16, "num_frames": 4},
    "wav2vec2": {
        **NARROW, "vocab_size": 20, "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2],
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    },
    "patchtst": {"d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16, "num_input_channels": 3,
                 "context_length": 32},
}  # fmt: skip


def folder(tmp_path: Path, kind: str) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **SMALL[kind]}))
    return f"hf:{tmp_path}"


def build(model: str, **options: Any) -> Workload:
    return build_workload(WorkloadSpec(model=model, **options), 0)


@pytest.mark.parametrize(
    ("kind", "class_name", "inputs"),
    [
        ("bert", "BertForMaskedLM", {"input_ids"}),
        ("gpt2", "GPT2LMHeadModel", {"input_ids"}),
        ("llama", "LlamaForCausalLM", {"input_ids"}),
        ("t5", "T5ForConditionalGeneration", {"input_ids", "decoder_input_ids"}),
        ("vit", "ViTForImageClassification", {"pixel_values"}),
        ("clip_text_model", "CLIPTextModel", {"input_ids"}),
    ],
)
def test_a_config_becomes_the_model_it_is_mostly_used_as(
    tmp_path: Path, kind: str, class_name: str, inputs: set[str]
) -> None:
    options = {} if kind == "vit" else {"sequence_length": 16}
    infer = build(folder(tmp_path, kind), **options)
    assert type(infer.model).__name__ == class_name
    assert set(infer.kwargs) == inputs
    assert {parameter.dtype for parameter in infer.model.parameters()} == {torch.float32}
    with torch.no_grad():
        output = infer.model(**infer.kwargs)
    assert getattr(output, "past_key_values", None) is None, "no cache is built"
    train = build(folder(tmp_path, kind), task="train", batch=2, **options)
    output = train.model(**train.kwargs)
    train.loss(output).backward()
    if kind != "clip_text_model":
        assert "labels" in train.kwargs
        assert torch.equal(train.loss(output), output.loss), "the model's own loss"


def test_classes_of_a_text_model_mean_classifying(tmp_path: Path) -> None:
    for kind in ("bert", "gpt2"):
        workload = build(folder(tmp_path, kind), classes=5, batch=3, sequence_length=8, task="train")
        assert workload.model(**workload.kwargs).logits.shape == (3, 5)
        assert workload.kwargs["labels"].max() < 5


def test_image_size_and_classes_reach_the_config(tmp_path: Path) -> None:
    workload = build(folder(tmp_path, "vit"), image_size=64, classes=7)
    assert workload.kwargs["pixel_values"].shape == (1, 3, 64, 64)
    with torch.no_grad():
        assert workload.model(**workload.kwargs).logits.shape == (1, 7)
    assert workload.item == "img"


def test_tokens_are_drawn_from_the_vocabulary_and_fit_the_positions(tmp_path: Path) -> None:
    workload = build(folder(tmp_path, "gpt2"), batch=16)
    assert workload.kwargs["input_ids"].shape == (16, 64), "no more than the model has positions"
    _, fresh = workload.second_inputs(3).inputs
    assert 90 < fresh["input_ids"].max() < 99
    with pytest.raises(SpecError, match="must be 64 or less"):
        check_model(WorkloadSpec(model=folder(tmp_path, "gpt2"), sequence_length=65))


def test_configs_that_cannot_be_read_are_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"has no config\.json"):
        check_model(WorkloadSpec(model=f"hf:{tmp_path}"))
    with pytest.raises(SpecError, match="no such folder"):
        check_model(WorkloadSpec(model=f"hf:{tmp_path}/absent"))
    (tmp_path / "config.json").write_text('{"model_type": "not a model"}')
    with pytest.raises(SpecError, match="its config cannot be read") as caught:
        check_model(WorkloadSpec(model=f"hf:{tmp_path}"))
    assert "\n" not in str(caught.value)

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    for variable in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(SpecError, match=r"huggingface.co cannot be reached .*; use a local folder"):
        check_model(WorkloadSpec(model="hf:nobody/nothing-of-the-kind"))


def test_timm_models_are_built_at_the_size_asked_for() -> None:
    network = build("timm:resnet18", image_size=64, classes=5, batch=2)
    transformer = build("timm:vit_tiny_patch16_224", image_size=64, classes=5, batch=2)
    with torch.no_grad():
        assert network.model(*network.args).shape == (2, 5)
        assert transformer.model(*transformer.args).shape == (2, 5)
    assert network.source == "timm"
    with pytest.raises(SpecError, match="multiple of 16"):
        build("timm:vit_tiny_patch16_224", image_size=100)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit", "t5", "resnet"])
def test_architectures_go_by_name(kind: str) -> None:
    workload = build(f"hf:{kind}", task="train", batch=2)
    loss = workload.loss(workload.model(**workload.kwargs))
    loss.backward()
    assert loss.isfinite()
    trained = [parameter for parameter in workload.model.parameters() if parameter.grad is not None]
    assert trained
    assert any(parameter.grad.abs().sum() > 0 for parameter in trained)


@pytest.mark.parametrize(
    ("kind", "shapes", "item"),
    [
        ("clip", {"input_ids": (2, 20), "pixel_values": (2, 3, 32, 32)}, "pair"),
        ("videomae", {"pixel_values": (2, 4, 3, 32, 32)}, "img"),
        ("timesformer", {"pixel_values": (2, 4, 3, 32, 32)}, "img"),
        ("wav2vec2", {"input_values": (2, 16000)}, "audio"),
        ("patchtst", {"past_values": (2, 32, 3)}, "series"),
    ],
)
def test_every_tower_gets_what_it_reads(
    tmp_path: Path, kind: str, shapes: dict[str, tuple[int, ...]], item: str
) -> None:
    workload = build(folder(tmp_path, kind), batch=2)
    assert {name: tuple(tensor.shape) for name, tensor in workload.kwargs.items()} == shapes
    assert (workload.batch, workload.item) == (2, item)
    with torch.no_grad():
        workload.model(**workload.kwargs)


def test_only_what_can_be_fed_is_listed() -> None:
    unfed = hf.UNFED.read_text().split()
    assert unfed == sorted(set(unfed))
    listed = {model.name for model in list_models("hf:*")[0]}
    assert {"hf:bert", "hf:clip", "hf:videomae", "hf:whisper"} <= listed
    assert not listed & {f"hf:{name}" for name in unfed}
    assert "pix2struct" in unfed, "it reads patches that nothing but its own processor makes"
