"""This module is about requests that arrive by themselves and are batched in front of a model. It defines what is asked, the arrivals, the
queue, and what is recorded.

The queue is the same code on the bench, in real time, and in a fake bench, in virtual time.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from redline.model.fields import MOST_ITEMS, Count, Frozen, Items, Seconds, require_range, require_seconds

MOST_REQUESTS = 2_000_000
"""A point may have so many requests; more would fill the desk's memory."""


class LoadSpec(Frozen):
    """This says how requests are put together into batches in front of the model."""

    max_batch: int = 32
    max_wait_s: float = 0.005
    """The oldest request of a batch that is not full waits at most so long for others while the device is idle."""
    slo_p99_s: float | None = None
    """The p99 of latency must stay within this for a rate to count as sustained."""

    def __post_init__(self) -> None:
        require_range("max_batch", self.max_batch, 1, MOST_ITEMS)
        require_seconds("max_wait", self.max_wait_s, zero_too=True)
        if self.slo_p99_s is not None:
            require_seconds("slo_p99", self.slo_p99_s)


class Served(Frozen):
    """Requests at one rate and the batches they were served in. All times count from the start of the run."""

    rate: float
    """Requests per second that were asked for; of an arrival file, what it holds on average."""
    arrivals_s: tuple[Seconds, ...]
    """Each request was due then, whether or not the server was ready for it."""
    sizes: tuple[Items, ...]
    """Each batch has so many requests. Requests are served in the order of their arrival."""
    started_s: tuple[Seconds, ...]
    finished_s: tuple[Seconds, ...]
    ended_s: Seconds
    """The run ended then; requests that were not served by then had waited until then."""
    seed: int | None = None
    """This is the seed of the arrivals; None: they came from a file."""
    padded: Count = 0
    """This many rows were padding: programs compiled for fixed sizes compute them too."""


class Clock(Protocol):
    """Seconds since the start of the run."""

    def now(self) -> float: ...

    def wait_until(self, moment_s: float) -> None: ...


def run_arrivals(
    arrivals_s: Sequence[float], load: LoadSpec, clock: Clock, run: Callable[[int], int], deadline_s: float
) -> Served:
    """Serve requests in the order of their arrival, one batch at a time, until all are done or the time is up.

    A batch starts when it is full, or when its oldest request has waited `max_wait_s`, and never before the batch
    before it has ended. `run` serves a batch of a size to its end, and says how many rows were computed for it.
    """
    sizes: list[int] = []
    started: list[float] = []
    finished: list[float] = []
    done = padded = 0
    while done < len(arrivals_s):
        now = clock.now()
        if now >= deadline_s:
            break
        last_start_s = arrivals_s[done] + load.max_wait_s
        last = done + load.max_batch - 1
        full_s = arrivals_s[last] if last < len(arrivals_s) else math.inf
        start_s = min(full_s, last_start_s)
        if start_s > now:
            clock.wait_until(start_s)
            now = clock.now()
        size = max(1, bisect_right(arrivals_s, now, done, min(last + 1, len(arrivals_s))) - done)
        begun = clock.now()
        padded += run(size) - size
        started.append(begun)
        finished.append(clock.now())
        sizes.append(size)
        done += size
    return Served(
        rate=0.0,
        arrivals_s=tuple(arrivals_s),
        sizes=tuple(sizes),
        started_s=tuple(started),
        finished_s=tuple(finished),
        ended_s=clock.now(),
        padded=padded,
    )


class VirtualClock:
    """A clock that moves only when it is set forward."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def wait_until(self, moment_s: float) -> None:
        self._now_s = max(self._now_s, moment_s)

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


def poisson_arrivals(rate: float, count: int, seed: int) -> tuple[float, ...]:
    """Returns moments of `count` requests, two or more, that come independently of each other and exactly `rate` per second in all.

    Without the latter, a short run at a rate would really be one at another rate.
    """
    gap = random.Random(seed).expovariate
    moments = tuple(accumulate(gap(rate) for _ in range(count)))
    factor = rate_of(moments) / rate
    return tuple(moment * factor for moment in moments)


def rate_of(arrivals_s: Sequence[float]) -> float:
    return (len(arrivals_s) - 1) / (arrivals_s[-1] - arrivals_s[0])


def bucket_of(size: int, buckets: Sequence[int]) -> int:
    """Returns the smallest of the sorted sizes that holds this many requests."""
    return next(bucket for bucket in buckets if bucket >= size)


def doubling_buckets(max_batch: int) -> tuple[int, ...]:
    """Sizes that programs of fixed shapes are made for: powers of two and the largest itself."""
    sizes = [2**power for power in range(max_batch.bit_length()) if 2**power < max_batch]
    return (*sizes, max_batch)
