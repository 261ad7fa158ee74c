"""What is said beside a result about what it was measured on."""

from __future__ import annotations

import msgspec
import pytest
from tune_bench import BEST, Tune, landscape
from worlds.recipes import switches_of

from redline.model.note import note
from redline.model.record import Numerics
from redline.model.spec import RunSpec
from redline.model.work import Facts
from redline.search.tune.summary import summary_of
from redline.testing.landscape import EXACT
from redline.verbs.tune import result_of


def in_half(spec: RunSpec) -> Numerics:
    is_half = "fp16" in switches_of(spec)
    return Numerics(rel_l2=0.0, passed=True, number_format="fp16" if is_half else "fp32")


@pytest.mark.parametrize(
    ("facts", "without", "code", "told"),
    [
        (Facts(branches=True), "int8", "one-branch", "runs other operators on other values"),
        (Facts(varies_shapes=True), "int8", "one-branch", "gives its operators other shapes on other values"),
        (Facts(double_share=0.9), "int8", "fewer-digits", "fp16 keeps about 3 of its 16 digits"),
        (Facts(double_share=0.1), "int8", "", ""),
        (Facts(double_share=0.9), "fp16", "", ""),
    ],
)
def test_what_a_gain_depends_on_is_told(tune: Tune, facts: Facts, without: str, code: str, told: str) -> None:
    result = tune(landscape(facts=facts, numerics=in_half), without=[without, "bf16"], budget="60s")
    notes = {each.code: str(each) for each in result.notes if each.code in ("one-branch", "fewer-digits")}
    assert list(notes) == ([code] if code else [])
    assert told in notes.get(code, "")


def test_nothing_is_said_of_a_baseline_that_stays(tune: Tune) -> None:
    slow = landscape(
        step_s=lambda spec: 0.01 * (1 + len(switches_of(spec))), facts=Facts(branches=True), numerics=EXACT
    )
    result = tune(slow)
    assert result.winner is None
    assert "one-branch" not in {each.code for each in result.notes}


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
        found = result_of(result.tune, records, summary_of(result.tune, records))
        return [each.code for each in found.notes if each.code == left_out.code]

    assert told(BEST) == ["masked-positions"], "once, however many processes say so"
    assert told("baseline") == []
