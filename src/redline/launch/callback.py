"""A place where a worker calls back.

A profiler starts its target through helpers of its own, which need not hand on open files: behind one, the worker gets
the address of a socket instead of the socket itself.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY_S = 0.2


class Callback:
    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="redline-"))  # ours alone: nobody else can call
        self._socket = socket.socket(socket.AF_UNIX)
        place = str(self._folder / "door")
        self._socket.bind(place)
        self._socket.listen(1)
        self.address = f"unix:{place}"

    def wait(self, is_alive: Callable[[], bool], timeout_s: float) -> socket.socket | None:
        """The worker's call; None when it ended first, or did not call in time."""
        deadline = time.monotonic() + timeout_s
        self._socket.settimeout(LOOK_EVERY_S)
        try:
            while time.monotonic() < deadline:
                try:
                    return self._socket.accept()[0]
                except TimeoutError:
                    if not is_alive():
                        return None
            return None
        finally:
            self.close()

    def close(self) -> None:
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)
