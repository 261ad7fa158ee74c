"""How a search spends its budget, on benches with the costs of an H200 and on a busy CPU whose truth is known."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from random import Random

import msgspec
import pytest
from h200_worlds import (
    COMPILED,
    convnext_as_timed,
    convnext_on_an_h200,
    like_an_h200,
    regnet_as_timed,
    switches,
    trained_on_an_h200,
    without_blocks,
)
from worlds.recipes import Fault, RecipeTruth
from worlds.tuning import loss_of, simulated_facts, tune_simulated

from redline.model.protocol import SwitchChoice
from redline.model.record import Capabilities, RunRecord
from redline.model.spec import MeasureSpec, Recipe, RunSpec, WorkloadSpec
from redline.model.work import Facts
from redline.search.decide import Race
from redline.search.observer import NoJournal, Observer
from redline.search.tune.costs import Costs
from redline.search.tune.standings import pair_with
from redline.search.tune.state import FAILED_SHARE, Search
from redline.search.tune.summary import summary_of
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape


def searched(truth: RecipeTruth, budget_s: float = 60.0, seed: int = 1, launches: int = 180, jobs: int = 8) -> Search:
    """Seven seconds pass until the facts are known; the machine has sixteen processors."""
    facts = simulated_facts(truth, launches=launches)
    return tune_simulated(truth, seed, budget_s, jobs=jobs, facts=facts, before_s=7.0)


def convnext(**changes: object) -> RecipeTruth:
    return replace(convnext_on_an_h200(12.0), **changes)  # type: ignore[arg-type]


def that_breaks(*parts: str, after_s: float = 0.0) -> tuple[Fault, ...]:
    return tuple(Fault(switches(part), "build" if not after_s else "compile", after_s) for part in parts)


LONGER = without_blocks(convnext_on_an_h200(20.0))
CONVNEXT, REGNET = convnext_as_timed(), regnet_as_timed()


class TestAnAnswerInTime:
    """The winner has an interval that a person can use, is near the best that can be had, and comes before the budget is over."""

    @pytest.mark.parametrize(
        ("truth", "budget_s", "launches", "has", "lost"),
        [
            pytest.param(convnext_on_an_h200(10.0), 60.0, 180, "compile", 0.15, id="a quick compile in a minute"),
            pytest.param(convnext_on_an_h200(20.0), 60.0, 180, "compile", 0.15, id="a usual one"),
            pytest.param(
                without_blocks(convnext_on_an_h200(25.0)), 60.0, 180, "compile", 0.05, id="longer than expected"
            ),
            pytest.param(trained_on_an_h200(10.0), 60.0, 500, "fused-optimizer", 0.1, id="a training step"),
            pytest.param(trained_on_an_h200(30.0), 60.0, 500, "fused-optimizer", 0.2, id="a slow one"),
            pytest.param(trained_on_an_h200(90.0), 60.0, 1100, "graphs", 0.3, id="no compile fits"),
            pytest.param(
                convnext(failing=that_breaks("channels-last")), 60.0, 180, "compile", 0.15, id="the layout breaks"
            ),
            pytest.param(convnext(failing=that_breaks(*COMPILED)), 60.0, 180, "fp16", 0.05, id="no compiler works"),
            pytest.param(
                convnext(failing=that_breaks(*COMPILED, after_s=1e4)), 300.0, 180, "fp16", 0.05, id="compilers hang"
            ),
            pytest.param(like_an_h200(), 150.0, 180, "compile", 0.05, id="two minutes and a half"),
            pytest.param(like_an_h200(), 300.0, 180, "compile", 0.05, id="five minutes"),
        ],
    )
    def test_is_had_with_the_costs_of_an_h200(
        self, truth: RecipeTruth, budget_s: float, launches: int, has: str, lost: float
    ) -> None:
        search = searched(truth, budget_s, launches=launches)
        winner = summary_of(search.tune, search.records).winner
        assert has in winner.recipe
        assert winner.low is not None
        assert winner.high is not None
        assert winner.high / winner.low <= 1.2
        assert loss_of(search, truth) <= lost
        assert search.tune.seconds <= 1.04 * budget_s
        assert not search.held

    @pytest.mark.parametrize(("truth", "facts"), [CONVNEXT, REGNET])
    def test_is_had_where_searches_ran(self, truth: RecipeTruth, facts: Facts) -> None:
        search = tune_simulated(truth, 1, 60.0, jobs=8, facts=facts, before_s=6.0)
        winner = summary_of(search.tune, search.records).winner
        assert winner.low is not None
        assert winner.low > 5
        assert search.tune.spent.failed <= 1.5 * FAILED_SHARE * 60.0

    def test_a_recipe_that_compiled_long_is_raced_in_processes_that_were_prepared_beside_it(self) -> None:
        search = searched(LONGER)
        raced = [search.records[each] for replicate in search.tune.finals for each in replicate]
        compiled = [record for record in raced if "compile" in str(record.spec.recipe)]
        assert sum(record.prepared.cold_start.compile_cache == "cold" for record in compiled) >= 2
        assert not {trial.record_id for trial in search.tune.trials} & {record.id for record in raced}

    def test_what_was_left_untried_is_told_with_all_that_it_would_have_taken(self) -> None:
        """A recipe fits into what is left, but not with its race: both times are named, or the sentence contradicts itself."""
        search = searched(convnext_on_an_h200(20.0), 40.0, launches=900)
        (noted,) = (each for each in search.tune.notes if each.code == "untried")
        figures = re.search(r"takes about (\d+) s, and the final comparison (\d+) s; (\d+) s are left", str(noted))
        takes_s, race_s, left_s = map(float, figures.groups())
        assert takes_s + race_s > left_s
        assert int(re.search(r"--budget (\d+)s would hold it", str(noted))[1]) > 40

    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_is_had_on_a_busy_cpu(self, seed: int) -> None:
        search = tune_simulated(a_busy_cpu(), seed, 60.0, before_s=8.0)
        winner = summary_of(search.tune, search.records).winner
        assert winner.recipe == "channels-last"
        assert winner.low is not None
        assert search.tune.seconds <= 62.0

    def test_where_no_race_fits_a_quick_recipe_is_timed_all_the_same(self) -> None:
        search = tune_simulated(replace(a_busy_cpu(), build_s=12.0), 1, 60.0, before_s=6.0)
        found = summary_of(search.tune, search.records)
        assert [trial.recipe for trial in search.tune.trials] == ["baseline", "channels-last"]
        assert found.winner is None
        assert found.leader.low is None


def a_busy_cpu() -> RecipeTruth:
    """Two cores that others use too: a trial takes nine seconds, compiling more than there is time for."""
    compiles = Capabilities(compiles=True)
    return RecipeTruth(
        choices=(
            SwitchChoice(switch="channels-last", family="layout"),
            SwitchChoice(switch="compile:freeze", family="compiler", relieves="both", capabilities=compiles),
            SwitchChoice(switch="bf16", family="precision"),
        ),
        device_s=0.1,
        host_s=0.0,
        on_cpu=True,
        effects={"channels-last": -0.3, "compile:freeze": -0.6, "bf16": 2.0},
        host_effects={},
        cold_compile_s=25.0,
        warm_compile_s=6.0,
        build_s=2.0,
        first_use_s={},
    )


class TestWhatIsConcluded:
    @pytest.mark.parametrize(
        ("truth", "without"),
        [
            pytest.param(
                convnext(effects={**convnext().effects, **dict.fromkeys(COMPILED, 0.2)}), COMPILED, id="compiler"
            ),
            pytest.param(
                convnext(effects={**convnext().effects, "fp16": 0.4, "bf16": 0.5}), ("fp16", "bf16"), id="half"
            ),
        ],
    )
    def test_what_slows_the_model_down_is_not_recommended(self, truth: RecipeTruth, without: tuple[str, ...]) -> None:
        search = searched(truth, 90.0)
        winner = summary_of(search.tune, search.records).winner
        assert not set(without) & switches(winner.recipe)

    def test_where_the_baseline_is_the_best_there_is_no_winner(self) -> None:
        base = convnext()
        search = searched(replace(base, effects=dict.fromkeys(base.effects, 0.05), host_s=0.001, host_effects={}))
        found = summary_of(search.tune, search.records)
        assert found.winner is None
        assert found.leader.recipe == "baseline"


class TestWhatIsStarted:
    def test_what_is_quick_goes_before_what_compiles_longer_than_there_is_time_for(self) -> None:
        search = searched(convnext_on_an_h200(20.0), 40.0, launches=900)
        assert {"fp16", "bf16"} & switches(search.tune.trials[1].recipe)
        assert not any("compile" in trial.recipe for trial in search.tune.trials)
        assert any("compile" in str(each) for each in search.tune.notes if each.code == "untried")

    def test_where_the_host_is_in_the_way_the_first_is_recorded(self) -> None:
        search = searched(replace(convnext_on_an_h200(20.0), host_s=0.02), jobs=1)
        assert "graphs" in search.tune.trials[1].recipe.split("+")

    def test_what_compiles_begins_beside_the_baseline(self) -> None:
        search = searched(convnext_on_an_h200(20.0))
        began = {trial.recipe: search.records[trial.record_id].position for trial in search.tune.trials}
        assert began["baseline"] == 0
        assert min(number for recipe, number in began.items() if "compile" in recipe) <= 2

    @pytest.mark.parametrize("facts", [None, "no room"])
    def test_the_baseline_stands_alone_where_a_plain_step_may_not_run_or_memory_holds_no_second(
        self, facts: str | None
    ) -> None:
        truth = convnext_on_an_h200(20.0)
        tight = msgspec.structs.replace(simulated_facts(truth), peak_bytes=100 * 2**30)
        search = tune_simulated(truth, 1, 60.0, jobs=8, facts=tight if facts else None)
        first = search.records[search.tune.trials[0].record_id]
        assert not first.prepared.cold_start.contended


class TestCosts:
    def test_are_learned_from_what_was_compiled(self) -> None:
        """Compiling takes three times what the size of the model suggests: what is compiled next is expected to, too."""
        truth = replace(like_an_h200(), cold_compile_s=45.0)
        search = tune_simulated(truth, 1, 1800.0, facts=simulated_facts(truth))
        costs = Costs(search)
        assert costs.learned_scale == pytest.approx(45.0 / 16.1, rel=0.15)
        new = next(each for each in search.space.recipes if "compile" in each and not costs.is_cached(each))
        assert costs.seconds(new) == pytest.approx(45.0 + 3.5, rel=0.15)
        assert search.tune.compile_scale == costs.learned_scale


class TestIntervals:
    """Of two recipes that differ by a known amount, as processes differ on a real card."""

    @staticmethod
    def raced(ratio: float, process_sd: float, replicates: int, seed: int) -> list[list[RunRecord]]:
        truth = Landscape(
            step_s={"baseline": 0.01, "fp16": 0.01 / ratio}, offset_sigma=process_sd, noise_sigma=0.01, seed=seed
        )
        measure = MeasureSpec(block_seconds=0.1, max_seconds=4.0)
        specs = [
            RunSpec(workload=WorkloadSpec(model="m"), recipe=Recipe.parse(name), measure=measure, device="cuda:0")
            for name in ("baseline", "fp16")
        ]
        race = Race(FakeDoor(truth), NoJournal(), Observer(), Random(seed), only="throughput")
        return [race.run_replicate(specs) for _ in range(replicates)]

    @pytest.mark.parametrize("process_sd", [0.002, 0.01, 0.04])
    @pytest.mark.parametrize("replicates", [2, 3])
    def test_hold_the_truth_and_call_nothing_faster_that_is_not(self, process_sd: float, replicates: int) -> None:
        raced = (self.raced(1.0, process_sd, replicates, seed) for seed in range(60))
        pairs = [pair_with(each, "baseline", "fp16", "throughput") for each in raced]
        assert sum(not pair.low <= 1.0 <= pair.high for pair in pairs) <= 60 * 0.1
        assert sum(pair.verdict == "faster" for pair in pairs) <= 60 * 0.05

    def test_two_replicates_that_agree_decide(self) -> None:
        pair = pair_with(self.raced(2.95, 0.005, 2, 1), "baseline", "fp16", "throughput")
        assert pair.verdict == "faster"
        assert pair.high / pair.low < 1.2
        assert math.isclose(pair.ratio, 2.95, rel_tol=0.03)
