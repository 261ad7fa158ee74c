"""What trials will cost, what the end of the search needs, who goes first and who is waited for."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from tuner_stub import CHOICES, after, switches

from redline.analyze.pairs import Pair
from redline.model.note import note
from redline.model.questions import SwitchChoice
from redline.model.record import Block, Capabilities, RunRecord
from redline.model.spec import Recipe, RunSpec, WorkloadSpec
from redline.model.work import Facts
from redline.search.decide import Race
from redline.search.group import Entry, Pending
from redline.search.observer import Observer
from redline.search.tune.beliefs import Beliefs
from redline.search.tune.costs import COLD_COMPILE_S, SLOW_PREPARE_S, Candidate, Costs, first_of
from redline.search.tune.final_runs import _keep_finals
from redline.search.tune.finals import _is_enough, _quicker_to_race, _with_time_for_an_interval
from redline.search.tune.flight import Flight, UntilPlaced
from redline.search.tune.lessons import Lessons
from redline.search.tune.loop import _drop_what_the_race_ruled_out
from redline.search.tune.planner import _most_promising, without_prospect
from redline.search.tune.record import Earlier, GivenUp, Lesson, Probe, Spent, Untried
from redline.search.tune.reserve import ablation_s, choose_finalists, last_race_s, planned_replicates, race_s
from redline.search.tune.safe import _host_share
from redline.search.tune.space import BASELINE, Space, Switches
from redline.search.tune.trials import Trials
from redline.search.tune.tuner import Tuner

BLOCK = Block(kind="throughput", clock="host", samples=(1.0,))


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


class TestWhatIsWaitedFor:
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

    @pytest.mark.parametrize(("times", "is_waited_for"), [(2.0, True), (5.0, True), (15.0, False)])
    def test_a_first_compile_may_take_some_times_what_is_expected_but_not_any(
        self, times: float, is_waited_for: bool
    ) -> None:
        """In a simulated search of five minutes, one of 80 s was given up after 62 s with 220 s left."""
        costs, compiled = Costs(after(("baseline", 4.0), ("amp", 4.0))), switches("amp+compile")
        taken_s = times * costs.expected_s(compiled)
        assert (costs.patience_s(compiled, 0, taken_s, 10 * taken_s, 0.1) > 1.0) is is_waited_for

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
        cast(Any, tuner).budget_s = 3600.0
        assert without_prospect(tuner, Beliefs(tuner.space, on_cpu=False), trials) == [], (
            "an hour has time for a surprise"
        )

    def test_nor_is_it_begun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What would be cancelled at once took the places of others, again and again."""
        times_s = {"baseline": 1.0, "channels-last+graphs": 0.6, "amp+channels-last+graphs": 0.15}
        tuner = after(*((recipe, 4.0) for recipe in times_s), times_s=times_s, budget_s=60.0)
        cast(Any, tuner).fastest_log_s = lambda: math.log(0.15)
        cast(Any, tuner).lessons = lambda: SimpleNamespace(chance=lambda _: 1.0, rules_out=lambda _: False)
        beliefs = Beliefs(tuner.space, on_cpu=False)
        late = switches("tf32+channels-last+graphs+cudnn-benchmark")
        monkeypatch.setattr("redline.search.tune.planner.is_done_with", lambda each, tried, _: each in tried)

        def begun(budget_s: float) -> set[Switches]:
            cast(Any, tuner).budget_s = budget_s
            gains = beliefs.promises(tuner.seen(), tuner.fastest_log_s())
            tried = set(tuner.seen())
            return {each for each, _, _ in _most_promising(tuner, beliefs, tried, gains, lambda _: True)}

        assert late not in begun(60.0)
        assert late in begun(3600.0)

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


