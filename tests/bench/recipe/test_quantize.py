"""int8 and fp8: what share they touch, what they refuse, and numerics that a broken one does not pass."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from applying import Model, applied, output_of
from torch import Tensor, nn

from redline.bench.recipe.rounding import rounded_inputs, rounded_tensor, rounded_weights

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
pytestmark = [pytest.mark.usefixtures("torch_as_it_was"), pytest.mark.filterwarnings("ignore")]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 24)).eval()


def weights_of(model: nn.Module) -> list[bool]:
    """Which linear layers hold something else than plain numbers."""
    return [type(layer.weight.data) is not Tensor for layer in model.modules() if isinstance(layer, nn.Linear)]


@needs_torchao
@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        ("int8", "Int8DynamicActivationInt8WeightConfig"),
        ("int8:weight-only", "Int8WeightOnlyConfig"),
        ("int8:dynamic", "Int8DynamicActivationInt8WeightConfig"),
    ],
)
def test_linear_layers_are_quantized_and_the_share_is_told(recipe: str, config: str) -> None:
    from torch._inductor import config as inductor

    def switches() -> tuple[object, object]:
        return inductor.force_fuse_int_mm_with_mul, torch.get_float32_matmul_precision()

    x, model, before = torch.randn(32, 32), layers(), switches()
    expected = model(x).detach()
    setup = applied(recipe, model, x)
    assert switches() == before, "the switches of the process stay as they are"
    assert all(weights_of(model))
    assert setup.notes == {"int8": f"torchao {version('torchao')}, {config}: 3 of 6 parameters, 98% of the weights"}
    error = (output_of(setup) - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.05, "rounded, and not much more than that"


@needs_torchao
def test_what_other_modules_read_past_the_layer_is_left_alone() -> None:
    """MultiheadAttention takes the weight of its projection out of the layer, which quantized layers do not allow."""
    attention = nn.MultiheadAttention(32, 2, batch_first=True)
    block = Model(
        lambda own, x: own.mlp(own.attention(x, x, x, need_weights=False)[0]),
        attention=attention,
        mlp=nn.Linear(32, 64),
    )
    setup = applied("int8", block, torch.randn(2, 8, 32))
    assert weights_of(setup.workload.model) == [False, True]
    assert output_of(setup).shape == (2, 8, 64)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_fp8_needs_a_gpu_that_has_it(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.bench.device.cuda import CudaDevice

    device = object.__new__(CudaDevice)
    device.torch_device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(CudaDevice, "_properties", lambda _: type("Properties", (), {"name": "A card"}))
    refusal = device.refusal_of(torch.float8_e4m3fn)
    assert refusal == (
        "A card has no fp8 arithmetic (compute capability 8.9 and later do)" if capability < (8, 9) else None
    )


def test_rounding_to_int8_keeps_every_row_within_half_a_step() -> None:
    weight = torch.randn(4, 32) * torch.tensor([[1e-3], [1.0], [1e3], [0.0]])
    rounded = rounded_tensor(weight, "int8")
    steps = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((rounded - weight).abs() <= steps / 2 * 1.0001).all()
    assert len(rounded[1].unique()) > 8
    assert torch.equal(rounded[3], weight[3])
    torch.testing.assert_close(rounded_tensor(rounded, "int8"), rounded)


def test_rounding_to_fp8_keeps_three_bits_of_mantissa() -> None:
    values = torch.linspace(0.5, 448, 1000)
    rounded = rounded_tensor(values, "fp8")
    error = ((rounded - values) / values).abs()
    assert 0.02 < error.max() <= 2**-4
    assert rounded.max() == 448


@pytest.mark.parametrize(
    ("number_format", "rounds_activations"), [("int8", True), ("int8-weights", False), ("fp8", True)]
)
def test_the_floor_rounds_what_the_step_rounds(number_format: str, rounds_activations: bool) -> None:
    """Weights of linear layers and what goes into them; never a convolution, a norm or the model's own input."""
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.LayerNorm(32), nn.Linear(32, 16)).eval()
    before, seen = {name: tensor.clone() for name, tensor in model.named_parameters()}, []
    handle = model[2].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    x = torch.randn(2, 4, 32)
    model(x)
    with rounded_weights(model, number_format):
        changed = {name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])}
        model(rounded_inputs(x, number_format))
    assert changed == {"2.weight"}
    assert torch.equal(*seen) == (not rounds_activations)
    handle.remove()
    assert not model[2]._forward_pre_hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
