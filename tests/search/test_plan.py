"""Plan keys change with what a cell would measure and with nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from redline.model.errors import SpecError, UsageError
from redline.model.identity import plan_key
from redline.model.protocol import Checked
from redline.model.record import DeviceInfo, Environment
from redline.model.spec import Recipe, RunSpec, WorkloadSpec
from redline.search.grid import Grid, check_name, grid_from_tables, make_plan

PLACE = Environment(device=DeviceInfo(kind="cuda", name="Some GPU", driver="1"), versions={"torch": "2"})
SPEC = RunSpec(workload=WorkloadSpec(model="m", batch=8), recipe=Recipe.parse("fp16+compile"), device="cuda:0")


def changed(**fields: Any) -> RunSpec:
    return msgspec.structs.replace(SPEC, **fields)


def test_a_plan_is_keyed_by_what_is_known_of_the_model_and_the_place() -> None:
    other = msgspec.structs.replace(PLACE, versions={"torch": "3"})
    keys = [plan_key(SPEC, "file 1", PLACE), plan_key(SPEC, "file 2", PLACE), plan_key(SPEC, "file 1", other)]
    assert len({*keys, plan_key(changed(recipe=Recipe.parse("fp16")), "file 1", PLACE)}) == 4
    assert plan_key(changed(recipe=Recipe.parse("compile+fp16")), "file 1", PLACE) == keys[0]


def grid_of(table: dict[str, Any]) -> Grid:
    return grid_from_tables([table])


def answers(specs: list[RunSpec], refuse: Any = lambda spec: None) -> list[Checked]:
    return [Checked(spec=msgspec.structs.replace(spec, device="cuda:0"), usage=refuse(spec)) for spec in specs]


def test_a_combination_that_cannot_be_is_left_out() -> None:
    specs = grid_of({"model": ["a", "b"], "task": ["infer", "train"], "recipe": ["baseline", "torchscript"]}).cells

    def refuse(spec: RunSpec) -> str | None:
        return "torchscript is for infer" if spec.workload.task == "train" and spec.recipe.switches else None

    plan = make_plan(Grid(cells=specs), answers(specs, refuse), lambda device: PLACE)
    assert len(plan.cells) == 6
    assert {left.name for left in plan.left_out} == {"a train torchscript", "b train torchscript"}


@pytest.mark.parametrize(
    "refuse",
    [
        lambda spec: "unknown model" if spec.workload.model == "b" else None,
        lambda spec: "unknown switch" if spec.recipe.switches else None,
        lambda spec: "no such device",
    ],
)
def test_what_is_wrong_everywhere_is_a_mistake(refuse: Any) -> None:
    specs = grid_of({"model": ["a", "b"], "recipe": ["baseline", "fp16"]}).cells
    with pytest.raises(UsageError, match=r"unknown|no such"):
        make_plan(Grid(cells=specs), answers(specs, refuse), lambda device: PLACE)


def test_a_recipe_that_is_named_twice_is_measured_twice() -> None:
    """Against itself it shows the noise floor."""
    specs = grid_of({"model": "a", "recipe": ["fp16+compile", "compile+fp16"]}).cells
    plan = make_plan(Grid(cells=specs), answers(specs), lambda device: PLACE, is_kept=True)
    (group,) = plan.groups
    assert len({cell.key for cell in group}) == 2
    assert group[1].key == f"{group[0].key}~2"


def test_cells_that_differ_in_their_recipe_alone_make_a_group() -> None:
    grid = grid_of({"model": ["a", "b"], "recipe": ["baseline", "fp16"], "batch": [1, 8], "threads": [1, 2]})
    plan = make_plan(grid, answers(grid.cells), lambda device: PLACE)
    assert [[str(cell.spec.recipe) for cell in group] for group in plan.groups] == [["baseline", "fp16"]] * 8
    assert len({(c.spec.workload.model, c.spec.workload.batch, c.spec.threads) for c in plan.cells}) == 8
    assert plan.axes == ("threads", "batch")


def test_functions_are_compared_only_where_pairs_are_decided() -> None:
    steps = grid_from_tables([{"model": f"steps.py:{name}", "task": "step"} for name in ("old", "new")])
    assert len(make_plan(steps, answers(steps.cells), lambda device: PLACE).groups) == 2
    assert len(make_plan(steps, answers(steps.cells), lambda device: PLACE, decides=True).groups) == 1


def test_a_single_group_asks_nothing_about_the_machine() -> None:
    """It is settled all at once, so there is nothing to go on with."""
    grid = grid_of({"model": "a", "recipe": ["baseline", "fp16"]})
    plan = make_plan(grid, answers(grid.cells), lambda device: pytest.fail("asked"))
    assert not plan.is_kept
    assert len({cell.key for cell in plan.cells}) == 2


def test_a_plan_without_a_name_is_called_by_what_was_asked_for() -> None:
    specs = [changed(device="cpu")]
    answers = [Checked(spec=spec) for spec in specs]
    unnamed, named = (make_plan(Grid(cells=specs), answers, lambda device: PLACE, name) for name in (None, "study"))
    assert named.name == "study"
    assert unnamed.name not in ("", "study")
    assert unnamed.name == make_plan(Grid(cells=specs), answers, lambda device: PLACE).name


@pytest.mark.parametrize(("name", "says"), [("a,b", "comma"), (" ", "not empty"), (7, "must be a text")])
def test_names_that_cannot_be(name: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        check_name(name)
    check_name(None)
    check_name("study 7")


def test_replicates_follow_each_other_cell_by_cell_and_the_first_keeps_the_plain_key() -> None:
    specs = [changed(seed=1), changed(seed=2)]
    answers = [Checked(spec=spec) for spec in specs]
    once = [cell.key for cell in make_plan(Grid(cells=specs), answers, lambda device: PLACE, is_kept=True).cells]
    cells = make_plan(Grid(cells=specs), answers, lambda device: PLACE, replicates=3).cells
    assert [cell.key for cell in cells] == [*once, *(f"{key}-2" for key in once), *(f"{key}-3" for key in once)]
    assert [cell.replicate for cell in cells] == [1, 1, 2, 2, 3, 3]
