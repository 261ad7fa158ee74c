"""Grids: every cell once, whatever happens to the process that measures them."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import product
from pathlib import Path
from typing import Any

import grid_runner
import pytest
from grid_runner import CPU_GRID, FAKE_GRID, fake_door

import redline
from redline.model.errors import DoorError, Interrupted, UsageError
from redline.model.record import Failure
from redline.search.observer import Observer
from redline.store import History
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.workspace import Workspace

ENVIRONMENT = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a fork of a process with threads could hang


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "sweeps.sqlite"


@pytest.fixture
def history(place: Path) -> Iterator[History]:
    with History.open(place) as history:
        yield history


def start(place: Path, what: str, name: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(grid_runner.__file__), str(place), what, name, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)


def counts_of(result: redline.Result) -> tuple[Any, ...]:
    """How many cells are planned, done and failed."""
    return tuple(result.about[name] for name in ("cells", "done", "failed"))


def assert_exactly_the_right_rows(history: History, place: Path, name: str) -> None:
    """All 60 cells of the fake grid in their order, each settled by one record of its own, which the history has."""
    result = measured(history, **FAKE_GRID, name=name, resume=True)
    assert counts_of(result) == (60, 56, 4)
    assert len({row.record_id for row in result}) == 60
    stored = {row.id: row for row in history.rows()}
    settling = [stored[row.record_id] for row in result]
    cells = list(product(FAKE_GRID["model"], ["infer"], FAKE_GRID["recipes"], FAKE_GRID["batch"]))
    assert [(row.model, row.task, row.recipe, row.batch) for row in settling] == cells
    assert {(row["model"], row["batch"]) for row in result if row.failure} == {("vit_b_16", 512)}
    assert {row.failure.partition(" at ")[0] for row in result if row.failure} == {"oom"}
    assert [row.status for row in settling] == ["failed" if row.failure else "done" for row in result]
    with closing(sqlite3.connect(place)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def measured(history: History, *models: Any, door: FakeDoor | None = None, **grid: Any) -> redline.Result:
    return redline.run(*models, **grid, workspace=Workspace(door=door or fake_door(), history=history))


@pytest.mark.parametrize("seed", [1, 2])
def test_sixty_cells_killed_at_random_points_end_with_exactly_the_right_rows(
    history: History, place: Path, seed: int
) -> None:
    kills = start(place, "killed", "study", str(seed))
    told, _ = kills.communicate()
    assert kills.returncode == 0
    assert told.split().count("killed") >= 10  # otherwise this test shows nothing
    assert_exactly_the_right_rows(history, place, "study")
    assert history.count() == 60


class Settling(Observer):
    """Keeps the ids of the records that settled a cell."""

    def __init__(self, ids: list[str]) -> None:
        self._ids = ids

    def settled(self, cell: Any, record: Any) -> None:
        self._ids.append(record.id)


@pytest.mark.long
def test_six_cells_on_the_cpu_killed_at_a_random_point_end_with_exactly_the_right_rows(
    history: History, place: Path
) -> None:
    runner = start(place, "cpu", "study")
    assert runner.stdout is not None
    lines = [runner.stdout.readline() for _ in range(2)]
    with suppress(subprocess.TimeoutExpired):
        runner.wait(random.Random(3).uniform(0.0, 0.5))  # somewhere inside the next cell
    runner.send_signal(signal.SIGKILL)
    rest, _ = runner.communicate()
    last: list[str] = []
    with Workspace(history=history, observer=Settling(last)) as workspace:
        redline.run(**CPU_GRID, name="study", resume=True, workspace=workspace)
    settled = {line.split()[1] for line in (*lines, *rest.splitlines())} | set(last)
    rows = history.rows()
    assert {row.status for row in rows} == {"done"}
    assert {(row.recipe, row.batch) for row in rows} == {
        (recipe, batch) for recipe in CPU_GRID["recipes"] for batch in CPU_GRID["batch"]
    }
    assert len(rows) == 6
    assert {row.id for row in rows} >= settled  # what was told to be settled is what is there


def test_two_grids_at_once_on_one_store_do_not_disturb_each_other(history: History, place: Path) -> None:
    runners = [start(place, "fake", name) for name in ("one", "other")]
    for runner in runners:
        runner.communicate()
        assert runner.returncode == 0
    assert history.count() == 120
    for name in ("one", "other"):
        assert_exactly_the_right_rows(history, place, name)


def test_a_grid_that_is_being_run_is_left_to_its_runner(history: History) -> None:
    with history.sweep("study").held():
        with pytest.raises(UsageError, match=r"'study' is being run by process \d+.*another --name"):
            measured(history, **FAKE_GRID, name="study", resume=True)
        measured(history, "other", launch={"door": "fake"}, name="another")
    measured(history, **FAKE_GRID, name="study", resume=True)


class Interrupting(Observer):
    """Ctrl-C in the middle of the third group."""

    def __init__(self) -> None:
        self.groups = 0

    def measuring(self, *_: Any) -> None:
        self.groups += 1

    def measured(self, *_: Any) -> None:
        if self.groups == 3:
            raise KeyboardInterrupt


def test_ctrl_c_loses_the_group_in_flight_and_no_more(history: History) -> None:
    with pytest.raises(Interrupted) as caught:
        redline.run(
            **FAKE_GRID,
            name="study",
            resume=True,
            workspace=Workspace(door=fake_door(), history=history, observer=Interrupting()),
        )
    assert [row.status for row in history.rows()] == ["done"] * 8
    finished = caught.value.result
    assert isinstance(finished, redline.Result)
    assert counts_of(finished) == (60, 8, 0)
    assert [row["trust"] == "to do" for row in finished].count(True) == 52
    assert {row.record_id for row in finished if row.record_id} == {row.id for row in history.rows()}
    resumed = measured(history, **FAKE_GRID, name="study", resume=True)
    assert counts_of(resumed) == (60, 56, 4)
    assert history.count() == 60


def test_running_it_again_measures_nothing_and_a_larger_grid_only_what_is_new(history: History) -> None:
    def sweep(**changes: Any) -> tuple[int, int]:
        door = fake_door()
        result = measured(history, door=door, **{**FAKE_GRID, **changes}, name="study", resume=True)
        # Two of the openings are questions: whether the specs are sound, and what this place is.
        return len(result), door.opened - 2

    assert sweep() == (60, 60)
    assert sweep() == (60, 0)
    assert sweep(batch=[1, 8, 32, 64, 128, 512]) == (72, 12)
    assert sweep(recipes=["compile", "baseline"], batch=[8]) == (6, 0)
    assert sweep(recipes=["compile+fp16"], batch=[8]) == (3, 0)  # the order of steps means nothing
    assert sweep(effort="quick", batch=[8]) == (12, 12)  # measured in another way is another cell
    assert sweep(max_memory="8GiB", batch=[8]) == (12, 12)


def test_failed_cells_are_tried_again_only_when_asked(history: History) -> None:
    """What failed stays in the history as a record; the sweep then knows the newer one."""
    failing = Landscape(
        step_s=0.001, failure={"fp16": Failure(stage="compile", kind="compile", message="no"), "*": None}
    )
    grid = {"model": "m", "recipes": ["baseline", "fp16"], "launch": {"door": "fake"}, "name": "study"}
    first = measured(history, door=FakeDoor(failing), **grid)
    assert [row["trust"] for row in first] == ["valid", "failed"]
    assert first[1].failure == "compile at compile: no"
    sound = FakeDoor(Landscape(step_s=0.001))
    again = measured(history, door=sound, **grid, resume=True)
    assert again.to_json() == first.to_json()
    retried = measured(history, door=sound, **grid, retry_failed=True)
    assert [row["trust"] for row in retried] == ["valid", "valid"]
    assert retried[0].record_id == first[0].record_id
    assert history.count() == 3


def test_without_a_resume_a_grid_starts_over_and_keeps_the_old_records(history: History) -> None:
    grid = {"model": "m", "batch": "1..4", "launch": {"door": "fake"}, "name": "study"}
    first = measured(history, **grid)
    second = measured(history, **grid)
    assert not {row.record_id for row in first} & {row.record_id for row in second}
    assert history.count() == 6
    resumed = measured(history, **grid, resume=True)
    assert resumed.to_json() == second.to_json()


def test_a_row_measured_after_its_baseline_has_no_ratio(history: History) -> None:
    """Only what was measured interleaved is compared."""
    grid = {"model": "m", "launch": {"door": "fake"}, "name": "study", "resume": True}
    measured(history, **grid, recipes=["baseline"])
    larger = measured(history, **grid, recipes=["baseline", "fp16"])
    assert [(row["recipe"], row.get("ratio")) for row in larger] == [("baseline", None), ("fp16", None)]
    together = measured(history, **{**grid, "resume": False}, recipes=["baseline", "fp16"])
    assert together[1]["ratio"].low is not None


def test_pairs_that_were_being_decided_go_on_with_the_replicates_that_are_there(history: History) -> None:
    class Interrupting(Observer):
        def replicate(self, number: int, planned: int, recipes: Any) -> None:
            if number == 2:
                raise KeyboardInterrupt

    grid = {"model": "m", "recipes": ["baseline", "fp16"], "launch": {"door": "fake"}, "decide": True}
    with pytest.raises(Interrupted) as caught:
        redline.run(**grid, workspace=Workspace(door=fake_door(), history=history, observer=Interrupting()))
    assert [pair["verdict"] for pair in caught.value.result.table("pairs").rows] == ["undecided"]
    assert history.count() == 2
    result = measured(history, **grid, resume=True)
    (pair,) = result.table("pairs").rows
    assert pair["verdict"] != "undecided"
    assert history.count() == 2 * pair["replicates"] == len(result.records)
    door = fake_door()
    again = measured(history, door=door, **grid, resume=True)
    assert again.table("pairs") == result.table("pairs")
    assert history.count() == len(result.records), "what is decided is not measured again"


def test_every_kind_of_failure_is_a_row_and_the_rest_goes_on(history: History) -> None:
    kinds = ("oom", "compile", "timeout", "crash", "user")
    stages = {"oom": "compile", "compile": "compile", "timeout": "warm-up", "crash": "measure", "user": "build"}
    failures = {kind: Failure(stage=stages[kind], kind=kind, message=f"it was {kind}") for kind in kinds}
    door = FakeDoor(Landscape(step_s=0.001, failure={**failures, "*": None}))
    models = ["sound", *kinds, "sound too"]
    result = measured(history, models, door=door, launch={"door": "fake"})
    failed = {kind: f"{kind} at {stages[kind]}: it was {kind}" for kind in kinds}
    assert {row["model"]: row.failure for row in result} == {"sound": "", "sound too": "", **failed}
    assert counts_of(result) == (7, 2, 5)


class BrokenDoor(FakeDoor):
    """Answers questions, then cannot start workers."""

    def open(self, spec: Any = None) -> Any:
        if spec is not None:
            raise DoorError("the fork server is gone")
        return super().open(spec)


def test_workers_that_cannot_be_started_end_the_grid_after_a_few(history: History) -> None:
    door = BrokenDoor(Landscape(step_s=0.001))
    with pytest.raises(DoorError, match="workers of 3 groups in a row could not be started: the fork server is gone"):
        measured(history, door=door, **FAKE_GRID, name="study")
    assert [row.status for row in history.rows()] == ["failed"] * 12
    repaired = measured(history, **FAKE_GRID, name="study", retry_failed=True)
    assert counts_of(repaired) == (60, 56, 4)
