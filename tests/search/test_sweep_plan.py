"""Plan keys change with what a cell would measure and with nothing else; estimates come from what is known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from redline.errors import UsageError
from redline.identity import plan_key
from redline.protocol import Checked
from redline.record import Block, DeviceInfo, Environment, RunRecord, new_id
from redline.search.grid import cells_from_table
from redline.search.sweep import Cell, estimate, make_plan
from redline.spec import LaunchSpec, MeasureSpec, Recipe, RunSpec, WorkloadSpec
from redline.store import History

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
    specs = cells_from_table({"model": ["a", "b"], "task": ["infer", "train"], "recipe": ["baseline", "torchscript"]})

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
    specs = cells_from_table({"model": ["a", "b"], "recipe": ["baseline", "fp16"]})
    with pytest.raises(UsageError, match=r"unknown|no such"):
        make_plan(specs, answers(specs, refuse), lambda device: PLACE)


def test_two_spellings_of_a_recipe_are_one_cell() -> None:
    specs = cells_from_table({"model": "a", "recipe": ["fp16+compile", "compile+fp16"]})
    assert len(make_plan(specs, answers(specs), lambda device: PLACE).cells) == 1


def record(model: str, recipe: str, took_s: float, at: float = 1000.0, **fields: Any) -> RunRecord:
    block = Block(kind="throughput", clock="host", samples=(0.1,), started_at=at + took_s - 1, wall_s=1.0)
    spec = RunSpec(workload=WorkloadSpec(model=model), recipe=Recipe.parse(recipe), device="cpu")
    return RunRecord(id=new_id(), spec=spec, created_at=at, blocks=(block,), stopped="target", **fields)


def test_an_estimate_knows_what_the_history_knows() -> None:
    specs = cells_from_table(
        {"model": ["known", "stranger"], "recipe": ["baseline", "fp16", "compile"], "batch": [1, 8]}
    )
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
