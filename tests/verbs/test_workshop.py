"""The workshop: checkpoints notice what is wrong, questions are answered from the numbers, a walk can be resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reported import race_records

from redline.analyze.rows import FIGURES
from redline.model.errors import BenchError, Interrupted, SpecError
from redline.model.metrics import COMPILE, LATENCY_P50, RATIO, THROUGHPUT, Row, Table
from redline.model.work import Ceilings
from redline.search.observer import Observer
from redline.show.result import Result
from redline.verbs import exercises
from redline.verbs.capture import read_profile
from redline.verbs.exercises import Check, Exercise, Lab, Sheet, break_even_answer, faster_answer, intensity_answer
from redline.verbs.flops import FLOPS, MIN_BYTES, PARAMS
from redline.verbs.workshop import Walk, workshop
from redline.verbs.workspace import Workspace

OF_ROWS = {figure.name: figure for figure, _ in FIGURES}


def row(
    recipe: str = "baseline",
    ratio: float | None = None,
    low: float = 1.1,
    high: float = 3.0,
    std: float = 1e-4,
    **facts: Any,
) -> Row:
    """What `run` says of a recipe; with a ratio, beside the baseline."""
    metrics = [
        THROUGHPUT(400.0, item="img"),
        LATENCY_P50(0.01),
        *(OF_ROWS[name](value) for name, value in (("latency_mean", 0.01), ("latency_std", std))),
    ]
    if ratio is not None:
        facts = {
            "compared_with": "baseline",
            "numerics": "passed",
            "verdict": "undecided" if low <= 1.03 <= high else "faster" if low > 1 else "slower",
        } | facts
        metrics += [RATIO(ratio, low, high), COMPILE(2.0)]
    return Row(facts={"recipe": recipe, "batch": 4, "trust": "valid", "bound": "unknown", **facts}, metrics=tuple(metrics))  # fmt: skip


def lab(rows: list[Row], monkeypatch: pytest.MonkeyPatch, losses: dict[str, list[float]] | None = None) -> Lab:
    """A lab whose runs give these rows, and whose script these losses with `--fp16 0` and `--fp16 1`."""

    def script(self: Lab, *words: str, ranks: int = 1) -> dict[str, Any]:
        return {"losses": (losses or {}).get("1" if words[-1] == "1" else "0", [1.0]), "warmup_times": [2.0, 0.5, 0.1]}

    def run(self: Lab, *recipes: str, **more: Any) -> list[Row]:
        self.records = race_records(recipes=("baseline",))
        return rows

    monkeypatch.setattr(Lab, "run", run)
    monkeypatch.setattr(Lab, "script", script)
    return Lab(Workspace(keep=False), "cpu", "m", 4, None, quick=True)


def done(exercise: Exercise, lab: Lab) -> Sheet:
    sheet = blank()
    exercise(lab, sheet)
    return sheet


def blank(**parts: Any) -> Sheet:
    return Sheet(number=1, title="t", explain="e", **parts)


TRACES = Path(__file__).parents[1] / "data" / "traces"


@pytest.mark.parametrize(
    ("losses", "passed"),
    [([1.5, 1.5, 1.5], True), ([1.5, 1.5, 1.6], False), ([math.nan, math.nan], False), ([math.inf] * 2, False)],
)
def test_a_loss_that_changes_is_noticed(losses: list[float], passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = done(exercises.baseline, lab([row()], monkeypatch, {"0": losses}))
    checks = {check.name: check.passed for check in found.checks}
    assert checks["the loss is the same in every iteration"] is passed
    assert checks["the time of a step is stable"] is True


def test_an_unstable_step_is_noticed_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    found = done(exercises.baseline, lab([row(std=0.0006)], monkeypatch))
    assert (
        "the first iteration of micro_benchmarking_pytorch.py took 2.00 s"
        in found.answers["Why is the first iteration slow?"]
    )
    assert found.checks[0].passed is False
    assert any("close other programs" in line for line in found.lines())


@pytest.mark.parametrize(
    ("ratio", "low", "high", "says"),
    [(2.0, 1.5, 2.5, "yes: fp16 is 2.00×"), (1.4, 0.9, 2.0, "not certain"), (0.5, 0.4, 0.6, "no: fp16 is 0.50×")],
)
def test_a_format_is_faster_only_where_the_interval_says_so(ratio: float, low: float, high: float, says: str) -> None:
    assert faster_answer(row("fp16", ratio, low, high)).startswith(says)


def test_an_answer_says_when_the_result_is_doubtful() -> None:
    assert faster_answer(row("fp16", 1.8, 1.3, 2.2, trust="noisy, shared-cpu")).endswith("noisy, shared-cpu")
    spoilt = row("fp16", 1.8, 1.3, 2.2, verdict="undecided")
    assert faster_answer(spoilt).startswith("not certain")
    assert break_even_answer(row(), spoilt).startswith("not certain")


@pytest.mark.parametrize(("half", "passed"), [(1.001, True), (1.2, False), (math.nan, False)])
def test_a_loss_that_fp16_changes_is_noticed(half: float, passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(), row("amp-bf16", 2.0)]
    found = done(exercises.precision, lab(rows, monkeypatch, {"0": [1.0], "1": [half]}))
    (check,) = [each for each in found.checks if each.name == "the loss in fp16 is that of fp32"]
    assert check.passed is passed
    assert passed or "use bf16 or amp" in " ".join(" ".join(found.lines()).split())


def test_convolutions_are_counted_as_operators_not_as_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this step of an H200 in fp16, more than half of the convolutions' kernels multiply matrices or are copies."""
    half, wide = (read_profile(TRACES / f"h200_resnet50_{name}_b32.json.gz") for name in ("fp16", "fp32"))
    profiles = {"baseline": wide, "fp16": half}
    monkeypatch.setattr(
        exercises, "profile", lambda model, *, recipes="baseline", **_: SimpleNamespace(profile=profiles[recipes])
    )
    on_gpu = Lab(Workspace(keep=False), "cuda:0", "m", 4, None, quick=True)
    found = done(exercises.profiler, on_gpu)
    assert found.measured == [{"convolution_share": pytest.approx(0.79, abs=0.01)}]
    times = found.answers["How long do convolutions take in each format?"]
    assert times == "9.02 ms of a step in fp32, 805 µs in fp16: 11.21×"
    (keeps_up,) = [check for check in found.checks if "host" in check.name]
    assert keeps_up.passed is (wide.host.ratio is not None and wide.host.ratio < 1.2)


