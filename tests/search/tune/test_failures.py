"""What a search learns from a recipe that breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from tune_bench import BEST, CHOICES, landscape, tuned
from worlds.recipes import FAILURES, switches_of
from worlds.tuning import tune_simulated

from redline.api.tune import TuneResult
from redline.questions import SwitchChoice, SwitchNeed
from redline.record import Failure
from redline.store import History
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape


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
