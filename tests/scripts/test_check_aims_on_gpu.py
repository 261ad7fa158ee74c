"""The page on the aims, from a roofline that was measured on a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs" / "results" / "h200" / "roofline" / "roofline.json"
TUNED = "fp16+channels-last+compile:reduce-overhead"


def measured() -> dict[str, Any]:
    """As it is written today: evidence has a code beside its text."""
    document: dict[str, Any] = json.loads(MEASURED.read_text())
    for row in document["results"]:
        row["bound"]["evidence"] = {"code": "kept", "text": row["bound"]["evidence"]}
    return {**document, "failures": {}}


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import check_aims_on_gpu as script

    aims = {name: script.Aim({"model": name, "batch": 32}, TUNED, 8.0) for name in ("resnet50", "other")}
    monkeypatch.setattr(script, "AIMS", aims)
    return script


def called(script: ModuleType, monkeypatch: pytest.MonkeyPatch, document: str, *words: str) -> None:
    def roofline(**settings: Any) -> Any:
        assert settings["recipes"] == ["baseline", TUNED]
        return SimpleNamespace(to_json=lambda: document)

    monkeypatch.setattr(script.redline, "roofline", roofline)
    monkeypatch.setattr(sys, "argv", ["check_aims_on_gpu.py", *words])
    script.main()


def test_what_the_roofline_allows_stands_beside_the_aim(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    document = measured()
    called(check, monkeypatch, json.dumps(document), "--out", str(tmp_path), "--only", "resnet50")
    called(check, monkeypatch, json.dumps(document), "--out", str(tmp_path), "--only", "other")
    page = (tmp_path / "aims.md").read_text()
    base, tuned = document["results"]
    allowed = base["measured_s"] / tuned["attainable_s"]
    assert f"| {base['measured_s'] / tuned['measured_s']:.2f}× |" in page
    assert page.count(f"| {allowed:.2f}× | {tuned['limited_by']} |") == 2
    for each in tuned["classes"]:
        assert f"| {each['name']} | {each['calls']} |" in page


def test_a_recipe_that_fails_is_said_so(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    document = measured()
    failing = document | {"results": document["results"][:1], "failures": {TUNED: "out of memory"}}
    called(check, monkeypatch, json.dumps(failing), "--out", str(tmp_path), "--only", "resnet50")
    assert f"failed: {TUNED}: out of memory" in (tmp_path / "aims.md").read_text()


def test_what_does_not_fit_is_left_out(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called(check, monkeypatch, "{}", "--out", str(tmp_path), "--only", "resnet50", "--seconds", "10")
    assert "resnet50: left out" in capsys.readouterr().out
