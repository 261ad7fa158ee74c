"""Names, lists and the sources by name, at sizes that take no time."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
import torch

from redline.bench.workload.build import SOURCES, Source, build_workload, check_model, find_source, list_models
from redline.bench.workload.sources.torchvision import default_size
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
        ("vit_b_16", {"image_size": 100}, "multiple of 16 for vit_b_16, got 100: try 96 or 112"),
        ("maxvit_t", {"image_size": 100}, "multiple of 224"),
        ("alexnet", {"image_size": 32}, "must be 63 or more for alexnet"),
        ("inception_v3", {"image_size": 96, "task": "train"}, "must be 299 or more to train inception_v3"),
        ("deeplabv3_resnet50", {"batch": 1, "task": "train"}, "batch must be 2 or more"),
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


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("timm", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"redline\[timm\]"):
        check_model(WorkloadSpec(model="timm:resnet50"))
    with pytest.raises(MissingExtra, match=r"redline\[hf\]"):
        check_model(WorkloadSpec(model="hf:bert"))
    models, missing = list_models()
    assert {model.source for model in models} == {"builtin", "torchvision"}
    assert len(missing) == 2


def test_lists_hold_every_source_and_match_patterns() -> None:
    models, missing = list_models()
    assert missing == []
    names = {model.name: model for model in models}
    assert names["resnet50"].kind == "classification"
    assert names["lraspp_mobilenet_v3_large"].kind == "segmentation"
    assert names["transformer"].source == "builtin"
    assert {"timm:resnet50", "hf:bert"} <= set(names)
    found = {model.name for model in list_models("ResNet5*")[0]}
    assert {"resnet50", "timm:resnet50"} <= found
    assert "resnet18" not in found
    assert {model.name for model in list_models("simple_")[0]} == {"simple_cnn"}


def test_listing_and_sizes_download_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("went to the network")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", refuse)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)
    assert len(list_models()[0]) > 80
    sizes = {"resnet50": 224, "inception_v3": 299, "vit_h_14": 224, "fcn_resnet50": 520, "raft_small": 256}
    assert {name: default_size(name) for name in sizes} == sizes


def test_the_seed_settles_weights_and_inputs_and_leaves_no_trace(build: Any) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first, again, other = build("simple_cnn"), build("simple_cnn"), build("simple_cnn", seed=1)
    assert torch.equal(first.args[0], again.args[0])
    assert torch.equal(first.model.head.weight, again.model.head.weight)
    assert not torch.equal(first.model.head.weight, other.model.head.weight)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()


def test_hashes_tell_models_and_inputs_apart(build: Any) -> None:
    one, again = build("simple_cnn"), build("simple_cnn", seed=5)
    assert (one.model_hash, one.input_hash) == (again.model_hash, again.input_hash), "values do not matter"
    assert build("simple_cnn", classes=3).model_hash != one.model_hash
    larger = build("simple_cnn", batch=2)
    assert larger.model_hash == one.model_hash
    assert larger.input_hash != one.input_hash
    assert build("simple_cnn", task="train", batch=1).model_hash == one.model_hash


def test_the_batch_has_a_default_that_is_told(build: Any) -> None:
    infer, train = build("simple_cnn"), build("simple_cnn", task="train")
    assert (infer.items_per_step, train.items_per_step) == (1, 8)
    assert "batch 1 by default for inference" in map(str, infer.notes)
    assert "batch 8 by default for training" in map(str, train.notes)
    assert build("simple_cnn", batch=3).notes == []


def test_built_in_models_answer_as_promised(build: Any) -> None:
    cnn = build("simple_cnn", batch=2, image_size=16, classes=7)
    assert cnn.model(*cnn.args).shape == (2, 7)
    pictures = build("transformer", batch=2, image_size=16, classes=7)
    assert pictures.model(*pictures.args).shape == (2, 7)
    language = build("transformer", batch=2, sequence_length=12)
    assert language.model(*language.args).shape == (2, 12, 8192)
    assert (language.item, pictures.item) == ("seq", "img")
    drawn = torch.cat([language.second_inputs(seed).inputs[0][0] for seed in range(20)])
    assert 8000 < drawn.max() < 8192, "tokens come from the whole vocabulary"


def test_info_says_what_runs(build: Any) -> None:
    workload = build("resnet18", batch=2, image_size=32)
    info = workload.info()
    assert (info.source, info.class_name, info.parameters) == ("torchvision", "ResNet", 11_689_512)
    assert (info.items_per_step, info.item, info.input_shapes) == (2, "img", ("2×3×32×32 float32",))
    assert workload.to("meta").args[0].is_meta
    assert all(parameter.is_meta for parameter in workload.model.parameters())


@pytest.mark.parametrize("model", ["vit_b_32", "swin_t", "squeezenet1_1", "mobilenet_v3_small"])
def test_sizes_and_classes_are_honoured(build: Any, model: str) -> None:
    workload = build(model, image_size=64, classes=5)
    with torch.no_grad():
        assert workload.model(*workload.args).shape == (1, 5)
    assert not workload.model.training


def test_segmentation_infers_and_trains_with_its_auxiliary_head(build: Any) -> None:
    infer = build("fcn_resnet50", image_size=32)
    with torch.no_grad():
        assert infer.model(*infer.args)["out"].shape == (1, 21, 32, 32)
    train = build("fcn_resnet50", image_size=32, task="train", batch=2, classes=4)
    output = train.model(*train.args)
    assert set(output) == {"out", "aux"}
    train.loss(output).backward()
    assert all(parameter.grad is not None for parameter in train.model.parameters())


def test_googlenet_trains_with_its_auxiliary_heads(build: Any) -> None:
    workload = build("googlenet", image_size=64, task="train", batch=2)
    output = workload.model(*workload.args)
    assert output.aux_logits1 is not None
    assert not workload.model.transform_input
    workload.loss(output).backward()
    assert all(parameter.grad is not None for parameter in workload.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("inception_v3", {}),
        ("deeplabv3_mobilenet_v3_large", {"image_size": 64}),
        ("lraspp_mobilenet_v3_large", {"image_size": 64}),
        ("maxvit_t", {}),
        ("efficientnet_b0", {"image_size": 64}),
        ("regnet_x_400mf", {"image_size": 64}),
    ],
)
def test_more_models_train_one_step(build: Any, model: str, options: dict[str, Any]) -> None:
    workload = build(model, task="train", batch=2, **options)
    workload.loss(workload.model(*workload.args)).backward()
    assert all(parameter.grad is not None for parameter in workload.model.parameters())


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
    with pytest.raises(UsageError, match="closed"):
        build_workload(WorkloadSpec(model="giraffe"), 0)
    with pytest.raises(UsageError, match="closed"):
        check_model(WorkloadSpec(model="zoo:anything"))