class TestARaceThatTakesLonger:
    """Than the budget holds."""

    TIMES_S: ClassVar = {"baseline": 1.0, "amp": 0.5, "tf32": 0.99, "amp+compile+graphs": 0.2}

    @pytest.mark.parametrize(("left_s", "raced"), [(40.0, ["amp"]), (3.0, [])])
    @pytest.mark.parametrize("finals", [0, 1, 2])
    def test_is_left_to_another_that_can_still_have_an_interval(
        self, left_s: float, raced: list[str], finals: int
    ) -> None:
        tuner: Any = after(*((recipe, 5.0) for recipe in self.TIMES_S), times_s=self.TIMES_S, jobs=8, budget_s=60.0)
        spec = RunSpec(workload=WorkloadSpec(model="m"), recipe=Recipe.parse("amp+compile+graphs"))
        tuner.records["a"] = RunRecord(id="a", spec=spec, blocks=(BLOCK,))
        tuner.left_s, tuner.tune.finals = left_s, [("a", "b")] * finals
        found = _quicker_to_race(tuner, [BASELINE, switches("amp+compile+graphs")])
        assert found == ([switches(each) for each in raced] if finals == 1 else [])

    @pytest.mark.parametrize(("left_s", "kept"), [(0.0, 1), (30.0, 3)])
    def test_says_nothing_about_what_was_not_ready_when_the_budget_ended(self, left_s: float, kept: int) -> None:
        """A hang long before that does."""
        sound, late = (
            SimpleNamespace(id=name, failure=failure)
            for name, failure in (("sound", None), ("late", SimpleNamespace(kind="timeout")))
        )
        tuner: Any = after()
        tuner.left_s, tuner.observer = left_s, Observer()
        tuner.keep = lambda finals: setattr(tuner.tune, "finals", finals)
        replicates: Any = [[sound, sound], [sound, late], [late, sound]]
        _keep_finals(tuner, cast(Race, SimpleNamespace(pairs=[])), replicates)
        assert len(tuner.tune.finals) == kept


def test_the_baseline_alone_has_no_steps_to_tell() -> None:
    tuner = after(("baseline", 4.0))
    assert tuner.space.less_one(BASELINE) == []
    assert ablation_s(tuner, Costs(tuner)) == 4.0


def test_what_fails_in_the_race_is_no_longer_named_as_untried() -> None:
    """A larger budget would not make it run."""
    tuner: Any = after(("baseline", 4.0))
    why = note("failed", "unsupported", about="unsupported")
    lesson = Lesson(switches=("amp",), scope="switch", reason=why, recipe="amp+tf32", overrules_trials=True)
    tuner.lessons = lambda: Lessons([lesson], [])
    rest = {"gain": 0.1, "cost_s": 20.0, "budget_s": 90.0}
    tuner.tune.untried = tuple(Untried(recipe=recipe, **rest) for recipe in ("amp+compile", "compile"))
    tuner.tune.notes = (note("untried", "no time to try amp+compile"), note("note", "another"))
    tuner.tune.spent, tuner.left_s = Spent(reserved=7.0), 11.0
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
    record = RunRecord(id="a", spec=RunSpec(workload=WorkloadSpec(model="m")))
    entry = Entry(record, cast(Any, None), blocks={"throughput": [BLOCK] * rounds})
    UntilPlaced(entry, "throughput", lambda: is_over).after_round([entry], rounds)
    assert entry.stopped == stopped


@pytest.mark.parametrize(("synchronises", "share"), [(False, 0.4), (True, None)])
def test_a_baseline_that_waits_on_a_fast_path_leaves_the_host_to_the_facts(
    synchronises: bool, share: float | None
) -> None:
    """Its own time to issue a step is not known then, and what is compiled or recorded does not take that path."""
    tuner: Any = after(("baseline", 4.0), facts=Facts(step_s=0.01, host_s=0.004, synchronises=synchronises))
    tuner.baseline = lambda: tuner.seen()[BASELINE]
    found = _host_share(tuner)
    assert found is None if share is None else found == pytest.approx(share)
