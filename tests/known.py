"""Measurements of which a test says what is known, in place of records from which it would follow."""

from __future__ import annotations

from typing import Any

from redline.analyze.bound import Bound
from redline.analyze.measurement import Measurement, VersusFirst
from redline.analyze.trust import Verdict
from redline.model.note import note
from redline.model.record import RunRecord
from redline.model.spec import Recipe, RunSpec, WorkloadSpec

VALID = Verdict(labels=("valid",))


def known(
    recipe: str = "baseline", model: str = "net", batch: int = 8, device: str = "cpu", **figures: Any
) -> Measurement:
    """Figures go by their names in `Measurement`."""
    spec = RunSpec(workload=WorkloadSpec(model=model, batch=batch), recipe=Recipe.parse(recipe), device=device)
    defaults = {"verdict": VALID, "bound": Bound(label="unknown", evidence=note("not-measured", "")), "item": "img"}
    return Measurement(RunRecord(id=f"{recipe} {figures}", spec=spec)).changed(**{**defaults, **figures})


def versus(ratio: float, low: float | None, high: float | None, **more: Any) -> VersusFirst:
    """Against the baseline."""
    return VersusFirst(recipe="baseline", ratio=ratio, low=low, high=high, memory_change=None, **more)
