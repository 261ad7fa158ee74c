"""`sdpa:BACKEND`: the kernel asked for is the one that runs, and a model or device that cannot is told why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from applying import Model, applied, output_of
from torch import Tensor, nn
from torch.nn import functional

from redline.bench.device.cpu import CpuDevice
from redline.bench.recipe.compose import switch_choices
from redline.bench.workload.step import TrainingStep
from redline.model.errors import BenchError
from redline.model.protocol import SwitchChoice
from redline.model.work import Facts, LayerShare

pytestmark = pytest.mark.usefixtures("torch_as_it_was")

FLASH = "_scaled_dot_product_flash_attention_for_cpu"


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v)


class Masked(Attends):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        # The CPU's flash kernel has no gradient for a mask.
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=self.project.weight[:8, :8].contiguous())


def encoder() -> Model:
    """As torchvision's ViT: MultiheadAttention that returns no weights."""
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    return Model(lambda own, x: own.attention(x, x, x, need_weights=False)[0], attention=attention).eval()


def called_in(run: Callable[[], Any]) -> set[str]:
    """Operators as the profiler saw them: it looks into compiled code too, and through MultiheadAttention."""
    with torch.profiler.profile() as seen:
        run()
    return {event.name.removeprefix("aten::") for event in seen.events()}


def inputs() -> Tensor:
    return torch.randn(2, 8, 16)


@pytest.mark.parametrize("model", [Attends, encoder])
def test_the_kernel_asked_for_is_the_one_that_runs(model: Callable[[], nn.Module]) -> None:
    x, attends = inputs(), model().eval()
    expected = attends(x).detach()
    for backend, is_flash in (("flash", True), ("math", False)):
        setup = applied(f"sdpa:{backend}", attends, x)
        assert (FLASH in called_in(lambda setup=setup: output_of(setup))) == is_flash
        torch.testing.assert_close(output_of(setup), expected)


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_the_choice_is_made_inside_what_is_compiled(backend: str) -> None:
    setup = applied(f"sdpa:{backend}+compile:backend=aot_eager,fullgraph=true", Attends(), inputs())
    assert (FLASH in called_in(lambda: output_of(setup))) == (backend == "flash")


def test_training_takes_the_kernel_too_and_is_not_moved_by_the_probe() -> None:
    model, x = Attends(), inputs()
    mean = model.norm.running_mean.clone()
    setup = applied("sdpa:math", model, x, task="train")
    assert torch.equal(model.norm.running_mean, mean)
    step = TrainingStep(setup, "sgd")
    before = model.project.weight.detach().clone()
    with step.context():
        assert FLASH not in called_in(step)
    assert not torch.equal(model.project.weight, before)


def test_a_model_without_attention_is_refused() -> None:
    branches = Model(lambda own, x: own.layer(x) if x.sum() > 1e9 else x, layer=nn.Linear(16, 16))
    for model in (nn.Linear(16, 3), nn.Sequential(nn.Conv1d(8, 8, 1), nn.ReLU()), branches):
        with pytest.raises(BenchError, match="sdpa: the model never calls scaled_dot_product_attention") as caught:
            applied("sdpa:math", model, inputs())
        assert caught.value.kind == "unsupported"


def choices(model: nn.Module, facts: Facts) -> dict[str, SwitchChoice]:
    told = switch_choices(model, CpuDevice(), "infer", facts)
    return {choice.switch: choice for choice in told}


def test_a_tuner_is_told_by_what_a_step_was_seen_doing() -> None:
    refused = {switch: str(choice.refusal) for switch, choice in choices(Attends(), Facts()).items()}
    assert {refusal for switch, refusal in refused.items() if switch.startswith("sdpa:")} == {
        "no attention runs in this model",
        "torch has no efficient attention for the CPU, only flash and math",
        "torch has no cudnn attention for the CPU, only flash and math",
    }
    seen = Facts(layers={"attention": LayerShare(calls=1, share=0.5)}, attention_backends={"fp32": ("math",)})
    assert choices(nn.Linear(1, 1), seen)["sdpa:math"].refusal is None, "whatever the model looks like"
    assert str(choices(nn.Linear(1, 1), seen)["sdpa:flash"].refusal) == (
        "flash cannot do this model's attention here in any number format"
    )


def test_a_backend_for_some_formats_says_which_switches_it_needs_and_which_it_excludes() -> None:
    seen = Facts(
        layers={"attention": LayerShare(calls=1, share=0.5)},
        attention_backends={"fp32": ("math",), "fp16": ("math", "flash"), "bf16": ("math",)},
    )
    told = choices(Attends(), seen)
    (need,) = told["sdpa:flash"].needs
    assert set(need.wants) == {"fp16", "amp"}
    assert not need.is_met({"sdpa:flash"})
    assert need.is_met({"sdpa:flash", "amp"})
    assert {"bf16", "amp-bf16"} <= set(told["sdpa:flash"].excludes)
    assert told["sdpa:math"].needs == ()
    assert not {"bf16", "fp16"} & set(told["sdpa:math"].excludes)


def test_a_backend_that_cannot_is_refused_with_torchs_reason() -> None:
    with pytest.raises(BenchError, match=r"sdpa:flash cannot do this model's attention here: .+") as caught:
        applied("sdpa:flash", Masked(), inputs(), task="train")
    assert caught.value.kind == "unsupported"
    assert "\n" not in str(caught.value)
    assert applied("sdpa:flash", Masked(), inputs()).model is not None, "without gradients it can"


def test_another_error_of_the_model_is_its_own() -> None:
    def breaks(*_: Any) -> Any:
        raise RuntimeError("out of cheese")

    with pytest.raises(BenchError, match=r"^RuntimeError: out of cheese$") as caught:
        applied("sdpa:math", Model(breaks), inputs())
    assert caught.value.kind == "user"
