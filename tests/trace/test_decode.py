"""Files of every layout decode to the columns that were written, to the nanosecond."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest
from kineto import ADD, GEMM, TraceMaker, training_trace

from redline.model.errors import TraceError
from redline.trace import events
from redline.trace.decode import read_trace, read_traces
from redline.trace.events import trace_files
from redline.trace.host import HostView
from redline.trace.links import Links
from redline.trace.timeline import device_time, device_views
from redline.trace.window import step_marks


@pytest.fixture(params=[1 << 20, 1500])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Once as it is, once so small that most blocks end inside an event."""
    monkeypatch.setattr(events, "BLOCK_BYTES", request.param)
    return request.param


def timeline(path: Path) -> dict[str, int]:
    (view,) = device_views(Links(read_trace(path)))
    found = vars(device_time(view))
    return {name: found[name] for name in found if name != "exposed_copy"}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rocm", [False, True])
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_simulated_truth_is_found_exactly(tmp_path: Path, seed: int, rocm: bool, name: str) -> None:
    truth = training_trace(tmp_path / name, megabytes=2, seed=seed, rocm=rocm)
    assert timeline(tmp_path / name) == truth.timeline()


def some_events() -> TraceMaker:
    maker = TraceMaker()
    for number in range(40):
        begin = number * 100_001
        operator = maker.operator("aten::mm", begin, 20_003, dims=[[8, 16], [16, 4]], types=["float", "float"])
        maker.kernel(GEMM, begin + 30_007, 50_011, launched=begin + 5_005, operator=operator, size=7)
    return maker


@pytest.mark.parametrize("layout", ["kineto", "compact", "indented"])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_every_layout_decodes(tmp_path: Path, layout: str, name: str, block_bytes: int) -> None:
    maker = some_events()
    trace = read_trace(maker.write(tmp_path / name, layout))
    assert (len(trace.operators), len(trace.calls), len(trace.work)) == (40, 40, 40)
    assert trace.work.start.tolist() == [maker.base_ns + start for start, _ in maker.truth.compute]
    assert set(trace.work.duration.tolist()) == {50_011}
    assert [(shape.dims, shape.types) for shape in trace.shapes] == [("[[8,16],[16,4]]", '["float","float"]')]
    assert trace.work.correlation.tolist() == trace.calls.correlation.tolist()
    assert not trace.lost


@pytest.mark.parametrize("base_us", [0, 10**9, 2**43 - 10**6, 2**43 + 1, 1_755_000_000_000_000])
def test_times_are_exact_however_large(base_us: int) -> None:
    # At 1.7e15 µs (the microseconds since 1970) neighbouring floats are a quarter of a microsecond apart.
    maker = TraceMaker(base_ns=base_us * 1000)
    starts = [1 + 1009 * number for number in range(200)]
    for start in starts:
        maker.kernel(ADD, start, 7)
    trace = maker.read()
    assert trace.work.start.tolist() == [base_us * 1000 + start for start in starts]


