"""A race against running the same recipes one after the other, to the same certainty, in simulated seconds.

    python benchmarks/race_cost.py [--races 60]

Both go on until the interval of the ratio decides (faster, slower or the same within 3 %) or 15 processes each have
run. In sequence: process after process of the one recipe, then of the other, each run as `redline run` does it, and a
Welch interval over the processes' medians, at the confidence that a race has after as many. Machines drift, and their
processes have offsets of their own. Target: fewer seconds, and at most 5 % of equal pairs called different.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from statistics import fmean, median, variance

from redline.analyze.pairs import CONFIDENCE_AFTER, CONFIDENCE_LATER, pairs_of, verdict_of
from redline.analyze.statistics import student_t
from redline.model.record import RunRecord
from redline.model.spec import MeasureSpec, Recipe, RunSpec, WorkloadSpec
from redline.search.decide import decide
from redline.search.observer import NoJournal, Observer
from redline.search.run import measure_together
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape

MACHINES: dict[str, dict[str, object]] = {
    "quiet card": {"noise_sigma": 0.005, "offset_sigma": 0.003, "drift_sigma": 0.001},
    "warm card": {"noise_sigma": 0.01, "offset_sigma": 0.006, "drift_sigma": 0.004, "noise_rho": 0.3},
    "shared CPU": {
        "noise_sigma": 0.05,
        "offset_sigma": 0.005,
        "drift_sigma": 0.01,
        "noise_rho": 0.6,
        "device_kind": "cpu",
    },
}
MOST_PROCESSES = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--races", type=int, default=60)
    given = parser.parse_args()
    print(f"{'machine':<12}{'truth':>7}{'way':>10}{'seconds':>9}{'decided':>9}{'right':>7}{'wrong':>7}")
    for name, machine in MACHINES.items():
        for truth in (1.0, 1.1):
            for way, measure in (("sequence", in_sequence), ("race", by_race)):
                found = [
                    measure(Landscape(step_s={"baseline": 0.02, "fp16": 0.02 / truth}, seed=seed, **machine))
                    for seed in range(given.races)
                ]  # type: ignore[arg-type]
                told = Counter(verdict for verdict, _ in found)
                right = told["same" if truth == 1.0 else "faster"] / len(found)
                decided = 1 - told["inconclusive"] / len(found)
                print(
                    f"{name:<12}{truth:>6.2f}×{way:>10}{fmean(seconds for _, seconds in found):>9.0f}"
                    f"{decided:>9.0%}{right:>7.0%}{decided - right:>7.0%}",
                    flush=True,
                )


def spec_of(recipe: str, effort: str) -> RunSpec:
    return RunSpec(
        workload=WorkloadSpec(model="simulated", batch=32),
        recipe=Recipe.parse(recipe),
        measure=MeasureSpec.for_effort(effort),  # type: ignore[arg-type]
    )


def by_race(landscape: Landscape) -> tuple[str, float]:
    door = FakeDoor(landscape)
    specs = [spec_of(recipe, "quick") for recipe in ("baseline", "fp16")]
    replicates = decide(specs, door, Observer(), seed=landscape.seed)
    return pairs_of(replicates)[0].verdict, door.clock_s


def in_sequence(landscape: Landscape) -> tuple[str, float]:
    """Three processes each at first; then the same again with one more, as someone would who is not sure yet."""
    door = FakeDoor(landscape)
    times: dict[str, list[float]] = {"baseline": [], "fp16": []}
    for processes in range(3, MOST_PROCESSES + 1):
        for recipe, known in times.items():
            while len(known) < processes:
                (record,) = measure_together([spec_of(recipe, "quick")], door, NoJournal())
                known.append(middle_log(record))
        verdict = welch(times["baseline"], times["fp16"])
        if verdict != "inconclusive":
            break
    return verdict, door.clock_s


def middle_log(record: RunRecord) -> float:
    return math.log(median(sample for block in record.blocks if block.kind == "throughput" for sample in block.samples))


def welch(first: list[float], other: list[float]) -> str:
    parts = [variance(values) / len(values) for values in (first, other)]
    degrees = sum(parts) ** 2 / sum(part**2 / (len(first) - 1) for part in parts)
    confidence = CONFIDENCE_AFTER.get(len(first), CONFIDENCE_LATER)
    half = student_t(max(int(degrees), 1), confidence) * math.sqrt(sum(parts))
    mean = fmean(first) - fmean(other)
    return verdict_of(math.exp(mean - half), math.exp(mean + half))


if __name__ == "__main__":
    main()
