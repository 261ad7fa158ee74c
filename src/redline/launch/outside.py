"""Programs that are no workers: a profiler that runs its target again and again, and what reads its files afterwards."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from redline.errors import DoorError
from redline.launch.connection import log_tail, worker_log
from redline.launch.spawn import start_worker
from redline.protocol import Request, write_script

FOLLOW_UP_TIMEOUT_S = 600.0


def run_script(prefix: Sequence[str], requests: Sequence[Request], folder: Path, timeout_s: float) -> None:
    """A worker behind a command that does what it is told from a file, as often as the command starts it."""
    script = folder / "requests.msgpack"
    script.write_bytes(write_script(requests))
    log = worker_log()
    process = start_worker(prefix, f"script:{script}", log)
    status = process.wait(timeout_s)
    if status is None:
        process.kill()
    said = log_tail(log).strip().splitlines()
    log.close()
    if status is None:
        raise DoorError(f"{prefix[0]} did not end within {timeout_s:g} s; it was stopped")
    if status != 0:
        raise DoorError(f"{prefix[0]} failed: {said[-1] if said else f'status {status >> 8}'}")


def run_after(command: Sequence[str], output: Path, timeout_s: float = FOLLOW_UP_TIMEOUT_S) -> None:
    """Run a command to its end, what it prints going to a file."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        raise DoorError(f"no such command: {command[0]!r}") from None
    except subprocess.TimeoutExpired:
        raise DoorError(f"{command[0]} {command[1]} did not end within {timeout_s:g} s; it was stopped") from None
    output.write_bytes(done.stdout)
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise DoorError(f"{command[0]} {command[1]} failed: {said[-1] if said else f'status {done.returncode}'}")
