"""Traces of ranks without a device: communication, waiting and skew against a known truth."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from redline.analyze.profile import profile_of
from redline.trace.decode import read_traces


def operator(name: str, start: int, end: int, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": end - start, "args": {}}


def rank_file(
    folder: Path,
    rank: int,
    collectives: list[tuple[int, int]],
    thread: int = 7,
    work: list[dict[str, Any]] | None = None,
    world: int = 2,
) -> Path:
    """One rank that computes from 0 to 600 µs and sums gradients in these stretches, on another thread by default."""
    events: list[dict[str, Any]] = list(work) if work is not None else [operator("aten::mm", 0, 600)]
    for start, end in collectives:
        args = {"Input Dims": [[250_000]], "Input type": ["float"]}
        events.append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": "gloo:all_reduce",
                "pid": 1,
                "tid": thread,
                "ts": start,
                "dur": end - start,
                "args": args,
            }
        )
    path = folder / f"rank{rank}.json.gz"
    info = {"backend": "gloo", "rank": rank, "world_size": world}
    path.write_bytes(gzip.compress(json.dumps({"distributedInfo": info, "traceEvents": events}).encode()))
    return path


def test_a_folder_of_ranks_tells_busy_waiting_and_skew(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, [(400, 900)])
    rank_file(tmp_path, 1, [(700, 900)])
    profile = profile_of(read_traces([tmp_path]))
    first, second = sorted(profile.ranks, key=lambda rank: rank.rank or 0)
    assert first.timeline.communication_s == pytest.approx(500e-6)
    assert first.timeline.exposed_communication_s == pytest.approx(300e-6), "200 µs of it lie beside the product"
    assert second.timeline.exposed_communication_s == pytest.approx(200e-6)
    assert (first.waiting_s, second.waiting_s) == (pytest.approx(300e-6), pytest.approx(0.0))
    (row,) = profile.collectives
    assert (row.name, row.calls, row.message_bytes, row.group_size) == ("allreduce", 2, 1_000_000, 2)
    assert row.wait_s == pytest.approx(300e-6)
    assert row.transfer_s == pytest.approx(400e-6)
    assert row.bus_bytes_per_s == pytest.approx(2_000_000 / 400e-6)
    (late,) = profile.stragglers
    assert (late.last, late.collectives) == (1, 1)
    assert "1" in late.label


def test_a_collective_on_the_computing_thread_is_not_hidden_by_its_operator(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, [(100, 300)], thread=1)
    profile = profile_of(read_traces([tmp_path]))
    assert profile.timeline.exposed_communication_s == pytest.approx(200e-6)
    assert profile.timeline.compute_s == pytest.approx(400e-6)


ONE_STEP = [(600, 900)]


def steps_of(tmp_path: Path, late: list[dict[str, Any]], waits_from: int = 600, ends: int = 1500) -> Any:
    """Three ranks of which rank 1 does something else, and enters the collective last."""
    usual = [operator("aten::mm", 0, 600)]
    for rank in (0, 2):
        rank_file(tmp_path, rank, [(waits_from, ends)], thread=1, work=usual, world=3)
    rank_file(tmp_path, 1, [(ends - 100, ends)], thread=1, work=late, world=3)
    return profile_of(read_traces([tmp_path]))


def test_the_rank_that_the_others_wait_for_is_named(tmp_path: Path) -> None:
    profile = steps_of(tmp_path, [operator("aten::mm", 0, 600), operator("aten::sort", 600, 1400)])
    (finding,) = [one for one in profile.findings if one.code == "straggler"]
    assert "rank 1 is last in 1 of 1, the others wait 800 µs for it" in finding.evidence


def test_even_ranks_wait_for_nobody(tmp_path: Path) -> None:
    for rank in range(2):
        rank_file(tmp_path, rank, ONE_STEP, thread=1)
    profile = profile_of(read_traces([tmp_path]))
    assert "straggler" not in [each.code for each in profile.findings]
    assert "communication-bound" in [each.code for each in profile.findings], "300 of 900 µs, with nothing beside it"
