"""A sample of damaged traces; `tests/mutate_traces.py` goes through a hundred thousand."""

from __future__ import annotations

from pathlib import Path

import pytest
from kineto import GEMM, TraceMaker
from mutations import impossible, mutated, profile_all, seeds

from redline.trace import events
from redline.trace.decode import read_trace

US = 1000


@pytest.mark.parametrize("seed", range(2))
def test_no_traceback_and_no_impossible_figure(tmp_path: Path, seed: int) -> None:
    read = 0
    for what, text in mutated(seeds(), range(50), seed=1000 + seed):
        (tmp_path / "a.json").write_bytes(text)
        profile = profile_all(tmp_path / "a.json")
        if profile is not None:
            assert impossible(profile) == [], what
            read += 1
    assert read > 20, "what is whole is still given"


def test_sound_traces_have_no_impossible_figure(tmp_path: Path) -> None:
    for text in seeds():
        (tmp_path / "a.json").write_bytes(text)
        profile = profile_all(tmp_path / "a.json")
        assert profile is not None
        assert impossible(profile) == []


DAMAGES = {
    "a quote is missing": lambda text, at: text[:at] + text[at:].replace(b'"', b"", 1),
    "a bracket is missing": lambda text, at: text[:at] + text[at:].replace(b"}", b"", 1),
    "an opening bracket is missing": lambda text, at: text[:at] + text[at:].replace(b"{", b"", 1),
    "a bracket too many": lambda text, at: text[:at] + text[at:].replace(b"},", b"}},", 1),
    "the list ends twice": lambda text, at: text[:at] + text[at:].replace(b"},", b"}],", 1),
    "a stray quote": lambda text, at: text[:at] + text[at:].replace(b":", b':"', 1),
    "a comma is missing": lambda text, at: text[:at] + text[at:].replace(b"},", b"}", 1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("layout", ["kineto", "compact"])
@pytest.mark.parametrize("block_bytes", [1 << 20, 4000])
def test_damage_in_one_place_costs_the_events_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage, layout: str, block_bytes: int
) -> None:
    """A missing quote turns strings and text around for the whole rest of the file, if one lets it."""
    monkeypatch.setattr(events, "BLOCK_BYTES", block_bytes)
    maker = TraceMaker()
    for number in range(500):
        maker.kernel(GEMM, number * 100 * US, 90 * US)
    text = maker.text(layout).encode()
    (tmp_path / "a.json").write_bytes(damage(text, len(text) // 2))
    trace = read_trace(tmp_path / "a.json")
    assert len(trace.work) >= 497
    assert trace.lost or len(trace.work) == 500
