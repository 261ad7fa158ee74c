"""How a short budget is spent: what trials will cost, what the end of the search needs, and who goes first."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from worlds.recipes import Fault, RecipeTruth
from worlds.tuning import loss_of, simulated_facts, tune_simulated

from redline.analyze.race import Pair
from redline.note import note
from redline.questions import SwitchChoice
from redline.record import Block, Capabilities, Failure, RunRecord
from redline.search.group import Entry, Pending
from redline.search.tune.beliefs import Beliefs, Estimate
from redline.search.tune.costs import COLD_COMPILE_S, SLOW_PREPARE_S, Candidate, Costs, first_of, most_helpers
from redline.search.tune.finals import _is_enough, _with_time_for_an_interval
from redline.search.tune.flight import Flight, UntilPlaced
from redline.search.tune.loop import _drop_what_the_race_ruled_out
from redline.search.tune.planner import kept_s, without_prospect
from redline.search.tune.record import Earlier, GivenUp, Probe, Spent, Trial, TuneSpec, Untried
from redline.search.tune.reserve import ablation_s, choose_finalists, last_race_s, planned_replicates, race_s
from redline.search.tune.result import summary_of
from redline.search.tune.space import BASELINE, Space, Switches
from redline.search.tune.trials import Trials
from redline.search.tune.tuner import FAILED_SHARE, Tuner
from redline.spec import Recipe, RunSpec, WorkloadSpec
from redline.work import Facts, LayerShare, OperatorKind, RepeatedBlock

GRAPHED = ("compile:reduce-overhead", "compile:max-autotune")
CHOICES = (
    SwitchChoice(switch="amp", family="precision"),
    SwitchChoice(switch="amp-bf16", family="precision"),
    SwitchChoice(switch="tf32", family="tf32"),
    SwitchChoice(switch="channels-last", family="layout"),
    SwitchChoice(switch="compile", family="compiler", relieves="both"),
    SwitchChoice(switch="compile:reduce-overhead", family="compiler", relieves="both"),
    SwitchChoice(switch="compile:max-autotune", family="compiler", relieves="both", is_slow_to_prepare=True),
    SwitchChoice(switch="graphs", family="graphs", relieves="host", excludes=GRAPHED, leaves_program=True),
    SwitchChoice(switch="fused-optimizer", family="optimizer", relieves="both", leaves_program=True),
    SwitchChoice(switch="cudnn-benchmark", family="autotune", leaves_program=True),
    SwitchChoice(switch="compile:regional", family="compiler", relieves="both"),
)


def switches(text: str) -> Switches:
    return frozenset(text.split("+")) - {"baseline"}


def after(*trials: tuple[str, float], times_s: dict[str, float] | None = None, broken: str = "", **given: Any) -> Tuner:
    """A search that has made these trials: recipe and seconds. All were sound but one."""
    sound = [recipe for recipe, _ in trials if recipe != broken]
    estimates = {
        switches(recipe): Estimate(
            recipe=recipe,
            record_id=recipe,
            log_s=math.log((times_s or {}).get(recipe, 1.0)),
            error=0.002,
            host_log_s=None,
            is_host_bound=False,
            cost_s=0.0,
        )
        for recipe in sound
    }
    fastest = min(estimates.values(), key=lambda each: each.log_s, default=None)
    stub = SimpleNamespace(
        space=Space(CHOICES),
        tune=SimpleNamespace(
            facts=given.get("facts"),
            finals=(),
            given_up=given.get("given_up", ()),
            probes=given.get("probes", ()),
            earlier=given.get("earlier"),
            trials=[Trial(recipe=recipe, record_id=recipe, cost_s=seconds) for recipe, seconds in trials],
        ),
        records={
            recipe: SimpleNamespace(spec=SimpleNamespace(recipe=Recipe.parse(recipe)), prepared=True)
            for recipe in sound
        },
        seen=lambda: estimates,
        given_up=set(),
        overdue={},
        may_win=lambda each: True,
        leader=lambda: fastest,
        asked=TuneSpec(spec=RunSpec(workload=WorkloadSpec(model="m"))),
        budget_s=given.get("budget_s", 600.0),
        on_cpu=given.get("on_cpu", False),
        jobs=given.get("jobs", 1),
        has_memory_for=lambda workers: workers <= given.get("workers", 100),
        twins_of=lambda recipe: 0,
    )
    return cast(Tuner, stub)


class TestReplicates:
    TRIED = (("baseline", 3.0), ("amp", 3.0))

    @pytest.mark.parametrize(
        ("facts", "budget_s", "planned"),
        [
            (Facts(synchronises=False), 60.0, 3),
            (Facts(synchronises=True), 60.0, 4),
            (Facts(synchronises=True), 300.0, 5),
            (Facts(synchronises=True), 10.0, 2),
        ],
    )
    def test_more_are_planned_where_the_host_sets_the_pace(self, facts: Facts, budget_s: float, planned: int) -> None:
        """As many as a third of the budget holds."""
        tuner = after(*self.TRIED, facts=facts, budget_s=budget_s, jobs=8)
        assert planned_replicates(tuner, Costs(tuner), [BASELINE, switches("amp")]) == planned

    def test_the_time_for_them_is_kept(self) -> None:
        kept = [
            race_s(tuner, Costs(tuner))
            for waits in (False, True)
            for facts in [Facts(synchronises=waits)]
            for tuner in [after(*self.TRIED, times_s={"amp": 0.5}, facts=facts, budget_s=60.0, jobs=8)]
        ]
        assert kept[1] > kept[0]


class TestHelpers:
    @staticmethod
    def tuner(launches: int = 1000, kinds: int | None = 8, **given: Any) -> Tuner:
        blocks = RepeatedBlock(class_name="Block", count=16, share=0.9, kinds=kinds) if kinds else None
        return after(facts=Facts(launches=launches, blocks=blocks), **{"budget_s": 60.0, "jobs": 8, **given})

    def test_one_for_each_further_kind_on_half_of_the_processors(self) -> None:
        assert most_helpers(self.tuner()) == 4
        assert most_helpers(self.tuner(kinds=3)) == 2
        assert most_helpers(self.tuner(jobs=4)) == 2

    @pytest.mark.parametrize(
        "given", [{"kinds": 1}, {"kinds": None}, {"launches": 300}, {"budget_s": 300.0}, {"jobs": 1}, {"on_cpu": True}]
    )
    def test_none_where_there_is_nothing_to_share_or_time_to_compile_the_whole(self, given: dict[str, Any]) -> None:
        assert most_helpers(self.tuner(**given)) == 0

    def test_compiling_together_is_quicker_and_opening_it_again_takes_a_larger_share_of_that(self) -> None:
        by_block = switches("amp+compile:regional")
        helped, alone = Costs(self.tuner()), Costs(self.tuner(jobs=1))
        assert helped.expected_s(by_block) < 0.5 * alone.expected_s(by_block)
        assert helped.is_quicker_by_block
        shares = [costs.again_s(by_block) / costs.expected_s(by_block) for costs in (helped, alone)]
        assert shares[0] > shares[1]

    def test_they_delay_what_is_prepared_beside_them(self) -> None:
        candidate = Candidate(switches("amp+compile:regional"), 0.1, 10.0, 40.0)
        assert Costs(self.tuner()).delay_s(candidate) > Costs(self.tuner(jobs=1)).delay_s(candidate)


class TestCosts:
    def test_before_anything_was_tried_experience_speaks(self) -> None:
        costs = Costs(after())
        assert costs.expected_s(switches("amp+compile")) - costs.expected_s(switches("amp")) == COLD_COMPILE_S

    def test_what_was_given_up_takes_longer_than_it_had_taken(self) -> None:
        late = GivenUp(recipe="compile", seconds=40.0)
        assert Costs(after(given_up=(late,))).expected_s(switches("amp+compile")) >= 80.0
        earlier = Earlier(at=0.0, winner=None, model_hash=None, device="", given_up=(late,))
        assert Costs(after(earlier=earlier)).expected_s(switches("compile")) >= 80.0

    def test_what_an_earlier_search_saw_is_expected_again(self) -> None:
        earlier = Earlier(at=0.0, winner="compile", model_hash=None, device="", prepare_s={"compile": 3.0})
        costs = Costs(after(earlier=earlier))
        assert costs.expected_s(switches("amp+compile")) - costs.expected_s(switches("amp")) == pytest.approx(3.0)

    def test_what_is_paid_once_is_not_charged_again(self) -> None:
        """The first process with cudnn-benchmark took 13 seconds longer; its neighbours will not."""
        tried = [("baseline", 4.0), ("amp+channels-last+graphs+cudnn-benchmark", 17.0)]
        costs = Costs(after(*tried))
        assert costs.expected_s(switches("amp-bf16+channels-last+graphs+cudnn-benchmark")) == 4.0
        assert costs.expected_s(switches("amp+channels-last+graphs+cudnn-benchmark")) == 4.0
        assert costs.expected_s(switches("amp+compile+graphs")) == 4.0 + COLD_COMPILE_S

    def test_nor_is_it_known_before_a_second_recipe_has_held_the_switch(self) -> None:
        first = [("baseline", 4.0), ("amp", 4.5), ("amp+graphs+cudnn-benchmark", 17.0)]
        assert Costs(after(*first)).unsettled == {"cudnn-benchmark", "graphs"}
        assert Costs(after(*first, ("amp+graphs", 4.0))).unsettled == {"cudnn-benchmark"}
        assert Costs(after(*first, ("tf32", 4.0), ("tf32+graphs+cudnn-benchmark", 9.0))).unsettled == frozenset()

    def test_the_middle_of_those_most_like_it(self) -> None:
        tried = [("baseline", 4.0), ("amp+graphs", 9.0), ("amp", 3.0), ("graphs", 3.5), ("amp+tf32+graphs", 30.0)]
        assert Costs(after(*tried)).expected_s(switches("tf32")) == 3.5

    def test_who_compiles_is_like_who_compiles_in_whichever_mode(self) -> None:
        costs = Costs(after(("baseline", 4.0), ("amp+compile", 24.0)))
        assert costs.expected_s(switches("amp+channels-last+compile")) == 24.0
        assert costs.expected_s(switches("amp+compile:reduce-overhead")) == 24.0
        assert costs.expected_s(switches("amp+compile:max-autotune")) == 4.0 + SLOW_PREPARE_S

    def test_a_program_that_was_compiled_is_in_the_cache(self) -> None:
        tried = [("baseline", 4.0), ("amp+compile", 24.0)]
        assert Costs(after(*tried)).expected_s(switches("amp+compile+graphs")) == pytest.approx(4.0 + 0.25 * 20.0)
        costs = Costs(after(*tried, ("amp+compile+graphs", 8.0)))
        assert costs.expected_s(switches("amp+compile+graphs+cudnn-benchmark")) == 8.0
        assert costs.expected_s(switches("amp+compile")) == 8.0, "opened again"
        assert costs.expected_s(switches("amp+tf32+compile+graphs")) == 24.0, "another program"

    def test_compiling_a_block_says_nothing_about_compiling_the_model(self) -> None:
        costs = Costs(after(("baseline", 4.0), ("amp+compile:regional", 10.0)))
        assert costs.expected_s(switches("amp+compile")) == 4.0 + COLD_COMPILE_S

    def test_a_model_of_many_operators_is_expected_to_compile_longer(self) -> None:
        small, large = (Costs(after(facts=Facts(launches=count))) for count in (100, 600))
        assert small.expected_s(switches("compile")) < large.expected_s(switches("compile"))

    def test_what_broke_says_nothing(self) -> None:
        tried = [("baseline", 4.0), ("amp+compile", 0.5)]
        costs = Costs(after(*tried, broken="amp+compile"))
        assert costs.expected_s(switches("amp+compile:reduce-overhead")) == 4.0 + COLD_COMPILE_S

    def test_nor_does_what_follows_it_in_the_same_program(self) -> None:
        """It may have found what the broken one left in the cache, or not."""
        tried = [("baseline", 4.0), ("amp+compile", 0.5), ("amp+compile+graphs", 8.0)]
        costs = Costs(after(*tried, broken="amp+compile"))
        assert costs.expected_s(switches("tf32+compile")) == 4.0 + COLD_COMPILE_S


class TestReserve:
    TRIED = (("baseline", 4.0), ("amp", 5.0), ("amp+graphs", 5.0), ("amp+tf32", 5.0), ("tf32", 5.0))

    def test_the_last_race_is_for_those_who_may_win(self) -> None:
        clear = {"baseline": 1.0, "amp": 0.5, "amp+graphs": 0.4, "amp+tf32": 0.6, "tf32": 0.9}
        tuner = after(*self.TRIED, times_s=clear)
        assert choose_finalists(tuner) == [switches("amp+graphs")]
        assert race_s(tuner, Costs(tuner)) == pytest.approx(3 * (5.0 + 5.0), rel=0.2)
        close = after(*self.TRIED, times_s={**clear, "amp+tf32": 0.4, "amp": 0.401})
        assert len(choose_finalists(close)) == 3
        assert race_s(close, Costs(close)) == pytest.approx(3 * 4 * 5.0, rel=0.2)

    def test_the_ablation_opens_the_fastest_and_it_less_one_step_each(self) -> None:
        tuner = after(*self.TRIED, times_s={"amp+tf32": 0.5})
        assert ablation_s(tuner, Costs(tuner)) == pytest.approx(3 * 5.0, rel=0.2)

    def test_neither_takes_all_of_a_short_budget(self) -> None:
        tuner = after(*self.TRIED, times_s={"amp+graphs": 0.5}, budget_s=20.0)
        assert (race_s(tuner, Costs(tuner)), ablation_s(tuner, Costs(tuner))) == (10.0, 5.0)


def candidate(name: str, gain: float, cost_s: float, room_s: float = 32.0) -> Candidate:
    return Candidate(switches(name), gain, cost_s, room_s)


class TestWhoGoesFirst:
    CHEAP = candidate("amp-bf16", 0.05, 4.0)

    def test_most_improvement_per_second_where_all_fit(self) -> None:
        dear = candidate("compile", 0.2, 28.0)
        assert first_of([dear, self.CHEAP]) is self.CHEAP

    def test_a_cheap_one_does_not_cost_the_chance_of_a_far_better_one(self) -> None:
        dear, dearer = candidate("compile", 0.2, 29.0), candidate("compile:reduce-overhead", 0.25, 31.0)
        assert first_of([self.CHEAP, dear]) is dear
        assert first_of([self.CHEAP, dear, dearer]) is dearer

    def test_a_little_more_is_not_worth_all_that_is_left(self) -> None:
        assert first_of([candidate("compile", 0.08, 30.0), self.CHEAP]) is self.CHEAP

    def test_what_may_use_more_of_the_budget_is_not_crowded_out(self) -> None:
        assert first_of([candidate("compile", 0.2, 30.0, room_s=40.0), self.CHEAP]) is self.CHEAP


def like_an_h200() -> RecipeTruth:
    """ResNet-50's training step as it was seen: seconds of trials, a costly first use, compile on top worth a seventh."""
    return RecipeTruth(
        choices=CHOICES[:-1],
        device_s=0.05,
        host_s=0.02,
        on_cpu=False,
        effects={
            "amp": -1.2,
            "amp-bf16": -1.05,
            "tf32": 0.0,
            "channels-last": -0.3,
            "graphs": -0.02,
            "compile": -0.13,
            "compile:reduce-overhead": -0.1,
            "compile:max-autotune": -0.15,
            "fused-optimizer": -0.1,
            "cudnn-benchmark": -0.08,
        },
        host_effects={"amp": 0.3, "amp-bf16": 0.3, "graphs": -3.0, "compile": -0.3, "compile:reduce-overhead": -2.5},
        pairs={},
        quirk=lambda _: 0.0,
        failing=(),
        wrong=(),
        cold_compile_s=21.0,
        warm_compile_s=6.0,
        build_s=2.0,
        first_use_s={"cudnn-benchmark": 10.0},
    )


