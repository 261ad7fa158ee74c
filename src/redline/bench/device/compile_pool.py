"""The processes in which torch.compile compiles kernels for a GPU: ended once there is nothing left to compile."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import psutil

MODULE = "torch._inductor.async_compile"


def end_compile_pool() -> None:
    """End them; the next kernel that must be compiled starts new ones.

    They begin when the first kernel is loaded, also one that is found in the cache, and then import torch for about 4 s. Torch's
    own way to end them waits for that. Left alone, they take a core while the program, or another beside it, is timed.
    """
    module = sys.modules.get(MODULE)
    if module is None:
        return
    pools = [pool for pool in module._pool_set if isinstance(getattr(pool, "process", None), subprocess.Popen)]
    for pool in pools:
        _end(pool)
    if pools:
        module.AsyncCompile._ready_future = None
        module.after_fork()


def _end(pool: Any) -> None:
    with pool.write_lock:
        pool.running = False  # so that its thread takes the end of the process as asked for
    if (timer := getattr(pool, "timer", None)) is not None:
        timer.quit()
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pool.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    pool.process.kill()
    pool.process.wait()
    pool.shutdown()  # nothing is left of it but what waits for its answers, which is told so
