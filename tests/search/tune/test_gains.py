"""The way a search found, as a waterfall that ends where the winner does."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from reported import ceilings_of, fake_door, race_records

from redline.analyze.pairs import log_ratio, pair_of
from redline.analyze.summary import summarize
from redline.model.note import note
from redline.model.record import RunRecord
from redline.model.spec import Recipe
from redline.search.tune.estimates import Estimate
from redline.search.tune.finals import _is_behind
from redline.search.tune.flight import UntilPlaced
from redline.search.tune.gains import gain_path_of, waterfall
from redline.search.tune.record import Refused, TuneRecord, TuneSpec
from redline.search.tune.result import Ranked, Rejected, TuneSummary
from redline.search.tune.space import Space
from redline.search.tune.tuner import Tuner
from redline.search.tune.winner import SwitchGain, Winner, against_baseline, simplest_of_the_fastest
from redline.show.terminal import as_text
from redline.show.tune import answer, ratio_told, reasons, tune_report

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


def with_interval(found: TuneSummary, low: float | None, high: float | None, **changes: Any) -> TuneSummary:
    return with_leader(found, low=low, high=high, **changes)


def test_it_ends_at_the_winners_own_time_and_at_its_roofline() -> None:
    found = gain_path_of(summary(), ROWS)
    assert found is not None
    row = ROWS[2]
    assert row.batch is not None
    assert row.throughput_per_s is not None
    assert row.roofline is not None
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
    assert found is not None
    assert found.roofline_s is None


def test_there_is_no_way_without_a_winner_or_to_the_baseline_itself() -> None:
    assert gain_path_of(msgspec.structs.replace(summary(), winner=None, leader=None), ROWS) is None
    assert gain_path_of(summary(RECORDS[0], ratio=1.0), ROWS) is None
    assert gain_path_of(summary(), ROWS[:1]) is None


@pytest.mark.parametrize(
    ("low", "high", "verdict", "told"),
    [
        (
            0.44,
            1.99,
            "inconclusive",
            "surely is faster than the baseline; fp16+compile was measured at 0.94× (0.44–1.99)",
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


def test_a_long_error_is_cut_at_the_end_of_a_sentence() -> None:
    long = (
        "onnx cannot run this model: Found Out in output, which is not a known type, as nobody has told torch about it. "
        + 60 * "See. "
    )
    row = Rejected(recipe="onnx", switch="onnx", scope="switch", code="failed", text=long)
    (line,) = reasons(msgspec.structs.replace(summary(), rejected=(row,)))
    assert "nobody has told torch about it." in line
    assert line.endswith("See. …")
    assert len(line) < 300


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
            cost_s=1.0,
        )
        for recipe, speed in {"baseline": 1.0, "fp16+compile": on_trial / 4.0 * raced.ratio, "bf16": 0.8}.items()
    }
    tune = TuneRecord(name="mine", tune=TuneSpec(spec=RECORDS[0].spec))
    assert against_baseline("bf16", [replicate], tune, known).verdict == verdict


def named(record: RunRecord, recipe: str) -> RunRecord:
    return msgspec.structs.replace(record, spec=msgspec.structs.replace(record.spec, recipe=Recipe.parse(recipe)))


def racing(**log_s: float) -> Tuner:
    """A search whose trials saw these logarithms of times."""
    seen = {name: SimpleNamespace(recipe=name, log_s=each) for name, each in log_s.items()}
    stub = SimpleNamespace(seen=lambda: seen, asked=SimpleNamespace(kind="throughput"), space=Space(()))
    return cast(Tuner, stub)


SLOW, FAST = RECORDS[0], RECORDS[2]
"""Four times as fast."""


@pytest.mark.parametrize(("on_trial", "is_out"), [(math.log(4), True), (0.0, False)])
def test_one_replicate_that_contradicts_the_trials_puts_nobody_out(on_trial: float, is_out: bool) -> None:
    replicate = [named(FAST, "baseline"), named(SLOW, "fp16")]
    tuner = racing(baseline=0.0, fp16=on_trial)
    assert _is_behind(tuner, [replicate], "baseline", "fp16") == is_out


def test_that_nothing_beats_the_baseline_needs_an_interval() -> None:
    behind = [named(FAST, "baseline"), named(SLOW, "fp16")]
    level = [named(FAST, "baseline"), named(FAST, "fp16")]
    tuner = racing(baseline=0.0, fp16=1.4)
    assert _is_behind(tuner, [behind, behind], "baseline", "fp16")
    assert not _is_behind(tuner, [behind, level], "baseline", "fp16"), "half as fast, and two processes that disagree"
    rivals = [[named(one, "bf16"), named(other, "fp16")] for one, other in ((FAST, SLOW), (FAST, FAST))]
    assert _is_behind(tuner, rivals, "bf16", "fp16"), "between two that beat it the slower one is not worth more time"


def test_a_trial_far_ahead_is_timed_no_longer_than_one_far_behind() -> None:
    def entry(record: RunRecord, rounds: int) -> Any:
        blocks = {"throughput": [None] * rounds}
        return SimpleNamespace(record=record, blocks=blocks, timed_s=0.0, spec=record.spec, is_sound=True, stopped=None)

    slow, fast = named(SLOW, "fp16"), named(FAST, "bf16")
    assert log_ratio(slow, fast, "throughput") is not None
    assert UntilPlaced(entry(fast, 3), "throughput")._has_seen_enough([entry(slow, 9), entry(fast, 3)])
    assert UntilPlaced(entry(slow, 3), "throughput")._has_seen_enough([entry(fast, 9), entry(slow, 3)])
    assert not UntilPlaced(entry(fast, 2), "throughput")._has_seen_enough([entry(slow, 9), entry(fast, 2)])
    level = named(FAST, "fp16")
    assert not UntilPlaced(entry(level, 3), "throughput")._has_seen_enough([entry(fast, 9), entry(level, 3)])


def test_switches_that_were_not_tried_for_one_reason_share_a_line() -> None:
    why = note("unavailable", "a CPU runs none")
    refused = [Refused(switch=switch, reason=why) for switch in ("compile:pdl", "graphs")]
    refused.append(Refused(switch="tf32", reason=note("unavailable", "not of cpu")))
    told = as_text(tune_report(msgspec.structs.replace(summary(), refused=tuple(refused))))
    assert "not tried: compile:pdl, graphs: a CPU runs none" in told
    assert "not tried: tf32: not of cpu" in told


@pytest.mark.parametrize(
    ("off", "told", "answered"),
    [
        (1.04, "27.19×", "seen in one process only at"),
        (None, "27.19×", "seen in one process only at"),
        (5.0, "27.19× (~5.44–135.95)", "seen in one process only and may be off by 5.0×"),
        (54.3, "27.19× (too wide to tell)", "seen in one process only and may be off by 54×"),
    ],
)
def test_a_ratio_of_one_process_says_what_it_is_worth(off: float | None, told: str, answered: str) -> None:
    row = Ranked(recipe="fp16", ratio=27.19, verdict="inconclusive", numerics=None, may_be_off=off)
    assert ratio_told(row) == told
    found = with_leader(summary(), ratio=27.19, low=None, high=None, may_be_off=off)
    assert answered in answer(found)


@pytest.mark.parametrize(("replicates", "chosen"), [(1, "fp16+channels-last"), (2, "fp16")])
def test_a_simpler_recipe_wins_only_with_an_interval_of_its_own(replicates: int, chosen: str) -> None:
    """On simulated searches of five minutes, one replicate of it cost the answer its interval."""
    door = fake_door(step_s=lambda spec: 0.004 if spec.recipe.switches else 0.010)
    raced = [race_records(["baseline", "fp16+channels-last"], door) for _ in range(3)]
    raced += [race_records(["baseline", "fp16+channels-last", "fp16"], door) for _ in range(replicates)]
    tune = TuneRecord(name="mine", tune=TuneSpec(spec=RECORDS[0].spec))
    assert simplest_of_the_fastest(raced, ["baseline", "fp16+channels-last", "fp16"], tune) == chosen