def convnext_on_an_h200(compile_s: float) -> RecipeTruth:
    """ConvNeXt-Tiny at batch 32 as it was seen: 2 600 images/s, 10 000 in half precision, 14 500 of it compiled."""
    compiled = dict.fromkeys(("compile", "compile:reduce-overhead", "compile:max-autotune"), -0.37)
    choices = [
        SwitchChoice(switch="fp16", family="precision"),
        SwitchChoice(switch="bf16", family="precision"),
        *(
            msgspec.structs.replace(each, capabilities=Capabilities(compiles=each.family == "compiler"))
            for each in (*CHOICES[2:8], *CHOICES[9:])
        ),
    ]
    return RecipeTruth(
        choices=tuple(choices),
        device_s=0.01225,
        host_s=0.003,
        on_cpu=False,
        effects={
            "fp16": -1.2,
            "bf16": -1.15,
            "tf32": -0.7,
            "channels-last": -0.15,
            "graphs": -0.02,
            **compiled,
            "compile:regional": -0.25,
            "cudnn-benchmark": -0.02,
        },
        host_effects={"graphs": -3.0, **dict.fromkeys(compiled, -1.0), "compile:regional": -0.3},
        pairs={frozenset({form, "tf32"}): 0.7 for form in ("fp16", "bf16")},
        quirk=lambda _: 0.0,
        failing=(),
        wrong=(),
        cold_compile_s=compile_s,
        warm_compile_s=0.27 * compile_s,
        build_s=2.5,
        first_use_s={"cudnn-benchmark": 8.0},
    )


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

    @pytest.mark.parametrize(("calls", "is_added"), [(20, True), (53, False)])
    def test_a_training_step_of_few_convolutions_is_tuned_while_it_compiles(self, calls: int, is_added: bool) -> None:
        truth = replace(trained_on_an_h200(20.0), task="train", first_use_s={})
        facts = msgspec.structs.replace(
            simulated_facts(truth), layers={"convolution": LayerShare(calls=calls, share=0.8)}
        )
        tuner = tune_simulated(truth, 1, 60.0, jobs=8, facts=facts, before_s=7.0)
        first = next(trial.recipe for trial in tuner.tune.trials if "compile" in trial.recipe.split("+"))
        assert ("cudnn-benchmark" in first.split("+")) is is_added

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

    def test_what_a_probe_compiled_says_nothing_of_what_compiling_takes(self) -> None:
        """It was in the cache: every compile after it was expected to take 7 s, took 20, and was given up, one after the other."""
        tuner = after(("baseline", 4.0), ("amp+compile", 7.0), probes=(Probe(recipe="amp+compile", runs=True),))
        assert Costs(tuner).expected_s(switches("tf32+compile")) >= COLD_COMPILE_S
        assert Costs(after(("baseline", 4.0), ("amp+compile", 7.0))).expected_s(switches("tf32+compile")) == 7.0

    def test_what_takes_far_longer_than_others_like_it_may_hang(self) -> None:
        tuner = after(("baseline", 4.0), ("amp", 4.0), ("amp+compile", 20.0), budget_s=60.0)
        costs = Costs(tuner)
        assert not costs.is_overdue(switches("amp+tf32"), 0, 7.0)
        assert costs.is_overdue(switches("amp+tf32"), 0, 9.0)
        assert costs.overdue_s(switches("amp+tf32"), 0) > 20.0, "a first use is waited for"
        assert costs.overdue_s(switches("amp"), 0) < 10.0
        longer = Costs(after(("baseline", 4.0), ("amp", 4.0), ("tf32", 4.0), ("cudnn-benchmark", 12.0)))
        assert not longer.is_overdue(switches("amp+cudnn-benchmark"), 0, 20.0), "others took long too, and ran"
        assert math.isinf(Costs(after(("baseline", 4.0))).overdue_s(switches("compile"), 0)), "nobody knows"

    def test_what_breaks_takes_as_long_as_what_broke_before(self) -> None:
        tuner = after(("baseline", 4.0), ("amp", 4.0))
        assert Costs(tuner).failing_s(switches("amp+tf32")) == pytest.approx(4.0)
        cast(Any, tuner).overdue = {switches("graphs"): 30.0}
        assert Costs(tuner).failing_s(switches("amp+tf32")) == 30.0
        assert Costs(tuner).failing_s(switches("amp+compile")) >= 30.0, "it may hang before it compiles"
        cast(Any, tuner).overdue = {switches("compile"): 50.0}
        assert Costs(tuner).failing_s(switches("amp+tf32")) == pytest.approx(4.0)

    def test_what_others_have_overtaken_is_not_waited_for(self) -> None:
        """On an H200, 15 s of a minute went into TF32 with tuned convolutions after amp had turned out four times as fast."""
        times_s = {"baseline": 1.0, "channels-last+graphs": 0.6, "amp+channels-last+graphs": 0.15}
        tuner = after(*((recipe, 4.0) for recipe in times_s), times_s=times_s, budget_s=60.0)
        cast(Any, tuner).fastest_log_s = lambda: math.log(0.15)
        late, hopeful = (
            Flight(switches(recipe), cast(Pending, SimpleNamespace(stage="build")), started_s=0.0)
            for recipe in ("tf32+channels-last+graphs+cudnn-benchmark", "amp+channels-last+compile+graphs")
        )
        trials = cast(Trials, SimpleNamespace(flights=[late, hopeful]))
        assert without_prospect(tuner, Beliefs(tuner.space, on_cpu=False), trials) == [late]

    @pytest.mark.parametrize(("synchronises", "is_slow"), [(True, False), (False, True)])
    def test_what_is_slow_without_a_compiler_may_be_so_for_the_hosts_sake(
        self, synchronises: bool, is_slow: bool
    ) -> None:
        tuner = after(("baseline", 4.0), ("amp", 4.0), times_s={"baseline": 1.0, "amp": 1.2})
        compiler = SwitchChoice(
            switch="compile", family="compiler", relieves="both", capabilities=Capabilities(compiles=True)
        )
        tuner.space = Space((CHOICES[0], compiler))
        cast(Any, tuner).baseline = lambda: tuner.seen()[BASELINE]
        prepared = SimpleNamespace(step_synchronises=synchronises)
        tuner.records["amp"] = cast(RunRecord, SimpleNamespace(prepared=prepared))
        assert Tuner.is_slow_without_compiler(tuner, switches("amp+compile")) is is_slow

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


