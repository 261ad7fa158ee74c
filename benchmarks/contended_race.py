"""Whether a race on a CPU stays true beside other processes: the quiet ratio must lie in every interval.

    python benchmarks/contended_race.py [--model simple_cnn] [--recipe channels-last]

First the race is held on the machine as it is, then beside processes that do nothing but compute: one, one per core, one that
comes and goes, and one that is tied to the first core. Ends with 1 where an interval does not hold the quiet ratio. On a machine
that is not idle the first figure is no truth, so that the program says so and ends with 0.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import redline
from redline.model.metrics import Metric, Row
from redline.verbs.workspace import Workspace

LOADS: dict[str, list[tuple[float, bool]]] = {
    "quiet": [],
    "one beside it": [(0.0, False)],
    "one per core": [(0.0, False)] * (os.cpu_count() or 1),
    "comes and goes": [(1.5, False)] * (os.cpu_count() or 1),
    "on the first core": [(0.0, True)],
}
"""Each process: seconds of work and of rest in turns (0: no rest), and whether it is tied to a core."""


def burn(period_s: float, is_tied: bool) -> None:
    if is_tied:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    started = time.monotonic()
    while True:
        if period_s and (time.monotonic() - started) % (2 * period_s) > period_s:
            time.sleep(0.01)


@contextmanager
def beside(load: list[tuple[float, bool]]) -> Iterator[None]:
    burners = [multiprocessing.Process(target=burn, args=each, daemon=True) for each in load]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


def raced(asked: argparse.Namespace) -> Row:
    with TemporaryDirectory() as folder, Workspace(history=f"{folder}/history.sqlite") as workspace:
        result = redline.run(
            asked.model,
            recipes=["baseline", asked.recipe],
            device="cpu",
            decide=True,
            workspace=workspace,
        )
    (pair,) = result.table("pairs").rows
    return pair


def ratio_of(pair: Row) -> Metric:
    ratio = pair.metric("ratio")
    assert ratio is not None
    return ratio


def told(pair: Row) -> str:
    ratio = ratio_of(pair)
    interval = f"{ratio.low:.2f} to {ratio.high:.2f}" if ratio.low is not None and ratio.high is not None else "none"
    return f"{ratio.value:.2f}  interval {interval:16} {pair['verdict']:12} {pair['replicates']} replicates"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="simple_cnn")
    parser.add_argument("--recipe", default="channels-last")
    asked = parser.parse_args()
    busy = os.getloadavg()[0]
    missed, truth = 0, None
    for name, load in LOADS.items():
        with beside(load):
            pair = raced(asked)
        ratio = ratio_of(pair)
        truth = truth or ratio.value or 1.0
        holds = (ratio.low or 0.0) <= truth <= (ratio.high or float("inf"))
        missed += not holds
        print(f"{name:18} {told(pair)}{'' if holds else '  MISSES THE QUIET RATIO'}", flush=True)
    if busy > 0.5:
        print(f"the machine was not idle when this began (load {busy:.1f}): the first figure is no truth")
        return 0
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
