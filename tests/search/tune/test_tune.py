"""The search on benches whose truth is known: it finds the best, keeps its budget, and never trades the numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from random import Random
from typing import Any, ClassVar

import msgspec
import pytest
from worlds.recipes import FAILURES, SPACES, WRONG, switches_of
from worlds.tuning import loss_of, tune_simulated

import redline
from redline.analyze.replicates import lines_of
from redline.analyze.summary import summarize
from redline.api.tune import TuneResult, kept_tune
from redline.api.workspace import Workspace
from redline.errors import SpecError, UsageError
from redline.note import note
from redline.protocol import Ask
from redline.questions import AskMetric, SwitchChoice, SwitchNeed
from redline.record import Capabilities, Failure
from redline.search.observer import Observer
from redline.search.tune.record import decode_tune, encode_tune
from redline.spec import RunSpec
from redline.store import History
from redline.testing.fake import FakeDoor, FakeSession
from redline.testing.landscape import EXACT, Landscape
from redline.work import Facts

CHOICES = (
    SwitchChoice(switch="fp16", family="precision"),
    SwitchChoice(switch="bf16", family="precision"),
    SwitchChoice(switch="channels-last", family="layout"),
    SwitchChoice(switch="compile", family="compiler", relieves="both", capabilities=Capabilities(compiles=True)),
    SwitchChoice(switch="graphs", family="graphs", relieves="host", leaves_program=True),
    SwitchChoice(switch="cudnn-benchmark", family="autotune", leaves_program=True),
    SwitchChoice(switch="int8", family="quantization", capabilities=Capabilities(quantizes=True)),
    SwitchChoice(switch="onnx", family="runtime", refusal=note("unavailable", "onnxruntime is not installed")),
)
DEVICE = {"fp16": -0.9, "bf16": -0.85, "channels-last": -0.2, "compile": -0.3, "cudnn-benchmark": -0.05, "int8": -0.5}
BEST = "fp16+channels-last+compile+graphs+cudnn-benchmark"


def device_s(spec: RunSpec) -> float:
    items = (spec.workload.batch or 32) / 32
    return (0.001 + 0.009 * items) * math.exp(sum(DEVICE.get(switch, 0.0) for switch in switches_of(spec)))


def host_s(spec: RunSpec) -> float:
    return 0.0001 if "graphs" in switches_of(spec) else 0.006


def compiling(cold_s: float, warm_s: float) -> Callable[[RunSpec], float]:
    """What compiling takes: what was compiled once is found in a cache."""
    known: set[tuple[int | None, frozenset[str]]] = set()

    def seconds(spec: RunSpec) -> float:
        program = spec.workload.batch, switches_of(spec) - {"graphs", "cudnn-benchmark"}
        is_warm = program in known
        known.add(program)
        return 0.0 if "compile" not in program[1] else warm_s if is_warm else cold_s

    return seconds


def landscape(**changes: Any) -> Landscape:
    """A card whose host is in the way of everything fast."""
    settings: dict[str, Any] = {
        "step_s": lambda spec: max(host_s(spec), device_s(spec)),
        "issue_share": lambda spec: host_s(spec) / max(host_s(spec), device_s(spec)),
        "compile_s": compiling(12.0, 3.0),
        "choices": CHOICES,
        "noise_sigma": 0.01,
        "offset_sigma": 0.003,
        "drift_sigma": 0.002,
    }
    return Landscape(**{**settings, **changes})


@pytest.fixture
def history() -> Any:
    with History.open("sqlite://") as opened:
        yield opened


def tuned(door: FakeDoor, history: History, **settings: Any) -> TuneResult:
    observer = settings.pop("observer", None)
    given: dict[str, Any] = {"batch": 32, "budget": "30m", "launch": {"door": "fake"}, **settings}
    return redline.tune(
        "resnet50",
        clock=lambda: door.clock_s,
        **given,
        workspace=Workspace(door=door, history=history, observer=observer),
    )


@pytest.fixture
def tune(history: History) -> Callable[..., TuneResult]:
    def run(truth: Landscape | None = None, **settings: Any) -> TuneResult:
        return tuned(FakeDoor(truth or landscape()), history, **settings)

    return run


class TestFindings:
    def test_the_best_recipe_with_an_interval_that_holds_the_truth(self, tune: Callable[..., TuneResult]) -> None:
        winner = tune().winner
        assert winner is not None
        assert winner.recipe == BEST
        truth = 0.01 / (0.01 * math.exp(-0.9 - 0.2 - 0.3 - 0.05))
        assert winner.low is not None
        assert winner.high is not None
        assert winner.low <= truth <= winner.high
        assert winner.high / winner.low < 1.1
        assert winner.batch == 32
        assert winner.throughput_per_s == pytest.approx(32 / 0.01 * truth, rel=0.06)

    def test_its_speed_is_the_one_of_every_table(self, tune: Callable[..., TuneResult]) -> None:
        """Over all of its processes, on trial and in the race, which here differ by a tenth."""
        result = tune(landscape(offset_sigma=0.1))
        records = list(result.records.values())
        lines = {line.row.recipe: line for line in lines_of(records, summarize(records))}
        assert result.winner is not None
        assert len(lines[result.winner.recipe].rates) > 2
        assert result.winner.throughput_per_s == lines[result.winner.recipe].row.throughput_per_s
        for each in result.summary.ranking:
            assert each.throughput_per_s == lines[each.recipe].row.throughput_per_s

    def test_the_fewest_joules_per_item(self, tune: Callable[..., TuneResult]) -> None:
        """fp16 is the fastest and draws far more power: bf16, a little slower, needs less energy."""
        watts = {"fp16": 700.0, "bf16": 400.0}
        power = landscape(
            step_s=device_s,
            issue_share=0.05,
            power_w=lambda spec: next((watts[one] for one in switches_of(spec) if one in watts), 500.0),
        )
        found = tune(power, objective="energy", price="2.50/h", switches=["fp16", "bf16", "channels-last"])
        winner = found.winner
        assert winner is not None
        assert "bf16" in winner.recipe.split("+")
        truth = 500 / 400 * math.exp(0.85 + 0.2)
        assert winner.ratio == pytest.approx(truth, rel=0.05)
        assert winner.energy_per_item_j == pytest.approx(500 * 0.01 / 32 / truth, rel=0.05)
        assert winner.cost_per_million == pytest.approx(2.5 / 3600 / (winner.throughput_per_s or 0.0) * 1e6)
        shown = str(found)
        assert "the items per joule of the baseline" in shown
        assert "mJ/img" in shown

    def test_energy_that_nobody_can_read_is_no_objective(self, tune: Callable[..., TuneResult]) -> None:
        found = tune(objective="energy").summary
        assert found.winner is None
        assert [each.code for each in found.notes] == ["no-energy"]

    def test_what_each_step_brings(self, tune: Callable[..., TuneResult]) -> None:
        gains = {each.switch: each for each in tune().summary.switches}
        assert set(gains) == {"fp16", "channels-last", "compile", "graphs", "cudnn-benchmark"}
        # Without graphs Python is in the way again, whatever the device could do.
        truths = {
            switch: math.exp(-DEVICE[switch]) for switch in ("fp16", "channels-last", "compile", "cudnn-benchmark")
        }
        truths["graphs"] = 0.006 / (0.01 * math.exp(-1.45))
        for switch, truth in truths.items():
            low, high = gains[switch].low, gains[switch].high
            assert low is not None
            assert high is not None
            assert low - 0.01 <= truth <= high + 0.01, switch

    def test_the_ranking_and_what_was_never_tried(self, tune: Callable[..., TuneResult]) -> None:
        found = tune().summary
        assert found.ranking[0].recipe == BEST
        assert [each.ratio for each in found.ranking] == sorted((each.ratio for each in found.ranking), reverse=True)
        told = {each.switch: str(each.reason) for each in found.refused}
        assert told["onnx"] == "onnxruntime is not installed"
        assert found.compile_seconds > 0
        assert found.headroom is None
        assert found.snippet is not None
        assert BEST in found.snippet

    def test_who_did_not_race_moves_with_those_who_did(self, history: History) -> None:
        """The baseline had a bad start, which made all look fast beside it; nobody stands above the winner for that."""
        doors: list[FakeDoor] = []

        def step_s(spec: RunSpec) -> float:
            is_disturbed = not spec.recipe.switches and doors[0].clock_s < 20
            return max(host_s(spec), device_s(spec)) * (1.5 if is_disturbed else 1.0)

        doors.append(FakeDoor(landscape(step_s=step_s)))
        found = tuned(doors[0], history).summary
        assert found.winner is not None
        assert found.ranking[0].recipe == found.winner.recipe
        assert all(each.ratio <= found.winner.ratio for each in found.ranking)

    def test_of_equals_the_simpler_wins(self, tune: Callable[..., TuneResult]) -> None:
        """Where the device is all and compiling brings nothing, nobody should have to compile."""
        flat = landscape(
            step_s=lambda spec: 0.01 * (0.5 if "fp16" in switches_of(spec) else 1.0),
            issue_share=0.1,
            offset_sigma=0.001,
        )
        winner = tune(flat).winner
        assert winner is not None
        assert winner.recipe == "fp16"

    def test_nothing_better_than_the_baseline(self, tune: Callable[..., TuneResult]) -> None:
        worse = landscape(step_s=lambda spec: 0.01 * (1 + 0.3 * len(switches_of(spec))), issue_share=0.1)
        result = tune(worse)
        assert result.winner is None
        assert result.summary.leader is not None
        assert (result.summary.leader.recipe, result.summary.leader.ratio) == ("baseline", 1.0)
        assert result.summary.switches == ()
        assert result.summary.snippet is None
        with pytest.raises(UsageError, match="surely faster"):
            _ = result.recipe

    def test_is_a_function_of_what_is_stored(self, tune: Callable[..., TuneResult], history: History) -> None:
        result = tune(name="study")
        again = kept_tune("study", workspace=Workspace(history=history))
        assert again.summary == result.summary
        assert decode_tune(encode_tune(result.tune)) == result.tune
        with pytest.raises(UsageError, match=r"no tune .nosuch.*study"):
            kept_tune("nosuch", workspace=Workspace(history=history))

    def test_a_search_that_was_stored_under_old_names_still_loads(self, tune: Callable[..., TuneResult]) -> None:
        """Schema 1: switches were called steps, replicates heats."""
        record = msgspec.structs.replace(tune().tune, batch_replicates=(("a", "b"),))
        old = msgspec.msgpack.decode(encode_tune(record))
        old["schema"] = 1
        old["batch_heats"] = old.pop("batch_replicates")
        old["refused"] = [{"step": row["switch"], "reason": row["reason"]} for row in old["refused"]]
        old["tune"]["steps"] = old["tune"].pop("switches")
        old["tune"]["spec"]["recipe"]["steps"] = old["tune"]["spec"]["recipe"].pop("switches")
        assert decode_tune(msgspec.msgpack.encode(old)) == record


class TestNumbers:
    def test_a_wrong_recipe_is_never_timed_nor_recommended_however_fast(self, tune: Callable[..., TuneResult]) -> None:
        wrong = landscape(
            step_s=lambda spec: max(host_s(spec), device_s(spec)) * (0.1 if "fp16" in switches_of(spec) else 1.0),
            numerics=lambda spec: WRONG if "fp16" in switches_of(spec) else EXACT,
        )
        result = tune(wrong)
        assert result.winner is not None
        assert "bf16" in result.recipe
        rejected = {each.recipe: each.text for each in result.summary.rejected}
        assert rejected
        assert all("fp16" in recipe and reason.startswith("numerics: error 0.7") for recipe, reason in rejected.items())
        for record in result.records.values():
            assert not record.blocks or "fp16" not in switches_of(record.spec)

    @pytest.mark.parametrize(("tolerance", "passes"), [("1x", False), ("8x", True), (3e-3, False), ("2e-2", True)])
    def test_the_tolerance_is_the_persons(self, tune: Callable[..., TuneResult], tolerance: Any, passes: bool) -> None:
        near = msgspec.structs.replace(
            EXACT, rel_l2=7e-3, floor=1e-3, tolerance=4e-3, passed=False, reason=note("above-tolerance", "too far")
        )
        result = tune(
            landscape(numerics=lambda spec: near if "fp16" in switches_of(spec) else EXACT), tolerance=tolerance
        )
        assert ("fp16" in result.recipe.split("+")) is passes

    def test_what_is_said_of_the_tolerance_is_true(self, tune: Callable[..., TuneResult]) -> None:
        class Listening(Observer):
            said: ClassVar[dict[str, str]] = {}

            def attempted(self, recipe: str, said: str) -> None:
                self.said[recipe] = said

        exact = msgspec.structs.replace(EXACT, method="outputs", rel_l2=0.0)
        far = msgspec.structs.replace(exact, rel_l2=0.1)
        truth = landscape(numerics=lambda spec: far if "fp16" in switches_of(spec) else exact)
        found = tune(truth, tolerance=1e-3, observer=Listening()).summary
        assert Listening.said["baseline"] == "error 0 is within the tolerance 0.001 that was asked for"
        assert "numerics: error 0.1 is above the tolerance 0.001 that was asked for" in {r.text for r in found.rejected}

    def test_failures_are_rejected_with_their_reason(self, tune: Callable[..., TuneResult]) -> None:
        broken = Failure(stage="compile", kind="compile", message="no compiler here")
        result = tune(landscape(failure=lambda spec: broken if "compile" in switches_of(spec) else None))
        assert result.recipe == "fp16+channels-last+graphs+cudnn-benchmark"
        assert any("no compiler here" in each.text for each in result.summary.rejected)

    def test_a_pair_that_breaks_costs_neither_of_its_steps_alone(self, tune: Callable[..., TuneResult]) -> None:
        broken = Failure(stage="compile", kind="unsupported", message="not together")
        both = frozenset({"fp16", "graphs"})
        result = tune(landscape(failure=lambda spec: broken if both <= switches_of(spec) else None))
        assert result.recipe == "bf16+channels-last+compile+graphs+cudnn-benchmark"

    def test_a_recipe_that_goes_wrong_in_the_last_race_does_not_win(self, tune: Callable[..., TuneResult]) -> None:
        def numerics(spec: RunSpec) -> Any:
            is_final = spec.measure.loss_path_steps == 20
            return WRONG if is_final and "fp16" in switches_of(spec) else EXACT

        result = tune(landscape(numerics=numerics))
        assert "fp16" not in result.recipe.split("+")
        assert any(each.code == "above-tolerance" for each in result.summary.rejected)

    def test_a_baseline_that_does_not_run_ends_it(self, tune: Callable[..., TuneResult]) -> None:
        broken = Failure(stage="build", kind="user", message="this factory raised")
        result = tune(landscape(failure=broken))
        assert result.winner is None
        assert result.summary.rejected[0].recipe == "baseline"
        assert result.summary.notes[0].code == "nothing-runs"
        with pytest.raises(UsageError, match="no recipe"):
            _ = result.recipe

    def test_a_baseline_that_is_not_ready_in_time_is_not_called_broken(self, tune: Callable[..., TuneResult]) -> None:
        late = Failure(stage="compile", kind="timeout", message="no answer within 44 s; it was stopped")
        result = tune(landscape(failure=late))
        assert [each.code for each in result.summary.notes][:1] == ["baseline-too-slow"]
        assert "no answer: the baseline was not ready within the budget" in str(result)
        assert "with a larger --budget" in str(result)


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


class TestSpending:
    def test_adds_up_to_the_seconds_of_the_search(self, tune: Callable[..., TuneResult]) -> None:
        broken = Failure(stage="build", kind="crash", message="gone")
        truth = landscape(failure=lambda spec: broken if "cudnn-benchmark" in switches_of(spec) else None)
        for budget_s in (60.0, 600.0):
            found = tune(truth, budget=budget_s, name=f"b{budget_s}").summary
            parts = msgspec.structs.asdict(found.spent)
            left, _ = parts.pop("left"), parts.pop("reserved")
            assert sum(parts.values()) == pytest.approx(found.seconds, abs=0.1)
            assert left == pytest.approx(max(budget_s - found.seconds, 0), abs=0.1)
            assert parts["baseline"] > 0
            assert parts["race"] > 0

    def test_what_was_kept_for_the_race_is_told_with_what_was_not_tried(self, tune: Callable[..., TuneResult]) -> None:
        found = tune(budget=40.0).summary
        assert found.untried
        assert found.untried[0].cost_s > 0
        assert found.spent.reserved > 0


class TestJobs:
    def test_recipes_prepared_side_by_side_are_the_same_search_in_less_time(self, history: History) -> None:
        alone = tuned(FakeDoor(landscape()), history, name="alone")
        together = tuned(FakeDoor(landscape()), history, name="together", jobs=6)
        assert alone.recipe == together.recipe == BEST
        assert together.tune.spent.trials < 0.7 * alone.tune.spent.trials
        assert any(row.compile_is_contended for row in together.summary.ranking)
        assert not any(row.compile_is_contended for row in alone.summary.ranking)

    def test_one_minute_tries_a_compiler_and_ends_with_an_interval(self, tune: Callable[..., TuneResult]) -> None:
        winner = tune(budget=60.0, jobs=6).winner
        assert winner is not None
        assert winner.low is not None
        assert winner.low > 3
        assert "compile" in winner.recipe

    def test_who_is_not_ready_in_time_is_given_up_for_the_race(self, tune: Callable[..., TuneResult]) -> None:
        slow = landscape(compile_s=lambda spec: 300.0 if "compile" in switches_of(spec) else 0.0)
        result = tune(slow, budget=80.0, jobs=6)
        assert result.winner is not None
        assert "compile" not in result.recipe
        assert result.summary.seconds <= 80.0 * 1.1
        late = result.tune.given_up[0]
        told = [str(each) for each in result.summary.notes if each.code == "given-up"]
        assert f"{late.recipe} was given up: {late.seconds:.0f} s were not enough to prepare it" in told

    def test_what_does_not_fit_beside_others_is_tried_alone(self, history: History) -> None:
        from test_race import Crowded

        result = tuned(Crowded(landscape(), room=2), history, jobs=6)
        assert result.winner is not None
        assert result.winner.recipe == BEST


class TestQuantized:
    def test_is_not_tried_unless_allowed(self, tune: Callable[..., TuneResult]) -> None:
        found = tune().summary
        assert not any("int8" in each.recipe for each in found.ranking)

    def test_is_shown_but_not_recommended_without_a_check(self, tune: Callable[..., TuneResult]) -> None:
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
    def test_whatever_the_options_it_is_given(self, tune: Callable[..., TuneResult], asked: str) -> None:
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

    def test_wins_when_the_check_holds(self, tune: Callable[..., TuneResult]) -> None:
        result = tune(allow_quantized=True, check="metrics:top1")
        assert "int8" in result.recipe.split("+")
        assert result.tune.metrics[0].baseline == 1.0

    def test_loses_when_the_check_falls(self, tune: Callable[..., TuneResult]) -> None:
        falls = landscape(metric=lambda spec: 0.5 if "int8" in switches_of(spec) else 0.76)
        result = tune(falls, allow_quantized=True, check="metrics:top1")
        assert result.recipe == BEST
        assert any("fell from 0.76 to 0.5" in each.text for each in result.summary.rejected)


class TestCheck:
    """The user's own check is run on all that may win, whatever its number format."""

    def test_is_run_on_the_baseline_the_finalists_and_the_winner(self, tune: Callable[..., TuneResult]) -> None:
        result = tune(check="metrics:top1")
        asked = [metric.recipe for metric in result.tune.metrics]
        assert asked[0] == "baseline"
        raced = {str(result.records[each].spec.recipe) for replicate in result.tune.finals for each in replicate}
        assert raced <= set(asked)
        assert result.recipe in asked
        assert len(asked) == len(set(asked)), "once each"
        assert result.summary.metrics == result.tune.metrics
        assert "your check: 1, 1 with the baseline" in str(result)

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

    def test_what_falls_does_not_win_though_its_numerics_hold(self, tune: Callable[..., TuneResult]) -> None:
        falls = landscape(metric=lambda spec: 0.5 if "fp16" in switches_of(spec) else 0.76)
        result = tune(falls, check="metrics:top1")
        assert "fp16" not in result.recipe.split("+")
        assert any("fell from 0.76 to 0.5" in each.text for each in result.summary.rejected)
        assert next(metric for metric in result.tune.metrics if metric.recipe == result.recipe).value == 0.76

    def test_the_winner_of_all_is_checked_though_the_budget_is_over(self, tune: Callable[..., TuneResult]) -> None:
        result = tune(check="metrics:top1", budget=20.0)
        assert result.recipe in {metric.recipe for metric in result.tune.metrics}

    def test_an_error_under_a_recipe_rejects_it_and_is_told(self, tune: Callable[..., TuneResult]) -> None:
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

    def test_an_error_on_the_model_as_it_is_ends_it_before_anything_is_measured(
        self, tune: Callable[..., TuneResult]
    ) -> None:
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

    def test_what_is_slower_is_rejected_for_being_slower(self, tune: Callable[..., TuneResult]) -> None:
        """int8 takes twice as long as the baseline here: whether it keeps the numbers is beside the point."""
        choices = (
            SwitchChoice(switch="int8", family="quantization", capabilities=Capabilities(quantizes=True)),
            SwitchChoice(switch="fp16", family="precision"),
        )
        speed = {"fp16": 0.5, "int8": 2.0}
        truth = landscape(
            choices=choices,
            step_s=lambda spec: 0.01 * math.prod(speed[switch] for switch in switches_of(spec)),
            issue_share=lambda spec: 0.1,
        )
        for settings in ({}, {"check": "metrics:top1"}):
            result = tune(truth, allow_quantized=True, recipes="int8", name=f"slow {len(settings)}", **settings)
            assert result.recipe == "fp16"
            reason = next(each.text for each in result.summary.rejected if each.recipe == "int8")
            assert reason.startswith("slower: 0.50× the baseline, where fp16 has 2.0")


