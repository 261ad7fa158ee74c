"""What limits a training, in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from reported import race_records

from redline.analyze.bound import Bound
from redline.analyze.measurement import Measurement
from redline.analyze.train import TrainingSummary
from redline.model.note import note
from redline.model.record import Epoch, Failure
from redline.verbs.study import limit_of

EPOCH = Epoch(number=1, seconds=1.0, train_s=1.0, steps=1, samples=1, train_loss=1.0)


def row(label: str = "unknown", device: str = "cuda:0", **more: Any) -> Measurement:
    bound = Bound(label=label, evidence=note("host", "because"))  # type: ignore[arg-type]
    shares = {"phase_shares": {"forward": 0.3, "backward": 0.7}, **more}
    training = TrainingSummary(
        record_id="a",
        model="resnet18",
        recipe="baseline",
        data="synthetic",
        bound=bound,
        device=device,
        epochs=(EPOCH,),
        **shares,
    )
    failure = Failure(stage="train", kind="crash", message="broken") if "failure" in more else None
    (record,) = race_records(("baseline",))
    return Measurement(record).changed(device=device, training=training, bound=bound, failure=failure)


@pytest.mark.parametrize(
    ("summary", "told"),
    [
        (row("data"), "the loader limits it: because"),
        (row("host"), "the host, which issues the work, limits it: because"),
        (row("memory"), "memory bandwidth limits it: because"),
        (row("device", utilisation=0.5), "the device limits it: the backward takes"),
        (row("device", utilisation=0.25), "the device is busy 25"),
        (row(phase_shares={"data": 0.1, "step": 0.9}), "the recorded step takes"),
        (row(failure="broken"), ""),
    ],
)
def test_each_limit_has_its_sentence(summary: Measurement, told: str) -> None:
    found = limit_of(summary)
    assert told in found
    assert bool(found) is bool(told)
