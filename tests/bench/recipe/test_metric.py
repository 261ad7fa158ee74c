"""The user's own check: it gets the model under the recipe, as it was made, on inputs as the model takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from redline.bench.recipe.numerics import metric_of
from redline.bench.workload.sources.user import load_function
from redline.model.errors import BenchError, SpecError
from redline.model.spec import Recipe, RunSpec, WorkloadSpec

MODEL = """
import torch

class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.001]))
    def forward(self, x):
        assert x.dtype == self.weight.dtype
        return x * self.weight

def make():
    return Scale(), (torch.ones(4, 1),)

def mean(model):
    with torch.no_grad():
        return model(torch.ones(2, 1)).float().mean()

def broken(model):
    raise ValueError("no such dataset")

def nothing(model):
    return float("nan")

number = 3
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "checked_model.py"
    path.write_text(MODEL)
    return path


def spec_of(place: Path, recipe: str, task: str = "infer") -> RunSpec:
    workload = WorkloadSpec(model=f"{place}:make", task=task)  # type: ignore[arg-type]
    return RunSpec(workload=workload, recipe=Recipe.parse(recipe), device="cpu")


def test_says_what_the_recipe_costs(place: Path) -> None:
    answer = metric_of(spec_of(place, "bf16"), f"{place}:mean")
    assert answer.baseline == pytest.approx(1.001)
    assert answer.value == 1.0  # bf16 cannot tell 1.001 from 1


def test_takes_a_pickled_function(place: Path, tmp_path: Path) -> None:
    import cloudpickle

    def total(model: torch.nn.Module) -> float:
        return float(model(torch.ones(3, 1)).sum())

    pickled = tmp_path / "check.pkl"
    pickled.write_bytes(cloudpickle.dumps(total))
    answer = metric_of(spec_of(place, "bf16"), f"pickle:{pickled}")
    assert answer.baseline == pytest.approx(3.003)


@pytest.mark.parametrize(("name", "words"), [("broken", "raised ValueError: no such dataset"), ("nothing", "gave nan")])
def test_a_check_that_breaks_is_the_users(place: Path, name: str, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        metric_of(spec_of(place, "bf16"), f"{place}:{name}")


@pytest.mark.parametrize(
    ("name", "words"),
    [("{place}:maen", "did you mean mean"), ("{place}:number", "int, not a function"), ("mean", "does not name")],
)
def test_a_check_that_is_none_is_told(place: Path, name: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load_function(name.format(place=place), "check")


def test_goes_with_inference(place: Path) -> None:
    with pytest.raises(SpecError, match="works with inference only"):
        metric_of(spec_of(place, "baseline", "train"), f"{place}:mean")
