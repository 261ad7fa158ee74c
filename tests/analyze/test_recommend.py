"""Recommendations follow from the records: the right recipe and batch, their costs, and silence where nothing is known."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pytest
from reported import failed_record, fake_door, race_records, sweep_records

from redline.analyze.recommend import Advice, headline, recommend
from redline.analyze.recommend.evidence import curves_of
from redline.analyze.replicates import lines_of
from redline.analyze.summary import summarize
from redline.model.record import Numerics, RunRecord


def advice_of(records: Sequence[RunRecord]) -> list[Advice]:
    lines = lines_of(records, summarize(records))
    return recommend(curves_of(lines), lines, {record.id: record.spec for record in records})


def one(records: Sequence[RunRecord], kind: str) -> Advice:
    (found,) = [advice for advice in advice_of(records) if advice.kind == kind]
    return found


def test_the_fastest_that_keeps_the_numerics_is_recommended_with_its_interval_and_costs() -> None:
    found = one(race_records(["baseline", "fp16", "fp16+compile", "bf16"]), "recipe")
    assert found.recipe == "fp16+compile"
    told = "; ".join(found.details)
    assert "4.0" in told
    assert "interleaved" in told
    assert "25 % of what is allowed" in told.replace("\u2009", " ")
    assert "memory: " in told
    assert "20.0 s of compiling" in told
    # 8.6 ms a step saved: 11.6 · (1 − 1/4).
    assert "paid back after 2\u2009400 steps" in told or "paid back after 2\u2009300 steps" in told


def test_the_first_of_a_group_is_what_the_others_are_set_against_whoever_else_has_no_ratio() -> None:
    """One that shares no round with the first has no ratio either, and is not the first for that."""
    baseline, fast, other = race_records(["baseline", "fp16", "channels-last"])
    apart = [msgspec.structs.replace(block, round=block.round + 1000) for block in other.blocks]
    records = [baseline, fast, msgspec.structs.replace(other, blocks=tuple(apart))]
    found = one(records, "recipe")
    assert found.headline.startswith("fp16 runs resnet50 2.5")
    assert "as fast as baseline" in found.headline


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.9, "fp16 may be faster than baseline for resnet50, but its interval allows for no gain at all"),
        (1.1, "fp16 seems slower than baseline for resnet50, but its interval allows for a gain"),
    ],
)
def test_what_is_not_decided_is_told_from_the_side_it_leans_to(factor: float, words: str) -> None:
    door = fake_door(step_s=lambda spec: 0.01 * (factor if spec.recipe.switches else 1.0), offset_sigma=0.1)
    records = [record for _ in range(3) for record in race_records(["baseline", "fp16"], door)]
    found = one(records, "recipe")
    assert found.headline.startswith(f"Not decided: {words}")
    assert not found.decided


def test_wrong_answers_are_never_recommended_however_fast() -> None:
    door = fake_door(step_s=lambda spec: 0.001 if str(spec.recipe) == "bf16" else 0.01)
    records = race_records(["baseline", "bf16"], door)
    assert one(records, "recipe").recipe == "baseline"
    assert "Do not use bf16" in one(records, "avoid").headline


def test_a_throttled_number_carries_no_recommendation() -> None:
    records = race_records(door=fake_door(throttle=("hw_thermal",)))
    assert [advice for advice in advice_of(records) if advice.kind in ("recipe", "latency", "throughput")] == []


def test_cells_of_a_sweep_are_compared_without_an_interval_and_it_says_so() -> None:
    found = one(sweep_records(batches=[8, 32]), "recipe")
    assert found.recipe == "fp16"
    assert "has no interval" in found.details[0]


def test_a_hair_faster_in_a_sweep_does_not_win_over_the_baseline() -> None:
    door = fake_door(step_s=lambda spec: 0.01 * (0.99 if spec.recipe.switches else 1), noise_sigma=0.0)
    found = one(sweep_records(door, batches=[8]), "recipe")
    assert found.recipe == "baseline"
    assert "clearly faster" in found.headline


def test_few_rounds_in_turns_are_not_told_as_one_after_the_other() -> None:
    records = race_records(["baseline", "fp16"])
    few = [msgspec.structs.replace(each, blocks=each.blocks[:2]) for each in records]
    found = one(few, "recipe")
    assert found.recipe == "fp16"
    assert "measured in turns, but in too few rounds" in found.details[0]


@pytest.mark.parametrize(
    ("numerics", "says"),
    [
        (Numerics(rel_l2=0.9), "too far from strict fp32"),
        (Numerics(degenerate=True), "could not be compared with strict fp32"),
        (Numerics(finite=False), "not finite"),
    ],
)
def test_why_a_recipe_is_not_to_be_used(numerics: Numerics, says: str) -> None:
    baseline, fast = race_records(["baseline", "fp16"])
    assert fast.prepared is not None
    judged = msgspec.structs.replace(fast.prepared, numerics=numerics)
    headline = one([baseline, msgspec.structs.replace(fast, prepared=judged)], "avoid").headline
    assert headline.startswith("Do not use fp16")
    assert says in headline


def test_batches_for_latency_and_throughput() -> None:
    # t = 2 ms + 0.3 ms · b: the knee (90 %) at b = 60, latency within 10 % of the lowest up to batch 1.
    records = sweep_records(recipe="baseline", batches=[1, 4, 16, 64, 128])
    assert one(records, "latency").batch == 1
    found = one(records, "throughput")
    assert found.batch == 64
    assert any("knee" in detail for detail in found.details)


def test_batches_of_one_recipe_hide_no_faster_one() -> None:
    records = sweep_records(recipe="baseline", batches=[1, 4, 16, 64, 128]) + race_records()
    found = one(records, "throughput")
    assert found.recipe == "fp16+compile"
    assert found.batch == 32
    assert found.headline.startswith("For throughput the recipe matters more than the batch: baseline reaches ")
    assert "'redline batch resnet50 -r fp16+compile'" in found.details[1]


def test_a_hair_faster_is_no_reason_to_forget_the_batches() -> None:
    door = fake_door(
        step_s=lambda spec: (0.002 + 3e-4 * (spec.workload.batch or 1)) * (0.99 if spec.recipe.switches else 1)
    )
    records = sweep_records(door, recipe="baseline", batches=[1, 4, 16, 64, 128]) + sweep_records(
        door, recipe="channels-last", batches=[128]
    )
    assert one(records, "throughput").recipe == "baseline"


def test_a_replicate_that_checked_nothing_does_not_stand_for_one_that_did() -> None:
    checked, later = sweep_records(recipe="fp16", batches=[8]), sweep_records(recipe="fp16", batches=[8])
    assert later[0].prepared is not None
    unchecked = msgspec.structs.replace(later[0].prepared, numerics=Numerics(method="unchecked"))
    records = [*checked, msgspec.structs.replace(later[0], prepared=unchecked)]
    (curve,) = curves_of(lines_of(records, summarize(records)))
    (row,) = curve.rows
    assert set(row.replicate_ids) == {record.id for record in records}
    assert row.numerics is not None
    assert row.numerics.passed


def test_a_flat_latency_takes_the_larger_batch() -> None:
    door = fake_door(step_s=lambda spec: 0.010 + 1e-5 * (spec.workload.batch or 1))
    found = one(sweep_records(door, recipe="baseline", batches=[1, 4, 64]), "latency")
    assert found.batch == 64
    assert "within 10%" in found.details[0]


def test_what_does_not_fit_is_told_with_its_batch() -> None:
    found = one(sweep_records(recipe=["baseline", "fp16"], batches=[1, 8, 256, 512]), "failed")
    assert "does not fit from batch 256 on" in found.headline
    assert found.details == ("baseline: 256, 512", "fp16: 256, 512")


def test_a_failed_run_shares_the_subject_of_those_that_ran() -> None:
    records = sweep_records(recipe="baseline", batches=[1, 256])
    assert records[1].prepared is None
    assert len({line.subject for line in lines_of(records, summarize(records))}) == 1


def test_one_record_alone_recommends_nothing() -> None:
    assert advice_of(sweep_records(recipe="baseline", batches=[8])) == []


def test_the_headline_states_the_finding() -> None:
    def told(records: Sequence[RunRecord]) -> str:
        return headline(advice_of(records), lines_of(records, summarize(records)))

    assert re.fullmatch(
        r"fp16\+compile runs resnet50 (3\.9|4\.0)\d× \([\d.]+–[\d.]+\) as fast as baseline on fake cuda device",
        told(race_records()),
    )
    assert told([]) == "There is nothing to report yet"
    assert told([failed_record(), failed_record()]) == "Nothing could be measured: all 2 runs failed"
    assert "no other recipe was tried" in told(sweep_records(recipe="baseline", batches=[8]))
    assert told(sweep_records(batches=[8])) == "2 recipes of resnet50 measured; no comparison is decided yet"


class TestCurves:
    def test_all_processes_stand_for_their_batch(self) -> None:
        old, new = sweep_records(recipe="baseline", batches=[8]), sweep_records(recipe="baseline", batches=[8])
        old = [msgspec.structs.replace(record, created_at=1.0) for record in old]
        new = [msgspec.structs.replace(record, created_at=2.0) for record in new]
        records = [*new, *old]
        (curve,) = curves_of(lines_of(records, summarize(records)))
        (point,), rates = curve.points, [row.throughput_per_s for row in summarize(records)]
        assert point.throughput_per_s is not None
        assert point.throughput_per_s == pytest.approx(rates[0], rel=0.01)

    @pytest.mark.parametrize("batches", [[1, 64], [1, 2, 4]])
    def test_no_knee_without_the_points_for_it(self, batches: list[int]) -> None:
        records = sweep_records(recipe="baseline", batches=batches)
        (curve,) = curves_of(lines_of(records, summarize(records)))
        assert curve.knee is None


def test_answers_about_one_model_under_two_settings_say_which_is_which() -> None:
    small = race_records(("baseline", "fp16"), image_size=32)
    told = [each.headline for each in advice_of([*race_records(("baseline", "fp16")), *small]) if each.kind == "recipe"]
    assert len(told) == 2
    assert sum("32 px" in each for each in told) == 1
    (alone,) = [each.headline for each in advice_of(small) if each.kind == "recipe"]
    assert "32 px" not in alone
