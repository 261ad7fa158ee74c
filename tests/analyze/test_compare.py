"""Verdicts of a comparison against a known truth: what is faster, what is not, and what cannot be said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from reported import fake_door, race_records, sweep_records

from redline.analyze.compare import (
    Comparison,
    Comparisons,
    compare_records,
)
from redline.analyze.pairs import pairs_of
from redline.analyze.statistics import between_processes
from redline.model.errors import UsageError
from redline.model.record import Numerics, RunRecord
from redline.model.spec import RunSpec


def replicates(count: int = 5, *, speed: float = 1.0, **truth: Any) -> list[RunRecord]:
    """Processes of one benchmark, each with an offset of its own."""
    door = fake_door(**{"step_s": 0.010 / speed, "offset_sigma": 0.01, **truth})
    return [record for _ in range(count) for record in sweep_records(door, recipe="baseline", batches=[32])]


def paced(speed: float) -> Callable[[RunSpec], float]:
    return lambda spec: 0.010 / speed / (2.5 if spec.recipe.switches else 1.0)


def only(found: Comparisons) -> Comparison:
    (comparison,) = found.comparisons
    return comparison


def changed(record: RunRecord, part: str, **changes: Any) -> RunRecord:
    assert record.prepared is not None
    prepared = record.prepared
    environment = prepared.environment
    if part == "device":
        environment = msgspec.structs.replace(
            environment, device=msgspec.structs.replace(environment.device, **changes)
        )
    elif part == "environment":
        environment = msgspec.structs.replace(environment, **changes)
    prepared = msgspec.structs.replace(prepared, environment=environment)
    if part == "workload":
        prepared = msgspec.structs.replace(prepared, workload=msgspec.structs.replace(prepared.workload, **changes))
    return msgspec.structs.replace(record, prepared=prepared, **(changes if part == "record" else {}))


class TestInTurns:
    def test_the_ratio_is_time_of_the_first_over_time_of_the_other(self) -> None:
        first, other, _ = race_records(["baseline", "fp16", "channels-last"])
        found = only(compare_records([first], [other]))
        assert (found.verdict, found.basis) == ("faster", "interleaved")
        assert found.ratio.ratio == pytest.approx(2.5, rel=0.02)
        assert found.ratio.low < 2.5 < found.ratio.high
        assert only(compare_records([other], [first])).verdict == "slower"

    @pytest.mark.parametrize("count", [2, 3])
    def test_several_pairs_have_the_ratio_and_the_interval_of_the_race(self, count: int) -> None:
        """A machine that slows down between the replicates moves both sides of each."""
        speeds = [1.0, 0.5, 0.8][:count]
        raced = [
            race_records(["baseline", "fp16"], fake_door(step_s=paced(speed), offset_sigma=0.01)) for speed in speeds
        ]
        first, other = ([each[side] for each in raced] for side in (0, 1))
        found = only(compare_records(first, other[::-1]))
        (pair,) = pairs_of(raced)
        assert (found.basis, found.verdict) == ("interleaved", pair.verdict) == ("interleaved", "faster")
        assert (found.ratio.ratio, found.ratio.low, found.ratio.high) == (pair.ratio, pair.low, pair.high)

    def test_replicates_of_which_not_all_met_are_taken_apart(self) -> None:
        raced = [race_records(["baseline", "fp16"]) for _ in range(4)]
        first, other = ([each[side] for each in raced] for side in (0, 1))
        stranger = race_records(["baseline", "fp16"])[1]
        for sides in ((first[:3], other[1:]), (first[:3], other), (first, [*other[:3], stranger])):
            assert only(compare_records(*sides)).basis == "replicates"

    def test_a_small_difference_with_a_wide_interval_is_inconclusive(self) -> None:
        door = fake_door(step_s=lambda spec: 0.010 / (1.03 if spec.recipe.switches else 1.0), noise_sigma=0.3, seed=1)
        first, other = race_records(["baseline", "fp16"], door)
        found = only(compare_records([first], [other]))
        assert found.verdict == "inconclusive"
        assert found.reasons[0].code == "across-band"

    def test_the_times_beside_a_ratio_agree_with_it(self) -> None:
        """The first has many rounds more, from a time when the machine was three times as fast."""
        first, other = race_records(["baseline", "amp"])
        fast = [
            msgspec.structs.replace(block, round=100 + block.round, samples=tuple(each / 3 for each in block.samples))
            for block in first.blocks
            for _ in range(3)
        ]
        first = msgspec.structs.replace(first, blocks=(*first.blocks, *fast))
        found = only(compare_records([first], [other]))
        assert found.verdict == "same"
        assert found.first_s / found.other_s == pytest.approx(found.ratio.ratio)


class TestSeparateRuns:
    @pytest.mark.parametrize(
        ("speed", "told"),
        [(2.2, "faster"), (1 / 2.2, "slower"), (1.20, "faster"), (1 / 1.20, "slower"), (1.05, "inconclusive")],
    )
    def test_one_run_a_side_has_a_verdict_where_processes_cannot_explain_it(self, speed: float, told: str) -> None:
        found = only(compare_records(replicates(1), replicates(1, speed=speed)))
        assert (found.verdict, found.basis) == (told, "single runs")
        assert found.ratio.ratio == pytest.approx(speed, rel=0.05)
        assert found.ratio.high / found.ratio.low > 1.10**2, "at least the allowance to both sides"
        assert found.reasons[0].code == "single-runs"

    def test_one_run_a_side_is_never_the_same(self) -> None:
        assert only(compare_records(replicates(1), replicates(1))).verdict == "inconclusive"

    def test_a_cpu_is_allowed_more(self) -> None:
        def on_cpu(record: RunRecord) -> RunRecord:
            return changed(record, "device", kind="cpu")

        first, other = on_cpu(*replicates(1)), on_cpu(*replicates(1, speed=1.20))
        assert only(compare_records([first], [other])).verdict == "inconclusive"
        assert only(compare_records([first], [on_cpu(*replicates(1, speed=2.2))])).verdict == "faster"

    def test_false_alarms_of_single_runs_are_rare(self) -> None:
        """Processes 3 % apart, which is more than was ever seen steadily."""
        pairs = zip(replicates(60, offset_sigma=0.03), replicates(60, offset_sigma=0.03), strict=True)
        alarms = sum(only(compare_records([a], [b])).verdict in ("faster", "slower") for a, b in pairs)
        assert alarms <= 3

    def test_replicates_give_an_interval(self) -> None:
        found = only(compare_records(replicates(), replicates(speed=0.8)))
        assert (found.verdict, found.basis) == ("slower", "replicates")
        assert found.ratio.low < 0.8 < found.ratio.high
        assert any(each.code == "one-after-the-other" for each in found.notes)

    def test_false_alarms_are_rare_when_processes_differ_and_the_clock_drifts(self) -> None:
        """The same thing measured twice on two occasions: processes sit 2 % apart, occasions 2 % on top."""
        import numpy as np

        random = np.random.default_rng(7)
        alarms = 0
        for _ in range(1000):
            occasion = random.normal(0, 0.02, size=2)
            ours, theirs = (np.exp(random.normal(shift, 0.02, size=3)) for shift in occasion)
            interval = between_processes(list(ours), list(theirs))
            alarms += interval.low > 1.03 or interval.high < 1 / 1.03
        assert alarms / 1000 < 0.05

    def test_the_interval_covers_the_truth_as_often_as_it_says(self) -> None:
        import numpy as np

        random = np.random.default_rng(11)
        covered = 0
        for _ in range(2000):
            ours = np.exp(random.normal(0, 0.02, size=4))
            theirs = np.exp(random.normal(-0.1, 0.03, size=5))
            interval = between_processes(list(ours), list(theirs))
            covered += interval.low <= float(np.exp(0.1)) <= interval.high
        assert 0.94 < covered / 2000 < 0.98

    def test_a_throttled_side_proves_nothing(self) -> None:
        found = only(compare_records(replicates(), replicates(speed=0.5, throttle=("hw_thermal",))))
        assert found.verdict == "inconclusive"
        assert any(each.code == "spoilt" and "throttled" in str(each) for each in found.reasons)


class TestIncomparable:
    @pytest.mark.parametrize(
        ("part", "changes", "reason"),
        [
            ("device", {"name": "another GPU"}, "device: fake cuda device against another GPU"),
            ("device", {"driver": "1.2"}, "driver: fake against 1.2"),
            ("environment", {"versions": {"torch": "9.9"}}, "torch: fake against 9.9"),
            ("record", {"benchmark_version": "0"}, "benchmark version: 1 against 0"),
            ("workload", {"model_hash": "other"}, "model (its structure)"),
            ("workload", {"batch": 64}, "batch: 32 against 64"),
        ],
    )
    def test_another_place_is_incomparable_and_never_slower(
        self, part: str, changes: dict[str, Any], reason: str
    ) -> None:
        found = only(
            compare_records(replicates(), [changed(record, part, **changes) for record in replicates(speed=0.5)])
        )
        assert found.verdict == "incomparable"
        assert any(reason in str(told) for told in found.reasons)
        assert found.ratio is None

    def test_another_loss_or_an_optimizer_of_its_own_is_another_training(self) -> None:
        ours = [changed(record, "workload", loss="cross_entropy", optimizer="") for record in replicates(1)]
        theirs = [changed(record, "workload", loss="mse", optimizer="") for record in replicates(1, speed=0.5)]
        assert list(map(str, only(compare_records(ours, theirs)).reasons)) == ["loss: cross_entropy against mse"]
        older = [changed(record, "workload", loss="") for record in replicates(1, speed=0.5)]
        assert only(compare_records(ours, older)).verdict == "slower", "older records do not say their loss"

    def test_other_settings_are_named_in_words(self) -> None:
        def with_threads(record: RunRecord, threads: int) -> RunRecord:
            asked = msgspec.structs.replace(record, spec=msgspec.structs.replace(record.spec, threads=threads))
            return changed(asked, "environment", threads=threads)

        first = [with_threads(record, 2) for record in replicates(1)]
        found = only(compare_records(first, [with_threads(record, 4) for record in replicates(1)]))
        assert list(map(str, found.reasons)) == ["threads: 2 against 4"]
        larger = msgspec.structs.replace(first[0].spec.workload, image_size=64)
        other = msgspec.structs.replace(
            first[0], id="other", spec=msgspec.structs.replace(first[0].spec, workload=larger)
        )
        assert list(map(str, only(compare_records(first, [other])).reasons)) == ["image size: default against 64"]

    def test_a_side_that_mixes_places_is_incomparable(self) -> None:
        mixed = replicates(3)
        mixed[0] = changed(mixed[0], "device", driver="older")
        found = only(compare_records(replicates(3), mixed))
        assert found.verdict == "incomparable"

    def test_without_a_common_benchmark_the_whole_is_incomparable(self) -> None:
        found = compare_records(sweep_records(batches=[1, 2]), sweep_records(batches=[4, 8]))
        assert found.comparisons == ()
        assert found.verdict == "incomparable"
        assert len(found.only_first) == len(found.only_other) == 4


@pytest.mark.parametrize(("method", "side"), [("outputs", "A"), ("outputs", "B"), ("unchecked", None)])
def test_wrong_answers_of_either_side_are_told(method: Any, side: str | None) -> None:
    far = Numerics(method=method, passed=False)
    sides = {"A": replicates(3), "B": replicates(3)}
    sides[side or "A"] = [
        msgspec.structs.replace(record, prepared=msgspec.structs.replace(record.prepared, numerics=far))
        for record in sides[side or "A"]
    ]
    told = [str(each) for each in only(compare_records(sides["A"], sides["B"])).notes if each.code == "wrong-answers"]
    assert told == ([f"the outputs of {side} are too far from strict fp32"] if side else [])


def test_a_failed_run_is_invalid() -> None:
    from reported import failed_record

    found = only(compare_records([failed_record()], [failed_record()]))
    assert found.verdict == "invalid"
    assert "this factory raised" in str(found.reasons[0])


def test_a_record_is_not_set_against_itself() -> None:
    (record,) = replicates(1)
    with pytest.raises(UsageError, match="on both sides"):
        compare_records([record], [record])


def test_sweeps_are_compared_cell_by_cell() -> None:
    found = compare_records(sweep_records(batches=[1, 8]), sweep_records(batches=[8, 64]))
    assert [str(each.benchmark.batch) for each in found.comparisons] == ["8", "8"]
    assert {each.batch for each in found.only_first} == {1}
    assert {each.batch for each in found.only_other} == {64}
    ordered = compare_records(sweep_records(batches=[64, 1, 8]), sweep_records(batches=[8, 64, 1])).comparisons
    (recipe,) = {each.benchmark.recipe for each in ordered[:3]}
    assert [each.benchmark.batch for each in ordered if each.benchmark.recipe == recipe] == [1, 8, 64]


def test_memory_and_tail_are_told_beside_the_time() -> None:
    less = fake_door(memory_bytes=2**27)
    first = sweep_records(recipe="baseline", batches=[32], effort="normal")
    other = sweep_records(less, recipe="baseline", batches=[32], effort="normal")
    metrics = {metric.name: metric for metric in only(compare_records(first, other)).figures}
    assert metrics["memory"].verdict == "less"
    assert metrics["memory"].change < -0.8
    assert metrics["p95"].verdict == "inconclusive"  # one process each


def generations(count: int = 5, *, ttft_s: float = 0.010, tpot_s: float = 0.002, **table: Any) -> list[RunRecord]:
    """Processes that write sixteen tokens, each with an offset of its own."""
    door = fake_door(step_s=ttft_s + 15 * tpot_s, ttft_s=ttft_s, offset_sigma=0.003, numerics=None)
    settings = {"task": "generate", "prompt": 64, "new_tokens": 16, "recipe": "baseline", "batches": [2], **table}
    return [record for _ in range(count) for record in sweep_records(door, model="hf:llama", **settings)]


class TestGenerations:
    def test_each_part_has_its_ratio_interval_and_verdict(self) -> None:
        found = only(compare_records(generations(), generations(ttft_s=0.020, tpot_s=0.001)))
        parts = {each.name: each for each in found.figures}
        assert (parts["time to first token"].first, parts["time to first token"].other) == (
            pytest.approx(0.010, rel=0.02),
            pytest.approx(0.020, rel=0.02),
        )
        for name, change, verdict in (
            ("time to first token", 1.0, "more"),
            ("time per output token", -0.5, "less"),
        ):
            part = parts[name]
            assert part.low < change < part.high
            assert (part.change, part.verdict) == (pytest.approx(change, abs=0.03), verdict)
        assert found.verdict == "faster"  # 40 ms against 35

    def test_a_part_that_got_slower_is_slower_though_the_whole_hides_it(self) -> None:
        """A first token of 12 ms instead of 10 is 2 ms of 162: within the band."""
        found = only(compare_records(generations(tpot_s=0.010), generations(ttft_s=0.012, tpot_s=0.010)))
        assert (found.verdict, found.reasons[0].code) == ("slower", "part-slower")
        traded = only(compare_records(generations(), generations(ttft_s=0.012, tpot_s=0.0019)))
        assert traded.verdict in ("same", "inconclusive")  # one part for the other

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"prompt": 65}, "prompt: 64 against 65"),
            ({"new_tokens": 17}, "new tokens: 16 against 17"),
            ({"batches": [3]}, "batch: 2 against 3"),
            ({"prompt": None}, "prompt: 64 against 128"),
        ],
    )
    def test_other_lengths_are_incomparable(self, changes: dict[str, Any], told: str) -> None:
        asked = {name: value for name, value in changes.items() if value is not None}
        others = generations(1, **asked) if asked else [without_prompt(each) for each in generations(1, prompt=128)]
        found = only(compare_records(generations(1), others))
        assert found.verdict == "incomparable"
        assert told in [str(each) for each in found.reasons]


def without_prompt(record: RunRecord) -> RunRecord:
    """As if nobody had said how long the prompt shall be."""
    workload = msgspec.structs.replace(record.spec.workload, prompt=None)
    return msgspec.structs.replace(record, spec=msgspec.structs.replace(record.spec, workload=workload))