def test_times_without_fraction_with_many_digits_and_with_exponents(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    times = ["5", "5.1", "1.5e1", "20.00049", "20.0005001", '"30.25"', "1755000000000000.001"]
    events = [f'{{"ph":"X","cat":"kernel","name":"k","ts":{text},"dur":1}}' for text in times]
    path.write_text(f'{{"traceEvents": [{",".join(events)}]}}')
    expected = [5000, 5100, 15000, 20000, 20001, 30250, 1755000000000000001]
    assert read_trace(path).work.start.tolist() == expected


def test_a_bare_list_of_events_is_a_trace(tmp_path: Path, block_bytes: int) -> None:
    text = some_events().text("compact")
    begin = text.index('"traceEvents":') + len('"traceEvents":')
    (tmp_path / "a.json").write_text("  \n" + text[begin : text.rindex("]") + 1])
    assert len(read_trace(tmp_path / "a.json").work) == 40


@pytest.mark.parametrize("layout", ["kineto", "compact", "indented"])
def test_names_that_look_like_boundaries_do_not_mislead(tmp_path: Path, layout: str, block_bytes: int) -> None:
    maker = TraceMaker()
    names = ['a}, {"b', "x},{", '}]}, {"ph": "X"}', 'quote " and \\ slash', "\u00e9\u4e2d", "traceEvents"]
    for number, name in enumerate(names * 30):
        maker.operator(name, number * 10, 5, dims=[{"odd": 1}, {"odder": 2}], types=[])
    trace = read_trace(maker.write(tmp_path / "a.json", layout))
    assert [trace.names[number] for number in trace.operators.name] == names * 30
    assert not trace.lost


def test_metadata_may_stand_before_or_after_the_events(tmp_path: Path, block_bytes: int) -> None:
    info = '"distributedInfo": {"rank": 3, "world_size": 8}, "deviceProperties": [{"name": "A"}, {"name": "B"}]'
    events = ",\n".join(f'  {{"ph": "X", "cat": "cpu_op", "name": "o", "ts": {n}, "dur": 1}}' for n in range(50))
    for number, text in enumerate((f'{{{info}, "traceEvents": [{events}]}}', f'{{"traceEvents": [{events}], {info}}}')):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        trace = read_trace(path)
        assert (trace.rank, trace.world_size, [info.name for info in trace.devices]) == (3, 8, ["A", "B"])
        assert len(trace.operators) == 50


@pytest.mark.parametrize(("name", "rank"), [("a.json", None), ("rank7.json", 7), ("x_rank_12_iter3.json", 12)])
def test_a_file_need_not_say_its_rank(tmp_path: Path, name: str, rank: int | None) -> None:
    assert read_trace(some_events().write(tmp_path / name)).rank == rank


def test_rocm_sizes_as_text_missing_numbers_and_stream_zero() -> None:
    maker = TraceMaker(rocm=True)
    maker.copy("Memcpy DtoD", 0, 10, size="4096")
    maker.copy("Memcpy DtoD", 20, 10)
    maker.kernel("Cijk_Ailk_Bljk_BBS", 40, 10, launched=5)
    trace = maker.read()
    assert trace.work.bytes.tolist() == [4096, -1, -1]
    assert trace.work.stream.tolist() == [0, 0, 0]
    assert not trace.lost


def test_categories_of_older_versions(tmp_path: Path) -> None:
    rows = [("Operator", "aten::mm"), ("Kernel", "k"), ("Memcpy", "Memcpy HtoD"), ("Runtime", "cudaLaunchKernel")]
    events = [f'{{"ph":"X","cat":"{cat}","name":"{name}","ts":1,"dur":1}}' for cat, name in rows]
    (tmp_path / "a.json").write_text(f'{{"traceEvents":[{",".join(events)}]}}')
    trace = read_trace(tmp_path / "a.json")
    assert (len(trace.operators), len(trace.work), len(trace.calls)) == (1, 2, 1)


def test_older_versions_mark_steps_and_loaders_as_operators() -> None:
    maker = TraceMaker()
    maker.event("X", "Operator", "ProfilerStep#3", 0, 90_000)
    maker.event("X", "Operator", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 20_000)
    maker.event("X", "Operator", "aten::mm", 30_000, 9_000)
    trace = maker.read()
    assert len(step_marks(trace)) == 1
    assert len(HostView(Links(trace)).loader) == 1
    assert [trace.names[number] for number in trace.operators.name] == ["aten::mm"]


def test_a_step_that_is_marked_twice_is_one_step() -> None:
    maker = TraceMaker()
    for number in (1, 1, 2, 2):
        maker.annotation(f"ProfilerStep#{number}", number * 100_000, 90_000)
    maker.operator("aten::mm", 100_000, 9_000)
    assert len(step_marks(maker.read())) == 2


def test_gzip_files_in_a_row_are_one(tmp_path: Path) -> None:
    text = some_events().text().encode()
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(text[:5000]) + gzip.compress(text[5000:]))
    trace = read_trace(tmp_path / "a.json.gz")
    assert len(trace.work) == 40
    assert not trace.lost


def test_a_folder_stands_for_the_traces_in_it(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        some_events().write(tmp_path / f"host_rank{rank}.123.pt.trace.json.gz")
    (tmp_path / "notes.json").write_text("{}")
    assert [trace.rank for trace in read_traces([tmp_path])] == [0, 2, 10]
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="no trace"):
        read_traces([tmp_path / "empty"])


def test_a_folder_that_vanishes_while_it_is_searched_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    kept = TraceMaker()
    kept.operator("aten::mm", 0, 10)
    kept.write(tmp_path / "kept.json")
    listed = os.scandir

    def vanishing(path: Any = ".") -> Any:
        if os.fspath(path) == str(gone):
            gone.rmdir()
        return listed(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    found, _ = trace_files([tmp_path])
    assert [path.name for path in found] == ["kept.json"]
    assert not gone.exists()
