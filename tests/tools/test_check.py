"""The runner of the checks on a GPU, without one; and that all programs beside the source use what there is."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import redline
from redline.search.tune.record import Spent

ROOT = Path(__file__).parents[2]
PROGRAMS = [path for folder in ("benchmarks", "tools", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
PROGRAMS += sorted((ROOT / "tests").glob("mutate_*.py"))


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The runner with one check of three rows, the last of which breaks."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "gpu"))
    module = importlib.import_module("check")

    def does(ask: Any, row: str, value: float) -> tuple[bool, dict[str, Any]]:
        if value > 2:
            raise RuntimeError("no such card")
        return value < 2, {"step_ms": value, "rows_known": len(ask.known), "nested": {"a": 1}}

    monkeypatch.setattr(module, "CHECKS", {"made-up": module.Check(does, {"one": 1.0, "two": 2.0, "three": 3.0}, 60)})
    return module


def called(check: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["check.py", "made-up", "--out", str(folder), *words])
    code: int = check.main()
    return code


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "made-up.jsonl").read_text().splitlines()]


def test_several_calls_make_one_table(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert called(check, monkeypatch, tmp_path, "--only", "one") == 0
    assert called(check, monkeypatch, tmp_path, "--only", "two") == 1
    assert [(row["row"], row["good"], row["rows_known"]) for row in rows_in(tmp_path)] == [
        ("one", True, 0),
        ("two", False, 1),
    ]
    lines = (tmp_path / "made-up.md").read_text().splitlines()
    assert lines[0].startswith("| row | step_ms | rows_known | took_s | as it should be |")
    assert lines[3].startswith("| two | 2 | 1 | ")
    assert lines[3].endswith("| **no** |")


def test_a_row_that_breaks_does_not_take_others_with_it(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert called(check, monkeypatch, tmp_path, "--only", "three", "one") == 1
    assert {row["row"]: row.get("error") for row in rows_in(tmp_path)} == {
        "one": None,
        "three": "RuntimeError: no such card",
    }


def test_what_does_not_fit_is_left_out(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(check, monkeypatch, tmp_path, "--seconds", "10") == 0
    assert "made-up one: left out, as it would not end in time" in capsys.readouterr().out
    assert not (tmp_path / "made-up.jsonl").exists()


def test_an_unknown_row_is_refused(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as refused:
        called(check, monkeypatch, tmp_path, "--only", "four")
    assert refused.value.code == 2


def ranked(recipe: str, per_s: float) -> SimpleNamespace:
    return SimpleNamespace(recipe=recipe, row=SimpleNamespace(throughput_per_s=per_s), low=2.9, ratio=3.0, high=3.1)


WINNER = ranked("fp16", 990.0)
SUMMARY = {"winner": WINNER, "leader": WINNER, "ranking": [WINNER, ranked("baseline", 330.0)]}


class Found:
    def __init__(self, failed: float = 2.0, **changes: Any) -> None:
        tune = SimpleNamespace(snippet=None, spent=Spent(failed=failed), notes=())
        self.summary = SimpleNamespace(**{**SUMMARY, "tune": tune, **changes})

    def to_json(self) -> str:
        return "{}"


@pytest.mark.parametrize(
    ("changes", "is_good", "of_hand"),
    [
        ({}, True, 0.99),
        ({"failed": 7.0}, False, 0.99),
        ({"winner": ranked("fp16", 900.0)}, False, 0.9),
        ({"winner": None}, False, 0.33),  # the baseline must be as fast as by hand then
        ({"winner": None, "ranking": [ranked("baseline", 960.0)]}, True, 0.96),
    ],
)
def test_a_search_is_set_against_the_loop_by_hand(
    check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    changes: dict[str, Any],
    is_good: bool,
    of_hand: float,
) -> None:
    import tuning

    monkeypatch.setattr(tuning, "hands", lambda names: {"unet": {"compile": 1000.0}})
    monkeypatch.setattr(tuning.redline, "tune", lambda **settings: Found(**changes))
    monkeypatch.setattr(check, "CHECKS", {"made-up": check.Check(tuning.tune, tuning.ROWS, 60)})
    assert called(check, monkeypatch, tmp_path, "--only", "unet") == (0 if is_good else 1)
    (row,) = rows_in(tmp_path)
    assert row["of_hand"] == pytest.approx(of_hand)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_program_imports_only_what_is_there(path: Path) -> None:
    """Most of these programs are not run by any test; what they take of Redline must be there all the same."""
    tree = ast.parse(path.read_text("utf-8"))
    missing = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "redline":
            module = importlib.import_module(str(node.module))
            missing += [
                f"{node.module}.{name.name}"
                for name in node.names
                if not hasattr(module, name.name) and not importlib.util.find_spec(f"{node.module}.{name.name}")
            ]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "redline":
            missing += [] if hasattr(redline, node.attr) else [f"redline.{node.attr}"]
    assert missing == []


def test_recipes_of_the_checks_are_made_of_switches_that_there_are() -> None:
    from redline.bench.recipe.base import SWITCHES

    texts = [node.value for path in (ROOT / "tools/gpu").glob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)]  # fmt: skip
    recipes = [text for text in texts if re.fullmatch(r"[\w:,=.-]+(\+[\w:,=.-]+)+", text)]
    assert len(recipes) > 10
    named = {switch.partition(":")[0] for recipe in recipes for switch in recipe.split("+")}
    assert named - {name.partition(":")[0] for name in SWITCHES.names()} == set()


def test_the_rooms_that_are_mutated_are_there() -> None:
    from mutate_code import ROOMS

    for files, first, *more in ROOMS.values():
        tests = [*first, *(each.partition("::")[0] for each in more if "/" in each)]
        assert [file for file in files if not (ROOT / "src/redline" / file).is_file()] == []
        assert [file for file in tests if not (ROOT / "tests" / file).is_file()] == []
