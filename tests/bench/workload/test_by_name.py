"""Models by name: lists, and those of each source, at sizes that take no time; transformers' from their configs alone."""

from __future__ import annotations

import json
import random
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision

from redline.bench.workload.build import SOURCES, Source, build_workload, check_model, find_source, list_models
from redline.bench.workload.sources import hf
from redline.bench.workload.sources.torchvision import KINDS, default_size, flow_loss
from redline.bench.workload.workload import Workload
from redline.model.errors import MissingExtra, SpecError, UnknownName, UsageError
from redline.model.protocol import ModelName
from redline.model.spec import WorkloadSpec


@pytest.mark.parametrize(
    ("model", "source"),
    [
        ("resnet50", "torchvision"),
        ("fcn_resnet50", "torchvision"),
        ("torchvision:resnet50", "torchvision"),
        ("simple_cnn", "builtin"),
        ("timm:resnet50d", "timm"),
        ("hf:bert", "hf"),
        ("hf:owner/name", "hf"),
        ("models/mine.py:make", "user"),
        ("package.module:make", "user"),
    ],
)
def test_a_name_tells_its_source(model: str, source: str) -> None:
    assert find_source(model) is SOURCES.get(source)


@pytest.mark.parametrize(
    ("model", "near"),
    [
        ("resnt50", "resnet50"),
        ("ResNet50", "resnet50"),
        ("simplecnn", "simple_cnn"),
        ("torchvision:resnet5", "resnet50"),
        ("timm:resnt50", "timm:resnet50"),
        ("hf:brt", "hf:bert"),
    ],
)
def test_a_slip_of_the_pen_is_answered_with_the_closest_names(model: str, near: str) -> None:
    with pytest.raises(UnknownName) as caught:
        check_model(WorkloadSpec(model=model))
    assert near in caught.value.close


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("resnet18", {"sequence_length": 4}, "sequence_length 4 cannot be honoured for resnet18"),
        ("vit_b_16", {"image_size": 100}, "multiple of 16 for vit_b_16, got 100"),
        ("maxvit_t", {"image_size": 100}, "multiple of 224"),
        ("quantized_resnet18", {"task": "train"}, "quantized already"),
        ("maskrcnn_resnet50_fpn", {"task": "train"}, "trains on boxes, which cannot be drawn"),
        ("raft_small", {"classes": 3}, "it answers with movements"),
        ("raft_small", {"image_size": 100}, "multiple of 8"),
        ("fasterrcnn_resnet50_fpn", {"classes": 1}, "one is the background"),
        ("transformer", {"classes": 3}, "classes 3 cannot be honoured"),
        ("simple_cnn", {"image_size": 4}, "must be 8 or more"),
        ("timm:resnet18", {"sequence_length": 3}, "it takes images"),
        ("hf:bert", {"sequence_length": 1000}, "must be 512 or less"),
        ("hf:bert", {"image_size": 32}, "it takes no images"),
        ("hf:vit", {"image_size": 100}, "multiple of 16"),
        ("hf:mamba", {"classes": 3}, "causal language model"),
    ],
)
def test_options_a_source_cannot_honour_are_refused_before_building(
    model: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        check_model(WorkloadSpec(model=model, **options))


@pytest.mark.parametrize(("model", "size", "says"), [("timm:vit_tiny_patch16_224", 100, "multiple of 16"), ("ssdlite320_mobilenet_v3_large", 64, "must be 320")])  # fmt: skip
def test_or_while_they_are_built_where_only_the_model_knows(build: Any, model: str, size: int, says: str) -> None:
    with pytest.raises(SpecError, match=f"image_size must be .*{says}|{says}"):
        build(model, image_size=size)


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, name, extra in (("timm", "timm:resnet50", "timm"), ("transformers", "hf:bert", "hf")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtra, match=rf"redline\[{extra}\]"):
            check_model(WorkloadSpec(model=name))
    models, missing = list_models()
    assert {model.source for model in models} == {"builtin", "torchvision"}
    assert len(missing) == 2


def test_lists_hold_every_source_match_patterns_and_download_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("went to the network")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", refuse)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)
    models, missing = list_models()
    assert missing == []
    names = {model.name: (model.source, model.kind) for model in models}
    known = {name: kind for kind, module in KINDS.items() for name in torchvision.models.list_models(module=module)}
    assert len(known) > 80
    assert known == {name: kind for name, (source, kind) in names.items() if source == "torchvision"}
    assert names["transformer"][0] == "builtin"
    assert {"timm:resnet50", "hf:bert", "hf:clip", "hf:videomae", "hf:whisper"} <= set(names)
    found = {model.name for model in list_models("ResNet5*")[0]}
    assert {"resnet50", "timm:resnet50"} <= found
    assert "resnet18" not in found
    assert {model.name for model in list_models("simple_")[0]} == {"simple_cnn"}
    unfed = hf.UNFED.read_text().split()
    assert unfed == sorted(set(unfed))
    assert not set(names) & {f"hf:{name}" for name in unfed}
    assert "pix2struct" in unfed, "it reads patches that nothing but its own processor makes"
    sizes = {"resnet50": 224, "inception_v3": 299, "vit_h_14": 224, "fcn_resnet50": 520, "raft_small": 256}
    assert {name: default_size(name) for name in sizes} == sizes


def test_a_source_of_others_is_one_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    class Zoo(Source):
        def check(self, spec: WorkloadSpec) -> None:
            raise UsageError("the zoo is closed")

        def build(self, spec: WorkloadSpec, seed: int) -> Workload:
            raise NotImplementedError

        def models(self) -> list[ModelName]:
            return [ModelName(name="giraffe", source="zoo")]

    SOURCES.names()
    monkeypatch.setitem(SOURCES._entries, "zoo", Zoo())
    for use, name in ((lambda spec: build_workload(spec, 0), "giraffe"), (check_model, "zoo:anything")):
        with pytest.raises(UsageError, match="closed"):
            use(WorkloadSpec(model=name))


def test_the_seed_settles_weights_and_inputs_and_leaves_no_trace(build: Any) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first, again, other = build("simple_cnn"), build("simple_cnn"), build("simple_cnn", seed=1)
    assert torch.equal(first.args[0], again.args[0])
    assert torch.equal(first.model.head.weight, again.model.head.weight)
    assert not torch.equal(first.model.head.weight, other.model.head.weight)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()


def test_hashes_tell_models_and_inputs_apart_and_not_their_values(build: Any) -> None:
    one, again, larger = build("simple_cnn"), build("simple_cnn", seed=5), build("simple_cnn", batch=2)
    assert (one.model_hash, one.input_hash) == (again.model_hash, again.input_hash)
    assert build("simple_cnn", classes=3).model_hash != one.model_hash
    assert larger.model_hash == one.model_hash == build("simple_cnn", task="train", batch=1).model_hash
    assert larger.input_hash != one.input_hash


def test_the_batch_has_a_default_that_is_told_and_info_says_what_runs(build: Any) -> None:
    for options, batch, told in (({}, 1, "inference"), ({"task": "train"}, 8, "training")):
        workload = build("simple_cnn", **options)
        assert workload.items_per_step == batch
        assert f"batch {batch} by default for {told}" in map(str, workload.notes)
    workload = build("resnet18", batch=2, image_size=32)
    info = workload.info()
    assert info.notes == ()
    assert (info.source, info.class_name, info.parameters) == ("torchvision", "ResNet", 11_689_512)
    assert (info.items_per_step, info.item, info.input_shapes) == (2, "img", ("2×3×32×32 float32",))
    assert workload.to("meta").args[0].is_meta
    assert all(parameter.is_meta for parameter in workload.model.parameters())


@pytest.mark.parametrize(
    "model",
    ["simple_cnn", "transformer", "vit_b_32", "swin_t", "squeezenet1_1", "mobilenet_v3_small", "timm:resnet18",
     "timm:vit_tiny_patch16_224"],
)  # fmt: skip
def test_sizes_and_classes_are_honoured(build: Any, model: str) -> None:
    workload = build(model, image_size=64, classes=5, batch=2)
    with torch.no_grad():
        assert workload.model(*workload.args).shape == (2, 5)
    assert (workload.item, workload.batch) == ("img", 2)
    assert not workload.model.training


def test_a_transformer_reads_tokens_from_its_whole_vocabulary(build: Any) -> None:
    language = build("transformer", batch=2, sequence_length=12)
    assert language.model(*language.args).shape == (2, 12, 8192)
    assert language.item == "seq"
    drawn = torch.cat([language.second_inputs(seed).inputs[0][0] for seed in range(20)])
    assert 8000 < drawn.max() < 8192


@pytest.mark.parametrize(
    ("model", "options", "heads"),
    [
        ("fcn_resnet50", {"image_size": 32, "classes": 4}, {"out", "aux"}),
        ("googlenet", {"image_size": 64}, {"logits", "aux_logits1", "aux_logits2"}),
        *(
            pytest.param(model, options, set(), marks=pytest.mark.slow)
            for model, options in (
                ("inception_v3", {}),
                ("deeplabv3_mobilenet_v3_large", {"image_size": 64}),
                ("lraspp_mobilenet_v3_large", {"image_size": 64}),
                ("maxvit_t", {}),
                ("efficientnet_b0", {"image_size": 64}),
                ("regnet_x_400mf", {"image_size": 64}),
                *((f"hf:{kind}", {}) for kind in ("bert", "gpt2", "vit", "t5", "resnet")),
            )
        ),
    ],
)
def test_a_step_of_training_reaches_every_parameter(
    build: Any, model: str, options: dict[str, Any], heads: set[str]
) -> None:
    workload = build(model, task="train", batch=2, **options)
    output = workload.model(*workload.args, **workload.kwargs)
    assert heads <= set(output if isinstance(output, dict) else getattr(output, "_fields", ()))
    loss = workload.loss(output)
    loss.backward()
    assert loss.isfinite()
    gradients = [parameter.grad for parameter in workload.model.parameters()]
    assert all(grad is not None for grad in gradients) or model.startswith("hf:")
    assert any(grad is not None and grad.any() for grad in gradients)


# torchvision beyond classification


def test_a_detector_takes_a_list_and_its_batch_is_how_many_images(build: Any) -> None:
    workload = build("fasterrcnn_mobilenet_v3_large_320_fpn", batch=3, image_size=32)
    (images,) = workload.args
    assert [tuple(image.shape) for image in images] == [(3, 32, 32)] * 3
    assert (workload.batch, workload.items_per_step, workload.item) == (3, 3, "img")


def test_video_takes_clips_and_optical_flow_two_images(build: Any) -> None:
    clip = build("r3d_18", image_size=112, batch=1)
    assert (clip.args[0].shape, clip.item) == ((1, 3, 16, 112, 112), "video")
    flow = build("raft_small", image_size=128, batch=1, task="train")
    assert [tuple(image.shape) for image in flow.args] == [(1, 3, 128, 128)] * 2
    assert (flow.item, flow.loss.name) == ("pair", flow_loss.__name__)
    assert float(flow_loss([torch.ones(2), -torch.ones(2)])) == pytest.approx(1.8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_models_run_on_a_cpu_and_are_their_own_reference(build: Any) -> None:
    workload = build("quantized_shufflenet_v2_x0_5", image_size=64, batch=1)
    assert workload.is_cpu_only
    assert any("its own output is the reference" in str(each) for each in workload.notes)
    with pytest.raises(SpecError, match="--device cpu"):
        workload.to("cuda")


# transformers

NARROW = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TEXT, IMAGES = {**NARROW, "vocab_size": 99}, {**NARROW, "image_size": 32, "patch_size": 16}
SMALL: dict[str, dict[str, Any]] = {
    "bert": TEXT,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99, "n_positions": 64},
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 99},
    "vit": IMAGES,
    "llama": {**TEXT, "torch_dtype": "bfloat16"},
    "clip_text_model": TEXT,
    "clip": {"projection_dim": 16, "text_config": {**TEXT, "max_position_embeddings": 20}, "vision_config": IMAGES},
    "videomae": {
        **IMAGES, "num_frames": 4, "tubelet_size": 2,
        "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
    },
    "timesformer": {**IMAGES, "num_frames": 4},
    "wav2vec2": {
        **NARROW, "vocab_size": 20, "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2],
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    },
    "patchtst": {"d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16, "num_input_channels": 3,
                 "context_length": 32},
}  # fmt: skip


