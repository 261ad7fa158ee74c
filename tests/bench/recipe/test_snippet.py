"""The code a person pastes: it runs alone, gives the same numbers, and no name can break out of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision

import redline
from redline.bench.recipe.snippet import snippet_of
from redline.errors import UsageError
from redline.spec import Recipe, RunSpec, WorkloadSpec

ALL_STEPS = {
    "infer": ["tf32", "amp", "amp-bf16", "fp16", "bf16", "channels-last", "compile", "compile:freeze", "torchscript",
              "cudnn-benchmark", "graphs", "fold-bn", "sdpa:math", "int8", "onnx"],
    "train": ["tf32", "amp", "amp-bf16", "channels-last", "compile:max-autotune", "fused-optimizer", "graphs",
              "sdpa:math"],
}  # fmt: skip


def snippet(recipe: str, task: str = "infer", model: str = "resnet18", **workload) -> str:
    return snippet_of(
        RunSpec(
            workload=WorkloadSpec(model=model, task=task, batch=2, **workload),
            recipe=Recipe.parse(recipe),
            device="cpu",
        )
    )


@pytest.mark.parametrize(("task", "step"), [(task, step) for task, steps in ALL_STEPS.items() for step in steps])
def test_every_step_writes_sound_code(task: str, step: str) -> None:
    code = snippet(step, task)
    ast.parse(code)
    assert "import redline" not in code
    assert "left out" not in code
    assert step in code.splitlines()[0]


@pytest.mark.parametrize(
    ("recipe", "task"),
    [("channels-last", "infer"), ("fold-bn+onnx", "infer"), ("amp-bf16+channels-last+fused-optimizer", "train")],
)
def test_it_runs_alone(recipe: str, task: str, tmp_path: Path) -> None:
    path = tmp_path / "snippet.py"
    path.write_text(snippet(recipe, task, model="mobilenet_v3_small", image_size=64, classes=10))
    blocked = (
        "import sys; sys.modules['redline'] = None; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", blocked, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.removesuffix(" items/s\n")) > 0


def test_applied_it_answers_as_the_model_does() -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet18().eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        expected = model(images)
    fast = redline.recipe("channels-last", device="cpu").apply(model, images)
    assert torch.allclose(fast(images), expected, rtol=1e-4, atol=1e-4)
    other = torch.randn(2, 3, 64, 64)
    assert not torch.allclose(fast(other), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", ["baseline", "amp+fused-optimizer", "amp-bf16+channels-last"])
def test_applied_it_trains(text: str) -> None:
    torch.manual_seed(0)
    model = torchvision.models.squeezenet1_1(num_classes=3)
    images, targets = torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 2, 0])
    recipe = redline.recipe(text, task="train", device="cpu", optimizer="adamw")
    step = recipe.training_step(model, torch.nn.functional.cross_entropy, (images,), targets)
    losses = [float(step((images,), targets)) for _ in range(12)]
    assert min(losses) < losses[0]


def test_a_recipe_for_one_task_says_so_when_asked_for_the_other() -> None:
    with pytest.raises(UsageError, match="for infer: call apply"):
        redline.recipe("baseline", device="cpu").training_step(None, None, (), None)
    with pytest.raises(UsageError, match="for train: call training_step"):
        redline.recipe("baseline", task="train", device="cpu").apply(None)


def test_a_hostile_name_stays_inside_the_docstring() -> None:
    code = snippet_of(
        RunSpec(
            workload=WorkloadSpec(model='x"""\nimport os\\', artifact="a"),
            recipe=Recipe.parse("channels-last"),
            device="cpu",
        )
    )
    tree = ast.parse(code)
    assert isinstance(tree.body[0], ast.Expr)
    assert not any(isinstance(node, ast.Import) and node.names[0].name == "os" for node in ast.walk(tree))


def test_a_step_of_somebody_else_is_named_as_missing() -> None:
    from redline.bench.recipe.base import PRECISION, STEPS, RecipeStep

    class Other(RecipeStep):
        name = "other"
        summary = "somebody else's"
        stage = PRECISION

        def apply(self, setup) -> None: ...

    STEPS.register("other")(Other)
    try:
        assert "other has no plain form: it is left out here" in snippet("other")
    finally:
        del STEPS._entries["other"]
