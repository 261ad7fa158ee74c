"""A random model must carry signal: its answer depends on its input and on each of its blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.bench.workload.inputs import Inputs
from redline.bench.workload.signal import CALM_BIAS, awaken, calibrate_batchnorm, calibration_inputs, give_signal
from redline.bench.workload.workload import Workload, assemble


def handmade(model: nn.Module, *args: Any, **options: Any) -> Workload:
    return assemble(model, (args, {}), task="infer", source="user", identity="test", seed=0, **options)


class Dormant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.layer_scale = nn.Parameter(torch.full((16, 1, 1), 1e-6))
        self.norm = nn.LayerNorm(16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 8)
        for parameter in (self.norm.weight, self.head.weight, self.head.bias):
            nn.init.zeros_(parameter)


def test_dormant_parameters_wake_up_each_in_its_way() -> None:
    model = Dormant()
    body = model.body.weight.detach().clone()
    notes = awaken(model)
    assert (model.layer_scale == 1).all()
    assert (model.norm.weight == 1).all()
    assert model.head.weight.std().item() == pytest.approx(16**-0.5, rel=0.3)
    assert 0 < model.class_token.std().item() < 0.05
    assert (model.head.bias == 0).all(), "a bias of zero is where it belongs"
    assert torch.equal(model.body.weight, body)
    assert len(notes) == 3
    assert any("2 parameters such as layer_scale set to 1" in str(each) for each in notes)
    before = copy.deepcopy(model.state_dict())
    assert awaken(model) == [], "waking twice changes nothing more"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(4), (8, 4)),
        (nn.BatchNorm1d(4), (8, 4, 5)),
        (nn.BatchNorm2d(4), (8, 4, 5, 5)),
        (nn.BatchNorm3d(4), (8, 4, 3, 3, 3)),
        (nn.SyncBatchNorm(4), (8, 4, 5, 5)),
    ],
)
def test_statistics_are_set_so_that_the_layer_normalises(norm: nn.Module, shape: tuple[int, ...]) -> None:
    inputs = 7 + 3 * torch.randn(shape)
    assert calibrate_batchnorm(norm, lambda: norm(inputs)) == 1
    output = norm.eval()(inputs)
    assert output.mean().item() == pytest.approx(CALM_BIAS, abs=1e-3)
    assert output.std().item() == pytest.approx(1, rel=0.1)


def test_what_has_seen_data_or_keeps_no_statistics_is_left_alone() -> None:
    seen, none = nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)
    seen(torch.randn(8, 4))
    loaded = nn.BatchNorm1d(4)  # statistics from a file that does not count batches
    loaded.running_mean.fill_(0.5)
    model = nn.Sequential(seen, none, loaded, nn.LayerNorm(4), nn.LazyBatchNorm1d())
    before = seen.running_mean.clone()

    def fail() -> None:
        raise AssertionError("nothing to calibrate: no forward is needed")

    assert calibrate_batchnorm(model, fail) == 0
    assert torch.equal(seen.running_mean, before)
    assert (seen.bias == 0).all()


def test_modes_and_hooks_are_as_before_even_after_an_error() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4)).train()
    model[0].eval()

    def run() -> None:
        assert not model[1].training, "calibrated as it will be used"
        raise RuntimeError("broke")

    with pytest.raises(RuntimeError, match="broke"):
        calibrate_batchnorm(model, run)
    assert [module.training for module in model] == [False, True]
    assert not any(module._forward_pre_hooks for module in model)


def test_one_value_per_channel_silent_channels_and_a_second_use_do_not_blow_up() -> None:
    norm, unused = nn.BatchNorm2d(16), nn.BatchNorm1d(4)
    inputs = 50 * torch.randn(1, 16, 1, 1)
    assert calibrate_batchnorm(nn.ModuleList([norm, unused]), lambda: norm(norm(inputs))) == 1
    assert norm.eval()(inputs).std().item() == pytest.approx(1, rel=0.3), (
        "the signal survives, and the first use counts"
    )
    assert (unused.running_mean == 0).all()
    silent, values = nn.BatchNorm1d(4), torch.randn(64, 4)
    values[:, 0] = 3.0
    calibrate_batchnorm(silent, lambda: silent(values))
    assert silent.eval()(values + 0.01)[:, 0].abs().max() < 3, "a channel that never varied is not multiplied by 300"


@pytest.mark.parametrize(
    ("model", "options", "shape"),
    [
        ("simple_cnn", {}, (8, 3, 32, 32)),
        ("simple_cnn", {"batch": 12}, (12, 3, 32, 32)),
        ("transformer", {"sequence_length": 4}, (8, 4)),
    ],
)
def test_calibration_has_unlike_rows_enough_whatever_the_batch(
    build: Any, model: str, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    (inputs,), _ = calibration_inputs(build(model, **options))[0]()
    assert inputs.shape == shape
    assert len({tuple(row.flatten().tolist()) for row in inputs}) == shape[0]


def test_a_model_made_for_one_batch_is_calibrated_on_its_own() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Flatten(0), nn.Unflatten(0, (1, 12)))
    assert list(map(str, give_signal(handmade(model, torch.randn(1, 4, 3), batch=1)))) == [
        "calibrated 1 BatchNorm layer on random inputs"
    ]


def test_weights_that_are_not_random_are_never_touched() -> None:
    workload = handmade(nn.BatchNorm1d(4), torch.randn(2, 4), weights_are_random=False)
    assert give_signal(workload) == []
    assert (workload.model.running_mean == 0).all()


def forward(workload: Workload, inputs: Inputs) -> Tensor:
    args, kwargs = inputs
    with torch.no_grad():
        output: Tensor = workload.model(*args, **kwargs)
    return output


def rounded(workload: Workload, inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """The output of fp32 arithmetic on weights and inputs rounded to `dtype`."""
    model = copy.deepcopy(workload.model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))
        output: Tensor = model(*(tensor.to(dtype).float() for tensor in inputs[0]))
    return output


SAMPLES = [
    ("resnet18", 64, "layer3.1"),
    ("vit_b_32", 64, "encoder.layers.encoder_layer_6"),  # which torchvision gives a head of zeros
    ("mobilenet_v2", 64, "features.9"),
    ("googlenet", 64, "inception4c"),
    ("shufflenet_v2_x1_0", 64, "stage3.3"),
    ("convnext_tiny", 64, "features.5.4"),
    ("squeezenet1_0", 64, "features.8"),
]
SLOW_SAMPLES = [
    ("resnet152", 64, "layer3.17"),
    ("mobilenet_v3_large", 64, "features.8"),
    ("efficientnet_b0", 64, "features.4.1"),
    ("efficientnet_b7", 64, "features.5.4"),
    ("vit_b_16", 64, "encoder.layers.encoder_layer_6"),
    ("swin_t", 64, "features.5.3"),
    ("vgg11", 64, "features.13"),
    ("densenet121", 64, "features.denseblock3.denselayer12"),
    ("inception_v3", 96, "Mixed_6c"),
    ("maxvit_t", 224, "blocks.2.layers.1"),
]


@pytest.mark.parametrize(
    ("model", "size", "block"),
    [*SAMPLES, *(pytest.param(*sample, marks=pytest.mark.slow) for sample in SLOW_SAMPLES)],
)
def test_faults_stand_out_from_rounding(build: Any, model: str, size: int, block: str) -> None:
    """Ignoring the input, or dropping a block in the middle, changes more than 5 times what rounding to bf16 does."""
    workload = build(model, image_size=size, batch=4)
    give_signal(workload)
    inputs = workload.second_inputs(1).inputs
    output = forward(workload, inputs)
    depends = (output - output.mean(0, keepdim=True)).norm()
    assert output.isfinite().all()
    assert depends / output.norm() > 0.02, "the output depends on the input"
    floor = (rounded(workload, inputs, torch.bfloat16) - output).norm()
    assert floor / depends < 0.25
    assert (forward(workload, workload.second_inputs(2).inputs) - output).norm() > 5 * floor

    def drop(_: nn.Module, args: tuple[Any, ...], result: Tensor) -> Tensor:
        before = args[0]
        return before if isinstance(before, Tensor) and before.shape == result.shape else torch.zeros_like(result)

    workload.model.get_submodule(block).register_forward_hook(drop)
    assert (forward(workload, inputs) - output).norm() > 5 * floor
