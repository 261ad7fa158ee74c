"""A search on the real bench: what breaks the numbers is never recommended, however fast, and the report says why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import redline
from redline.store import History
from redline.verbs.workspace import Workspace

SHORTCUT = """
from redline.bench.recipe.base import COMPILER, RecipeSwitch

class Shortcut(RecipeSwitch):
    name = "shortcut"
    summary = "answers as it did the first time, whatever it is asked"
    stage = COMPILER

    def apply(self, setup):
        model, kept = setup.model, []

        def answer(*args, **kwargs):
            if not kept:
                kept.append(model(*args, **kwargs))
            return kept[0]

        setup.model = answer
"""


class Overflowing(nn.Module):
    """Fine in fp32; beyond what fp16 can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layers(values * 1e4) * 1e3


@pytest.fixture
def shortcut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of somebody else's that workers find installed."""
    name = "redline_shortcut"
    (tmp_path / f"{name}.py").write_text(SHORTCUT)
    metadata = tmp_path / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[redline.switches]\nshortcut = {name}:Shortcut\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # workers look where the desk does


def tuned(model: nn.Module, inputs: torch.Tensor, steps: list[str], tmp_path: Path) -> redline.TuneResult:
    """The first of the steps is asked for, and so is tried however little the budget holds."""
    settings = {"device": "cpu", "budget": "15s", "replicates": 1, "recipes": steps[0]}
    with History.open(tmp_path / "history.sqlite") as history:
        return redline.tune(model, inputs, switches=steps, **settings, workspace=Workspace(history=history))


@pytest.mark.usefixtures("shortcut", "brief")
def test_a_wrong_step_is_rejected_with_the_reason_though_it_would_win(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.LazyLinear(4)).eval()
    images = torch.randn(4, 3, 32, 32)
    model(images)
    found = tuned(model, images, ["shortcut", "channels-last"], tmp_path).summary
    assert found.winner is None or "shortcut" not in found.winner.recipe
    assert not any("shortcut" in row.recipe for row in found.ranking)
    (rejected,) = [each for each in found.rejected if each.recipe == "shortcut"]
    assert (rejected.code, rejected.switch, rejected.scope) == ("above-tolerance", "shortcut", "switch")


@pytest.mark.usefixtures("brief")
def test_an_overflow_in_half_precision_is_rejected_with_the_reason(tmp_path: Path) -> None:
    result = tuned(Overflowing().eval(), torch.randn(8, 256), ["fp16"], tmp_path)
    assert result.winner is None
    (rejected,) = result.summary.rejected
    assert (rejected.recipe, rejected.code) == ("fp16", "not-finite")
    assert "not finite" in str(result), "the report says it too"