class TestBudget:
    def test_is_kept(self, tune: Callable[..., TuneResult]) -> None:
        for budget_s in (30, 60, 120):
            result = tune(budget=float(budget_s), name=f"b{budget_s}")
            assert result.summary.seconds <= 1.15 * budget_s
            assert result.winner is not None
            assert result.winner.ratio > 2

    def test_the_fastest_gets_its_interval_though_rivals_are_close(self, tune: Callable[..., TuneResult]) -> None:
        """A noisy CPU and three minutes: better one recipe in all replicates than four in one."""
        brings = {"channels-last": 0.75, "compile": 0.7, "cudnn-benchmark": 0.99}
        noisy = landscape(
            device_kind="cpu",
            step_s=lambda spec: 0.08 * math.prod(brings.get(switch, 1.0) for switch in switches_of(spec)),
            compile_s=lambda spec: 5.0 if "compile" in switches_of(spec) else 0.0,
            noise_sigma=0.15,
            noise_rho=0.5,
        )
        result = tune(noisy, budget="3m", without=["fp16", "bf16"], batch=4)
        assert len(result.tune.finals) >= 3
        assert result.winner is not None
        assert result.winner.low is not None
        assert result.winner.low > 1.05
        assert result.summary.seconds < 200

    def test_what_is_left_of_it_narrows_a_wide_interval(self, tune: Callable[..., TuneResult]) -> None:
        """Processes that differ by a third: two replicates leave a gain of 1 to 20 times open."""
        alone = {"choices": CHOICES[:1], "step_s": lambda spec: 0.001 if switches_of(spec) else 0.01}
        result = tune(landscape(offset_sigma=0.3, **alone), budget="20m", replicates=2, batch=32)
        assert len(result.tune.finals) == 5
        steady = tune(landscape(), budget="20m", replicates=2, batch=32, name="steady")
        assert len(steady.tune.finals) < 5

    def test_what_is_left_of_it_goes_to_those_whose_trial_may_have_been_unlucky(
        self, tune: Callable[..., TuneResult]
    ) -> None:
        """Where processes lie 8 % apart, the fastest of five trials is often not the fastest recipe."""
        logs = {"fp16": -0.36, "bf16": -0.28, "tf32": -0.26, "amp": 0.0, "amp-bf16": 0.05}
        world = {
            "choices": tuple(SwitchChoice(switch=name, family="precision") for name in logs),
            "step_s": lambda spec: 0.0006 * math.exp(sum(logs[name] for name in switches_of(spec))),
            "issue_share": lambda spec: 0.95,
        }

        def raced(result: TuneResult) -> set[str]:
            return {str(result.records[each].spec.recipe) for final in result.tune.finals for each in final}

        unsteady = [
            tune(landscape(offset_sigma=0.08, seed=seed, **world), budget="5m", name=f"{seed}")
            for seed in range(28, 40)
        ]
        assert [each.recipe for each in unsteady if each.winner is not None].count("fp16") >= 11
        assert any(len(raced(each)) > 3 for each in unsteady)
        steady = tune(landscape(**world), budget="5m")
        assert raced(steady) == {"baseline", "fp16"}

    def test_one_that_holds_the_baseline_alone_concludes_nothing(self, history: History) -> None:
        result = tuned(FakeDoor(landscape()), history, budget=3.0)
        assert {trial.recipe for trial in result.tune.trials} == {"baseline"}
        assert result.summary.state == "out-of-budget"
        (untried,) = [each for each in result.summary.notes if each.code == "untried"]
        assert str(untried).startswith("no time to try any other recipe: ")
        told = str(result)
        assert told.startswith("no answer: only the baseline was tried; there was no time for anything else")
        assert "winner" not in told
        assert told.rstrip().endswith("next: the same command with --resume and a larger --budget continues")

    @pytest.mark.parametrize("budget_s", [3.0, 25.0, 60.0, 90.0])
    def test_what_ended_for_want_of_it_goes_on_with_more(self, history: History, budget_s: float) -> None:
        short = tuned(FakeDoor(landscape()), history, budget=budget_s)
        assert short.summary.state == "out-of-budget"
        assert any(each.code in ("untried", "short-race", "gains-unknown") for each in short.summary.notes)
        result = tuned(FakeDoor(landscape(seed=1)), history, budget="1h", resume=True)
        assert result.summary.state == "done"
        assert result.recipe == BEST
        assert result.winner is not None
        assert result.winner.low is not None
        assert {gain.switch for gain in result.summary.switches} == set(BEST.split("+"))
        assert result.summary.notes == (), "what it had to say of its end was of the first one"
        assert len(result.tune.trials) > len(short.tune.trials)

    def test_nothing_is_missed_where_nothing_else_can_be_tried(self, history: History) -> None:
        result = tuned(FakeDoor(landscape(choices=())), history, budget=3.0)
        assert result.summary.state == "done"
        assert "only the baseline was tried; there is nothing else to try here" in str(result)

    def test_a_batch_for_which_it_was_too_short_is_found_with_more(self, history: History) -> None:
        truth = landscape(memory_bytes=lambda spec: 2**26 * (spec.workload.batch or 32), memory_limit_bytes=2**34)
        short = tuned(FakeDoor(truth), history, batch="auto", budget=40.0)
        assert (short.summary.state, short.tune.batch_replicates) == ("out-of-budget", ())
        result = tuned(FakeDoor(truth), history, batch="auto", budget="1h", resume=True)
        assert (result.summary.state, result.recipe) == ("done", BEST)
        assert len(result.tune.batch_replicates) == 3
        assert result.winner is not None
        assert (result.winner.batch or 0) > 32

    def test_more_than_enough_is_not_used_up(self, tune: Callable[..., TuneResult]) -> None:
        assert tune(budget="2h").summary.seconds < 600

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
        assert short.summary.seconds < 300
        assert slow.switch in tuned(FakeDoor(truth), history, budget="2h", name="long").recipe