COMPILED = ("compile", "compile:reduce-overhead", "compile:max-autotune", "compile:regional")


def trained_on_an_h200(compile_s: float) -> RecipeTruth:
    compiles = Capabilities(compiles=True)
    choices = [
        msgspec.structs.replace(each, capabilities=compiles) if each.family == "compiler" else each for each in CHOICES
    ]
    truth = like_an_h200()
    effects = {**truth.effects, "compile:regional": -0.08}
    warm_s = 0.27 * compile_s
    return replace(truth, choices=tuple(choices), effects=effects, cold_compile_s=compile_s, warm_compile_s=warm_s)


def without_blocks(truth: RecipeTruth) -> RecipeTruth:
    return replace(truth, choices=tuple(each for each in truth.choices if each.switch != "compile:regional"))


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


def convnext_as_timed() -> tuple[RecipeTruth, Facts]:
    """ConvNeXt-Tiny at batch 32 with the times and costs of a search on an H200.

    Half precision 3.9 times as fast as the baseline as a graph and 3.6 times without, compiled 5.8 times after 19 s.
    """
    truth = convnext_on_an_h200(17.0)
    truth = replace(
        truth,
        device_s=0.0122,
        host_s=0.0034,
        effects={**truth.effects, "fp16": -1.21, "bf16": -1.18, "graphs": 0.0, "cudnn-benchmark": -0.005},
        host_effects={"graphs": -3.0, **dict.fromkeys(COMPILED[:3], -0.5), "compile:regional": -0.3},
        warm_compile_s=6.4,
        build_s=2.8,
        first_use_s={"cudnn-benchmark": 2.0},
    )
    blocks = RepeatedBlock(class_name="CNBlock", count=18, share=0.9, kinds=4)
    return truth, msgspec.structs.replace(simulated_facts(truth, launches=137), blocks=blocks)


