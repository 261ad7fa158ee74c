"""What a grid costs beside the measuring: Redline's own time per cell, in an empty history and in one of 100 000 records.

    python benchmarks/grid_cost.py [--cells 1000] [--records 100000]

The cells are FakeBench's, in this process: whatever its simulation of a bench takes is timed and taken off. The rest is
planning, stopping rules, statistics and writing, with one fsync per cell. Target: 20 ms per cell, and flat.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from store_cost import fill

import redline
from redline.model.spec import RunSpec
from redline.store import History
from redline.testing.fake import FakeDoor, FakeSession
from redline.testing.landscape import Landscape
from redline.verbs.workspace import Workspace

TARGET_S = 0.020


class TimedSession(FakeSession):
    """Keeps account of the time spent on the other side of the door."""

    spent_s = 0.0

    def ask(self, *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return super().ask(*arguments, **options)
        finally:
            TimedSession.spent_s += time.perf_counter() - started


class TimedDoor(FakeDoor):
    def open(self, spec: RunSpec | None = None) -> FakeSession:
        session = super().open(spec)
        return TimedSession(session._bench, session._world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--records", type=int, default=100_000, help="size of the large history")
    given = parser.parse_args()
    print(f"{'history':<22}{'device':<8}{'cells':>6}{'own ms/cell':>13}{'bench ms/cell':>15}{'again, all':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for records in (0, given.records):
            with History.open(Path(folder) / f"{records}.sqlite") as history:
                fill(history, records)
                for device in ("cpu", "cuda:0"):
                    report(history, records, device, given.cells)
    print(
        f"\ntarget: {TARGET_S * 1e3:.0f} ms of Redline's own per cell, and as much in the large history as in the empty one"
    )


def report(history: History, records: int, device: str, cells: int) -> None:
    own_s, bench_s = measure(history, device, cells)
    again_s = sum(measure(history, device, cells))
    size = f"{records} records" if records else "empty"
    times = f"{own_s / cells * 1e3:>13.2f}{bench_s / cells * 1e3:>15.2f}{again_s:>10.2f} s"
    print(f"{size:<22}{device:<8}{cells:>6}{times}", flush=True)


def measure(history: History, device: str, cells: int) -> tuple[float, float]:
    """Own seconds and the bench's, from the call to the result with all its records."""
    TimedSession.spent_s = 0.0
    door = TimedDoor(Landscape(step_s=0.002, noise_sigma=0.01))
    started = time.perf_counter()
    result = redline.run(
        [f"model{number}" for number in range(cells // 20)],
        recipes=["baseline", "fp16", "compile", "fp16+compile"],
        batch="1..16",
        device=device,
        launch={"door": "fake"},
        name=f"cost {device}",
        resume=True,
        workspace=Workspace(door=door, history=history),
    )
    wall_s = time.perf_counter() - started
    assert result.about["done"] == cells // 20 * 20
    return wall_s - TimedSession.spent_s, TimedSession.spent_s


if __name__ == "__main__":
    main()
