"""A sweep in a process that can be killed: `python sweep_runner.py STORE fake|killed|cpu NAME [KILLS SEED]`."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Any

import redline
from redline.launch.fake import FakeDoor, Landscape
from redline.search.sweep import SweepObserver
from redline.spec import RunSpec
from redline.store import History

FAKE_GRID: dict[str, Any] = {
    "model": ["resnet50", "vit_b_16", "mobilenet_v2"],
    "recipes": ["baseline", "fp16", "compile", "fp16+compile"],
    "batches": [1, 8, 32, 128, 512],
    "device": "cuda:0",
    "launch": {"door": "fake"},
}
"""60 cells, of which those at batch 512 of one model do not fit."""

CPU_GRID: dict[str, Any] = {
    "model": "simple_cnn",
    "recipes": ["baseline", "channels-last"],
    "batches": [1, 2, 4],
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
    redline.sweep(**FAKE_GRID, door=fake_door(), history=history, name=name)


def run_killed(store: str, name: str, kills: int, seed: int) -> None:
    """Start the sweep in a fork of this warm process and kill that at a random moment, again and again."""
    chance = random.Random(seed)
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            with History.open(store) as history:
                run_fake(history, name)
            os._exit(0)
        time.sleep(chance.uniform(0.0, 0.06))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        sys.stdout.write("finished\n" if os.WIFEXITED(status) else "killed\n")


class Telling(SweepObserver):
    def settled(self, cell: Any, record: Any) -> None:
        sys.stdout.write(f"settled {record.id}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    store, what, name = sys.argv[1:4]
    if what == "killed":
        run_killed(store, name, int(sys.argv[4]), int(sys.argv[5]))
    else:
        with History.open(store) as history:
            if what == "fake":
                run_fake(history, name)
            else:
                redline.sweep(**CPU_GRID, history=history, name=name, observer=Telling())