def regnet_as_timed() -> tuple[RecipeTruth, Facts]:
    """The training step of RegNet-Y-400MF at batch 64 likewise: no compile is ready within a minute, nor is it by hand.

    What cudnn-benchmark compares, every process compares anew.
    """
    truth = trained_on_an_h200(62.0)
    truth = replace(
        truth,
        device_s=0.0355,
        host_s=0.047,
        effects={**truth.effects, "amp": -1.1, "amp-bf16": -0.95, "compile": -0.25, "cudnn-benchmark": -0.06},
        build_s=3.5,
        first_use_s={},
        each_use_s={"cudnn-benchmark": 5.0},
        task="train",
    )
    blocks = RepeatedBlock(class_name="ResBottleneckBlock", count=16, share=0.93, kinds=7)
    return truth, msgspec.structs.replace(simulated_facts(truth, launches=874), blocks=blocks)


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


class TestWhoIsRacedInAHurry:
    TRIED = (("baseline", 4.0), ("amp", 4.0), ("amp+compile", 24.0), ("amp+compile+graphs", 12.0))

    def racing(self, times_s: dict[str, float], left_s: float) -> list[Switches]:
        tuner = after(*self.TRIED, times_s=times_s, jobs=8, budget_s=60.0)
        cast(Any, tuner).left_s = left_s
        return _with_time_for_an_interval(tuner, [switches("amp+compile+graphs")])

    def test_the_fastest_where_its_race_fits_or_nearly_does(self) -> None:
        ahead = {"baseline": 1.0, "amp": 0.5, "amp+compile": 0.4, "amp+compile+graphs": 0.39}
        needed_s = last_race_s(after(*self.TRIED, jobs=8), Costs(after(*self.TRIED)), switches("amp+compile+graphs"))
        for share in (1.1, 0.9):
            assert self.racing(ahead, share * needed_s) == [switches("amp+compile+graphs")]
        assert self.racing(ahead, 0.7 * needed_s) == [switches("amp")]

    def test_another_that_is_as_fast_where_only_that_one_fits(self) -> None:
        close = {"baseline": 1.0, "amp": 0.395, "amp+compile": 0.4, "amp+compile+graphs": 0.39}
        needed_s = last_race_s(after(*self.TRIED, jobs=8), Costs(after(*self.TRIED)), switches("amp+compile+graphs"))
        assert self.racing(close, 0.9 * needed_s) == [switches("amp")]


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
        pairs={},
        quirk=lambda _: 0.0,
        failing=(),
        wrong=(),
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


