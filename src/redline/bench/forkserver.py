"""A small fork server: imports torch once, then forks a fresh isolated worker in milliseconds whenever asked.

`multiprocessing.forkserver` will not do: its children may not start DataLoader workers, it imports the user's
`__main__` again, and a killed desk leaves a busy worker behind. Started as `python -m redline.bench.forkserver FD`.

It must stay one thread and must never touch the GPU: a forked copy of either is broken.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from typing import Any

import msgspec

from redline.bench.process import die_with_parent, own_descriptors, volunteer_for_oom

MAX_MESSAGE = 1 << 20


def main(control_fd: int) -> None:
    control = socket.socket(fileno=control_fd)
    import_s = preload()
    _tell(control, {"ready": import_s})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    os.set_blocking(wakeup_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_write)
    children: set[int] = set()
    while True:
        readable, _, _ = select.select([control, wakeup_read], [], [])
        if wakeup_read in readable:
            os.read(wakeup_read, 4096)
            _report_exits(control, children)
        if control in readable:
            body, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, 2)
            if not body:
                break  # the desk is gone
            request = msgspec.msgpack.decode(body)
            children.add(_fork(control, wakeup_write, descriptors, {**request, "import_s": import_s}))
    for child in children:
        _kill_group(child)


def preload() -> float:
    """Import what workers need; returns the seconds it took."""
    # OpenBLAS starts its threads while numpy is imported, and a second thread makes every fork unsafe.
    previous = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    started = time.perf_counter()
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx  # saves a compiling worker more than a second
    import torchvision.models.segmentation  # noqa: F401

    import redline.bench.session  # noqa: F401

    elapsed = time.perf_counter() - started
    if previous is None:
        del os.environ["OPENBLAS_NUM_THREADS"]
    else:
        os.environ["OPENBLAS_NUM_THREADS"] = previous
    if torch.cuda.is_initialized():
        raise RuntimeError("an import of the fork server initialised CUDA; no worker could use the GPU")
    return elapsed


def _fork(control: socket.socket, wakeup: int, descriptors: list[int], request: dict[str, Any]) -> int:
    if sys.platform == "linux" and len(threads := os.listdir("/proc/self/task")) != 1:
        raise RuntimeError(f"the fork server has {len(threads)} threads: a fork now would hang its children")
    server = os.getpid()
    child = os.fork()
    if child:
        for descriptor in descriptors:
            os.close(descriptor)
        _tell(control, {"forked": child})
        return child
    signal.set_wakeup_fd(-1)
    os.close(wakeup)
    control.close()
    os.setsid()
    die_with_parent(server)
    _become_worker(*descriptors, request)
    os._exit(0)


def _become_worker(connection_fd: int, log_fd: int, request: dict[str, Any]) -> None:
    own_descriptors(log_fd)
    os.close(log_fd)
    volunteer_for_oom()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.chdir(request["cwd"])
    sys.path[:] = request["sys_path"]
    os.environ.clear()
    os.environ.update(request["environ"])
    from redline.bench.worker import serve

    status = 1
    try:
        serve(socket.socket(fileno=connection_fd), import_s=request["import_s"], requested_at=request["requested_at"])
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # no exit handlers: those belong to the server


def _report_exits(control: socket.socket, children: set[int]) -> None:
    for child in list(children):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            children.discard(child)
            _kill_group(child)  # what the worker left behind: loader workers, compile workers
            _tell(control, {"exited": child, "status": status})


def _kill_group(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _tell(control: socket.socket, message: dict[str, Any]) -> None:
    try:
        control.send(msgspec.msgpack.encode(message))
    except (BrokenPipeError, ConnectionResetError):
        return  # the desk is gone; the main loop ends on its next look


if __name__ == "__main__":
    main(int(sys.argv[1]))
