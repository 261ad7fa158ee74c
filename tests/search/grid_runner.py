"""A grid in a process that can be killed: `python grid_runner.py STORE fake|killed|cpu NAME [SEED]`."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Any

import redline
from redline.model.spec import RunSpec
from redline.search.observer import Observer
from redline.store import History
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.workspace import Workspace

FAKE_GRID: dict[str, Any] = {
    "model": ["resnet50", "vit_b_16", "mobilenet_v2"],
    "recipes": ["baseline", "fp16", "compile", "fp16+compile"],
    "batch": [1, 8, 32, 128, 512],
    "device": "cuda:0",
    "launch": {"door": "fake"},
}
"""60 cells, of which those at batch 512 of one model do not fit."""

CPU_GRID: dict[str, Any] = {
    "model": "simple_cnn",
    "recipes": ["baseline", "channels-last"],
    "batch": [1, 2, 4],
    "device": "cpu",
    "threads": 1,
    "image_size": 8,
    "effort": "quick",
    "measure": {"max_seconds": 0.1, "min_rounds": 1, "warmup_max_seconds": 0.05, "block_seconds": 0.05},
}


def needed_bytes(spec: RunSpec) -> int:
    return (spec.workload.batch or 1) * (2**26 if spec.workload.model == "vit_b_16" else 2**20)


def fake_door() -> FakeDoor:
    return FakeDoor(Landscape(step_s=0.002, memory_bytes=needed_bytes, memory_limit_bytes=2**34))


def run_fake(history: History, name: str) -> None:
    redline.run(**FAKE_GRID, name=name, resume=True, workspace=Workspace(door=fake_door(), history=history))


class Telling(Observer):
    """Says on a descriptor which cells are settled; with `leave`, waits there for a byte after each of them."""

    def __init__(self, descriptor: int = 1, leave: int | None = None) -> None:
        self._descriptor = descriptor
        self._leave = leave

    def settled(self, cell: Any, record: Any) -> None:
        os.write(self._descriptor, f"settled {record.id}\n".encode())
        if self._leave is not None:
            os.read(self._leave, 1)


def run_killed(store: str, name: str, seed: int) -> None:
    """Run the grid in forks of this warm process, each killed at a random moment within its next few cells.

    None settles more than five, however late it is killed: on a busy machine one might end the grid otherwise.
    """
    chance = random.Random(seed)
    while True:
        reading, writing = os.pipe()
        leave, giving = os.pipe()
        child = os.fork()
        if child == 0:
            with History.open(store) as history:
                redline.run(
                    **FAKE_GRID,
                    name=name,
                    resume=True,
                    workspace=Workspace(door=fake_door(), history=history, observer=Telling(writing, leave)),
                )
            os._exit(0)
        os.close(writing)
        cells = chance.randrange(5)
        os.write(giving, b"." * cells)
        with open(reading, buffering=1) as told:
            lines = [told.readline() for _ in range(cells)]
        time.sleep(chance.uniform(0.0, 0.010))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(leave)
        os.close(giving)
        if os.WIFEXITED(status) or (lines and not lines[-1]):
            return
        sys.stdout.write("killed\n")


if __name__ == "__main__":
    store, what, name = sys.argv[1:4]
    if what == "killed":
        run_killed(store, name, int(sys.argv[4]))
    else:
        with History.open(store) as history:
            if what == "fake":
                run_fake(history, name)
            else:
                redline.run(
                    **CPU_GRID, name=name, resume=True, workspace=Workspace(history=history, observer=Telling())
                )
