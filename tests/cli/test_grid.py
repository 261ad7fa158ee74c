"""`redline run` of a grid, `redline study` and `redline batch` from the outside: exit codes, one-line mistakes, documents on stdout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from invoking import Redline, about, document, results

from redline.model.record import Failure
from redline.model.spec import RunSpec
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape

MIB = 2**20


def memory(spec: RunSpec) -> int:
    per_item = 20 * MIB if spec.recipe.switches else 40 * MIB
    return 200 * MIB + per_item * (spec.workload.batch or 1)


def failure(spec: RunSpec) -> Failure | None:
    breaks = spec.workload.model == "broken"
    return Failure(stage="build", kind="user", message="this factory raised") if breaks else None


@pytest.fixture
def door() -> FakeDoor:
    return FakeDoor(
        Landscape(
            step_s=lambda spec: 0.002 + 1e-4 * (spec.workload.batch or 1),
            memory_bytes=memory,
            memory_limit_bytes=8 * 2**30,
            failure=failure,
            models={"resnet50"},
            unknown_models={"nosuch"},
        )
    )


class TestGrid:
    def test_stalls_between_steps_are_beside_the_speed(self, redline: Redline, door: FakeDoor) -> None:
        """The median step does not show them; somebody who waits for the results does."""
        row, _ = results(redline("run resnet50 -b 1,2 --json"))
        assert "sustained" not in row
        door.landscape = replace(door.landscape, tail_share=0.3)
        row, _ = results(redline("run resnet50 -b 1,2 --json"))
        assert row["sustained"]["value"] < row["throughput"]["value"]

    def test_replicates_measure_each_cell_in_several_processes(self, redline: Redline) -> None:
        command = "run resnet50 -b 1,8 --resume"
        assert about(redline(command, "--json"))["cells"] == 2
        told = redline(command, "--replicates", "3", "--json")
        assert (about(told)["cells"], about(told)["done"]) == (6, 6)
        assert [(row["batch"], row["processes"]) for row in results(told)] == [(1, 3), (8, 3)]
        shown = redline(command, "--replicates", "3").stdout
        assert "6 cells, 6 done" in shown
        assert len([line for line in shown.splitlines() if line.startswith("baseline")]) == 2

    def test_a_dry_run_measures_nothing(self, redline: Redline, door: FakeDoor) -> None:
        result = redline("run resnet50 -b 1..8 --dry-run")
        assert result.exit_code == 0
        assert door.opened == 2
        assert "4 cells, 0 done, 4 to do" in result.stdout
        told = document(redline("run resnet50 -b 1..8 --dry-run --json"))
        assert (told["about"]["cells"], told["about"]["done"]) == (4, 0)

    def test_ctrl_c_prints_the_finished_rows_and_a_resume_measures_the_rest(
        self, redline: Redline, door: FakeDoor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = FakeDoor.open

        def interrupted(self: FakeDoor, spec: RunSpec | None = None) -> Any:
            if spec is not None and spec.workload.batch == 2:
                raise KeyboardInterrupt
            return real(self, spec)

        monkeypatch.setattr(FakeDoor, "open", interrupted)
        command = "run resnet50 -b 1..4 -r baseline -r fp16"
        result = redline(command)
        assert result.exit_code == 130
        assert "6 cells, 2 done, 4 to do" in result.stdout
        assert "next: the same command with --resume continues" in result.stdout
        assert "interrupted" in result.stderr
        monkeypatch.setattr(FakeDoor, "open", real)
        opened = door.opened
        assert about(redline(command, "--resume", "--json"))["done"] == 6
        assert door.opened == opened + 2 + 4


class TestStudy:
    def test_an_experiment_is_a_file(self, redline: Redline, tmp_path: Path) -> None:
        file = tmp_path / "mine.toml"
        assert redline("study --new", file).exit_code == 0
        assert "is there already" in redline("study --new", file).stderr
        result = redline("study", file, "--model", "resnet50", "--out", tmp_path / "out")
        assert result.exit_code == 0
        assert "6 cells, 6 done" in result.stdout
        assert "What does the memory layout gain" in result.stdout
        written = {path.name for path in (tmp_path / "out").iterdir()}
        assert written == {"latency.png", "throughput.png", "README.md", "results.csv", "results.json"}


class TestBatch:
    def test_max_memory_is_as_if_the_device_had_so_much(self, redline: Redline) -> None:
        told = json.loads(redline("batch resnet50 --max-memory 2GiB --json").stdout)
        (row,) = told["tables"]["recipes"]
        assert row["largest_batch"]["value"] == pytest.approx((2048 - 200) / 40, rel=0.03)
        assert row["memory_limit"]["value"] == 2**31

    @pytest.mark.parametrize(
        ("place", "words"), [("x.nothing", "must end in"), ("file/x.png", "cannot write the plot")]
    )
    def test_a_place_for_the_plot_that_is_none_is_told_before_the_search(
        self, redline: Redline, door: FakeDoor, tmp_path: Path, place: str, words: str
    ) -> None:
        (tmp_path / "file").write_text("not a folder")
        refused = redline("batch resnet50 --plot", str(tmp_path / place))
        assert refused.exit_code == 2
        assert words in refused.stderr
        assert door.opened == 0

    def test_a_model_that_never_runs_exits_5(self, redline: Redline) -> None:
        result = redline("batch broken")
        assert result.exit_code == 5
        assert "this factory raised" in result.stdout
