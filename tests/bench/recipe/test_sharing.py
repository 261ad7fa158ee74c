"""Blocks that several processes compile at the same time."""

from __future__ import annotations

import fcntl
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from applying import applied
from torch import Tensor, nn

from redline.bench.recipe.switches.compiler import compile_together, in_turns
from redline.bench.session import BenchSession
from redline.bench.workload.step import InferenceStep, Setup, TrainingStep
from redline.model.protocol import Prepare, PreparedReply
from redline.model.spec import Recipe, RunSpec, WorkloadSpec
from redline.model.spec_table import specs_from_table

pytestmark = [pytest.mark.usefixtures("torch_as_it_was")]

BY_BLOCK = "compile:regional,backend=aot_eager"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Block(nn.Module):
    def __init__(self, width: int, inner: int, rate: float = 0.1) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, inner), nn.BatchNorm1d(inner)
        self.drop, self.last = nn.Dropout(rate), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.drop(self.norm(self.first(x)).relu()))


def network(*inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *(Block(8, each) for each in inner), nn.Linear(8, 3))


def spec() -> RunSpec:
    return RunSpec(workload=WorkloadSpec(model="test"), recipe=Recipe.parse(BY_BLOCK))


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def together(setup: Setup) -> Any:
    """The step after compiling with others."""
    step = TrainingStep(setup, "sgd") if setup.task == "train" else InferenceStep(setup)
    with step.context():
        compile_together(setup, spec())
    return step


class TestCompileTogether:
    @pytest.mark.parametrize("task", ["infer", "train"])
    @pytest.mark.parametrize("amp", ["", "amp-bf16+"])
    def test_the_step_finds_all_of_it_compiled(self, task: Any, amp: str) -> None:
        setup = applied(amp + BY_BLOCK, network(16, 16, 24, 24), torch.randn(4, 6), task=task)
        step = together(setup)
        assert graphs() == 2, "one for each kind"
        with step.context():
            step()
        assert graphs() == 2
        assert "could not" not in setup.notes["compile"]

    def test_blocks_that_differ_in_a_constant_only_are_compiled_too(self) -> None:
        blocks = [Block(8, 16, rate) for rate in (0.1, 0.2, 0.3)]
        setup = applied(BY_BLOCK, nn.Sequential(nn.Linear(6, 8), *blocks), torch.randn(4, 6), task="train")
        step = together(setup)
        compiled = graphs()
        with step.context():
            step()
        assert graphs() == compiled == 3

    def test_leaves_gradients_and_random_numbers_as_they_were(self) -> None:
        setup = applied(BY_BLOCK, network(16, 24), torch.randn(4, 6), task="train")
        before = torch.random.get_rng_state()
        together(setup)
        assert torch.equal(torch.random.get_rng_state(), before)
        assert all(weight.grad is None for weight in setup.workload.model.parameters())
        assert not any(block._forward_pre_hooks for block in setup.workload.model.modules())

    def test_a_block_that_is_not_called_by_itself_is_left_to_the_step_and_told(self) -> None:
        class Counting(Block):
            """Must be called in the order of the model."""

            turn = 0

            def forward(self, x: Tensor) -> Tensor:
                if Counting.turn > 2:
                    raise ValueError("called out of turn")
                return super().forward(x)

        class Network(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(Counting(8, inner) for inner in (16, 24))

            def forward(self, x: Tensor) -> Tensor:
                Counting.turn = 0
                for block in self.blocks:
                    x = block(x)
                Counting.turn = 3
                return x

        setup = applied(BY_BLOCK, Network(), torch.randn(4, 8))
        step = together(setup)
        assert "could not be shared with other processes: " in setup.notes["compile"]
        assert "called out of turn" in setup.notes["compile"]
        with step.context():
            assert step().shape == (4, 8)

    def test_what_cannot_be_compiled_breaks(self) -> None:
        class Breaking(Block):
            def forward(self, x: Tensor) -> Tensor:
                torch._dynamo.graph_break()
                return super().forward(x)

        model = nn.Sequential(Breaking(8, 16), Breaking(8, 24))
        setup = applied("compile:regional,fullgraph=true,backend=eager", model, torch.randn(4, 8))
        with pytest.raises(torch._dynamo.exc.TorchDynamoException):
            together(setup)


class TestInTurns:
    def test_what_another_is_busy_with_comes_last(self, tmp_path: Path) -> None:
        done: list[str] = []
        locks = {name: tmp_path / name for name in "abc"}
        held = locks["a"].open("w")
        fcntl.flock(held, fcntl.LOCK_EX)

        def do(name: str) -> None:
            done.append(name)
            if name == "c":
                threading.Timer(0.05, held.close).start()

        in_turns([(lock, partial(do, name)) for name, lock in locks.items()])
        assert done == ["b", "c", "a"]


def test_a_session_says_that_its_blocks_were_shared_and_a_helper_only_compiles() -> None:
    table = {
        "model": "resnet18",
        "image_size": 32,
        "batch": 2,
        "device": "cpu",
        "effort": "quick",
        "recipe": [BY_BLOCK],
    }
    (asked,) = specs_from_table(table)
    stages: list[str] = []
    helper = BenchSession(lambda progress: stages.append(progress.stage), isolated=False)
    helped = helper.handle(Prepare(spec=asked, sharing="helps"))
    assert isinstance(helped, PreparedReply)
    assert graphs() > 1
    assert not {"reference", "numerics", "warm-up"} & set(stages)
    reply = BenchSession(lambda progress: None, isolated=False).handle(Prepare(spec=asked, sharing="shares"))
    assert isinstance(reply, PreparedReply)
    assert reply.prepared.cold_start.shared
    assert reply.prepared.numerics.passed
