"""Whatever happens to a worker becomes a `Failure`, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from alive import wait_until

from redline.launch import Session, open_door
from redline.model.errors import UsageError
from redline.model.protocol import (
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
from redline.model.record import Failure
from redline.model.spec import LaunchSpec, MeasureSpec, RunSpec, WorkloadSpec
from redline.system.locks import device_lock, physical_name

FLOOD_BYTES = 3_000_000
"""As the model writes in each step."""
MISBEHAVING = Path(__file__).parent.parent / "models" / "misbehaving.py"


def spec_of(factory: str, **launch) -> RunSpec:
    return RunSpec(
        workload=WorkloadSpec(model=f"{MISBEHAVING}:{factory}"),
        measure=MeasureSpec.for_effort("quick"),
        launch=LaunchSpec(**launch),
        device="cpu",
    )


@contextmanager
def opened(spec: RunSpec) -> Iterator[Session]:
    door = open_door(spec.launch)
    try:
        yield door.open(spec)
    finally:
        door.close()


def prepare(factory: str, **launch) -> Reply:
    spec = spec_of(factory, **launch)
    with opened(spec) as session:
        return session.ask(Prepare(spec=spec))


def failure_of(reply: Reply) -> Failure:
    assert isinstance(reply, FailureReply), reply
    return reply.failure


def answers_every_message(session: Session, spec: RunSpec, folder: Path) -> None:
    stages: list[str] = []
    prepared = session.ask(Prepare(spec=spec), lambda progress: stages.append(progress.stage))
    assert isinstance(prepared, PreparedReply), prepared
    assert prepared.prepared.isolated == (spec.launch.door != "inline")
    block = session.ask(Measure(kind="throughput", seconds=0.05, round=7))
    assert isinstance(block, BlockReply)
    assert block.block.round == 7
    assert all(sample > 0 for sample in block.block.samples)
    trace = session.ask(Profile(path=str(folder / "trace.json.gz"), active=2))
    assert isinstance(trace, TraceReply)
    assert Path(trace.trace.path).read_bytes()[:2] == b"\x1f\x8b"
    assert stages[:2] == ["device", "build"]
    assert stages[-1] == "ready"


@pytest.mark.parametrize("door", ["fork", "inline"])
def test_every_door_answers_the_same_messages(door: str, tmp_path: Path) -> None:
    spec = spec_of("sound", door=door)
    with opened(spec) as session:
        answers_every_message(session, spec, tmp_path)
        session.close()


def test_a_spawned_worker_does_what_a_forked_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it in one worker, behind a command that is really there: each takes seconds to start."""
    marker = f"redline-daemon-{os.getpid()}-spawn"
    monkeypatch.setenv("REDLINE_TEST_MARKER", marker)
    make_surroundings_hostile(tmp_path, monkeypatch)
    spec = spec_of("does_all_of_it", door="spawn", command_prefix=("env", "OMP_NUM_THREADS=1"))
    with opened(spec) as session:
        reply = session.ask(Ask(question=AskEnvironment(device="cpu")))
        assert isinstance(reply, EnvironmentAnswer)
        assert reply.environment.threads == 1
        answers_every_message(session, spec, tmp_path)
        session.ask(
            Measure(kind="throughput", seconds=0.05)
        )  # the profiler has printed too: the last line is the model's
        assert "sleep" in marked_processes(marker)
        printed = session.close().printed.splitlines()
        assert "sleep" not in marked_processes(marker)
    assert printed[-1] == "a line of the model's own"
    assert 1 < len(printed) <= 20


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
        ("leaves_saying_bye", "user", "called sys.exit('bye')"),
        ("exits_at_once", "crash", "the worker exited with status 7"),
        ("raises_a_stranger", "user", "Stop: no more"),
        ("raises_unprintable", "user", "Unprintable: (its message cannot be printed: RuntimeError)"),
        ("raises_undecodable", "user", "ValueError: no file caf\\udce9\0.py"),
        ("forks_and_goes_on", "user", "the model forked this worker, and the copy came back"),
    ],
)
def test_a_broken_worker_is_a_failure_with_its_kind(factory: str, kind: str, words: str) -> None:
    failure = failure_of(prepare(factory))
    assert failure.kind == kind
    assert words in failure.message
    assert "\n" not in failure.message
    assert failure.stage
    name = {"raises": "deed", "factory_raises": "factory_raises", "raises_a_stranger": "deed"}.get(factory)
    if name is not None:
        file, _, line = failure.where.partition(":")
        number, _, function = line.partition(" in ")
        assert (Path(file).resolve(), function) == (Path(MISBEHAVING).resolve(), name)
        assert "raise " in Path(MISBEHAVING).read_text().splitlines()[int(number) - 1]
        assert failure.where in failure.told


