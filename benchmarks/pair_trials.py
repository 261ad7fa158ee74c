"""How often comparisons decide right: equal recipes (false alarms) and a planted difference (power), also beside other processes.

    python benchmarks/pair_trials.py [--trials 300]

A simulated bench with a known truth answers. `run` compares two recipes interleaved in one process each, `run --decide` in fresh
processes until every pair is decided, and `compare` sets three processes of two occasions against each other. A false alarm is a
verdict of faster or slower on recipes that take the same time; an interval misses where it does not hold the true ratio. In one process
the truth of a machine includes the offsets of its processes, which only fresh processes can see, so they are left out there. Ends with 1
where more than 5 % of the verdicts on equal recipes are false (and chance does not explain it).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

from redline.analyze.compare import compare_records
from redline.analyze.pairs import pairs_of, verdict_of
from redline.model.record import RunRecord
from redline.model.spec_table import specs_from_table
from redline.search.decide import decide
from redline.search.observer import NoJournal, Observer
from redline.search.run import measure_together
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape

MACHINES: dict[str, dict[str, Any]] = {
    "card": {"noise_sigma": 0.01, "drift_sigma": 0.003, "noise_rho": 0.3, "offset_sigma": 0.01},
    "shared CPU": {
        "noise_sigma": 0.05, "drift_sigma": 0.01, "noise_rho": 0.5, "offset_sigma": 0.005, "device_kind": "cpu",
    },
    "contended CPU": {
        "noise_sigma": 0.05, "offset_sigma": 0.005, "device_kind": "cpu",
        "others_cores": lambda clock_s: float(clock_s % 3.0 < 0.6), "slowed_by_others": {"baseline": 6.0, "fp16": 0.4},
    },
}  # fmt: skip
PLANTED = 1.10
"""A recipe that is 10 % faster: clearly beyond the band of 3 %, and not beyond all noise."""


def specs(recipes: tuple[str, ...], kind: str) -> list[Any]:
    table = {"model": "net", "batch": 8, "effort": "quick", "device": "cpu" if kind == "cpu" else "cuda:0"}
    return specs_from_table({**table, "recipe": list(recipes)})


def interleaved(door: FakeDoor, kind: str, seed: int) -> tuple[str, float, float]:
    first, other = measure_together(specs(("baseline", "fp16"), kind), door, NoJournal(), seed=seed)
    return compared([first], [other])


def decided(door: FakeDoor, kind: str, seed: int) -> tuple[str, float, float]:
    (pair,) = pairs_of(decide(specs(("baseline", "fp16"), kind), door, Observer(), seed=seed))
    return pair.verdict, pair.low or 0.0, pair.high or math.inf


def occasions(door: FakeDoor, kind: str, seed: int) -> tuple[str, float, float]:
    sides = [
        [measure_together(specs((recipe,), kind), door, NoJournal(), seed=seed)[0] for _ in range(3)]
        for recipe in ("baseline", "fp16")
    ]
    return compared(*sides)


def compared(first: list[RunRecord], other: list[RunRecord]) -> tuple[str, float, float]:
    (found,) = compare_records(first, other).comparisons
    interval: Any = found if isinstance(found.ratio, float | None) else found.ratio  # a struct since 1.0
    low, high = interval.low or 0.0, interval.high or math.inf
    # Noise of a machine is no reason here to leave a verdict out: the interval alone is judged.
    return verdict_of(low, high), low, high


WAYS: dict[str, Callable[[FakeDoor, str, int], tuple[str, float, float]]] = {
    "run": interleaved,
    "run --decide": decided,
    "compare": occasions,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    count = parser.parse_args().trials
    # More false alarms than this come about once in a hundred times at a rate of 5 %.
    most, is_bad = 0.05 * count + 2.33 * math.sqrt(0.05 * 0.95 * count), False
    print(f"{count} trials each      false alarms   intervals that miss 1   power at {PLANTED:g}×   that miss it")
    for machine, truth in MACHINES.items():
        for way, measure in WAYS.items():
            if machine == "contended CPU" and way == "compare":
                continue  # what slowed one occasion only is not in any interval, and the verdict is withheld
            told = []
            for speed in (1.0, PLANTED):
                own = {**truth, **({"offset_sigma": 0.0} if way == "run" else {})}
                verdicts = []
                for seed in range(count):
                    world = Landscape(step_s={"baseline": 0.01, "fp16": 0.01 / speed}, seed=seed, **own)
                    verdicts.append(measure(FakeDoor(world), str(truth.get("device_kind", "cuda")), seed))
                alarms = sum(verdict in ("faster", "slower") for verdict, _, _ in verdicts)
                told += [alarms, sum(not low <= speed <= high for _, low, high in verdicts)]
            is_bad |= told[0] > most
            shares = "".join(f"{each / count:>16.1%}" for each in told)
            print(f"{machine:14} {way:13}{shares}", flush=True)
    return 1 if is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
