"""Contention between processes is told from noise, rescaled, and the same wherever it is asked for."""

from __future__ import annotations

import math

import msgspec
import pytest

from redline.analyze.blocks import log_in_turns, shift, timed_blocks
from redline.analyze.compare import compare_records
from redline.analyze.measurement import measurements
from redline.analyze.pairs import ratio_in_turns
from redline.model.record import Block, BlockKind, RunRecord
from redline.model.spec import RunSpec, WorkloadSpec
from redline.model.spec_table import specs_from_table
from redline.search.observer import NoJournal
from redline.search.run import measure_together
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape

FASTER = 0.92


def record_of(alone: list[float], in_turns: list[float], kind: BlockKind = "throughput") -> RunRecord:
    blocks = [
        Block(kind=kind, clock="device", samples=(seconds,) * 20, round=number, solo=number < len(alone))
        for number, seconds in enumerate([*alone, *in_turns])
    ]
    return RunRecord(id="a", spec=RunSpec(workload=WorkloadSpec(model="m")), created_at=0.0, blocks=tuple(blocks))


class TestShift:
    def test_is_seen_through_a_hiccup(self) -> None:
        found = shift(record_of([2.0, 2.001, 1.999], [1.84, 1.841, 1.839, 1.95, 1.84]))
        assert found == pytest.approx(math.log(0.92), abs=0.002)

    @pytest.mark.parametrize(
        ("alone", "in_turns"),
        [
            ([2.0, 2.001, 1.999], [1.99, 1.991, 1.989]),  # too little
            ([2.0, 2.1, 1.9], [1.85, 1.95, 2.05, 1.8]),  # noise
            ([2.0], [1.84, 1.84]),  # one block alone
            ([], [1.84, 1.84]),
        ],
    )
    def test_is_none_where_it_is_not_clear(self, alone: list[float], in_turns: list[float]) -> None:
        record = record_of(alone, in_turns)
        assert shift(record) is None
        assert [block.samples[0] for block in timed_blocks(record, "throughput")] == in_turns

    def test_of_one_kind_leads_the_other_back(self) -> None:
        latency = record_of([], [2.3, 2.3, 2.3], "latency")
        both = record_of([2.0, 2.0], [1.84, 1.84])
        record = RunRecord(id="a", spec=both.spec, created_at=0.0, blocks=(*both.blocks, *latency.blocks))
        assert timed_blocks(record, "latency")[0].samples[0] == pytest.approx(2.3 / FASTER)


def test_run_and_compare_say_the_same_of_two_records() -> None:
    door = FakeDoor(
        Landscape(
            step_s={"baseline": 0.01, "fp16": 0.005},
            contended_factor={"baseline": 1.0, "fp16": FASTER},
            noise_sigma=2e-3,
        )
    )
    specs = specs_from_table({"model": "resnet50", "batch": 32, "device": "cuda:0", "recipe": ["baseline", "fp16"]})
    first, other = measure_together(specs, door, NoJournal())
    told = measurements([first, other])[1].vs_first
    ratio = ratio_in_turns(first, other)
    (compared,) = compare_records([first], [other]).comparisons
    assert (told.ratio, told.low, told.high) == (ratio.ratio, ratio.low, ratio.high)
    assert ratio.ratio == pytest.approx(2.0, rel=0.01)
    assert ratio.low < 2.0 < 2.0 / FASTER < ratio.high * 1.001
    assert compared.first_s / compared.other_s == pytest.approx(2.0, rel=0.01)


def on_cpu(times: list[float], waited: list[float]) -> RunRecord:
    """A block of a second for each time; of that second its threads waited so long while others ran."""
    blocks = [
        Block(
            kind="throughput",
            clock="host",
            samples=(seconds,) * 20,
            round=number,
            wall_s=1.0,
            cpu_s=1.0,
            waited_s=share,
            others_cpu_s=1.0,
        )
        for number, (seconds, share) in enumerate(zip(times, waited, strict=True))
    ]
    spec = RunSpec(workload=WorkloadSpec(model="m"), device="cpu")
    return RunRecord(id="a", spec=spec, created_at=0.0, group="g", blocks=tuple(blocks))


class TestOtherProcessesOnTheCpu:
    def test_rounds_beside_them_are_left_out_where_there_are_others(self) -> None:
        first = on_cpu([3.0, 24.0, 3.0, 24.0, 3.0], [0.0, 0.8, 0.05, 0.8, 0.0])
        log = log_in_turns(first, on_cpu([2.0, 3.0, 2.0, 2.0, 2.0], [0.0, 0.3, 0.0, 0.0, 0.0]))
        assert (log.mean, log.rounds, log.doubt) == (pytest.approx(math.log(1.5)), 3, 0.0)

    def test_else_the_interval_has_room_for_all_that_was_waited(self) -> None:
        """The first lost at most 80 % of its time to them, and the other 20 %: 8 times may be 1.6 times, or 10."""
        ratio = ratio_in_turns(on_cpu([24.0] * 6, [0.8] * 6), on_cpu([3.0] * 6, [0.2] * 6))
        assert (ratio.low, ratio.high) == (pytest.approx(1.6), pytest.approx(10.0))
        assert ratio.ratio == pytest.approx(4.0)

    def test_a_single_quiet_round_is_not_enough(self) -> None:
        waited = [0.8, 0.8, 0.8, 0.8, 0.0]
        log = log_in_turns(on_cpu([24.0] * 4 + [3.0], waited), on_cpu([3.0] * 4 + [2.0], [0.0] * 5))
        assert (log.rounds, log.above) == (5, 0.0)
        assert log.below == pytest.approx(0.8 * math.log(5))

    def test_a_gpu_does_not_wait_for_its_host(self) -> None:
        records = [on_cpu([24.0] * 6, [0.8] * 6), on_cpu([3.0] * 6, [0.2] * 6)]
        first, other = (
            msgspec.structs.replace(each, spec=msgspec.structs.replace(each.spec, device="cuda:0")) for each in records
        )
        ratio = ratio_in_turns(first, other)
        assert ratio.low == pytest.approx(8.0)
