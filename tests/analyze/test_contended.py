"""Contention between processes is told from noise, rescaled, and the same wherever it is asked for."""

from __future__ import annotations

import math

import pytest

from redline.analyze.blocks import ratio_in_turns, round_medians_s, shift, timed_blocks
from redline.analyze.compare import compare_records
from redline.analyze.summary import summarize
from redline.record import Block, BlockKind, RunRecord
from redline.search.observer import NoJournal
from redline.search.run import measure_together
from redline.spec import RunSpec, WorkloadSpec
from redline.spec_table import specs_from_table
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

    def test_only_latency_blocks_have_one_too(self) -> None:
        rounds = round_medians_s(record_of([2.0, 2.0], [1.84, 1.84], "latency"), "latency")
        assert list(rounds.values()) == pytest.approx([2.0, 2.0])

    def test_a_record_that_was_stopped_alone_has_its_figures(self) -> None:
        assert len(timed_blocks(record_of([2.0, 2.0], []), "throughput")) == 2


def test_run_and_compare_say_the_same_of_two_records() -> None:
    door = FakeDoor(
        Landscape(
            step_s={"baseline": 0.01, "fp16": 0.005}, in_company={"baseline": 1.0, "fp16": FASTER}, noise_sigma=2e-3
        )
    )
    specs = specs_from_table({"model": "resnet50", "batch": 32, "device": "cuda:0", "recipe": ["baseline", "fp16"]})
    first, other = measure_together(specs, door, NoJournal())
    told = summarize([first, other])[1].vs_first
    ratio = ratio_in_turns(first, other)
    (compared,) = compare_records([first], [other]).comparisons
    assert told is not None
    assert ratio is not None
    assert (told.ratio, told.low, told.high) == (ratio.ratio, ratio.low, ratio.high)
    assert ratio.ratio == pytest.approx(2.0, rel=0.01)
    assert ratio.low < 2.0 < 2.0 / FASTER < ratio.high * 1.001
    assert compared.first_s / compared.other_s == pytest.approx(2.0, rel=0.01)
