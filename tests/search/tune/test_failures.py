"""What a search learns from a recipe that breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from tune_bench import BEST, CHOICES, landscape, tuned
from worlds.recipes import FAILURES, WRONG, switches_of
from worlds.tuning import tune_simulated

from redline.api.tune import TuneResult
from redline.model.questions import SwitchChoice, SwitchNeed
from redline.model.record import Failure, Numerics
from redline.model.spec import RunSpec
from redline.store import History
from redline.testing.fake import FakeDoor
from redline.testing.landscape import EXACT, Landscape


class TestFailuresTeach:
    """What broke is named with its scope, and never tried again."""

    @staticmethod
    def breaking(part: str, kind: str = "compile", **told: Any) -> Landscape:
        broken = Failure(stage="build", kind=kind, message="it breaks", **told)  # type: ignore[arg-type]
        guilty = frozenset(part.split("+"))
        return landscape(failure=lambda spec: broken if guilty <= switches_of(spec) else None)

    @staticmethod
    def failed(result: TuneResult) -> list[str]:
        return [each.recipe for each in result.tune.trials if result.records[each.record_id].failure is not None]

    def test_a_switch_that_the_bench_names_is_tried_once(self, tune: Callable[..., TuneResult]) -> None:
        result = tune(self.breaking("graphs", switches=("graphs",), scope="switch"))
        assert len(self.failed(result)) == 1
        assert result.tune.probes == ()
        (rejected,) = result.summary.rejected
        assert (rejected.switch, rejected.scope, rejected.code) == ("graphs", "switch", "compile")
        assert "graphs" not in result.recipe

    @pytest.mark.parametrize(("part", "scope"), [("graphs", "switch"), ("fp16+graphs", "pair")])
    def test_what_nobody_names_is_found_by_leaving_out_halves(
        self, tune: Callable[..., TuneResult], part: str, scope: str
    ) -> None:
        result = tune(self.breaking(part))
        (lesson,) = result.tune.lessons
        assert (set(lesson.switches), lesson.scope) == (set(part.split("+")), scope)
        assert len(self.failed(result)) == 1
        assert result.tune.spent.failed < 0.1 * 1800
        assert not set(part.split("+")) <= set(result.recipe.split("+"))

    def test_a_switch_that_needs_a_compiler_does_not_make_the_search_for_the_cause_compile(
        self, tune: Callable[..., TuneResult]
    ) -> None:
        """Nothing could be asked about with it, so that the compiler itself was asked about first."""
        need = SwitchNeed(wants=("compile",), reason="add compile")
        choices = (*CHOICES, SwitchChoice(switch="a-rewrite", family="rewrite", needs=(need,)))
        broken = replace(self.breaking("channels-last"), choices=choices)
        result = tune(broken, recipes=["a-rewrite+fp16+channels-last+compile+graphs"])
        assert [probe.recipe for probe in result.tune.probes if "compile" in probe.recipe] == []
        (lesson,) = result.tune.lessons
        assert lesson.switches == ("channels-last",)

    def test_one_that_ran_out_of_memory_may_do_with_another_switch(self, tune: Callable[..., TuneResult]) -> None:
        oom = Failure(stage="build", kind="oom", message="no room")
        hungry = landscape(failure=lambda spec: oom if switches_of(spec) == {"fp16", "channels-last"} else None)
        result = tune(hungry)
        assert result.recipe == BEST
        (lesson,) = result.tune.lessons
        assert (lesson.scope, lesson.reason.about) == ("recipe", "oom")

    def test_is_remembered_after_a_resume(self, history: History) -> None:
        truth = self.breaking("graphs", switches=("graphs",), scope="switch")
        short = tuned(FakeDoor(truth), history, budget=60.0)
        again = tuned(FakeDoor(truth), history, budget="30m", resume=True)
        assert len(self.failed(short)) == len(self.failed(again)) == 1

    @pytest.mark.parametrize("kind", ["always failing", "failing pairs"])
    def test_what_breaks_at_once_takes_a_tenth_of_the_budget_at_most(self, kind: str) -> None:
        """Variants that all break were tried beside others again and again, for 29 % of the budget."""
        for number in (6, 19):
            tuner = tune_simulated(FAILURES[kind](Random(1000 + number)), number, 300.0)
            assert tuner.tune.spent.failed <= 0.11 * 300.0, "what is begun within a tenth may end after it"

    def test_what_hangs_is_not_begun_again_with_other_switches(self) -> None:
        """A pair that breaks after half a minute was given up six times, beside others each time: 63 % of the budget."""
        tuner = tune_simulated(FAILURES["failing slowly"](Random(3005)), 5, 300.0)
        assert len(tuner.overdue) <= 2
        assert tuner.tune.spent.failed < 0.15 * 300.0


class TestTheRaceTeachesToo:
    """A recipe that passes its trial and falls in the last race, whose check is longer."""

    @staticmethod
    def losing(*parts: str, steps: int = 20) -> Landscape:
        """Recipes with any of these parts lose their numbers when so many steps are looked at."""
        guilty = [frozenset(part.split("+")) for part in parts]

        def numerics(spec: RunSpec) -> Numerics:
            is_guilty = any(part <= switches_of(spec) for part in guilty)
            return WRONG if is_guilty and spec.measure.loss_path_steps >= steps else EXACT

        return landscape(numerics=numerics)

    @staticmethod
    def raced(result: TuneResult) -> list[set[str]]:
        replicates = [[result.records[each] for each in ids] for ids in result.tune.finals]
        return [{str(record.spec.recipe) for record in replicate} for replicate in replicates]

    @pytest.mark.parametrize(("part", "scope"), [("fp16", "switch"), ("fp16+graphs", "pair")])
    def test_what_lost_its_numbers_there_is_found_and_ruled_out(
        self, tune: Callable[..., TuneResult], part: str, scope: str
    ) -> None:
        result = tune(self.losing(part), task="train")
        assert BEST in {lesson.recipe for lesson in result.tune.lessons}
        lesson = result.tune.lessons[-1]
        assert (set(lesson.switches), lesson.scope, lesson.overrules_trials) == (set(part.split("+")), scope, True)
        assert all(probe.checked_long for probe in result.tune.probes)
        rejected = next(each for each in result.summary.rejected if each.recipe == lesson.recipe)
        assert (rejected.switch, rejected.scope) == ("+".join(lesson.switches), scope)
        assert result.recipe == BEST.replace("fp16", "bf16")

    def test_others_are_tried_before_those_behind_it_are_raced(self, tune: Callable[..., TuneResult]) -> None:
        """All 16-bit recipes were raced one after the other, and then the search ended with nothing."""
        result = tune(self.losing("fp16", "bf16"), task="train", budget="5m")
        assert {lesson.switches for lesson in result.tune.lessons} == {("fp16",), ("bf16",)}
        assert result.recipe == "channels-last+compile+graphs+cudnn-benchmark"
        fallen = [names for names in self.raced(result) if any("16" in name for name in names)]
        assert len(fallen) == 1
        assert result.tune.state == "done"

    def test_trials_look_as_closely_from_then_on(self, tune: Callable[..., TuneResult]) -> None:
        result = tune(self.losing("fp16", "bf16"), task="train")
        trials = [result.records[trial.record_id] for trial in result.tune.trials]
        steps = [record.spec.measure.loss_path_steps for record in trials]
        assert steps == sorted(steps)
        assert (steps[0], steps[-1]) == (5, 20)

    def test_recipes_that_hold_it_say_so_and_do_not_win(self, tune: Callable[..., TuneResult]) -> None:
        result = tune(self.losing("fp16"), task="train")
        said = {row.recipe: row.note for row in result.summary.ranking if "fp16" in row.recipe.split("+")}
        assert len(said) > 1
        assert all(why is not None and why.code in ("ruled-out", "rejected-in-final") for why in said.values())
        assert any("holds fp16, which a longer check has rejected" in str(why) for why in said.values())

    def test_one_that_falls_in_its_first_replicate_is_not_raced_again(self, tune: Callable[..., TuneResult]) -> None:
        """Only the first replicate checks the numbers; those after it went on with the fallen."""
        result = tune(self.losing("fp16", "bf16", "channels-last", "compile", "graphs"), task="train", budget="3m")
        raced = [name for names in self.raced(result) for name in names]
        assert raced.count(BEST) == 1
        assert result.recipe == "cudnn-benchmark"

    def test_what_breaks_there_by_chance_rules_out_that_recipe_alone(self, tune: Callable[..., TuneResult]) -> None:
        failure = Failure(stage="measure", kind="crash", message="it breaks")
        truth = landscape(
            failure=lambda spec: failure if spec.measure.min_rounds == 6 and str(spec.recipe) == BEST else None
        )
        result = tune(truth)
        (lesson,) = result.tune.lessons
        assert (set(lesson.switches), lesson.scope, result.tune.probes) == (set(BEST.split("+")), "recipe", ())
        assert result.recipe == "fp16+channels-last+compile+graphs"

    def test_is_remembered_after_a_resume(self, history: History) -> None:
        truth = self.losing("fp16")
        short = tuned(FakeDoor(truth), history, budget=70.0, task="train")
        assert [lesson.switches for lesson in short.tune.lessons] == [("fp16",)]
        again = tuned(FakeDoor(truth), history, budget="30m", task="train", resume=True)
        assert [lesson.switches for lesson in again.tune.lessons] == [("fp16",)]
        assert again.recipe == BEST.replace("fp16", "bf16")
        for told in (short, again):
            assert ("fp16", "switch") in [(each.switch, each.scope) for each in told.summary.rejected]
