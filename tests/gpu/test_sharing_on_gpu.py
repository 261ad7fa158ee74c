"""Blocks that two workers compile together on a real GPU: the step finds them compiled, and its numbers are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from redline.launch import open_door
from redline.model.protocol import Prepare, PreparedReply
from redline.model.spec import LaunchSpec
from redline.model.spec_table import specs_from_table

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.device_count(), reason="no GPU here")]


@pytest.mark.parametrize(
    ("task", "recipe"),
    [
        ("train", "amp-bf16+channels-last+compile:regional+fused-optimizer+graphs"),
        ("train", "amp+channels-last+compile:regional+fused-optimizer+graphs"),
        ("infer", "fp16+channels-last+compile:regional+graphs"),
    ],
)
def test_a_helper_compiles_some_of_it(task: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    table = {"model": "resnet50", "task": task, "batch": 32, "recipe": recipe, "device": "cuda:0"}
    (spec,) = specs_from_table({**table, "effort": "quick"})
    door = open_door(LaunchSpec())
    try:
        helper, worker = door.open(spec), door.open(spec)
        helper.begin(Prepare(spec=spec, sharing="helps"))
        reply = worker.ask(Prepare(spec=spec, sharing="shares"))
        helper.kill()
        worker.close()
    finally:
        door.close()
    assert isinstance(reply, PreparedReply), reply
    assert reply.prepared.numerics.passed, reply.prepared.numerics
    assert reply.prepared.cold_start.compile_cache == "mixed", "the helper's part was in the cache"
    assert "could not be shared" not in " ".join(map(str, reply.prepared.recipe_notes))