class TestWishes:
    def test_recipes_asked_for_come_first(self, tune: Callable[..., TuneResult]) -> None:
        trials = tune(recipes=["bf16+compile", "fp16+graphs"]).tune.trials
        assert [trial.recipe for trial in trials[:3]] == ["baseline", "bf16+compile", "fp16+graphs"]

    def test_steps_restrict_and_leave_out(self, tune: Callable[..., TuneResult]) -> None:
        assert tune(switches=["bf16", "graphs"], name="a").recipe == "bf16+graphs"
        assert tune(without=["fp16", "compile"], name="b").recipe == "bf16+channels-last+graphs+cudnn-benchmark"

    def test_a_latency_target_rules_out_what_is_late(self, tune: Callable[..., TuneResult]) -> None:
        result = tune(slo_p95="2.6ms")
        late = [each for each in result.summary.ranking if each.note and each.note.code == "too-late"]
        assert late
        assert result.winner is not None
        assert all(each.ratio < result.winner.ratio for each in late)
        nothing = tune(slo_p95="1us", name="strict")
        assert nothing.winner is None

    def test_the_objective_may_be_latency(self, tune: Callable[..., TuneResult]) -> None:
        result = tune(landscape(sync_s=0.002), objective="latency")
        assert result.winner is not None
        assert result.winner.recipe == BEST
        blocks = {block.kind for record in result.records.values() for block in record.blocks}
        assert blocks == {"latency"}

    def test_the_batch_may_be_looked_for(self, tune: Callable[..., TuneResult]) -> None:
        # Without drift, which over the minutes of a search is as large as the gain that is looked for.
        truth = landscape(
            memory_bytes=lambda spec: 2**26 * (spec.workload.batch or 32), memory_limit_bytes=2**34, drift_sigma=0.0
        )
        result = tune(truth, batch="auto", budget="1h")
        assert result.winner is not None
        assert result.winner.recipe == BEST
        assert result.winner.batch is not None
        assert 90 < result.winner.batch <= 256
        assert result.winner.low is not None
        assert result.winner.throughput_per_s is not None
        assert result.winner.throughput_per_s > 1.05 * 32 / 0.01 * math.exp(1.45)

    def test_what_spares_memory_is_tried_where_a_larger_batch_pays(self, tune: Callable[..., TuneResult]) -> None:
        """Checkpointing makes a step slower and lets four times as many items in."""

        def step_s(spec: RunSpec) -> float:
            slower = 1.1 if "checkpointing" in switches_of(spec) else 1.0
            faster = 0.5 if "fp16" in switches_of(spec) else 1.0
            return slower * faster * (0.02 + 0.0002 * (spec.workload.batch or 32))

        def memory_bytes(spec: RunSpec) -> int:
            return (2**24 if "checkpointing" in switches_of(spec) else 2**26) * (spec.workload.batch or 32)

        truth = landscape(
            step_s=step_s,
            issue_share=lambda spec: 0.1,
            memory_bytes=memory_bytes,
            memory_limit_bytes=2**32,
            drift_sigma=0.0,
            choices=(
                SwitchChoice(switch="fp16", family="precision"),
                SwitchChoice(switch="checkpointing", family="checkpointing", relieves="memory"),
            ),
        )
        found = {choice.recipe: choice for choice in tune(truth, batch="auto", budget="1h").tune.batches}
        sparing, plain = found["fp16+checkpointing"], found["fp16"]
        assert sparing.batch > 2 * plain.batch
        assert sparing.throughput_per_s > 1.3 * plain.throughput_per_s
        at_32 = tune(truth, budget="1h").winner
        assert at_32 is not None
        assert at_32.recipe == "fp16"

    @pytest.mark.parametrize("budget_s", [60.0, 80.0, 120.0, 180.0, 240.0, 300.0, 600.0])
    def test_what_is_told_of_the_winner_is_of_one_batch(self, history: History, budget_s: float) -> None:
        truth = landscape(
            memory_bytes=lambda spec: 2**26 * (spec.workload.batch or 32), memory_limit_bytes=2**34, drift_sigma=0.0
        )
        result = tuned(FakeDoor(truth), history, batch="auto", budget=budget_s)
        winner, tune = result.winner, result.tune
        assert winner is not None
        own = [record for record in result.records.values() if str(record.spec.recipe) == winner.recipe]
        timed = [record for record in own if (record.spec.workload.batch or 32) == winner.batch and record.blocks]
        assert result.records[winner.record_id] in timed
        assert winner.throughput_per_s == pytest.approx((winner.batch or 0) / truth.step_s(timed[0].spec), rel=0.02)
        apart = [each for each in result.summary.notes if each.code == "batch-not-raced"]
        assert bool(apart) == (bool(tune.batches) and not tune.batch_replicates)
        assert all("the budget ended before they were compared there" in str(each) for each in apart)
        assert f"batch {tune.batches[0].batch}" in str(apart[0]) if apart else winner.batch != 32 or not tune.batches
        assert "· batch 32 ·" in str(result), "where the ranking was made"
        assert f"at batch {winner.batch}" in str(result)

    def test_with_the_batch_asked_for_there_is_time_for_a_race_there(self, history: History) -> None:
        truth = landscape(memory_bytes=lambda spec: 2**26 * (spec.workload.batch or 32), memory_limit_bytes=2**34)
        result = tuned(FakeDoor(truth), history, batch="auto", budget="5m")
        assert result.tune.batch_replicates
        assert result.summary.seconds <= 330

    def test_who_moves_most_at_its_batch_wins(self, history: History) -> None:
        """Channels last is faster at the first batch, and takes so much memory that it cannot grow."""
        choices = (SwitchChoice(switch="channels-last", family="layout"),)

        def step_s(spec: RunSpec) -> float:
            return 0.02 if spec.recipe.switches else 0.05 + 0.0001 * (spec.workload.batch or 32)

        def memory_bytes(spec: RunSpec) -> int:
            return (2**28 if spec.recipe.switches else 2**24) * (spec.workload.batch or 32)

        truth = landscape(
            choices=choices, step_s=step_s, issue_share=0.1, memory_bytes=memory_bytes, memory_limit_bytes=2**34
        )
        result = tuned(FakeDoor(truth), history, batch="auto", budget="1h")
        winner = result.summary.leader
        assert winner is not None
        assert (winner.recipe, winner.ratio) == ("baseline", 1.0)
        assert winner.batch is not None
        assert winner.batch > 300
        assert any(each.code == "other-winner" and "channels-last won" in str(each) for each in result.summary.notes)

    @pytest.mark.parametrize(
        ("wish", "words"),
        [
            ({"batch": "some"}, "batch must be a number or 'auto'"),
            ({"budget": 0}, "budget must be above 0"),
            ({"budget": "soon"}, "10m"),
            ({"objective": "beauty"}, "objective must be one of"),
            ({"tolerance": "loose"}, "2x"),
            ({"tolerance": "-1"}, "2x"),
            ({"slo_p95": 0.0}, "slo_p95 must be above 0"),
            ({"switches": ["fp61"]}, "did you mean fp16"),
            ({"recipes": ["fp16+bf16"]}, "exclude"),
            ({"recipes": ["nosuch"]}, "unknown switch"),
            ({"replicates": 0}, "replicates must be 1 or more"),
            ({"check": "top1", "allow_quantized": True}, "does not name a function"),
            ({"check": "nosuch.py:top1", "allow_quantized": True}, "no such file"),
            ({"check": "metrics:top1", "allow_quantized": True, "task": "train"}, "inference only"),
            ({"resume": True}, "no tune .* to resume"),
        ],
    )
    def test_mistakes_are_told_before_anything_is_measured(
        self, history: History, wish: dict[str, Any], words: str
    ) -> None:
        door = FakeDoor(landscape())
        with pytest.raises(UsageError, match=words):
            tuned(door, history, **wish)
        assert door.clock_s == 0


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
    @pytest.mark.parametrize(
        ("event", "times"), [("trial", 2), ("trial", 4), ("replicate", 1), ("replicate", 2), ("replicate", 4)]
    )
    def test_keeps_what_is_known_and_resume_goes_on(self, history: History, event: str, times: int) -> None:
        first = FakeDoor(landscape())
        stopped = tuned(first, history, observer=Interrupting(event, times))
        assert stopped.summary.state == "interrupted"
        assert stopped.summary.leader is not None, (
            "the best so far; whether it is surely faster is known after the race"
        )
        assert kept_tune(stopped.tune.name, workspace=Workspace(history=history)).summary == stopped.summary
        second = FakeDoor(landscape(seed=1))
        result = tuned(second, history, resume=True)
        assert result.summary.state == "done"
        assert result.recipe == BEST
        known = [trial.recipe for trial in stopped.tune.trials]
        assert [trial.recipe for trial in result.tune.trials[: len(known)]] == known
        # Only what it goes on from is opened again; nothing else that was known is tried a second time.
        later = [trial.recipe for trial in result.tune.trials[len(known) :]]
        assert len(set(known) & set(later)) <= 1
        assert result.summary.trials == len({*known, *later}), "and counted once"

    @pytest.mark.parametrize("times", [2, 3, 5])
    def test_there_is_code_once_there_is_a_winner(self, history: History, times: int) -> None:
        stopped = tuned(FakeDoor(landscape()), history, observer=Interrupting("trial", times))
        assert (stopped.winner, stopped.snippet) == (None, None)
        result = tuned(FakeDoor(landscape()), history, resume=True)
        assert result.recipe == BEST
        assert f"# {BEST}:" in (result.snippet or "")
        assert kept_tune(result.tune.name, workspace=Workspace(history=history)).snippet == result.snippet

    def test_before_anything_was_timed(self, history: History) -> None:
        stopped = tuned(FakeDoor(landscape()), history, observer=Interrupting("trial", 1))
        assert (stopped.summary.state, stopped.winner) == ("interrupted", None)
        assert tuned(FakeDoor(landscape()), history, resume=True).recipe == BEST

    def test_a_search_that_is_done_is_only_told_again(self, history: History) -> None:
        done = tuned(FakeDoor(landscape()), history)
        door = FakeDoor(landscape())
        again = tuned(door, history, resume=True)
        assert door.clock_s == 0
        assert again.summary.winner == done.summary.winner

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

    @pytest.mark.parametrize(
        ("other", "word"),
        [
            ({"objective": "latency"}, "objective"),
            ({"slo_p95": "20ms"}, "slo-p95"),
            ({"tolerance": "2x"}, "tolerance"),
            ({"switches": ["bf16"]}, "switches"),
            ({"without": ["fp16"]}, "without"),
            ({"recipes": "bf16+graphs"}, "recipe"),
            ({"allow_quantized": True}, "allow-quantized"),
            ({"allow_quantized": True, "check": "metrics:top1"}, "allow-quantized, check"),
            ({"device": "cuda:1"}, "device"),
            ({"batch": "auto"}, "batch"),
            ({"launch": {"door": "fake", "memory_limit_bytes": 2**30}}, "max-memory"),
        ],
    )
    def test_another_question_is_not_answered_with_the_old_one(
        self, history: History, other: dict[str, Any], word: str
    ) -> None:
        tuned(FakeDoor(landscape()), history, name="study")
        door = FakeDoor(landscape())
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

    def test_the_batch_is_looked_for_in_fresh_processes_only(self, history: History) -> None:
        with pytest.raises(SpecError, match="fresh process"):
            tuned(FakeDoor(landscape()), history, batch="auto", launch={"door": "inline"})

    def test_another_workload_is_not_resumed_by_the_same_name(self, history: History) -> None:
        tuned(FakeDoor(landscape()), history, name="study")
        with pytest.raises(UsageError, match="other settings"):
            tuned(FakeDoor(landscape()), history, name="study", batch=8, resume=True)


