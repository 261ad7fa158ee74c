"""This is the same program as other people's traces show it: what stands around the steps must not change what is found in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kineto import GEMM, Time
from troubles import LOADER, Rank

EPOCH_NS = 1_763_000_000_000_000_000
AMD_GEMM = "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI16x16x16x1_SN_1LDSB0_AFC1_AFEM1"
AMD_CALLS = {
    "cudaLaunchKernel": "hipLaunchKernel",
    "cudaMemcpyAsync": "hipMemcpyAsync",
    "cudaStreamSynchronize": "hipStreamSynchronize",
    "cudaDeviceSynchronize": "hipDeviceSynchronize",
    "cudaGraphLaunch": "hipGraphLaunch",
}

Dress = Callable[[Rank], None]


def as_it_is(rank: Rank) -> None:
    """Nothing is changed."""


def gaps_between_steps(rank: Rank) -> None:
    """Marks of steps end before the steps do."""
    marks = [event for event in rank.maker.events if event["name"].startswith("ProfilerStep")]
    for mark in marks[:-1]:
        mark["dur"] = Time(int(mark["dur"].nanoseconds * 0.93))


def on_amd(rank: Rank) -> None:
    """Names as ROCm writes them, and no operator on the kernels."""
    rank.maker.gpu("AMD Instinct MI300X")
    pageable = {
        event["args"]["correlation"] for event in rank.maker.events if "Pageable" in event["name"]
    }  # these block on ROCm by another call
    for event in rank.maker.events:
        args: dict[str, Any] = event["args"]
        if event["cat"] == "cuda_runtime":
            blocks = args.get("correlation") in pageable
            event["name"] = "hipMemcpyWithStream" if blocks else AMD_CALLS.get(event["name"], event["name"])
        elif event["cat"] in ("kernel", "gpu_memcpy"):
            args.pop("External id", None)
            args["stream"] = 0 if args["stream"] == 7 else args["stream"]
            event["name"] = AMD_GEMM if event["name"] == GEMM else event["name"]


def second_process(rank: Rank) -> None:
    """There is another process in the file, which decodes images all the time."""
    for index in range(200):
        begin, lasts = index * rank.wall_ns // 200, rank.wall_ns // 220
        rank.maker.event(
            "X", "cpu_op", "aten::stack", begin, lasts, pid=4242, tid=4242, args={"External id": index + 1}
        )


def watchdog(rank: Rank) -> None:
    """There are threads that ask for events and wait for the device, and launch nothing."""
    for index in range(100):
        rank.maker.call("cudaEventQuery", index * rank.wall_ns // 100, 3000, thread=888)
    rank.maker.call("cudaEventSynchronize", 1000, rank.wall_ns - 5000, thread=889)
    rank.maker.frame("threading.py(1002): _bootstrap", 0, rank.wall_ns, thread=889)


def loader_in_a_thread(rank: Rank) -> None:
    """A loader that fetches ahead beside the steps, which do not wait for it."""
    for index in range(5):
        rank.maker.annotation(LOADER, index * rank.wall_ns // 5, rank.wall_ns // 6, thread=777)
    for index in range(50):
        rank.maker.operator("aten::stack", index * rank.wall_ns // 50, rank.wall_ns // 60, thread=777)


def out_of_order(rank: Rank) -> None:
    random.Random(1).shuffle(rank.maker.events)


def since_1970(rank: Rank) -> None:
    """Times are blurred by floats."""
    for event in rank.maker.events:
        event["ts"] = Time(event["ts"].nanoseconds + EPOCH_NS - rank.maker.base_ns)


def with_stacks(rank: Rank) -> None:
    for event in list(rank.maker.events):
        if event["name"].startswith("ProfilerStep"):
            begin, lasts = event["ts"].nanoseconds - rank.maker.base_ns, event["dur"].nanoseconds
            rank.maker.frame("train.py(10): train_one_step", begin, lasts)
            rank.maker.frame("<built-in method run>", begin, lasts)


DRESSES: dict[str, Dress] = {
    dress.__name__.replace("_", " "): dress
    for dress in (
        as_it_is, gaps_between_steps, on_amd, second_process, watchdog, loader_in_a_thread, out_of_order, since_1970,
        with_stacks,
    )
}  # fmt: skip
