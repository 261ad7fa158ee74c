"""A grid whose process is killed at any moment of its run: what was stored stays, and the same command goes on from it.

    python benchmarks/kill_trials.py [--kills 100]

Each trial measures a grid on a fake bench in a process of its own, kills it after a share of the time that a whole run takes, and resumes
it. The kills are spread evenly over the run. Counted is what must never happen: a file that SQLite finds damaged, a settled cell whose record
is not whole, a cell that was settled before the kill and measured again, a cell that is missing at the end, a hold that outlives its process.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import redline
from redline.store import History
from redline.store.database import damage_of
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.workspace import Workspace

GRID: dict[str, Any] = {
    "model": ["a", "b"],
    "recipes": ["baseline", "fp16", "bf16"],
    "batch": [1, 2, 4, 8, 16],
    "name": "study",
    "launch": {"door": "fake"},
}
CELLS = 30


def start(path: Path) -> int:
    """The id of a process that measures the grid, or goes on with it."""
    if (child := os.fork()) == 0:
        try:
            with Workspace(door=FakeDoor(Landscape(step_s=0.004)), history=path) as workspace:
                redline.run(**GRID, resume=True, workspace=workspace)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


def trial(path: Path, after_s: float) -> list[str]:
    """What went wrong; `stopped early` and `ran through` only say where the kill fell."""
    child = start(path)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    said = ["ran through" if os.WIFEXITED(status) else "stopped early"]
    before: dict[str, str] = {}
    if path.exists():
        said += ["damaged"] if damage_of(path) else []
        with History.open(path, only_to_read=True) as history:
            before = {key: cell.record_id for key, cell in history.sweep("study").cells().items()}
            whole = history.load_many(before.values())
            said += ["not whole"] * sum(not (one := whole.get(id)) or not one.blocks for id in before.values())
    _, status = os.waitpid(start(path), 0)
    said += ["not resumed"] if status else []
    with History.open(path, only_to_read=True) as history:
        after = {key: cell.record_id for key, cell in history.sweep("study").cells().items()}
        said += ["missing"] * (CELLS - len(after))
        said += ["measured again"] * sum(after.get(key) != record_id for key, record_id in before.items())
        said += ["too many records"] if history.count() > CELLS + len(GRID["recipes"]) else []
        said += ["still held"] if history.activities() else []
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        os.waitpid(start(Path(folder) / "whole.sqlite"), 0)
        whole_s = time.monotonic() - started
        for number in range(arguments.kills):
            counts.update(trial(Path(folder) / f"{number}.sqlite", whole_s * number / arguments.kills))
    print(f"a whole run takes {whole_s:.2f} s; {arguments.kills} kills spread over it")
    for what, count in sorted(counts.items()):
        print(f"{what:<20}{count:>5}")


if __name__ == "__main__":
    main()
