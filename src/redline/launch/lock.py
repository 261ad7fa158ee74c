"""One run at a time per GPU, for all users of a machine."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from redline.locks import file_lock, machine_folder


class _Held(threading.local):
    """What this thread holds: a gate that also counts kernels asks for its device again."""

    def __init__(self) -> None:
        self.names: set[str] = set()


_held = _Held()


@contextmanager
def device_lock(
    device: str,
    on_wait: Callable[[str], None] = lambda holder: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Iterator[None]:
    """Hold `device` (`cuda:0`, …) alone; waits for another holder and says who it is. The CPU is not locked.

    A thread that holds it may ask again and has it until its first hold ends. `on_note` is told when only this user's
    processes are kept away.
    """
    if device == "cpu":
        yield
        return
    name = re.sub("[^A-Za-z0-9-]", "-", physical_name(device))
    if name in _held.names:
        yield
        return
    with file_lock(machine_folder(on_note) / f"{name}.lock", on_wait=on_wait):
        _held.names.add(name)
        try:
            yield
        finally:
            _held.names.discard(name)


def physical_name(device: str) -> str:
    """The card itself: `cuda:0` counts what is visible, so two runs may call one card by different numbers."""
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
        uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(int(identity)))
    except (ValueError, pynvml.NVMLError):
        return None
    return uuid.decode() if isinstance(uuid, bytes) else str(uuid)
