"""What a search does with its time: several jobs, budgets, Ctrl-C, a second search."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from test_decide import Crowded
from tune_bench import BEST, CHOICES, Tune, device_s, host_s, landscape, tuned
from worlds.recipes import switches_of

from redline.model.errors import UsageError
from redline.model.protocol import SwitchChoice, SwitchNeed
from redline.model.work import Facts
from redline.search.observer import Observer
from redline.store import History
from redline.testing.fake import FakeDoor
from redline.verbs.tune import TuneResult, kept_tune
from redline.verbs.workspace import Workspace


class TestJobs:
    def test_recipes_prepared_side_by_side_are_the_same_search_in_less_time(self, history: History) -> None:
        alone = tuned(FakeDoor(landscape()), history, name="alone")
        together = tuned(FakeDoor(landscape()), history, name="together", jobs=6)
        assert alone.recipe == together.recipe == BEST
        assert together.tune.spent.trials < 0.9 * alone.tune.spent.trials

    def test_one_minute_tries_a_compiler_and_ends_with_an_interval(self, tune: Tune) -> None:
        winner = tune(budget=60.0, jobs=6).winner
        assert winner.low > 3
        assert "compile" in winner.recipe

    def test_who_is_not_ready_in_time_is_given_up_for_the_race(self, tune: Tune) -> None:
        slow = landscape(compile_s=lambda spec: 300.0 if "compile" in switches_of(spec) else 0.0)
        result = tune(slow, budget=80.0, jobs=6)
        assert result.winner is not None
        assert "compile" not in result.recipe
        assert result.tune.seconds <= 80.0 * 1.1
        late = result.tune.given_up[0]
        (told,) = [str(each) for each in result.notes if each.code == "given-up"]
        assert f"{late.recipe} ({late.seconds:.0f} s were not enough)" in told

    @pytest.mark.parametrize(("room", "jobs"), [(2, 6), (1, 1)])
    def test_what_does_not_fit_beside_others_is_tried_alone(self, history: History, room: int, jobs: int) -> None:
        result = tuned(Crowded(landscape(), room=room), history, jobs=jobs)
        assert result.winner.recipe == BEST
        assert result.winner.low is not None


class Listening(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def noted(self, line: str) -> None:
        self.lines.append(line)


class TestBudget:
    def test_follows_from_what_compiling_costs_and_is_said(self, history: History) -> None:
        """About three minutes for a model that compiles in 40 s."""
        observer, facts = Listening(), Facts(launches=1111)
        result = tuned(FakeDoor(landscape(facts=facts)), history, budget=None, observer=observer)
        assert result.tune.budget_s == 200.0
        assert "compiling takes about 40 s, so the budget is 200 s; --budget changes it" in observer.lines

    def test_is_kept(self, tune: Tune) -> None:
        for budget_s in (30, 60, 120):
            result = tune(budget=float(budget_s), name=f"b{budget_s}")
            assert result.tune.seconds <= 1.15 * budget_s
            assert result.winner.ratio > 2

    def test_what_is_left_of_it_narrows_a_wide_interval(self, tune: Tune) -> None:
        """Processes that differ by a third: two replicates leave a gain of 1 to 20 times open."""
        alone = {"choices": CHOICES[:1], "step_s": lambda spec: 0.001 if switches_of(spec) else 0.01}
        result = tune(landscape(offset_sigma=0.3, **alone), budget="20m", replicates=2, batch=32)
        assert len(result.tune.finals) == 4, "twice as many as were asked for"
        steady = tune(landscape(), budget="20m", replicates=2, batch=32, name="steady")
        assert len(steady.tune.finals) < 4

    def test_what_is_left_of_it_goes_to_those_whose_trial_may_have_been_unlucky(self, tune: Tune) -> None:
        """Where processes lie 8 % apart, the fastest of five trials is often not the fastest recipe."""
        logs = {"fp16": -0.36, "bf16": -0.28, "tf32": -0.26, "amp": 0.0, "amp-bf16": 0.05}
        world = {
            "choices": tuple(SwitchChoice(switch=name, family="precision") for name in logs),
            "step_s": lambda spec: 0.006 * math.exp(sum(logs[name] for name in switches_of(spec))),
            "issue_share": lambda spec: 0.95,
        }

        def raced(result: TuneResult) -> set[str]:
            return {str(result.recorded[each].spec.recipe) for final in result.tune.finals for each in final}

        unsteady = [
            tune(landscape(offset_sigma=0.08, seed=seed, **world), budget="5m", name=f"{seed}")
            for seed in range(28, 40)
        ]
        assert [each.recipe for each in unsteady if each.winner is not None].count("fp16") >= 10
        assert any(len(raced(each)) > 3 for each in unsteady)
        steady = tune(landscape(**world), budget="5m")
        assert raced(steady) == {"baseline", "fp16"}

    def test_one_that_holds_the_baseline_alone_concludes_nothing(self, history: History) -> None:
        result = tuned(FakeDoor(landscape()), history, budget=3.0)
        assert {trial.recipe for trial in result.tune.trials} == {"baseline"}
        assert result.tune.state == "out-of-budget"
        (untried,) = [each for each in result.notes if each.code == "untried"]
        assert str(untried).startswith("no time to try all recipes that may be faster: ")
        told = str(result)
        assert told.startswith("no answer: only the baseline was tried; the budget does not hold another recipe")
        assert "winner" not in told
        assert told.rstrip().endswith("next: the same command with --resume and a larger --budget continues")

    @pytest.mark.parametrize("budget_s", [3.0, 60.0])
    def test_what_ended_for_want_of_it_goes_on_with_more(self, history: History, budget_s: float) -> None:
        short = tuned(FakeDoor(landscape()), history, budget=budget_s)
        assert short.tune.state == "out-of-budget"
        assert any(each.code in ("untried", "short-race", "gains-unknown") for each in short.notes)
        result = tuned(FakeDoor(landscape(seed=1)), history, budget="1h", resume=True)
        assert result.tune.state == "done"
        assert result.recipe == BEST
        assert result.winner.low is not None
        assert {gain.switch for gain in result.summary.switches} == set(BEST.split("+"))
        assert result.notes == (), "what it had to say of its end was of the first one"
        assert len(result.tune.trials) > len(short.tune.trials)

    def test_nothing_is_missed_where_nothing_else_can_be_tried(self, history: History) -> None:
        result = tuned(FakeDoor(landscape(choices=())), history, budget=3.0)
        assert result.tune.state == "done"
        assert "only the baseline was tried; there is nothing else to try here" in str(result)

    def test_more_than_enough_is_not_used_up(self, tune: Tune) -> None:
        assert tune(budget="2h").tune.seconds < 600

    def test_slow_steps_are_only_for_those_who_have_the_time(self, history: History) -> None:
        slow = SwitchChoice(switch="compile:max-autotune", family="compiler", relieves="both", is_slow_to_prepare=True)
        truth = landscape(
            choices=(*CHOICES, slow),
            step_s=lambda spec: max(host_s(spec), device_s(spec)) * (0.7 if slow.switch in switches_of(spec) else 1.0),
            compile_s=lambda spec: (
                200.0 if slow.switch in switches_of(spec) else 12.0 if "compile" in switches_of(spec) else 0
            ),
        )
        short = tuned(FakeDoor(truth), history, budget="5m", name="short")
        assert slow.switch not in short.recipe
        assert short.tune.seconds < 300
        assert slow.switch in tuned(FakeDoor(truth), history, budget="2h", name="long").recipe


class Interrupting(Observer):
    """Presses Ctrl-C once something has happened so often."""

    def __init__(self, event: str, times: int) -> None:
        self._event, self._left = event, times

    def attempting(self, recipe: str, number: int, why: str) -> None:
        self._count("trial")

    def replicate(self, number: int, planned: int, recipes: Any) -> None:
        self._count("replicate")

    def _count(self, event: str) -> None:
        self._left -= event == self._event
        if self._left == 0 and event == self._event:
            raise KeyboardInterrupt


class TestCtrlC:
    @pytest.mark.parametrize(("event", "times"), [("trial", 3), ("replicate", 1), ("replicate", 4)])
    def test_keeps_what_is_known_and_resume_goes_on(self, history: History, event: str, times: int) -> None:
        first = FakeDoor(landscape())
        stopped = tuned(first, history, observer=Interrupting(event, times))
        assert stopped.tune.state == "interrupted"
        assert stopped.summary.leader is not None, (
            "the best so far; whether it is surely faster is known after the race"
        )
        assert str(kept_tune(stopped.tune.name, workspace=Workspace(history=history))) == str(stopped)
        second = FakeDoor(landscape(seed=1))
        result = tuned(second, history, resume=True)
        assert result.tune.state == "done"
        assert f"# {BEST}:" in (result.snippet or "")
        assert kept_tune(result.tune.name, workspace=Workspace(history=history)).snippet == result.snippet
        known = [trial.recipe for trial in stopped.tune.trials]
        assert [trial.recipe for trial in result.tune.trials[: len(known)]] == known
        # Only what it goes on from is opened again; nothing else that was known is tried a second time.
        later = [trial.recipe for trial in result.tune.trials[len(known) :]]
        assert len(set(known) & set(later)) <= 1
        assert result.about["trials"] == len({*known, *later}), "and counted once"

    def test_a_search_that_is_done_is_only_told_again(self, history: History) -> None:
        done = tuned(FakeDoor(landscape()), history)
        door = FakeDoor(landscape())
        again = tuned(door, history, resume=True)
        assert door.clock_s == 0
        assert str(again) == str(done)

    def test_goes_on_after_recipes_that_would_no_longer_be_tried(self, history: History) -> None:
        """A rule that came later, or a device that tells of more: what was learned without it is no reason to stop."""
        done = tuned(FakeDoor(landscape()), history, name="study")
        tried = next(
            trial
            for trial in done.tune.trials
            if "channels-last+graphs" in trial.recipe and "compile" not in trial.recipe
        )
        needs = tuple(
            msgspec.structs.replace(
                choice, needs=(SwitchNeed(beside="channels-last", wants=("compile",), reason="graphs want it"),)
            )
            if choice.switch == "graphs"
            else choice
            for choice in CHOICES
        )
        again = tuned(FakeDoor(landscape(choices=needs)), history, name="study", resume=True)
        assert tried.recipe in {trial.recipe for trial in again.tune.trials}

    def test_another_question_is_not_answered_with_the_old_one(self, history: History) -> None:
        """A mistake that names what differs, before anything is measured."""
        others: tuple[tuple[dict[str, Any], str], ...] = (
            ({"objective": "latency"}, "objective"),
            ({"slo_p95": "20ms"}, "slo-p95"),
            ({"tolerance": "2x"}, "tolerance"),
            ({"switches": ["bf16"]}, "switches"),
            ({"without": ["fp16"]}, "without"),
            ({"recipes": "bf16+graphs"}, "recipe"),
            ({"allow_quantized": True, "check": "metrics:top1"}, "allow-quantized, check"),
            ({"device": "cuda:1"}, "device"),
            ({"batch": 8}, "batch"),
            ({"launch": {"door": "fake", "memory_limit_bytes": 2**30}}, "max-memory"),
        )
        tuned(FakeDoor(landscape()), history, name="study", budget=30.0)
        door = FakeDoor(landscape())
        for other, word in others:
            with pytest.raises(UsageError, match=rf"other settings \((batch, )?{word}\): give another --name"):
                tuned(door, history, name="study", resume=True, **other)
        assert door.clock_s == 0

    def test_more_replicates_may_be_asked_for(self, history: History) -> None:
        done = tuned(FakeDoor(landscape()), history, name="study", budget="1h")
        more = tuned(FakeDoor(landscape()), history, name="study", budget="2h", replicates=8, resume=True)
        assert len(done.tune.finals) < 8 <= len(more.tune.finals)

    def test_the_same_question_has_the_same_name_whatever_the_replicates_and_the_order(self, history: History) -> None:
        names = ["channels-last", "fp16"]
        tuned(FakeDoor(landscape()), history, switches=names)
        again = tuned(FakeDoor(landscape()), history, switches=names[::-1], replicates=4, resume=True)
        assert len(again.tune.finals) >= 4
