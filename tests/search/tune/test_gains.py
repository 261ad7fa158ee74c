"""What a search says in a sentence, and the way to its winner in bars."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from reported import ceilings_of, race_records

from redline.analyze.measurement import Measurement, measurements
from redline.analyze.pairs import pair_of
from redline.model.note import note
from redline.model.work import Facts
from redline.search.tune.record import Trial, TuneRecord, TuneSpec
from redline.search.tune.standings import Standings
from redline.search.tune.summary import Ranked, SwitchGain, TuneSummary
from redline.show.searches import answer, gain_path_of, speed_of

RECORDS = race_records()
ROWS = measurements(RECORDS, ceilings_of)
BASELINE_ROW, LEADER_ROW = ROWS[0], ROWS[2]


def ranked(row: Measurement, ratio: float, low: float, high: float, verdict: Any) -> Ranked:
    return Ranked(recipe=row.recipe, ratio=ratio, low=low, high=high, verdict=verdict, row=row)


BASELINE = ranked(BASELINE_ROW, 1.0, 1.0, 1.0, "same")


def summary(row: Measurement = LEADER_ROW, gains: tuple[float, ...] = (2.5, 1.6)) -> TuneSummary:
    """Of a search that ended: this recipe was raced at four times the baseline."""
    named = zip(("fp16", "compile"), gains, strict=False)
    return TuneSummary(
        tune=TuneRecord(name="mine", tune=TuneSpec(spec=RECORDS[0].spec), state="done"),
        leader=ranked(row, 4.0, 3.9, 4.1, "faster"),
        ranking=(),
        switches=tuple(SwitchGain(switch=name, gain=gain, low=None, high=None) for name, gain in named),
        rejected=(),
    )


def test_the_way_ends_at_the_winners_own_time_and_at_its_roofline() -> None:
    bars = gain_path_of(summary(), ROWS).bars
    own_s = LEADER_ROW.batch / LEADER_ROW.throughput_per_s
    labels = ["baseline", "without fp16", "without compile", "fp16+compile", "roofline"]
    assert [bar.label for bar in bars] == labels
    assert [bar.seconds for bar in bars[:4]] == [pytest.approx(own_s * times) for times in (4.0, 2.5, 1.6, 1.0)]
    assert bars[4].seconds == LEADER_ROW.roofline.attainable_s
    assert bars[3].told == "4.00× (3.90–4.10) as fast as baseline, valid"
    assert bars[4].told.endswith("× left at most")


def test_without_ceilings_there_is_no_roofline() -> None:
    path = gain_path_of(summary(gains=()), measurements(RECORDS))
    assert [bar.kind for bar in path.bars] == ["baseline", "winner"]


def test_there_is_no_way_without_a_winner_or_to_the_baseline_itself() -> None:
    assert gain_path_of(msgspec.structs.replace(summary(), leader=None), ROWS) is None
    assert gain_path_of(summary(BASELINE_ROW), ROWS) is None
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
        (1e-4, 1e4, "inconclusive", "the times of fp16+compile scatter too much to tell"),
        (0.90, 0.98, "slower", "no winner: nothing that was tried is faster than the baseline"),
    ],
)
def test_what_was_not_decided_is_not_told_as_slower(low: float, high: float, verdict: Any, told: str) -> None:
    rows = (BASELINE, ranked(LEADER_ROW, 0.94, low, high, verdict))
    assert told in answer(msgspec.structs.replace(summary(), leader=BASELINE, ranking=rows))


def test_what_looks_faster_in_the_table_is_never_called_nothing() -> None:
    """Each sentence names why the row above it is not the winner."""
    fast = ranked(LEADER_ROW, 5.37, 5.2, 5.5, "faster")
    unraced = msgspec.structs.replace(fast, low=None, high=None)
    unproven = msgspec.structs.replace(fast, note=note("no-check", "int8: give a check of your own"))
    for row, told in ((unraced, "was faster in one process and was not raced"), (unproven, "and may be recommended")):
        sentence = answer(msgspec.structs.replace(summary(), leader=BASELINE, ranking=(row, BASELINE)))
        assert told in sentence
        assert "nothing that was tried is faster" not in sentence


def test_the_speeds_of_the_table_divide_by_its_ratios() -> None:
    """They were 6.11x at 1 538 img/s beside 6.08x at 1 313: each speed was of the minute of its own processes."""
    rows = (ranked(LEADER_ROW, 4.0, 3.9, 4.1, "faster"), BASELINE)
    found = msgspec.structs.replace(summary(), ranking=rows)
    speeds = [speed_of(found, row) for row in rows]
    assert speeds[0].value == pytest.approx(4.0 * speeds[1].value)
    assert speeds[1].value == BASELINE_ROW.throughput_per_s
    assert speeds[0].in_words in answer(found)


def test_who_did_not_race_is_set_against_those_who_did() -> None:
    """On trial channels-last took a quarter longer than fp16+compile, whose gain the race has measured."""
    by_recipe = {str(record.spec.recipe): record for record in RECORDS}
    raced = [by_recipe["baseline"], by_recipe["fp16+compile"]]
    trials = tuple(Trial(recipe=name, record_id=record.id) for name, record in by_recipe.items())
    tune = TuneRecord(
        name="mine", tune=TuneSpec(spec=RECORDS[0].spec), trials=trials, finals=(tuple(one.id for one in raced),)
    )
    standings = Standings(tune, {record.id: record for record in RECORDS})
    pair = pair_of([raced], "baseline", "fp16+compile")
    assert standings.of("fp16+compile").ratio == pytest.approx(pair.ratio)
    for name, estimate in standings.trials.items():
        if name not in ("baseline", "fp16+compile"):
            apart = math.exp(standings.trials["fp16+compile"].log_s - estimate.log_s)
            assert standings.of(name).ratio == pytest.approx(pair.ratio * apart)
            assert standings.of(name).may_be_off > 1


def test_an_interval_begins_at_the_work_of_the_device_where_the_host_varies() -> None:
    """A step of the baseline never takes less than that, however quick the host is in a process."""
    by_recipe = {str(record.spec.recipe): record for record in RECORDS}
    raced = tuple(by_recipe[name].id for name in ("baseline", "fp16+compile"))
    trials = tuple(Trial(recipe=name, record_id=record.id) for name, record in by_recipe.items())
    tune = TuneRecord(name="mine", tune=TuneSpec(spec=RECORDS[0].spec), trials=trials, finals=(raced, raced))
    by_id = {record.id: record for record in RECORDS}
    plain = Standings(tune, by_id).of("fp16+compile")
    own_s = math.exp(Standings(tune, by_id).trials["fp16+compile"].log_s)
    for work, low in ((0.5, plain.low), (1.0, pytest.approx(0.98 * plain.ratio, rel=0.01)), (2.0, plain.ratio)):
        facts = Facts(host_s=own_s, device_s=work * plain.ratio * own_s)
        standing = Standings(msgspec.structs.replace(tune, facts=facts), by_id).of("fp16+compile")
        assert standing.low == low
        assert (standing.ratio, standing.high) == (plain.ratio, plain.high)