class TestMemory:
    def test_a_recipe_that_fits_only_alone_is_still_tried(self, history: History) -> None:
        from test_race import Crowded

        door = Crowded(landscape(), room=1)
        result = tuned(door, history)
        assert result.winner is not None
        assert result.winner.recipe == BEST
        assert result.winner.low is not None


class TestAgainstTheTruth:
    @pytest.mark.parametrize("kind", SPACES)
    def test_on_random_spaces_it_ends_next_to_the_best(self, kind: str) -> None:
        """`benchmarks/tune_search.py` does this at length and sets the seconds against measuring everything."""
        losses = []
        for seed in range(500, 510):
            truth = SPACES[kind](Random(seed))
            losses.append(loss_of(tune_simulated(truth, seed, 3600.0), truth))
        assert sum(loss <= 0.01 for loss in losses) >= 9
        assert all(loss < 0.5 for loss in losses)


WITH_CACHE = SwitchNeed(wants=("static-cache",), reason="add static-cache")
DECODING = (
    SwitchChoice(switch="bf16", family="precision"),
    SwitchChoice(switch="fp16", family="precision"),
    SwitchChoice(switch="static-cache", family="cache", relieves="both"),
    SwitchChoice(
        switch="compile",
        family="compiler",
        relieves="both",
        needs=(WITH_CACHE,),
        capabilities=Capabilities(compiles=True),
    ),
    SwitchChoice(
        switch="compile:coordinate-descent",
        family="compiler",
        relieves="both",
        needs=(WITH_CACHE,),
        capabilities=Capabilities(compiles=True),
        is_slow_to_prepare=True,
        prepare_s=70.0,
    ),
    SwitchChoice(switch="graphs", family="graphs", relieves="host", needs=(WITH_CACHE,), leaves_program=True),
)


