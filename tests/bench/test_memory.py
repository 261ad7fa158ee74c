"""Whose memory a step holds, on models whose bytes are known."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from redline.bench.memory import answer_memory
from redline.model.errors import BenchError
from redline.model.spec import Recipe, RunSpec, WorkloadSpec
from redline.model.work import MemoryCategory, MemoryRow, MemoryUse
from redline.show.profile import memory_figure
from redline.show.result import terminal
from redline.verbs.profile import memory_result

MODEL = """
import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 4096, bias=False)
        self.act = nn.Sigmoid()
        self.last = nn.Linear(4096, 8, bias=False)
    def forward(self, x):
        return self.last(self.act(self.first(x)))

def build(batch=256):
    return Wide(), torch.randn(batch, 64)
"""
WEIGHTS = 4 * (64 * 4096 + 4096 * 8)
HIDDEN = 4 * 256 * 4096


def spec_of(folder: Path, task: Any = "infer", source: str = MODEL, name: str = "build", **workload: Any) -> RunSpec:
    path = folder / "wide.py"
    path.write_text(source)
    return RunSpec(workload=WorkloadSpec(model=f"{path}:{name}", task=task, **workload), device="cpu")


def use_of(*args: Any, **workload: Any) -> MemoryUse:
    return answer_memory(spec_of(*args, **workload)).use


def row_of(use: MemoryUse) -> MemoryRow:
    return MemoryRow(model="wide", task="train", recipe="baseline", batch=256, device="a CPU", use=use)


def test_training_by_kind_and_module(tmp_path: Path) -> None:
    use = use_of(tmp_path, "train", batch=256, optimizer="adam")
    assert sum(use.categories.values()) == use.peak_bytes
    assert use.categories["weights"] == WEIGHTS
    assert use.categories["optimizer state"] == pytest.approx(2 * WEIGHTS, rel=0.01)
    assert HIDDEN <= use.categories["activations"] <= 2.1 * HIDDEN
    assert use.peak_phase == "backward"
    largest = use.holders[0]
    assert (largest.module, largest.category) in {
        ("act", "activations"),
        ("first", "activations"),
        ("", "temporaries"),
        ("first", "optimizer state"),
    }
    holders = {holder.module: holder for holder in use.holders}
    assert "(loss)" in holders
    # What the optimizer keeps belongs to the module whose weights it is of.
    assert holders["first"].bytes >= 0.9 * 3 * WEIGHTS / 2
    assert "optimizer state" not in {holder.category for holder in use.holders if not holder.module}
    lines = {holder.line for holder in use.holders if holder.module in ("act", "first")}
    assert "wide.py:12" in lines
    assert {point.phase for point in use.timeline} == {"forward", "backward", "optimizer"}
    assert all(sum(point.categories.values()) == point.bytes for point in use.timeline)
    assert max(point.bytes for point in use.timeline) == use.peak_bytes
    assert use.timeline[-1].categories["optimizer state"] == use.categories["optimizer state"]


def test_running_out_names_who_asked_and_who_held_the_rest(tmp_path: Path) -> None:
    greedy = (
        MODEL.replace("self.last(self.act(self.first(x)))", "self.greedy(self.act(self.first(x)))")
        .replace(
            "def build",
            "class Greedy(nn.Module):\n    def forward(self, x):\n        return x.new_empty(2**50)\n\ndef build",
        )
        .replace("        self.act =", "        self.greedy = Greedy()\n        self.act =")
    )
    with pytest.raises(BenchError) as caught:
        answer_memory(spec_of(tmp_path, source=greedy, batch=256))
    assert caught.value.kind == "oom"
    assert "out of memory in greedy (wide.py:" in str(caught.value)
    assert "held: activations" in str(caught.value)


def test_gradients_are_held_until_the_optimizer_is_through(tmp_path: Path) -> None:
    """A small batch: the peak is where gradients and state meet."""
    use = use_of(tmp_path, "train", batch=1)
    assert use.categories["gradients"] == WEIGHTS
    assert sum(use.categories.values()) == use.peak_bytes


def test_inference_keeps_no_more_than_two_layers(tmp_path: Path) -> None:
    use = use_of(tmp_path, batch=256)
    assert use.categories["weights"] == WEIGHTS
    assert use.categories["activations"] == pytest.approx(2 * HIDDEN, rel=0.02)
    assert "gradients" not in use.categories
    assert sum(use.categories.values()) == use.peak_bytes


UNUSUAL = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Graph:
    edges: torch.Tensor
    nodes: torch.Tensor

class Spread(nn.Module):
    def forward(self, graph):
        return torch.sparse.mm(graph.edges, graph.nodes)

class Force(nn.Linear):
    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(super().forward(x).sum(), x)[0]

def force():
    return Force(4, 4), torch.randn(3, 4)

class Lazy(nn.Module):
    def forward(self, x):
        yield x

def graph():
    edges = torch.diag(torch.arange(1000) < 10).float().to_sparse()
    return Spread(), (Graph(edges, torch.randn(1000, 4)),)

def lazy():
    return Lazy(), torch.randn(4)
"""


