"""What a run's report says below its table, and what its last line may recommend."""

from __future__ import annotations

import msgspec
import pytest

from redline.analyze.bound import Bound
from redline.analyze.recommend.evidence import may_recommend
from redline.analyze.summary import RunSummary, VersusFirst
from redline.analyze.trust import Verdict
from redline.model.note import note
from redline.model.record import Capabilities, Numerics
from redline.model.units import THIN_SPACE
from redline.show.run import RunReport
from redline.show.terminal import as_text


def row(recipe: str, ratio: float | None, *, passed: bool = True, quantizes: bool = False) -> RunSummary:
    interval = {"low": ratio * 0.98, "high": ratio * 1.02} if ratio else {}
    return RunSummary(
        model="net",
        task="infer",
        recipe=recipe,
        device="cpu",
        throughput_per_s=10.0 * (ratio or 1),
        numerics=Numerics(rel_l2=1e-3, passed=passed),
        capabilities=Capabilities(quantizes=quantizes),
        vs_first=VersusFirst(ratio=ratio, latency_change=None, memory_change=None, **interval) if ratio else None,
        verdict=Verdict(labels=("valid",)),
        bound=Bound(label="unknown", evidence=note("not-measured", "")),
        record_id=recipe,
    )


def test_the_fastest_that_keeps_the_numbers_is_recommended() -> None:
    rows = [row("baseline", None), row("channels-last", 1.2), row("fp16", 2.0), row("bf16", 3.0, passed=False)]
    assert "next: fp16 is the fastest here that has acceptable outputs (2.00× (1.96–2.04))" in as_text(RunReport(rows))


def test_a_ratio_that_may_be_none_does_not_stand_before_one_that_is() -> None:
    unsure = row("onnx", 1.7)
    unsure = msgspec.structs.replace(unsure, vs_first=msgspec.structs.replace(unsure.vs_first, low=0.95))
    text = as_text(RunReport([row("baseline", None), row("channels-last", 1.2), unsure]))
    assert "next: channels-last is the fastest here that has acceptable outputs (1.20× (1.18–1.22))" in text


def test_a_quantized_recipe_is_shown_and_never_recommended() -> None:
    """Whatever it is called: a plug-in may quantize too."""
    quantized = row("my-4-bits", 9.0, quantizes=True)
    text = as_text(RunReport([row("baseline", None), row("onnx", 1.2), quantized]))
    assert "next: onnx is the fastest here" in text
    assert "my-4-bits: quantized: only a check on your own data tells whether the accuracy is acceptable" in text
    assert not may_recommend(quantized)
    assert may_recommend(row("onnx", 1.2))
    alone = as_text(RunReport([row("baseline", None), quantized]))
    assert "next: only quantized recipes are faster than the first here" in alone


def with_interval(recipe: str, ratio: float, low: float | None, high: float | None) -> RunSummary:
    found = row(recipe, ratio)
    assert found.vs_first is not None
    return msgspec.structs.replace(found, vs_first=msgspec.structs.replace(found.vs_first, low=low, high=high))


@pytest.mark.parametrize(("ratio", "low", "high"), [(1.46, 0.84, 2.55), (0.98, 0.9, 1.05), (1.4, None, None)])
def test_an_interval_on_both_sides_of_one_is_inconclusive(ratio: float, low: float | None, high: float | None) -> None:
    last = as_text(RunReport([row("baseline", None), with_interval("compile", ratio, low, high)])).splitlines()[-1]
    assert last.startswith("next: inconclusive: compile may be faster or slower than the first;")


@pytest.mark.parametrize(("ratio", "low", "high", "told"), [(1.16, 1.01, 1.32, "faster"), (0.97, 0.95, 0.99, "slower")])
def test_one_that_may_differ_by_too_little_is_said_to(ratio: float, low: float, high: float, told: str) -> None:
    last = as_text(RunReport([row("baseline", None), with_interval("compile", ratio, low, high)])).splitlines()[-1]
    assert last.startswith(
        f"next: inconclusive: compile is {told} than the first, but maybe by less than 3{THIN_SPACE}%;"
    )


def test_only_what_is_clearly_not_faster_is_said_not_to_be() -> None:
    slower, same = with_interval("compile", 0.8, 0.75, 0.85), with_interval("tf32", 1.0, 0.99, 1.01)
    assert "next: no recipe here is faster than the first" in as_text(RunReport([row("baseline", None), slower, same]))
    wrong = row("bf16", 3.0, passed=False)
    assert "without acceptable outputs are faster" in as_text(RunReport([row("baseline", None), wrong]))


def test_a_step_that_is_mostly_python_is_to_be_looked_at_not_computed_in_another_way() -> None:
    python = Bound(label="host", evidence=note("outside-operators", ""))
    alone = msgspec.structs.replace(row("baseline", None), bound=python, worth_trying=("bf16", "compile"))
    last = as_text(RunReport([alone])).splitlines()[-1]
    assert "profile" in last
    assert "bf16" not in last


def test_a_spread_worth_noting_stands_below_the_table() -> None:
    spread = note("spread", "latency: spread 7 % of the mean", about="latency")
    noted = msgspec.structs.replace(row("fp16", 2.0), verdict=Verdict(labels=("valid",), notes=(spread,)))
    lines = as_text(RunReport([row("baseline", None), noted])).splitlines()
    assert f"  fp16: {spread}" in [line.rstrip() for line in lines]
    assert next(line for line in lines if line.startswith("fp16")).rstrip().endswith("valid, noted")


def test_a_ratio_that_the_speeds_beside_it_deny_is_told_apart() -> None:
    def text(speed: float) -> str:
        baseline, other = row("baseline", None), row("compile", 1.4)
        other = msgspec.structs.replace(
            other, throughput_per_s=speed, vs_first=msgspec.structs.replace(other.vs_first, recipe="baseline")
        )
        return as_text(RunReport([baseline, other]))

    assert "5.90× by overall throughput, but 1.40× interleaved" in text(59.0)
    assert "by overall throughput" not in text(14.1)
