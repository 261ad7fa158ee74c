"""What the tuner loses on recipes that break, on simulated spaces whose faults are known.

    python benchmarks/tune_failures.py [--spaces 20] [--budget 5m] [--jobs 1]

Worlds (`worlds.recipes.FAILURES`): switches that fail wherever they stand, in all their variants; pairs that fail together;
switches that no compiler accepts, which shows after compiling; faults that take fifteen to thirty seconds to show; and number
formats that lose their numbers only in the longer check of the last race. The
bench names no culprit in any of them. Target: a tenth of the budget at most goes into recipes that fail and into finding out
why, on average over the worlds of each kind, and nothing that is ruled out is tried again. `over` counts the worlds where it was
more than a tenth: one compile that breaks may take as much by itself.

`lost` is how much slower the winner truly is than the best recipe that runs.
"""

from __future__ import annotations

import argparse
from random import Random
from statistics import mean, median

from worlds.recipes import FAILURES, SHORT_LOSS_PATH, RecipeTruth
from worlds.tuning import loss_of, tune_simulated

from redline.model.units import parse_seconds
from redline.search.tune.lessons import rejection
from redline.search.tune.record import Trial
from redline.search.tune.state import FAILED_SHARE, Search


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spaces", type=int, default=20, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", default="5m", help="simulated")
    parser.add_argument("--jobs", type=int, default=1, help="recipes prepared at the same time")
    given = parser.parse_args()
    budget_s = parse_seconds(given.budget)
    print(
        f"{'world':<22}{'trials':>8}{'failed':>8}{'wasted':>8}{'p90':>8}{'worst':>8}"
        f"{'over':>6}{'again':>7}{'lost: median':>14}{'p90':>8}{'target':>9}"
    )
    wasted: list[float] = []
    missed: list[str] = []
    for name, draw in FAILURES.items():
        rows = []
        for number in range(given.spaces):
            truth = draw(Random(given.seed * 1000 + number))
            rows.append(row_of(tune_simulated(truth, number, budget_s, jobs=given.jobs), truth, budget_s))
        columns = {column: [row[column] for row in rows] for column in rows[0]}
        wasted += columns["wasted"]
        is_met = mean(columns["wasted"]) <= FAILED_SHARE and not sum(columns["again"])
        missed += [] if is_met else [name]
        print(
            f"{name:<22}{mean(columns['trials']):>8.1f}{mean(columns['failed']):>8.1f}"
            f"{mean(columns['wasted']):>8.1%}{p90(columns['wasted']):>8.1%}{max(columns['wasted']):>8.1%}"
            f"{sum(each > FAILED_SHARE for each in columns['wasted']):>6}{sum(columns['again']):>7.0f}"
            f"{median(columns['loss']):>14.1%}{p90(columns['loss']):>8.1%}{'met' if is_met else 'MISSED':>9}",
            flush=True,
        )
    verdict = f"MISSED by {', '.join(missed)}" if missed else "met by each kind"
    print(f"all: {mean(wasted):.1%} of the budget wasted on average; target {FAILED_SHARE:.0%}: {verdict}")


def row_of(tuner: Search, truth: RecipeTruth, budget_s: float) -> dict[str, float]:
    records = [tuner.records[trial.record_id] for trial in tuner.tune.trials]
    return {
        "trials": len(records),
        "failed": sum(record.failure is not None for record in records),
        "wasted": tuner.tune.spent.failed / budget_s,
        "again": tried_again(tuner),
        "loss": loss_of(tuner, truth),
    }


def tried_again(tuner: Search) -> int:
    """Trials of recipes that an earlier lesson had ruled out. What the race taught was learned before the first long check."""
    tune = tuner.tune
    long = [trial for trial in tune.trials if checks_long(tuner, trial)]
    raced = [each for each in tune.lessons if each.overrules_trials and each.recipe not in {one.recipe for one in long}]
    lessons = {lesson.recipe: frozenset(lesson.switches) for lesson in tune.lessons if lesson not in raced}
    learned: list[frozenset[str]] = []
    count = 0
    for trial in tune.trials:
        learned += [frozenset(lesson.switches) for lesson in raced] if trial in long[:1] else []
        switches = tuner.space.switches_of(trial.recipe)
        count += any(part <= switches for part in learned)
        is_rejected = rejection(tuner.records[trial.record_id], tune) is not None
        learned += [lessons[trial.recipe]] if is_rejected and trial.recipe in lessons else []
    return count


def checks_long(tuner: Search, trial: Trial) -> bool:
    return tuner.records[trial.record_id].spec.measure.loss_path_steps > SHORT_LOSS_PATH


def p90(values: list[float]) -> float:
    return sorted(values)[min(int(0.9 * len(values)), len(values) - 1)]


if __name__ == "__main__":
    main()
