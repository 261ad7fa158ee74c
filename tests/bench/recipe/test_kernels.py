"""Kernels for a decode step: what they compute, by Triton's interpreter, and which layers they are given."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from redline.bench.count.counter import Kinds, WorkCounter
from redline.bench.device import open_device
from redline.bench.measure.generation import generation_info, token_reads
from redline.bench.recipe.compose import apply_recipe, switches_of
from redline.bench.recipe.snippet import snippet_of
from redline.bench.workload.build import build_workload
from redline.bench.workload.generation import GenerateStep
from redline.model.spec import Recipe, RunSpec, WorkloadSpec

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("redline.bench.recipe.kernels", reason="needs Triton")
LLAMA = "hf:llama?hidden_size=32,intermediate_size=48,num_hidden_layers=1,num_attention_heads=4,num_key_value_heads=2,vocab_size=97"
RECIPE = "static-cache+decode-kernels"

BY_INTERPRETER = """
import torch, triton
from redline.bench.recipe.kernels import rows_kernel
torch.manual_seed(0)
for count, rows, width, has_bias in ((1, 11, 70, True), (3, 8, 32, False)):
    x, weight, bias = torch.randn(count, width), torch.randn(rows, width), torch.randn(rows)
    out = torch.full((count, rows), torch.nan)
    rows_kernel[(count * triton.cdiv(rows, 4),)](
        x, weight, bias, out, count, rows, K=width, HAS_BIAS=has_bias, EARLY=False, BLOCK_N=4, BLOCK_K=32,
    )
    assert torch.allclose(out, torch.nn.functional.linear(x, weight, bias if has_bias else None), atol=1e-5), (out, x)
print("equal")
"""


def test_they_compute_what_torch_does() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BY_INTERPRETER], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout == "equal\n", done.stderr


def test_a_gpu_would_take_it() -> None:
    """The interpreter forgives what the compiler for a GPU does not; that runs without one."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = kernels.rows_kernel
    constants = {"K": 96, "HAS_BIAS": True, "BLOCK_N": 2, "BLOCK_K": 64, "EARLY": True}
    kinds = {name: "i32" if name in ("count", "rows") else "*bf16" for name in function.arg_names}
    signature = kinds | dict.fromkeys(constants, "constexpr")
    values = {(function.arg_names.index(name),): value for name, value in constants.items()}
    made = triton.compile(
        ASTSource(function, signature, values),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 1, "enable_fp_fusion": True},
    )
    assert "griddepcontrol.wait" in made.asm["ptx"]


class Block(nn.Module):
    """Four layers read one tensor, two of them with a bias; another layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6, bias=False), nn.Linear(8, 4, bias=False)
        self.third, self.last = nn.Linear(8, 10), nn.Linear(10, 8)
        self.fourth = nn.Linear(8, 10)
        self.alone = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.first(x), self.second(x)], dim=-1)
        y: Tensor = self.last(joined + self.third(x) * self.fourth(x))
        return self.alone(self.alone(y))


def used(model: nn.Module, *example: Tensor) -> list[int]:
    groups: list[int] = kernels.use_row_products(model, lambda: model(*example))
    return groups


def test_layers_that_read_one_tensor_are_one_product() -> None:
    torch.manual_seed(0)
    model, few, many = Block().eval(), torch.randn(2, 1, 8), torch.randn(9, 1, 8)
    with torch.no_grad():
        wanted, for_many = model(few), model(many)
        assert used(model, few) == [2, 2, 1, 1], "with a bias and without, and what is called twice stands alone"
        assert torch.allclose(model(few), wanted, atol=1e-6)
        assert torch.equal(model(many), for_many)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(few), wanted, atol=1e-6)
        # Weights that are loaded later reach the product: it reads where the layers keep theirs.
        model.second.weight.fill_(0.0)
        assert not torch.allclose(model(few), wanted, atol=1e-6)
        assert torch.equal(model.second(few), torch.zeros(2, 1, 4))


def test_bytes_of_joined_weights_count_once() -> None:
    model, few = Block().eval(), torch.randn(1, 1, 8)
    used(model, few)
    with torch.no_grad(), WorkCounter(model.parameters(), Kinds(), token_reads) as counter:
        model(few)
    assert counter.touched.bytes() == 4 * sum(weight.numel() for weight in model.parameters())


@pytest.fixture
def anything_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the operators do what torch does: how they are used can be seen there."""
    for room in ("compose", "snippet"):
        monkeypatch.setattr(f"redline.bench.recipe.{room}.refuse_impossible", lambda *args: None)


def spec(recipe: str, batch: int = 2) -> RunSpec:
    workload = WorkloadSpec(model=LLAMA, task="generate", batch=batch, prompt=7, new_tokens=6)
    return RunSpec(workload=workload, recipe=Recipe.parse(recipe), device="cpu")


def step_of(recipe: str) -> GenerateStep:
    asked = spec(recipe)
    return GenerateStep(apply_recipe(asked.recipe, build_workload(asked.workload, 0), open_device("cpu")))


def test_a_model_writes_the_same_with_them(anything_goes: None) -> None:
    plain, step, device = step_of("static-cache"), step_of(f"{RECIPE}+compile:backend=eager"), open_device("cpu")
    with step.context():
        assert torch.equal(step(), plain())
    assert step._setup.notes["decode-kernels"] == "8 linear layers in 5 products"
    assert generation_info(step, device).read_bytes == generation_info(plain, device).read_bytes


def test_a_snippet_has_them(anything_goes: None, tmp_path: Path) -> None:
    path = tmp_path / "fast.py"
    path.write_text(snippet_of(spec(RECIPE)).replace("decode_step::", "decode_step_of_a_snippet::"))
    assert "redline" not in path.read_text()
    snippet = loaded(path)
    decoder = build_workload(spec(RECIPE).workload, 0).model
    generate = snippet.optimise(decoder.model, decoder.prompt, decoder.new_tokens)
    step = step_of("static-cache")
    with step.context():
        assert torch.equal(generate(decoder.prompt), step())


def loaded(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location("fast", path)
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["fast"] = module
    found.loader.exec_module(module)
    return module


def test_they_are_refused_where_there_are_many_sequences() -> None:
    (switch,) = switches_of(Recipe.parse("decode-kernels"), "generate")
    many = switch.irrelevance(build_workload(spec("baseline", batch=5).workload, 0).model, None)
    assert "up to 4 sequences" in str(many)
