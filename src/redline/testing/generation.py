"""Generations of the fake bench: what a step's time is made of, and what a token reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from redline.record import GenerationInfo
from redline.spec import RunSpec
from redline.testing.landscape import Landscape, look_up

PROMPT, NEW_TOKENS = 128, 32
"""As the real bench has them where nothing is said."""


def info_of(spec: RunSpec, truth: Landscape) -> GenerationInfo | None:
    if spec.workload.task != "generate":
        return None
    return GenerationInfo(
        prompt=spec.workload.prompt or PROMPT,
        new_tokens=spec.workload.new_tokens or NEW_TOKENS,
        weight_bytes=truth.weight_bytes,
        read_bytes=truth.weight_bytes,
        cache_bytes=0,
        copy_bytes_per_s=truth.copy_bytes_per_s,
    )


def parts_of(spec: RunSpec, truth: Landscape, times: NDArray[np.float64]) -> dict[str, Any]:
    """Of a block: the prefill has its share of each generation, the tokens after the first share the rest."""
    if spec.workload.task != "generate":
        return {}
    step_s = look_up(truth.step_s, spec)
    first = times * (look_up(truth.ttft_s, spec) / step_s)
    others = (spec.workload.new_tokens or NEW_TOKENS) - 1
    each = np.repeat((times - first) / max(others, 1), others)
    issued = (times - first) / max(others, 1) * look_up(truth.issue_share, spec)
    return {
        "phases": {"prefill": tuple(first.tolist()), "decode": tuple((times - first).tolist())},
        "token_s": tuple(each.tolist()),
        "token_issue_s": tuple(issued.tolist()) if truth.device_kind != "cpu" and others else (),
    }
