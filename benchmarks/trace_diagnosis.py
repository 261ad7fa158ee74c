"""Does the first finding name the larger trouble, and is its bound never below what mending it brings?

Simulates training steps with twelve kinds of trouble (tests/troubles.py), each alone and in pairs, in several sizes. The
same program without the trouble says what it costs. A pair counts where one trouble costs clearly more than the other.

    python benchmarks/trace_diagnosis.py [--seeds 3] [--verbose]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from troubles import CODES, Program, run

from redline.analyze.profile import profile_of
from redline.trace.decode import read_traces

LEAST_SHARE = 0.03
"""A trouble that costs less of the time is none."""
CLEARLY = 1.5
"""One of two costs so many times as much as the other."""
SIZES = (0.15, 0.35, 0.8)
TARGET = 0.95


@dataclass(frozen=True)
class Verdict:
    program: Program
    larger: str
    gain: float
    """How many times faster the steps are without it."""
    first: str
    bound: float | None
    """Of the finding that names the larger trouble; None where there is none."""
    listed: tuple[str, ...]

    @property
    def is_named_first(self) -> bool:
        return self.first in CODES[self.larger]

    @property
    def is_bounded(self) -> bool:
        return self.bound is None or self.bound >= self.gain * (1 - 1e-9)

    def __str__(self) -> str:
        named = " + ".join(f"{name} {size:g}" for name, size in self.program.troubles.items())
        bound = "none" if self.bound is None else f"{self.bound:.3f}"
        return f"{named} (seed {self.program.seed}): {self.larger} {self.gain:.3f}×, bound {bound}; found {self.listed}"


def programs(seeds: int) -> Iterator[Program]:
    for seed in range(seeds):
        for trouble in CODES:
            for size in SIZES:
                yield Program(seed, {trouble: size}, _ranks(trouble))
        for one, other in combinations(CODES, 2):
            for sizes in ((0.15, 0.5), (0.5, 0.15), (0.3, 0.3), (0.8, 0.3), (0.3, 0.8)):
                yield Program(seed, dict(zip((one, other), sizes, strict=True)), _ranks(one, other))


def _ranks(*troubles: str) -> int:
    return 2 if "straggler" in troubles else 1


def judged(program: Program, folder: Path) -> Verdict | None:
    """None where no trouble costs clearly more than the others."""
    whole = run(program)
    costs = {trouble: whole.wall_ns - run(program.without(trouble)).wall_ns for trouble in program.troubles}
    ranked = sorted(costs, key=lambda trouble: -costs[trouble])
    if costs[ranked[0]] < LEAST_SHARE * whole.wall_ns:
        return None
    if len(ranked) > 1 and costs[ranked[0]] < CLEARLY * costs[ranked[1]]:
        return None
    findings = profile_of(read_traces(whole.write(folder))).findings
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
    parser.add_argument("--verbose", action="store_true", help="print every case that is not as it should be")
    given = parser.parse_args()
    total: Counter[str] = Counter()
    right: Counter[str] = Counter()
    loose: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="redline-diagnosis-") as folder:
        for program in programs(given.seeds):
            found = judged(program, Path(folder))
            if found is None:
                continue
            total[found.larger] += 1
            right[found.larger] += found.is_named_first
            loose[found.larger] += not found.is_bounded
            if given.verbose and not (found.is_named_first and found.is_bounded):
                print(("wrong " if not found.is_named_first else "bound ") + str(found), flush=True)
    print(f"{'larger trouble':<24} {'cases':>6} {'named first':>12} {'bound too low':>14}")
    for trouble in CODES:
        if total[trouble]:
            share = right[trouble] / total[trouble]
            print(f"{trouble:<24} {total[trouble]:>6} {share:>11.0%} {loose[trouble]:>14}")
    share = right.total() / max(total.total(), 1)
    print(f"{'all':<24} {total.total():>6} {share:>11.1%} {loose.total():>14}   target: ≥ {TARGET:.0%} and 0")
    sys.exit(0 if share >= TARGET and not loose.total() else 1)


if __name__ == "__main__":
    main()
