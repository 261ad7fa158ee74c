"""Traces of ranks without a device: communication, waiting and skew against a known truth."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from redline.analyze.profile import profile_of
from redline.trace.decode import read_traces


def rank_file(folder: Path, rank: int, collectives: list[tuple[int, int]], thread: int = 7) -> Path:
    """One rank that computes from 0 to 600 µs and sums gradients in these stretches, on another thread by default."""
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 600, "args": {}},
    ]
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
    info = {"backend": "gloo", "rank": rank, "world_size": 2}
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
    assert late.skew_s == pytest.approx(300e-6)
    assert "1" in late.label


def test_a_collective_on_the_computing_thread_is_not_hidden_by_its_operator(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, [(100, 300)], thread=1)
    profile = profile_of(read_traces([tmp_path]))
    assert profile.timeline.exposed_communication_s == pytest.approx(200e-6)
    assert profile.timeline.compute_s == pytest.approx(400e-6)
