"""Experiments, above all that of precision and compilation, against a simulated bench."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reported import ceilings_of, fake_door, step_s, work

from redline.analyze.summary import replicate_rows
from redline.model.spec import RunSpec
from redline.model.units import THIN_SPACE
from redline.model.work import OperatorWork, WorkCount
from redline.show.result import Result
from redline.verbs.study import experiments, save, study, why
from redline.verbs.workspace import Workspace

RECIPES = ("baseline", "fp16", "fp16+compile")


def result(name: str = "precision", door: dict[str, Any] | None = None, **settings: Any) -> Result:
    with Workspace(door=fake_door(**(door or {})), keep=False) as workspace:
        asked = {"recipes": RECIPES, "batch": [1, 8], "device": "cuda:0", **settings}
        return study(name, **asked, workspace=workspace)


def reason(found: Result) -> str:
    return str(why(found.tables[0], replicate_rows(found.records, ceilings_of))).replace(THIN_SPACE, " ")


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

    found = result(door={"work": traffic, "step_s": seconds})
    told = reason(found)
    assert re.match(
        r"At batch 8 vit_b_16 gains (3\.9\d|4\.0\d)× \(.*\) with fp16\+compile, resnet50 gains 2\.6\d× ", told
    )
    assert "because by their rooflines matrix products are 100 % of the least time of vit_b_16's" in told
    assert told.endswith("memory traffic that is the rest.")
    # A gain from compiling alone is not due to a number format: its products take as long as before.
    rows = replicate_rows(found.records, ceilings_of)
    same = {row.model: row.roofline for row in rows if (row.recipe, row.batch) == ("baseline", 8)}
    compiled = [
        msgspec.structs.replace(row, roofline=same[row.model]) if row.recipe == "fp16+compile" else row for row in rows
    ]
    assert "smaller formats" not in str(why(found.tables[0], compiled))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"door": {"step_s": lambda spec: 0.01}}, "No recipe is proven faster than the baseline here."),
        (
            {
                "door": {"step_s": lambda spec: 0.01},
                "recipes": ("fp16", "fp16+compile"),
                "model": "resnet50",
                "batch": 8,
            },
            "No recipe is proven faster than fp16 here.",
        ),
        ({}, "; which of them gains most is not decided."),
    ],
    ids=["no gain", "another first", "both gain four times"],
)
def test_what_is_not_proven_is_not_explained(settings: dict[str, Any], told: str) -> None:
    found = result(**settings)
    assert str(found.headline).endswith(told)
    assert reason(found) == str(found.headline).replace(THIN_SPACE, " ")


def test_every_experiment_that_comes_with_redline_can_be_planned() -> None:
    assert experiments() == ["batch", "example", "ladder", "precision"]
    for name in experiments():
        with Workspace(door=fake_door(), keep=False) as workspace:
            planned = study(name, dry_run=True, workspace=workspace)
        assert planned.about["cells"] >= 2
        assert {row["trust"] for row in planned} == {"to do"}
        assert "not measured yet" in str(planned.headline)
