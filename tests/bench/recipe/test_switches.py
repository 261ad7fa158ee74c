"""Every recipe a CPU can do really does what its name says, on models small enough to look inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from applying import Model, applied, output_of
from torch import Tensor, nn

from redline.bench.device.failure import failure_from
from redline.bench.environment import remember_flags
from redline.bench.recipe.base import SWITCHES
from redline.bench.recipe.switches.compiler import cache_state, compilations, compile_seconds
from redline.bench.workload.step import INITIAL_GRADIENT_SCALE, InferenceStep, TrainingStep
from redline.model.errors import BenchError
from redline.model.spec import Recipe, Task
from redline.model.work import Facts

pytestmark = pytest.mark.usefixtures("torch_as_it_was")


def compiles(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.filterwarnings("ignore")(test))


class Normed(nn.Module):
    """A convolution and a BatchNorm, which a freezing compiler folds into one."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.convolution(images)).relu()


class Probe(nn.Module):
    """Remembers what its forward saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: list[tuple[bool, torch.dtype, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        active = torch.is_autocast_enabled("cpu")
        self.seen.append((active, torch.get_autocast_dtype("cpu"), y.dtype))
        return y


def test_a_cast_reaches_statistics_and_floating_inputs_and_leaves_integers() -> None:
    class Picks(Normed):
        def forward(self, images: Tensor, channel: Tensor) -> Tensor:
            return super().forward(images).index_select(1, channel)

    setup = applied("bf16", Picks(), torch.randn(2, 3, 8, 8), torch.tensor([1]))
    statistics = {name: buffer.dtype for name, buffer in setup.workload.model.named_buffers()}
    assert (statistics["norm.running_mean"], statistics["norm.num_batches_tracked"]) == (torch.bfloat16, torch.int64)
    assert [tensor.dtype for tensor in setup.args] == [torch.bfloat16, torch.int64]


@pytest.mark.parametrize(
    ("recipe", "active", "dtype"),
    [
        ("baseline", False, torch.float32),
        ("amp", True, torch.float16),
        ("amp-bf16", True, torch.bfloat16),
        ("bf16", False, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("task", ["infer", "train"])
def test_autocast_is_on_inside_the_forward_and_nowhere_else(
    recipe: str, active: bool, dtype: torch.dtype, task: Task
) -> None:
    setup = applied(recipe, Probe(), torch.randn(2, 4), task=task)
    step = InferenceStep(setup) if task == "infer" else TrainingStep(setup, "sgd")
    with step.context():
        step()
        assert not torch.is_autocast_enabled("cpu")
    ((was_active, autocast_dtype, output_dtype),) = setup.workload.model.seen
    assert was_active == active
    assert output_dtype == dtype
    if active:
        assert autocast_dtype == dtype
        assert setup.workload.model.layer.weight.dtype == torch.float32, "AMP keeps fp32 weights"


def test_channels_last_leaves_inputs_alone_that_are_no_images() -> None:
    class Biased(nn.Conv2d):
        def forward(self, input: Tensor, shift: Tensor) -> Tensor:
            return super().forward(input) + shift.sum()

    shift = torch.randn(5, 7)
    setup = applied("channels-last", Biased(3, 4, 3), torch.randn(2, 3, 8, 8), shift=shift)
    assert setup.kwargs["shift"] is shift


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.drop(self.layer(x)) * scale


class TakesDict(Scaled):
    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": super().forward(batch["x"], batch["scale"]), "x": batch["x"]}


def parts() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 4), "scale": torch.rand(2, 1)}


@pytest.mark.parametrize(
    ("model", "args", "kwargs"),
    [
        (nn.Linear(4, 3), (torch.randn(2, 4),), {}),
        (Scaled(), tuple(parts().values()), {}),
        (Scaled(), (), parts()),
        (TakesDict(), (parts(),), {}),
    ],
    ids=["tensor", "tensors", "keywords", "dict"],
)
def test_torchscript_traces_and_freezes_inputs_of_every_kind(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Tensor]
) -> None:
    expected = model.eval()(*args, **kwargs)
    setup = applied("torchscript", model, *args, **kwargs)
    assert isinstance(setup.model, torch.jit.ScriptModule)
    assert not list(setup.model.parameters()), "frozen: weights are constants"
    torch.testing.assert_close(output_of(setup), expected)
    assert list(model.parameters()), "the model itself is as it was"


def test_torchscript_keeps_autocast_inside_the_trace() -> None:
    setup = applied("amp-bf16+torchscript", Normed(), torch.randn(2, 3, 8, 8))
    assert "bfloat16" in str(output_of(setup).dtype)
    torch.testing.assert_close(
        output_of(setup).float(), setup.workload.model(*setup.args), atol=0.05, rtol=0.05, check_dtype=False
    )


def scaled(_: nn.Module, x: Tensor, scale: float | None) -> Tensor:
    return x * (scale or 1.0)


class ByKeyword(nn.Linear):
    def forward(self, *, image: Tensor) -> Tensor:
        return super().forward(image)


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("model", "args", "kwargs", "kind", "told"),
    [
        (Scaled(), (X,), {"scale": torch.ones(1)}, "unsupported", "positional or keyword inputs, not both"),
        (Model(lambda *_: {"says": "a word"}), (X,), {}, "compile", "torchscript cannot trace it: "),
        (Model(scaled), (X, 2.0), {}, "unsupported", "torchscript traces tensors, and the model takes float too"),
        (Model(scaled), (X, None), {}, "unsupported", "torchscript traces tensors, and the model takes NoneType too"),
        (ByKeyword(4, 3), (), {"image": X}, "compile",
         r"^torchscript cannot trace it: 'image' is not in forward\(\) method's arguments, valid arguments name are \[.*\]$"),
    ],
)  # fmt: skip
def test_torchscript_says_why_it_cannot(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Tensor], kind: str, told: str
) -> None:
    with pytest.raises(BenchError, match=told) as caught:
        applied("torchscript", model, *args, **kwargs)
    assert (caught.value.kind, caught.value.switches, caught.value.scope) == (kind, ("torchscript",), "switch")
    assert "\n" not in str(caught.value)


def test_running_out_of_memory_while_tracing_is_no_failure_of_the_tracer() -> None:
    class Hungry(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        applied("torchscript", Hungry(4, 3), torch.randn(2, 4))
    assert failure_from(caught.value, "recipe").kind == "oom"


def moved_by(recipe: str) -> tuple[float, Tensor]:
    """The largest gradient as backward computes it, before the optimizer sees it, and how far that moves the weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    seen: list[float] = []
    model.weight.register_hook(lambda gradient: seen.append(gradient.abs().max().item()))
    before = model.weight.detach().clone()
    step = TrainingStep(applied(recipe, model, torch.randn(2, 4), task="train"), "sgd")
    with step.context():
        assert torch.isfinite(step())
    assert not torch.equal(before, model.weight), "the optimizer stepped"
    (gradient,) = seen
    return gradient, model.weight.detach() - before


