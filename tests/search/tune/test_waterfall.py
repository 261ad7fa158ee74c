"""From the baseline to the winner and the roofline: only times that were measured."""

from __future__ import annotations

import pytest

from redline.model.errors import SpecError
from redline.search.tune.gains import Gain, GainPath, waterfall

WAY = GainPath(
    title="resnet50",
    baseline="baseline",
    baseline_s=0.012,
    winner="fp16+compile",
    winner_s=0.005,
    switches=(
        Gain(name="compile", gain=1.5),
        Gain(name="fp16", gain=2.0, low=1.9, high=2.1, verdict="valid"),
    ),
    roofline_s=0.001,
)


def test_every_bar_is_a_time_that_was_measured() -> None:
    bars = waterfall(WAY)
    assert [bar.label for bar in bars] == ["baseline", "without fp16", "without compile", "fp16+compile", "roofline"]
    assert [bar.kind for bar in bars] == ["baseline", "without", "without", "winner", "roofline"]
    assert [bar.seconds for bar in bars] == [0.012, pytest.approx(0.01), pytest.approx(0.0075), 0.005, 0.001]
    assert bars[1].told == "2.00× (1.90–2.10) the winner's time, valid"
    assert bars[4].told == "5.0× left at most"


def test_without_a_roofline_the_way_ends_with_the_winner() -> None:
    bars = waterfall(GainPath(title="", baseline="a", baseline_s=1.0, winner="a", winner_s=1.0))
    assert [bar.kind for bar in bars] == ["baseline", "winner"]


@pytest.mark.parametrize("gain", [0.0, -1.0])
def test_a_gain_is_above_zero(gain: float) -> None:
    with pytest.raises(SpecError, match="gain must be above 0"):
        Gain(name="x", gain=gain)
