"""One call: the batch, the training, the breakdown, the findings, and what becomes of mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reported import fake_door

import redline
from redline.api.quick import CAPTURED_STEPS, QuickProfile, run_quick_profile
from redline.api.workspace import Workspace
from redline.errors import BenchError, SpecError, UsageError


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> QuickProfile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        return redline.run_quick_profile(
            "simple_cnn", batch_size=64, device="cpu", threads=1, progress=False, workspace=Workspace(keep=False)
        )


@pytest.mark.slow
class TestOnACpu:
    def test_the_training_is_measured_and_broken_down(self, quick: QuickProfile) -> None:
        results = quick.results
        assert (results.model, results.batch, results.epochs, results.steps) == ("simple_cnn", 64, 1, 8)
        assert results.throughput_per_s
        assert results.epoch_s == pytest.approx(8 * (results.step_s or 0))
        assert set(results.phases_s) == {"forward", "backward", "optimizer"}
        assert sum(results.kernel_classes.values()) == pytest.approx(1)
        assert results.largest_batch == 64
        assert quick.profile.steps_seen == CAPTURED_STEPS

    def test_figures_have_data(self, quick: QuickProfile) -> None:
        assert {"phases", "kernel_classes"} <= set(quick.figures)
        for figure in quick.figures.values():
            assert all(len(trace.x) for trace in figure.data)

    def test_it_saves_a_report_with_its_own_headline(self, quick: QuickProfile, tmp_path: Path) -> None:
        files = quick.save(tmp_path)
        assert files.headline.startswith("simple_cnn trains at ")
        page = Path(files.dashboard).read_text()
        assert "chart-kernels" in page
        assert "chart-phases" in page

    def test_it_shows_itself(self, quick: QuickProfile) -> None:
        shown = quick._repr_html_()
        assert "simple_cnn trains at" in shown
        assert "<iframe srcdoc=" in shown
        assert "<script" not in shown  # those of the dashboard are inside the frame, escaped
        assert "backward" in str(quick)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"dataset": "cifar10"}, "real data sets come later"),
        ({"dataset": "nosuch"}, "dataset must be 'synthetic'"),
        ({"epochs": 0}, "epochs must be 1 or more"),
        ({"batch_size": 0}, "batch_size must be 1 or more"),
        ({"model_name": 3}, "model_name is a name"),
    ],
)
def test_mistakes_are_told_before_anything_runs(arguments: dict[str, Any], complaint: str) -> None:
    door = fake_door()
    with pytest.raises((UsageError, SpecError), match=complaint):
        run_quick_profile(**arguments, workspace=Workspace(door=door))
    assert door.opened == 0


def test_a_batch_that_does_not_fit_gives_way_to_the_largest_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Up to the capture itself, which a simulated bench has not: what the search was told and what it chose."""
    door = fake_door(device_kind="cuda")
    with Workspace(door=door, keep=False) as workspace, pytest.raises(BenchError, match="nothing to trace"):
        run_quick_profile("resnet50", batch_size=4096, workspace=workspace)
    told = capsys.readouterr().err
    assert "batch search: trying" in told
    assert "training with the last steps profiled" in told
