"""The workshop: checkpoints notice what is wrong, questions are answered from the numbers, a walk can be resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from redline.analyze.blocks import Latency
from redline.analyze.bound import Bound
from redline.analyze.summary import RunSummary, VersusFirst
from redline.analyze.trust import Verdict
from redline.model.errors import BenchError, Interrupted, SpecError
from redline.model.metrics import Row, Table
from redline.model.note import note
from redline.model.record import ColdStart
from redline.model.work import Ceilings
from redline.search.observer import Observer
from redline.show.result import Result
from redline.verbs import exercises as answers
from redline.verbs import exercises as room
from redline.verbs.capture import read_profile
from redline.verbs.exercises import (
    Answer,
    Check,
    ExerciseResult,
    Lab,
    WorkshopResult,
    break_even_answer,
    exercise_text,
    faster_answer,
    outcome,
)
from redline.verbs.flops import FLOPS, MIN_BYTES, PARAMS
from redline.verbs.workshop import workshop
from redline.verbs.workspace import Workspace


def latency(std: float) -> Latency:
    return Latency(
        p50=0.01, p90=None, p95=None, p99=None, mean=0.01, std=std, n=50, clock="host", low=None, high=None
    )  # fmt: skip


def row(
    recipe: str = "baseline", ratio: float | None = None, low: float = 1.1, high: float = 3.0, std: float = 1e-4
) -> RunSummary:
    versus = None
    if ratio is not None:
        versus = VersusFirst(recipe="baseline", ratio=ratio, low=low, high=high, memory_change=None)
    return RunSummary(
        model="m", task="infer", recipe=recipe, batch=4, item="img", device="cpu", record_id="1", throughput_per_s=400.0,
        latency_s=latency(std), vs_first=versus, verdict=Verdict(labels=("valid",)),
        bound=Bound(label="unknown", evidence=note("not-measured", "")), cold_start_s=ColdStart(first_call_s=0.5, compile_s=2.0),
    )  # fmt: skip


class Rows(list[RunSummary]):
    records: tuple[Any, ...] = ()


def lab(rows: list[RunSummary], monkeypatch: pytest.MonkeyPatch, losses: dict[str, list[float]] | None = None) -> Lab:
    """A lab whose runs give these rows, and whose script these losses with `--fp16 0` and `--fp16 1`."""

    def script(self: Lab, *words: str, ranks: int = 1) -> dict[str, Any]:
        return {"losses": (losses or {}).get("1" if words[-1] == "1" else "0", [1.0]), "warmup_times": [2.0, 0.5, 0.1]}

    monkeypatch.setattr(Lab, "run", lambda self, recipes, **more: Rows(rows))
    monkeypatch.setattr(Lab, "script", script)
    return Lab(Workspace(keep=False), "cpu", "m", 4, None, quick=True)


TRACES = Path(__file__).parents[1] / "data" / "traces"
BASE = ExerciseResult(number=1, title="t", explain="e")


@pytest.mark.parametrize(
    ("losses", "passed"),
    [([1.5, 1.5, 1.5], True), ([1.5, 1.5, 1.6], False), ([math.nan, math.nan], False), ([math.inf] * 2, False)],
)
def test_a_loss_that_changes_is_noticed(losses: list[float], passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = room.baseline(lab([row()], monkeypatch, {"0": losses}), BASE)
    checks = {check.name: check.passed for check in found.checks}
    assert checks["the loss is the same in every iteration"] is passed
    assert checks["the time of a step is stable"] is True


def test_an_unstable_step_is_noticed_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    found = room.baseline(lab([row(std=0.0006)], monkeypatch), BASE)
    assert "the first iteration of micro_benchmarking_pytorch.py took 2.00 s" in found.answers[0].answer
    assert found.checks[0].passed is False
    assert any("close other programs" in line for line in exercise_text(found))


@pytest.mark.parametrize(
    ("ratio", "low", "high", "says"),
    [(2.0, 1.5, 2.5, "yes: fp16 is 2.00×"), (1.4, 0.9, 2.0, "not certain"), (0.5, 0.4, 0.6, "no: fp16 is 0.50×")],
)
def test_a_format_is_faster_only_where_the_interval_says_so(ratio: float, low: float, high: float, says: str) -> None:
    assert faster_answer(row("fp16", ratio, low, high)).startswith(says)


def test_an_answer_says_when_the_result_is_doubtful() -> None:
    doubtful = msgspec.structs.replace(row("fp16", 3.8, 1.3, 11.0), verdict=Verdict(labels=("noisy", "shared-cpu")))
    assert faster_answer(doubtful).endswith("doubtful, as the result is noisy, shared-cpu")
    sound = row("fp16", 3.8, 1.3, 11.0)
    assert sound.vs_first is not None
    against = msgspec.structs.replace(sound, vs_first=msgspec.structs.replace(sound.vs_first, first_doubted=True))
    assert faster_answer(against).startswith("not certain")
    assert break_even_answer(row(), against).startswith("not certain")


@pytest.mark.parametrize(("half", "passed"), [(1.001, True), (1.2, False), (math.nan, False)])
def test_a_loss_that_fp16_changes_is_noticed(half: float, passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(), row("amp-bf16", 2.0)]
    found = room.precision(lab(rows, monkeypatch, {"0": [1.0], "1": [half]}), BASE)
    (check,) = [each for each in found.checks if each.name == "the loss in fp16 is that of fp32"]
    assert check.passed is passed
    assert passed or "use bf16 or amp" in " ".join(" ".join(exercise_text(found)).split())


@pytest.mark.parametrize(("ratio", "passed"), [(0.4, True), (1.9, False)])
def test_a_host_that_is_too_slow_is_noticed(ratio: float, passed: bool) -> None:
    assert answers.check_host(ratio, "said").passed is passed


def test_convolutions_are_counted_as_operators_not_as_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this step of an H200 in fp16, more than half of the convolutions' kernels multiply matrices or are copies."""
    half, wide = (read_profile(TRACES / f"h200_resnet50_{name}_b32.json.gz") for name in ("fp16", "fp32"))
    profiles = {"baseline": wide, "fp16": half}
    monkeypatch.setattr(
        room, "profile", lambda model, *, recipes="baseline", **_: SimpleNamespace(profile=profiles[recipes])
    )
    on_gpu = Lab(Workspace(keep=False), "cuda:0", "m", 4, None, quick=True)
    found = room.profiler(on_gpu, BASE)
    assert found.values["convolution_share"] == pytest.approx(0.79, abs=0.01)
    (told,) = [each.answer for each in found.answers if "each format" in each.question]
    assert told == "9.02 ms of a step in fp32, 805 µs in fp16: 11.21×"


