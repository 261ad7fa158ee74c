"""What a run's report says below its table, and what its last line may recommend."""

from __future__ import annotations

import msgspec
import pytest

from redline.analyze.bound import Bound
from redline.analyze.summary import RunSummary, VersusFirst
from redline.analyze.trust import Verdict
from redline.record import Numerics
from redline.report.run import RunReport
from redline.report.terminal import as_text


def row(recipe: str, ratio: float | None, number_format: str = "fp32", *, passed: bool = True) -> RunSummary:
    interval = {"low": ratio * 0.98, "high": ratio * 1.02} if ratio else {}
    return RunSummary(
        model="net",
        task="infer",
        recipe=recipe,
        device="cpu",
        throughput_per_s=10.0 * (ratio or 1),
        numerics=Numerics(number_format=number_format, rel_l2=1e-3, passed=passed),
        vs_first=VersusFirst(ratio=ratio, latency_change=None, memory_change=None, **interval) if ratio else None,
        verdict=Verdict(labels=("valid",)),
        bound=Bound(label="unknown", evidence=""),
        record_id=recipe,
    )


def test_the_fastest_that_keeps_the_numbers_is_recommended() -> None:
    rows = [row("baseline", None), row("channels-last", 1.2), row("fp16", 2.0, "fp16"), row("bf16", 3.0, passed=False)]
    assert "next: fp16 is the fastest here that keeps the numbers right (2.00×)" in as_text(RunReport(rows))


def test_a_ratio_that_may_be_none_does_not_stand_before_one_that_is() -> None:
    unsure = row("onnx", 1.7)
    unsure = msgspec.structs.replace(unsure, vs_first=msgspec.structs.replace(unsure.vs_first, low=0.95))
    text = as_text(RunReport([row("baseline", None), row("channels-last", 1.2), unsure]))
    assert "next: channels-last is the fastest here that keeps the numbers right (1.20×)" in text


@pytest.mark.parametrize(
    ("recipe", "number_format"), [("int8", "int8"), ("int8:weight-only", "int8-weights"), ("fp8", "fp8")]
)
def test_a_quantized_recipe_is_shown_and_never_recommended(recipe: str, number_format: str) -> None:
    text = as_text(RunReport([row("baseline", None), row("onnx", 1.2), row(recipe, 9.0, number_format)]))
    assert "next: onnx is the fastest here" in text
    assert f"{recipe}: quantized: only a check on your own data tells whether the model bears it" in text
    alone = as_text(RunReport([row("baseline", None), row(recipe, 9.0, number_format)]))
    assert "next: only quantized recipes are faster than the first here" in alone


def test_a_spread_worth_noting_stands_below_the_table() -> None:
    note = "latency: spread 7 % of the mean"
    noted = msgspec.structs.replace(row("fp16", 2.0, "fp16"), verdict=Verdict(labels=("valid",), notes=(note,)))
    lines = as_text(RunReport([row("baseline", None), noted])).splitlines()
    assert f"  fp16: {note}" in [line.rstrip() for line in lines]
    assert next(line for line in lines if line.startswith("fp16")).rstrip().endswith("valid, noted")


def test_a_ratio_that_the_speeds_beside_it_deny_is_told_apart() -> None:
    def text(speed: float) -> str:
        baseline, other = row("baseline", None), row("compile", 1.4)
        other = msgspec.structs.replace(
            other, throughput_per_s=speed, vs_first=msgspec.structs.replace(other.vs_first, recipe="baseline")
        )
        return as_text(RunReport([baseline, other]))

    assert "5.90× by its speed in all, 1.40× in turns" in text(59.0)
    assert "in turns" not in text(14.1)
