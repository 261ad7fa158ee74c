"""Models that break in every way a worker can break."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time

import torch
from torch import nn


class Misbehaving(nn.Module):
    """Well-behaved for some calls, so that it breaks where we want it to: while it is prepared or while it is timed."""

    def __init__(self, deed, after_calls: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.deed = deed
        self.calls_left = after_calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls_left <= 0:
            self.deed()
        self.calls_left -= 1
        return self.linear(x)


def _model(deed, after_calls: int = 0):
    return Misbehaving(deed, after_calls), torch.randn(4, 8)


def doing(deed):
    """Returns a factory of a model that does this."""
    return lambda: _model(deed)


sound = doing(lambda: None)
segfaults = doing(lambda: ctypes.string_at(0))
killed = doing(lambda: os.kill(os.getpid(), signal.SIGKILL))


def killed_when_told():
    """From the moment that the file `kill` is in the folder REDLINE_TEST_FOLDER."""
    sign = os.path.join(os.environ["REDLINE_TEST_FOLDER"], "kill")
    return _model(lambda: os.path.exists(sign) and os.kill(os.getpid(), signal.SIGKILL))


hangs = doing(lambda: time.sleep(3600))
eats_memory = doing(lambda: torch.ones(2**45))


def eats_memory_bit_by_bit():
    held = []
    return _model(lambda: [held.append(torch.ones(2**26)) for _ in range(1000)])


def eats_device_memory():
    model, inputs = sound()
    model.register_forward_pre_hook(lambda module, args: (args[0] + args[0].new_zeros(2**40).sum(),))
    return model, inputs


def raises():
    def deed():
        raise ValueError("this forward\nalways raises")

    return _model(deed)


leaves_with_seven = doing(lambda: sys.exit(7))
prints = doing(lambda: print("a line of the model's own"))  # noqa: T201


def tells_what_is_frozen():
    raise RuntimeError(f"{gc.get_freeze_count()} objects")


def factory_raises():
    raise RuntimeError("no such dataset")


def loads_with_workers():
    """A factory that draws its inputs through a DataLoader with worker processes."""
    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=16, num_workers=2)
    (batch,) = next(iter(loader))
    return nn.Linear(8, 8), batch


def reports_its_process():
    """Leaves a child behind, as a library that starts helpers does."""
    import subprocess

    subprocess.Popen(["sleep", "600"])
    return _model(lambda: time.sleep(0.01))


leaves_saying_bye = doing(lambda: sys.exit("bye"))
exits_at_once = doing(lambda: os._exit(7))


class Stop(BaseException):
    """Not an Exception: code that catches those lets it through."""


def raises_a_stranger():
    def deed():
        raise Stop("no more")

    return _model(deed)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


def raises_unprintable():
    def deed():
        raise Unprintable

    return _model(deed)


def raises_undecodable():
    def deed():
        raise ValueError("no file caf\udce9\0.py")

    return _model(deed)


def forks_and_goes_on():
    return _model(os.fork)


def hangs_up():
    """Closes the connection, as a library that closes what it does not know would, and goes on."""

    def deed():
        os.closerange(3, 1024)
        time.sleep(600)

    return _model(deed)


FLOOD_BYTES = 3_000_000
"""Per step: also a block that runs a single one is more than may stay."""


floods = doing(lambda: (os.write(1, b"x" * FLOOD_BYTES), time.sleep(0.02)))


def hangs_when_told():
    """From the moment that the file `hang` is in the folder REDLINE_TEST_FOLDER; says so by the file `hanging`."""
    folder = os.environ["REDLINE_TEST_FOLDER"]

    def deed():
        if os.path.exists(f"{folder}/hang"):
            open(f"{folder}/hanging", "w").close()
            time.sleep(3600)

    return _model(deed)


def leaves_a_daemon():
    """A process that has left its parent, its group and its session, as daemons do."""
    begun, closes_when_begun = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "600"])
        os._exit(0)
    os.wait()
    os.close(closes_when_begun)
    os.read(begun, 1)  # it is called sleep from now on
    os.close(begun)
    return _model(lambda: None)


def knows_its_environment():
    """Breaks unless the worker sees what the desk saw."""
    expected = os.environb[b"REDLINE_TEST_BYTES"]
    assert expected == b"caf\xe9", expected
    assert len(os.environb[b"REDLINE_TEST_LONG"]) == 100_000
    assert os.path.exists("here"), os.listdir(".")
    return _model(lambda: None)


def does_all_of_it():
    """Knows its environment, leaves a daemon and prints."""
    knows_its_environment()
    leaves_a_daemon()
    return prints()
