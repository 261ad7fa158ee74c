"""Grids: every combination once, and mistakes in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from redline.model.errors import SpecError, UsageError
from redline.model.fields import MOST_CELLS
from redline.model.spec import RunSpec, WorkloadSpec
from redline.model.spec_table import read_runs
from redline.search.grid import (
    Grid,
    cell_name,
    default_name,
    grid_from_tables,
    parse_numbers,
    value_of,
)


def grid_from_table(table: dict[str, Any]) -> Grid:
    rest = dict(table)
    return grid_from_tables([rest])


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


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "name at least one model"),
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


def test_a_name_counts_one_of_a_thing() -> None:
    for threads, name in ((1, "CPU, 1 thread"), (8, "CPU, 8 threads")):
        spec = RunSpec(workload=WorkloadSpec(model="m"), threads=threads)
        assert cell_name("CPU, {threads} threads", spec) == name
    assert cell_name("1 loader workers", spec) == "1 loader worker"


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
        """
    )
    about, tables = read_runs(file)
    assert about["name"] == "study"
    grid = grid_from_tables(tables)
    assert len(grid.cells) == 12 + 2
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