class TestAnotherReplicate:
    """Of one recipe with the baseline, when the budget may end before it."""

    @pytest.mark.parametrize(
        ("low", "high", "verdict", "left_s", "is_enough"),
        [
            (9.2, 9.9, "faster", 14.0, True),
            (9.2, 9.9, "faster", 40.0, False),
            (3.0, 20.0, "faster", 14.0, False),
            (0.95, 1.05, "inconclusive", 14.0, False),
        ],
    )
    def test_is_left_out_only_where_the_gain_is_known_well(
        self, monkeypatch: pytest.MonkeyPatch, low: float, high: float, verdict: Any, left_s: float, is_enough: bool
    ) -> None:
        """On an H200, the third of a compiled ResNet-50 took 20 s where 14 were left, and its gain was known within 4 %."""
        tuner = after(("baseline", 4.0), ("amp+compile", 34.0))
        cast(Any, tuner).left_s = left_s
        pair = Pair(
            a="baseline",
            b="amp+compile",
            ratio=math.sqrt(low * high),
            low=low,
            high=high,
            verdict=verdict,
            replicates=2,
        )
        monkeypatch.setattr("redline.search.tune.finals.pair_of", lambda *_: pair)
        assert _is_enough(tuner, [], [BASELINE, switches("amp+compile")]) is is_enough
        assert not _is_enough(tuner, [], [BASELINE, switches("amp+compile"), switches("amp")]), (
            "two are to be told apart"
        )


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

    def test_the_baseline_alone_has_no_steps_to_tell(self) -> None:
        tuner = after(("baseline", 4.0))
        assert tuner.space.less_one(BASELINE) == []
        assert ablation_s(tuner, Costs(tuner)) == 4.0


