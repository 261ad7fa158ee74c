"""Starting a script with the hooks, its signals and exit codes, and reading what the hooks write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from redline.bench.watch.spool import CHUNK, DATA, KINDS, ROW, Spool
from redline.launch.watch import (
    START,
    SpoolReader,
    run_watched,
    script_command,
    watching_environment,
)
from redline.model.errors import UsageError
from redline.system.telemetry.card import Card
from redline.system.telemetry.meters import Meters

SHELL = ["/bin/sh", "-c"]


def quietly(_: int) -> None:
    return


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", -9), ("kill -TERM $$", -15)]
)
def test_the_exit_code_or_the_signal_is_told(script: str, code: int) -> None:
    assert run_watched([*SHELL, script], dict(os.environ), quietly) == code


def test_a_signal_sent_to_us_goes_on_to_the_script(tmp_path: Path) -> None:
    """In a process of its own: other threads of this one might get the signal instead."""
    ready = tmp_path / "ready"
    script = f"trap 'exit 23' USR1; touch {ready}; while :; do sleep 0.05; done"
    program = (
        "import os, sys; from redline.launch.watch import run_watched; "
        f"sys.exit(run_watched({[*SHELL, script]!r}, dict(os.environ), lambda pid: None))"
    )
    watching = subprocess.Popen([sys.executable, "-c", program])
    while not ready.exists():
        assert watching.poll() is None
        time.sleep(0.01)
    watching.send_signal(signal.SIGUSR1)
    assert watching.wait(60) == 23


def test_our_own_signals_are_as_before_afterwards() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGTERM)
    run_watched([*SHELL, "exit 0"], dict(os.environ), quietly)
    assert (signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGTERM)) == before


def test_a_script_gets_an_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert script_command([str(script), "--lr", "1"]) == [sys.executable, str(script), "--lr", "1"]
    assert script_command(["-m", "package"]) == [sys.executable, "-m", "package"]
    assert script_command(["sh", "-c", "x"]) == ["sh", "-c", "x"]
    script.chmod(0o755)  # without a line that names its interpreter it cannot start itself
    assert script_command([str(script)]) == [sys.executable, str(script)]
    script.write_text("#!/usr/bin/env python\n")
    assert script_command([str(script)]) == [str(script)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "name the command"),
        ("no-such-thing", "no such command"),
        ("--proflie", "no such option"),
        ("-m", "no such option"),
    ],
)
def test_a_mistake_in_the_command_is_told(words: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        script_command(words.split())


def test_an_interpreter_without_torch_is_left_as_it_is(tmp_path: Path) -> None:
    """Also with a `sitecustomize` of its own, which must run, and without our folder on its path."""
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.was_here = True")
    environment = watching_environment(tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)}, profiles=True)
    script = "import sys, json; print(json.dumps([was_here, sys.path, 'torch' in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    was_here, path, has_torch = json.loads(done.stdout)
    assert (was_here, has_torch, done.stderr) == (True, False, "")
    assert str(START) not in path
    assert str(tmp_path) in path


def test_torch_is_watched_also_where_somebody_only_asked_for_it_before(tmp_path: Path) -> None:
    """As transformers does: is torch there? A stand-in for torch, which takes no time to import."""
    (tmp_path / "torch.py").write_text("name = 'a stand-in'")
    environment = watching_environment(tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)})
    script = "import importlib.util as u; print(u.find_spec('torch') is not None); import torch; print(torch.name)"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["True", "a stand-in"]
    assert "this process is not watched" in done.stderr  # the hooks were put in, and found no torch


class Rows:
    """Keeps the rows that it is given to read."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def read(self, rows: Any) -> None:
        self.rows += rows


def test_rows_and_facts_come_back_as_they_are_written(tmp_path: Path) -> None:
    """Across the pieces in which the file is mapped, and without what a killed process has begun to write."""
    spool, reader = Spool(str(tmp_path)), SpoolReader(tmp_path, Rows)
    assert reader.refresh() == []
    many = CHUNK // ROW.size + 5
    for number in range(many):
        spool.put(float(number % len(KINDS)), 2.0, 3.0, 1.0 + number)
    spool.fact("process", rank=3)
    (log,) = reader.refresh()
    assert [row[4] for row in log.reader.rows] == list(range(many))
    assert log.reader.rows[many - 1] == (KINDS[(many - 1) % len(KINDS)], 2.0, 3.0, float(many), many - 1)
    assert log.fact("process")["rank"] == 3
    spool.put(DATA, 0.0, 1.0, 0.0)  # the time is written last
    with next(tmp_path.glob("*.facts")).open("ab") as file:
        file.write(b'{"kind": "pul')
    reader.refresh()
    assert (len(log.reader.rows), log.fact("pulse")) == (many, {})


class FakeCard(Card):
    """A card that tells what it is asked, and whose counter moves by 50 J per look."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._joules = 0.0

    def facts(self) -> dict[str, object]:
        return {"uuid": "GPU-abc", "driver": "580"}

    def reading(self) -> dict[str, object]:
        return {"utilisation": 0.5, "power_w": None}

    def energy_j(self) -> float:
        self._joules += 50.0
        return self._joules

    def processes(self) -> dict[int, None]:
        return dict.fromkeys(self._pids)


def test_only_the_cards_in_use_are_metered() -> None:
    meters = Meters([FakeCard()])
    for _ in range(3):
        meters.look(os.getpid(), at_once=True)
    assert (meters.energy_j({"abc"}), meters.utilisation({"abc"})) == (100.0, 0.5)
    assert (meters.energy_j({"another"}), meters.utilisation({"another"}), meters.facts({"another"})) == (
        None,
        None,
        {},
    )
    assert meters.telemetry({"abc"})[0].power_w is None
    assert meters.resident[0][1] > 0


def test_a_programs_gpu_is_looked_at_while_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.system.telemetry.meters.LOOK_S", 0.001)
    looked = threading.Semaphore(0)

    class Card(FakeCard):
        def reading(self) -> dict[str, object]:
            looked.release()
            return {"utilisation": 0.5}

    meters = Meters([Card()])
    meters.begin()
    assert all(looked.acquire(timeout=30) for _ in range(3))
    meters.end()
    assert len(meters.telemetry({"abc"})) >= 3
    assert not meters.resident  # looking for processes is left out


def test_without_a_gpu_no_thread_is_started() -> None:
    before = set(threading.enumerate())  # those of an earlier test may end meanwhile
    meters = Meters([])
    meters.begin()
    assert set(threading.enumerate()) <= before
    meters.end()


def test_somebody_else_on_the_card_is_told() -> None:
    ours, strange = os.getpid(), 1
    for pids, found in (((ours, strange), 1), ((ours,), 0), ((strange,), 0)):
        meters = Meters([FakeCard(*pids)])
        meters.look(ours)
        meters.look(ours, at_once=True)
        assert len(meters.telemetry({"abc"})[-1].foreign) == found
