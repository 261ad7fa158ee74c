"""Rows over several processes: intervals that cover what differs between them, against a known truth."""

from __future__ import annotations

import msgspec
import pytest
from reported import fake_door, race_records, sweep_records

from redline.analyze.measurement import lines_of, measurements, over_processes
from redline.model.record import Failure, RunRecord
from redline.testing.fake import FakeDoor


def processes(count: int, door: FakeDoor) -> list[RunRecord]:
    return [record for _ in range(count) for record in race_records(["baseline", "fp16"], door)]


def test_the_interval_is_that_of_processes() -> None:
    """Each process is steady to a fraction of a percent and sits 5 % off: one row alone would promise far too much."""
    door = fake_door(step_s=lambda spec: 0.010, offset_sigma=0.05, noise_sigma=0.001)
    records = [record for _ in range(5) for record in sweep_records(door, recipe="baseline", batches=[32])]
    (row,) = over_processes(records)
    own = measurements(records)
    assert row.replicate_ids == tuple(record.id for record in records)
    assert row.throughput_interval.low < 3200 < row.throughput_interval.high
    assert all(each.throughput_interval and each.throughput_interval.half_width < 0.002 for each in own)
    assert row.throughput_interval.half_width > 0.02
    assert row.record_id in row.replicate_ids


def test_the_ratio_is_over_replicates() -> None:
    records = processes(4, fake_door(offset_sigma=0.02))
    baseline, fast = over_processes(records)
    assert baseline.vs_first is None
    low, high = fast.vs_first.low, fast.vs_first.high
    assert low < 2.5 < high
    narrow = measurements(records)[1].vs_first
    assert high - low > narrow.high - narrow.low, "one process knows nothing of the others"


def test_machines_that_stall_sustain_less_than_the_median_step_promises() -> None:
    """Two of three processes stall for a fifth of their time, and the three are of unlike speed: a median of rates may lie above the mean."""
    seen = []
    for step_s, stall in ((0.010, 1.25), (0.006, 1.25), (0.020, 1.0)):
        (record,) = sweep_records(fake_door(step_s=lambda spec, s=step_s: s), recipe="baseline", batches=[32])
        blocks = tuple(msgspec.structs.replace(block, wall_s=stall * block.wall_s) for block in record.blocks)
        seen.append(msgspec.structs.replace(record, blocks=blocks))
    (row,) = over_processes(seen)
    assert row.sustained_per_s == pytest.approx(row.throughput_per_s / 1.25, rel=0.02)


def test_lines_of_a_group_are_in_the_order_in_which_they_were_asked_for() -> None:
    """Groups stay as they came; a race opens its recipes in random order."""
    one = race_records(["baseline", "fp16", "fp16+compile"])
    other = race_records(["bf16", "channels-last"])
    mixed = [*reversed(one), *reversed(other)]
    told = [line.row.recipe for line in lines_of(measurements(mixed))]
    assert told == ["baseline", "fp16", "fp16+compile", "bf16", "channels-last"]


def test_an_interval_over_processes_is_not_said_to_be_of_one() -> None:
    records = processes(2, fake_door())
    assert all(row.verdict.noted("one-process") for row in measurements(records))
    assert not any(row.verdict.noted("one-process") for row in over_processes(records))


def test_what_fails_in_one_process_has_failed() -> None:
    records = processes(3, fake_door())
    broken = msgspec.structs.replace(records[3], failure=Failure(stage="measure", kind="crash", message="died"))
    _, fast = over_processes([*records[:3], broken, *records[4:]])
    assert fast.failure is not None
    assert fast.throughput_per_s is None
    assert len(fast.replicate_ids) == 3


def test_a_recipe_beside_itself_stays_two_rows() -> None:
    records = [record for _ in range(2) for record in race_records(["baseline", "baseline"])]
    rows = over_processes(records)
    assert [len(row.replicate_ids) for row in rows] == [2, 2]


@pytest.mark.parametrize("count", [3, 6])
def test_a_doubted_process_is_left_out_where_others_are_sound_and_the_row_says_so(count: int) -> None:
    records = processes(count, fake_door())
    records[1] = msgspec.structs.replace(
        records[1],
        prepared=msgspec.structs.replace(
            records[1].prepared, warmup=msgspec.structs.replace(records[1].prepared.warmup, steady=False)
        ),
    )
    baseline, fast = over_processes(records)
    assert baseline.verdict.trusted
    assert fast.verdict.trusted
    (told,) = fast.verdict.noted("left-out")
    assert str(told).startswith(f"1 of {count} processes left out")
