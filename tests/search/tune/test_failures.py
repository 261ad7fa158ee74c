"""What a search learns from a recipe that breaks."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from tune_bench import BEST, Tune, landscape, tuned
from worlds.recipes import FAILURES, WRONG, switches_of
from worlds.tuning import tune_simulated

from redline.model.record import Failure, Numerics
from redline.model.spec import RunSpec
from redline.store import History
from redline.testing.fake import FakeDoor
from redline.testing.landscape import EXACT, Landscape
from redline.verbs.tune import TuneResult


class TestFailuresTeach:
    """What broke is named with its scope, and never tried again."""

    @staticmethod
    def breaking(part: str, kind: str = "compile", **told: Any) -> Landscape:
        broken = Failure(stage="build", kind=kind, message="it breaks", **told)  # type: ignore[arg-type]
        guilty = frozenset(part.split("+"))
        return landscape(failure=lambda spec: broken if guilty <= switches_of(spec) else None)

    @staticmethod
    def failed(result: TuneResult) -> list[str]:
        return [each.recipe for each in result.tune.trials if result.recorded[each.record_id].failure is not None]

    def test_a_switch_that_the_bench_names_is_tried_once(self, tune: Tune) -> None:
        result = tune(self.breaking("graphs", switches=("graphs",), scope="switch"))
        assert len(self.failed(result)) == 1
        (rejected,) = result.summary.rejected
        assert (rejected.switch, rejected.scope, rejected.code) == ("graphs", "switch", "compile")
        assert "graphs" not in result.recipe

    @pytest.mark.parametrize("part", ["graphs", "fp16+graphs"])
    def test_what_nobody_names_is_avoided_after_few_failures(self, tune: Tune, part: str) -> None:
        result = tune(self.breaking(part))
        assert 1 <= len(self.failed(result)) <= 6
        assert result.tune.spent.failed < 0.1 * 1800
        assert not set(part.split("+")) <= set(result.recipe.split("+"))
        truth = 0.01 / 0.006 if part == "graphs" else math.exp(0.85 + 0.2 + 0.3 + 0.05)
        assert result.winner.ratio == pytest.approx(truth, rel=0.03), "without graphs the host is in the way of all"

    def test_one_that_ran_out_of_memory_may_do_with_another_switch(self, tune: Tune) -> None:
        oom = Failure(stage="build", kind="oom", message="no room")
        hungry = landscape(
            failure=lambda spec: oom if "compile" not in switches_of(spec) and spec.recipe.switches else None
        )
        result = tune(hungry)
        assert result.recipe == BEST
        assert {(lesson.scope, lesson.reason.about) for lesson in result.tune.lessons} == {("recipe", "oom")}

    def test_is_remembered_after_a_resume(self, history: History) -> None:
        truth = self.breaking("graphs", switches=("graphs",), scope="switch")
        short = tuned(FakeDoor(truth), history, budget=60.0)
        again = tuned(FakeDoor(truth), history, budget="30m", resume=True)
        assert len(self.failed(short)) == len(self.failed(again)) == 1

    @pytest.mark.parametrize("kind", ["always failing", "failing pairs"])
    def test_what_breaks_at_once_takes_a_tenth_of_the_budget_at_most(self, kind: str) -> None:
        """Variants that all break were tried beside others again and again, for 29 % of the budget."""
        for number in (6, 12):
            search = tune_simulated(FAILURES[kind](Random(1000 + number)), number, 300.0)
            assert search.tune.spent.failed <= 0.11 * 300.0, "what is begun within a tenth may end after it"

    def test_what_hangs_is_not_begun_again_with_other_switches(self) -> None:
        """A switch that breaks after half a minute was given up six times, with other switches beside it each time."""
        search = tune_simulated(FAILURES["failing slowly"](Random(1002)), 2, 300.0)
        assert [lesson.reason.about for lesson in search.tune.lessons] == ["late"]
        assert search.tune.spent.failed < 0.15 * 300.0


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
        replicates = [[result.recorded[each] for each in ids] for ids in result.tune.finals]
        return [{str(record.spec.recipe) for record in replicate} for replicate in replicates]

    @pytest.mark.parametrize("part", ["fp16", "fp16+graphs"])
    def test_what_lost_its_numbers_there_does_not_win(self, tune: Tune, part: str) -> None:
        result = tune(self.losing(part), task="train")
        assert all(lesson.overrules_trials for lesson in result.tune.lessons)
        assert result.recipe == BEST.replace("fp16", "bf16")

    def test_others_are_tried_before_those_behind_it_are_raced(self, tune: Tune) -> None:
        """All 16-bit recipes were raced one after the other, and then the search ended with nothing."""
        result = tune(self.losing("fp16", "bf16"), task="train", budget="5m")
        assert result.recipe == "channels-last+compile+graphs+cudnn-benchmark"
        fallen = [names for names in self.raced(result) if any("16" in name for name in names)]
        assert len(fallen) <= 2
        assert result.tune.state == "done"

    def test_trials_look_as_closely_from_then_on(self, tune: Tune) -> None:
        result = tune(self.losing("fp16", "bf16"), task="train")
        trials = [result.recorded[trial.record_id] for trial in result.tune.trials]
        steps = [record.spec.measure.loss_path_steps for record in trials]
        assert steps == sorted(steps)
        assert (steps[0], steps[-1]) == (5, 20)

    def test_one_that_falls_in_its_first_replicate_is_not_raced_again(self, tune: Tune) -> None:
        """Only the first replicate checks the numbers; those after it went on with the fallen."""
        result = tune(self.losing("fp16", "bf16", "channels-last", "compile", "graphs"), task="train", budget="5m")
        raced = [name for names in self.raced(result) for name in names]
        assert raced.count(BEST) <= 1
        assert result.recipe == "cudnn-benchmark"

    def test_what_breaks_there_by_chance_rules_out_that_recipe_alone(self, tune: Tune) -> None:
        failure = Failure(stage="measure", kind="crash", message="it breaks")
        truth = landscape(
            failure=lambda spec: failure if spec.measure.max_seconds == 10.0 and str(spec.recipe) == BEST else None
        )
        result = tune(truth)
        (lesson,) = result.tune.lessons
        assert (set(lesson.switches), lesson.scope) == (set(BEST.split("+")), "recipe")
        assert len(set(result.recipe.split("+")) & set(BEST.split("+"))) == 4

    def test_is_remembered_after_a_resume(self, history: History) -> None:
        truth = self.losing("fp16")
        short = tuned(FakeDoor(truth), history, budget=70.0, task="train")
        again = tuned(FakeDoor(truth), history, budget="30m", task="train", resume=True)
        assert short.tune.lessons
        assert again.tune.lessons[: len(short.tune.lessons)] == short.tune.lessons
        assert again.recipe == BEST.replace("fp16", "bf16")
