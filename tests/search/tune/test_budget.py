"""How short searches spend their budget, from the first trial to the race."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from h200_worlds import (
    COMPILED,
    convnext_as_timed,
    convnext_on_an_h200,
    regnet_as_timed,
    trained_on_an_h200,
    without_blocks,
)
from tuner_stub import GRAPHED, switches
from worlds.recipes import Fault, RecipeTruth
from worlds.tuning import loss_of, simulated_facts, tune_simulated

from redline.model.questions import SwitchChoice
from redline.model.record import Capabilities
from redline.model.work import Facts, LayerShare, OperatorKind, RepeatedBlock
from redline.search.group import Pending
from redline.search.tune.beliefs import Beliefs
from redline.search.tune.flight import Flight
from redline.search.tune.planner import kept_s
from redline.search.tune.result import summary_of
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.trials import Trials
from redline.search.tune.tuner import FAILED_SHARE, Tuner


class TestOneMinute:
    """With the costs of an H200 and sixteen processors: seven seconds until the facts are known, then the search."""

    @pytest.mark.parametrize("compile_s", [10.0, 15.0, 20.0, 25.0])
    def test_is_enough_to_try_a_compiled_recipe_and_to_race_it(self, compile_s: float) -> None:
        truth = convnext_on_an_h200(compile_s)
        tuner = tune_simulated(truth, 1, 60.0, jobs=8, facts=simulated_facts(truth), before_s=7.0)
        winner = summary_of(tuner.tune, tuner.records).winner
        assert winner is not None
        assert "compile" in winner.recipe
        assert winner.low is not None
        assert winner.low > 5
        assert loss_of(tuner, truth) < 0.05, "0.95 of what can be had"
        assert tuner.tune.seconds <= 60.0
        assert tuner.tune.spent.failed <= FAILED_SHARE * 60.0

    @pytest.mark.parametrize("compile_s", [22.0, 25.0, 27.0])
    def test_is_enough_for_a_compile_that_is_expected_to_take_half_of_it(self, compile_s: float) -> None:
        """As Swin-V2 on an H200: 737 operators, and no quick way around compiling all of it."""
        truth = convnext_on_an_h200(compile_s)
        truth = replace(without_blocks(truth), first_use_s={"cudnn-benchmark": 3.0}, build_s=1.5)
        tuner = tune_simulated(truth, 1, 60.0, jobs=8, facts=simulated_facts(truth, launches=737), before_s=3.0)
        winner = summary_of(tuner.tune, tuner.records).winner
        assert winner is not None
        assert "compile" in winner.recipe
        assert loss_of(tuner, truth) < 0.05
        assert tuner.tune.spent.failed <= FAILED_SHARE * 60.0

    @pytest.mark.parametrize("compile_s", [10.0, 15.0, 20.0, 25.0, 30.0])
    def test_is_enough_for_a_compiled_training_step_too(self, compile_s: float) -> None:
        truth = trained_on_an_h200(compile_s)
        truth = replace(truth, choices=truth.choices[:-1])
        tuner = tune_simulated(truth, 1, 60.0, jobs=8, facts=simulated_facts(truth, launches=500), before_s=7.0)
        winner = summary_of(tuner.tune, tuner.records).winner
        assert winner is not None
        assert {"compile", "fused-optimizer"} <= set(winner.recipe.split("+"))
        assert winner.low is not None
        assert loss_of(tuner, truth) < 0.1
        assert tuner.tune.seconds <= 60.0

    @pytest.mark.parametrize(
        ("kinds", "convolutions", "added"),
        [
            ({}, None, set()),
            ({"matmul": 0.4, "elementwise": 0.6}, None, set()),
            ({"matmul": 0.85, "attention": 0.08}, None, {"graphs"}),
            ({"convolution": 0.9}, LayerShare(calls=6, share=0.9), {"graphs", "cudnn-benchmark"}),
            ({"convolution": 0.9}, LayerShare(calls=60, share=0.9), {"graphs"}),
            ({"convolution": 0.9}, LayerShare(calls=60, kinds=50, share=0.9), {"graphs"}),
            ({"convolution": 0.9}, LayerShare(calls=60, kinds=26, share=0.9), {"graphs", "cudnn-benchmark"}),
            ({"matmul": 0.9}, LayerShare(calls=6, share=0.1), {"graphs"}),
        ],
    )
    def test_what_is_compiled_has_all_that_is_quick_to_add(
        self, kinds: dict[OperatorKind, float], convolutions: LayerShare | None, added: set[str]
    ) -> None:
        """The host needs a quarter of a step in strict fp32, and more than that once products are six times as fast."""
        truth = replace(trained_on_an_h200(20.0), device_s=0.08, host_s=0.018, first_use_s={})
        facts = msgspec.structs.replace(
            simulated_facts(truth), kinds=kinds, layers={} if convolutions is None else {"convolution": convolutions}
        )
        tuner = tune_simulated(truth, 1, 60.0, jobs=8, facts=facts, before_s=7.0)
        first = next(trial.recipe for trial in tuner.tune.trials if "compile" in trial.recipe.split("+"))
        assert set(first.split("+")) & {"graphs", "cudnn-benchmark"} == added

    @pytest.mark.parametrize(("calls", "kinds", "is_added"), [(20, 11, True), (53, 23, False)])
    def test_a_training_step_of_few_convolutions_is_tuned_while_it_compiles(
        self, calls: int, kinds: int, is_added: bool
    ) -> None:
        truth = replace(trained_on_an_h200(20.0), task="train", first_use_s={})
        facts = msgspec.structs.replace(
            simulated_facts(truth), layers={"convolution": LayerShare(calls=calls, kinds=kinds, share=0.8)}
        )
        tuner = tune_simulated(truth, 1, 60.0, jobs=8, facts=facts, before_s=7.0)
        first = next(trial.recipe for trial in tuner.tune.trials if "compile" in trial.recipe.split("+"))
        assert ("cudnn-benchmark" in first.split("+")) is is_added

    @pytest.mark.parametrize("compile_s", [8.0, 20.0])
    def test_a_compiled_recipe_is_not_begun_again_without_its_graph(self, compile_s: float) -> None:
        """The facts hold the host for slow and the timed baseline does not: both forms were taken for the safe one, in turn."""
        truth = replace(trained_on_an_h200(compile_s), device_s=0.04, host_s=0.002, first_use_s={})
        facts = msgspec.structs.replace(simulated_facts(truth), host_s=0.02)
        tuner = tune_simulated(truth, 1, 60.0, jobs=8, facts=facts, before_s=7.0)
        begun = [each.recipe for each in (*tuner.tune.trials, *tuner.tune.given_up)]
        assert "amp+channels-last+compile+fused-optimizer" not in begun
        assert "compile:regional" in str(begun)

    def test_what_was_given_up_is_not_begun_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begun: list[Switches] = []
        start = Trials.start

        def noted(trials: Trials, each: Switches, why: str, twins: Any = ()) -> None:
            begun.append(each)
            start(trials, each, why, twins)

        monkeypatch.setattr(Trials, "start", noted)
        cancelled: list[Switches] = []

        def cancel_one(tuner: Tuner, beliefs: Beliefs, trials: Trials) -> list[Flight]:
            found = [] if cancelled else [each for each in trials.flights if each.switches != BASELINE][:1]
            cancelled.extend(each.switches for each in found)
            return found

        monkeypatch.setattr("redline.search.tune.loop.without_prospect", cancel_one)
        truth = trained_on_an_h200(20.0)
        tune_simulated(truth, 1, 60.0, jobs=8, facts=simulated_facts(truth), before_s=7.0)
        assert begun.count(cancelled[0]) == 1

    def test_what_has_been_compiled_is_waited_for(self) -> None:
        """However long that took: what is left takes as long as with any other recipe."""
        truth = trained_on_an_h200(20.0)
        tuner = tune_simulated(truth, 1, 60.0, jobs=8, facts=simulated_facts(truth), before_s=7.0)
        tuner.budget_s += 80.0
        slow, pending = frozenset({"amp", "compile:max-autotune"}), cast(Pending, SimpleNamespace(stage="compile"))
        flight = Flight(slow, pending, started_s=tuner.clock() - 40.0)
        trials = cast(Trials, SimpleNamespace(flights=[flight], in_flight=[slow], idle_s=40.0))
        beliefs = Beliefs(tuner.space, on_cpu=False, host_is_seen=True)
        assert kept_s(tuner, beliefs, trials) >= tuner.left_s
        pending.stage = "numerics"
        assert kept_s(tuner, beliefs, trials) < tuner.left_s

    @pytest.mark.parametrize("compile_s", [33.6, 33.8, 34.0, 34.2])
    def test_what_is_compiled_while_it_is_waited_for_is_not_given_up_either(
        self, compile_s: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given_up: list[str] = []

        def note_stages(trials: Trials) -> None:
            given_up.extend(flight.pending.stage for flight in trials.flights)
            _give_up(trials)

        _give_up = Trials._give_up
        monkeypatch.setattr(Trials, "_give_up", note_stages)
        truth = trained_on_an_h200(compile_s)
        truth = replace(truth, choices=truth.choices[:-1])
        tune_simulated(truth, 1, 60.0, jobs=8, facts=simulated_facts(truth, launches=500), before_s=7.0)
        assert set(given_up) <= {"build", "compile"}

    @pytest.mark.parametrize("seed", [1, 2])
    def test_what_compiles_long_is_raced_without_being_opened_again(self, seed: int) -> None:
        """Twenty-five seconds where fifteen were expected, and no blocks that repeat: its race is prepared beside its trial."""
        truth = without_blocks(convnext_on_an_h200(25.0))
        tuner = tune_simulated(truth, seed, 60.0, jobs=8, facts=simulated_facts(truth), before_s=7.0)
        winner = summary_of(tuner.tune, tuner.records).winner
        assert winner is not None
        assert "compile" in winner.recipe
        assert winner.low is not None
        assert winner.low > 5
        assert loss_of(tuner, truth) < 0.05
        assert tuner.tune.seconds <= 60.0
        raced = [tuner.records[each] for replicate in tuner.tune.finals for each in replicate]
        assert len({record.id for record in raced}) == len(raced) == 4
        assert tuner.twins == []

    def test_the_slowest_of_what_is_safe_begins_with_the_baseline(self) -> None:
        truth = convnext_on_an_h200(20.0)
        tuner = tune_simulated(truth, 1, 60.0, jobs=3, facts=simulated_facts(truth), before_s=7.0)
        began = {trial.recipe: tuner.records[trial.record_id].position for trial in tuner.tune.trials}
        assert began["baseline"] == 0
        assert min(number for recipe, number in began.items() if "compile" in recipe) == 1

    def test_is_enough_too_where_the_layout_breaks_and_nothing_is_prepared_with_it_any_longer(self) -> None:
        broken = (Fault(frozenset({"channels-last"}), "build"),)
        truth = replace(convnext_on_an_h200(15.0), failing=broken)
        tuner = tune_simulated(truth, 1, 60.0, jobs=8, facts=simulated_facts(truth), before_s=7.0)
        winner = summary_of(tuner.tune, tuner.records).winner
        assert winner is not None
        assert "compile" in winner.recipe
        assert sum("channels-last" in trial.recipe for trial in tuner.tune.trials) == 1
        assert tuner.tune.spent.failed <= FAILED_SHARE * 60.0

    def test_a_model_whose_plain_step_was_not_seen_to_run_is_tried_by_itself_first(self) -> None:
        truth = convnext_on_an_h200(20.0)
        tuner = tune_simulated(truth, 1, 60.0, jobs=8)
        first = tuner.records[tuner.tune.trials[0].record_id]
        assert first.prepared is not None
        assert not first.prepared.cold_start.contended

    def test_one_after_the_other_where_memory_holds_no_second(self) -> None:
        truth = convnext_on_an_h200(15.0)
        tight = msgspec.structs.replace(simulated_facts(truth), peak_bytes=100 * 2**30)
        tuner = tune_simulated(truth, 1, 60.0, jobs=8, facts=tight)
        first = tuner.records[tuner.tune.trials[0].record_id]
        assert first.prepared is not None
        assert not first.prepared.cold_start.contended


class TestWhatAMinuteConcludes:
    """The same costs; models on which what usually pays does not."""

    @staticmethod
    def tuned(truth: RecipeTruth, launches: int = 200, blocks: RepeatedBlock | None = None) -> Tuner:
        facts = msgspec.structs.replace(simulated_facts(truth, launches=launches), blocks=blocks)
        return tune_simulated(truth, 1, 60.0, jobs=8, facts=facts, before_s=7.0)

    def test_where_no_compile_fits_the_best_without_one_has_its_interval_and_the_rest_is_named(self) -> None:
        tuner = self.tuned(without_blocks(trained_on_an_h200(90.0)), launches=1100)
        winner = summary_of(tuner.tune, tuner.records).winner
        assert winner is not None
        assert {"amp", "channels-last", "fused-optimizer", "graphs", "cudnn-benchmark"} <= switches(winner.recipe)
        assert len(tuner.tune.finals) == 3
        assert winner.low is not None
        assert winner.low > 0.9 * winner.ratio
        assert tuner.tune.spent.failed <= FAILED_SHARE * 60.0
        assert any("compile" in each.recipe for each in tuner.tune.untried)
        assert all(each.budget_s is not None and each.budget_s > 60.0 for each in tuner.tune.untried)

    def test_a_compiler_that_slows_the_model_down_is_not_recommended(self) -> None:
        truth = convnext_on_an_h200(12.0)
        truth = replace(truth, effects=truth.effects | dict.fromkeys(COMPILED, 0.2))
        tuner = self.tuned(truth)
        assert loss_of(tuner, truth) < 0.03
        assert len(tuner.tune.finals) == 3

    def test_nor_is_a_slow_half_precision(self) -> None:
        truth = convnext_on_an_h200(12.0)
        truth = replace(truth, effects=truth.effects | {"fp16": 0.4, "bf16": 0.5})
        tuner = self.tuned(truth)
        winner = summary_of(tuner.tune, tuner.records).winner
        assert winner is not None
        assert not {"fp16", "bf16"} & switches(winner.recipe)
        assert loss_of(tuner, truth) < 0.2

    def test_a_model_that_cannot_be_captured_costs_little_and_gets_the_rest(self) -> None:
        graphed = [Fault(frozenset({each}), "build") for each in ("graphs", *GRAPHED)]
        truth = replace(trained_on_an_h200(12.0), failing=tuple(graphed))
        tuner = self.tuned(truth, launches=300)
        winner = summary_of(tuner.tune, tuner.records).winner
        assert winner is not None
        assert winner.low is not None
        assert "amp" in winner.recipe
        assert tuner.tune.spent.failed <= FAILED_SHARE * 60.0

    def test_where_the_baseline_is_the_best_there_is_no_winner(self) -> None:
        truth = convnext_on_an_h200(12.0)
        slower = dict.fromkeys(truth.effects, 0.05)
        truth = replace(truth, effects=slower, host_s=0.001, host_effects={})
        tuner = self.tuned(truth)
        found = summary_of(tuner.tune, tuner.records)
        assert found.winner is None
        assert found.leader is not None
        assert found.leader.recipe == "baseline"


class TestAsTimedOnAnH200:
    """Searches of a minute that once ended with the third best, or spent a third of it on a compile that was given up."""

    @pytest.mark.parametrize("seed", [1, 2])
    def test_the_compiled_recipe_is_found_and_raced(self, seed: int) -> None:
        truth, facts = convnext_as_timed()
        tuner = tune_simulated(truth, seed, 60.0, jobs=8, facts=facts, before_s=5.6)
        winner = summary_of(tuner.tune, tuner.records).winner
        assert winner is not None
        assert "compile" in winner.recipe
        assert winner.low is not None
        assert winner.low > 5
        assert loss_of(tuner, truth) < 0.05
        assert tuner.tune.seconds <= 60.0
        assert tuner.tune.spent.failed <= FAILED_SHARE * 60.0

    def test_what_cannot_be_ready_is_not_begun(self) -> None:
        truth, facts = regnet_as_timed()
        tuner = tune_simulated(without_blocks(truth), 1, 60.0, jobs=8, facts=facts, before_s=6.0)
        winner = summary_of(tuner.tune, tuner.records).winner
        assert winner is not None
        assert winner.low is not None
        assert {"amp", "channels-last", "fused-optimizer", "graphs"} <= switches(winner.recipe)
        assert not any("compile" in trial.recipe for trial in tuner.tune.trials)
        assert not any("compile" in switch for recipe in tuner.given_up for switch in recipe)
        assert tuner.tune.spent.failed <= FAILED_SHARE * 60.0

    def test_its_blocks_are_compiled_by_several_workers_in_time_for_the_race(self) -> None:
        truth, facts = regnet_as_timed()
        tuner = tune_simulated(truth, 1, 60.0, jobs=8, facts=facts, before_s=6.0)
        winner = summary_of(tuner.tune, tuner.records).winner
        assert winner is not None
        assert "compile:regional" in switches(winner.recipe)
        assert winner.compile_is_shared
        assert winner.low is not None
        assert len(tuner.tune.finals) >= 2
        assert tuner.tune.seconds <= 60.0
        assert tuner.tune.spent.failed <= FAILED_SHARE * 60.0

    def test_the_process_on_trial_goes_on_into_the_race(self) -> None:
        truth, facts = convnext_as_timed()
        truth = replace(truth, cold_compile_s=30.0, warm_compile_s=9.0)
        tuner = tune_simulated(truth, 1, 60.0, jobs=8, facts=facts, before_s=5.6)
        raced = [tuner.records[each] for replicate in tuner.tune.finals for each in replicate]
        compiled = [record for record in raced if "compile" in str(record.spec.recipe)]
        assert [sum(each.code == "timed-before" for each in record.notes) for record in compiled].count(1) == 1
        assert len(compiled) == 2
        on_trial = {trial.record_id for trial in tuner.tune.trials}
        assert not on_trial & {record.id for record in raced}
        assert tuner.twins == []


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


def test_what_was_left_untried_is_told_with_all_that_it_would_have_taken() -> None:
    """A recipe fits into what is left, but not with its race: both times are named, or the sentence contradicts itself."""
    tuner = tune_simulated(a_busy_cpu(), 1, 60.0, before_s=8.0)
    (noted,) = (each for each in tuner.tune.notes if each.code == "untried")
    told = re.search(r"takes about (\d+) s, and the final comparison (\d+) s; (\d+) s are left", str(noted))
    assert told is not None
    takes_s, race_s, left_s = map(float, told.groups())
    assert takes_s == pytest.approx(tuner.tune.untried[0].cost_s, abs=0.5)
    assert takes_s + race_s > left_s


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_minute_on_a_busy_cpu_ends_with_an_interval(seed: int) -> None:
    tuner = tune_simulated(a_busy_cpu(), seed, 60.0, before_s=8.0)
    winner = summary_of(tuner.tune, tuner.records).winner
    assert winner is not None
    assert winner.recipe == "channels-last"
    assert winner.low is not None
    assert winner.low > 1
    assert tuner.tune.seconds <= 66.0


def test_where_no_race_fits_a_safe_recipe_is_timed_all_the_same() -> None:
    truth = replace(a_busy_cpu(), build_s=12.0)
    tuner = tune_simulated(truth, 1, 60.0, before_s=6.0)
    found = summary_of(tuner.tune, tuner.records)
    assert [trial.recipe for trial in tuner.tune.trials] == ["baseline", "channels-last"]
    assert found.winner is None
    assert found.leader is not None
    assert found.leader.low is None
    assert tuner.tune.seconds <= 60.0


@pytest.mark.parametrize(("compile_s", "tried"), [(12.0, ["baseline", "compile:freeze"]), (40.0, ["baseline"])])
def test_so_is_one_that_compiles_where_that_is_likely_to_end(compile_s: float, tried: list[str]) -> None:
    busy = a_busy_cpu()
    truth = replace(busy, choices=busy.choices[1:], build_s=10.0, cold_compile_s=compile_s)
    facts = Facts(launches=20 if compile_s < 20 else 300)
    tuner = tune_simulated(truth, 1, 60.0, facts=facts, before_s=6.0)
    assert [trial.recipe for trial in tuner.tune.trials] == tried
    assert not tuner.given_up
    assert tuner.tune.seconds <= 60.0
