"""What is said beside a result about what it was measured on."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from tune_bench import BEST, Tune, landscape
from worlds.recipes import switches_of

from redline.model.note import note
from redline.model.record import Numerics
from redline.model.spec import RunSpec
from redline.model.work import Facts
from redline.search.tune.result import summary_of
from redline.testing.landscape import EXACT
from redline.verbs.tune import TuneResult

SCOPE = ("one-branch", "fewer-digits")


def said(result: TuneResult) -> dict[str, str]:
    return {each.code: str(each) for each in result.summary.notes if each.code in SCOPE}


def in_half(spec: RunSpec) -> Numerics:
    is_half = "fp16" in switches_of(spec)
    return Numerics(rel_l2=0.0, passed=True, number_format="fp16" if is_half else "fp32")


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (Facts(branches=True), "runs other operators on other values"),
        (Facts(varies_shapes=True), "gives its operators other shapes on other values"),
        (Facts(), None),
    ],
)
def test_a_gain_that_depends_on_the_inputs_is_marked(tune: Tune, facts: Facts, told: str | None) -> None:
    found = said(tune(replace(landscape(), facts=facts))).get("one-branch")
    assert found is None if told is None else told in str(found)


@pytest.mark.parametrize(("share", "without", "is_told"), [(0.9, None, True), (0.1, None, False), (0.9, "fp16", False)])
def test_digits_that_a_model_in_float64_loses_are_told(
    tune: Tune, share: float, without: str | None, is_told: bool
) -> None:
    result = tune(landscape(facts=Facts(double_share=share), numerics=in_half), without=[without or "int8", "bf16"])
    assert ("fp16 keeps about 3 of its 16 digits" in said(result).get("fewer-digits", "")) is is_told


def test_nothing_is_said_of_a_baseline_that_stays(tune: Tune) -> None:
    slow = landscape(
        step_s=lambda spec: 0.01 * (1 + len(switches_of(spec))), facts=Facts(branches=True), numerics=EXACT
    )
    result = tune(slow)
    assert result.winner is None
    assert said(result) == {}
    assert BEST not in str(result.summary.leader)


def test_what_the_comparison_of_the_winner_leaves_out_is_told(tune: Tune) -> None:
    result = tune()
    left_out = note("masked-positions", "positions that a mask hides are not compared")

    def told(*recipes: str) -> list[str]:
        records = dict(result.recorded)
        for key, record in records.items():
            if str(record.spec.recipe) in recipes and record.prepared is not None:
                workload = msgspec.structs.replace(record.prepared.workload, notes=(left_out,))
                prepared = msgspec.structs.replace(record.prepared, workload=workload)
                records[key] = msgspec.structs.replace(record, prepared=prepared)
        return [each.code for each in summary_of(result.tune, records).notes if each.code == left_out.code]

    assert told(BEST) == ["masked-positions"], "once, however many processes say so"
    assert told("baseline") == []
