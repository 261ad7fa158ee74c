"""How searches of two minutes and more spend their budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
from h200_worlds import (
    COMPILED,
    convnext_on_an_h200,
    like_an_h200,
)
from tuner_stub import switches
from worlds.recipes import Fault
from worlds.tuning import loss_of, simulated_facts, tune_simulated

from redline.search.tune.result import summary_of
from redline.search.tune.tuner import FAILED_SHARE


class TestShortSearches:
    @pytest.mark.parametrize("budget_s", [120.0, 150.0, 300.0])
    def test_two_minutes_are_enough_to_try_the_compiler(self, budget_s: float) -> None:
        truth = like_an_h200()
        tuner = tune_simulated(truth, 1, budget_s)
        assert loss_of(tuner, truth) < 0.03
        assert len(tuner.tune.finals) >= 3, "and the last race had its replicates"
        assert tuner.tune.seconds <= budget_s

    def test_what_there_was_no_time_to_tell_is_named(self) -> None:
        short, long = (tune_simulated(like_an_h200(), 1, budget_s) for budget_s in (150.0, 1800.0))
        (noted,) = (each for each in short.tune.notes if each.code == "gains-unknown")
        found = summary_of(short.tune, short.records)
        assert found.winner is not None
        told = {gain.switch for gain in found.switches}
        untold = set(str(noted).partition(": ")[2].partition(";")[0].split(", "))
        assert untold
        assert told | untold == set(found.winner.recipe.split("+"))
        assert not told & untold
        assert not any(each.code == "gains-unknown" for each in long.tune.notes)


class TestFiveMinutes:
    """On a machine where compiling takes far longer than the model's size suggests."""

    @pytest.mark.parametrize("warm_share", [0.27, 0.6])
    def test_are_enough_to_wait_for_a_compile_of_seven_times_what_is_expected_and_to_race_it(
        self, warm_share: float
    ) -> None:
        truth = replace(convnext_on_an_h200(80.0), warm_compile_s=warm_share * 80.0)
        tuner = tune_simulated(truth, 1, 300.0, jobs=8, facts=simulated_facts(truth, launches=180), before_s=7.0)
        winner = summary_of(tuner.tune, tuner.records).winner
        assert winner is not None, "an interval over processes"
        assert switches(winner.recipe) & set(COMPILED)
        assert tuner.tune.spent.failed <= FAILED_SHARE * 300.0
        assert tuner.tune.seconds <= 300.0

    def test_what_each_switch_brings_is_asked_of_processes_that_are_prepared_at_the_same_time(self) -> None:
        """One after the other, there was time for four of the six switches."""
        truth = like_an_h200()
        tuner = tune_simulated(truth, 1, 300.0, jobs=8, facts=simulated_facts(truth), before_s=7.0)
        found = summary_of(tuner.tune, tuner.records)
        assert found.winner is not None
        assert {gain.switch for gain in found.switches} == switches(found.winner.recipe)
        assert not tuner.tune.notes
        assert tuner.tune.seconds <= 300.0

    def test_a_replicate_of_the_last_race_is_prepared_at_the_same_time(self) -> None:
        """A replicate of several compiled recipes takes what opening the slowest takes, not all of them."""
        truth = replace(like_an_h200(), warm_compile_s=6.0)
        alone, beside = (
            tune_simulated(truth, 1, 600.0, jobs=jobs, facts=simulated_facts(truth), before_s=7.0) for jobs in (1, 8)
        )
        assert len(beside.tune.finals) >= 3
        each_s = [tuner.tune.spent.race / len(tuner.tune.finals) for tuner in (alone, beside)]
        assert each_s[1] < 0.6 * each_s[0]

    def test_one_that_hangs_is_given_up_and_the_rest_of_the_search_goes_on(self) -> None:
        truth = replace(
            convnext_on_an_h200(12.0),
            failing=tuple(Fault(frozenset({each}), after_s=10_000.0) for each in COMPILED),
        )
        tuner = tune_simulated(truth, 1, 300.0, jobs=8, facts=simulated_facts(truth, launches=180), before_s=7.0)
        winner = summary_of(tuner.tune, tuner.records).winner
        assert winner is not None
        assert loss_of(tuner, truth) < 0.03
        assert tuner.tune.seconds <= 300.0
