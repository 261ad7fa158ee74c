"""A step of two ranks moves the weights as a step of one process on the global batch does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from redline.launch.workers import reserved_port

SCRIPT = Path(__file__).parent.parent / "models" / "gradients.py"
EXACT, ROUNDED = 1e-5, 2e-2
"""fp32 sums in another order; bf16 rounds the parts of a batch apart."""
CASES = {
    "even": EXACT,
    "uneven": EXACT,
    "compiled": EXACT,
    "compiled-amp": ROUNDED,
    "sharded-compiled": EXACT,
    "amp": ROUNDED,
    "sharded": EXACT,
    "sharded-amp": ROUNDED,
    "accumulated": EXACT,
}


def distances_at(port: int) -> list[dict[str, float]]:
    where = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=900) for process in started]
    assert [process.returncode for process in started] == [0, 0], said[0][1][-3000:] + said[1][1][-3000:]
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in said]


@pytest.mark.long
def test_a_step_of_the_ranks_is_one_of_the_global_batch() -> None:
    with reserved_port() as held:
        ranks = distances_at(held.getsockname()[1])
    assert all(rank.keys() == CASES.keys() for rank in ranks)
    too_far = {case: rank[case] for rank in ranks for case, limit in CASES.items() if not rank[case] < limit}
    assert not too_far
