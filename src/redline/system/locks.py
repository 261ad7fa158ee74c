"""Locks between processes are files that the kernel unlocks when their holder dies. One of them lets one run at a time use a GPU.

Locks that all users of a machine share live in one folder, wherever a process keeps its temporary files.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from redline.model.errors import UsageError

MACHINE_FOLDER = Path("/tmp/redline-locks")
"""The folder does not stand under TMPDIR, so that two processes with different temporary folders lock the same GPU."""
SHARED_FOLDER_MODE = 0o1777
"""Everybody may add a lock; only its owner may remove it."""
SHARED_FILE_MODE = 0o666
"""Everybody may open a lock that somebody else has made."""
POLL_S = 0.2
"""A process that waits for a lock looks at it this often."""
LOCKS = Path("/proc/locks")
"""Linux lists here which process holds a lock on which file, whoever owns it."""


def machine_folder(on_fallback: Callable[[str], None]) -> Path:
    """Returns the folder of locks that every user of this machine sees.

    Where something else stands in its place, it is the user's own folder, and `on_fallback` receives one line that says so.
    """
    problem = _make_shared(MACHINE_FOLDER)
    if problem is None:
        return MACHINE_FOLDER
    own = Path(platformdirs.user_data_path("redline")) / "locks"
    try:
        own.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(
            f"cannot make a folder for locks: {MACHINE_FOLDER} {problem}, and {own}: {_why(error)}"
        ) from None
    on_fallback(f"{MACHINE_FOLDER} {problem}; locking in {own}, which other users of this machine do not see")
    return own


@contextmanager
def file_lock(
    path: Path, *, on_wait: Callable[[str], None] | None = None, is_singleton: bool = False
) -> Iterator[str | None]:
    """Holds the lock at `path`. Yields None to the holder.

    With `on_wait`, a lock that is held is waited for, and `on_wait` is told once who holds it. Without, the name of
    the holder is yielded instead of waiting. A thread that holds a singleton may ask again, and has it until its first hold ends.
    Nothing is written into the file, and no link is followed: somebody may have planted another in its place.
    """
    lock = FileLock(path, mode=SHARED_FILE_MODE, poll_interval=POLL_S, is_singleton=is_singleton)
    holder = None
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            holder = _holder(path)
            if on_wait is not None:
                on_wait(holder)
                lock.acquire()
                holder = None
    except OSError as error:
        lock.release()
        advice = "remove it, or ask its owner to"
        if not os.path.lexists(path):
            advice = f"make {path.parent} writable, or ask its owner to"
        raise UsageError(f"cannot lock {path}: {_why(error)}; {advice}") from None
    try:
        yield holder
    finally:
        lock.release()


def _holder(path: Path) -> str:
    """Names the process that holds a lock, if the system tells."""
    with contextlib.suppress(OSError):
        held = re.search(rf"FLOCK +ADVISORY +WRITE +([1-9]\d*) \S+:{path.stat().st_ino} ", LOCKS.read_text())
        if held is not None:
            return f"process {held[1]}"
    return "another process"


def _make_shared(folder: Path) -> str | None:
    """Make the folder, or check the one that is there; returns what is wrong with it. Follows no link."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return f"is no folder for locks ({_why(error)})"
    try:
        status = os.fstat(descriptor)
        mode = stat.S_IMODE(status.st_mode)
        if mode != SHARED_FOLDER_MODE and status.st_uid != os.getuid():
            return f"has the mode {mode:o} instead of {SHARED_FOLDER_MODE:o}"
        if mode != SHARED_FOLDER_MODE:  # just made, or left by a process that was killed before this line
            os.fchmod(descriptor, SHARED_FOLDER_MODE)
        return None
    finally:
        os.close(descriptor)


def _why(error: OSError) -> str:
    return error.strerror or str(error)


@contextmanager
def device_lock(
    device: str,
    on_wait: Callable[[str], None] = lambda holder: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Iterator[None]:
    """Holds `device` (`cuda:0`, …) alone; waits for another holder and says who it is. The CPU is not locked.

    A thread that holds it may ask again. `on_note` is told when only this user's processes are kept away.
    """
    if device == "cpu":
        yield
        return
    name = re.sub("[^A-Za-z0-9-]", "-", physical_name(device))
    with file_lock(machine_folder(on_note) / f"{name}.lock", on_wait=on_wait, is_singleton=True):
        yield


def physical_name(device: str) -> str:
    """Returns the name of the card itself: `cuda:0` counts what is visible, so two runs may call one card by different numbers."""
    kind, _, index_text = device.partition(":")
    index = int(index_text or 0)
    variable = "CUDA_VISIBLE_DEVICES" if kind == "cuda" else "HIP_VISIBLE_DEVICES"
    visible = [part.strip() for part in os.environ.get(variable, "").split(",") if part.strip()]
    identity = visible[index] if index < len(visible) else str(index)
    return _uuid_of(identity) or f"{kind}-{identity}" if kind == "cuda" else f"{kind}-{identity}"


def _uuid_of(identity: str) -> str | None:
    if identity.startswith(("GPU-", "MIG-")):
        return identity
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(int(identity))))
    except (ValueError, pynvml.NVMLError):
        return None
