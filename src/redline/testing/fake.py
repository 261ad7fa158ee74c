"""A bench without torch: it answers the protocol from a known truth and a noise model, in virtual time.

Search loops are tested and simulated against it: what they find can be set against the `Landscape` they searched.
Nothing sleeps; `clock_s` says how long the same would have taken. The same landscape and the same requests in the same
order always give the same answers.
"""

from __future__ import annotations

import zlib
from typing import Self

import numpy as np

from redline import protocol, record
from redline.errors import DoorError
from redline.protocol import OnProgress, Reply, Request
from redline.spec import RunSpec
from redline.testing.bench import FakeBench, FakeWorld
from redline.testing.landscape import Landscape


class FakeSession:
    """The desk's end of one fake worker."""

    def __init__(self, bench: FakeBench) -> None:
        self._bench = bench
        self._closed: record.Closed | None = None
        self.paused = False

    def ask(self, request: Request, on_progress: OnProgress | None = None) -> Reply:
        # Both are mistakes of the desk that would hang or break a real worker, so that they must not pass here.
        if self._closed is not None:
            raise DoorError("the session is closed")
        if self.paused:
            raise DoorError("the worker is paused and cannot answer")
        return self._bench.answer(request, on_progress)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def kill(self) -> None:
        self.close()

    def close(self) -> record.Closed:
        if self._closed is None:
            reply = self._bench.answer(protocol.Close())
            assert isinstance(reply, protocol.ClosedReply)
            self._closed = reply.closed
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FakeDoor:
    """Opens fake sessions into one world."""

    def __init__(self, landscape: Landscape) -> None:
        self.landscape = landscape
        self.opened = 0
        self._world = FakeWorld(landscape.drift_sigma, landscape.seed)
        self._openings: dict[int, int] = {}

    @property
    def clock_s(self) -> float:
        """Seconds that would have passed on a real bench."""
        return self._world.clock_s

    def open(self, spec: RunSpec | None = None) -> FakeSession:
        """A session whose noise depends on what it measures and how often that was opened, not on what else was measured."""
        key = zlib.crc32(_name_of(spec).encode())
        self._openings[key] = opening = self._openings.get(key, 0) + 1
        self.opened += 1
        random = np.random.default_rng([self.landscape.seed, key, opening])
        return FakeSession(FakeBench(self.landscape, self._world, random))

    def close(self) -> None:
        """Nothing to end: there is no process."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _name_of(spec: RunSpec | None) -> str:
    """What seeds the noise: not the encoded spec, so that a renamed field does not draw every simulation anew."""
    if spec is None:
        return ""
    return f"{spec.workload.model} {spec.workload.task} {spec.workload.batch} {spec.recipe}"