def test_inputs_of_any_layout_and_structure_are_held(tmp_path: Path) -> None:
    use = use_of(tmp_path, source=UNUSUAL, name="graph")
    assert use.categories["inputs"] == 1000 * 4 * 4 + 10 * 4 + 2 * 10 * 8
    assert use.categories["activations"] >= 1000 * 4 * 4
    assert use_of(tmp_path, source=UNUSUAL, name="force").categories["weights"] == 4 * (16 + 4)
    with pytest.raises(BenchError, match="Lazy returned a generator"):
        use_of(tmp_path, source=UNUSUAL, name="lazy")


def test_a_function_of_the_users_has_weights_and_modules_too(tmp_path: Path) -> None:
    step = MODEL + "\ndef setup():\n    return Wide()\n\ndef step(model):\n    model(torch.ones(2, 64))\n"
    use = use_of(tmp_path, "step", step, "step")
    assert use.categories["weights"] == WEIGHTS
    assert any(holder.module.endswith("first") and holder.category == "weights" for holder in use.holders)


PACKED = """
import warnings
import torch
from torch import nn

def build(batch=4):
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8))
    model[1].mask = torch.ones(1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8), torch.randn(batch, 64)
"""


def test_weights_that_torch_packs_and_plain_attributes_are_weights(tmp_path: Path) -> None:
    use = use_of(tmp_path, source=PACKED)
    packed = {"0._packed_params": 64 * 4096 + 4 * 4096, "2._packed_params": 4096 * 8 + 4 * 8}
    assert use.categories["weights"] == sum(packed.values()) + 4000
    assert {one.module: one.bytes for one in use.holders if one.category == "weights"} == packed


def test_in_a_narrow_window_the_kind_that_the_advice_names_stays() -> None:
    parts: dict[MemoryCategory, int] = {
        "weights": 2**20,
        "gradients": 2**21,
        "optimizer state": 2**22,
        "inputs": 2**10,
        "activations": 2**12,
        "temporaries": 2**30,
    }
    use = MemoryUse(peak_bytes=2**31, peak_phase="backward", categories=parts, holders=(), timeline=())
    text = io.StringIO()
    Console(file=text, width=60, highlight=False).print(terminal(memory_result([row_of(use)])))
    lines = text.getvalue().splitlines()
    assert "temporaries are the largest part" in " ".join(lines)
    (header,) = (line for line in lines if line.startswith("recipe"))
    assert "temporaries" in header
    assert "inputs" not in header


SPARSE = """
import torch
from torch import nn

def build(batch=8):
    model = nn.Sequential(nn.EmbeddingBag(1000, 64, sparse=True, mode="sum"), nn.Linear(64, 4, bias=False))
    return model, torch.arange(batch * 10).reshape(batch, 10)
"""


def test_a_sparse_gradient_and_what_the_optimizer_keeps_of_it_have_their_kinds(tmp_path: Path) -> None:
    use = use_of(tmp_path, "train", SPARSE, batch=8)
    rows, dense = 80 * (64 * 4 + 8), 64 * 4 * 4  # each row of the table with its index
    assert use.categories["weights"] == 1000 * 64 * 4 + dense
    assert use.categories["gradients"] == rows + dense
    # Momentum: the rows kept before the step and those that replace them.
    assert use.categories["optimizer state"] == 2 * rows + dense
    assert use.peak_phase == "optimizer"


def test_a_compiled_model_has_no_modules_to_tell_of(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no memory by module under compile"):
        answer_memory(msgspec.structs.replace(spec_of(tmp_path, batch=256), recipe=Recipe.parse("compile")))


def test_reserved_memory_is_told_beside_the_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an allocator that takes 32 MiB at a time and gives nothing back."""
    held = iter(range(1, 10_000))
    monkeypatch.setattr("redline.bench.device.cpu.CpuDevice.reserved_bytes", lambda _: 2**25 * -(-next(held) // 20))
    use = use_of(tmp_path, "train", batch=256, optimizer="adam")
    reserved = [point.reserved_bytes or 0 for point in use.timeline]
    assert reserved == sorted(reserved)
    assert len(set(reserved)) > 1
    row = row_of(use)
    (line,) = memory_figure([row]).axes[0].get_lines()
    assert line.get_ydata().tolist() == [each / 2**20 for each in reserved]
