"""How long commands that read the history take with 100 000 records, as a person sees it: whole processes.

    python benchmarks/history_100k.py [--records 100000] [--series 200]

Each should answer within a second; the report of the latest 5 000 within ten.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec
from starlette.testclient import TestClient
from store_cost import add_records

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
)
from redline.model.spec import RunSpec, WorkloadSpec
from redline.store import History
from redline.verbs.serve import make_app
from redline.verbs.workspace import Workspace

NOW = 1.75e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--series", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--report", action="store_true", help="also the report of the latest 5 000, which takes a while"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.sqlite"
        with History.open(path) as history:
            chance = random.Random(0)
            for first in range(0, arguments.records, 5000):
                some = range(first, min(first + 5000, arguments.records))
                add_records(history, [make_record(index, arguments.series, chance) for index in some])
        commands = {
            "redline history": ["history"],
            "redline history MODEL (one trend)": ["history", "model-0", "--json"],
            "redline history show": ["history", "show"],
            "redline history show ID": ["history", "show", f"{7:021x}"],
        }
        for name, words in commands.items():
            print(f"{name:<40}{timed(words, path, arguments.repeats):>8.2f} s", flush=True)
        os.environ["REDLINE_STORE"] = str(path)
        times = []
        for _ in range(arguments.repeats):
            # Each time a new server: one that runs keeps its pages for a while.
            browser = TestClient(make_app(Workspace()), base_url="http://127.0.0.1")
            started = time.perf_counter()
            assert browser.get("/").status_code == 200
            times.append(time.perf_counter() - started)
        print(f"{'the first start page of a server':<40}{median(times):>8.2f} s", flush=True)
        if arguments.report:
            with History.open(path, only_to_read=True) as history:
                ids = [row.id for row in history.rows(limit=5000)]
            words = ["report", *ids, "-o", str(Path(folder) / "report")]
            print(f"{'redline report of the latest 5 000':<40}{timed(words, path, 1):>8.2f} s", flush=True)


def timed(words: list[str], path: Path, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "redline", *words],
            env={**os.environ, "REDLINE_STORE": str(path)},
            capture_output=True,
        )
        times.append(time.perf_counter() - started)
        assert done.returncode == 0, done.stderr.decode()
    return median(times)


def make_record(index: int, series: int, chance: random.Random) -> RunRecord:
    step_s = 0.01 * chance.lognormvariate(0, 0.01) * (1.05 if index % series == 3 and index > 50_000 else 1.0)
    samples = tuple(step_s * chance.lognormvariate(0, 0.01) for _ in range(20))
    spec = RunSpec(workload=WorkloadSpec(model=f"model-{index % series}", batch=32), device="cuda:0")
    return RunRecord(
        id=f"{index:021x}",
        spec=spec,
        created_at=NOW + index * 60,
        key=f"key {index % series}",
        stopped="target",
        prepared=msgspec.structs.replace(PREPARED),
        blocks=tuple(Block(kind="throughput", clock="device", samples=samples, round=n) for n in range(2)),
    )


PREPARED = Prepared(
    environment=Environment(device=DeviceInfo(kind="cuda", name="some device"), versions={"torch": "2.8.0"}),
    workload=WorkloadInfo(source="builtin", class_name="M", parameters=1, items_per_step=32, batch=32),
    cold_start=ColdStart(),
    numerics=Numerics(rel_l2=0.0, passed=True),
    warmup=Warmup(steady=True),
    memory=Memory(),
)

if __name__ == "__main__":
    main()
