"""Switches that work block by block: compiling each repeated block by itself, recomputing it, and what spares memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from applying import applied, output_of
from torch import Tensor, nn

from redline.bench.device.cpu import CpuDevice
from redline.bench.recipe.compose import switch_choices, switches_of
from redline.bench.recipe.plain import repeated_blocks, store_inputs
from redline.bench.workload.sources.user import remember_module
from redline.bench.workload.step import TrainingStep
from redline.model.spec import Recipe
from redline.model.work import Facts, RepeatedBlock

pytestmark = [pytest.mark.usefixtures("torch_as_it_was")]


class Block(nn.Module):
    def __init__(self, width: int = 8, inner: int = 16) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(width, inner), nn.Dropout(0.1), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.drop(self.first(x).relu()))


def network(blocks: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(8, 3))


class TestRepeatedBlocks:
    def test_are_told_by_class_and_weights_not_by_names(self) -> None:
        assert repeated_blocks(network()) == ["0", "1", "2", "3"]
        stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
        assert repeated_blocks(stages) == ["0.0", "0.1", "1.0", "1.1"]

    def test_are_none_where_nothing_large_repeats(self) -> None:
        assert repeated_blocks(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) == []
        assert repeated_blocks(nn.Sequential(nn.Linear(512, 512), Block(), Block())) == [], "a few weights of many"

    def test_do_not_lie_inside_each_other(self) -> None:
        class Nested(nn.Module):
            def __init__(self, depth: int) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)
                self.inner = Nested(depth - 1) if depth else nn.Identity()

        assert repeated_blocks(nn.Sequential(Nested(2), Nested(2))) == ["0", "1"]


class TestRegionalCompiling:
    def test_compiles_alike_blocks_once_and_nothing_around_them(self) -> None:
        x, model = torch.randn(2, 8), network().eval()
        expected = model(x).detach()
        setup = applied("compile:regional,backend=aot_eager", model, x)
        assert setup.model is model, "what stands around the blocks is as it was"
        torch._dynamo.utils.counters.clear()
        assert torch.allclose(output_of(setup), expected, atol=1e-6)
        # One for the first block, whose input was made outside of inference mode, and one for all the others.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
        assert "4 blocks of class Block" in setup.notes["compile"]

    def test_leaves_more_kinds_than_torch_would_allow_none_uncompiled(self) -> None:
        """Beyond 8 versions of one forward dynamo falls back to the uncompiled one, with a warning."""
        blocks = [Block(inner=16 + number) for number in range(10) for _ in range(2)]
        x, model = torch.randn(2, 8), nn.Sequential(*blocks).eval()
        setup = applied("compile:regional,backend=eager", model, x)
        torch._dynamo.utils.counters.clear()
        output_of(setup)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 10

    @pytest.mark.parametrize(
        ("model", "facts", "told"),
        [
            (nn.Linear(8, 8), None, "no block of the model repeats"),
            (
                nn.Sequential(*(Block(inner=16 + number) for number in range(3))),
                Facts(blocks=RepeatedBlock(class_name="Block", count=3, share=0.9, kinds=3)),
                "its 3 blocks are of 3 kinds, and each kind is compiled separately",
            ),
            (
                network(),
                Facts(blocks=RepeatedBlock(class_name="Block", count=4, share=0.1)),
                "its blocks take only 10% of the forward's time",
            ),
            (network(), Facts(blocks=RepeatedBlock(class_name="Block", count=4, share=0.9)), None),
            (network(), None, None),
        ],
    )
    def test_is_offered_where_blocks_repeat_and_take_the_time(
        self, model: nn.Module, facts: Facts | None, told: str | None
    ) -> None:
        refusals = {choice.switch: choice.refusal for choice in switch_choices(model, CpuDevice(), "infer", facts)}
        assert (refusals["compile:regional"] and str(refusals["compile:regional"])) == told
        assert refusals["compile"] is None


def test_early_launches_are_for_decoding_and_for_gpus_that_know_them() -> None:
    (switch,) = switches_of(Recipe.parse("compile:pdl"), "generate")
    assert switch.settings["options"] == {
        "coordinate_descent_tuning": True,
        "combo_kernels": True,
        "triton.enable_pdl": True,
    }  # type: ignore[attr-defined]
    assert switch.caution is None
    assert switches_of(Recipe.parse("compile:pdl"), "infer")[0].caution is not None
    cpu = CpuDevice()
    assert "a CPU runs none" in (switch.refusal(cpu) or "")
    assert "Hopper" in (cpu.early_launch_refusal() or "")


class TestCheckpointing:
    def trained(self, recipe: str, steps: int = 3) -> tuple[nn.Module, list[Tensor]]:
        torch.manual_seed(1)
        model = network()
        setup = applied(recipe, model, torch.randn(4, 8), task="train")
        step = TrainingStep(setup, "sgd")
        torch.manual_seed(2)
        with step.context():
            return model, [step() for _ in range(steps)]

    def test_the_same_losses_with_the_insides_of_blocks_computed_twice(self) -> None:
        calls: list[int] = []
        model = network()
        model[0].first.register_forward_hook(lambda *_: calls.append(1))
        setup = applied("checkpointing", model, torch.randn(4, 8), task="train")
        step = TrainingStep(setup, "sgd")
        with step.context():
            step()
        assert len(calls) == 2, "once forward, once again for the backward"
        assert setup.notes["checkpointing"] == "recomputes 4 blocks of class Block"
        _, plain = self.trained("baseline")
        _, recomputed = self.trained("checkpointing")
        assert torch.allclose(torch.stack(plain), torch.stack(recomputed)), "dropout draws the same masks again"

    def test_keeps_less_for_the_backward(self) -> None:
        def kept(recipe: str) -> int:
            setup = applied(recipe, network(8), torch.randn(64, 8), task="train")
            sizes: list[int] = []

            def pack(tensor: Tensor) -> Tensor:
                sizes.append(tensor.numel())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                setup.model(*setup.args)
            return sum(sizes)

        assert kept("checkpointing") < 0.5 * kept("baseline")

    def test_batch_norm_inside_is_told(self) -> None:
        class Normed(Block):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.BatchNorm1d(8)

        setup = applied("checkpointing", nn.Sequential(Normed(), Normed()), torch.randn(4, 8), task="train")
        assert "count every batch twice" in setup.notes["checkpointing"]

    def test_a_borrowed_model_is_given_back_as_it_was(self) -> None:
        model = network()
        give_back = remember_module(model)
        applied("checkpointing", model, torch.randn(2, 8), task="train")
        assert "forward" in vars(model[0])
        give_back()
        assert "forward" not in vars(model[0])


class TestKeepMemory:
    """Freed memory stays with the process: what a step frees, the next one has without the kernel."""

    def test_is_asked_of_the_c_library_until_it_is_restored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[int, int]] = []
        library = SimpleNamespace(mallopt=lambda number, value: asked.append((number, value)))
        monkeypatch.setattr("redline.bench.device.cpu.ctypes.CDLL", lambda name: library)
        monkeypatch.setattr(CpuDevice, "keeping_refusal", lambda self: None)
        device = CpuDevice()
        applied("keep-memory", network(), torch.randn(2, 8), device=device)
        assert asked == [(-1, 2**31 - 1), (-4, 0)]
        device.restore()
        device.restore()
        assert asked[2:] == [(-1, 131072), (-4, 65536)]

    def test_is_left_out_where_a_step_asks_for_little(self) -> None:
        def refusal(facts: Facts | None) -> str | None:
            (told,) = [
                each for each in switch_choices(network(), CpuDevice(), "infer", facts) if each.switch == "keep-memory"
            ]
            return str(told.refusal) if told.refusal is not None else None

        assert "(3 page faults)" in str(refusal(Facts(page_faults=3.0)))
        assert refusal(Facts(page_faults=2793.0)) == refusal(None) == CpuDevice().keeping_refusal()


def test_a_compiler_stores_what_a_linear_layer_reads() -> None:
    model = Block().eval()
    x = torch.randn(1, 8)
    before = model(x)
    store_inputs(model)
    assert torch.equal(model(x), before), "without a compiler nothing changes"
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    assert torch.equal(torch.compile(model, backend=keep)(x), before)
    (graph,) = graphs
    linears = [node for node in graph.graph.nodes if node.target is torch._C._nn.linear]
    assert [node.args[0].target for node in linears] == ["as_strided", "as_strided"]
