"""The waterfall adds up: from the baseline, through every step, to the winner and the roofline."""

from __future__ import annotations

from itertools import pairwise

import pytest

from redline.errors import SpecError
from redline.search.tune.gains import Gain, GainPath, waterfall

WAY = GainPath(
    title="resnet50",
    baseline="baseline",
    baseline_s=0.012,
    winner="fp16+compile",
    switches=(
        Gain(name="fp16", gain=2.0, low=1.9, high=2.1, verdict="valid"),
        Gain(name="slower", gain=0.8),
        Gain(name="compile", gain=1.5),
    ),
    roofline_s=0.001,
)


def test_each_bar_begins_where_the_one_before_ended() -> None:
    bars = waterfall(WAY)
    assert [bar.label for bar in bars] == ["baseline", "fp16", "slower", "compile", "fp16+compile", "roofline"]
    assert [bar.kind for bar in bars] == ["total", "gain", "loss", "gain", "total", "headroom"]
    for before, after in pairwise(bars[:4]):
        assert after.from_s == before.to_s
    assert bars[4].to_s == pytest.approx(0.012 / (2.0 * 0.8 * 1.5))
    assert bars[4].to_s == WAY.winner_s
    assert bars[5].to_s == 0.001
    assert bars[1].told == "2.00× (1.90–2.10), valid"
    assert bars[5].told == "5.0× left at most"


def test_without_a_roofline_the_way_ends_with_the_winner() -> None:
    bars = waterfall(GainPath(title="", baseline="a", baseline_s=1.0, winner="a"))
    assert [bar.kind for bar in bars] == ["total", "total"]


@pytest.mark.parametrize("gain", [0.0, -1.0])
def test_a_gain_is_above_zero(gain: float) -> None:
    with pytest.raises(SpecError, match="gain must be above 0"):
        Gain(name="x", gain=gain)
