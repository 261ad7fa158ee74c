"""A recipe on its way through a trial: while its worker prepares, and for how long it is timed then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redline.analyze.pairs import log_ratio
from redline.model.protocol import AFTER_COMPILING
from redline.model.record import TimeKind
from redline.search.group import Entry, Pending, StopRule
from redline.search.tune.costs import CONTENTION
from redline.search.tune.space import Switches

FEWEST_TO_PAIR = 2
"""Rounds, when the budget is over: with fewer there is no ratio."""
FEWEST_ROUNDS = 3
MOST_ROUNDS = 8
CONTENT_ERROR = 0.004
CLEARLY = 2.5
"""Standard errors by which a recipe must be behind before it is given up early."""
BEHIND = 0.02
FAR_AHEAD = 0.2
"""By so much faster, it is the one that others are set against: how much exactly the race will tell."""


@dataclass
class UntilPlaced(StopRule):
    """A candidate in turns with the fastest so far: more rounds for those who may win than for those clearly behind."""

    candidate: Entry
    kind: TimeKind
    is_over: Callable[[], bool] = lambda: False
    """Whether the budget has ended."""

    def visited(self, entries: Sequence[Entry]) -> list[Entry]:
        return super().visited(entries) if self.candidate.stopped is None else []

    def after_round(self, entries: Sequence[Entry], rounds: int) -> None:
        if self.candidate.is_sound and self._has_seen_enough(entries):
            self.candidate.stopped = "target"

    def _has_seen_enough(self, entries: Sequence[Entry]) -> bool:
        entry = self.candidate
        rounds = max((len(blocks) for blocks in entry.blocks.values()), default=0)
        if entry.timed_s >= entry.spec.measure.max_seconds or (rounds >= FEWEST_TO_PAIR and self.is_over()):
            return True
        if rounds < FEWEST_ROUNDS:
            return False
        anchor = next((each for each in entries if each is not entry and each.is_sound), None)
        log = log_ratio(anchor.record, entry.record, self.kind) if anchor is not None else None
        if log is None or rounds >= MOST_ROUNDS:
            return rounds >= MOST_ROUNDS
        doubt = CLEARLY * max(log.error, CONTENT_ERROR) + log.doubt
        is_behind, is_far_ahead = log.centre + doubt < -BEHIND, log.centre - doubt > FAR_AHEAD
        return is_behind or is_far_ahead or (log.error <= CONTENT_ERROR and rounds > FEWEST_ROUNDS)


@dataclass
class Flight:
    """A recipe on its way: its worker prepares."""

    switches: Switches
    pending: Pending
    started_s: float
    helpers: Sequence[Pending] = ()
    """Workers that compile some of its blocks, and do nothing else."""
    still_s: float = 0.0
    """While others were timed."""
    waited_s: float = 0.0
    """For how long the search waited until it was prepared and did nothing else."""
    shared_s: float = 0.0
    """Seconds of others that were prepared at the same time, added up."""

    def taken_s(self, now_s: float) -> float:
        """For how long it has been prepared."""
        return now_s - self.started_s - self.still_s

    def others(self, now_s: float) -> float:
        """How many were prepared beside it, on average."""
        return self.shared_s / max(self.taken_s(now_s), 1e-6)

    @property
    def is_compiled(self) -> bool:
        """What is left takes no longer than with any other recipe."""
        return self.pending.stage in AFTER_COMPILING

    def cost_s(self, now_s: float) -> float:
        """What it took, less what others slowed it down."""
        return self.taken_s(now_s) / (1 + CONTENTION * self.others(now_s))
