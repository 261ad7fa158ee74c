"""What makes a recorded, compiled training step slower by itself than beside other processes, and what ends that (decision 7).

    python scripts/check_alone_on_gpu.py [--name cifar-train] [--out FILE]

One process records the compiled step of a workload of `tune_workloads.py` and times its replays again and again. In between it
does something that may make them faster, or slower. Printed is the time of a step after each: the median of two thirds of a
second. It takes about a minute, most of it compiling.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tune_workloads import WORKLOADS, recorded, step_by_hand

from redline.bench.device.cuda import shorten_launches

WATCHED_S = 0.67
STACK, HEAP = 0, 2
"""As the driver numbers its limits."""


def driver(name: str, *given: Any) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*given)
    assert code == 0, f"{name}: error {code}"


def load_a_kernel() -> None:
    torch.compile(lambda given: given.sin() * 3 + 1, dynamic=False)(torch.ones(1000, device="cuda"))
    torch.cuda.synchronize()


def give_memory_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()


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
    step = step_by_hand(WORKLOADS[given.name], "compiled")
    replays = [recorded(step)]

    def tell(what: str) -> None:
        """Of everything that was recorded so far."""
        said.append(f"{what:48s} {' '.join(f'{step_ms(replay):.4f}' for replay in replays)} ms")
        print(said[-1], flush=True)

    def record_again() -> None:
        replays.append(recorded(step))

    for what, work in (
        ("recorded", lambda: None),
        ("after two seconds of rest", lambda: time.sleep(2.0)),
        ("after its cached memory was given back", give_memory_back),
        ("after persisting lines of L2 were reset", lambda: driver("cuCtxResetPersistingL2Cache")),
        ("with a larger stack", lambda: driver("cuCtxSetLimit", STACK, ctypes.c_size_t(4096))),
        ("with a larger heap", lambda: driver("cuCtxSetLimit", HEAP, ctypes.c_size_t(2**26))),
        ("recorded once more", record_again),
        ("after a second context", shorten_launches),
        ("recorded once more", record_again),
        ("another kernel loaded", load_a_kernel),
        ("after a second context", shorten_launches),
    ):
        work()
        tell(what)
    if given.out is not None:
        given.out.write_text("\n".join([f"{given.name}, {torch.cuda.get_device_name()}", *said]) + "\n")


if __name__ == "__main__":
    main()
