"""Plan keys change with what a cell would measure and with nothing else; estimates come from what is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from redline.model.environment import DeviceInfo, Environment
from redline.model.errors import DoorError, SpecError, UsageError
from redline.model.identity import plan_key
from redline.model.questions import Checked
from redline.model.record import Block, Failure, RunRecord, new_id
from redline.model.spec import LaunchSpec, MeasureSpec, Recipe, RunSpec, WorkloadSpec
from redline.search.grid import grid_from_table
from redline.search.observer import Observer
from redline.search.sweep import (
    BROKEN_DOORS,
    Cell,
    Plan,
    check_name,
    estimate,
    make_plan,
    measured_elsewhere,
    standing,
    sweep_plan,
    unsettled,
)
from redline.store import History
from redline.store.codec import SettledCell
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape

PLACE = Environment(device=DeviceInfo(kind="cuda", name="Some GPU", driver="1"), versions={"torch": "2"})
SPEC = RunSpec(workload=WorkloadSpec(model="m", batch=8), recipe=Recipe.parse("fp16+compile"), device="cuda:0")


def key(spec: RunSpec = SPEC, fingerprint: str = "file 1", **place: Any) -> str:
    device = msgspec.structs.replace(PLACE.device, **{k: v for k, v in place.items() if k in ("name", "driver")})
    versions = {"torch": place.get("torch", "2")}
    return plan_key(spec, fingerprint, msgspec.structs.replace(PLACE, device=device, versions=versions))


def changed(**fields: Any) -> RunSpec:
    return msgspec.structs.replace(SPEC, **fields)


@pytest.mark.parametrize(
    "other",
    [
        key(changed(workload=WorkloadSpec(model="m", batch=16))),
        key(changed(workload=WorkloadSpec(model="m", batch=8, task="train"))),
        key(changed(recipe=Recipe.parse("fp16"))),
        key(changed(threads=2)),
        key(changed(seed=1)),
        key(changed(measure=MeasureSpec.for_effort("quick"))),
        key(changed(measure=MeasureSpec(check_numerics=False))),
        key(changed(launch=LaunchSpec(memory_limit_bytes=2**30))),
        key(fingerprint="file 2"),
        key(name="Other GPU"),
        key(driver="2"),
        key(torch="3"),
    ],
)
def test_another_measurement_has_another_key(other: str) -> None:
    assert other != key()


@pytest.mark.parametrize(
    "same",
    [
        key(),
        key(changed(recipe=Recipe.parse("compile+fp16"))),
        key(changed(launch=LaunchSpec(door="spawn", prepare_timeout_s=5.0))),
        key(changed(workload=WorkloadSpec(model="m", batch=8, artifact="/somewhere/else.pkl"))),
    ],
)
def test_the_same_measurement_has_the_same_key(same: str) -> None:
    assert same == key()


def answers(specs: list[RunSpec], refuse: Any = lambda spec: None) -> list[Checked]:
    return [Checked(spec=msgspec.structs.replace(spec, device="cuda:0"), usage=refuse(spec)) for spec in specs]


def test_a_combination_that_cannot_be_is_left_out() -> None:
    specs = grid_from_table(
        {"model": ["a", "b"], "task": ["infer", "train"], "recipe": ["baseline", "torchscript"]}
    ).cells

    def refuse(spec: RunSpec) -> str | None:
        return "torchscript is for infer" if spec.workload.task == "train" and spec.recipe.switches else None

    plan = make_plan(specs, answers(specs, refuse), lambda device: PLACE)
    assert len(plan.cells) == 6
    assert {(left.model, left.task, left.recipe) for left in plan.left_out} == {
        ("a", "train", "torchscript"),
        ("b", "train", "torchscript"),
    }


@pytest.mark.parametrize(
    "refuse",
    [
        lambda spec: "unknown model" if spec.workload.model == "b" else None,
        lambda spec: "unknown switch" if spec.recipe.switches else None,
        lambda spec: "no such device",
    ],
)
def test_what_is_wrong_everywhere_is_a_mistake(refuse: Any) -> None:
    specs = grid_from_table({"model": ["a", "b"], "recipe": ["baseline", "fp16"]}).cells
    with pytest.raises(UsageError, match=r"unknown|no such"):
        make_plan(specs, answers(specs, refuse), lambda device: PLACE)


def test_two_spellings_of_a_recipe_are_one_cell() -> None:
    specs = grid_from_table({"model": "a", "recipe": ["fp16+compile", "compile+fp16"]}).cells
    assert len(make_plan(specs, answers(specs), lambda device: PLACE).cells) == 1


def record(model: str, recipe: str, took_s: float, at: float = 1000.0, **fields: Any) -> RunRecord:
    block = Block(kind="throughput", clock="host", samples=(0.1,), started_at=at + took_s - 1, wall_s=1.0)
    spec = RunSpec(workload=WorkloadSpec(model=model), recipe=Recipe.parse(recipe), device="cpu")
    return RunRecord(id=new_id(), spec=spec, created_at=at, blocks=(block,), stopped="target", **fields)


def test_an_estimate_knows_what_the_history_knows() -> None:
    specs = grid_from_table(
        {"model": ["known", "stranger"], "recipe": ["baseline", "fp16", "compile"], "batch": [1, 8]}
    ).cells
    cells = [Cell(spec=spec, key=str(number)) for number, spec in enumerate(specs)]
    with History.open(":memory:") as history:
        assert (estimate(cells, history).known, estimate(cells, history).unknown) == (0, 12)
        history.finish(record("known", "baseline", 500.0, group="interleaved with others"))
        assert estimate(cells, history).known == 0
        history.finish(record("known", "baseline", 10.0))
        history.finish(record("known", "compile", 60.0, at=2000.0))
        found = estimate(cells, history)
    # The recipe's own time where it is known, else that of the model's newest.
    assert found.seconds == pytest.approx(2 * 10 + 2 * 60 + 2 * 60)
    assert (found.known, found.unknown, found.unknown_models) == (6, 6, ("stranger",))


def test_an_estimate_does_not_count_what_failed() -> None:
    cells = [Cell(spec=spec, key="k") for spec in grid_from_table({"model": "known", "batch": 1}).cells]
    broken = record("known", "baseline", 10.0)
    failure = Failure(stage="measure", kind="oom", message="no room")
    with History.open(":memory:") as history:
        history.finish(msgspec.structs.replace(broken, failure=failure, stopped="failed"))
        assert estimate(cells, history).known == 0


class Memory:
    """A ledger that keeps what it is told."""

    def __init__(self, **others: SettledCell) -> None:
        self.kept: dict[str, SettledCell] = {}
        self.others = others
        self.asked: list[str] = []
        self.announced: list[tuple[int, int, str, int]] = []

    @contextmanager
    def held(self) -> Iterator[None]:
        yield

    def cells(self) -> dict[str, SettledCell]:
        return dict(self.kept)

    def elsewhere(self, keys: Sequence[str], is_welcome: Callable[[str], bool]) -> dict[str, SettledCell]:
        self.asked = list(keys)
        return {key: cell for key, cell in self.others.items() if key in keys}

    def adopt(self, cells: Iterable[SettledCell]) -> None:
        self.kept |= {cell.key: cell for cell in cells}

    def settle(self, key: str, record: RunRecord) -> None:
        self.kept[key] = settled(key, record.id)

    def forget(self) -> None:
        self.kept.clear()

    def announce(self, done: int, total: int, now: str, *, done_before: int) -> None:
        self.announced.append((done, total, now, done_before))

    def observe(self, telemetry: Any) -> None: ...


def settled(key: str, record_id: str = "r", **failure: Any) -> SettledCell:
    kept: dict[str, Any] = {"failure_kind": None, "failure_stage": None, "failure_message": None, **failure}
    return SettledCell(key=key, status="failed" if failure else "done", record_id=record_id, **kept)


class Told(Observer):
    def __init__(self) -> None:
        self.cells: list[tuple[str, int, int]] = []
        self.done: list[str] = []

    def cell(self, cell: Cell, number: int, of: int) -> None:
        self.cells.append((cell.key, number, of))

    def settled(self, cell: Cell, record: RunRecord) -> None:
        self.done.append(cell.key)


def plan_of(*keys: str, **changes: Any) -> Plan:
    measure = MeasureSpec.for_effort("quick")
    spec = RunSpec(workload=WorkloadSpec(model="m", batch=1), measure=measure, device="cpu")
    return Plan(**{"name": "p", "cells": tuple(Cell(spec=spec, key=key) for key in keys), "shares": True, **changes})


class TestSweeping:
    def test_cells_are_counted_from_those_that_are_settled(self) -> None:
        ledger, told = Memory(), Told()
        ledger.kept = {"a": settled("a")}
        sweep_plan(plan_of("a", "b", "c"), FakeDoor(Landscape(step_s=0.01)), ledger, told)
        assert told.cells == [("b", 2, 3), ("c", 3, 3)]
        assert told.done == ["b", "c"]
        assert ledger.announced == [(1, 3, "m infer baseline batch 1", 1), (2, 3, "m infer baseline batch 1", 1)]

    def test_cells_that_are_spread_are_counted_as_they_come_in(self) -> None:
        ledger, told = Memory(), Told()
        ledger.kept = {"a": settled("a")}

        def spread(specs: Sequence[RunSpec]) -> Iterator[tuple[int, RunRecord]]:
            yield from ((index, RunRecord(id=f"r{index}", spec=specs[index])) for index in (1, 0))

        found = sweep_plan(plan_of("a", "b", "c"), FakeDoor(Landscape(step_s=0.01)), ledger, told, spread=spread)
        assert told.cells == [("c", 2, 3), ("b", 3, 3)]
        assert told.done == ["c", "b"]
        assert [done for done, *_ in ledger.announced] == [1, 2, 3]
        assert {key: cell.record_id for key, cell in ledger.kept.items()} == {"a": "r", "b": "r0", "c": "r1"}
        assert (found.planned, found.done) == (3, 3)

    def test_what_another_grid_has_measured_is_taken_over(self) -> None:
        ledger, told = Memory(b=settled("b", "theirs")), Told()
        ledger.kept = {"a": settled("a")}
        sweep_plan(plan_of("a", "b", "c"), FakeDoor(Landscape(step_s=0.01)), ledger, told)
        assert ledger.asked == ["b", "c"], "not for what it has itself"
        assert [key for key, *_ in told.cells] == ["c"]
        assert ledger.kept["b"].record_id == "theirs"

    def test_a_sweep_with_a_name_keeps_to_itself(self) -> None:
        assert measured_elsewhere(plan_of("b", shares=False), Memory(b=settled("b"))) == {}
        assert measured_elsewhere(plan_of("b"), Memory(b=settled("b"))) == {"b": settled("b")}

    def test_starting_over_measures_all_again(self) -> None:
        ledger, told = Memory(b=settled("b")), Told()
        ledger.kept = {"a": settled("a")}
        sweep_plan(plan_of("a", "b"), FakeDoor(Landscape(step_s=0.01)), ledger, told, fresh=True)
        assert [key for key, *_ in told.cells] == ["a", "b"]

    def test_how_a_failed_cell_stands(self) -> None:
        known = {
            "a": settled("a", failure_kind="oom", failure_stage="build", failure_message="no room"),
            "b": settled("b", failure_kind=None, failure_stage=None, failure_message=None),
        }
        first, second, third = standing(plan_of("a", "b", "c"), known).cells
        assert first.failure == Failure(stage="build", kind="oom", message="no room")
        assert second.failure == Failure(stage="", kind="crash", message="")
        assert (first.status, third.status) == ("failed", "pending")

    def test_failed_cells_are_tried_again_only_when_asked(self) -> None:
        known = {"a": settled("a"), "b": settled("b", failure_kind="oom")}
        plan = plan_of("a", "b", "c")
        assert [cell.key for cell in unsettled(plan, known)] == ["c"]
        assert [cell.key for cell in unsettled(plan, known, retry_failed=True)] == ["b", "c"]

    def test_workers_that_cannot_be_started_end_it(self) -> None:
        class Locked(FakeDoor):
            def open(self, spec: RunSpec | None = None) -> Any:
                raise DoorError("no room for a process")

        ledger = Memory()
        with pytest.raises(DoorError, match=f"{BROKEN_DOORS} workers in a row could not be started: no room"):
            sweep_plan(plan_of("a", "b", "c", "d"), Locked(Landscape(step_s=0.01)), ledger)
        assert len(ledger.kept) == BROKEN_DOORS


def test_a_plan_without_a_name_is_called_by_what_was_asked_for() -> None:
    specs = [changed(device="cpu")]
    answers = [Checked(spec=spec) for spec in specs]
    unnamed, named = (make_plan(specs, answers, lambda device: PLACE, name) for name in (None, "study"))
    assert (named.name, named.shares, unnamed.shares) == ("study", False, True)
    assert unnamed.name not in ("", "study")
    assert unnamed.name == make_plan(specs, answers, lambda device: PLACE).name


@pytest.mark.parametrize(("name", "says"), [("a,b", "comma"), (" ", "not empty"), (7, "must be a text")])
def test_names_that_cannot_be(name: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        check_name(name)
    check_name(None)
    check_name("study 7")


def test_replicates_follow_each_other_cell_by_cell_and_the_first_keeps_the_plain_key() -> None:
    specs = [changed(seed=1), changed(seed=2)]
    answers = [Checked(spec=spec) for spec in specs]
    once = [cell.key for cell in make_plan(specs, answers, lambda device: PLACE).cells]
    cells = make_plan(specs, answers, lambda device: PLACE, replicates=3).cells
    assert [cell.key for cell in cells] == [*once, *(f"{key}-2" for key in once), *(f"{key}-3" for key in once)]
    assert [cell.replicate for cell in cells] == [1, 1, 2, 2, 3, 3]