def test_arithmetic_intensity_is_held_against_the_device() -> None:
    known = Ceilings(
        kind="cuda", name="d", driver=None, torch=None, threads=None, flops_per_s={"fp32": 50e12}, copy_bytes_per_s=4e12,
        launch_s=1e-6,
    )  # fmt: skip
    assert intensity_answer(100, 4, known, 40e12).startswith("computing: 25.0 FLOPs per byte")
    assert intensity_answer(10, 4, known, 8e12).startswith("memory: 2.50")
    assert "not known" in intensity_answer(10, 4, None, 8e12)
    assert intensity_answer(100, 4, known, 1e12).startswith("neither yet: it reaches 2\u2009% of what computing allows")
    assert intensity_answer(10, 4, known, 1e12).startswith("neither yet: it reaches 10\u2009% of what memory allows")


def test_a_larger_batch_is_not_judged_by_times_that_vary() -> None:
    assert exercises.larger_batch_answer([1e9, 2e9], False).startswith("yes: the largest batch reaches 2.00×")
    assert exercises.larger_batch_answer([1e9, 2e9], True).startswith("not certain")


def test_a_peak_that_cannot_be_measured_costs_no_exercise(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise BenchError("timeout", "no answer within 180 s")

    monkeypatch.setattr(Workspace, "device_ceilings", fail)
    counted = Row(facts={}, metrics=(FLOPS(400), MIN_BYTES(100), PARAMS(7)))
    tables = (Table(name="step", rows=(counted,)), Table(name="modules", rows=()))
    monkeypatch.setattr(exercises, "flops", lambda *_, **__: Result(verb="flops", tables=tables))
    found = done(exercises.work, lab([row()], monkeypatch))
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
    ran: list[int] = []

    def fake(number: int) -> Any:
        def exercise(lab: Lab, sheet: Sheet) -> None:
            ran.append(number)
            if number == 2 and len(ran) < 4:
                raise BenchError("crash", "no luck\ntraceback")
            sheet.figures["a"] = "1"
            sheet.check("c", True, "ok")

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
    assert ran == [1, 2, 3, 2], "only what was not done"
    assert not any(found.failure for found in again.rows)
    text = (tmp_path / "my_workshop_results.txt").read_text()
    assert "Exercise 2: t2" in text
    assert "[x] c: ok" in text
    document = json.loads((tmp_path / "my_workshop_results.json").read_text())
    assert (document["verb"], len(document["walk"]["exercises"])) == ("workshop", 3)
    workshop([2], out=tmp_path, device="cpu", quick=True, workspace=shared)
    assert ran == [1, 2, 3, 2, 2], "what is named is done again"
    assert "Exercise 1: t1" in (tmp_path / "my_workshop_results.txt").read_text(), "and the others stay"
    with pytest.raises(SpecError, match="another device or mode"):
        workshop(out=tmp_path, device="cpu", quick=False, resume=True, workspace=shared)
    workshop(out=tmp_path, device="cpu", quick=True, resume=True, workspace=shared)
    assert heard[-1].startswith("done already: 1, 2, 3"), "a learner hears what is done already"
    with pytest.raises(SpecError, match="nothing to resume"):
        workshop(out=tmp_path / "empty", device="cpu", quick=True, resume=True, workspace=shared)


def test_without_gpus_exercises_say_what_one_would_see() -> None:
    made = Lab(Workspace(keep=False), "cpu", "m", 4, None, quick=True)
    found = blank()
    exercises.many_gpus(made, found)
    assert found.skipped == "needs two GPUs, and this machine has 0"
    assert any(line.strip().startswith("example (not measured here)") for line in found.lines())


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="it is a file"):
        workshop([5], out=tmp_path / "file")
    with pytest.raises(SpecError, match="cannot write"):
        workshop([5], out=tmp_path / "file" / "below")


