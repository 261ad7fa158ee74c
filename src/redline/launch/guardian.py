"""A process between desk and spawned worker that outlives neither: when the desk is gone, the worker's whole group goes.

Started as `python -m redline.launch.guardian FD COMMAND…`. It tells the worker's process id on the socket FD, then
waits for the worker to end (and says how) or for the desk to hang up (and kills whatever the worker started).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys

REPLY_BYTES = 64


def main(descriptor: int, command: list[str]) -> None:
    desk = socket.socket(fileno=descriptor)
    inherited = [int(word) for word in os.environ.pop("REDLINE_WORKER_FDS").split(",") if word]
    worker = subprocess.Popen(command, pass_fds=inherited, process_group=0)
    for number in inherited:
        os.close(number)
    desk.send(str(worker.pid).encode())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended = os.pidfd_open(worker.pid)
    readable, _, _ = select.select([desk.fileno(), ended], [], [])
    status = worker.wait() if ended in readable else None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)  # also what a worker that ended by itself has left behind
    if status is not None:
        desk.send(str(status).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
