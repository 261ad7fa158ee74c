"""Commands behind a supervisor: how they ended is told, and nothing of them stays. Real processes, killed for real."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from alive import is_alive, wait_until

from redline.launch.connection import log_tail, worker_log
from redline.launch.supervisor import Supervisor
from redline.model.spec import LaunchSpec

LAUNCH = LaunchSpec()


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor(forks=False)
    yield supervisor
    supervisor.close()


def test_how_each_command_ended_is_told_and_ctrl_c_is_for_the_desk(supervisor: Supervisor) -> None:
    with worker_log() as log:
        scripts = ("exit 7", "kill -9 $$", "sleep 0.2; echo last words; exit 0")
        processes = [supervisor.start(LAUNCH, log, command=["sh", "-c", script]) for script in scripts]
        supervisor._process.send_signal(signal.SIGINT)
        missing = supervisor.start(LAUNCH, log, command=["/no/such/command"])
        assert [process.wait(60.0) for process in (*processes, missing)] == [7 << 8, signal.SIGKILL, 0, 1 << 8]
        assert "last words" in log_tail(log)
        assert "No such file" in log_tail(log)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
@pytest.mark.parametrize("how", ["ends", "is killed", "desk hangs up"])
def test_nothing_that_a_command_started_stays(supervisor: Supervisor, tmp_path: Path, how: str) -> None:
    """Neither a child of its group nor a daemon; and what another command started lives on."""
    pids = tmp_path / "pids"
    both = f"while [ $(wc -l < {pids}) -lt 2 ]; do sleep 0.01; done; "
    script = f"sleep 600 & echo $! >> {pids}; setsid -f sh -c 'echo $$ >> {pids}; exec sleep 600'; {both}"
    with worker_log() as log:
        other = supervisor.start(LAUNCH, log, command=["sh", "-c", "sleep 600 & setsid -f sleep 600; wait"])
        process = supervisor.start(LAUNCH, log, command=["sh", "-c", script + ("" if how == "ends" else "sleep 600")])
        assert wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        assert wait_until(lambda: len(psutil.Process(other.pid).children()) == 2, 60.0), psutil.Process(
            other.pid
        ).children()
        started = [process.pid, *map(int, pids.read_text().split())]
        others = [other.pid, *(child.pid for child in psutil.Process(other.pid).children())]
        if how == "desk hangs up":
            supervisor.close()
            assert not any(map(is_alive, [*started, *others]))
            return
        if how == "is killed":
            process.kill()
        process.wait(60.0)
        assert not any(map(is_alive, started))
        assert all(map(is_alive, others))


def test_a_killed_supervisor_takes_its_commands_along(supervisor: Supervisor) -> None:
    with worker_log() as log:
        process = supervisor.start(LAUNCH, log, command=["sleep", "600"])
        os.kill(supervisor._process.pid, signal.SIGKILL)
        assert wait_until(lambda: not is_alive(process.pid))
        assert process.wait(10.0) == signal.SIGKILL
