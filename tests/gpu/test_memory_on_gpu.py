"""On a real GPU: the cap holds, running out is clean, the squeeze tells what is needed, the finder finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import redline
from redline.launch import Door, open_door
from redline.model.protocol import BlockReply, FailureReply, Measure, Prepare, PreparedReply, Squeeze, SqueezeReply
from redline.model.spec import LaunchSpec, RunSpec
from redline.model.spec_table import specs_from_table
from redline.verbs.workspace import Workspace

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.device_count(), reason="no GPU here")]

GIB = 2**30


@pytest.fixture
def door() -> Iterator[Door]:
    opened = open_door(LaunchSpec())
    yield opened
    opened.close()


def spec_of(batch: int, max_memory: str = "2GiB", **table: Any) -> RunSpec:
    settings = {"model": "resnet18", "effort": "quick", "measure": {"check_numerics": False}, **table}
    return specs_from_table({**settings, "batch": batch, "max_memory": max_memory})[0]


@pytest.mark.parametrize("task", ["infer", "train"])
def test_the_squeeze_lies_between_allocated_and_reserved(door: Door, task: str) -> None:
    spec = spec_of(32, task=task, recipe="amp")
    session = door.open(spec)
    assert isinstance(session.ask(Prepare(spec=spec)), PreparedReply)
    reply = session.ask(Measure(kind="throughput", seconds=0.2))
    assert isinstance(reply, BlockReply)
    memory = reply.block.memory
    assert memory.limit_bytes == 2 * GIB
    assert memory.peak_allocated_bytes is not None
    assert memory.peak_reserved_bytes is not None
    assert 0 < (memory.resident_bytes or 0) < memory.peak_allocated_bytes
    squeezed = session.ask(Squeeze())
    assert isinstance(squeezed, SqueezeReply)
    assert squeezed.needed_bytes is not None
    assert memory.peak_allocated_bytes <= squeezed.needed_bytes <= memory.peak_reserved_bytes
    # The cap of the session holds again, and the step still runs.
    assert isinstance(session.ask(Measure(kind="throughput", seconds=0.1)), BlockReply)


def test_more_than_the_cap_is_a_clean_oom(door: Door) -> None:
    spec = spec_of(4096, task="train")
    reply = door.open(spec).ask(Prepare(spec=spec))
    assert isinstance(reply, FailureReply)
    assert reply.failure.kind == "oom"


def test_an_inline_session_lifts_its_cap_again() -> None:
    spec = spec_of(8, launch={"door": "inline"})
    session = open_door(spec.launch).open(spec)
    assert isinstance(session.ask(Prepare(spec=spec)), PreparedReply)
    session.close()
    held = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
    assert held.numel() == 3 * GIB


def test_the_largest_batch_is_found_with_hardly_an_oom() -> None:
    found = redline.batch("resnet18", task="train", recipes="amp", max_memory="4GiB", workspace=Workspace(keep=False))
    (row,) = found.rows
    assert row["largest_is_below"].value <= 1.03 * row["largest_batch"].value + 1
    assert row["trials_that_failed"].value <= 1
    assert row["trials"].value <= 8
