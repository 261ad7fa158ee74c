"""What a call costs does not grow with the history: counted in steps of SQLite's machine, never in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from store_cost import add_records
from store_writer import make_block, make_record

from redline.model.errors import StoreError
from redline.model.record import RunRecord
from redline.store import History

MANY = 20_000


def fill(history: History, number: int) -> None:
    """As many finished records as asked for, each with a block."""
    made = make_record(stopped="target", blocks=(make_block(),))
    records = []
    for n in range(number):
        own = {"id": f"old{n:08d}", "key": f"key{n}", "group": f"group{n // 5}", "created_at": float(n)}
        workload = replace(made.spec.workload, model=f"model{n % 50}")
        records.append(replace(made, **own, spec=replace(made.spec, workload=workload)))
    add_records(history, records)


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[History, History]]:
    folder = tmp_path_factory.mktemp("cost")
    with History.open(folder / "small.sqlite") as small, History.open(folder / "large.sqlite") as large:
        fill(small, 100)
        fill(large, MANY)
        yield small, large


@contextmanager
def counting(history: History) -> Iterator[list[int]]:
    """Counts instructions of SQLite's virtual machine: a scan shows as a multiple, whatever the machine is busy with."""
    steps = [0]

    def step() -> int:
        steps[0] += 1
        return 0

    pooled = history._database._engine.raw_connection()
    connection: Any = pooled.driver_connection
    pooled.close()  # back to the pool, whose only connection it is
    connection.set_progress_handler(step, 1)
    try:
        yield steps
    finally:
        connection.set_progress_handler(None, 0)


def life_of_a_record(history: History) -> RunRecord:
    record = make_record(key="key7", group="group7", model="model7", created_at=50.0)
    history.begin(record)
    for number in range(10):
        history.append(record.id, make_block(number))
    history.finish(replace(record, stopped="target"))
    return record


def ambiguous(history: History) -> None:
    with pytest.raises(StoreError, match="fits several"):
        history.load("old")


CALLS: dict[str, Callable[[History], object]] = {
    "write a record": life_of_a_record,
    "load": lambda history: history.load("old00000042"),
    "load by prefix": ambiguous,
    "newest rows": lambda history: history.rows(limit=20),
    "newest rows of a model": lambda history: history.rows(model="model7", limit=2),
    "rows of a key": lambda history: history.rows(key="key7"),
    "rows of a group": lambda history: history.rows(group="group7"),
    "running rows": lambda history: history.rows(status="running"),
    "rows of a recipe": lambda history: history.rows(recipe="fp16"),
    "find a key": lambda history: history.find(key="key7"),
    "latest group": lambda history: history.latest_group(),
}


@pytest.mark.parametrize("name", CALLS)
def test_cost_is_flat(histories: tuple[History, History], name: str) -> None:
    costs = []
    for history in histories:
        CALLS[name](history)  # the first time statements are compiled and the schema is read
        with counting(history) as steps:
            CALLS[name](history)
        costs.append(steps[0])
    small, large = costs
    assert small > 10
    assert large < 1.5 * small
