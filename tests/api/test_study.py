"""Experiments, above all that of precision and compilation, against a simulated bench."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
from reported import ceilings_of, fake_door, step_s, work

from redline.api.run import RunResult
from redline.api.study import StudyResult, experiments, study
from redline.api.workspace import Workspace
from redline.model.spec import RunSpec
from redline.model.units import THIN_SPACE
from redline.model.work import OperatorWork, WorkCount
from redline.show.study import why

RECIPES = ("baseline", "fp16", "fp16+compile")


def result(**changes: Any) -> StudyResult:
    with Workspace(door=fake_door(**changes), keep=False) as workspace:
        return study("precision", recipes=RECIPES, batch=[1, 8], device="cuda:0", workspace=workspace)


def test_every_model_batch_and_recipe_has_a_row_against_its_own_baseline(tmp_path: Path) -> None:
    found = result()
    assert sorted((row.model, row.batch or 0, row.recipe) for row in found) == [
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
    """ViT is products alone; half of ResNet's least time is memory traffic, which fp16 halves at best."""

    def traffic(spec: RunSpec) -> WorkCount:
        counted = work(spec)
        if spec.workload.model == "vit_b_16":
            return counted
        copied = OperatorWork(
            name="add", kind="elementwise", number_format="fp32", flops=0, phase="forward", calls=1, bytes=10**10
        )
        return msgspec.structs.replace(counted, operators=(*counted.operators, copied))

    def seconds(spec: RunSpec) -> float:
        fused = spec.workload.model == "resnet50" and str(spec.recipe) != "baseline"
        return step_s(spec) * (1.5 if fused else 1.0)

    rows = RunResult(result(work=traffic, step_s=seconds).records, ceilings_of).rows
    told = why(rows)
    assert re.match(
        r"At batch 8 vit_b_16 gains (3\.9\d|4\.0\d)× \(.*\) with fp16\+compile, resnet50 gains 2\.6\d× ", told
    )
    assert "because by their rooflines matrix products are 100 % of the least time of vit_b_16's" in told.replace(
        THIN_SPACE, " "
    )
    assert told.endswith("memory traffic that is the rest.")
    # A gain from compiling alone is not due to a number format: its products take as long as before.
    same = {row.model: row.roofline for row in rows if (row.recipe, row.batch) == ("baseline", 8)}
    compiled = [
        msgspec.structs.replace(row, roofline=same[row.model]) if row.recipe == "fp16+compile" else row for row in rows
    ]
    assert "smaller formats" not in why(compiled)


def test_a_study_without_a_proven_gain_says_so() -> None:
    assert why(result(step_s=lambda spec: 0.01).rows) == "No recipe is proven faster than the baseline here."


def test_a_difference_between_gains_that_is_not_decided_is_not_explained() -> None:
    """Both gain four times, give or take the noise."""
    told = why(RunResult(result().records, ceilings_of).rows)
    assert "gains" in told
    assert told.endswith("; which of them gains most is not decided.")


def test_what_all_were_set_against_has_its_name() -> None:
    with Workspace(door=fake_door(step_s=lambda spec: 0.01), keep=False) as workspace:
        settings = {"model": "resnet50", "batch": 8, "device": "cuda:0"}
        rows = study("precision", recipes=("fp16", "fp16+compile"), **settings, workspace=workspace)
    assert why(rows.rows) == "No recipe is proven faster than fp16 here."


def test_a_difference_is_explained_only_where_the_file_asks() -> None:
    assert result().why
    with Workspace(door=fake_door(), keep=False) as workspace:
        plain = study("batch", batch="1..4", recipes=["baseline", "fp16"], device="cuda:0", workspace=workspace)
    assert (plain.why, len(plain)) == ("", 6)
    assert "How far does a larger batch raise throughput" in str(plain)


def test_every_experiment_that_comes_with_redline_can_be_planned() -> None:
    assert experiments() == ["batch", "example", "ladder", "precision"]
    for name in experiments():
        with Workspace(door=fake_door(), keep=False) as workspace:
            planned = study(name, dry_run=True, workspace=workspace)
        assert planned.summary is not None
        assert planned.summary.planned >= 2
        assert planned.estimate is not None
