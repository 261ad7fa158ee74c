"""Finding the largest batch: Redline's search against a bisecting one, on curves whose truth is known.

    python benchmarks/batch_finder.py [--curves 200] [--max-memory 16GiB]

Target: 97 % of the truth in 8 trials with one OOM at most. `python tools/gpu/check.py batch` does the same on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from random import Random
from statistics import mean

from worlds.memory import CURVES, MemoryOf, largest_batch

from redline.model.spec import RunSpec, WorkloadSpec
from redline.model.units import parse_bytes
from redline.search.batch import MAX_TRIALS, Room, Tried, next_batch

Finder = Callable[[MemoryOf, int], tuple[int, int, int]]
"""From a curve and a capacity to the batch found, the trials and the OOMs among them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--curves", type=int, default=200, help="of each kind")
    parser.add_argument("--max-memory", default="16GiB")
    given = parser.parse_args()
    simulated(given.curves, parse_bytes(given.max_memory))


def simulated(curves: int, capacity: int) -> None:
    print(
        f"{'curve':<20}{'finder':<10}{'≥ 97 %':>8}{'worst':>8}{'trials':>8}{'most':>6}{'OOMs':>7}{'≤ 1 OOM':>9}{'all kept':>10}"
    )
    for kind, draw in CURVES.items():
        count = min(curves, 25) if kind == "caching allocator" else curves
        for name, finder in (("redline", redline_finder), ("bisecting", bisecting_finder)):
            chance = Random(1)
            report(kind, name, [judge(draw(chance, capacity), capacity, finder) for _ in range(count)])


def judge(memory: MemoryOf, capacity: int, finder: Finder) -> tuple[float, int, int] | None:
    truth = largest_batch(memory, spec_of, capacity)
    if not truth:
        return None
    found, trials, ooms = finder(memory, capacity)
    # Of few, the next smaller whole number is as near as can be asked.
    return (found + (1 if truth < 34 and found < truth else 0)) / truth, trials, ooms


def report(kind: str, name: str, judged: list[tuple[float, int, int] | None]) -> None:
    results = [result for result in judged if result is not None]
    near = mean(share >= 0.97 for share, _, _ in results)
    kept = mean(share >= 0.97 and trials <= MAX_TRIALS and ooms <= 1 for share, trials, ooms in results)
    worst, trials = min(share for share, _, _ in results), [trials for _, trials, _ in results]
    ooms = [ooms for _, _, ooms in results]
    print(
        f"{kind:<20}{name:<10}{near:>8.0%}{worst:>8.3f}{mean(trials):>8.1f}{max(trials):>6}{mean(ooms):>7.2f}"
        f"{mean(number <= 1 for number in ooms):>9.0%}{kept:>10.0%}",
        flush=True,
    )


def redline_finder(memory: MemoryOf, capacity: int) -> tuple[int, int, int]:
    tried: list[Tried] = []
    room = Room(capacity_bytes=capacity, resident_bytes=memory(spec_of(8)).resident)
    while len(tried) < MAX_TRIALS and (batch := next_batch(tried, room)) is not None:
        needed = memory(spec_of(batch)).needed
        tried.append(Tried(batch=batch, needed_bytes=needed if needed <= capacity else None))
    fitting = [trial.batch for trial in tried if trial.needed_bytes is not None]
    return max(fitting, default=0), len(tried), len(tried) - len(fitting)


def bisecting_finder(memory: MemoryOf, capacity: int) -> tuple[int, int, int]:
    """As trainers do: double from 2 until it breaks, then halve the gap, 25 trials at most."""
    low, high, trials, ooms, batch = 0, None, 0, 0, 2
    while trials < 25 and (high is None or high - low > 1):
        trials += 1
        if memory(spec_of(batch)).needed <= capacity:
            low = batch
        else:
            high, ooms = batch, ooms + 1
        batch = 2 * low if high is None else (low + high) // 2
    return low, trials, ooms


def spec_of(batch: int) -> RunSpec:
    return RunSpec(workload=WorkloadSpec(model="simulated", batch=batch))


if __name__ == "__main__":
    main()
