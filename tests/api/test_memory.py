"""Several models and recipes in one look at memory: each against its own first row, and one that fails beside the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redline.api.memory import profile_memory
from redline.api.workspace import Workspace
from redline.model.errors import BenchError
from redline.model.spec import LaunchSpec, RunSpec
from redline.model.work import MemoryUse
from redline.show.memory import draw_memory

PEAKS = {("simple_cnn", "baseline"): 100, ("simple_cnn", "bf16"): 60, ("transformer", "baseline"): 1000}


class Answering(Workspace):
    """Its bench knows some peaks, and no others."""

    def checked(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        return list(specs)

    def ask(self, question: Any, answer: Any, launch: LaunchSpec | None = None) -> Any:
        spec = question.spec
        peak = PEAKS.get((spec.workload.model, str(spec.recipe)))
        if peak is None:
            raise BenchError("unsupported", f"nothing is known of {spec.recipe}")
        use = MemoryUse(peak_bytes=peak, peak_phase="forward", categories={"weights": peak}, holders=(), timeline=())
        device = SimpleNamespace(name="a CPU")
        return SimpleNamespace(use=use, workload=SimpleNamespace(batch=2), environment=SimpleNamespace(device=device))


def test_a_recipe_saves_against_the_first_of_its_own_model(tmp_path: Path) -> None:
    with Answering(keep=False) as workspace:
        found = profile_memory(
            ["simple_cnn", "transformer"], recipes=["baseline", "bf16"], device="cpu", workspace=workspace
        )
    assert {(row.model, row.recipe): row.saved_bytes for row in found} == {
        ("simple_cnn", "baseline"): None,
        ("simple_cnn", "bf16"): 40,
        ("transformer", "baseline"): None,
    }
    shown = str(found)
    assert shown.count("who holds the peak") == 2
    assert "transformer · infer" in shown
    # One that cannot be looked at is told beside the others.
    assert found.failures == {"transformer bf16": "nothing is known of bf16"}
    assert "transformer bf16: failed: nothing is known of bf16" in shown
    assert json.loads(found.to_json())["failures"] == found.failures
    draw_memory(found.rows, tmp_path / "memory.png")


def test_where_all_fail_the_first_is_raised() -> None:
    with Answering(keep=False) as workspace, pytest.raises(BenchError, match="nothing is known of fp16"):
        profile_memory("simple_cnn", recipes=["fp16", "amp-bf16"], device="cpu", workspace=workspace)
