"""The tuner of today on searches that were recorded on a real card, in simulated seconds.

    python benchmarks/tune_replay.py [--records FILE] [--budget 60s] [--draws 1] [--only NAME]

`worlds.recorded` makes a world of each search of `docs/results/h200/records.redline.gz`: times of recipes, what preparing
and compiling took, how far processes lay apart. Each is searched as it was recorded, with compiling that takes half, twice and
four times as long, with a switch that breaks, and with other winners: draws of what the records leave open.

`of best` is the speed of the answer over that of the fastest recipe that a search of this length could have had: prepared
alone after the start, and raced. Target: 0.95 with an interval, no more seconds than the budget, a tenth of them lost on what
fails or is given up. In a world where nothing is faster than the baseline, there is no winner, and that is right. The last line
tells what planning itself takes in real seconds, which the simulated ones leave out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

from worlds.recipes import Fault
from worlds.recorded import Recorded, RecordedTruth, recorded_searches
from worlds.tuning import tune_simulated

from redline.model.units import parse_seconds
from redline.search.tune.state import FAILED_SHARE
from redline.search.tune.summary import summary_of

RECORDS = Path(__file__).resolve().parent.parent / "docs" / "results" / "h200" / "records.redline.gz"
JOBS = 8
"""Of a machine with sixteen processors."""
RACED_S = 8.0
"""To time a recipe on trial, and to race it with the baseline."""
ENOUGH = 0.95
NO_GAIN = 1.02
"""Where the best is no faster than this over the baseline, no winner is right."""


@dataclass(frozen=True)
class Row:
    variation: str
    seconds: float
    failed: float
    of_best: float
    has_interval: bool
    winner: str
    planning_s: float
    """Real seconds of the whole replay: what the search itself takes beside all that it asks for."""

    def misses(self, budget_s: float) -> list[str]:
        found = [
            ("slow", self.of_best < ENOUGH),
            ("no interval", not self.has_interval),
            ("late", self.seconds > budget_s),
            ("failed", self.failed > FAILED_SHARE),
        ]
        return [name for name, is_missed in found if is_missed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--budget", default="60s", help="simulated")
    parser.add_argument("--draws", type=int, default=1, help="of each search, with other winners")
    parser.add_argument("--only", default="", help="searches whose name holds this")
    given = parser.parse_args()
    budget_s = parse_seconds(given.budget)
    print(f"{'search':<26}{'variation':<22}{'seconds':>8}{'failed':>8}{'of best':>9}  {'answer':<58} misses")
    rows: list[Row] = []
    for search in recorded_searches(given.records):
        if given.only not in search.name:
            continue
        for variation, truth in variations(search, given.draws):
            row = replayed(search, truth, variation, budget_s)
            rows.append(row)
            interval = "" if row.has_interval else " (no interval)"
            print(
                f"{search.name:<26}{row.variation:<22}{row.seconds:>8.1f}{row.failed:>8.1%}{row.of_best:>9.2f}  "
                f"{row.winner + interval:<58} {', '.join(row.misses(budget_s))}",
                flush=True,
            )
    met = sum(not row.misses(budget_s) for row in rows)
    print(
        f"all: {met} of {len(rows)} miss nothing; worst {min(row.of_best for row in rows):.2f} of the best, "
        f"{max(row.seconds for row in rows):.1f} s, {max(row.failed for row in rows):.1%} failed"
    )
    planning = [row.planning_s / budget_s for row in rows]
    print(
        f"planning takes {median(planning):.1%} of the budget (most {max(planning):.1%}) on this machine, in real seconds"
    )


def variations(search: Recorded, draws: int) -> Iterator[tuple[str, RecordedTruth]]:
    yield "as recorded", search.truth()
    for factor in (0.5, 2.0, 4.0):
        yield f"compile x{factor:g}", slower(search.truth(), factor)
    truth = search.truth()
    present = {choice.switch for choice in truth.choices}
    broken = next(each for each in ("channels-last", "fp16", "amp") if each in present)
    yield f"{broken} breaks", replace(truth, failing=(Fault(frozenset({broken}), "build"),))
    compilers = [choice.switch for choice in truth.choices if choice.switch.partition(":")[0] == "compile"]
    yield "nothing compiles", replace(truth, failing=tuple(Fault(frozenset({each})) for each in compilers))
    for number in range(draws):
        drawn = search.truth(Random(f"{search.name} {number}"))
        # Another model: only its costs are as they were recorded.
        yield f"other winners {number + 1}", replace(drawn, recorded_s={frozenset(): drawn.recorded_s[frozenset()]})


def slower(truth: RecordedTruth, factor: float) -> RecordedTruth:
    return replace(truth, cold_compile_s=factor * truth.cold_compile_s, warm_compile_s=factor * truth.warm_compile_s)


def replayed(search: Recorded, truth: RecordedTruth, variation: str, budget_s: float) -> Row:
    # What was compiled in one world is not in the cache of the next.
    began_s = perf_counter()
    tuner = tune_simulated(truth, 1, budget_s, jobs=JOBS, facts=search.facts, before_s=search.before_s)
    planning_s = perf_counter() - began_s
    summary = summary_of(tuner.tune, tuner.records)
    winner = summary.winner
    recipe = winner.recipe if winner is not None else "baseline"
    fresh = replace(truth, clock=lambda: 0.0)  # nothing is in the cache yet
    reachable = [
        truth.step_s(each)
        for each in tuner.space.recipes
        if truth.is_usable(each)
        and search.before_s + truth.build_s + replace(fresh, _compiled={}, _used=set()).first_call_s(each) + RACED_S
        <= budget_s
    ]
    best_s, baseline_s = min(reachable), truth.step_s(frozenset())
    has_winner = winner is not None and winner.low is not None
    return Row(
        variation=variation,
        seconds=tuner.tune.seconds,
        failed=tuner.tune.spent.failed / budget_s,
        of_best=best_s / truth.step_s(tuner.space.switches_of(recipe)),
        has_interval=has_winner or (winner is None and baseline_s <= NO_GAIN * best_s),
        winner=recipe,
        planning_s=planning_s,
    )


if __name__ == "__main__":
    main()