def test_a_collection_in_a_worker_leaves_the_pages_of_its_server_alone() -> None:
    told = failure_of(prepare("tells_what_is_frozen")).message
    assert int(told.partition(" objects")[0].split()[-1]) > 100_000


def test_a_daemon_that_a_model_left_ends_with_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    marker = f"redline-daemon-{os.getpid()}-fork"
    monkeypatch.setenv("REDLINE_TEST_MARKER", marker)
    spec = spec_of("leaves_a_daemon", door="fork")
    with opened(spec) as session:
        assert isinstance(session.ask(Prepare(spec=spec)), PreparedReply)
        assert "sleep" in marked_processes(marker)
        session.close()
        assert "sleep" not in marked_processes(marker)


def make_surroundings_hostile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables and a working folder that are not UTF-8, and more of them than a message of a socket holds."""
    folder = Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9"))
    folder.mkdir()
    (folder / "here").touch()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    monkeypatch.setenv("REDLINE_TEST_BYTES", os.fsdecode(b"caf\xe9"))
    for name in ("LONG", "LONGER", "LONGEST"):
        monkeypatch.setenv(f"REDLINE_TEST_{name}", "x" * 100_000)


def test_the_environment_reaches_the_worker_whatever_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_surroundings_hostile(tmp_path, monkeypatch)
    assert isinstance(prepare("knows_its_environment", door="fork"), PreparedReply)


def test_a_working_folder_that_was_removed_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    folder.rmdir()
    assert isinstance(prepare("sound"), PreparedReply)


def stub_torch(folder: Path, code: str) -> dict[str, str]:
    """An environment in which importing torch runs `code`."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(code)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_a_server_whose_desk_was_killed_during_the_import_ends_at_once(tmp_path: Path) -> None:
    program = (
        "from redline.launch.supervisor import Supervisor\nserver = Supervisor(forks=True)\n"
        "print(server._process.pid, flush=True)\ninput()\n"
    )
    begun = tmp_path / "begun"
    environment = stub_torch(tmp_path, f"open({str(begun)!r}, 'w').close()\nimport time\ntime.sleep(600)")
    desk = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    server = psutil.Process(int(desk.stdout.readline()))
    while not begun.exists():
        assert server.status() != psutil.STATUS_ZOMBIE
        time.sleep(0.01)
    desk.kill()
    desk.communicate()
    psutil.wait_procs([server], timeout=60)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


DESK_OF_ITS_OWN = textwrap.dedent(f"""
    import os, sys
    os.close(0), os.close(1)
    import psutil
    from redline.launch import open_door
    from redline.launch.supervisor import shared_supervisor
    from redline.model.protocol import Prepare, PreparedReply
    from redline.model.spec import LaunchSpec, MeasureSpec, RunSpec, WorkloadSpec
    spec = RunSpec(workload=WorkloadSpec(model={f"{MISBEHAVING}:sound"!r}), device="cpu",
                   launch=LaunchSpec(door="fork"), measure=MeasureSpec.for_effort("quick"))
    session = open_door(spec.launch).open(spec)
    reply = session.ask(Prepare(spec=spec))
    assert isinstance(reply, PreparedReply), reply
    worker = psutil.Process(session.pids[0])
    shared_supervisor(forks=True)._process.kill()
    psutil.wait_procs([worker], timeout=60)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "it outlived its server"
""")


