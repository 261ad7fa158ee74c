"""`redline run --decide` and `redline tune` from the outside: exit codes, one-line mistakes, documents on stdout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from invoking import Redline, document
from worlds.recipes import WRONG, switches_of

from redline.model.errors import UsageError
from redline.model.note import note
from redline.model.protocol import SwitchChoice
from redline.model.record import Failure
from redline.model.spec import RunSpec
from redline.search.tune.trials import Trials
from redline.testing.fake import FakeDoor
from redline.testing.landscape import EXACT, Landscape
from redline.verbs import tune as tuning
from redline.verbs.workspace import Workspace

CHOICES = (
    SwitchChoice(switch="fp16", family="precision"),
    SwitchChoice(switch="bf16", family="precision"),
    SwitchChoice(switch="channels-last", family="layout"),
    SwitchChoice(switch="compile", family="compiler", relieves="both"),
    SwitchChoice(
        switch="graphs", family="graphs", relieves="host", refusal=note("unavailable", "this device has none")
    ),
)
EFFECTS = {"fp16": 0.5, "bf16": 0.4, "channels-last": 0.8, "compile": 0.9}


def step_s(spec: RunSpec) -> float:
    seconds = 0.01
    for step in switches_of(spec):
        seconds *= EFFECTS[step]
    return seconds


def failure(spec: RunSpec) -> Failure | None:
    breaks = spec.workload.model == "broken" or "compile" in switches_of(spec)
    return Failure(stage="compile", kind="compile", message="no compiler here") if breaks else None


@pytest.fixture
def door() -> FakeDoor:
    """bf16 is fastest, and wrong."""
    return FakeDoor(
        Landscape(
            step_s=step_s,
            failure=failure,
            numerics=lambda spec: WRONG if "bf16" in switches_of(spec) else EXACT,
            offset_sigma=0.002,
            issue_share=0.1,
            choices=CHOICES,
            models={"resnet50"},
            unknown_models={"nosuch"},
        )
    )


class TestDecide:
    def test_carries_what_programs_need(self, redline: Redline) -> None:
        told = document(redline("run --decide resnet50 -r baseline -r fp16 --json"))
        (pair,) = told["tables"]["pairs"]
        assert (pair["against"], pair["recipe"], pair["verdict"]) == ("baseline", "fp16", "faster")
        assert pair["ratio"]["low"] <= 2.0 <= pair["ratio"]["high"]
        rows = told["tables"]["results"]
        assert [row["processes"] for row in rows] == [pair["replicates"]] * 2
        assert {"recipe", "throughput", "latency_p50", "numerics", "verdict"} <= rows[1].keys()

    def test_a_recipe_that_fails_is_told_and_exits_5(self, redline: Redline) -> None:
        result = redline("run --decide resnet50 -r baseline -r fp16 -r compile")
        assert result.exit_code == 5
        assert "no compiler here" in result.stdout


class TestTune:
    def test_reports_show_its_winner_whichever_way_they_are_asked_for(self, redline: Redline, tmp_path: Path) -> None:
        rows = document(redline("tune resnet50 --budget 10m --json"))["tables"]["ranking"]
        (winner,) = [row["recipe"] for row in rows if row["verdict"] == "winner"]
        redline("run resnet50 -r baseline -r channels-last")
        for arguments in ([], ["--last"]):
            if arguments:  # what was measured last is then the search, whole
                assert redline("tune resnet50 --budget 10m").exit_code == 0
            folder = tmp_path / "".join(arguments)
            assert redline("report", *arguments, "-o", str(folder)).exit_code == 0
            assert winner in (folder / "report.md").read_text(encoding="utf-8")

    def test_more_is_shown_when_asked_for(self, redline: Redline) -> None:
        command = "tune resnet50 --batch 8 --budget 30m"
        short, long = redline(command), redline(command, "--resume", "-v").stdout
        answer, *others = short.stdout.splitlines()
        assert (short.exit_code, answer.startswith("winner: fp16+channels-last, 2.5")) == (0, True)
        assert "what each switch brings: fp16 " in short.stdout
        assert "redline.recipe('fp16+channels-last').apply(model" in short.stdout
        assert "no compiler here" in " ".join(short.stdout.split())
        assert sum("×" in line and "(" in line for line in others) <= 5
        assert "fp16+channels-last" in short.stderr
        assert "this device has none" in long
        assert len(long) > len(short.stdout)

    def test_a_winner_alone_is_called_faster_and_only_what_was_raced_has_a_verdict(self, redline: Redline) -> None:
        """The answer follows from the table below it."""
        told = document(redline("tune resnet50 --batch 8 --budget 40s --json"))
        for row in told["tables"]["ranking"]:
            is_decided = row["verdict"] in ("winner", "faster", "slower", "same")
            assert is_decided <= (row["vs_baseline"].get("low") is not None)
        winners = [row for row in told["tables"]["ranking"] if row["verdict"] == "winner"]
        assert told["headline"]["text"].startswith("winner" if winners else ("no winner", "best so far"))
        assert all(row["vs_baseline"]["low"] > 1 for row in winners)

    def test_carries_what_programs_need(self, redline: Redline) -> None:
        told = document(redline("tune resnet50 --batch 8 --budget 30m --json"))
        tables = told["tables"]
        (winner,) = [row for row in tables["ranking"] if row["verdict"] == "winner"]
        assert (winner["recipe"], told["about"]["batch"]) == ("fp16+channels-last", 8)
        assert winner["vs_baseline"]["low"] <= 2.5 <= winner["vs_baseline"]["high"]
        assert {row["switch"] for row in tables["gains"]} == {"fp16", "channels-last"}
        assert any(row["code"] == "above-tolerance" for row in tables["rejected"])
        assert any("no compiler here" in str(row) for row in tables["rejected"])
        assert "fp16+channels-last" in told["blocks"]["snippet"]
        assert told["about"]["state"] == "done"

    def test_ctrl_c_prints_the_best_so_far_and_resume_goes_on(
        self, redline: Redline, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, count = Trials.start, 0

        def interrupted(self: Trials, *given: Any) -> None:
            nonlocal count
            count += 1
            if count == 3:
                raise KeyboardInterrupt
            real(self, *given)

        monkeypatch.setattr(Trials, "start", interrupted)
        stopped = redline("tune resnet50 --budget 30m")
        assert stopped.exit_code == 130
        assert stopped.stdout.startswith("best so far, but not certain: ")
        assert "--resume continues" in stopped.stdout
        monkeypatch.setattr(Trials, "start", real)
        told = document(redline("tune resnet50 --budget 30m --resume --json"))
        assert told["about"]["state"] == "done"
        assert told["headline"]["text"].startswith("winner: fp16+channels-last,")

    def test_steps_and_without_restrict_it(self, redline: Redline) -> None:
        for words, recipe in ((("--switches", "fp16, compile"), "fp16"), (("--without", "fp16,bf16"), "channels-last")):
            told = document(redline("tune resnet50 --budget 30m", *words, "--json"))
            assert told["headline"]["text"].startswith(f"winner: {recipe},")

    def test_a_model_that_does_not_run_exits_5(self, redline: Redline) -> None:
        result = redline("tune broken")
        assert result.exit_code == 5
        assert "no compiler here" in result.stdout


class TestFromPython:
    def test_a_winner_is_applied_with_the_inputs_of_the_search(
        self, door: FakeDoor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        result = tuning.tune("resnet50", budget="30m", clock=lambda: door.clock_s, workspace=Workspace(door=door))
        applied: list[Any] = []

        class Plain:
            def apply(self, *args: Any, **kwargs: Any) -> str:
                applied.append((args, kwargs))
                return "fast"

        asked: list[Any] = []
        monkeypatch.setattr(
            "redline.verbs.tune.recipe", lambda *args, **settings: asked.append((args, settings)) or Plain()
        )
        with pytest.raises(Exception, match="example inputs"):
            result.apply("model")
        result = dataclasses.replace(result, inputs={"image": "tensor"})
        assert result.apply("model") == "fast"
        assert result.apply("model", 1, 2) == "fast"
        assert applied == [
            (("model",), {"image": "tensor", "inplace": False}),
            (("model", 1, 2), {"inplace": False}),
        ]
        assert asked[0] == (
            ("fp16+channels-last",),
            {"task": "infer", "optimizer": "sgd", "device": "cuda:0"},
        )

    def test_a_winner_for_training_is_a_training_step(self, door: FakeDoor, monkeypatch: pytest.MonkeyPatch) -> None:
        result = tuning.tune(
            "resnet50", task="train", budget="30m", clock=lambda: door.clock_s, workspace=Workspace(door=door)
        )
        made: list[Any] = []

        class Plain:
            def apply(self, *args: Any, **kwargs: Any) -> str:
                raise UsageError("this recipe is for train: call training_step() instead")

            def training_step(self, *given: Any) -> str:
                made.append(given)
                return "step"

        monkeypatch.setattr("redline.verbs.tune.recipe", lambda *args, **settings: Plain())
        with pytest.raises(UsageError, match=r"call training_step\(\)"):
            result.apply("model")
        with pytest.raises(UsageError, match=r"needs example inputs.*training_step\(model, loss, inputs, targets\)"):
            result.training_step("model", "loss", None, "targets")
        result = dataclasses.replace(result, inputs={"image": "tensor"})
        assert result.training_step("model", "loss", None, "targets") == "step"
        assert result.training_step("model", "loss", "other", "targets") == "step"
        assert made == [("model", "loss", {"image": "tensor"}, "targets"), ("model", "loss", "other", "targets")]
