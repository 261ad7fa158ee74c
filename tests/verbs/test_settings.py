"""What an editor, `help()` and a type checker see of the public functions."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import redline
from redline.model.spec import DataSpec, RunSpec, WorkloadSpec
from redline.verbs.workspace import described_model

REPOSITORY = Path(__file__).parents[2]
VERBS = ["run", "tune", "profile", "roofline", "flops", "batch"]
TRAINERS = ["train", "run_quick_profile"]


@pytest.mark.parametrize("verb", VERBS)
def test_signatures_name_every_setting_with_its_default(verb: str) -> None:
    parameters = inspect.signature(getattr(redline, verb)).parameters
    assert not [each for each in parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
    spec = RunSpec(workload=WorkloadSpec(model="any"))
    assert parameters["device"].default == spec.device
    assert parameters["seed"].default == spec.seed
    if verb not in ("roofline", "flops", "profile"):  # how long something is timed is not theirs to choose
        assert parameters["effort"].default == ("quick" if verb == "batch" else spec.measure.effort)
    assert parameters["task"].default == spec.workload.task
    assert parameters["optimizer"].default == spec.workload.optimizer


@pytest.mark.parametrize("verb", TRAINERS)
def test_signatures_of_trainers_name_theirs(verb: str) -> None:
    parameters = inspect.signature(getattr(redline, verb)).parameters
    assert not [each for each in parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
    spec = RunSpec(workload=WorkloadSpec(model="any"))
    assert (parameters["device"].default, parameters["seed"].default) == (spec.device, spec.seed)
    assert parameters["workers"].default == DataSpec(name="any").workers


def test_every_public_name_is_listed_and_can_be_had() -> None:
    assert set(dir(redline)) == set(redline.__all__)
    for name in redline.__all__:
        assert getattr(redline, name) is not None


SCRIPT = """
import redline

result = redline.run("resnet18", recipes=["baseline", "channels-last"], batch=4, effort="quick")
speed: float = result[0].value("throughput")
verdict = redline.run("resnet18", recipes=["baseline", "compile"], batch="1..8", decide=True).table("pairs").rows[0]["verdict"]
code: str = redline.recipe("fp16", task="train", device="cpu").code

redline.recipe("fp16", batch=4)  # wrong
"""


@pytest.mark.slow
def test_a_strict_type_checker_reads_the_package(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # With the settings and the cache of `make types`: without them it would read the whole package once more.
    command: list[Any] = [sys.executable, "-m", "mypy", "--strict", script]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY).stdout
    wrong = [number for number, line in enumerate(SCRIPT.splitlines(), start=1) if "# wrong" in line]
    told = [line for line in found.splitlines() if "error:" in line]
    assert [int(line.split(":")[1]) for line in told] == wrong, found


def test_an_exported_program_is_handed_over_as_the_module_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    class ExportedProgram:
        def __call__(self) -> None:
            raise RuntimeError("as torch's own does")

        def module(self) -> str:
            return "resnet18"

    monkeypatch.setitem(sys.modules, "torch.export", SimpleNamespace(ExportedProgram=ExportedProgram))
    workspace: Any = None
    assert described_model(workspace, ExportedProgram(), None, None)[0] == {"model": "resnet18"}