def token_s(spec: RunSpec) -> float:
    """As on a large GPU: the host needs 10 ms for a token that a graph replays at once; kernels read slowly, or well."""
    switches = switches_of(spec)
    host_s = 1e-5 if "graphs" in switches else 0.010
    reading = {"compile": 0.0016, "compile:coordinate-descent": 0.0008}
    device_s = next((seconds for switch, seconds in reading.items() if switch in switches), 0.0026)
    return max(host_s, device_s * (1.0 if switches & {"bf16", "fp16"} else 2.0))


def first_s(spec: RunSpec) -> float:
    """The cache that is made beforehand costs the prompt time."""
    switches = switches_of(spec)
    return (0.02 if switches & {"bf16", "fp16"} else 0.04) * (1.5 if "static-cache" in switches else 1.0)


class TestGeneration:
    LANDSCAPE = Landscape(
        step_s=lambda spec: first_s(spec) + 31 * token_s(spec),
        ttft_s=first_s,
        issue_share=lambda spec: 0.0001 if "graphs" in switches_of(spec) else min(0.010 / token_s(spec), 1.0),
        compile_s=lambda spec: {"compile": 20.0, "compile:coordinate-descent": 60.0}.get(
            next((each for each in switches_of(spec) if each.startswith("compile")), ""), 0.0
        ),
        choices=DECODING,
        noise_sigma=0.01,
    )

    def test_the_recipe_for_tokens_is_found_without_its_name(self, tune: Callable[..., TuneResult]) -> None:
        found = tune(self.LANDSCAPE, task="generate", batch=1, objective="tpot", budget="8m", replicates=2)
        assert switches_of_text(found.recipe) >= {"static-cache", "compile:coordinate-descent", "graphs"}
        assert found.winner is not None
        assert found.winner.tpot_s == pytest.approx(0.0008, rel=0.05)
        assert found.winner.ratio == pytest.approx(0.010 / 0.0008, rel=0.1)

    def test_what_compiles_for_a_minute_is_begun_beside_what_is_quick(self, tune: Callable[..., TuneResult]) -> None:
        """Begun once the quick ones were timed it would not fit any more: plain compiling would win, half as fast."""
        facts = Facts(launches=900, step_s=0.35, host_s=0.34, peak_bytes=6 * 2**30, limit_bytes=140 * 2**30)
        truth = dataclasses.replace(self.LANDSCAPE, facts=facts)
        found = tune(truth, task="generate", batch=1, objective="tpot", budget="2m", replicates=2, jobs=8)
        assert switches_of_text(found.recipe) >= {"static-cache", "compile:coordinate-descent", "graphs"}
        assert found.winner is not None

    def test_kernels_of_our_own_are_compiled_around_first(self, tune: Callable[..., TuneResult]) -> None:
        """As timed on an H200: tuned products alone take longer to prepare, and then there is no time for both."""
        tuned = next(each for each in DECODING if each.is_slow_to_prepare)
        kernels = SwitchChoice(switch="decode-kernels", family="attention", relieves="device", needs=(WITH_CACHE,))
        other = SwitchChoice(switch="sdpa:flash", family="attention", relieves="device")
        choices = (*DECODING, msgspec.structs.replace(tuned, prepare_s=45.0), kernels, other)

        def seconds(spec: RunSpec) -> float:
            return 0.00056 / 0.00065 * token_s(spec) if "decode-kernels" in switches_of(spec) else token_s(spec)

        def compile_s(spec: RunSpec) -> float:
            switches = switches_of(spec)
            if tuned.switch in switches:
                return 20.0 if "decode-kernels" in switches else 35.0
            return 10.0 if "compile" in switches else 0.0

        truth = dataclasses.replace(
            self.LANDSCAPE,
            step_s=lambda spec: first_s(spec) + 31 * seconds(spec),
            compile_s=compile_s,
            build_s=7.0,
            choices=tuple({each.switch: each for each in choices}.values()),
            facts=Facts(launches=360, step_s=0.35, host_s=0.34, peak_bytes=6 * 2**30, limit_bytes=140 * 2**30),
        )
        found = tune(truth, task="generate", batch=1, objective="tpot", budget="90s", replicates=2, jobs=8)
        assert switches_of_text(found.recipe) >= {"decode-kernels", tuned.switch, "graphs"}
        assert "sdpa:flash" not in found.recipe, "of which nothing clear is expected"
        assert found.winner is not None

    def test_the_first_token_wants_another_recipe(self, tune: Callable[..., TuneResult]) -> None:
        found = tune(self.LANDSCAPE, task="generate", batch=1, objective="ttft", budget="5m", replicates=2)
        assert found.recipe in ("bf16", "fp16")
        assert found.winner is not None
        assert found.winner.ratio == pytest.approx(2.0, rel=0.05)

    def test_objectives_of_tokens_need_a_generation(self, tune: Callable[..., TuneResult]) -> None:
        with pytest.raises(SpecError, match="goes with --task generate"):
            tune(objective="tpot")
        with pytest.raises(SpecError, match="objective must be one of"):
            tune(objective="tokens")
        with pytest.raises(SpecError, match="needs new_tokens 2 or more"):
            tune(self.LANDSCAPE, task="generate", batch=1, new_tokens=1, objective="tpot")