def test_long_lines_are_broken_below_their_first_word() -> None:
    found = blank(
        figures={"fp16": "fast " * 12},
        checks=[Check(name="c", passed=False, seen="seen " * 12, explain="why " * 20)],
        answers={"Why?": "because " * 12},
    )
    lines = list(found.lines(40))
    assert max(map(len, lines)) <= 40
    assert [line for line in lines if line[2:3] == " " or line.startswith("  [ ]") or line == "  Why?"] == lines[1:]
    assert lines[0].startswith("  fp16  fast")


def test_the_outcome_counts_exercises_and_checkpoints() -> None:
    met = [Check(name="c", passed=passed, seen="") for passed in (True, False, None)]
    sheets = (blank(checks=met), blank(skipped="no GPU"))
    walk = Walk(device="cpu", device_name="d", model="m", batch=4, quick=True, exercises=sheets)
    assert walk.outcome == "1 of 2 exercises done, 1 skipped; 1 of 2 checkpoints met"


def test_the_interval_is_told_and_kept_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = done(exercises.precision, lab([row(), row("amp-bf16", 2.0, 1e-4, 2364.0)], monkeypatch))
    assert found.figures["amp-bf16"] == "400 img/s, too noisy to compare with the baseline"
    measured = found.measured[1]
    assert (measured["ratio"]["low"], measured["throughput"]["value"]) == (1e-4, 400.0)


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupted_walk_says_how_to_continue(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exercise(lab: Lab, sheet: Sheet) -> None:
        if sheet.number == at:
            raise KeyboardInterrupt

    monkeypatch.setattr("redline.verbs.workshop.EXERCISES", tuple((n, f"t{n}", "e", exercise) for n in (1, 2, 3)))
    with Workspace(keep=False) as shared, pytest.raises(Interrupted) as caught:
        workshop(out=tmp_path, device="cpu", quick=True, workspace=shared)
    if at == 1:
        assert caught.value.result is None, "nothing was done yet"
    else:
        assert isinstance(caught.value.result, Result)
        assert caught.value.result.next == f"redline workshop --quick --device cpu --out {tmp_path} --resume"
