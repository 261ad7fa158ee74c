"""`redline load`: latency while requests arrive at random, and the highest rate that keeps a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from redline.analyze.load import LoadPoint, LoadSummary, load_of, load_rows, points_of, sustained
from redline.launch.door import Door, Session
from redline.model.arrivals import MOST_REQUESTS, LoadSpec, poisson_arrivals
from redline.model.errors import Exit, SpecError
from redline.model.fields import MOST_ITEMS, MOST_ROWS, Frozen, seconds_of
from redline.model.metrics import SUSTAINABLE_RATE, Fact, Figure, Headline, Row, Table
from redline.model.note import Note, note
from redline.model.protocol import Load, LoadReply, Progress
from redline.model.record import RunRecord, device_name, device_of
from redline.model.settings import setting
from redline.model.spec import Effort, RunSpec
from redline.model.spec_table import layered
from redline.model.units import format_rate, format_seconds
from redline.search.group import OneRecord
from redline.search.observer import Journal, Observer
from redline.show.plots import load_figure
from redline.show.result import Result
from redline.verbs.verb import DEVICE, ISOLATED, SHAPE, ModelName, Recipes, target, verb
from redline.verbs.workspace import Workspace, specs_of, use

DEFAULT = LoadSpec()
MOST_RATE = 1e7
"""These are requests per second: no process counts faster."""
SECONDS: dict[Effort, float] = {"quick": 2.0, "normal": 5.0, "strict": 20.0}
"""Requests arrive for so many seconds at each rate."""
LONGEST = 6.0
"""At low rates a run may take up to this many times as long, so that p99 exists."""
FEWEST_REQUESTS = 750
"""This many requests are enough for p99, with those that settle left out."""
LEAST_REQUESTS = 5
"""A rate must bring so many requests within the longest time of a run. Below that there is nothing to measure."""
OVERTIME = 1.5
"""A server that takes this many times as long as the requests took to arrive is over capacity."""
REFINED = 1.04
"""The highest rate that was sustained and the lowest that was not end up this close to each other."""
MOST_REFINEMENTS = 9
"""Five close a gap of two; after a rate that did not hold again, the next gap is closed with what is left."""
AGAIN = 2.0
"""The rate that seems to be sustained is offered again, with other arrivals, for this many times as long."""
MOST_AGAIN = 4
"""The limit is looked for, and offered again, at most this often."""

RATIO = Figure(name="ratio", unit="x", header="vs first", better="higher", doc="Over the rate of the first recipe.")


@verb(
    takes=(*SHAPE, *DEVICE, *ISOLATED),
    examples=(
        "redline load resnet50 --rate 50..2000 --max-wait 5ms --slo-p99 50ms",
        "redline load resnet50 --rate 500..16000 -r baseline -r fp16+channels-last",
    ),
    also=("plot", "save", "report", "log"),
)
def load(
    model: ModelName,
    inputs: Any | None = None,
    *,
    rate: Annotated[
        Any, setting("Requests per second: 200, 50,100,200 or 50..2000 (doubling).", shape="RATES", kind=str)
    ] = None,
    recipes: Recipes = "baseline",
    slo_p99: Annotated[
        Any, target("Find the highest rate whose p99 latency stays within this limit, such as 50ms.")
    ] = None,
    max_batch: Annotated[int, setting("The most requests in one batch.", least=1, most=MOST_ITEMS)] = DEFAULT.max_batch,
    max_wait: Annotated[
        Any,
        setting(
            "The longest a request waits on an idle device for its batch to fill, such as 5ms.",
            kind=str,
            read=lambda name, value: seconds_of(name, value, zero_too=True),
        ),
    ] = DEFAULT.max_wait_s,
    seconds: Annotated[
        float | None,
        setting("Seconds of requests per rate. Default: 2, 5 or 20 by effort, longer at low rates.", least=1e-9),
    ] = None,
    effort: Annotated[Effort, setting("How long each rate takes.")] = "normal",
    workspace: Workspace | None = None,
    **settings: Any,
) -> Result:
    """Measure latency under load: requests arrive at random.

    They arrive at each of several rates and are batched for the model. Arrivals are a seeded Poisson process and do not wait for
    earlier answers; latency counts from the intended arrival. The inputs of requests are on the device already. This is a
    measurement, not a server.
    """
    if rate is None:
        raise SpecError("give the requests per second as rate, such as 50..2000")
    batching = LoadSpec(max_batch=max_batch, max_wait_s=max_wait, slo_p99_s=slo_p99)
    question = LoadQuestion(rates=parse_rates(rate), seconds=seconds or SECONDS[effort])
    _require_measurable(question)
    with use(workspace) as opened:
        table = layered({"effort": effort}, settings, {"batch": max_batch})
        specs, working = specs_of(opened, model, inputs, recipes=recipes, **table)
        records = []
        for spec in working.checked([msgspec.structs.replace(spec, load=batching) for spec in specs]):
            with working.lock(spec.device):  # two servers on one device would load each other
                door = working.door(spec.launch)
                records.append(run_rates(spec, question, door, working.journal, working.observer))
        return result_of([load_of(record) for record in records])


# What is asked


class LoadQuestion(Frozen):
    """This says which rates are asked for, and for how long."""

    rates: tuple[float, ...]
    """The rates rise."""
    seconds: float


def parse_rates(value: Any) -> tuple[float, ...]:
    """Rates as a person writes them: 200, "50,100,200", "50..2000" (doubling, both ends included)."""
    given = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else [value]
    rates: set[float] = set()
    for text in map(str, given):
        low, dots, high = text.partition("..")
        first, last = (_rate(end, value) for end in (low, high if dots else low))
        if last < first:
            raise SpecError(f"rate {text!r} goes from high to low: write {high}..{low}")
        doublings = math.ceil(math.log2(last / first) - 1e-9)
        if doublings > MOST_ROWS:
            raise SpecError(f"rate {text} is too wide")
        rates |= {*(first * 2**step for step in range(doublings)), last}
    return tuple(sorted(rates))


def _rate(text: str, whole: Any) -> float:
    try:
        rate = float(text)
    except ValueError:
        raise SpecError(f"rate must be numbers of requests per second, such as 50..2000, got {whole!r}") from None
    if not 0 < rate <= MOST_RATE:
        raise SpecError(f"rate must be above 0 and at most {MOST_RATE:.0f} requests per second, got {text}")
    return rate


def _require_measurable(question: LoadQuestion) -> None:
    """Refuses rates at which hardly any request would come."""
    longest_s = LONGEST * question.seconds
    if question.rates[0] * longest_s < LEAST_REQUESTS:
        raise SpecError(
            f"rate {question.rates[0]:g} is too low to be measured in {longest_s:g} s: give {LEAST_REQUESTS / longest_s:.3g} "
            f"or more, or --seconds {LEAST_REQUESTS / question.rates[0] / LONGEST:.3g}"
        )


# How it is measured


def run_rates(
    spec: RunSpec, question: LoadQuestion, door: Door, journal: Journal, observer: Observer | None = None
) -> RunRecord:
    """Returns one record with what was served at each rate; what breaks is in its failure."""
    run = _Load(spec, question, journal, observer or Observer())
    return run.fill(door, run.run_all)


class _Load(OneRecord):
    """This is the record of a load on its way."""

    def __init__(self, spec: RunSpec, question: LoadQuestion, journal: Journal, observer: Observer) -> None:
        super().__init__(spec, journal, observer)
        assert spec.load is not None
        self._question, self._target_s = question, spec.load.slo_p99_s
        self._refinements = 0

    @property
    def _points(self) -> tuple[LoadPoint, ...]:
        return points_of(self.record.loads, self._target_s)

    def run_all(self, session: Session) -> None:
        """Runs every rate that was asked for, then those in between that close in on the limit, then the limit again."""
        if self.prepare(session) is None:
            return
        is_sound = all(self._run_rate(session, rate) for rate in self._question.rates)
        if is_sound and (len(self._question.rates) == 1 or self._find_limit(session)):
            self.stopped = "target"

    def _find_limit(self, session: Session) -> bool:
        """Finds the highest rate that is sustained, and offers it once more. Returns False where the worker broke.

        Of many rates, the highest that held may have been lucky.
        """
        for _ in range(MOST_AGAIN):
            if not self._close_in(session):
                return False
            points = self._points
            rate = sustained(points)
            if rate is None or next(point.runs for point in points if point.rate == rate) > 1:
                return True
            if not self._run_rate(session, rate, again=True):
                return False
        return True

    def _close_in(self, session: Session) -> bool:
        """Try rates between the highest that was sustained and the next."""
        while self._refinements < MOST_REFINEMENTS:
            points = self._points
            low = sustained(points)
            high = next((point.rate for point in points if low is not None and point.rate > low), None)
            if low is None or high is None or high <= REFINED * low:
                return True
            self._refinements += 1
            if not self._run_rate(session, math.sqrt(low * high)):
                return False
        return True

    def _run_rate(self, session: Session, rate: float, *, again: bool = False) -> bool:
        seed = self.record.spec.seed + again
        asked_s = self._question.seconds
        seconds = min(max(asked_s, FEWEST_REQUESTS / rate), LONGEST * asked_s) * (AGAIN if again else 1.0)
        arrivals = poisson_arrivals(rate, min(max(2, round(rate * seconds)), MOST_REQUESTS), seed)
        told = f"{rate:.4g} requests/s{', again' if again else ''}"
        self.observer.progress(self.record, Progress(stage="load", detail=told))
        deadline_s = max(OVERTIME * arrivals[-1], arrivals[-1] + 1.0)
        reply = self.ask(session, Load(arrivals_s=arrivals, rate=rate, deadline_s=deadline_s, seed=seed))
        if not isinstance(reply, LoadReply):
            self.fail(reply)
            return False
        self.change(loads=(*self.record.loads, reply.served))
        self.journal.begin(self.record)
        self.observer.served(self.record, next(point for point in self._points if point.rate == rate))
        return True


# What it shows


def result_of(rows: Sequence[LoadSummary]) -> Result:
    """Returns the sustained rates recipe by recipe, then every rate that was offered."""
    first, several = rows[0], len(rows) > 1
    answers = [_answer_row(row, first) for row in rows]
    about: dict[str, Fact] = {
        "model": first.model,
        "max_batch": first.load.max_batch,
        "max_wait_s": first.load.max_wait_s,
        "target_s": first.load.slo_p99_s,
        "device": device_name(first.record) or device_of(first.record),
    }
    limits = f"batches up to {first.load.max_batch}, wait up to {format_seconds(first.load.max_wait_s)}"
    title = " · ".join((first.model, limits, str(about["device"])))
    tail = "latency_p99" if all(point.p99_s is not None for row in rows for point in row.points) else "largest"
    columns = ("rate", "achieved_rate", "latency_p50", tail, "mean_batch", "verdict", "busy")
    answers_table = Table(
        name="recipes", title=title, rows=tuple(answers), columns=("recipe", "sustainable_rate", "ratio")
    )
    rates = Table(
        name="rates",
        title="every rate, in requests per second" if several else title,
        rows=tuple(each for row in rows for each in load_rows(row)),
        columns=("recipe", *columns) if several else columns,
    )
    return Result(
        verb="load",
        headline=_headline(rows, answers),
        tables=(answers_table if several else answers_table.as_detail(), rates),
        about=about,
        notes=tuple(dict.fromkeys(note for row in rows for note in row.notes)),
        next=_next(rows),
        record_ids=tuple(row.record.id for row in rows),
        exit_code=Exit.FAILED_ROW if any(row.record.failure is not None for row in rows) else Exit.DONE,
        picture=lambda: load_figure(rows),
    )


def _answer_row(row: LoadSummary, first: LoadSummary) -> Row:
    metrics = [SUSTAINABLE_RATE(row.sustainable_rate, row.sustainable_rate if row.is_open_ended else None)]
    if row is not first and row.model == first.model and row.sustainable_rate and first.sustainable_rate:
        ratio = row.sustainable_rate / first.sustainable_rate
        # A recipe that sustains every rate it was asked for has only a lower bound, and so has its ratio.
        if not (row.is_open_ended and first.is_open_ended):
            metrics.append(RATIO(ratio, ratio if row.is_open_ended else None, ratio if first.is_open_ended else None))
    prepared, failure = row.record.prepared, row.record.failure
    notes: tuple[Note, ...] = ()
    if prepared is not None and prepared.numerics.is_wrong:
        reason = f": {prepared.numerics.reason}" if prepared.numerics.reason else ""
        notes = (note("above-tolerance", f"its outputs are too far from fp32{reason}", about="numerics"),)
    return Row(
        facts={"recipe": row.recipe, "model": row.model, "is_open_ended": row.is_open_ended},
        metrics=tuple(metrics),
        notes=notes,
        failure=failure.line if failure is not None else "",
        record_id=row.record.id,
    )


def _headline(rows: Sequence[LoadSummary], answers: Sequence[Row]) -> Headline:
    first = rows[0]
    target_s = first.load.slo_p99_s
    within = f"p99 within {format_seconds(target_s)}" if target_s is not None else "no growing backlog"
    best = max(answers, key=lambda row: row.value("sustainable_rate"))
    figures: dict[str, Any] = {"recipe": best["recipe"], "model": best["model"], "within": within}
    if not best.value("sustainable_rate"):
        return Headline(template="No rate that was offered is sustained by {model} with {within}.", figures=figures)
    figures |= {"rate": best["sustainable_rate"]}
    text = "{model} under {recipe} sustains {rate} with {within}"
    if "ratio" in best:
        figures |= {"ratio": best["ratio"], "first": first.recipe}
        text += ", {ratio} as many as under {first}"
    return Headline(template=f"{text}.", figures=figures)


def _next(rows: Sequence[LoadSummary]) -> str:
    sound = [row for row in rows if row.points and row.record.failure is None]
    if not sound:
        return f"redline history show {rows[0].record.id[:13]}"
    open_ended = [row.points[-1].rate for row in sound if row.is_open_ended]
    if open_ended:
        return f"ask for higher rates than {format_rate(max(open_ended))}"
    if all(row.sustainable_rate is None for row in sound):
        return f"ask for lower rates than {format_rate(sound[0].points[0].rate)}, or for a faster recipe with -r"
    if len(rows) == 1:
        return f"redline tune {rows[0].model}" if not rows[0].model.startswith("live:") else ""
    return "--plot FILE.png draws the curves, and --report DIR puts them on a page"