def test_arithmetic_intensity_is_held_against_the_device() -> None:
    known = Ceilings(
        kind="cuda", name="d", driver=None, torch=None, threads=None, flops_per_s={"fp32": 50e12}, copy_bytes_per_s=4e12,
        launch_s=1e-6,
    )  # fmt: skip
    assert answers.intensity_answer(100, 4, known, 40e12).startswith("computing: 25.0 FLOPs per byte")
    assert answers.intensity_answer(10, 4, known, 8e12).startswith("memory: 2.50")
    assert "not known" in answers.intensity_answer(10, 4, None, 8e12)
    assert answers.intensity_answer(100, 4, known, 1e12).startswith(
        "neither yet: it reaches 2\u2009% of what computing allows"
    )
    assert answers.intensity_answer(10, 4, known, 1e12).startswith(
        "neither yet: it reaches 10\u2009% of what memory allows"
    )


def test_a_larger_batch_is_not_judged_by_times_that_vary() -> None:
    values = {"batch 1 flops_per_s": 1e9, "batch 4 flops_per_s": 2e9}
    assert answers.larger_batch_answer(values, doubted=False).startswith("yes: the largest batch reaches 2.00×")
    assert answers.larger_batch_answer(values, doubted=True).startswith("not certain")


def test_a_peak_that_cannot_be_measured_costs_no_exercise(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise BenchError("timeout", "no answer within 180 s")

    monkeypatch.setattr(Workspace, "device_ceilings", fail)
    counted = Row(facts={}, metrics=(FLOPS(400), MIN_BYTES(100), PARAMS(7)))
    tables = (Table(name="step", rows=(counted,)), Table(name="modules", rows=()))
    monkeypatch.setattr(room, "flops", lambda *_, **__: Result(verb="flops", tables=tables))
    found = room.work(lab([row()], monkeypatch), BASE)
    assert found.figures["batch 4"] == "40.00 kFLOP/s"
    assert found.checks[0].passed is None
    assert "no answer within 180 s" in found.checks[0].seen


def test_break_even_counts_what_a_step_saves() -> None:
    assert break_even_answer(row(), row("compile", 2.0)) == "after 400 steps", "2 s over 5 ms"
    assert break_even_answer(row(), row("compile", 1.05, 0.9, 1.2)).startswith("not certain")
    assert break_even_answer(row(), row("compile", 0.98, 0.97, 0.99)).startswith("never here")
    assert break_even_answer(row(), None) == "compiling failed or was not timed"


def test_exercises_are_written_as_they_are_done_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    done: list[int] = []

    def fake(number: int) -> Any:
        def exercise(lab: Lab, base: ExerciseResult) -> ExerciseResult:
            done.append(number)
            if number == 2 and len(done) < 4:
                raise BenchError("crash", "no luck\ntraceback")
            return room.filled(base, figures={"a": "1"}, checks=(Check(name="c", passed=True, seen="ok"),))

        return exercise

    monkeypatch.setattr("redline.verbs.workshop.EXERCISES", tuple((n, f"t{n}", "e", fake(n)) for n in (1, 2, 3)))
    heard: list[str] = []

    class Listening(Observer):
        def noted(self, line: str) -> None:
            heard.append(line)

    shared = Workspace(keep=False, observer=Listening())
    request.addfinalizer(shared.close)
    first = workshop(out=tmp_path, device="cpu", quick=True, workspace=shared)
    assert [found.failure for found in first.rows] == ["", "skipped: no luck", ""]
    again = workshop(out=tmp_path, device="cpu", quick=True, resume=True, workspace=shared)
    assert done == [1, 2, 3, 2], "only what was not done"
    assert not any(found.failure for found in again.rows)
    text = (tmp_path / "my_workshop_results.txt").read_text()
    assert "Exercise 2: t2" in text
    assert "[x] c: ok" in text
    document = json.loads((tmp_path / "my_workshop_results.json").read_text())
    assert (document["kind"], len(document["exercises"])) == ("workshop", 3)
    workshop([2], out=tmp_path, device="cpu", quick=True, workspace=shared)
    assert done == [1, 2, 3, 2, 2], "what is named is done again"
    assert "Exercise 1: t1" in (tmp_path / "my_workshop_results.txt").read_text(), "and the others stay"
    with pytest.raises(SpecError, match="another device or mode"):
        workshop(out=tmp_path, device="cpu", quick=False, resume=True, workspace=shared)
    workshop(out=tmp_path, device="cpu", quick=True, resume=True, workspace=shared)
    assert heard[-1].startswith("done already: 1, 2, 3"), "a learner hears what is done already"
    with pytest.raises(SpecError, match="nothing to resume"):
        workshop(out=tmp_path / "empty", device="cpu", quick=True, resume=True, workspace=shared)


def test_without_gpus_exercises_say_what_one_would_see() -> None:
    made = Lab(Workspace(keep=False), "cpu", "m", 4, None, quick=True)
    found = room.many_gpus(made, BASE)
    assert found.skipped == "needs two GPUs, and this machine has 0"
    assert any(line.strip().startswith("example (not measured here)") for line in exercise_text(found))


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="it is a file"):
        workshop([5], out=tmp_path / "file")
    with pytest.raises(SpecError, match="cannot write"):
        workshop([5], out=tmp_path / "file" / "below")


