"""Parts of a model recorded where the whole cannot be, on a CPU whose recordings are calls made again; the GPU's are in tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from applying import workload_of
from torch import Tensor, nn

from redline.bench.count.facts import facts_of
from redline.bench.device.cpu import CpuDevice
from redline.bench.recipe.compose import apply_recipe, switches_of
from redline.bench.recipe.parts import parts_of
from redline.bench.recipe.switches.graphs import Graphs
from redline.bench.workload.sources.live import remember_module
from redline.bench.workload.step import InferenceStep, Setup
from redline.model.errors import BenchError
from redline.model.spec import Recipe
from redline.model.work import Facts

pytestmark = [pytest.mark.usefixtures("torch_as_it_was")]


class Recorder(CpuDevice):
    """Writes the result of another call where that of the first lies, as a graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0
        self.refuses: Callable[[int], bool] = lambda number: False
        self.asked = 0

    def graph_refusal(self) -> str | None:
        return None

    def record_graph(self, work: Callable[[], Any], warmups: int) -> tuple[Callable[[], None], Any]:
        self.asked += 1
        if self.refuses(self.asked):
            raise RuntimeError("operation not permitted when stream is capturing")
        output = work()

        def replay() -> None:
            self.replays += 1
            for own, new in zip(_leaves(output), _leaves(work()), strict=True):
                own.copy_(new)

        return replay, output


def _leaves(output: Any) -> list[Tensor]:
    return list(torch.utils._pytree.tree_leaves(output))


def layers(count: int = 5) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(4, 4), nn.Tanh())))


class Detector(nn.Module):
    """A network that waits for nothing, and a choice among its scores, which Python makes."""

    def __init__(self, features: nn.Module | None = None) -> None:
        super().__init__()
        self.features, self.head = features or layers(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(self.features(x))
        many = int((scores > 0).sum().item())
        return scores.sum(1) * many


def recorded(model: nn.Module, *args: Any, device: Recorder | None = None) -> tuple[Setup, Recorder]:
    device = device or Recorder()
    return apply_recipe(Recipe.parse("graphs:parts"), workload_of(model.eval(), *args), device), device


def test_the_largest_part_that_waits_for_nothing_is_replayed() -> None:
    model, x = Detector(), torch.randn(2, 4)
    setup, device = recorded(model, x)
    assert setup.notes["graphs"] == "recorded one part: features"
    step = InferenceStep(setup)
    for _ in range(2):
        other = torch.randn(2, 4)
        with torch.inference_mode():
            plain = Detector()
            plain.load_state_dict(model.state_dict())
            wanted = plain(other)
        torch.testing.assert_close(step.on((other,), {}), wanted)
    assert device.replays == 2


def test_inputs_of_another_shape_are_computed_as_before() -> None:
    model, x = Detector(), torch.randn(2, 4)
    setup, device = recorded(model, x)
    assert InferenceStep(setup).on((torch.randn(3, 4),), {}).shape == (3,)
    assert device.replays == 0


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = layers(), layers()

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.first(x))
        return self.again(x) * x.max().item()


def test_a_module_that_is_called_twice_would_overwrite_its_own_output() -> None:
    setup, _ = recorded(Twice(), torch.randn(2, 4))
    assert setup.notes["graphs"] == "recorded one part: first"


class WritesIntoItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mul_(2))


def test_a_module_that_writes_into_its_input_is_not_replayed_but_what_is_inside_is() -> None:
    setup, _ = recorded(Detector(WritesIntoItsInput()), torch.randn(2, 4))
    assert setup.notes["graphs"] == "recorded one part: features.inner"


class Casts(nn.Module):
    """Its backbone runs in another number format than it would alone."""

    def __init__(self) -> None:
        super().__init__()
        self.features = layers()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.features(x)
        return x * x.max().item()


def test_a_part_that_needs_the_context_around_it_is_left_as_it_is() -> None:
    with pytest.raises(BenchError, match="no part of the model runs 8 operators or more without waiting"):
        recorded(Casts(), torch.randn(2, 4))


def test_where_a_part_cannot_be_recorded_what_is_inside_it_may() -> None:
    device = Recorder()
    device.refuses = lambda number: number == 1
    setup, _ = recorded(Detector(nn.Sequential(layers(), layers())), torch.randn(2, 4), device=device)
    assert setup.notes["graphs"] == "recorded 2 parts: features.0, features.1"


@pytest.mark.parametrize(
    ("read", "waits"),
    [
        (lambda x: x[x > 0].sum(), True),
        (lambda x: x * x.max().item(), True),
        (lambda x: x.nonzero().sum(), True),
        (lambda x: x[torch.tensor([0, 1])], False),
    ],
)
def test_what_makes_the_host_wait(read: Callable[[Tensor], Tensor], waits: bool) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, x: Tensor) -> Tensor:
            return read(self.layers(x))

    model = nn.Sequential(Reads())
    assert parts_of(model, (torch.randn(2, 4),), {})["0"].suits is not waits


def test_a_borrowed_model_is_given_back_as_it_was() -> None:
    model = Detector().eval()
    give_back = remember_module(model)
    recorded(model, torch.randn(2, 4))
    assert "forward" in vars(model.features)
    give_back()
    assert "forward" not in vars(model.features)


def test_parts_are_for_steps_that_cannot_be_recorded_whole() -> None:
    (parts,), (whole,) = (switches_of(Recipe.parse(text), "infer") for text in ("graphs:parts", "graphs"))
    assert isinstance(parts, Graphs)
    waiting, plain = Facts(synchronises=True, reads=("item (1)",)), Facts(synchronises=False)
    model = Detector()
    assert parts.irrelevance(model, "infer", waiting) is None
    assert parts.irrelevance(model, "infer", plain) == "the whole step can be recorded"
    assert "waits for the device by itself (item (1))" in (whole.irrelevance(model, "infer", waiting) or "")
    assert whole.irrelevance(model, "infer", plain) is None
    nothing = Facts(synchronises=True, parts=0)
    assert "no part of the model runs 8 operators or more" in (parts.irrelevance(model, "infer", nothing) or "")
    assert parts.refusal(Recorder(), "train") == "parts are recorded in inference only"


def test_a_watched_step_tells_whether_there_are_parts() -> None:
    """`features` reads nothing; of the branching network every layer is followed by a look at its values."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) if x.mean() > -10 else x
            return x

    found = [
        facts_of(workload_of(model.eval(), torch.randn(2, 4)), CpuDevice(), "sgd", seed=0).parts
        for model in (Detector(), Branching())
    ]
    assert found == [1, 0]