@pytest.fixture
def from_config(build: Any, tmp_path: Path) -> Any:
    def make(kind: str, **options: Any) -> Workload:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **SMALL[kind]}))
        workload: Workload = build(f"hf:{tmp_path}", **options)
        return workload

    return make


@pytest.mark.parametrize(
    ("kind", "class_name", "shapes", "item"),
    [
        ("bert", "BertForMaskedLM", {"input_ids": (2, 16)}, "seq"),
        ("gpt2", "GPT2LMHeadModel", {"input_ids": (2, 16)}, "seq"),
        ("llama", "LlamaForCausalLM", {"input_ids": (2, 16)}, "seq"),
        ("t5", "T5ForConditionalGeneration", {"input_ids": (2, 16), "decoder_input_ids": (2, 16)}, "seq"),
        ("clip_text_model", "CLIPTextModel", {"input_ids": (2, 16)}, "seq"),
        ("vit", "ViTForImageClassification", {"pixel_values": (2, 3, 32, 32)}, "img"),
        ("clip", "CLIPModel", {"input_ids": (2, 20), "pixel_values": (2, 3, 32, 32)}, "pair"),
        ("videomae", "VideoMAEForVideoClassification", {"pixel_values": (2, 4, 3, 32, 32)}, "img"),
        ("timesformer", "TimesformerForVideoClassification", {"pixel_values": (2, 4, 3, 32, 32)}, "img"),
        ("wav2vec2", "Wav2Vec2ForCTC", {"input_values": (2, 16000)}, "audio"),
        ("patchtst", "PatchTSTModel", {"past_values": (2, 32, 3)}, "series"),
    ],
)
def test_a_config_becomes_the_model_it_is_mostly_used_as_and_gets_what_it_reads(
    from_config: Any, kind: str, class_name: str, shapes: dict[str, tuple[int, ...]], item: str
) -> None:
    options = {"sequence_length": 16} if shapes.get("input_ids") == (2, 16) else {}
    infer = from_config(kind, batch=2, **options)
    assert type(infer.model).__name__ == class_name
    assert {name: tuple(tensor.shape) for name, tensor in infer.kwargs.items()} == shapes
    assert (infer.batch, infer.item) == (2, item)
    assert {parameter.dtype for parameter in infer.model.parameters()} == {torch.float32}
    with torch.no_grad():
        output = infer.model(**infer.kwargs)
    assert getattr(output, "past_key_values", None) is None, "no cache is built"
    if kind in ("bert", "gpt2", "llama", "t5", "vit"):
        train = from_config(kind, batch=2, task="train", **options)
        output = train.model(**train.kwargs)
        assert torch.equal(train.loss(output), output.loss), "the model's own loss, of labels that are made up"
        train.loss(output).backward()