def test_long_lines_are_broken_below_their_first_word() -> None:
    found = room.filled(
        BASE,
        figures={"fp16": "fast " * 12},
        checks=(Check(name="c", passed=False, seen="seen " * 12, explain="why " * 20),),
        answers=(Answer(question="Why?", answer="because " * 12),),
    )
    lines = list(exercise_text(found, 40))
    assert max(map(len, lines)) <= 40
    assert [line for line in lines if line[2:3] == " " or line.startswith("  [ ]") or line == "  Why?"] == lines[1:]
    assert lines[0].startswith("  fp16  fast")


def test_the_outcome_counts_exercises_and_checkpoints() -> None:
    met = tuple(Check(name="c", passed=passed, seen="") for passed in (True, False, None))
    result = WorkshopResult(
        device="cpu", device_name="d", model="m", batch=4, quick=True,
        exercises=(room.filled(BASE, checks=met), room.filled(BASE, skipped="no GPU")),
    )  # fmt: skip
    assert outcome(result) == "1 of 2 exercises done, 1 skipped; 1 of 2 checkpoints met"


def test_the_interval_is_told_and_kept_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = room.precision(lab([row(), row("amp-bf16", 2.0, 1e-4, 2364.0)], monkeypatch), BASE)
    assert found.figures["amp-bf16"] == "400.0 img/s, too noisy to compare with the baseline"
    assert (found.values["amp-bf16 ratio low"], found.values["amp-bf16 throughput_per_s"]) == (1e-4, 400.0)


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupted_walk_says_how_to_continue(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exercise(lab: Lab, base: ExerciseResult) -> ExerciseResult:
        if base.number == at:
            raise KeyboardInterrupt
        return base

    monkeypatch.setattr("redline.verbs.workshop.EXERCISES", tuple((n, f"t{n}", "e", exercise) for n in (1, 2, 3)))
    with Workspace(keep=False) as shared, pytest.raises(Interrupted) as caught:
        workshop(out=tmp_path, device="cpu", quick=True, workspace=shared)
    if at == 1:
        assert caught.value.result is None, "nothing was done yet"
    else:
        assert isinstance(caught.value.result, Result)
        assert caught.value.result.next == f"redline workshop --quick --device cpu --out {tmp_path} --resume"
