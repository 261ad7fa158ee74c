"""The search on benches whose truth is known: it finds the best, and never trades the numbers."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import msgspec
import pytest
from tune_bench import BEST, CHOICES, DEVICE, Tune, device_s, host_s, landscape, tuned
from worlds.recipes import SPACES, WRONG, switches_of
from worlds.tuning import loss_of, tune_simulated

from redline.model.errors import UsageError
from redline.model.note import note
from redline.model.protocol import SwitchChoice, SwitchNeed
from redline.model.record import Failure
from redline.model.spec import RunSpec
from redline.search.tune.record import decode_tune, encode_tune
from redline.store import History
from redline.testing.fake import FakeDoor
from redline.testing.landscape import EXACT
from redline.verbs.tune import kept_tune
from redline.verbs.workspace import Workspace

WILD = msgspec.structs.replace(
    EXACT, rel_l2=None, finite=False, passed=False, reason=note("not-finite", "the fp32 output is not finite")
)


class TestFindings:
    def test_the_best_recipe_with_an_interval_that_holds_the_truth(self, tune: Tune) -> None:
        winner = tune().winner
        assert winner.recipe == BEST
        truth = 0.01 / (0.01 * math.exp(-0.9 - 0.2 - 0.3 - 0.05))
        assert winner.low <= truth <= winner.high
        assert winner.high / winner.low < 1.1
        assert winner.row.batch == 32
        assert winner.row.throughput_per_s == pytest.approx(32 / 0.01 * truth, rel=0.06)

    def test_the_fewest_joules_per_item(self, tune: Tune) -> None:
        """fp16 is the fastest and draws far more power: bf16, a little slower, needs less energy."""
        watts = {"fp16": 700.0, "bf16": 400.0}
        power = landscape(
            step_s=device_s,
            issue_share=0.05,
            power_w=lambda spec: next((watts[one] for one in switches_of(spec) if one in watts), 500.0),
        )
        found = tune(power, objective="energy", price="2.50/h", switches=["fp16", "bf16", "channels-last"])
        winner = found.winner
        assert "bf16" in winner.recipe.split("+")
        truth = 500 / 400 * math.exp(0.85 + 0.2)
        assert winner.ratio == pytest.approx(truth, rel=0.05)
        row = next(row for row in found.table("ranking").rows if row.facts["verdict"] == "winner")
        assert row.value("energy_per_item") == pytest.approx(500 * 0.01 / 32 / truth, rel=0.05)
        assert row.value("cost_per_million") == pytest.approx(2.5 / 3600 / winner.row.throughput_per_s * 1e6)
        shown = str(found)
        assert "the items per joule of the baseline" in shown
        assert "mJ/img" in shown

    def test_energy_that_nobody_can_read_is_no_objective(self, tune: Tune) -> None:
        found = tune(objective="energy").summary
        assert found.winner is None
        assert [each.code for each in found.tune.notes] == ["no-energy"]

    def test_what_each_step_brings(self, tune: Tune) -> None:
        gains = {each.switch: each for each in tune().summary.switches}
        assert set(gains) == {"fp16", "channels-last", "compile", "graphs", "cudnn-benchmark"}
        # Without graphs Python is in the way again, whatever the device could do.
        truths = {
            switch: math.exp(-DEVICE[switch]) for switch in ("fp16", "channels-last", "compile", "cudnn-benchmark")
        }
        truths["graphs"] = 0.006 / (0.01 * math.exp(-1.45))
        for switch, truth in truths.items():
            low, high = gains[switch].low, gains[switch].high
            assert low - 0.01 <= truth <= high + 0.01, switch

    def test_what_needs_a_switch_is_left_out_together_with_it(self, tune: Tune) -> None:
        """Else nobody would learn what the compiler brings to a recipe with a switch that changes its program."""
        need = SwitchNeed(wants=("compile",), reason="add compile")
        rewrite = SwitchChoice(switch="rewrite", family="rewrite", needs=(need,))
        with_rewrite = landscape(
            choices=(*CHOICES, rewrite),
            step_s=lambda spec: device_s(spec) * (0.8 if "rewrite" in switches_of(spec) else 1.0),
            issue_share=0.05,
        )
        result = tune(with_rewrite)
        assert {"compile", "rewrite"} <= set(result.recipe.split("+"))
        gains = {frozenset(each.switch.split("+")): each for each in result.summary.switches}
        assert frozenset({"compile"}) not in gains
        assert gains[frozenset({"rewrite"})].gain == pytest.approx(1 / 0.8, rel=0.05)
        both = gains[frozenset({"compile", "rewrite"})]
        assert both.gain == pytest.approx(math.exp(-DEVICE["compile"]) / 0.8, rel=0.05)
        assert both.low is not None

    def test_who_did_not_race_moves_with_those_who_did(self, history: History) -> None:
        """The baseline had a bad start, which made all look fast beside it; nobody stands above the winner for that."""
        doors: list[FakeDoor] = []

        def step_s(spec: RunSpec) -> float:
            is_disturbed = not spec.recipe.switches and doors[0].clock_s < 20
            return max(host_s(spec), device_s(spec)) * (1.5 if is_disturbed else 1.0)

        doors.append(FakeDoor(landscape(step_s=step_s)))
        found = tuned(doors[0], history).summary
        assert found.ranking[0].recipe == found.winner.recipe
        assert all(each.ratio <= found.winner.ratio for each in found.ranking)

    def test_of_equals_the_simpler_wins(self, tune: Tune) -> None:
        """Where the device is all and compiling brings nothing, nobody should have to compile."""
        flat = landscape(
            step_s=lambda spec: 0.01 * (0.5 if "fp16" in switches_of(spec) else 1.0),
            issue_share=0.1,
            offset_sigma=0.001,
        )
        winner = tune(flat).winner
        assert winner.recipe == "fp16"

    def test_nothing_better_than_the_baseline(self, tune: Tune) -> None:
        worse = landscape(step_s=lambda spec: 0.01 * (1 + 0.3 * len(switches_of(spec))), issue_share=0.1)
        result = tune(worse)
        assert result.winner is None
        assert (result.summary.leader.recipe, result.summary.leader.ratio) == ("baseline", 1.0)
        assert result.summary.switches == ()
        assert result.tune.snippet is None
        with pytest.raises(UsageError, match="surely faster"):
            _ = result.recipe

    def test_is_a_function_of_what_is_stored(self, tune: Tune, history: History) -> None:
        result = tune(name="study")
        again = kept_tune("study", workspace=Workspace(history=history))
        assert str(again) == str(result)
        assert decode_tune(encode_tune(result.tune)) == result.tune
        with pytest.raises(UsageError, match=r"no tune .nosuch.*study"):
            kept_tune("nosuch", workspace=Workspace(history=history))

    def test_a_search_that_was_stored_under_old_names_still_loads(self, tune: Tune) -> None:
        """Schema 1: switches were called steps, replicates heats."""
        record = tune().tune
        old = msgspec.msgpack.decode(encode_tune(record))
        old["schema"] = 1
        old |= {"batch_heats": [["a", "b"]], "batches": [], "earlier": None}
        old["refused"] = [{"step": row["switch"], "reason": row["reason"]} for row in old["refused"]]
        old["tune"]["steps"] = old["tune"].pop("switches")
        old["tune"]["spec"]["recipe"]["steps"] = old["tune"]["spec"]["recipe"].pop("switches")
        assert decode_tune(msgspec.msgpack.encode(old)) == record


class TestNumbers:
    def test_a_wrong_recipe_is_never_timed_nor_recommended_however_fast(self, tune: Tune) -> None:
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
        for record in result.recorded.values():
            assert not record.blocks or "fp16" not in switches_of(record.spec)

    @pytest.mark.parametrize(("tolerance", "passes"), [("1x", False), ("8x", True), (3e-3, False), ("2e-2", True)])
    def test_the_tolerance_is_the_persons(self, tune: Tune, tolerance: Any, passes: bool) -> None:
        near = msgspec.structs.replace(
            EXACT, rel_l2=7e-3, floor=1e-3, tolerance=4e-3, passed=False, reason=note("above-tolerance", "too far")
        )
        result = tune(
            landscape(numerics=lambda spec: near if "fp16" in switches_of(spec) else EXACT), tolerance=tolerance
        )
        assert ("fp16" in result.recipe.split("+")) is passes

    def test_what_is_said_of_the_tolerance_is_true(self, tune: Tune) -> None:
        exact = msgspec.structs.replace(EXACT, method="outputs", rel_l2=0.0)
        far = msgspec.structs.replace(exact, rel_l2=0.1)
        truth = landscape(numerics=lambda spec: far if "fp16" in switches_of(spec) else exact)
        found = tune(truth, tolerance=1e-3).summary
        assert "numerics: error 0.1 is above the tolerance 0.001 that was asked for" in {r.text for r in found.rejected}

    @pytest.mark.parametrize(
        ("world", "code", "told"),
        [
            ({"numerics": WILD}, "not-finite", "the baseline gives numbers that are not finite"),
            (
                {"failure": Failure(stage="build", kind="user", message="it raised")},
                "nothing-runs",
                "itself does not run here",
            ),
            (
                {"failure": Failure(stage="compile", kind="timeout", message="late")},
                "baseline-too-slow",
                "was not ready within the budget",
            ),
        ],
    )
    def test_a_baseline_without_times_ends_it_and_is_told_why(
        self, tune: Tune, world: dict[str, Any], code: str, told: str
    ) -> None:
        result = tune(landscape(**world))
        assert result.winner is None
        assert [each.code for each in result.tune.notes] == [code]
        assert result.summary.rejected[0].recipe == "baseline"
        assert "no answer: " in str(result)
        assert told in str(result)
        with pytest.raises(UsageError, match="no recipe"):
            _ = result.recipe

    def test_nothing_more_is_tried_where_the_model_does_not_give_the_same_twice(self, tune: Tune) -> None:
        reason = note("not-repeatable", "the same inputs twice give outputs 0.9 apart")
        unlike = msgspec.structs.replace(EXACT, method="outputs", rel_l2=0.9, floor=0.9, passed=False, reason=reason)
        truth = landscape(numerics=lambda spec: unlike if switches_of(spec) else EXACT)
        result = tune(truth)
        assert len(result.tune.trials) == 2
        assert [each.code for each in result.tune.notes] == ["not-repeatable"]
        assert "no answer: the baseline itself does not give the same twice" in str(result)

    def test_what_was_faster_and_lost_its_numbers_in_the_race_is_told(self, tune: Tune) -> None:
        """The longer check of the race finds all recipes wrong that a trial has found faster."""

        def numerics(spec: RunSpec) -> Any:
            return WRONG if switches_of(spec) and spec.measure.loss_path_steps == 20 else EXACT

        told = str(tune(landscape(numerics=numerics)))
        assert "no winner: nothing that was tried and kept its numbers is faster than the baseline" in told


class TestSpending:
    def test_adds_up_to_the_seconds_of_the_search(self, tune: Tune) -> None:
        broken = Failure(stage="build", kind="crash", message="gone")
        truth = landscape(failure=lambda spec: broken if "cudnn-benchmark" in switches_of(spec) else None)
        for budget_s in (60.0, 600.0):
            found = tune(truth, budget=budget_s, name=f"b{budget_s}").summary
            parts = msgspec.structs.asdict(found.tune.spent)
            left = parts.pop("left")
            assert sum(parts.values()) == pytest.approx(found.tune.seconds, abs=0.1)
            assert left == pytest.approx(max(budget_s - found.tune.seconds, 0), abs=0.1)
            assert parts["baseline"] > 0
            assert parts["race"] > 0
            assert ("untried" in {each.code for each in found.tune.notes}) == (budget_s == 60.0)


class TestAgainstTheTruth:
    @pytest.mark.parametrize("kind", SPACES)
    def test_on_random_spaces_it_ends_next_to_the_best(self, kind: str) -> None:
        """`benchmarks/tune_search.py` does this at length and sets the seconds against measuring everything."""
        losses = []
        for seed in range(500, 510):
            truth = SPACES[kind](Random(seed))
            losses.append(loss_of(tune_simulated(truth, seed, 3600.0), truth))
        assert sum(loss <= 0.01 for loss in losses) >= 9
        assert all(loss < 0.6 for loss in losses)


def test_a_disturbed_machine_is_told_with_the_figures(history: History) -> None:
    """Alone the code of the winner is faster than what was measured beside others."""
    result = tuned(FakeDoor(landscape(foreign=("python (pid 7)",))), history, budget="60s")
    assert result.winner is not None
    (told,) = [str(each) for each in result.notes if each.code == "shared-gpu" and each.about == result.recipe]
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
    (told,) = [str(each) for each in result.notes]
    assert told.startswith("no recipe can be compared with strict fp32 on this model, as its output does not")
    assert result.tune.finals == ()
    assert str(result).startswith("no answer: only the baseline was tried; nothing can be compared with it")
