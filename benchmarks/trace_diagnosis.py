"""Does the first finding name the larger trouble, and is its bound never below what mending it brings?

Simulates training steps with nineteen kinds of trouble (tests/troubles.py), each alone, in pairs and three at once, in
several sizes. The same program without the trouble says what it costs. Several troubles count where one costs clearly
more than the others. Then each trouble alone in traces as other people have them (tests/dresses.py): on AMD, with a
second process, threads that wait and load beside the steps, marks with gaps between them, and so on.

    python benchmarks/trace_diagnosis.py [--seeds 3] [--only alone|pairs|three|dressed] [--verbose]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from dresses import DRESSES, Dress, as_it_is
from troubles import CODES, Program, run

LEAST_SHARE = 0.03
"""A trouble that costs less of the time is none."""
CLEARLY = 1.5
"""One of two troubles is clearly larger if it costs so many times as much as the other."""
SIZES = (0.15, 0.35, 0.8)
TARGET = 0.99
TIGHT = 0.95
AS_EXACT = 0.005
"""The gaps between kernels are known to the replay to about this share of the steps."""
THREES = 100


@dataclass(frozen=True)
class Verdict:
    program: Program
    larger: str
    gain: float
    """How many times faster the steps are without it."""
    first: str
    bound: float | None
    """This is the bound of the finding that names the larger trouble; None where there is none."""
    listed: tuple[str, ...]

    @property
    def is_named_first(self) -> bool:
        return self.first in CODES[self.larger]

    @property
    def is_bounded(self) -> bool:
        return self.bound is None or self.bound >= self.gain * (1 - AS_EXACT)

    @property
    def is_tight(self) -> bool:
        """True if the bound is no more than twice the seconds that mending brings."""
        return self.bound is None or 1 - 1 / self.bound <= 2 * (1 - 1 / self.gain)

    def __str__(self) -> str:
        named = " + ".join(f"{name} {size:g}" for name, size in self.program.troubles.items())
        bound = "none" if self.bound is None else f"{self.bound:.3f}"
        return f"{named} (seed {self.program.seed}): {self.larger} {self.gain:.3f}×, bound {bound}; found {self.listed}"


def alone(seed: int) -> Iterator[Program]:
    for trouble in CODES:
        for size in SIZES:
            yield Program(seed, {trouble: size}, _ranks(trouble))


def pairs(seed: int) -> Iterator[Program]:
    for one, other in combinations(CODES, 2):
        for sizes in ((0.15, 0.5), (0.5, 0.15), (0.3, 0.3), (0.8, 0.3), (0.3, 0.8)):
            yield Program(seed, dict(zip((one, other), sizes, strict=True)), _ranks(one, other))


def three(seed: int) -> Iterator[Program]:
    """A sample: all would be thousands."""
    chance = random.Random(seed)
    for _ in range(THREES):
        found = chance.sample(list(CODES), 3)
        yield Program(seed, {trouble: chance.choice((0.1, 0.3, 0.8)) for trouble in found}, _ranks(*found))


def cases(seeds: int, only: str | None) -> Iterator[tuple[str, Program, Dress]]:
    kinds: dict[str, Callable[[int], Iterator[Program]]] = {"alone": alone, "pairs": pairs, "three": three}
    for seed in range(seeds):
        for name, programs in kinds.items():
            if only in (None, name):
                yield from ((name, program, as_it_is) for program in programs(seed))
        if only in (None, "dressed"):
            for name, dress in DRESSES.items():
                yield from ((name, program, dress) for program in alone(seed))


def _ranks(*troubles: str) -> int:
    return 2 if "straggler" in troubles else 1


def judged(program: Program, dress: Dress = as_it_is) -> Verdict | None:
    """Returns None if no trouble is clearly larger than the others."""
    whole = run(program)
    costs = {trouble: whole.wall_ns - run(program.without(trouble)).wall_ns for trouble in program.troubles}
    ranked = sorted(costs, key=lambda trouble: -costs[trouble])
    if costs[ranked[0]] < LEAST_SHARE * whole.wall_ns:
        return None
    if len(ranked) > 1 and costs[ranked[0]] < CLEARLY * costs[ranked[1]]:
        return None
    for rank in whole.ranks:
        dress(rank)
    findings = whole.profile().findings
    naming = [finding.gain_bound for finding in findings if finding.code in CODES[ranked[0]]]
    return Verdict(
        program=program,
        larger=ranked[0],
        gain=whole.wall_ns / (whole.wall_ns - costs[ranked[0]]),
        first=findings[0].code if findings else "",
        bound=max(naming, default=None),
        listed=tuple(f"{finding.code} {finding.gain_bound:.2f}" for finding in findings[:3]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=("alone", "pairs", "three", "dressed"))
    parser.add_argument("--verbose", action="store_true", help="print every case that is not as it should be")
    given = parser.parse_args()
    total: Counter[str] = Counter()
    right: Counter[str] = Counter()
    loose: Counter[str] = Counter()
    tight: Counter[str] = Counter()
    for name, program, dress in cases(given.seeds, given.only):
        found = judged(program, dress)
        if found is None:
            continue
        for column in (name, found.larger):
            tight[column] += found.is_tight
            total[column] += 1
            right[column] += found.is_named_first
            loose[column] += not found.is_bounded
        if given.verbose and not (found.is_named_first and found.is_bounded):
            print(f"{'wrong' if not found.is_named_first else 'bound'} {name}: {found}", flush=True)
    print(f"{'larger trouble':<28} {'cases':>6} {'named first':>12} {'bound too low':>14} {'within 2x':>10}")
    for row in total:
        if row in CODES:
            print(_line(row, total[row], right[row], loose[row], tight[row]))
    kinds = [row for row in total if row not in CODES]
    for row in kinds:
        print(_line(f"[{row}]", total[row], right[row], loose[row], tight[row]))
    count, good, low, near = (sum(counter[row] for row in kinds) for counter in (total, right, loose, tight))
    print(_line("all", count, good, low, near) + f"   target: ≥ {TARGET:.0%}, 0 and ≥ {TIGHT:.0%}")
    sys.exit(0 if good >= TARGET * count and not low and near >= TIGHT * count else 1)


def _line(name: str, count: int, right: int, loose: int, tight: int) -> str:
    whole = max(count, 1)
    return f"{name:<28} {count:>6} {right / whole:>11.1%} {loose:>14} {tight / whole:>10.1%}"


if __name__ == "__main__":
    main()
