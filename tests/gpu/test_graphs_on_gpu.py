"""CUDA graphs on a real GPU: recorded steps keep the numbers, and what cannot be recorded is told."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import redline
from redline.launch import open_door
from redline.model.spec import LaunchSpec
from redline.verbs.workspace import Workspace

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.device_count(), reason="no GPU here")]


@pytest.fixture(scope="module")
def measured():
    """One warm door for all: its start is most of the time these tests take."""
    with ExitStack() as stack:
        door = open_door(LaunchSpec())
        stack.callback(door.close)

        def measure(recipe: str, model: str = "resnet18", **settings):
            settings = {"batch": 8, "effort": "quick", **settings}
            return redline.run(model, recipes=recipe, **settings, workspace=Workspace(door=door, keep=False))[0]

        yield measure


@pytest.mark.parametrize("recipe", ["graphs", "fp16+channels-last+graphs", "amp+graphs", "fp16+compile+graphs"])
def test_a_recorded_forward_keeps_the_numbers(measured, recipe: str) -> None:
    row = measured(recipe)
    assert row.failure is None, row.failure
    assert row.numerics.passed, row.numerics


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "recipe", ["graphs", "amp-bf16+fused-optimizer+graphs", "amp+fused-optimizer+graphs", "amp-bf16+compile+graphs"]
)
def test_a_recorded_training_step_keeps_its_loss_path(measured, recipe: str, optimizer: str) -> None:
    row = measured(recipe, task="train", optimizer=optimizer, image_size=64)
    assert row.failure is None, row.failure
    assert row.numerics.passed, row.numerics


@pytest.mark.parametrize(
    "recipe",
    [
        "amp-bf16+overlap-gradients+compile+graphs",
        "amp-bf16+channels-last+overlap-gradients+compile:regional",
        "channels-last+overlap-gradients+compile:reduce-overhead",
    ],
)
def test_gradients_on_other_streams_keep_the_loss_path(measured, recipe: str) -> None:
    row = measured(recipe, task="train", image_size=64)
    assert row.failure is None, row.failure
    assert row.numerics.passed, row.numerics


def test_scaling_without_the_fused_optimizer_is_refused(measured) -> None:
    row = measured("amp+graphs", task="train")
    assert row.failure.kind == "unsupported"


def test_a_model_that_asks_the_device_cannot_be_recorded(measured, tmp_path: Path) -> None:
    path = tmp_path / "asking.py"
    path.write_text(
        "import torch\n"
        "class Asking(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) * (1 if float(x.sum()) > 0 else 2)\n"
        "def make(): return Asking(8, 8), torch.randn(4, 8)\n"
    )
    row = measured("graphs", model=f"{path}:make", batch=None)
    assert row.failure.kind == "unsupported", row.failure
    assert "cannot record" in row.failure.message


@pytest.mark.parametrize("recipe", ["fp16+patch-products+graphs", "fp16+patch-products+fused-linear+compile+graphs"])
def test_products_in_other_forms_keep_the_numbers(measured, recipe: str) -> None:
    row = measured(recipe, model="vit_b_32")
    assert row.failure is None, row.failure
    assert row.numerics.passed, row.numerics


@pytest.mark.parametrize(
    ("recipe", "task"),
    [
        ("fp16+channels-last+graphs", "infer"),
        ("amp-bf16+fused-optimizer+graphs", "train"),
        ("fp16+compile", "infer"),
        ("amp-bf16+compile", "train"),
        ("amp-bf16+channels-last+overlap-gradients+compile+graphs", "train"),
    ],
)
def test_the_snippet_of_a_graph_runs_alone(recipe: str, task: str, tmp_path: Path) -> None:
    from redline.model.spec_table import specs_from_table
    from redline.verbs.recipe import plain_recipe

    model, batch = "resnet18", {"batch": 8}
    (spec,) = specs_from_table({"model": model, "task": task, "recipe": recipe, **batch})
    path = tmp_path / "snippet.py"
    path.write_text(plain_recipe(spec).code)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
