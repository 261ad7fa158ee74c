"""What the first sentence of a run says, and what its last line sends to, from rows that are known."""

from __future__ import annotations

from typing import Any

import pytest
from known import known, versus

from redline.analyze.bound import Bound
from redline.analyze.measurement import Measurement
from redline.analyze.rows import columns_for, headline_of, row_of, table_of
from redline.analyze.trust import Verdict
from redline.model.note import note
from redline.model.record import Numerics
from redline.verbs.run import next_of


def row(recipe: str, *interval: float | None, passed: bool = True, **changes: Any) -> Measurement:
    """A row that is `interval[0]` times as fast as the baseline, give or take 2 % where no other ends are named."""
    ratio, low, high = (*interval, *(1.0, None, None)[len(interval) :]) if len(interval) != 1 else (interval[0], (interval[0] or 1) * 0.98, (interval[0] or 1) * 1.02)  # fmt: skip
    seen = versus(ratio or 1.0, low, high) if interval else None
    numerics = Numerics(rel_l2=1e-3, passed=passed)
    own = {"throughput_per_s": 1000.0 * (ratio or 1), "numerics": numerics, "vs_first": seen, "arguments": "net"}
    return known(recipe, **{**own, **changes})


BASELINE = row("baseline")


def answer(*rows: Measurement) -> tuple[str, str]:
    table, _ = table_of([row_of(each) for each in rows], "results", columns_for(rows))
    return str(headline_of(table)), next_of(rows, {each.record_id: each for each in table.rows})


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([row("tf32", 1.2), row("fp16", 2.0), row("bf16", 3.0, passed=False)], "fp16 is 2.00× (1.96–2.04) as fast as baseline: 2 000 img/s."),
        ([row("tf32", 1.2), row("onnx", 1.7, 0.95, 2.0)], "tf32 is 1.20× (1.18–1.22) as fast as baseline: 1 200 img/s."),
        ([row("onnx", 1.2), row("my-4-bits", 9.0, quantizes=True)], "onnx is 1.20× (1.18–1.22) as fast as baseline: 1 200 img/s."),
        ([row("my-4-bits", 9.0, quantizes=True)], "my-4-bits is 9.00× (8.82–9.18) as fast as baseline, but it is quantized, so check it on your own data."),
        ([row("bf16", 3.0, passed=False)], "bf16 is 3.00× (2.94–3.06) as fast as baseline, but its outputs are wrong."),
        ([row("compile", 1.46, 0.84, 2.55)], "It is not decided whether compile is faster than baseline: 1.46× (0.84–2.55)."),
        ([row("compile", 1.16, 1.01, 1.32)], "It is not decided whether compile is faster than baseline: 1.16× (1.01–1.32)."),
        ([row("compile", 2.48, 0.06, 102.0)], "It is not decided whether compile is faster than baseline: the machine is too noisy."),
        ([row("compile", 1.4, None, None)], "It is not decided whether compile is faster than baseline: ~1.40×."),
        ([row("compile", 0.8), row("tf32", 1.0, 0.99, 1.01)], "No recipe here is faster than baseline by more than 3%: 1 000 img/s."),
        ([row("fp16", 2.0, batch=16), row("fp16", 3.0, batch=32)], "fp16 is 3.00× (2.94–3.06) as fast as baseline (batch 32): 3 000 img/s."),
        ([], "net under baseline reaches 1 000 img/s."),
    ],
)  # fmt: skip
def test_the_answer_follows_from_the_rows(rows: list[Measurement], told: str) -> None:
    assert answer(BASELINE, *rows)[0].replace("\u2009", " ") == told


def test_noise_of_a_side_does_not_overrule_its_interval_and_what_spoilt_it_does() -> None:
    """9.16× (5.45–15.4) is faster, however noisy; the same of a throttled card is not decided."""
    for labels, decided in ((("noisy",), True), (("throttled",), False), (("shared-cpu", "noisy"), False)):
        verdict = Verdict(labels=labels, reasons=(note("wide-interval", "too wide", about="throughput"),))  # type: ignore[arg-type]
        told, _ = answer(BASELINE, row("fp16", 9.16, 5.45, 15.4, verdict=verdict))
        assert told.startswith("fp16 is 9.16×") is decided
        spoilt = versus(9.16, 5.45, 15.4, first_doubted=not decided)
        assert answer(BASELINE, row("fp16", vs_first=spoilt))[0].startswith("fp16 is 9.16×") is decided


@pytest.mark.parametrize(
    ("rows", "command"),
    [
        ([BASELINE], "redline profile net"),
        ([BASELINE.changed(worth_trying=("fp16", "compile"))], "redline run net -r baseline -r fp16 -r compile"),
        ([BASELINE.changed(worth_trying=("fp16",), arguments=None)], "redline.run(model, inputs, recipes=['baseline', 'fp16'])"),
        ([BASELINE.changed(bound=Bound(label="host", evidence=note("outside-operators", "")), worth_trying=("bf16",))], "redline profile net"),
        ([BASELINE, row("fp16", 2.0)], "redline profile net -r fp16"),
        ([BASELINE, row("fp16", 1.1, 0.9, 1.3)], "redline run net -r baseline -r fp16 --decide"),
        ([BASELINE, row("fp16", 0.8)], "redline tune net"),
    ],
)  # fmt: skip
def test_the_next_command_goes_on_from_the_answer(rows: list[Measurement], command: str) -> None:
    assert answer(*rows)[1] == command
