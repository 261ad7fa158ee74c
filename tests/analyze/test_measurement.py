from __future__ import annotations

from typing import Any

import msgspec
import pytest
from by_hand import make_block, make_record

from redline.analyze.blocks import blocks_as
from redline.analyze.measurement import Measurement, measurements
from redline.model.record import Failure, Memory


def row_of(record: Any) -> Measurement:
    (row,) = measurements([record])
    return row


def group(*, rounds: int = 8, second_rounds: range | None = None) -> list[Any]:
    """A baseline of 10 ms and a recipe of 5 ms, interleaved."""
    first = make_record(
        id="first",
        group="g",
        position=0,
        blocks=tuple(make_block(0.010, round=number, seed=number) for number in range(rounds)),
    )
    memory = Memory(peak_reserved_bytes=300, peak_rss_bytes=999)
    second = make_record(
        "fp16",
        id="second",
        group="g",
        position=1,
        blocks=tuple(
            make_block(0.005, round=number, seed=50 + number, memory=memory)
            for number in second_rounds or range(rounds)
        ),
    )
    return [first, second]


def test_a_row_says_what_was_measured() -> None:
    row = row_of(make_record("channels-last+fp16"))
    assert (row.model, row.task, row.recipe) == ("resnet50", "infer", "channels-last+fp16")
    assert (row.batch, row.item, row.device, row.device_name) == (32, "img", "cuda:0", "some cuda")
    assert (row.record_id, row.group) == ("id-channels-last+fp16", None)
    assert (row.cold_start_s.import_s, row.cold_start_s.first_call_s) == (4.0, 3.0)


def test_throughput_is_items_over_the_median_step() -> None:
    row = row_of(make_record(blocks=(make_block(samples=(0.01,) * 9 + (0.5,), settling=(0.02, 0.02), wall_s=0.8),)))
    assert row.throughput_per_s == pytest.approx(3200)
    assert row.throughput_interval.low <= 3200 <= row.throughput_interval.high


def test_the_throughput_interval_turns_that_of_the_step_around() -> None:
    samples = (0.001, 0.010, 0.002, 0.009, 0.003, 0.008, 0.004, 0.007, 0.005, 0.006)
    row = row_of(make_record(blocks=(make_block(samples=samples),)))
    assert (row.throughput_interval.low, row.throughput_interval.high) == pytest.approx((32 / 0.009, 32 / 0.002))
    assert row.throughput_interval.median == pytest.approx(32 / 0.0055)


class TestLatency:
    def test_comes_from_latency_blocks_where_there_are_any(self) -> None:
        blocks = (make_block(0.010), make_block(0.012, kind="latency", clock="host", count=130))
        row = row_of(make_record(blocks=blocks))
        assert row.latency_s.p50 == pytest.approx(0.012, rel=0.01)
        assert (row.latency_s.n, row.latency_s.clock) == (130, "host")
        assert row.throughput_per_s == pytest.approx(3200, rel=0.01)

    def test_else_throughput_blocks_serve_both(self) -> None:
        row = row_of(make_record(task="train", blocks=(make_block(0.010, count=64),)))
        assert (row.latency_s.n, row.latency_s.clock) == (64, "device")
        assert row.latency_s.p90 is not None
        assert row.latency_s.p95 is None
        assert row.latency_s.low <= row.latency_s.p50 <= row.latency_s.high


def test_phases_are_medians_of_training_only() -> None:
    phases = {"forward": (1.0, 2.0, 9.0), "backward": (4.0, 4.0, 4.0), "optimizer": (0.5, 0.5, 0.1)}
    blocks = (make_block(phases=phases),)
    assert row_of(make_record(task="train", blocks=blocks)).phases_s == {
        "forward": 2.0,
        "backward": 4.0,
        "optimizer": 0.5,
    }
    assert row_of(make_record(task="infer", blocks=blocks)).phases_s is None


def test_memory_is_the_peak_of_each_figure_and_null_where_there_is_none() -> None:
    blocks = (
        make_block(memory=Memory(peak_allocated_bytes=5, peak_reserved_bytes=9, allocator_retries=0)),
        make_block(memory=Memory(peak_allocated_bytes=7, peak_reserved_bytes=8, allocator_retries=2)),
    )
    assert row_of(make_record(blocks=blocks)).memory == Memory(
        peak_allocated_bytes=7, peak_reserved_bytes=9, allocator_retries=2, needed_bytes=9
    )


def test_energy_counts_every_item_of_a_metered_block() -> None:
    metered = make_block(count=8, settling=(0.01, 0.01), energy_j=640.0, wall_s=2.0)
    row = row_of(make_record(blocks=(metered, make_block())))
    assert row.energy["per_item_j"] == pytest.approx(640 / 320)
    assert row.energy["power_w"] == pytest.approx(320.0)
    assert not row_of(make_record()).energy