def test_a_server_with_odd_imports_starts_and_its_workers_end_with_it(tmp_path: Path) -> None:
    """All of it in one desk, as each server takes seconds to start.

    Files of the working folder are not taken for modules of Python's or of ours, with stdin and stdout closed on top of
    it. A server whose imports start a thread, as the compiler of torch 2.11 does beside a GPU, starts again without
    the compiler; here a thread is started at the very beginning. And its workers end with it, also where the desk, to
    which they listen, lives on.
    """
    working, importable = tmp_path / "working", tmp_path / "importable"
    working.mkdir()
    importable.mkdir()
    for name in ("statistics", "msgspec", "psutil", "queue", "torchvision"):
        (working / f"{name}.py").write_text(f"raise RuntimeError('the wrong {name}')")
    (importable / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if any('bench.supervisor' in each for each in sys.orig_argv):\n"
        f"    print(sys.orig_argv[-1], file=open({str(tmp_path / 'starts')!r}, 'a'))\n"
        "    if sys.orig_argv[-1] != 'light':\n"
        "        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    # An empty part of it would be the working folder.
    paths = [str(importable), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", DESK_OF_ITS_OWN],
        cwd=working,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    starts = (tmp_path / "starts").read_text().split()
    assert len(starts) == 2
    assert starts[-1] == "light"


def test_memory_taken_bit_by_bit_ends_inside_its_limit() -> None:
    failure = failure_of(prepare("eats_memory_bit_by_bit", memory_limit_bytes=2 * 2**30))
    assert failure.kind == "oom"


def test_workers_prepare_at_the_same_time_and_stand_still_in_the_middle_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hanging one is stopped for longer than it may take: that time does not count."""
    slept_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + slept_s)
    monkeypatch.setattr("redline.launch.connection.time", clock)
    slow, sound = spec_of("hangs", prepare_timeout_s=600.0), spec_of("sound")
    door = open_door(slow.launch)
    try:
        hanging, other = door.open(slow), door.open(sound)
        hanging.begin(Prepare(spec=slow))
        other.begin(Prepare(spec=sound))
        assert hanging.wait(timeout_s=0.0) is None
        hanging.pause()
        assert isinstance(other.wait(), PreparedReply)
        slept_s += 700.0
        hanging.resume()
        assert hanging.wait(timeout_s=0.0) is None
        slept_s += 700.0
        assert failure_of(hanging.wait()).kind == "timeout"
        assert isinstance(other.ask(Measure(kind="throughput", seconds=0.05)), BlockReply)
    finally:
        door.close()


def test_loader_workers_run_inside_a_forked_worker() -> None:
    assert isinstance(prepare("loads_with_workers"), PreparedReply)


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
        from redline.model.protocol import Measure, Prepare
        from redline.model.spec import LaunchSpec, MeasureSpec, RunSpec, WorkloadSpec
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
    assert desk.stdout.readline().strip() == "measuring"
    assert len(marked_processes(marker)) >= 2
    desk.send_signal(signal.SIGKILL)
    desk.wait()
    desk.stdout.close()
    assert wait_until(lambda: not marked_processes(marker), 60.0)


def marked_processes(marker: str) -> list[str]:
    """Their names; each may be gone a moment later."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("REDLINE_TEST_MARKER") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
        except psutil.Error:
            continue
    return found


@pytest.fixture
def own_locks() -> None:
    """None in this file: two processes meet in the folder of the machine."""


def test_two_runs_never_hold_one_gpu(tmp_path: Path) -> None:
    """Not even with different temporary folders, or after the holder asked again. No machine has a card of these numbers."""
    program = textwrap.dedent("""
        from redline.system.locks import device_lock
        with device_lock("cuda:7777", on_wait=lambda holder: print("waiting for", holder, flush=True)):
            print("held", flush=True)
    """)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with device_lock("cuda:7777"), device_lock("cuda:7778"), device_lock("cpu"), device_lock("cpu"):
        with device_lock("cuda:7777", on_wait=pytest.fail):
            pass
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
