"""Quantized recipes, and searches with a check of one's own."""

from __future__ import annotations

from typing import Any

import pytest
from tune_bench import BEST, Tune, landscape, tuned
from worlds.recipes import switches_of

from redline.model.errors import UsageError
from redline.model.protocol import Ask, AskMetric, SwitchChoice
from redline.model.record import Capabilities, Failure
from redline.store import History
from redline.testing.fake import FakeDoor, FakeSession
from redline.testing.landscape import EXACT


class TestQuantized:
    def test_is_not_tried_unless_allowed(self, tune: Tune) -> None:
        found = tune().summary
        assert not any("int8" in each.recipe for each in found.ranking)

    def test_is_shown_but_not_recommended_without_a_check(self, tune: Tune) -> None:
        result = tune(allow_quantized=True)
        assert result.recipe == BEST
        shown = [each for each in result.summary.ranking if "int8" in each.recipe]
        assert shown
        assert len(shown) <= 2
        assert all(
            each.note is not None and each.note.code == "no-check" for each in shown if each.ratio > result.winner.ratio
        )
        assert any(each.code == "no-check" for each in result.summary.rejected)

    @pytest.mark.parametrize("asked", ["int8", "int8:weight-only", "int8:dynamic"])
    def test_whatever_the_options_it_is_given(self, tune: Tune, asked: str) -> None:
        """A person's own variant of a step quantizes as the step does that the bench speaks of."""
        choices = (
            SwitchChoice(switch="int8:weight-only", family="quantization", capabilities=Capabilities(quantizes=True)),
        )
        truth = landscape(
            choices=choices, step_s=lambda spec: 0.004 if spec.recipe.switches else 0.01, issue_share=lambda spec: 0.1
        )
        result = tune(truth, allow_quantized=True, recipes=asked, switches=["int8"])
        assert result.winner is None
        assert any(each.recipe == asked and each.code == "no-check" for each in result.summary.rejected)
        proven = tune(truth, allow_quantized=True, recipes=asked, switches=["int8"], check="metrics:top1")
        assert proven.recipe.startswith("int8")
        assert proven.recipe in {metric.recipe for metric in proven.tune.metrics}

    def test_wins_when_the_check_holds(self, tune: Tune) -> None:
        result = tune(allow_quantized=True, check="metrics:top1")
        assert "int8" in result.recipe.split("+")
        assert result.tune.metrics[0].baseline == 1.0

    def test_loses_when_the_check_falls(self, tune: Tune) -> None:
        falls = landscape(metric=lambda spec: 0.5 if "int8" in switches_of(spec) else 0.76)
        result = tune(falls, allow_quantized=True, check="metrics:top1")
        assert result.recipe == BEST
        assert any("fell from 0.76 to 0.5" in each.text for each in result.summary.rejected)


class TestCheck:
    """The user's own check is run on all that may win, whatever its number format."""

    def test_is_run_on_the_baseline_the_finalists_and_the_winner(self, tune: Tune) -> None:
        result = tune(check="metrics:top1")
        asked = [metric.recipe for metric in result.tune.metrics]
        assert asked[0] == "baseline"
        raced = {str(result.recorded[each].spec.recipe) for replicate in result.tune.finals for each in replicate}
        assert raced <= set(asked)
        assert result.recipe in asked
        assert len(asked) == len(set(asked)), "once each"
        assert result.tune.metrics == result.tune.metrics
        assert {row.cell("value") for row in result.table("checks").rows} == {"1.0"}

    def test_an_interrupted_check_is_not_waited_for(self, history: History, monkeypatch: pytest.MonkeyPatch) -> None:
        """Closing would: a worker in the middle of a check hears of it when the check is over."""
        ended: list[str] = []

        def interrupted(self: FakeSession, request: Any, on_progress: Any = None) -> Any:
            if isinstance(request, Ask) and isinstance(request.question, AskMetric):
                monkeypatch.setattr(FakeSession, "close", lambda self: ended.append("closed"))
                monkeypatch.setattr(FakeSession, "kill", lambda self: ended.append("killed"))
                raise KeyboardInterrupt
            return real(self, request, on_progress)

        real = FakeSession.ask
        monkeypatch.setattr(FakeSession, "ask", interrupted)
        assert tuned(FakeDoor(landscape()), history, check="metrics:top1").tune.state == "interrupted"
        assert ended == ["killed"]

    def test_what_falls_does_not_win_though_its_numerics_hold(self, tune: Tune) -> None:
        falls = landscape(metric=lambda spec: 0.5 if "fp16" in switches_of(spec) else 0.76)
        result = tune(falls, check="metrics:top1")
        assert "fp16" not in result.recipe.split("+")
        assert any("fell from 0.76 to 0.5" in each.text for each in result.summary.rejected)
        assert next(metric for metric in result.tune.metrics if metric.recipe == result.recipe).value == 0.76

    def test_the_winner_of_all_is_checked_though_the_budget_is_over(self, tune: Tune) -> None:
        result = tune(check="metrics:top1", budget=20.0)
        assert result.recipe in {metric.recipe for metric in result.tune.metrics}

    def test_an_error_under_a_recipe_rejects_it_and_is_told(self, tune: Tune) -> None:
        raises = Failure(
            stage="ask", kind="user", message="check top1 raised TypeError: half", where="metrics.py:3 in top1"
        )
        result = tune(
            landscape(metric_failure=lambda spec: raises if "fp16" in switches_of(spec) else None),
            check="metrics:top1",
        )
        assert "fp16" not in result.recipe.split("+")
        told = "your check raised an error: check top1 raised TypeError: half (metrics.py:3 in top1)"
        assert any(each.text == told for each in result.summary.rejected)

    def test_an_error_on_the_model_as_it_is_ends_it_before_anything_is_measured(self, tune: Tune) -> None:
        raises = Failure(
            stage="ask", kind="user", message="check top1 raised NameError: data", where="metrics.py:3 in top1"
        )
        observed: list[str] = []
        with pytest.raises(
            UsageError, match=r"cannot be run on the model as it is: check top1 .*\(metrics.py:3 in top1\)"
        ):
            tune(
                landscape(metric_failure=raises, numerics=lambda spec: observed.append(str(spec)) or EXACT),
                check="metrics:top1",
            )
        assert observed == []
