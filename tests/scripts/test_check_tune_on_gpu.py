"""The table that several calls of the script fill, without a GPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SPENT = {"baseline": 5.0, "trials": 20.0, "race": 15.0, "failed": 2.0, "other": 4.0, "reserved": 15.0, "left": 0.2}
DOCUMENT = {
    "winner": {"recipe": "fp16", "throughput_per_s": 990.0},
    "leader": {"recipe": "fp16", "throughput_per_s": 990.0, "low": 2.9, "ratio": 3.0, "high": 3.1},
    "ranking": [{"recipe": "fp16", "throughput_per_s": 990.0}, {"recipe": "baseline", "throughput_per_s": 330.0}],
    "device_name": "a card",
    "snippet": None,
    "seconds": 59.0,
    "spent": SPENT,
    "untried": [],
}


class Found:
    def document(self) -> dict[str, Any]:
        return dict(DOCUMENT)

    def __str__(self) -> str:
        return "winner: fp16"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a hand of 1 000 items per second and a search that finds 990; both note their caches."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import check_tune_on_gpu as script

    def cache() -> str:
        assert not os.listdir(Path(os.environ["TRITON_CACHE_DIR"]).parent)
        return os.environ["TORCHINDUCTOR_CACHE_DIR"]

    def output_of(command: list[str], seconds: float) -> str:
        script.caches.append(cache())
        return str(script.WORKLOADS[command[1]].batch / 1000)

    def tune(**settings: Any) -> Found:
        script.caches.append(cache())
        return Found()

    monkeypatch.setattr(script, "caches", [], raising=False)
    monkeypatch.setattr(script, "output_of", output_of)
    monkeypatch.setattr(script, "open_door", lambda launch: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(script.redline, "tune", tune)
    return script


def called(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["check_tune_on_gpu.py", *words])
    script.main()


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "tune_on_gpu.jsonl").read_text().splitlines()]


def test_hand_and_search_compile_into_caches_of_their_own(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    called(check, monkeypatch, "--out", str(tmp_path), "--only", "unet", "decoder")
    assert len(set(check.caches)) == 4
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def test_several_calls_make_one_table(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    called(check, monkeypatch, "--out", str(there), "--only", "decoder", "--no-snippets")
    called(check, monkeypatch, "--out", str(here), "--only", "unet", "--no-snippets")
    called(check, monkeypatch, "--out", str(here), "--only", "unet", "--no-snippets", "--budget", "5m")
    called(check, monkeypatch, "--out", str(here), "--merge", str(there / "tune_on_gpu.jsonl"), "--table")
    assert {(row["name"], row["budget"]) for row in rows_in(here)} == {
        ("unet", "60s"), ("unet", "5m"), ("decoder", "60s"),
    }  # fmt: skip
    table = (here / "tune_on_gpu.md").read_text()
    assert (
        "| decoder, batch 8 | 60s | 1,000 | 990 | 0.99 | 3.00× (2.90–3.10) | 3% | – | 59 | fp16 "
        "| baseline 5, trials 20, race 15, failed 2, other 4 | met |" in table
    )
    assert "Budget 60s: 2 of 2 reach every aim, 0 are at least as fast as by hand." in table


def test_a_hand_that_is_kept_is_not_run_again(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called(check, monkeypatch, "--out", str(tmp_path), "--only", "unet")
    check.caches.clear()
    called(check, monkeypatch, "--out", str(tmp_path), "--only", "unet", "--budget", "5m", "--keep-hand")
    assert len(check.caches) == 1
    assert [row["hand_is_earlier"] for row in rows_in(tmp_path)] == [False, True]


def test_what_does_not_fit_is_left_out(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called(check, monkeypatch, "--out", str(tmp_path), "--only", "unet", "--seconds", "70")
    assert "left out, as they would not end in time: unet" in capsys.readouterr().out
    assert rows_in(tmp_path) == []


def test_a_search_that_breaks_does_not_take_other_rows_with_it(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tune(**settings: Any) -> Found:
        if settings["model"].endswith("unet"):
            raise RuntimeError("no such card")
        return Found()

    monkeypatch.setattr(check.redline, "tune", tune)
    called(check, monkeypatch, "--out", str(tmp_path), "--only", "unet", "decoder")
    assert [row["name"] for row in rows_in(tmp_path)] == ["decoder"]
    assert "the search broke: unet" in capsys.readouterr().out


@pytest.mark.parametrize(("own", "aims"), [(960.0, "met"), (940.0, "NOT met")])
def test_without_a_winner_the_baseline_must_be_as_fast_as_by_hand(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: float, aims: str
) -> None:
    leader = {"recipe": "bf16", "throughput_per_s": 1100.0, "low": 0.9, "ratio": 1.1, "high": 1.4}
    ranking = [{"recipe": "bf16", "throughput_per_s": 1100.0}, {"recipe": "baseline", "throughput_per_s": own}]
    monkeypatch.setattr(
        Found, "document", lambda self: {**DOCUMENT, "winner": None, "leader": leader, "ranking": ranking}
    )
    called(check, monkeypatch, "--out", str(tmp_path), "--only", "unet", "--no-snippets")
    line = (tmp_path / "tune_on_gpu.md").read_text()
    assert f"| {own:,.0f} | {own / 1000:.2f} | no winner; bf16 1.10× (0.90–1.40) |" in line
    assert f"| baseline | baseline 5, trials 20, race 15, failed 2, other 4 | {aims} |" in line
