"""Experiments, above all that of precision and compilation, against a simulated bench."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reported import fake_door

from redline.show.result import Result
from redline.verbs.study import experiments, save, study
from redline.verbs.workspace import Workspace

RECIPES = ("baseline", "fp16", "fp16+compile")


def result(name: str = "precision", door: dict[str, Any] | None = None, **settings: Any) -> Result:
    with Workspace(door=fake_door(**(door or {})), keep=False) as workspace:
        asked = {"recipes": RECIPES, "batch": [1, 8], "device": "cuda:0", **settings}
        return study(name, **asked, workspace=workspace)


def test_every_model_batch_and_recipe_has_a_row_against_its_own_baseline(tmp_path: Path) -> None:
    found = result()
    assert sorted((row["model"], row["batch"], row["recipe"]) for row in found) == [
        (model, batch, recipe) for model in ("resnet50", "vit_b_16") for batch in (1, 8) for recipe in RECIPES
    ]
    assert [row.value("ratio") for row in found if row["recipe"] == "fp16+compile"] == pytest.approx(
        [4.0] * 4, rel=0.03
    )
    written = {path.name for path in save(found, tmp_path)}
    assert written == {"latency.png", "throughput.png", "README.md", "results.csv", "results.json"}
    assert all((tmp_path / name).stat().st_size for name in written)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# Precision and compilation")
    assert len([line for line in text.splitlines() if line.startswith("| resnet50 |")]) == 6


def test_every_experiment_that_comes_with_redline_can_be_planned() -> None:
    assert experiments() == ["batch", "example", "ladder", "precision"]
    for name in experiments():
        with Workspace(door=fake_door(), keep=False) as workspace:
            planned = study(name, dry_run=True, workspace=workspace)
        assert planned.about["cells"] >= 2
        assert {row["trust"] for row in planned} == {"to do"}
        assert "Nothing is measured yet" in str(planned.headline)