def switches_of_text(recipe: str) -> set[str]:
    return set(recipe.split("+"))


def test_a_disturbed_machine_is_told_with_the_figures(history: History) -> None:
    """Alone the code of the winner is faster than what was measured beside others."""
    result = tuned(FakeDoor(landscape(foreign=("python (pid 7)",))), history, budget="60s")
    assert result.winner is not None
    (told,) = [str(each) for each in result.summary.notes if each.code == "shared-gpu" and each.about == result.recipe]
    assert "python (pid 7)" in told
    assert told.endswith("undisturbed it may be faster, and its gain another")


def test_nothing_is_tried_where_nothing_can_be_compared(history: History) -> None:
    """Every recipe would be rejected with the same sentence."""
    silent = msgspec.structs.replace(EXACT, method="reference", degenerate=True)
    said_so = msgspec.structs.replace(silent, method="outputs", passed=False)
    truth = landscape(numerics=lambda spec: said_so if spec.recipe.switches else silent)
    result = tuned(FakeDoor(truth), history, budget="60s")
    assert [trial.recipe for trial in result.tune.trials] == ["baseline"]
    assert result.tune.spent.failed == 0
    (told,) = [str(each) for each in result.summary.notes]
    assert told.startswith("no recipe can be compared with strict fp32 on this model, as its output does not")
    assert result.tune.finals == ()
    assert str(result).startswith("no answer: only the baseline was tried; nothing can be compared with it")


