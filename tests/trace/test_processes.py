"""Files and folders that hold several processes or ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from kineto import ADD, GEMM, REDUCE, TraceMaker

from redline.analyze.profile import profile_of
from redline.model.errors import TraceError
from redline.trace.decode import read_trace, read_traces

US = 1000


def one(process: int, device: int, kernel: str, delay_us: int = 0) -> TraceMaker:
    maker = TraceMaker(process=process, device=device)
    for number in range(5):
        begin = (100 * number + delay_us) * US
        operator = maker.operator(f"aten::op_of_{process}", begin, 20 * US)
        maker.kernel(kernel, begin + 30 * US, 50 * US, launched=begin + 5 * US, operator=operator)
    return maker


def fused(path: Path, *makers: TraceMaker) -> Path:
    """All events in one list, as tools write that merge the ranks of a job; numbers collide."""
    whole = TraceMaker()
    whole.events = [event for maker in makers for event in maker.events]
    return whole.write(path)


def test_numbers_that_collide_between_processes_are_not_joined(tmp_path: Path) -> None:
    fused(tmp_path / "a.json", one(11, 0, GEMM), one(22, 1, ADD, delay_us=3))
    traces = read_traces([tmp_path / "a.json"])
    assert [trace.process for trace in traces] == ["11", "22"]
    profile = profile_of(traces)
    rows = {row.name: row.device_self_s for row in profile.operators}
    assert rows == {"aten::op_of_11": pytest.approx(250e-6), "aten::op_of_22": pytest.approx(250e-6)}
    assert [(rank.process, rank.device) for rank in profile.ranks] == [("11", 0), ("22", 1)]
    assert all(row.source == "operator" for row in profile.operators)


def test_processes_that_share_a_device_are_told_apart_by_who_launched_last(tmp_path: Path) -> None:
    first, second = one(11, 0, GEMM), one(22, 0, ADD, delay_us=1000)
    fused(tmp_path / "a.json", first, second)
    launched = [len(trace.work) for trace in read_traces([tmp_path / "a.json"])]
    assert sum(launched) == 10


def test_a_device_number_used_twice_is_two_devices(tmp_path: Path) -> None:
    """Each rank sees its GPU as number 0; the merged file draws them under different processes."""
    second = one(22, 0, ADD, delay_us=3)
    for event in second.events:
        if event["cat"] == "kernel":
            event["pid"] = 1
    fused(tmp_path / "a.json", one(11, 0, GEMM), second)
    profile = profile_of(read_traces([tmp_path / "a.json"]))
    assert len(profile.ranks) == 2
    assert profile.timeline.busy_s == pytest.approx(500e-6)


def test_one_process_is_one_trace(tmp_path: Path) -> None:
    trace = read_trace(fused(tmp_path / "a.json", one(11, 0, GEMM)))
    assert trace.process is None
    with pytest.raises(TraceError, match="2 processes"):
        read_trace(fused(tmp_path / "b.json", one(11, 0, GEMM), one(22, 1, GEMM)))


def test_the_same_trace_twice_counts_once_and_says_so(tmp_path: Path) -> None:
    maker = one(11, 0, GEMM)
    maker.header["trace_id"] = "ABC"
    maker.write(tmp_path / "a.json")
    maker.write(tmp_path / "copy.json.gz")
    (tmp_path / "link.json").symlink_to(tmp_path / "a.json")
    names = ["a.json", "a.json", "link.json", "copy.json.gz"]
    profile = profile_of(read_traces([tmp_path / name for name in names]))
    assert profile.kernels[0].calls == 5
    assert [note.code for note in profile.notes] == ["given-twice"] * 3


@pytest.mark.parametrize("category", ["mtia_ccp_events", "hpu_op", "npu_kernel"])
def test_accelerators_of_other_makers_are_devices(category: str) -> None:
    maker = one(11, 0, GEMM)
    for event in maker.events:
        event["cat"] = {"kernel": category, "cuda_runtime": "mtia_runtime"}.get(event["cat"], event["cat"])
    profile = maker.profile()
    assert profile.has_device
    assert profile.timeline.busy_s == pytest.approx(250e-6)
    assert profile.launches.work == 5


def test_categories_nobody_knows_are_told() -> None:
    maker = one(11, 0, GEMM)
    maker.event("X", "strange_thing", "x", 0, 5, args={})
    (note,) = maker.profile().notes
    assert note.code == "unknown-events"
    assert "1 of 'strange_thing'" in str(note)


def test_gpu_rank_and_world_size_are_shown(tmp_path: Path) -> None:
    from redline.verbs.profile import result_of

    maker = one(11, 0, GEMM)
    maker.gpu("NVIDIA H100 80GB HBM3", (9, 0))
    maker.header["distributedInfo"] = {"rank": 3, "world_size": 8}
    maker.kernel(REDUCE, 700 * US, 10 * US, launched=690 * US)
    about = result_of(maker.profile()).about
    found = [about[name] for name in ("device", "capability", "ranks")]
    assert found == ["NVIDIA H100 80GB HBM3", "compute capability 9.0", "rank 3 of 8"]
