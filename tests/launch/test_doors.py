"""Whatever happens to a worker becomes a `Failure`, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from redline.errors import UsageError
from redline.launch import open_door
from redline.launch.connection import WorkerSession
from redline.launch.lock import device_lock, physical_name
from redline.protocol import (
    Ask,
    AskEnvironment,
    BlockReply,
    EnvironmentAnswer,
    FailureReply,
    Measure,
    Prepare,
    PreparedReply,
    Profile,
    Reply,
    TraceReply,
)
from redline.record import Failure
from redline.spec import LaunchSpec, MeasureSpec, RunSpec, WorkloadSpec

MISBEHAVING = Path(__file__).parent.parent / "models" / "misbehaving.py"


def spec_of(factory: str, **launch) -> RunSpec:
    return RunSpec(
        workload=WorkloadSpec(model=f"{MISBEHAVING}:{factory}"),
        measure=MeasureSpec.for_effort("quick"),
        launch=LaunchSpec(**launch),
        device="cpu",
    )


def prepare(factory: str, **launch) -> Reply:
    spec = spec_of(factory, **launch)
    door = open_door(spec.launch)
    try:
        return door.open(spec).ask(Prepare(spec=spec))
    finally:
        door.close()


def failure_of(reply: Reply) -> Failure:
    assert isinstance(reply, FailureReply), reply
    return reply.failure


@pytest.mark.parametrize("door", ["fork", "spawn", "inline"])
def test_every_door_answers_the_same_messages(door: str, tmp_path: Path) -> None:
    spec = spec_of("sound", door=door)
    opened = open_door(spec.launch)
    stages: list[str] = []
    try:
        session = opened.open(spec)
        prepared = session.ask(Prepare(spec=spec), lambda progress: stages.append(progress.stage))
        assert isinstance(prepared, PreparedReply), prepared
        assert prepared.prepared.isolated == (door != "inline")
        block = session.ask(Measure(kind="throughput", seconds=0.05, round=7))
        assert isinstance(block, BlockReply)
        assert block.block.round == 7
        assert all(sample > 0 for sample in block.block.samples)
        trace = session.ask(Profile(path=str(tmp_path / "trace.json.gz"), active=2))
        assert isinstance(trace, TraceReply)
        assert Path(trace.trace.path).read_bytes()[:2] == b"\x1f\x8b"
        session.close()
    finally:
        opened.close()
    assert stages[:2] == ["device", "build"]
    assert stages[-1] == "ready"


def test_an_inline_bench_leaves_torch_as_it_was() -> None:
    import torch

    held = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32, torch.get_rng_state()
    spec = msgspec.structs.replace(spec_of("sound", door="inline"), threads=1)
    session = open_door(spec.launch).open(spec)
    assert isinstance(session.ask(Prepare(spec=spec)), PreparedReply)
    session.close()
    assert held[:2] == (torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32)
    assert torch.equal(held[2], torch.get_rng_state())


@pytest.mark.parametrize(
    ("factory", "kind", "words"),
    [
        ("segfaults", "crash", "SIGSEGV"),
        ("killed", "crash", "SIGKILL"),
        ("eats_memory", "oom", "memory"),
        ("raises", "user", "ValueError: this forward"),
        ("factory_raises", "user", "no such dataset"),
        ("leaves_with_seven", "user", "called sys.exit(7)"),
    ],
)
def test_a_broken_worker_is_a_failure_with_its_kind(factory: str, kind: str, words: str) -> None:
    failure = failure_of(prepare(factory))
    assert failure.kind == kind
    assert words in failure.message
    assert "\n" not in failure.message
    assert failure.stage


@pytest.mark.parametrize(("factory", "name"), [("raises", "deed"), ("factory_raises", "factory_raises")])
def test_a_failure_names_the_line_of_the_users_file(factory: str, name: str) -> None:
    failure = failure_of(prepare(factory))
    file, _, line = failure.where.partition(":")
    number, _, function = line.partition(" in ")
    assert Path(file).resolve() == Path(MISBEHAVING).resolve()
    assert function == name
    assert "raise " in Path(MISBEHAVING).read_text().splitlines()[int(number) - 1]
    assert failure.where in failure.told


@pytest.mark.parametrize("door", ["fork", "spawn"])
def test_what_a_model_prints_is_kept(door: str) -> None:
    spec = spec_of("prints", door=door)
    opened = open_door(spec.launch)
    try:
        session = opened.open(spec)
        assert isinstance(session.ask(Prepare(spec=spec)), PreparedReply)
        printed = session.close().printed.splitlines()
    finally:
        opened.close()
    assert printed[-1] == "a line of the model's own"
    assert 1 < len(printed) <= 20


def test_memory_taken_bit_by_bit_ends_inside_its_limit() -> None:
    failure = failure_of(prepare("eats_memory_bit_by_bit", memory_limit_bytes=4 * 2**30))
    assert failure.kind == "oom"


def test_a_hanging_worker_is_stopped_in_time() -> None:
    failure = failure_of(prepare("hangs", prepare_timeout_s=3.0))
    assert failure.kind == "timeout"
    assert "3 s" in failure.message


def test_a_worker_that_dies_while_timed_fails_in_that_stage() -> None:
    spec = spec_of("killed_while_timed")
    door = open_door(spec.launch)
    try:
        session = door.open(spec)
        assert isinstance(session.ask(Prepare(spec=spec)), PreparedReply)
        for _ in range(100):
            reply = session.ask(Measure(kind="throughput", seconds=0.2))
            if isinstance(reply, FailureReply):
                break
        assert failure_of(reply).stage == "measure"
        assert failure_of(session.ask(Measure(kind="throughput", seconds=0.1))).kind == "crash"
    finally:
        door.close()


def test_a_paused_worker_uses_no_processor_and_goes_on_when_asked() -> None:
    spec = spec_of("sound")
    door = open_door(spec.launch)
    try:
        session = door.open(spec)
        assert isinstance(session.ask(Prepare(spec=spec)), PreparedReply)
        session.pause()
        assert isinstance(session, WorkerSession)
        deadline = time.monotonic() + 10
        while (status := psutil.Process(session.pid).status()) != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.01)
        assert status == psutil.STATUS_STOPPED
        assert isinstance(session.ask(Measure(kind="throughput", seconds=0.05)), BlockReply)
    finally:
        door.close()


def test_workers_prepare_at_the_same_time_and_stand_still_in_the_middle_of_it() -> None:
    """The hanging one is stopped for longer than it may take: that time does not count."""
    slow, sound = spec_of("hangs", prepare_timeout_s=4.0), spec_of("sound")
    door = open_door(slow.launch)
    try:
        hanging, other = door.open(slow), door.open(sound)
        hanging.begin(Prepare(spec=slow))
        other.begin(Prepare(spec=sound))
        assert hanging.wait(timeout_s=0.0) is None
        hanging.pause()
        assert isinstance(other.wait(), PreparedReply)
        time.sleep(5.0)
        hanging.resume()
        assert hanging.wait(timeout_s=0.0) is None
        assert failure_of(hanging.wait()).kind == "timeout"
        assert isinstance(other.ask(Measure(kind="throughput", seconds=0.05)), BlockReply)
    finally:
        door.close()


def test_loader_workers_run_inside_a_forked_worker() -> None:
    assert isinstance(prepare("loads_with_workers"), PreparedReply)


def test_a_command_in_front_of_the_worker_is_really_there() -> None:
    spec = spec_of("sound", door="spawn", command_prefix=("env", "OMP_NUM_THREADS=1"))
    door = open_door(spec.launch)
    try:
        reply = door.open(spec).ask(Ask(question=AskEnvironment(device="cpu")))
    finally:
        door.close()
    assert isinstance(reply, EnvironmentAnswer)
    assert reply.environment.threads == 1


def test_a_missing_command_in_front_is_told_in_one_line() -> None:
    spec = spec_of("sound", door="spawn", command_prefix=("no-such-profiler",))
    with pytest.raises(UsageError, match="no-such-profiler"):
        open_door(spec.launch).open(spec)


@pytest.mark.parametrize("door", ["fork", "spawn"])
def test_a_desk_killed_outright_leaves_no_process_behind(door: str, tmp_path: Path) -> None:
    """The desk measures a model that left a helper process; then the desk gets SIGKILL."""
    marker = f"redline-orphan-{os.getpid()}-{door}"
    program = textwrap.dedent(f"""
        from redline.launch import open_door
        from redline.protocol import Measure, Prepare
        from redline.spec import LaunchSpec, MeasureSpec, RunSpec, WorkloadSpec
        spec = RunSpec(workload=WorkloadSpec(model={f"{MISBEHAVING}:reports_its_process"!r}), device="cpu",
                       launch=LaunchSpec(door={door!r}), measure=MeasureSpec.for_effort("quick"))
        session = open_door(spec.launch).open(spec)
        session.ask(Prepare(spec=spec))
        print("measuring", flush=True)
        while True:
            session.ask(Measure(kind="throughput", seconds=5.0))
    """)
    environment = {**os.environ, "REDLINE_TEST_MARKER": marker}
    desk = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, text=True)
    assert desk.stdout is not None
    assert desk.stdout.readline().strip() == "measuring"
    assert len(marked_processes(marker)) >= 2
    desk.send_signal(signal.SIGKILL)
    desk.wait()
    desk.stdout.close()
    deadline = time.monotonic() + 20
    while (left := marked_processes(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def marked_processes(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("REDLINE_TEST_MARKER") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_two_runs_never_hold_one_gpu(tmp_path: Path) -> None:
    """Not even with different temporary folders. No machine has a card of these numbers."""
    program = textwrap.dedent("""
        from redline.launch.lock import device_lock
        with device_lock("cuda:7777", on_wait=lambda holder: print("waiting for", holder, flush=True)):
            print("held", flush=True)
    """)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with device_lock("cuda:7777"), device_lock("cuda:7778"), device_lock("cpu"), device_lock("cpu"):
        other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
        assert other.stdout is not None
        assert other.stdout.readline().strip() == f"waiting for process {os.getpid()}"
    assert other.stdout.readline().strip() == "held"
    other.wait()
    other.stdout.close()


def test_a_lock_goes_by_the_physical_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    seen_through_mask = physical_name("cuda:1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert physical_name("cuda:1") == seen_through_mask
