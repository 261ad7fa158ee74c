"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(fact: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not fact() and time.monotonic() < deadline:
        time.sleep(0.01)
    return fact()
