"""Batches are recommended for what the whole table shows: unchecked rows, other recipes and noise included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from reported import fake_door, numerics, race_records, sweep_records

from redline.analyze.recommend import Advice
from redline.model.note import note
from redline.model.record import Numerics, RunRecord
from redline.model.spec import RunSpec
from redline.show.contents import contents_of
from redline.show.dashboard import tiles_of

# t = 2 ms + 0.3 ms · b: the knee (90 %) at b = 60.
BATCHES = [4, 16, 64, 128, 190]


def one(records: Sequence[RunRecord], kind: str) -> Advice:
    (found,) = [advice for advice in contents_of(records).advice if advice.kind == kind]
    return found


def searched(recipe: str, batches: Sequence[int] = BATCHES, **table: Any) -> list[RunRecord]:
    """As `redline batch` leaves them: nothing is checked."""
    return sweep_records(recipe=recipe, batches=batches, measure={"check_numerics": False}, **table)


def noisy(record: RunRecord, factor: float = 1.0) -> RunRecord:
    """Samples all over the place, around so many times the median."""
    blocks = []
    for block in record.blocks:
        samples = tuple(factor * sample * (0.4 if place % 2 else 1.6) for place, sample in enumerate(block.samples))
        blocks.append(msgspec.structs.replace(block, samples=samples))
    return msgspec.structs.replace(record, blocks=tuple(blocks), stopped="ceiling")


class TestThroughput:
    def test_the_baseline_needs_no_check(self) -> None:
        checked, found = sweep_records(recipe="baseline", batches=[2]), searched("baseline")
        assert one([*checked, *found], "throughput").batch == 64
        assert one(found, "throughput").batch == 64

    def test_a_check_at_one_batch_speaks_for_the_others(self) -> None:
        records = [*sweep_records(recipe="fp16", batches=[1, 2]), *searched("fp16")]
        found = one(records, "throughput")
        assert (found.recipe, found.batch) == ("fp16", 64)

    def test_a_recipe_that_nobody_checked_is_not_recommended(self) -> None:
        assert not [each for each in contents_of(searched("fp16")).advice if each.kind == "throughput"]
        found = one([*searched("baseline"), *searched("fp16")], "throughput")
        assert found.recipe == "baseline"

    def test_nor_one_that_was_wrong_at_another_batch(self) -> None:
        def right_up_to_eight(spec: RunSpec) -> Numerics:
            wrong = Numerics(rel_l2=0.3, tolerance=0.02, passed=False, reason=note("above-tolerance", "too far"))
            return wrong if (spec.workload.batch or 0) > 8 else numerics(spec)

        door = fake_door(numerics=right_up_to_eight)
        records = [*sweep_records(door, recipe="fp16", batches=[1, 2, 10]), *searched("fp16")]
        found = one(records, "throughput")
        assert found.batch is None

    def test_far_below_the_knee_is_no_place_to_send_anyone(self) -> None:
        large = sweep_records(fake_door(throttle=("hw_thermal",)), recipe="fp16", batches=[64, 128])
        found = one([*sweep_records(recipe="fp16", batches=[4, 16]), *large], "throughput")
        assert found.headline.startswith("For throughput resnet50 needs batch ")
        assert found.headline.endswith(" or more, and nothing that was measured there may be recommended yet")
        assert found.batch is None
        told = "; ".join(found.details)
        assert "batch 128 ran at " in told
        assert "but that number is throttled" in told
        assert "below it fp16 reaches " in told
        assert "-r fp16' measures and checks it there" in told

    def test_what_is_faster_without_a_knee_is_not_passed_over_in_silence(self) -> None:
        large = sweep_records(fake_door(throttle=("hw_thermal",)), recipe="baseline", batches=[16])
        found = one([*sweep_records(recipe="baseline", batches=[1, 4]), *large], "throughput")
        assert found.batch == 4
        assert found.details[-1].startswith("batch 16 ran at ")
        assert found.details[-1].endswith("but that number is throttled")

    def test_the_figure_at_the_top_of_the_page_is_of_the_same_rows(self) -> None:
        contents = contents_of(
            [*sweep_records(recipe="baseline", batches=[2]), *searched("baseline"), *searched("fp16")]
        )
        (tile,) = [tile for tile in tiles_of(contents) if tile.label == "Highest throughput"]
        assert tile.about == "resnet50 with baseline at batch 128"


class TestLatency:
    def test_another_recipe_that_is_lower_is_not_hidden(self) -> None:
        slow = fake_door(step_s=lambda spec: 0.01 * (spec.workload.batch or 1))
        records = [*sweep_records(recipe="baseline", batches=[1, 4]), *race_records(["baseline", "fp16"])]
        records += sweep_records(slow, recipe="fp16", batches=[1, 4])
        found = one(records, "latency")
        assert (found.recipe, found.batch) == ("baseline", 1)
        assert "with baseline" in found.details

    def test_a_noisy_row_does_not_stand_before_one_that_is_not(self) -> None:
        quick = [noisy(record, 0.5) for record in sweep_records(recipe="channels-last", batches=[1, 4])]
        found = one([*sweep_records(recipe="baseline", batches=[1, 4]), *quick], "latency")
        assert (found.recipe, found.batch) == ("baseline", 1)
        assert found.details[-1].startswith("channels-last showed ")
        assert "the number is noisy" in found.details[-1]

    def test_where_all_are_noisy_it_is_said(self) -> None:
        records = [noisy(record) for record in sweep_records(recipe="baseline", batches=[1, 4])]
        assert "the number is noisy" in one(records, "latency").details[-1]


class TestCommands:
    SETTINGS = {"task": "train", "image_size": 32, "classes": 10, "threads": 2, "max_memory": "3000MiB"}
    WORDS = "--task train --image-size 32 --classes 10 --threads 2 --max-memory 3000MiB"

    def test_they_carry_what_the_records_were_measured_with(self) -> None:
        found = one(sweep_records(batches=[8, 32], **self.SETTINGS), "recipe")
        assert f"'redline run resnet50 {self.WORDS} --batch 32 -r baseline -r fp16' gives one" in found.details[0]
        records = sweep_records(recipe="baseline", batches=[1, 4, 16, 64], **self.SETTINGS)
        found = one([*records, *race_records(**self.SETTINGS)], "throughput")
        assert f"'redline batch resnet50 {self.WORDS} -r fp16+compile' searches" in found.details[1]

    def test_a_live_module_is_given_none(self) -> None:
        live = {"model": "live:Net", "artifact": "/somewhere/net.pkl"}
        found = one(sweep_records(batches=[8, 32], **live), "recipe")
        assert found.details[0].endswith("so this has no interval")
        found = one([*sweep_records(recipe="baseline", batches=[1, 4], **live), *race_records(**live)], "throughput")
        assert found.details[1] == "other batches may be faster"


def test_what_was_faster_but_never_checked_is_said_beside_the_recipe() -> None:
    found = one([*searched("baseline", [8, 32]), *searched("fp16", [8, 32])], "recipe")
    assert found.headline.startswith("Stay with baseline for resnet50: ")
    assert found.headline.endswith("fp16 is faster, but its outputs were not checked")
    assert found.details[-1].startswith("fp16 ran at ")
    assert "'redline run resnet50 --batch 32 -r baseline -r fp16' checks them" in found.details[-1]
