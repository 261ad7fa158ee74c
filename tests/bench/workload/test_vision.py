"""torchvision beyond classification: what each kind is fed with, and what cannot be honoured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision

from redline.bench.workload.build import build_workload, check_model, list_models, settle_batch
from redline.bench.workload.sources.torchvision import KINDS, flow_loss
from redline.model.errors import SpecError
from redline.model.spec import WorkloadSpec

TINY = {"image_size": 32, "batch": 2}


def built(name: str, **settings: Any) -> Any:
    spec = WorkloadSpec(model=name, **{**TINY, **settings})
    workload = build_workload(spec, 0)
    settle_batch(workload, spec)
    return workload


def test_every_name_is_listed_once_with_its_kind() -> None:
    listed = [(model.name, model.kind) for model in list_models()[0] if model.source == "torchvision"]
    assert len(dict(listed)) == len(listed)
    known = {kind: set(torchvision.models.list_models(module=module)) for kind, module in KINDS.items()}
    assert all(name in known[kind] for name, kind in listed)
    assert len(listed) == sum(map(len, known.values()))


def test_a_detector_takes_a_list_and_its_batch_is_how_many_images() -> None:
    workload = built("fasterrcnn_mobilenet_v3_large_320_fpn", batch=3)
    (images,) = workload.args
    assert [tuple(image.shape) for image in images] == [(3, 32, 32)] * 3
    assert (workload.batch, workload.items_per_step, workload.item) == (3, 3, "img")


@pytest.mark.parametrize(
    ("name", "has"), [("keypointrcnn_resnet50_fpn", "keypoints"), ("maskrcnn_resnet50_fpn", "masks")]
)
def test_what_is_to_be_found_are_boxes_with_what_the_detector_looks_for(name: str, has: str) -> None:
    images, (target, _) = built(name, task="train", image_size=64).args
    assert [tuple(image.shape) for image in images] == [(3, 64, 64)] * 2
    assert target.keys() == {"boxes", "labels", has}
    assert (target["boxes"][:, 2:] > target["boxes"][:, :2]).all()
    assert target["boxes"].max() <= 64


def test_video_takes_clips_and_optical_flow_two_images() -> None:
    clip = built("r3d_18", image_size=112, batch=1)
    assert clip.args[0].shape == (1, 3, 16, 112, 112)
    assert clip.item == "video"
    flow = built("raft_small", image_size=128, batch=1, task="train")
    assert [tuple(image.shape) for image in flow.args] == [(1, 3, 128, 128)] * 2
    assert flow.item == "pair"
    assert flow.loss.name == flow_loss.__name__
    assert float(flow_loss([torch.ones(2), -torch.ones(2)])) == pytest.approx(1.8)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": "quantized_resnet18", "task": "train"}, "quantized already"),
        ({"model": "raft_small", "classes": 3}, "it answers with movements"),
        ({"model": "raft_small", "image_size": 100}, "multiple of 8"),
        ({"model": "mvit_v1_b", "image_size": 64}, "must be 224 for mvit_v1_b"),
        ({"model": "fasterrcnn_resnet50_fpn", "classes": 1}, "one is the background"),
    ],
)
def test_what_cannot_be_honoured_is_told_before_anything_is_built(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        check_model(WorkloadSpec(**settings))


def test_an_ssd_has_a_size_of_its_own() -> None:
    with pytest.raises(SpecError, match="image_size must be 320"):
        built("ssdlite320_mobilenet_v3_large", image_size=64, batch=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_models_run_on_a_cpu_and_are_their_own_reference() -> None:
    workload = built("quantized_shufflenet_v2_x0_5", image_size=64, batch=1)
    assert workload.is_cpu_only
    assert any("its own output is the reference" in str(each) for each in workload.notes)
    with pytest.raises(SpecError, match="--device cpu"):
        workload.to("cuda")
