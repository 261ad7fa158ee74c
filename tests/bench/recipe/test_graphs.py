"""Recorded steps, on a CPU whose `record_graph` replays by calling again what was recorded; the GPU's are in tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from applying import loss_reference
from torch import nn

from redline.bench.device.cpu import CpuDevice
from redline.bench.recipe.compose import apply_recipe, switch_choices
from redline.bench.recipe.numerics import OutputReference
from redline.bench.recipe.switches.graphs import GraphedInference, GraphedTraining
from redline.bench.workload.step import InferenceStep, TrainingStep, make_step
from redline.bench.workload.workload import Workload, assemble
from redline.model.errors import BenchError
from redline.model.spec import Recipe


class ReplayingCpu(CpuDevice):
    """Replays by running the recorded work again and writing its result where the first one lies, as a graph does."""

    recorded = 0
    breaks: str | None = None

    def graph_refusal(self) -> str | None:
        return None

    def record_graph(self, work: Callable[[], Any], warmups: int) -> tuple[Callable[[], None], Any]:
        if self.breaks:
            raise RuntimeError(self.breaks)
        self.recorded += 1
        for _ in range(warmups):
            work()
        output = work()

        # A graph holds the tensors it was recorded with, wherever the setup's own have gone since.
        held = self.setup.args

        def replay() -> None:
            given, self.setup.args = self.setup.args, held
            try:
                output.copy_(work())
            finally:
                self.setup.args = given

        return replay, output


def workload(task: str = "infer") -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    return assemble(model, ((torch.randn(4, 3, 8, 8),), {}), task=task, source="test", identity="test", seed=0)


def graphed(recipe: str, task: str = "infer", **attributes: Any):
    device = ReplayingCpu()
    for name, value in attributes.items():
        setattr(device, name, value)
    setup = apply_recipe(Recipe.parse(recipe), workload(task), device)
    device.setup = setup
    return setup, device


def test_a_recorded_forward_answers_for_the_inputs_it_is_given() -> None:
    setup, device = graphed("graphs")
    step, plain = make_step(setup, "sgd"), InferenceStep(setup)
    assert isinstance(step, GraphedInference)
    for seed in (1, 2):
        inputs = setup.workload.second_inputs(seed).inputs
        assert torch.equal(step.on(*inputs), plain.on(*inputs))
    assert device.recorded == 1


def test_numerics_compare_what_each_replay_returned() -> None:
    setup, device = graphed("graphs")
    reference = OutputReference.of(workload(), device, "fp32", 0)
    step = make_step(setup, "sgd")
    assert isinstance(step, InferenceStep)
    assert reference.judge(step, setup).passed


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("recipe", ["graphs", "graphs+fused-optimizer", "graphs+amp-bf16"])
def test_recording_leaves_training_where_it_began(recipe: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps made before recording are undone: weights, statistics, momentum and step counts."""
    monkeypatch.setattr("redline.bench.recipe.switches.graphs.COUNTS_STEPS", ())  # `capturable` is refused on a CPU
    setup, _ = graphed(recipe, "train")
    step = make_step(setup, optimizer)
    assert isinstance(step, GraphedTraining)
    plain_setup = apply_recipe(
        Recipe.parse(recipe.replace("graphs+", "").replace("graphs", "baseline")), workload("train"), ReplayingCpu()
    )
    plain = TrainingStep(plain_setup, optimizer)
    with step.context():
        losses = [float(step()) for _ in range(6)]
        expected = [float(plain()) for _ in range(6)]
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[0] != losses[-1]


def test_the_loss_path_of_a_recorded_step_is_read_step_by_step() -> None:
    setup, device = graphed("graphs", "train")
    reference = loss_reference(workload("train"), "fp32", 8, device=device)
    step = make_step(setup, "sgd")
    assert isinstance(step, TrainingStep)
    verdict = reference.judge(step, setup)
    assert verdict.passed, verdict.reason
    assert len(set(verdict.losses)) == 8


def test_a_recorded_training_step_has_one_phase() -> None:
    setup, _ = graphed("graphs", "train")
    marks: list[int] = []
    step = make_step(setup, "sgd")
    with step.context():
        step(lambda: marks.append(1))
    assert len(marks) == len(step.phases) == 1


def test_a_tuner_is_told_of_the_same_need() -> None:
    told = {
        task: {choice.switch: choice for choice in switch_choices(workload(task).model, ReplayingCpu(), task)}
        for task in ("infer", "train")
    }
    (need,) = told["train"]["graphs"].needs
    with pytest.raises(BenchError, match=need.reason):
        graphed(f"graphs+{need.beside}", "train")
    graphed(f"graphs+{need.beside}+{need.wants[0]}", "train")
    assert told["infer"]["graphs"].needs == ()
    unchanged = {switch for switch, choice in told["train"].items() if choice.leaves_program}
    assert unchanged == {"graphs", "fused-optimizer", "cudnn-benchmark", "keep-memory"}


@pytest.mark.parametrize(
    ("breaks", "error", "told"),
    [
        ("operation not permitted when stream is capturing\nmore", BenchError,
         r"cannot record this step: operation not permitted when stream is capturing$"),
        ("CUDA out of memory. Tried to allocate 2 GiB", RuntimeError, "out of memory"),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_refused_with_the_reason(breaks: str, error: type[Exception], told: str) -> None:
    setup, _ = graphed("graphs", breaks=breaks)
    with pytest.raises(error, match=told) as caught:
        make_step(setup, "sgd")()
    assert type(caught.value) is error
