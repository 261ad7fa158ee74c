"""Telling processes apart, and leaving none behind. Real processes, killed for real."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
from alive import is_alive, wait_until

from redline.system import processes
from redline.system.processes import (
    adopt_orphans,
    die_with_parent,
    end_strays,
    is_gone,
    keep_standard_descriptors,
    kill_group,
    this_process,
)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")


def in_child(deed: Callable[[], object]) -> int:
    """A forked child that does it and ends with status 0."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            deed()
            status = 0
        finally:
            os._exit(status)
    return child


def test_a_process_is_told_from_its_children_and_from_others_of_its_number() -> None:
    read, write = os.pipe()
    child = in_child(lambda: (os.write(write, this_process().encode()), time.sleep(600)))
    name = os.read(read, 1000).decode()
    assert this_process() == this_process() != name
    assert not is_gone(this_process())
    assert not is_gone(name)
    os.kill(child, signal.SIGKILL)
    assert wait_until(lambda: is_gone(name)), "a zombie has ended, too"
    os.waitpid(child, 0)
    assert is_gone(name)
    machine, pid, started = this_process().rsplit(" ", 2)
    earlier = f"{float(started) - 1:.2f}"
    assert is_gone(f"{machine} {pid} {earlier}"), "the number was given again"
    assert not is_gone(f"elsewhere/1/pid {pid} {earlier}"), "of another machine nothing is known"


@pytest.mark.parametrize("what", ["clock", "hidden"])
def test_neither_a_set_clock_nor_a_hidden_process_is_taken_for_an_end(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def hidden(pid: int | None = None) -> psutil.Process:
        raise psutil.AccessDenied(pid)

    name, booted, started = this_process(), psutil.boot_time(), psutil.Process().create_time()
    if what == "hidden":
        monkeypatch.setattr(psutil, "Process", hidden)
    else:
        monkeypatch.setattr(psutil, "boot_time", lambda: booted + 3600)
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: started + 3600)
    assert not is_gone(name)


class TestDyingWithTheParent:
    @linux_only
    def test_a_killed_parent_takes_it_along(self) -> None:
        read, write = os.pipe()

        def parent() -> None:
            here = os.getpid()
            in_child(lambda: (die_with_parent(here), os.write(write, f"{os.getpid()} ".encode()), time.sleep(600)))
            time.sleep(600)

        child = in_child(parent)
        grandchild = int(os.read(read, 100))
        assert is_alive(grandchild)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert wait_until(lambda: not is_alive(grandchild))

    def test_one_whose_parent_has_gone_before_goes_at_once(self) -> None:
        child = in_child(lambda: (die_with_parent(os.getpid()), time.sleep(600)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_group_is_ended_whole() -> None:
    read, write = os.pipe()

    def leader() -> None:
        os.setsid()
        member = in_child(lambda: time.sleep(600))
        os.write(write, f"{member} ".encode())
        time.sleep(600)

    child = in_child(leader)
    member = int(os.read(read, 100))
    kill_group(child)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert wait_until(lambda: not is_alive(member))
    kill_group(child)  # nobody is left, which is nothing to complain of


def daemonise(write: int) -> None:
    """Leaves parent, group and session, and tells its number."""
    middle = in_child(
        lambda: (os.setsid(), in_child(lambda: (os.write(write, f"{os.getpid():20}".encode()), time.sleep(600))))
    )
    os.waitpid(middle, 0)


@linux_only
def test_strays_are_ended_with_all_they_started_and_the_spared_are_not() -> None:
    read, write = os.pipe()

    def house() -> None:
        assert adopt_orphans()
        spared = in_child(lambda: time.sleep(600))
        daemonise(write)
        stray = in_child(lambda: (daemonise(write), time.sleep(600)))
        daemons = [int(os.read(read, 20)), int(os.read(read, 20))]
        end_strays(spared={spared})
        left = psutil.Process().children(recursive=True)
        assert [process.pid for process in left] == [spared], (left, stray)
        assert not any(map(is_alive, daemons))
        end_strays()
        assert psutil.Process().children() == []

    assert os.waitstatus_to_exitcode(os.waitpid(in_child(house), 0)[1]) == 0


def test_one_that_cannot_be_ended_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, kills = iter(range(1000)), []
    stray = SimpleNamespace(pid=1, children=lambda recursive: [], kill=lambda: kills.append(1))
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(children=lambda: [stray]))
    monkeypatch.setattr(psutil, "wait_procs", lambda strays, timeout: None)
    monkeypatch.setattr(processes.time, "monotonic", lambda: float(next(clock)))
    end_strays()
    assert 1 < len(kills) < 100


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1)])
def test_closed_standard_descriptors_are_opened_again(closed: tuple[int, ...]) -> None:
    def deed() -> None:
        for descriptor in closed:
            os.close(descriptor)
        keep_standard_descriptors()
        keep_standard_descriptors()
        assert min(os.pipe()) > 2
        assert 0 not in closed or os.read(0, 1) == b""

    assert os.waitstatus_to_exitcode(os.waitpid(in_child(deed), 0)[1]) == 0