def test_gradients_are_scaled_in_fp16_and_not_in_bf16_and_move_the_weights_no_further() -> None:
    plain, moved = moved_by("baseline")
    scaled, moved_by_scaled = moved_by("amp")
    assert scaled == pytest.approx(INITIAL_GRADIENT_SCALE * plain, rel=0.05)
    torch.testing.assert_close(moved_by_scaled, moved, rtol=0.05, atol=1e-5)
    assert moved_by("amp-bf16")[0] == pytest.approx(plain, rel=0.1)


def test_reduce_overhead_on_a_cpu_carries_a_note() -> None:
    note = applied("compile:reduce-overhead", nn.Linear(4, 3), torch.randn(2, 4)).notes
    assert note == {"compile": "reduce-overhead makes no graphs on a CPU"}
    assert not applied("compile", nn.Linear(4, 3), torch.randn(2, 4)).notes


def test_a_broken_graph_is_a_failure_where_the_whole_was_asked_for() -> None:
    class Breaks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(input)

    assert output_of(applied("compile:backend=eager", Breaks(4, 3), torch.randn(2, 4))).shape == (2, 3)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        output_of(applied("compile:backend=eager,fullgraph=true", Breaks(4, 3), torch.randn(2, 4)))
    assert failure_from(caught.value, "first-call").kind == "compile"


def answers_before_and_after_the_weights_change(recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """What eager says, what the recipe says, and what the recipe says once a weight was doubled behind its back."""
    images = torch.randn(2, 3, 8, 8)
    setup = applied(recipe, Normed(), images)
    model = setup.workload.model
    eager = model(images).detach()
    found = output_of(setup).clone()
    with torch.no_grad():
        model.norm.weight.mul_(2)
    return eager, found, output_of(setup).clone()


@compiles
@pytest.mark.parametrize("recipe", ["compile", "channels-last+compile:epilogue_fusion=false,fullgraph=true"])
def test_compile_compiles_one_graph_and_keeps_the_numbers(recipe: str) -> None:
    torch._dynamo.reset()
    before = compilations()
    eager, found, after = answers_before_and_after_the_weights_change(recipe)
    torch.testing.assert_close(found, eager)
    torch.testing.assert_close(after, 2 * eager)  # the weights are still inputs of the graph
    assert compilations() > before
    assert (compile_seconds() or 0) > 0
    assert cache_state() in ("cold", "warm", "mixed")


@compiles
def test_compile_freeze_makes_constants_of_the_weights_until_the_session_is_over() -> None:
    from torch._inductor import config

    restore = remember_flags()
    eager, found, after = answers_before_and_after_the_weights_change("compile:freeze")
    torch.testing.assert_close(found, eager)
    assert torch.equal(found, after), "a frozen graph does not look at the weights again"
    assert config.freezing
    restore()
    assert not config.freezing


@pytest.mark.parametrize(
    ("recipe", "added_to", "is_left_alone"),
    [
        ("bf16", "seen", True),
        ("fp16", "seen", True),
        ("bf16", "", False),
        ("amp-bf16", "seen", False),
        ("fp16", "norm.running_mean", True),
    ],
)
def test_a_tuner_does_not_put_into_16_bits_what_a_model_counts_in(
    recipe: str, added_to: str, is_left_alone: bool
) -> None:
    """In bf16, 256 and 1 are 256: the outputs are right until then, which no check of a few calls can see."""
    facts = Facts(mutates=(added_to,), accumulates=(added_to,)) if added_to else Facts(mutates=("cache",))
    model = Normed()
    model.register_buffer("seen", torch.zeros(()))
    told = SWITCHES.get(recipe)(Recipe.parse(recipe).switches[0], "infer").irrelevance(model, facts)
    assert (told is not None) is is_left_alone
    assert told is None or f"adds to {added_to} call by call" in told