def test_classes_and_sizes_reach_the_config(from_config: Any) -> None:
    for kind in ("bert", "gpt2"):  # classes of a text model mean classifying
        workload = from_config(kind, classes=5, batch=3, sequence_length=8, task="train")
        assert workload.model(**workload.kwargs).logits.shape == (3, 5)
        assert workload.kwargs["labels"].max() < 5
    workload = from_config("vit", image_size=64, classes=7)
    assert workload.kwargs["pixel_values"].shape == (1, 3, 64, 64)
    with torch.no_grad():
        assert workload.model(**workload.kwargs).logits.shape == (1, 7)


def test_tokens_are_drawn_from_the_vocabulary_and_fit_the_positions(from_config: Any) -> None:
    workload = from_config("gpt2", batch=16)
    assert workload.kwargs["input_ids"].shape == (16, 64), "no more than the model has positions"
    _, fresh = workload.second_inputs(3).inputs
    assert 90 < fresh["input_ids"].max() < 99
    with pytest.raises(SpecError, match="must be 64 or less"):
        from_config("gpt2", sequence_length=65)


def test_configs_that_cannot_be_read_are_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    for variable in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "not a model"}')
    for name, says in (
        (tmp_path, r"has no config\.json"),
        (tmp_path / "absent", "no such folder"),
        (tmp_path / "odd", "its config cannot be read"),
        ("nobody/nothing-of-the-kind", r"huggingface.co cannot be reached .*; use a local folder"),
    ):
        with pytest.raises(SpecError, match=says) as caught:
            check_model(WorkloadSpec(model=f"hf:{name}"))
        assert "\n" not in str(caught.value)
