"""Capturing on a CPU: the phases are named, the schedule is kept, and nothing of it touches a timed block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from redline.bench.session import BenchSession
from redline.model.protocol import (
    BlockReply,
    FailureReply,
    Measure,
    Prepare,
    PreparedReply,
    Profile,
    Reply,
    TraceReply,
    read_script,
    write_script,
)
from redline.model.record import Prepared
from redline.model.spec import MeasureSpec, RunSpec, WorkloadSpec
from redline.trace.decode import read_trace
from redline.trace.host import HostView
from redline.trace.links import Links
from redline.trace.window import phases_of, recorded, steps_of

MISBEHAVING = Path(__file__).parents[1] / "models" / "misbehaving.py"


def spec_of(task: str) -> RunSpec:
    workload = WorkloadSpec(model=f"{MISBEHAVING}:sound", task=task)  # type: ignore[arg-type]
    return RunSpec(workload=workload, measure=MeasureSpec.for_effort("quick"), device="cpu")


@pytest.fixture
def session():
    bench = BenchSession(on_progress=lambda progress: None, isolated=False)
    yield bench
    bench._close()


def prepare(session: BenchSession, task: str = "infer") -> Prepared:
    reply = session.handle(Prepare(spec=spec_of(task), bare=True))
    assert isinstance(reply, PreparedReply)
    return reply.prepared


def annotations(path: str) -> Counter[str]:
    trace = read_trace(Path(path))
    return Counter(trace.names[number] for number in trace.annotations.name)


def traced(reply: Reply) -> str:
    assert isinstance(reply, TraceReply), reply
    return reply.trace.path


@pytest.mark.parametrize(("task", "phases"), [("infer", ["forward"]), ("train", ["forward", "backward", "optimizer"])])
def test_phases_and_steps_are_in_the_trace(session: BenchSession, tmp_path: Path, task: str, phases: list[str]) -> None:
    prepare(session, task)
    path = traced(session.handle(Profile(path=str(tmp_path / "a" / "t.pt.trace.json.gz"), active=2, memory=True)))
    found = annotations(path)
    assert {name: found[f"redline/{name}"] for name in phases} == dict.fromkeys(phases, 2)
    trace = read_trace(Path(path))
    assert [phase.name for phase in phases_of([HostView(Links(trace))])] == phases
    steps = steps_of([recorded(trace)])
    assert steps.count == 2
    assert len(trace.operators) > 0
    assert len(trace.shapes) > 0
    assert len(trace.allocations) > 0
    assert not trace.lost


def test_timed_blocks_carry_no_ranges(session: BenchSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(session)
    traced(session.handle(Profile(path=str(tmp_path / "t.json.gz"), active=1)))
    from redline.bench import capture as marks

    def forbidden(*_: object) -> None:
        raise AssertionError("a range in a timed block")

    monkeypatch.setattr(marks.MarkedStep, "__call__", forbidden)
    monkeypatch.setattr("torch.profiler.record_function", forbidden)
    assert isinstance(session.handle(Measure(kind="throughput", seconds=0.02)), BlockReply)


def test_for_a_profiler_from_outside_the_steps_are_only_run(
    session: BenchSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redline.bench.device.cpu import CpuDevice

    told: list[str] = []

    @contextmanager
    def telling(*words: str) -> Iterator[None]:
        told.append(words[0])
        yield
        told.extend(words[1:])

    monkeypatch.setattr(CpuDevice, "profiled", lambda self: telling("start", "stop"))
    monkeypatch.setattr(CpuDevice, "range", lambda self, name: telling(name))
    prepare(session)
    reply = session.handle(Profile(path=str(tmp_path), warmup=1, active=2, outside=True))
    assert isinstance(reply, TraceReply)
    assert told == ["redline/forward", "start", "redline/forward", "redline/forward", "stop"]
    assert reply.trace.bytes == 0


def test_a_bare_preparation_checks_no_numerics_and_says_so(session: BenchSession) -> None:
    found = prepare(session)
    assert (found.numerics.method, found.numerics.passed) == ("skipped", False)
    assert len(found.warmup.samples) == 2


def test_a_script_of_requests_reads_back(tmp_path: Path) -> None:
    requests = [Prepare(spec=spec_of("infer"), bare=True), Profile(path=str(tmp_path), outside=True)]
    assert read_script(write_script(requests)) == requests


def test_a_folder_that_cannot_be_made_is_a_failure(session: BenchSession, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    prepare(session)
    reply = session.handle(Profile(path=str(tmp_path / "file" / "t.json.gz"), active=1))
    assert isinstance(reply, FailureReply)
    assert reply.failure.stage == "profile"
