"""What limits a rung, in one sentence, and gains that a person can read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from redline.analyze.bound import Bound
from redline.analyze.ladder import Rung, limit_of, with_gains
from redline.analyze.train import EpochSummary, TrainingSummary
from redline.model.note import note
from redline.report.ladder import accuracy_remark, conclusion, ladder_report
from redline.report.terminal import as_text

EPOCH = EpochSummary(
    epoch=1,
    seconds=1.0,
    samples_per_s=1.0,
    train_loss=1.0,
    val_loss=1.0,
    val_accuracy=0.5,
    data_wait_share=0.0,
    peak_bytes=1,
)


def row(label: str = "unknown", **more: Any) -> TrainingSummary:
    known: dict[str, Any] = {"device": "cuda:0", "phase_shares": {"forward": 0.3, "backward": 0.7}, **more}
    bound = Bound(label=label, evidence=note("host", "because"))  # type: ignore[arg-type]
    return TrainingSummary(
        record_id="a", model="resnet18", recipe="baseline", data="synthetic", bound=bound, epochs=(EPOCH,), **known
    )


@pytest.mark.parametrize(
    ("summary", "told"),
    [
        (row("data"), "the loader limits it: because"),
        (row("host"), "the host, which issues the work, limits it: because"),
        (row("memory"), "memory bandwidth limits it: because"),
        (row("device", utilisation=0.5), "the device limits it: the backward takes"),
        (row(device="cpu", utilisation=1 / 16), "1.0 of the machine's 16 cores are busy"),
        (row(phase_shares={"data": 0.1, "step": 0.9}), "the recorded step takes"),
        (row(failure="broken"), ""),
    ],
)
def test_each_limit_has_its_sentence(summary: TrainingSummary, told: str) -> None:
    found = limit_of(summary, None, 16)
    assert told in found
    assert bool(found) is bool(told)


def test_a_large_gain_is_a_plain_number_with_what_limits_it() -> None:
    rungs = with_gains(
        [
            Rung(name="first", device="cpu", samples_per_s=29.1, accuracy=0.1, steps=9),
            Rung(
                name="last", device="cuda:0", samples_per_s=66_762.0, accuracy=0.9, steps=30, limit="memory limits it"
            ),
        ]
    )
    assert conclusion(rungs) == "last: 66\u2009762 items/s, 2\u2009294× the first rung; memory limits it"
    doubted = [msgspec.structs.replace(rungs[0], doubts=(note("shared-cpu", "others were busy"),)), rungs[1]]
    assert conclusion(doubted) == f"not decided, because some speeds are not to be relied on: {conclusion(rungs)}"
    assert "first: not to be relied on: others were busy" in as_text(ladder_report(doubted))
    assert "9 to 30 here" in accuracy_remark(rungs)
    assert accuracy_remark(rungs[:1]) == ""