class TestASecondSearch:
    """Of the same workload, in the same history, and not resumed."""

    def test_begins_with_what_the_first_one_found(self, history: History) -> None:
        first = tuned(FakeDoor(landscape(failure=_bf16_breaks)), history, budget="5m")
        second = tuned(FakeDoor(landscape(failure=_bf16_breaks, seed=1)), history, budget="60s")
        assert [trial.recipe for trial in second.tune.trials][:2] == ["baseline", first.recipe]
        (told,) = [str(each) for each in second.summary.notes if each.code == "earlier"]
        assert f"its best, {first.recipe}, comes first where it fits" in told
        assert "bf16 broke then" in told
        assert second.tune.created_at >= first.tune.created_at

    def test_takes_nothing_from_another_model(self, history: History) -> None:
        """Of the same name: the file was edited, and the hash of the model says so."""
        first = tuned(FakeDoor(landscape()), history, budget="60s")
        record = first.records[first.tune.trials[0].record_id]
        assert record.prepared is not None
        workload = msgspec.structs.replace(record.prepared.workload, model_hash="other")
        prepared = msgspec.structs.replace(record.prepared, workload=workload)
        history.finish(msgspec.structs.replace(record, prepared=prepared))
        second = tuned(FakeDoor(landscape(seed=1)), history, budget="60s")
        assert second.tune.earlier is None
        assert [trial.recipe for trial in second.tune.trials][:2] != ["baseline", first.recipe]
        (told,) = [str(each) for each in second.summary.notes if each.code.startswith("earlier")]
        assert "the model is another than in the search of" in told


def _bf16_breaks(spec: RunSpec) -> Failure | None:
    broken = Failure(stage="numerics", kind="unsupported", message="no bf16", switches=("bf16",), scope="switch")
    return broken if "bf16" in switches_of(spec) else None
