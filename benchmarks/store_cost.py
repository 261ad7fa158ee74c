"""What writing one record costs (begin, ten blocks, finish) in an empty history and in one of 100 000 records.

    python benchmarks/store_cost.py [--records 100000]

A sweep writes a record per cell and asks once which cells are known, so both must stay flat as the history grows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
from sqlalchemy import Connection

from redline.model.record import Block, RunRecord, new_id
from redline.model.spec import RunSpec, WorkloadSpec
from redline.store import History, schema

BLOCKS = 10
SAMPLES = 50
CELLS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=100_000, help="size of the large history")
    parser.add_argument("--repeats", type=int, default=300, help="records timed at each size")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        History.open(Path(folder) / "small.sqlite") as small,
        History.open(Path(folder) / "large.sqlite") as large,
    ):
        started = time.perf_counter()
        fill(large, arguments.records)
        print(f"filled with {arguments.records} records of {BLOCKS} blocks in {time.perf_counter() - started:.1f} s\n")
        print(f"{'median time':<28}{'small':>12}{'large':>12}{'large/small':>13}")
        compare(f"begin + {BLOCKS} blocks + finish", write_record, small, large, arguments.repeats)
        fill(small, CELLS)  # one sweep's worth: there must be something to know
        compare("the newest 20 rows", lambda history: history.rows(limit=20), small, large, arguments.repeats)
    print(f"\nsmall: empty for the first line, {CELLS} records for the others")


def compare(name: str, call: Callable[[History], object], small: History, large: History, repeats: int) -> None:
    """Time both in turns, so that whatever else the machine does hits both alike."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for history, kept in zip((small, large), times, strict=True):
            started = time.perf_counter()
            call(history)
            kept.append(time.perf_counter() - started)
    before, after = map(median, times)
    print(f"{name:<28}{before * 1e3:>9.2f} ms{after * 1e3:>9.2f} ms{after / before:>12.2f}×")


def write_record(history: History) -> None:
    record = make_record("key of this run")
    history.begin(record)
    for block in make_blocks():
        history.append(record.id, block)
    history.finish(msgspec.structs.replace(record, stopped="target"))


def make_record(key: str) -> RunRecord:
    spec = RunSpec(workload=WorkloadSpec(model="resnet50", batch=32))
    return RunRecord(id=new_id(), spec=spec, created_at=time.time(), key=key, group=new_id())


def make_blocks() -> list[Block]:
    samples = tuple(0.01 + 1e-6 * number for number in range(SAMPLES))
    return [Block(kind="throughput", clock="host", samples=samples, round=number) for number in range(BLOCKS)]


def fill(history: History, number: int) -> None:
    blocks = tuple(make_blocks())
    for first in range(0, number, 5000):
        new = (make_record(f"key {n}") for n in range(first, min(first + 5000, number)))
        add_records(history, [msgspec.structs.replace(record, blocks=blocks) for record in new])


def add_records(history: History, records: list[RunRecord]) -> None:
    """Many finished records in one transaction: the same rows as one by one, in a fraction of the time."""

    def add(connection: Connection) -> None:
        schema.put(connection, schema.records, *(schema.record_row(record, over=True) for record in records))
        schema.put(connection, schema.blocks, *(row for record in records for row in schema.block_rows(record)))
        schema.keep_points(connection, [record.id for record in records])

    history._database.write(add)


if __name__ == "__main__":
    main()
