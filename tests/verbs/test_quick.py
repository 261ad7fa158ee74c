"""One call: the training, the breakdown, the findings, and what becomes of mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from brief import shorten_efforts
from reported import fake_door

import redline
from redline.model.errors import SpecError, UsageError
from redline.verbs.quick import CAPTURED_STEPS, QuickProfile, run_quick_profile
from redline.verbs.workspace import Workspace


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuickProfile]:
    with pytest.MonkeyPatch.context() as patch, Workspace(keep=False) as workspace:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        shorten_efforts(patch.setattr)
        yield redline.run_quick_profile(
            "simple_cnn",
            dataset="synthetic-learnable",
            batch_size=32,
            train_samples=256,
            val_samples=64,
            device="cpu",
            threads=1,
            progress=False,
            workspace=workspace,
        )


@pytest.mark.slow
class TestOnACpu:
    def test_the_training_is_measured_and_broken_down(self, quick: QuickProfile) -> None:
        (after,) = quick
        assert (quick.about["model"], quick.about["data"]) == ("simple_cnn", "synthetic-learnable")
        assert (after["batch"], after["epochs"]) == (32, 1)
        assert after.value("throughput") > 0
        assert "accuracy" in after
        shares = {
            name: {row["of"]: row.value("share") for row in quick.table(name).rows}
            for name in ("phases", "libraries", "classes")
        }
        assert {"forward", "backward", "optimizer"} <= set(shares["phases"])
        assert [sum(parts.values()) for parts in shares.values()] == pytest.approx([1, 1, 1])
        assert quick.profile.steps_seen == CAPTURED_STEPS

    def test_it_saves_a_report_with_its_own_headline_and_the_trace(self, quick: QuickProfile, tmp_path: Path) -> None:
        files = quick.save(tmp_path)
        assert files.headline.startswith("simple_cnn trains at ")
        page = Path(files.dashboard).read_text()
        assert "chart-kernels" in page
        assert "chart-phases" in page
        assert files.trace is not None
        assert Path(files.trace).parent == tmp_path
        assert Path(files.trace).stat().st_size > 0

    def test_it_shows_itself(self, quick: QuickProfile) -> None:
        shown = quick._repr_html_()
        assert "simple_cnn trains at" in shown
        assert "<iframe srcdoc=" in shown
        assert "<script" not in shown  # those of the dashboard are inside the frame, escaped
        assert "backward" in str(quick)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"epochs": 0}, "epochs must be 1 or more"),
        ({"batch_size": 0}, "batch_size must be 1 or more"),
        ({"model_name": 3}, "model_name is a name"),
    ],
)
def test_mistakes_are_told_before_anything_runs(arguments: dict[str, Any], complaint: str) -> None:
    door = fake_door()
    with pytest.raises((UsageError, SpecError), match=complaint):
        run_quick_profile(**arguments, workspace=Workspace(door=door, keep=False))
    assert door.opened == 0
