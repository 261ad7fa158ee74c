"""The way a search found, as a waterfall that ends where the winner does."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from reported import ceilings_of, race_records

from redline.analyze.pairs import pair_of
from redline.analyze.summary import summarize
from redline.model.record import RunRecord
from redline.search.tune.answer import answer
from redline.search.tune.gains import gain_path_of, waterfall
from redline.search.tune.record import TuneRecord, TuneSpec
from redline.search.tune.result import Ranked, SwitchGain, TuneSummary, Winner, against_baseline
from redline.search.tune.state import Estimate

RECORDS = race_records()
ROWS = summarize(RECORDS, ceilings_of)


def summary(
    record: RunRecord = RECORDS[2], *, ratio: float = 4.0, gains: tuple[float, ...] = (2.5, 1.6)
) -> TuneSummary:
    recipe = str(record.spec.recipe)
    winner = Winner(recipe=recipe, batch=32, ratio=ratio, low=3.9, high=4.1, record_id=record.id)
    return TuneSummary(
        name="mine",
        state="done",
        model="resnet50",
        task="infer",
        device="cuda:0",
        device_name="fake cuda device",
        objective="throughput",
        winner=winner if winner.is_certain else None,
        leader=winner,
        ranking=(),
        switches=tuple(
            SwitchGain(switch=step, gain=gain, low=None, high=None)
            for step, gain in zip(("fp16", "compile"), gains, strict=False)
        ),
        rejected=(),
        metrics=(),
        refused=(),
        headroom=None,
        snippet=None,
        seconds=1.0,
        compile_seconds=0.0,
        trials=3,
        record_ids=tuple(each.id for each in RECORDS),
    )


def with_leader(found: TuneSummary, **changes: Any) -> TuneSummary:
    assert found.leader is not None
    leader = msgspec.structs.replace(found.leader, **changes)
    return msgspec.structs.replace(found, leader=leader, winner=leader if leader.is_certain else None)


def test_it_ends_at_the_winners_own_time_and_at_its_roofline() -> None:
    found = gain_path_of(summary(), ROWS)
    row = ROWS[2]
    assert row.batch is not None
    assert row.throughput_per_s is not None
    assert found.winner_s == pytest.approx(row.batch / row.throughput_per_s)
    assert found.baseline_s == pytest.approx(4.0 * found.winner_s)
    assert [bar.label for bar in waterfall(found)] == [
        "baseline",
        "without fp16",
        "without compile",
        "fp16+compile",
        "roofline",
    ]
    assert found.roofline_s == row.roofline.attainable_s
    assert waterfall(found)[3].told == "4.00× (3.90–4.10) as fast as baseline, valid"


@pytest.mark.parametrize("gains", [(2.0, 1.6), (3.0, 2.0), (2.5,), ()])
def test_only_measured_times_are_bars(gains: tuple[float, ...]) -> None:
    """Gains of leaving one out do not multiply to the whole, and nothing is made up so that they do."""
    found = gain_path_of(summary(gains=gains), ROWS)
    assert found is not None
    without = [bar.seconds for bar in waterfall(found) if bar.kind == "without"]
    assert without == [pytest.approx(found.winner_s * gain) for gain in sorted(gains, reverse=True)]


def test_without_ceilings_there_is_no_roofline() -> None:
    found = gain_path_of(summary(), summarize(RECORDS))
    assert found.roofline_s is None


def test_there_is_no_way_without_a_winner_or_to_the_baseline_itself() -> None:
    assert gain_path_of(msgspec.structs.replace(summary(), winner=None, leader=None), ROWS) is None
    assert gain_path_of(summary(RECORDS[0], ratio=1.0), ROWS) is None
    assert gain_path_of(summary(), ROWS[:1]) is None


@pytest.mark.parametrize(
    ("low", "high", "verdict", "told"),
    [
        (
            0.55,
            1.99,
            "inconclusive",
            "surely is faster than the baseline; fp16+compile was measured at 0.94× (0.55–1.99)",
        ),
        (
            0.44,
            1.99,
            "inconclusive",
            "surely is faster than the baseline; fp16+compile was measured at 0.94× (too wide to tell)",
        ),
        (1e-4, 1e4, "inconclusive", "was measured at 0.94× (too wide to tell)"),
        (0.90, 0.98, "slower", "no winner: nothing that was tried is faster than the baseline"),
    ],
)
def test_what_was_not_decided_is_not_told_as_slower(low: float, high: float, verdict: Any, told: str) -> None:
    rows = (
        Ranked(recipe="baseline", ratio=1.0, verdict="same", numerics=None, low=1.0, high=1.0),
        Ranked(recipe="fp16+compile", ratio=0.94, verdict=verdict, numerics=None, low=low, high=high),
    )
    found = with_leader(summary(), recipe="baseline", ratio=1.0, low=1.0, high=1.0)
    assert told in answer(msgspec.structs.replace(found, ranking=rows))


@pytest.mark.parametrize(
    ("on_trial", "error", "verdict"), [(4.0, 0.002, "slower"), (8.0, 0.002, "inconclusive"), (4.0, 0.2, "inconclusive")]
)
def test_who_was_seen_once_is_doubted_as_far_as_the_race_moved_others(
    on_trial: float, error: float, verdict: str
) -> None:
    """The race saw fp16+compile at four times the baseline, the trial at `on_trial` times."""
    replicate = [RECORDS[0], RECORDS[2]]
    raced = pair_of([replicate], "baseline", "fp16+compile")
    assert raced is not None
    known = {
        recipe: Estimate(
            recipe=recipe,
            record_id="",
            log_s=-math.log(speed),
            error=error,
            host_log_s=None,
            is_host_bound=False,
        )
        for recipe, speed in {"baseline": 1.0, "fp16+compile": on_trial / 4.0 * raced.ratio, "bf16": 0.8}.items()
    }
    tune = TuneRecord(name="mine", tune=TuneSpec(spec=RECORDS[0].spec))
    assert against_baseline("bf16", [replicate], tune, known).verdict == verdict
