"""The workshop: checkpoints notice what is wrong, questions are answered from the numbers, a walk can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from redline.analyze.bound import Bound
from redline.analyze.summary import Latency, RunSummary, VersusFirst
from redline.analyze.trust import Verdict
from redline.api import workshop as room
from redline.api.workshop import EXERCISES, Lab, _break_even, _faster, workshop
from redline.api.workspace import Workspace
from redline.errors import BenchError, SpecError
from redline.note import note
from redline.record import ColdStart
from redline.report.workshop import Check, ExerciseResult, exercise_text


def latency(std: float) -> Latency:
    return Latency(
        p50=0.01, p90=None, p95=None, p99=None, mean=0.01, std=std, n=50, clock="host", low=None, high=None
    )  # fmt: skip


def row(
    recipe: str = "baseline", ratio: float | None = None, low: float = 1.1, high: float = 3.0, std: float = 1e-4
) -> RunSummary:
    versus = None
    if ratio is not None:
        versus = VersusFirst(
            recipe="baseline", ratio=ratio, low=low, high=high, latency_change=None, memory_change=None
        )
    return RunSummary(
        model="m", task="infer", recipe=recipe, batch=4, item="img", device="cpu", record_id="1", throughput_per_s=400.0,
        latency_s=latency(std), vs_first=versus, verdict=Verdict(labels=("valid",)),
        bound=Bound(label="unknown", evidence=note("not-measured", "")), cold_start_s=ColdStart(first_call_s=0.5, compile_s=2.0),
    )  # fmt: skip


def lab(rows: list[RunSummary], monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(Lab, "run", lambda self, recipes, **more: rows)
    return Lab(Workspace(keep=False), "cpu", "m", 4, None, quick=True)


BASE = ExerciseResult(number=1, title="t", explain="e")


@pytest.mark.parametrize(("losses", "passed"), [([1.5, 1.5, 1.5], True), ([1.5, 1.5, 1.6], False)])
def test_a_loss_that_changes_is_noticed(losses: list[float], passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_script", lambda *args, **settings: {"losses": losses})
    found = room._baseline(lab([row()], monkeypatch), BASE)
    checks = {check.name: check.passed for check in found.checks}
    assert checks["the loss is the same in every iteration"] is passed
    assert checks["the time of a step is stable"] is True


def test_an_unstable_step_is_noticed_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_script", lambda *args, **settings: {"losses": [1.0]})
    found = room._baseline(lab([row(std=0.0006)], monkeypatch), BASE)
    assert found.checks[0].passed is False
    assert any("close other programs" in line for line in exercise_text(found))


@pytest.mark.parametrize(
    ("ratio", "low", "high", "says"),
    [(2.0, 1.5, 2.5, "yes: fp16 is 2.00×"), (1.4, 0.9, 2.0, "not certain"), (0.5, 0.4, 0.6, "no: the fastest")],
)
def test_a_format_is_faster_only_where_the_interval_says_so(ratio: float, low: float, high: float, says: str) -> None:
    assert _faster(row("fp16", ratio, low, high)).startswith(says)


def test_break_even_counts_what_a_step_saves() -> None:
    assert _break_even(row(), row("compile", 2.0)) == "after 400 steps", "2 s over 5 ms"
    assert _break_even(row(), row("compile", 1.05, 0.9, 1.2)).startswith("not certain")
    assert _break_even(row(), row("compile", 0.98, 0.97, 0.99)).startswith("never here")
    assert _break_even(row(), None) == "compiling failed or was not timed"


def test_exercises_are_written_as_they_are_done_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def fake(number: int) -> Any:
        def exercise(lab: Lab, base: ExerciseResult) -> ExerciseResult:
            done.append(number)
            if number == 2 and len(done) < 4:
                raise BenchError("crash", "no luck\ntraceback")
            return room._filled(base, figures={"a": "1"}, checks=(Check(name="c", passed=True, seen="ok"),))

        return exercise

    monkeypatch.setattr(room, "EXERCISES", tuple((n, f"t{n}", "e", fake(n)) for n in (1, 2, 3)))
    first = workshop(folder=tmp_path, device="cpu", quick=True)
    assert [found.skipped for found in first.exercises] == [None, "no luck", None]
    again = workshop(folder=tmp_path, device="cpu", quick=True, resume=True)
    assert done == [1, 2, 3, 2], "only what was not done"
    assert all(found.skipped is None for found in again.exercises)
    text = (tmp_path / "my_workshop_results.txt").read_text()
    assert "Exercise 2: t2" in text
    assert "[x] c: ok" in text
    document = json.loads((tmp_path / "my_workshop_results.json").read_text())
    assert (document["kind"], len(document["exercises"])) == ("workshop", 3)
    with pytest.raises(SpecError, match="another device or mode"):
        workshop(folder=tmp_path, device="cpu", quick=False, resume=True)
    with pytest.raises(SpecError, match="nothing to resume"):
        workshop(folder=tmp_path / "empty", device="cpu", quick=True, resume=True)


def test_there_are_seven_and_others_are_refused() -> None:
    assert [number for number, *_ in EXERCISES] == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(SpecError, match="from 1 to 7, got 8"):
        workshop([8])


def test_without_gpus_exercises_say_what_one_would_see() -> None:
    made = Lab(Workspace(keep=False), "cpu", "m", 4, None, quick=True)
    found = room._many_gpus(made, BASE)
    assert found.skipped == "needs two GPUs, and this machine has 0"
    assert any(line.startswith("example (not measured here)") for line in exercise_text(found))
