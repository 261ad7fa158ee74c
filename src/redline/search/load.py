"""A load, measured and stored rate by rate; then rates in between narrow down the highest that is sustained."""

from __future__ import annotations

import math

from redline.analyze.load import LoadPoint, curve_of, load_point, sustained
from redline.launch.door import Door, Session
from redline.model.arrivals import MOST_REQUESTS, at_rate, poisson_arrivals
from redline.model.errors import SpecError
from redline.model.fields import Frozen
from redline.model.protocol import Load, LoadReply, Progress
from redline.model.record import RunRecord
from redline.model.spec import Effort, RunSpec
from redline.search.observer import Journal, Observer
from redline.search.one_record import OneRecord

SECONDS: dict[Effort, float] = {"quick": 2.0, "normal": 5.0, "strict": 20.0}
"""Of requests at each rate."""
LONGEST = 6.0
"""At low rates a point may take up to this many times as long, so that p99 exists."""
FEWEST_REQUESTS = 750
"""With those that settle left out, enough for p99."""
LEAST_REQUESTS = 5
"""That a rate brings within the longest time of a point: below it there is nothing to measure."""
OVERTIME = 1.5
"""A server that takes this many times as long as the requests took to arrive is over capacity."""
REFINED = 1.04
"""The highest rate that was sustained and the lowest that was not end up this close to each other."""
MOST_REFINEMENTS = 9
"""Five close a gap of two; after a rate that did not hold again, the next gap is closed with what is left."""
AGAIN = 2.0
"""The rate that seems to be sustained is offered again, with other arrivals, for this many times as long."""
MOST_AGAIN = 4


class LoadQuestion(Frozen):
    """Which rates, and for how long."""

    rates: tuple[float, ...]
    """Rising."""
    seconds: float
    arrivals_s: tuple[float, ...] | None = None
    """Recorded arrivals, stretched to each rate; None: Poisson."""
    refine: bool = True


def require_measurable(question: LoadQuestion) -> None:
    """Refuse rates at which hardly any request would come; recorded arrivals take as long as they take."""
    longest_s = LONGEST * question.seconds
    if question.arrivals_s is None and question.rates[0] * longest_s < LEAST_REQUESTS:
        raise SpecError(
            f"rate {question.rates[0]:g} is too low to be measured in {longest_s:g} s: give {LEAST_REQUESTS / longest_s:.3g} "
            f"or more, or --seconds {LEAST_REQUESTS / question.rates[0] / LONGEST:.3g}"
        )


def run_rates(
    spec: RunSpec, question: LoadQuestion, door: Door, journal: Journal, observer: Observer | None = None
) -> RunRecord:
    """One record with what was served at each rate; what breaks is in its failure."""
    run = _Load(spec, question, journal, observer or Observer())
    return run.fill(door, run.run_all)


class _Load(OneRecord):
    """The record of a load on its way."""

    def __init__(self, spec: RunSpec, question: LoadQuestion, journal: Journal, observer: Observer) -> None:
        super().__init__(spec, journal, observer)
        self._question = question
        assert spec.load is not None
        self._load = spec.load
        self._points: dict[float, LoadPoint] = {}
        self._refinements = 0

    def run_all(self, session: Session) -> None:
        """Every rate that was asked for, then those in between that close in on the limit, then the limit again."""
        if self.prepare(session) is None:
            return
        for rate in self._question.rates:
            if not self._run_rate(session, rate):
                return
        if self._question.refine and not self._find_limit(session):
            return
        self.stopped = "target"

    def _find_limit(self, session: Session) -> bool:
        """The highest rate that is sustained, offered once more; False where the worker broke.

        Of many rates, the highest that held may have been lucky.
        """
        for _ in range(MOST_AGAIN):
            if not self._close_in(session):
                return False
            rate = sustained(curve_of(self._points.values()))
            if rate is None or self._points[rate].runs > 1:
                return True
            if not self._run_rate(session, rate, again=True):
                return False
        return True

    def _close_in(self, session: Session) -> bool:
        """Try rates between the highest that was sustained and the next."""
        while self._refinements < MOST_REFINEMENTS:
            ordered = curve_of(self._points.values())
            broken = next((index for index, point in enumerate(ordered) if not point.keeps_target), None)
            if broken is None or broken == 0:
                return True
            low, high = ordered[broken - 1].rate, ordered[broken].rate
            if high <= REFINED * low:
                return True
            self._refinements += 1
            if not self._run_rate(session, math.sqrt(low * high)):
                return False
        return True

    def _run_rate(self, session: Session, rate: float, *, again: bool = False) -> bool:
        seed = self.record.spec.seed + again
        arrivals = self._arrivals(rate, seed, AGAIN if again else 1.0)
        told = f"{rate:.4g} requests/s{', again' if again else ''}"
        self.observer.progress(self.record, Progress(stage="load", detail=told))
        deadline_s = max(OVERTIME * arrivals[-1], arrivals[-1] + 1.0)
        drawn = None if self._question.arrivals_s is not None else seed
        reply = self.ask(session, Load(arrivals_s=arrivals, rate=rate, deadline_s=deadline_s, seed=drawn))
        if not isinstance(reply, LoadReply):
            self.fail(reply)
            return False
        self.change(loads=(*self.record.loads, reply.served))
        self.journal.begin(self.record)
        first, *others = [served for served in self.record.loads if served.rate == rate]
        self._points[rate] = load_point(first, self._load.slo_p99_s, others)
        self.observer.served(self.record, self._points[rate])
        return True

    def _arrivals(self, rate: float, seed: int, times_as_long: float) -> tuple[float, ...]:
        question = self._question
        if question.arrivals_s is not None:
            return at_rate(question.arrivals_s, rate)
        seconds = min(max(question.seconds, FEWEST_REQUESTS / rate), LONGEST * question.seconds)
        count = min(max(2, round(rate * seconds * times_as_long)), MOST_REQUESTS)
        return poisson_arrivals(rate, count, seed)
