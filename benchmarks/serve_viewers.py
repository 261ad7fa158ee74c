"""Do viewers of `redline serve` disturb a measurement? The same model with and without 50 of them, in turns.

    python benchmarks/serve_viewers.py [--viewers 50] [--seconds 60] [--device auto] [--model simple_cnn] [--threads 1]

Each viewer is a connection that receives all events. The difference should stay below 1 %; it is printed with its interval over
pairs of rounds. On a CPU one thread measures, so that the server has a core of its own where there are two.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import redline
from redline.analyze.gate import middle_s
from redline.analyze.statistics import student_t


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0, help="with viewers, and as long without")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="simple_cnn")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REDLINE_STORE"] = str(Path(folder) / "history.sqlite")
        settings = {"device": arguments.device, "threads": arguments.threads}
        measure(arguments.model, settings)  # warm up, and something to look at
        times: dict[bool, list[float]] = {True: [], False: []}
        deadline = time.monotonic() + 2 * arguments.seconds
        while time.monotonic() < deadline or len(times[True]) < 3:
            for watched in (True, False):
                with viewers(arguments.viewers if watched else 0):
                    times[watched].append(measure(arguments.model, settings))
    logs = [math.log(one / other) for one, other in zip(times[True], times[False], strict=True)]
    middle, half = fmean(logs), student_t(len(logs) - 1, 0.95) * stdev(logs) / math.sqrt(len(logs))
    with_, without = (median(times[watched]) for watched in (True, False))
    print(f"step: {with_ * 1e3:.3f} ms with {arguments.viewers} viewers, {without * 1e3:.3f} ms without")
    low, change, high = (math.expm1(each) for each in (middle - half, middle, middle + half))
    spread = stdev(times[False]) / without
    print(
        f"difference {change:+.2%} ({low:+.2%} to {high:+.2%}) over {len(logs)} pairs; {spread:.2%} between rounds without viewers"
    )


def measure(model: str, settings: dict[str, Any]) -> float:
    found = middle_s(redline.run(model, effort="quick", **settings).records)
    assert found is not None
    return found


@contextmanager
def viewers(number: int) -> Iterator[None]:
    """A server with so many that are connected to its events; no server for none."""
    if not number:
        yield
        return
    command = [sys.executable, "-m", "redline", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        found = re.search(r"127\.0\.0\.1:(\d+)", server.stderr.readline())
        assert found is not None
        connected = [socket.create_connection(("127.0.0.1", int(found[1]))) for _ in range(number)]
        for each in connected:
            each.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            threading.Thread(target=_read, args=(each,), daemon=True).start()
        try:
            yield
        finally:
            for each in connected:
                each.close()
            server.terminate()
            server.wait()


def _read(connection: socket.socket) -> None:
    try:
        while connection.recv(65536):
            pass
    except OSError:
        return  # closed when the round is over


if __name__ == "__main__":
    main()