def test_the_energy_of_those_who_take_turns_is_that_of_their_solo_blocks() -> None:
    """The counter is late: in turns a block has part of what its predecessor used."""
    solo = [make_block(count=10, energy_j=150.0, wall_s=0.3, solo=True) for _ in range(2)]
    turns = [make_block(count=10, energy_j=120.0, wall_s=0.3, round=number) for number in range(4)]
    record = make_record(blocks=(*solo, *turns))
    assert row_of(record).energy["power_w"] == pytest.approx(500.0)
    assert row_of(make_record(blocks=tuple(turns))).energy["power_w"] == pytest.approx(400.0), (
        "nobody says that others ran"
    )
    long = make_block(count=100, energy_j=1470.0, wall_s=3.0, round=5)
    assert row_of(make_record(blocks=(*solo, *turns, long))).energy["power_w"] == pytest.approx(1770 / 3.6)
    steps = blocks_as(record.blocks, "energy")
    assert [block.samples[0] / 0.01 for block in steps] == pytest.approx([500.0] * 6, rel=0.02), (
        "the same power in a race"
    )
    assert not row_of(make_record(blocks=(solo[0], *turns))).energy


class TestVersusFirst:
    def test_pairs_rounds_of_one_group(self) -> None:
        first, second = measurements(group())
        assert first.vs_first is None
        versus = second.vs_first
        assert versus.ratio == pytest.approx(2.0, rel=0.005)
        assert versus.low < versus.ratio < versus.high
        assert versus.memory_change == pytest.approx(300 / 400 - 1)

    def test_blocks_pair_by_round_and_not_by_place(self) -> None:
        """The machine became twice as slow halfway; the second session missed the first half."""
        slow = [make_block(0.020 if number >= 8 else 0.010, round=number, seed=number) for number in range(16)]
        records = group(rounds=16, second_rounds=range(8, 16))
        records[0] = msgspec.structs.replace(records[0], blocks=tuple(slow))
        versus = measurements(records)[1].vs_first
        assert versus.ratio == pytest.approx(4.0, rel=0.01)

    def test_with_too_few_common_rounds_there_is_a_ratio_without_interval(self) -> None:
        versus = measurements(group(rounds=4))[1].vs_first
        assert versus.ratio == pytest.approx(2.0, rel=0.01)
        assert (versus.low, versus.high) == (None, None)

    def test_with_few_rounds_one_stall_does_not_decide(self) -> None:
        """The ratio is that of the speeds beside it in the table."""
        records = group(rounds=2)
        stalled = make_block(5.0, count=2, round=1, seed=1)
        records[1] = msgspec.structs.replace(records[1], blocks=(records[1].blocks[0], stalled))
        first, second = measurements(records)
        assert second.vs_first.ratio == pytest.approx(2.0, rel=0.05)
        assert second.throughput_per_s == pytest.approx(second.vs_first.ratio * first.throughput_per_s)

    def test_against_a_failed_first_there_is_nothing(self) -> None:
        first, second = group()
        failed = msgspec.structs.replace(first, failure=Failure(stage="measure", kind="crash", message="gone"))
        assert measurements([failed, second])[1].vs_first is None

    def test_memory_falls_back_to_the_resident_set(self) -> None:
        first, second = group()
        on_host = [
            msgspec.structs.replace(
                record,
                blocks=tuple(msgspec.structs.replace(b, memory=Memory(peak_rss_bytes=rss)) for b in record.blocks),
            )
            for record, rss in ((first, 100), (second, 150))
        ]
        versus = measurements(on_host)[1].vs_first
        assert versus.memory_change == pytest.approx(0.5)


def test_a_failed_run_claims_no_speed_but_says_why() -> None:
    failure = Failure(stage="measure", kind="oom", message="out of memory", traceback="long")
    row = row_of(make_record(failure=failure, stopped="failed"))
    assert row.failure.line == "oom at measure: out of memory"
    assert (row.throughput_per_s, row.latency_s, row.vs_first) == (None, None, None)
    assert row.verdict.labels == ("invalid",)
    assert row.memory is not None
    assert row.numerics is not None


def test_a_run_that_broke_before_it_began_still_has_a_row() -> None:
    failure = Failure(stage="build", kind="user", message="no such file")
    row = row_of(make_record(prepared=None, blocks=(), failure=failure, stopped=None))
    assert (row.batch, row.item, row.device_name, row.memory, row.cold_start_s, row.numerics) == (32, *[None] * 5)
    assert row.failure is not None
