"""This process stands between a desk and its workers: it starts them, says how they ended, and leaves nothing of them behind.

With torch loaded it forks a fresh isolated worker in milliseconds; without, it starts commands, such as another interpreter,
a vendor's profiler or torchrun. `redline.launch.supervisor` is the desk's end of it.

`multiprocessing.forkserver` will not do: its children may not start DataLoader workers, it imports the user's
`__main__` again, and a killed desk leaves a busy worker behind.

The process must stay one thread and must never touch the GPU: a forked copy of either is broken.
"""

from __future__ import annotations

import fcntl
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from redline.bench.worker import RANKED, own_descriptors, volunteer_for_oom, work
from redline.system.processes import adopt_orphans, die_with_parent, end_strays, kill_group

DESCRIPTORS = 3
"""A request comes with up to this many descriptors: the log, a file with a `StartRequest`, and the line of a worker that is forked."""

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""These files belong to NVIDIA's driver, to Windows' subsystem for Linux, and to AMD's driver."""


class StartRequest(msgspec.Struct, array_like=True):
    """A worker takes this over from the desk, as bytes, because neither variables nor paths need be Unicode."""

    command: list[bytes]
    """It is empty for a worker that is forked."""
    environ: list[tuple[bytes, bytes]]
    sys_path: list[bytes]
    folder: bytes
    requested_at: float


def main(arguments: list[str]) -> None:
    """Serves the desk until it hangs up. The second of the `arguments` is the descriptor of the desk's line.

    The last one says what is loaded beforehand: `torch`, torch without its compiler (`light`), or nothing (`plain`).
    """
    control_fd, kind = int(arguments[1]), arguments[-1]
    control = socket.socket(fileno=control_fd)
    import_s = 0.0
    if kind != "plain":
        with _mortal(control):
            import_s = preload(light=kind == "light")
            if _threads() > 1 and kind != "light":
                # Some versions' compiler starts a thread or asks the GPU's driver while it is imported. This starts again without it.
                os.set_inheritable(control_fd, True)
                os.execv(sys.executable, [*sys.orig_argv[:-1], "light"])
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    os.set_blocking(wakeup_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_write)
    _tell(control, {"ready": import_s})
    workers: set[int] = set()
    while True:
        readable, _, _ = select.select([control.fileno(), wakeup_read], [], [])
        if wakeup_read in readable:
            os.read(wakeup_read, 4096)
            _report_exits(control, workers)
        if control.fileno() in readable:
            body, descriptors, _, _ = socket.recv_fds(control, 1, DESCRIPTORS)
            if not body:
                break  # the desk is gone
            workers.add(_start(control, wakeup_write, descriptors, import_s))
    for worker in workers:
        kill_group(worker)
    end_strays()
    os._exit(0)  # an orderly exit of torch takes seconds, and nobody needs it


@contextmanager
def _mortal(control: socket.socket) -> Iterator[None]:
    """Within this context the process dies the moment the desk hangs up, even inside a long import.

    The desk may send requests only after `ready`, because any message ends the process until then.
    """
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    # The mode outlives exec: a server that started itself again finds it set.
    flags = fcntl.fcntl(control, fcntl.F_GETFL) & ~os.O_ASYNC
    # Any message now sends SIGIO, which ends a process that does not handle it.
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([control], [], [], 0)[0]:
        os._exit(0)  # the desk had hung up before
    yield
    fcntl.fcntl(control, fcntl.F_SETFL, flags)


def preload(light: bool) -> float:
    """Imports what workers need, and returns the seconds it took. `light` leaves the compiler to the workers."""
    started = time.perf_counter()
    # Nearly all that an import makes stays. Looking for garbage meanwhile would take an eighth of its time and find 1 MB.
    gc.disable()
    import torch
    import torchvision.models.segmentation  # noqa: F401

    import redline.bench.session  # noqa: F401

    if not light:
        # Inductor asks for a GPU while it is imported. The device files answer here, because the driver's library may start a thread.
        asked = torch.cuda.is_available
        torch.cuda.is_available = lambda: any(map(os.path.exists, GPU_FILES))
        import torch._inductor.compile_fx

        torch.cuda.is_available = asked
    elapsed = time.perf_counter() - started
    if torch.cuda.is_initialized():
        raise RuntimeError("an import of the supervisor initialised CUDA; no worker could use the GPU")
    gc.freeze()  # otherwise a collection in a worker looks at all these objects, and copies 110 MB of pages in 0.3 s
    gc.enable()
    return elapsed


def _threads() -> int:
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1


def _start(control: socket.socket, wakeup: int, descriptors: list[int], import_s: float) -> int:
    """Forks a worker, tells the desk its number, and returns it. The child never returns from here."""
    if _threads() != 1:
        raise RuntimeError(f"the supervisor has {_threads()} threads: a fork now would hang its children")
    supervisor = os.getpid()
    child = os.fork()
    if child:
        for descriptor in descriptors:
            os.close(descriptor)
        _tell(control, {"started": child})
        return child
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        os.close(wakeup)
        control.close()
        os.setsid()
        die_with_parent(supervisor)
        _become_worker(*descriptors, import_s=import_s)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # exit handlers must not run, because they belong to the supervisor


def _become_worker(log: int, request: int, line: int | None = None, *, import_s: float) -> None:
    """Turns this fork into a worker, or into the command that was asked for, and works until the desk is done with it."""
    own_descriptors(log)
    adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.close(log)
    with open(request, "rb") as file:
        start = msgspec.msgpack.decode(file.read(), type=StartRequest)
    os.chdir(start.folder)
    if start.command:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvpe(start.command[0], start.command, dict(start.environ))
    assert line is not None
    volunteer_for_oom()
    sys.path[:] = [os.fsdecode(entry) for entry in start.sys_path]
    os.environb.clear()
    os.environb.update(start.environ)
    connection, is_ranked = socket.socket(fileno=line), RANKED in os.environ
    work(connection, import_s=import_s, requested_at=start.requested_at, is_ranked=is_ranked)


def _report_exits(control: socket.socket, workers: set[int]) -> None:
    for worker in list(workers):
        # The worker is looked at before it is collected, because until then nobody else can have its number.
        if os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        kill_group(worker)  # the worker may have left loader workers and compile workers behind
        _, status = os.waitpid(worker, 0)
        workers.discard(worker)
        end_strays(spared=workers)
        _tell(control, {"exited": worker, "status": status})


def _tell(control: socket.socket, message: dict[str, Any]) -> None:
    try:
        control.send(msgspec.msgpack.encode(message))
    except (BrokenPipeError, ConnectionResetError):
        return  # the desk is gone; the main loop ends on its next look
