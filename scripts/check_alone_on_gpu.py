"""What makes a recorded, compiled training step faster once another process has used the GPU (decision 7).

    python scripts/check_alone_on_gpu.py [--name cifar-train] [--out FILE]

One process records the compiled step of a workload of `tune_workloads.py` and times its replays again and again. In between,
this process or a second one does something that may make them faster. Printed is the time of a step after each: the median of
two thirds of a second. It takes about a minute and a half, most of it compiling.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tune_workloads import WORKLOADS, step_by_hand

WATCHED_S = 0.67
NEIGHBOUR = """
import sys, torch
torch.cuda.synchronize(); print("open", flush=True)
sys.stdin.readline(); torch.ones(1, device="cuda"); torch.cuda.synchronize(); print("ran", flush=True)
sys.stdin.readline()
"""


class Neighbour:
    """A second process: opens a context, runs one kernel when told, ends when told."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def awaited(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "the neighbour ended early"

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        self.go_on()
        self._process.wait()


def use_a_second_context() -> None:
    """In this process: open it, clear some memory in it, close it."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory = ctypes.c_void_p(), ctypes.c_void_p()
    for name, *arguments in (
        ("cuCtxCreate_v2", ctypes.byref(context), 0, torch.cuda.current_device()),
        ("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(2**20)),
        ("cuMemsetD8_v2", memory, ctypes.c_ubyte(1), ctypes.c_size_t(2**20)),
        ("cuCtxSynchronize",),
        ("cuCtxDestroy_v2", context),
    ):
        code = getattr(cuda, name)(*arguments)
        assert code == 0, f"{name}: error {code}"


def step_ms(replay: Callable[[], None]) -> float:
    """Median of the steps of a while, as the device times them."""
    ends_at, times = time.perf_counter() + WATCHED_S, []
    while time.perf_counter() < ends_at:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(51)]
        for event in events[:-1]:
            event.record()
            replay()
        events[-1].record()
        torch.cuda.synchronize()
        times += [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", choices=WORKLOADS, default="cifar-train")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    said: list[str] = []
    replay = step_by_hand(WORKLOADS[given.name], "compiled-graph")

    def tell(what: str) -> None:
        said.append(f"{what:48s} {step_ms(replay):.4f} ms")
        print(said[-1], flush=True)

    def product(side: int) -> None:
        torch.mm(*torch.randn(2, side, side, device="cuda", dtype=torch.bfloat16))
        torch.cuda.synchronize()

    tell("alone")
    for what, work in (
        ("after two seconds of rest", lambda: time.sleep(2.0)),
        ("after a product of large matrices", lambda: product(8192)),
        ("after its cached memory was given back", lambda: (gc.collect(), torch.cuda.empty_cache())),
        ("after a second context of the same process", use_a_second_context),
    ):
        work()
        tell(what)
    neighbour = Neighbour()
    neighbour.awaited()
    tell("another process has a context")
    neighbour.go_on()
    neighbour.awaited()
    tell("another process has run a kernel")
    tell("a while later")
    neighbour.end()
    tell("the other process has ended")
    time.sleep(5.0)
    tell("five seconds later")
    replay = step_by_hand(WORKLOADS[given.name], "compiled-graph")
    tell("recorded again, in the same process")
    if given.out is not None:
        given.out.write_text("\n".join([f"{given.name}, {torch.cuda.get_device_name()}", *said]) + "\n")


if __name__ == "__main__":
    main()
