"""`redline scale` on two real ranks, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from invoking import invoke

MODELS = Path(__file__).parent.parent / "models" / "ranks.py"


@pytest.mark.usefixtures("brief")
def test_training_on_two_ranks_with_a_slow_link(tmp_path: Path) -> None:
    options = "--task train --ranks 1,2 --batch-per-rank 4 --device cpu --threads 1 --effort quick --door fork --json"
    done = invoke(f"scale {MODELS}:slow_link {options} --plot", tmp_path / "scale.png")
    found = json.loads(done.stdout)
    one, two = found["tables"]["points"]
    assert (one["efficiency"]["value"], one["ranks"], two["ranks"]) == (1.0, 1, 2)
    assert two["ideal"]["value"] == pytest.approx(2 * one["throughput"]["value"])
    assert two["exposed"]["value"] > 0.1
    if not two["is_oversubscribed"]:
        # A busy machine may make a straggler of a rank besides.
        assert "communication-bound" in [each["code"] for each in found["notes"] if each["about"] == "2"]
    assert (tmp_path / "scale.png").stat().st_size > 0
