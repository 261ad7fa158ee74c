"""Grids: every combination once, exclusions, an order that tells much early, and mistakes in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from redline.model.errors import SpecError, UsageError
from redline.model.fields import MOST_CELLS
from redline.model.spec import RunSpec
from redline.model.spec_table import read_runs
from redline.search.grid import (
    Cell,
    Grid,
    default_name,
    grid_from_tables,
    in_informative_order,
    parse_numbers,
    value_of,
)


def grid_from_table(table: dict[str, Any]) -> Grid:
    rest = dict(table)
    return grid_from_tables([rest], rest.pop("exclude", ()))


def shape(cells: list[RunSpec]) -> list[tuple[Any, ...]]:
    return [
        (cell.workload.model, cell.workload.task, cell.threads, cell.workload.batch, str(cell.recipe)) for cell in cells
    ]


def test_every_combination_once() -> None:
    grid = {
        "model": ["a", "b"],
        "recipe": ["baseline", "fp16"],
        "batch": [1, 8, 8],
        "task": ["infer", "train"],
        "threads": [1, 2],
    }
    cells = shape(grid_from_table(grid).cells)
    assert len(cells) == len(set(cells)) == 2 * 2 * 2 * 2 * 2


@pytest.mark.parametrize(
    ("given", "batches"),
    [
        (8, [8]),
        ("8", [8]),
        ("1,8, 16", [1, 8, 16]),
        ("16..512", [16, 32, 64, 128, 256, 512]),
        ("3..20", [3, 6, 12, 20]),
        (["1", "4..8", 8], [1, 4, 8]),
        (None, []),
    ],
)
def test_batches_are_written_in_many_ways(given: Any, batches: list[int]) -> None:
    assert parse_numbers(given) == batches


@pytest.mark.parametrize("given", ["x", "1..", "8..4", "0..4", "1.5", True, ""])
def test_a_batch_that_is_none_is_told(given: Any) -> None:
    with pytest.raises(SpecError, match="batch"):
        parse_numbers(given)


def test_exclusions_take_out_what_fits_all_their_fields() -> None:
    grid = {"model": ["resnet50", "vit_b_16"], "recipe": ["baseline", "channels-last+fp16"], "batch": "1..4"}
    exclude = [{"model": "vit_*", "recipe": "fp16+channels-last", "batch": [2, 4]}, {"model": "resnet50", "batch": "1"}]
    cells = {
        (model, batch, recipe)
        for model, _, _, batch, recipe in shape(grid_from_table({**grid, "exclude": exclude}).cells)
    }
    assert cells == {
        ("resnet50", 2, "baseline"),
        ("resnet50", 4, "baseline"),
        ("resnet50", 2, "channels-last+fp16"),
        ("resnet50", 4, "channels-last+fp16"),
        ("vit_b_16", 1, "baseline"),
        ("vit_b_16", 2, "baseline"),
        ("vit_b_16", 4, "baseline"),
        ("vit_b_16", 1, "channels-last+fp16"),
    }


@pytest.mark.parametrize(
    ("exclusion", "reason"),
    [
        ({"model": "vit_*"}, "the grid has no model vit_*"),
        ({"model": ["resnet50", "resent18"]}, "the grid has no model resent18"),
        ({"recipe": "bf16", "batch": 64}, "the grid has no recipe bf16 and no batch 64"),
        ({"task": "train"}, "the grid has no task train"),
        ({"threads": [1]}, "the grid has no threads 1"),
        ({"model": "resnet50", "batch": [1, 64]}, None),
        ({"model": "resnet*", "batch": "8..64"}, None),
    ],
)
def test_an_exclusion_that_asks_for_what_no_cell_has_is_told(exclusion: dict[str, Any], reason: str | None) -> None:
    grid = {"model": ["resnet50", "resnet18"], "recipe": ["baseline", "fp16"], "batch": [1, 8]}
    idle = grid_from_table({**grid, "exclude": [exclusion]}).idle
    assert [str(found.reason) for found in idle] == ([] if reason is None else [reason])


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "name at least one model"),
        ({"model": "a", "exclude": [{"modle": "a"}]}, "'modle'; did you mean model"),
        ({"model": "a", "exclude": [{}]}, "must name at least one"),
        ({"model": "a", "exclude": {"model": "a"}}, r"\[\[exclude\]\]"),
        ({"model": "a", "exclude": [{"model": "a"}]}, "leave nothing to measure"),
        ({"model": "a", "exclude": 3}, r"\[\[exclude\]\]"),
        ({"model": "a", "exclude": [{"recipe": 3}]}, "recipe of an exclusion must be a text or a list of texts, got 3"),
        ({"model": "a", "exclude": [{"recipe": [["fp16"]]}]}, "recipe of an exclusion must be a text"),
        ({"model": "a", "exclude": [{"recipe": "fp16+"}]}, "empty switch"),
        ({"model": "a", "exclude": [{"model": 3}]}, "model of an exclusion must be a text or a list of texts, got 3"),
        ({"model": "a", "exclude": [{"model": []}]}, "model of an exclusion must name at least one value"),
        ({"model": "a", "threads": [1, 2], "exclude": [{"threads": "1"}]}, "threads of an exclusion.* got '1'"),
        ({"model": "a", "threads": [1, 2], "exclude": [{"threads": True}]}, "threads of an exclusion.* got True"),
        ({"model": "a", "batch": [1, 2], "exclude": [{"batch": 0}]}, "batch of an exclusion.* 1 or more.* got 0"),
        ({"model": "a", "exclude": [{"task": 3}]}, "task of an exclusion must be a text"),
        ({"model": "a", "exclude": [{"task": "trian"}]}, "unknown task 'trian'; did you mean train"),
        ({"model": "a", "task": "fly"}, "fly"),
        ({"model": "a", "batch": 0}, "batch must be 1 or more, got 0"),
        ({"model": "a", "colour": "red"}, "colour"),
        ({"model": "a", "max_memory": "lots"}, "16GiB"),
        ({"model": "a", "recipe": "fp16+"}, "empty switch"),
    ],
)
def test_mistakes_are_told_in_one_line(table: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        grid_from_table(table)
    assert "\n" not in str(caught.value)


def test_early_groups_tell_most() -> None:
    grid = grid_from_table({"model": ["a", "b"], "recipe": ["my-compiler", "baseline"], "batch": "1..16"}).cells
    groups = [[Cell(spec=cell, key="")] for cell in grid]
    batches = list(dict.fromkeys(group[0].spec.workload.batch for group in in_informative_order(groups)))
    assert batches == [1, 16, 4, 2, 8]
    named = [[Cell(spec=cell, key="", run=f"run {cell.workload.batch}")] for cell in grid]
    assert in_informative_order(named) == named, "runs with names keep the order of their file"


@pytest.mark.parametrize(
    ("setting", "given", "values"),
    [
        ("threads", "1..4", [1, 2, 4]),
        ("threads", [1, 3], [1, 3]),
        ("device", "cpu,cuda", ["cpu", "cuda"]),
        ("effort", ["quick", "normal"], ["quick", "normal"]),
        ("seed", [0, -1], [0, -1]),
        ("image_size", "32,64", [32, 64]),
        ("optimizer", ["sgd", "adam"], ["sgd", "adam"]),
        ("max_memory", ["1GiB", "2GiB"], ["1GiB", "2GiB"]),
        ("prompt", "128..512", [128, 256, 512]),
    ],
)
def test_every_setting_takes_several_values(setting: str, given: Any, values: list[Any]) -> None:
    task = {"optimizer": "train", "prompt": "generate"}.get(setting, "infer")
    cells = grid_from_table({"model": "a", "task": task, setting: given}).cells
    if setting == "max_memory":
        assert [cell.launch.memory_limit_bytes for cell in cells] == [2**30, 2**31]
    else:
        assert [value_of(cell, setting) for cell in cells] == values


def test_a_setting_of_one_task_goes_to_the_runs_that_have_it() -> None:
    cells = grid_from_table({"model": "a", "task": ["infer", "generate"], "prompt": [8, 16]}).cells
    assert {(cell.workload.task, cell.workload.prompt) for cell in cells} == {
        ("infer", None), ("generate", 8), ("generate", 16),
    }  # fmt: skip
    with pytest.raises(SpecError):
        grid_from_table({"model": "a", "prompt": [8, 16]})


def test_the_same_grid_has_the_same_name_whatever_its_order() -> None:
    one = grid_from_table({"model": ["a", "b"], "batch": [1, 2]}).cells
    same = grid_from_table({"batch": [2, 1], "model": ["a", "b"], "launch": {"door": "spawn"}}).cells
    other = grid_from_table({"model": ["a", "b"], "batch": [1, 4]}).cells
    assert default_name(one) == default_name(same) != default_name(other)
    assert default_name(one).startswith("a+1-")
    assert "/" not in default_name(grid_from_table({"model": "some/where/net.py:make"}).cells)


def test_a_file_holds_a_grid_and_flags_are_over_it(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(
        """
        name = "study"
        device = "cpu"
        effort = "quick"
        recipe = ["baseline", "fp16"]
        max_memory = "2GiB"
        [quick]
        seed = 7
        [[run]]
        name = "small ones, batch {batch}"
        model = ["a", "b"]
        batch = "1..4"
        [[run]]
        model = "c"
        [[exclude]]
        model = "b"
        recipe = "fp16"
        """
    )
    about, tables = read_runs(file)
    assert about["name"] == "study"
    grid = grid_from_tables(tables, about["exclude"])
    assert len(grid.cells) == 9 + 2
    assert set(grid.runs) == {"small ones, batch 1", "small ones, batch 2", "small ones, batch 4", ""}
    assert {(cell.device, cell.measure.effort, cell.seed) for cell in grid.cells} == {("cpu", "quick", 7)}
    assert {cell.launch.memory_limit_bytes for cell in grid.cells} == {2**31}
    _, tables = read_runs(file, {"effort": "normal", "batch": [8]})
    cells = grid_from_tables(tables).cells
    assert {(cell.workload.batch, cell.measure.effort, cell.seed) for cell in cells} == {(8, "normal", 0)}


def test_a_grid_of_a_million_cells_is_refused_at_once() -> None:
    table = {"model": [f"m{n}" for n in range(100)], "batch": list(range(1, 101)), "recipe": ["baseline", "fp16"]}
    assert len(grid_from_table(table).cells) == MOST_CELLS
    with pytest.raises(SpecError, match="the grid has 30000 cells; it may have 20000 at most"):
        grid_from_table({**table, "recipe": ["baseline", "fp16", "bf16"]})
