"""The study of precision and compilation, against a simulated bench."""

from __future__ import annotations

from pathlib import Path

from reported import ceilings_of, fake_door

from redline.api.study import StudyResult, study
from redline.api.workspace import Workspace

RECIPES = ("baseline", "fp16", "fp16+compile")


def result() -> StudyResult:
    with Workspace(door=fake_door(), keep=False) as workspace:
        return study(("resnet50", "vit_b_16"), recipes=RECIPES, batches=(1, 8), device="cuda:0", workspace=workspace)


def test_every_model_batch_and_recipe_has_a_row_against_its_own_baseline(tmp_path: Path) -> None:
    found = result()
    assert [(row.model, row.batch, row.recipe) for row in found] == [
        (model, batch, recipe) for model in ("resnet50", "vit_b_16") for batch in (1, 8) for recipe in RECIPES
    ]
    ratios = [row.vs_first.ratio for row in found if row.recipe == "fp16+compile" and row.vs_first]
    assert all(3.9 < ratio < 4.1 for ratio in ratios)
    assert len(ratios) == 4
    written = {path.name for path in found.save(tmp_path)}
    assert written == {"latency.png", "throughput.png", "README.md", "results.csv", "results.json"}
    assert all((tmp_path / name).stat().st_size for name in written)
    text = (tmp_path / "README.md").read_text()
    assert text.count("| resnet50 |") == 6
    assert "mean ms" in text
    assert "<table>" in found._repr_html_()


def test_the_sentence_says_which_gains_more_and_why() -> None:
    told = StudyResult(result().records, ceilings_of).to_json()
    assert "gains 4.0" in told or "gains 3.9" in told
    assert "by their rooflines the products of resnet50 need" in told
