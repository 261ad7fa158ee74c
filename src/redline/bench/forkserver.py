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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from redline.bench.worker import die_with_parent, own_descriptors, serve, volunteer_for_oom

MAX_MESSAGE = 1 << 20

SAFE_IMPORT = {
    # OpenBLAS starts its threads while numpy is imported.
    "OPENBLAS_NUM_THREADS": "1",
    # Inductor asks for CUDA while it is imported; asked through NVML, the CUDA driver stays out of this process.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Set while importing, and put back before the first fork."""


def main(control_fd: int, light: bool) -> None:
    control = socket.socket(fileno=control_fd)
    import_s = preload(light)
    if _threads() > 1 and not light:
        # Some version's compiler starts a thread or asks the GPU's driver while it is imported: do without it.
        os.set_inheritable(control_fd, True)
        os.execv(sys.executable, [sys.executable, "-m", "redline.bench.forkserver", str(control_fd), "light"])
    _tell(control, {"ready": import_s})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    os.set_blocking(wakeup_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_write)
    children: set[int] = set()
    while True:
        readable, _, _ = select.select([control.fileno(), wakeup_read], [], [])
        if wakeup_read in readable:
            os.read(wakeup_read, 4096)
            _report_exits(control, children)
        if control.fileno() in readable:
            body, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, 2)
            if not body:
                break  # the desk is gone
            request = msgspec.msgpack.decode(body)
            children.add(_fork(control, wakeup_write, descriptors, {**request, "import_s": import_s}))
    for child in children:
        _kill_group(child)


def preload(light: bool) -> float:
    """Import what workers need; returns the seconds it took. `light` leaves the compiler to the workers."""
    started = time.perf_counter()
    with _variables(SAFE_IMPORT):
        import torch
        import torchvision.models.segmentation  # noqa: F401

        import redline.bench.session  # noqa: F401

        if not light:
            import torch._inductor.compile_fx
    elapsed = time.perf_counter() - started
    if torch.cuda.is_initialized():
        raise RuntimeError("an import of the fork server initialised CUDA; no worker could use the GPU")
    return elapsed


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    held = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in held.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _threads() -> int:
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1


def _fork(control: socket.socket, wakeup: int, descriptors: list[int], request: dict[str, Any]) -> int:
    if _threads() != 1:
        raise RuntimeError(f"the fork server has {_threads()} threads: a fork now would hang its children")
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
    connection, log = descriptors
    _become_worker(connection, log, request)
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
    main(int(sys.argv[1]), light="light" in sys.argv[2:])