def test_what_fails_in_the_race_is_no_longer_named_as_untried() -> None:
    """A larger budget would not make it run."""
    tuner: Any = after(("baseline", 4.0))
    failure = Failure(stage="build", kind="unsupported", message="", switches=("amp",), scope="switch")
    tuner.records["raced"] = SimpleNamespace(failure=failure, prepared=None)
    rest = {"gain": 0.1, "cost_s": 20.0, "budget_s": 90.0}
    tuner.tune.untried = tuple(Untried(recipe=recipe, **rest) for recipe in ("amp+compile", "compile"))
    tuner.tune.notes = (note("untried", "no time to try amp+compile"), note("note", "another"))
    tuner.tune.finals, tuner.tune.spent, tuner.left_s = (("raced",),), Spent(reserved=7.0), 11.0
    tuner.keep = lambda **changes: vars(tuner.tune).update(changes)
    tuner.ran_short = lambda told: tuner.keep(notes=(*tuner.tune.notes, told))
    _drop_what_the_race_ruled_out(tuner)
    assert [each.recipe for each in tuner.tune.untried] == ["compile"]
    another, untried = tuner.tune.notes
    assert (str(another), untried.code) == ("another", "untried")
    assert "faster: compile takes about 20 s" in str(untried)
    assert "11 s are left; --budget 90s" in str(untried)


@pytest.mark.parametrize(("rounds", "is_over", "stopped"), [(2, True, "target"), (2, False, None), (1, True, None)])
def test_a_trial_ends_with_the_budget(rounds: int, is_over: bool, stopped: str | None) -> None:
    block = Block(kind="throughput", clock="host", samples=(1.0,))
    record = RunRecord(id="a", spec=RunSpec(workload=WorkloadSpec(model="m")))
    entry = Entry(record, cast(Any, None), blocks={"throughput": [block] * rounds})
    UntilPlaced(entry, "throughput", lambda: is_over).after_round([entry], rounds)
    assert entry.stopped == stopped
