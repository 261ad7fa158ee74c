"""How long an isolated worker takes to answer, through the fork door, against a cold interpreter that imports torch.

A worker counts as started when it has answered a message, not when it was forked.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from redline.launch import Door, open_door
from redline.model.protocol import Ask, AskCheck, FailureReply
from redline.model.spec import LaunchSpec

TARGET_S = 0.1
COLD = "import torch, torchvision"

# A question that needs the worker awake and no work: could these no specs run?
PING = Ask(question=AskCheck(specs=()))


def cold_seconds() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", COLD], check=True)
    return time.perf_counter() - started


def worker_seconds(door: Door) -> tuple[float, float]:
    """Until the worker is there, and until it has answered."""
    started = time.perf_counter()
    session = door.open(None)
    opened = time.perf_counter()
    reply = session.ask(PING)
    answered = time.perf_counter()
    session.close()
    if isinstance(reply, FailureReply):
        raise SystemExit(f"the worker failed: {reply.failure.message}")
    return opened - started, answered - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=30)
    parser.add_argument("--cold", type=int, default=3, help="cold starts; the first also warms the disk cache")
    arguments = parser.parse_args()
    cold = [cold_seconds() for _ in range(arguments.cold + 1)][1:]
    door = open_door(LaunchSpec())
    first = worker_seconds(door)[1]
    starts = [worker_seconds(door) for _ in range(arguments.workers)]
    door.close()
    opened, answered = (statistics.median(column) for column in zip(*starts, strict=True))
    rows = [
        ("cold interpreter, import torch", statistics.median(cold), f"{len(cold)} starts"),
        ("first worker, server included", first, "once per desk process"),
        ("worker is there", opened, f"{len(starts)} starts"),
        ("worker has answered", answered, f"target: within {TARGET_S} s"),
    ]
    for name, seconds, note in rows:
        print(f"{name:<32} {seconds:8.3f} s   {note}")
    print(f"{'ratio, cold over answered':<32} {statistics.median(cold) / answered:8.1f} ×")


if __name__ == "__main__":
    main()
