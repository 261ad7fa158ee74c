"""One run at a time per GPU: a lock the kernel lets go of when its holder dies, however that happens."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.2


@contextmanager
def device_lock(device: str, on_wait: Callable[[str], None] = lambda holder: None) -> Iterator[None]:
    """Hold `device` (`cuda:0`, …) alone; waits for another holder and says who it is. The CPU is free for all."""
    if device == "cpu":
        yield
        return
    path = _lock_path(device)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _acquire(descriptor, on_wait)
        # Always as long, so that nothing of a former holder stays behind it; cutting the file off costs milliseconds.
        os.pwrite(descriptor, f"process {os.getpid()}".ljust(40).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, on_wait: Callable[[str], None]) -> None:
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not told:
                on_wait(os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "another run")
                told = True
            time.sleep(POLL_S)


def _lock_path(device: str) -> Path:
    """The same file for everyone on the machine; by the card's own name where the driver tells it."""
    folder = Path(tempfile.gettempdir()) / "redline-locks"
    folder.mkdir(exist_ok=True)
    if os.stat(folder).st_uid == os.getuid():
        folder.chmod(0o1777)  # other users lock the same cards
    return folder / f"{re.sub('[^A-Za-z0-9-]', '-', physical_name(device))}.lock"


def physical_name(device: str) -> str:
    """`cuda:0` counts what is visible; two runs with different CUDA_VISIBLE_DEVICES may mean the same card."""
    kind, _, index_text = device.partition(":")
    index = int(index_text or 0)
    variable = "CUDA_VISIBLE_DEVICES" if kind == "cuda" else "HIP_VISIBLE_DEVICES"
    visible = [part.strip() for part in os.environ.get(variable, "").split(",") if part.strip()]
    identity = visible[index] if index < len(visible) else str(index)
    return _uuid_of(identity) or f"{kind}-{identity}" if kind == "cuda" else f"{kind}-{identity}"


def _uuid_of(identity: str) -> str | None:
    if identity.startswith(("GPU-", "MIG-")):
        return identity
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(int(identity)))
    except (ImportError, ValueError, pynvml.NVMLError):
        return None
    return uuid.decode() if isinstance(uuid, bytes) else str(uuid)
