"""This is a bench without torch: it answers the protocol from a known truth and a noise model, in virtual time.

Search loops are tested and simulated against it: what they find can be set against the `Landscape` they searched.
Nothing sleeps; `clock_s` says how long the same would have taken. The same landscape and the same requests in the same
order always give the same answers.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Self

import numpy as np

from redline.model import protocol, record
from redline.model.errors import DoorError
from redline.model.protocol import OnProgress, Reply, Request
from redline.model.spec import RunSpec
from redline.testing.bench import FakeBench, FakeWorld
from redline.testing.landscape import Landscape


class FakeSession:
    """This is the desk's end of one fake worker. What it was asked to prepare passes in virtual time beside its siblings."""

    def __init__(self, bench: FakeBench, world: FakeWorld) -> None:
        self._bench = bench
        self._world = world
        self._closed: record.Closed | None = None
        self._begun: _Begun | None = None
        self._paused_at_s = 0.0
        self.paused = False

    def ask(self, request: Request, on_progress: OnProgress | None = None) -> Reply:
        self.begin(request)
        reply = self.wait(on_progress)
        assert reply is not None
        return reply

    def begin(self, request: Request) -> None:
        # Both are mistakes of the desk that would hang or break a real worker, so that they must not pass here.
        if self._closed is not None:
            raise DoorError("the session is closed")
        if self.paused:
            raise DoorError("the worker is paused and cannot answer")
        world, progress = self._world, list[tuple[float, protocol.Progress]]()
        started_s, slowed = world.clock_s, 1.0
        reply = self._bench.answer(request, lambda each: progress.append((world.clock_s - started_s, each)))
        seconds, world.clock_s = world.clock_s - started_s, started_s
        if isinstance(request, protocol.Prepare):
            world.preparing_until_s = [end_s for end_s in world.preparing_until_s if end_s > started_s]
            slowed += self._bench.truth.slowdown_per_sibling * len(world.preparing_until_s)
            seconds *= slowed
            world.preparing_until_s.append(started_s + seconds)
            limit_s = request.spec.launch.prepare_timeout_s
            if seconds > limit_s:
                reply, seconds = self._bench.fail(_timeout(limit_s)), limit_s
        told = [(started_s + slowed * after_s, each) for after_s, each in progress]
        self._begun = _Begun(reply, started_s + seconds, told)

    def wait(self, on_progress: OnProgress | None = None, timeout_s: float | None = None) -> Reply | None:
        if self.paused:
            raise DoorError("the worker is paused and cannot answer")
        if self._begun is None:
            raise DoorError("nothing was begun")
        begun, world = self._begun, self._world
        if timeout_s is not None and begun.ready_at_s > world.clock_s + timeout_s:
            world.clock_s += timeout_s
            begun.tell(on_progress, world.clock_s)
            return None
        world.clock_s = max(world.clock_s, begun.ready_at_s)
        begun.tell(on_progress, world.clock_s)
        self._begun = None
        return begun.reply

    def pause(self) -> None:
        if not self.paused:
            self.paused, self._paused_at_s = True, self._world.clock_s

    def resume(self) -> None:
        if self.paused and self._begun is not None:
            self._begun.delay(self._world.clock_s - self._paused_at_s)
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


@dataclass
class _Begun:
    """This is a request that is being worked on, with the reply it will get."""

    reply: Reply
    ready_at_s: float
    progress: list[tuple[float, protocol.Progress]]
    """These stages were not told yet; each has the time at which it is reached."""

    def tell(self, on_progress: OnProgress | None, now_s: float) -> None:
        while self.progress and self.progress[0][0] <= now_s:
            _, reached = self.progress.pop(0)
            if on_progress is not None:
                on_progress(reached)

    def delay(self, seconds: float) -> None:
        self.ready_at_s += seconds
        self.progress = [(at_s + seconds, each) for at_s, each in self.progress]


class FakeDoor:
    """This door opens fake sessions into one world."""

    def __init__(self, landscape: Landscape) -> None:
        self.landscape = landscape
        self.opened = 0
        self._world = FakeWorld(landscape.drift_sigma, landscape.seed)
        self._openings: dict[int, int] = {}

    @property
    def clock_s(self) -> float:
        """Returns the seconds that would have passed on a real bench."""
        return self._world.clock_s

    def open(self, spec: RunSpec | None = None) -> FakeSession:
        """Opens a session whose noise depends on what it measures and how often that was opened, but not on what else was measured."""
        key = zlib.crc32(_name_of(spec).encode())
        self._openings[key] = opening = self._openings.get(key, 0) + 1
        self.opened += 1
        random = np.random.default_rng([self.landscape.seed, key, opening])
        return FakeSession(FakeBench(self.landscape, self._world, random, self.opened), self._world)

    def close(self) -> None:
        """Does nothing, because there is no process to end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _timeout(limit_s: float) -> record.Failure:
    return record.Failure(stage="prepare", kind="timeout", message=f"no answer within {limit_s:g} s; it was stopped")


def _name_of(spec: RunSpec | None) -> str:
    """Returns the text that seeds the noise. It is not the encoded spec, so that a renamed field does not draw every simulation anew."""
    if spec is None:
        return ""
    return f"{spec.workload.model} {spec.workload.task} {spec.workload.batch} {spec.recipe}"
