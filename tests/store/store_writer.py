"""Records to write, and a process that writes them: `python store_writer.py LOCATION WHAT NUMBER`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import msgspec

from redline.model.record import (
    Block,
    ColdStart,
    DeviceInfo,
    Environment,
    Memory,
    Numerics,
    Prepared,
    RunRecord,
    Warmup,
    WorkloadInfo,
    new_id,
)
from redline.model.spec import Recipe, RunSpec, WorkloadSpec
from redline.store import History


def make_record(*, model: str = "resnet50", task: Any = "infer", recipe: str = "baseline", **fields: Any) -> RunRecord:
    spec = RunSpec(workload=WorkloadSpec(model=model, task=task, batch=8), recipe=Recipe.parse(recipe), device="cpu")
    return RunRecord(**{"id": new_id(), "spec": spec, "created_at": 1_700_000_000.0, **fields})


def make_block(number: int = 0, samples: tuple[float, ...] = (0.25, 0.5)) -> Block:
    return Block(kind="throughput", clock="host", samples=samples, round=number, wall_s=sum(samples))


def make_prepared(**fields: Any) -> Prepared:
    return Prepared(
        environment=Environment(device=DeviceInfo(kind="cuda", index=1, name="Test GPU")),
        workload=WorkloadInfo(source="builtin", class_name="Net", parameters=1, items_per_step=16, batch=16),
        **{
            "cold_start": ColdStart(import_s=1.0, build_s=0.1, first_call_s=0.2),
            "numerics": Numerics(passed=True),
            "warmup": Warmup(samples=(0.5, 0.3), steady=True),
            "memory": Memory(peak_rss_bytes=10**9),
            **fields,
        },
    )


def write_records(history: History, number: int) -> None:
    """Whole records of three blocks each."""
    for _ in range(number):
        record = make_record(group=f"writer {os.getpid()}")
        history.begin(record)
        for block in range(3):
            history.append(record.id, make_block(block))
        history.finish(msgspec.structs.replace(record, stopped="target"))


def append_for_ever(history: History, _: int) -> None:
    """Say on stdout, after each block, how many are safe."""
    record = make_record()
    history.begin(record)
    sys.stdout.write(f"{record.id}\n")
    for number in range(10**6):
        history.append(record.id, make_block(number, samples=(float(number),) * 50))
        sys.stdout.write(f"{number + 1}\n")
        sys.stdout.flush()


def die_inside(history: History, number: int) -> None:
    """Append so many blocks, then be killed with the next one written and not yet committed."""
    from sqlalchemy import Connection

    from redline.store.schema import blocks, put

    record = make_record()
    history.begin(record)
    for block in range(number):
        history.append(record.id, make_block(block))

    def die(connection: Connection) -> None:
        put(
            connection,
            blocks,
            {"record_id": record.id, "number": number, "body": msgspec.msgpack.encode(make_block(number))},
        )
        os.kill(os.getpid(), signal.SIGKILL)

    history._database.write(die)


def write_across_fork(history: History, number: int) -> None:
    """Parent and child go on with the same open history."""
    write_records(history, 1)
    child = os.fork()
    write_records(history, number)
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    location, what, number = sys.argv[1:]
    with History.open(location) as history:
        globals()[what](history, int(number))
