"""What the trials of a batch search say: the largest batch that fits, the knee, the best under a latency target.

A pure function of the trials' records, in the order in which they were made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from redline.analyze.advice import command_line
from redline.analyze.blocks import (
    ThroughputInterval,
    latency_blocks,
    limit_bytes,
    needed_bytes,
    peak,
    resident_bytes,
    retries_while_timed,
)
from redline.analyze.statistics import percentile_ceiling
from redline.analyze.summary import Line, RunSummary, summarize
from redline.analyze.trust import DISQUALIFYING
from redline.model.errors import SpecError
from redline.model.fields import Frozen
from redline.model.identity import Subject, condition_words, conditions_of
from redline.model.note import Note, note
from redline.model.record import Failure, RunRecord, device_of
from redline.model.spec import Task
from redline.model.units import format_bytes, format_rate, format_seconds

Purpose = Literal["largest", "knee", "slo"]

SLO_CONFIDENCE = 0.95
SLO_TESTS = 8
"""At most this many batches are compared with the target; the error probability is divided among them."""
CLEARLY_FASTER = 1.03
FEWEST_BATCHES = 3
"""Two points always lie on a line: a knee through them would have no evidence."""
LARGEST_MISFIT = 0.2
"""Points further than this from t = a + c·b are not described by it."""
BEYOND = 1.5
"""A batch this many times the knee must have been measured, unless one curve describes all of several batches well: else
nobody saw that more brings little."""


class BatchTrial(Frozen):
    """One batch, tried in its own process."""

    batch: int
    fits: bool
    peak_reserved_bytes: int | None = None
    """What the allocator took; None on a CPU."""
    throughput_per_s: float | None = None
    throughput_interval: ThroughputInterval | None = None
    """At 95 %, within its process."""
    trust: tuple[str, ...] = ()
    """The labels of its verdict."""
    items_per_step: int | None = None
    """What throughput counts, where that is not the batch."""
    latency_p95_s: float | None = None
    """None where too few steps were timed."""
    latency_p50_s: float | None = None
    latency_p95_ceiling_s: float | None = None
    """p95 is at or below this, with the confidence that the target requires."""
    ttft_s: float | None = None
    """Generation: the median time to the first token."""
    tpot_s: float | None = None
    """Generation: p95 of the time per further token; with too few tokens for p95, the median."""
    needed_bytes: int | None = None
    """What must fit: the least a step ran with, on a CPU all that the worker held."""
    resident_bytes: int | None = None
    limit_bytes: int | None = None
    memory_share: float | None = None
    """Needed over the limit."""
    items_per_s_per_gib: float | None = None
    bound: str = "unknown"
    allocator_retries: int = 0
    """While timing: it fits only because the allocator frees its cache repeatedly, which costs time."""
    purpose: Purpose = "largest"
    failure: Failure | None = None
    record_id: str = ""

    @property
    def is_oom(self) -> bool:
        return self.failure is not None and self.failure.kind == "oom"


class SloTargets(Frozen):
    """What a batch must keep to be recommended."""

    p95_s: float | None = None
    """For p95 of a step."""
    ttft_s: float | None = None
    """Generation: for the median time to the first token."""
    tpot_s: float | None = None
    """Generation: for p95 of the time per further token; with too few tokens for p95, for the median."""

    def __post_init__(self) -> None:
        for name in ("p95", "ttft", "tpot"):
            value = getattr(self, f"{name}_s")
            if value is not None and not value > 0:
                raise SpecError(f"slo_{name} must be above 0, got {value}")

    def __bool__(self) -> bool:
        return any(target is not None for target in (self.p95_s, self.ttft_s, self.tpot_s))

    def __str__(self) -> str:
        named = {"p95": self.p95_s, "TTFT": self.ttft_s, "TPOT": self.tpot_s}
        return ", ".join(f"{name} ≤ {format_seconds(target)}" for name, target in named.items() if target is not None)

    def are_kept(self, trial: BatchTrial) -> bool:
        """A tail that is not known keeps no target."""
        measured = [trial.latency_p95_ceiling_s, trial.ttft_s, trial.tpot_s]
        pairs = zip((self.p95_s, self.ttft_s, self.tpot_s), measured, strict=True)
        return all(target is None or (found is not None and found <= target) for target, found in pairs)

    def excess(self, trial: BatchTrial) -> float:
        """How many times over the target it misses most (or comes closest to), by the best that is known of it."""
        latency_s = trial.latency_p95_ceiling_s or trial.latency_p95_s or trial.latency_p50_s
        pairs = ((self.p95_s, latency_s), (self.ttft_s, trial.ttft_s), (self.tpot_s, trial.tpot_s))
        return max((found / target for target, found in pairs if target is not None and found), default=1.0)


class Knee(Frozen):
    """The smallest measured batch whose throughput reaches `SATURATED` of what larger batches reach at most."""

    batch: int
    throughput_per_s: float
    """As measured at this batch."""
    share: float
    """Share of the limit."""
    limit_per_s: float
    """What throughput nears as the batch grows: by the fit, or what was surely measured, whichever is more."""
    above: int | None = None
    """The largest measured batch below it, which does not reach as much: the knee is above this one."""


class BatchSummary(Frozen):
    """All that a search for one recipe found."""

    model: str
    task: Task
    recipe: str
    device: str
    device_name: str | None = None
    setting: str = ""
    """Sizes, threads, versions, in words; what all trials have in common."""
    item: str | None = None
    limit_bytes: int | None = None
    max_batch: int | None = None
    """The largest that ran in its own process; None where none did."""
    max_batch_below: int | None = None
    """The largest there is lies below this, by the trials and by their secant; None where nothing bounds it."""
    knee: Knee | None = None
    """None where the measured batches do not show one; a note then says why."""
    slo_p95_s: float | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_batch: int | None = None
    """The best batch that keeps the targets; p95 of a step with 95 % confidence."""
    ooms: int = 0
    saturation: Saturation | None = None
    trials: tuple[BatchTrial, ...] = ()
    notes: tuple[Note, ...] = ()
    at_length: str | None = None
    """The command that measures the largest batch thoroughly; None where no command line can name the model."""

    @property
    def slo(self) -> SloTargets:
        return SloTargets(p95_s=self.slo_p95_s, ttft_s=self.slo_ttft_s, tpot_s=self.slo_tpot_s)

    @property
    def knee_batch(self) -> int | None:
        return self.knee.batch if self.knee else None


def trial_of(record: RunRecord, purpose: Purpose = "largest") -> BatchTrial:
    (row,) = summarize([record])
    batch = record.spec.workload.batch or row.batch
    assert batch is not None
    if record.failure is not None or row.throughput_per_s is None:
        failure = row.failure or Failure(stage="measure", kind="crash", message="no step was timed")
        return BatchTrial(batch=batch, fits=False, purpose=purpose, failure=failure, record_id=record.id)
    needed, limit = needed_bytes(record), limit_bytes(record)
    return msgspec.structs.replace(
        timed_trial(batch, record, row),
        peak_reserved_bytes=peak(record, "peak_reserved_bytes"),
        latency_p95_ceiling_s=p95_ceiling_s(record),
        ttft_s=row.ttft_s,
        tpot_s=(row.tpot_s.p95 or row.tpot_s.p50) if row.tpot_s is not None else None,
        resident_bytes=resident_bytes(record),
        limit_bytes=limit,
        memory_share=needed / limit if needed is not None and limit else None,
        items_per_s_per_gib=row.throughput_per_s / (needed / 2**30) if needed else None,
        purpose=purpose,
    )


def trial_words(trial: BatchTrial) -> str:
    """A trial in one line, for whoever looks on."""
    if not trial.fits:
        why = trial.failure.told if trial.failure is not None and not trial.is_oom else "does not fit"
        return f"batch {trial.batch}: {why}"
    parts = [f"batch {trial.batch}: {format_rate(trial.throughput_per_s)} items/s", format_bytes(trial.needed_bytes)]
    return ", ".join([*parts, *(label for label in trial.trust if label != "valid")])


def timed_trial(batch: int, record: RunRecord, row: RunSummary) -> BatchTrial:
    """What every curve over batches needs of a record that was timed, whoever asked for it."""
    return BatchTrial(
        batch=batch,
        fits=True,
        throughput_per_s=row.throughput_per_s,
        throughput_interval=row.throughput_interval,
        trust=row.verdict.labels,
        items_per_step=row.items_per_step,
        latency_p50_s=row.latency_s.p50 if row.latency_s else None,
        latency_p95_s=row.latency_s.p95 if row.latency_s else None,
        needed_bytes=needed_bytes(record),
        bound=row.bound.label,
        allocator_retries=retries_while_timed(record),
        record_id=record.id,
    )


def p95_ceiling_s(record: RunRecord) -> float | None:
    """An upper bound of p95 that holds for all batches of a search at once."""
    return percentile_ceiling(
        [block.samples for block in latency_blocks(record)], 0.95, 1 - (1 - SLO_CONFIDENCE) / SLO_TESTS
    )


def curve_of(trials: Sequence[BatchTrial]) -> Saturation | None:
    """Throughput over the batch, from the trials that only the device limits."""
    return saturation([StepTime(batch=trial.batch, seconds=step_s(trial)) for trial in device_bound(trials)])


def device_bound(trials: Sequence[BatchTrial]) -> list[BatchTrial]:
    """Trials limited neither by the host nor by an allocator short of memory."""
    fitting = [trial for trial in trials if trial.fits]
    # If the device limits one batch, it limits every larger one, even where a few steps suggest otherwise.
    since = min((trial.batch for trial in fitting if trial.bound != "host"), default=math.inf)
    return [trial for trial in fitting if trial.batch >= since and not trial.allocator_retries]


def step_s(trial: BatchTrial) -> float:
    assert trial.throughput_per_s is not None
    return (trial.items_per_step or trial.batch) / trial.throughput_per_s


def items_of_one(trials: Sequence[BatchTrial]) -> float:
    """How many items throughput counts for each of the batch; 1 unless something else was declared."""
    largest = max((trial for trial in trials if trial.fits), key=lambda trial: trial.batch, default=None)
    return (largest.items_per_step or largest.batch) / largest.batch if largest else 1.0


def expected_knee(trials: Sequence[BatchTrial]) -> float | None:
    """Where the fit puts the knee; where small batches wait for the host, not before the device outgrows that wait."""
    curve = curve_of(trials)
    if curve is None:
        return None
    since = min(trial.batch for trial in device_bound(trials))
    host_s = max((step_s(trial) for trial in trials if trial.fits and trial.batch < since), default=0.0)
    return curve.knee(host_s=host_s)


def supported_knee(trials: Sequence[BatchTrial]) -> Knee | Note:
    """The knee where measured batches show one; else why there is none."""
    rates = {trial.batch: trial.throughput_per_s for trial in trials if trial.fits and trial.throughput_per_s}
    curve = curve_of(trials)
    if len(rates) < FEWEST_BATCHES:
        return _no_knee(f"fewer than {FEWEST_BATCHES} batches ran")
    if len({trial.batch for trial in device_bound(trials)}) < 2:
        return _no_knee("fewer than two batches were limited by the device alone")
    if curve is None:
        return _no_knee("a step took no longer for more items")
    if curve.misfit > LARGEST_MISFIT:
        return _no_knee(f"the times do not follow one curve: some are {curve.misfit:.0%} off it")
    limit = max(curve.limit_per_s * items_of_one(trials), *map(_surely_reached, trials))
    # Rounded as it is printed: a row that says 90 % does not deny a knee at 90 %.
    enough = [batch for batch, rate in rates.items() if round(rate / limit, 2) >= SATURATED]
    largest = max(rates)
    if not enough:
        return _no_knee(f"throughput still grows at {largest}, at {rates[largest] / limit:.0%} of its limit")
    batch = min(enough)
    if largest < BEYOND * batch and not (curve.misfit <= WELL_DESCRIBED and len(rates) > FEWEST_BATCHES):
        return _no_knee(
            f"batch {batch} reaches {rates[batch] / limit:.0%} of its limit, but none much larger was measured"
        )
    return Knee(
        batch=batch,
        throughput_per_s=rates[batch],
        share=rates[batch] / limit,
        limit_per_s=limit,
        above=max((each for each in rates if each < batch), default=None),
    )


def _surely_reached(trial: BatchTrial) -> float:
    """The lower end of the rate's interval, because the highest of several noisy rates is too high; None without one."""
    return trial.throughput_interval.low if trial.throughput_interval else 0.0


def _setting(record: RunRecord) -> str:
    """Without the shapes of the inputs, which are those of one trial, and without the limit, which has a field of its own."""
    words = condition_words(conditions_of(record), device_of(record))
    return " · ".join(text for name, text in words.items() if name not in ("inputs", "max_memory_bytes"))


def _no_knee(why: str) -> Note:
    return note("no-knee", f"no knee: {why}")


def best_under(trials: Sequence[BatchTrial], slo: SloTargets) -> BatchTrial | None:
    """The largest batch within the targets, unless a smaller one is clearly faster. Only trials made for it count."""
    kept = [trial for trial in trials if trial.purpose == "slo" and trial.fits and slo.are_kept(trial)]
    if not kept:
        return None
    largest = max(kept, key=lambda trial: trial.batch)
    fastest = max(kept, key=lambda trial: trial.throughput_per_s or 0.0)
    assert largest.throughput_per_s is not None
    assert fastest.throughput_per_s is not None
    return fastest if fastest.throughput_per_s > CLEARLY_FASTER * largest.throughput_per_s else largest


def batch_summary(
    records: Sequence[RunRecord],
    trials: Sequence[BatchTrial],
    *,
    upper: float,
    slo: SloTargets | None = None,
    multiple: int = 1,
) -> BatchSummary:
    """`upper`: what the search knows the largest to be below; only multiples of `multiple` were tried in the end."""
    assert records
    rows: list[RunSummary] = summarize(records)
    first = rows[0]
    largest = max((trial.batch for trial in trials if trial.fits), default=None)
    knee = supported_knee(trials)
    targets = slo or SloTargets()
    best = best_under(trials, targets) if targets else None
    return BatchSummary(
        model=first.model,
        task=first.task,
        recipe=first.recipe,
        device=first.device,
        device_name=next((row.device_name for row in rows if row.device_name), None),
        setting=next((_setting(record) for record in records if record.prepared is not None), ""),
        item=next((row.item for row in rows if row.item), None),
        limit_bytes=next((trial.limit_bytes for trial in trials if trial.limit_bytes), None),
        max_batch=largest,
        max_batch_below=math.ceil(upper) if math.isfinite(upper) else None,
        knee=None if isinstance(knee, Note) else knee,
        slo_p95_s=targets.p95_s,
        slo_ttft_s=targets.ttft_s,
        slo_tpot_s=targets.tpot_s,
        slo_batch=best.batch if best else None,
        ooms=sum(trial.is_oom for trial in trials),
        saturation=curve_of(trials),
        trials=tuple(trials),
        notes=tuple(_notes(trials, largest, knee, targets, best, multiple)),
        at_length=command_line("run", records[0].spec, batch=largest) if largest is not None else None,
    )


def _notes(
    trials: Sequence[BatchTrial],
    largest: int | None,
    knee: Knee | Note,
    slo: SloTargets,
    best: BatchTrial | None,
    multiple: int,
) -> Iterator[Note]:
    if largest is None:
        last = trials[-1].failure
        why = last.message if last else "nothing timed"
        yield note("no-batch", f"no batch ran; batch {trials[-1].batch} ended with: {why}")
    elif isinstance(knee, Note):
        yield knee
    doubted = [trial for trial in trials if DISQUALIFYING.intersection(trial.trust)]
    if doubted:
        labels = ", ".join(sorted({label for trial in doubted for label in DISQUALIFYING.intersection(trial.trust)}))
        told = f"{len(doubted)} of {len(trials)} trials are doubted ({labels})"
        yield note("doubted-trials", f"{told}: speeds and knee may be off; what fits is not")
    if slo and best is None and largest is not None:
        sure = " with 95 % confidence" if slo.p95_s is not None else ""
        yield note("over-target", f"no batch was within the latency target{sure}")
    squeezed = [trial.batch for trial in trials if trial.fits and trial.allocator_retries]
    if squeezed:
        told = ", ".join(str(batch) for batch in sorted(set(squeezed)))
        text = f"short of memory at batch {told}: the allocator freed its cache while timing, which costs speed"
        yield note("short-of-memory", text)
    for trial in trials:
        if trial.failure and (found := next((each for each in trial.failure.notes if each.code == "fragmented"), None)):
            yield note("fragmented", f"batch {trial.batch} failed because memory was fragmented: {found}")
    odd = next((trial for trial in trials if trial.failure and not trial.is_oom), None)
    if odd is not None and odd.failure is not None and largest is not None:
        then = f"; from then on multiples of {multiple} were tried" if multiple > 1 else ""
        text = f"batch {odd.batch} failed for another reason than memory: {odd.failure.told}{then}"
        yield note("other-failure", text)


SATURATED = 0.9
"""The knee is where throughput reaches this fraction of its limit."""
FEWEST_POINTS = 2
FEWEST_KEPT = 3
"""With this few points none is left out: two points always lie on a line."""
WELL_DESCRIBED = 0.05
"""A curve that misses a point by more is not the curve of all of them."""


class StepTime(Frozen):
    """The median step of one batch, where the device and not the host was the limit."""

    batch: int
    seconds: float


class Saturation(Frozen):
    """A fitted curve of throughput over the batch."""

    fixed_s: float
    """a: paid by every step, however small."""
    per_item_s: float
    """c: paid by every item."""
    misfit: float
    """The largest relative distance of a point from the curve."""

    @property
    def limit_per_s(self) -> float:
        return 1 / self.per_item_s

    def seconds(self, batch: float) -> float:
        return self.fixed_s + self.per_item_s * batch

    def knee(self, fraction: float = SATURATED, *, host_s: float = 0.0) -> float:
        """The batch at which throughput reaches this fraction of its limit; 1 or more.

        Where every step takes the host `host_s` to issue, the device's part must have outgrown that too.
        """
        saturated = fraction / (1 - fraction) * self.fixed_s / self.per_item_s
        return max(1.0, saturated, fraction * host_s / self.per_item_s)

    def reached(self, batch: float) -> float:
        """The fraction of the limit that this batch reaches."""
        return batch * self.per_item_s / self.seconds(batch)


def saturation(points: Sequence[StepTime]) -> Saturation | None:
    """The curve through device-bound points; None where two batches are missing.

    Below some batch a step takes what its kernels take to start and to end, and hardly less for fewer items. Where one
    line does not describe all points, the smallest batches are left out: the limit is a matter of the large ones.
    """
    kept = sorted(points, key=lambda point: point.batch)
    found = _fitted(kept)
    while found is not None and found.misfit > WELL_DESCRIBED:
        larger = [point for point in kept if point.batch > kept[0].batch]
        without = _fitted(larger) if len({point.batch for point in larger}) >= FEWEST_KEPT else None
        if without is None:
            break
        kept, found = larger, without
    return found


def _fitted(points: Sequence[StepTime]) -> Saturation | None:
    """By least squares of relative errors.

    A step time that does not grow with the batch has no limit to near, and a negative fixed part is noise: it is taken
    as none at all.
    """
    if len({point.batch for point in points}) < FEWEST_POINTS:
        return None
    batches = np.array([point.batch for point in points], dtype=np.float64)
    seconds = np.array([point.seconds for point in points], dtype=np.float64)
    # Dividing by the time makes one percent count the same at every batch.
    design = np.stack([1 / seconds, batches / seconds], axis=1)
    fixed_s, per_item_s = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)[0]
    if fixed_s < 0:
        rates = batches / seconds
        fixed_s, per_item_s = 0.0, float(rates.sum() / (rates @ rates))
    if per_item_s <= 0:
        return None
    fitted = fixed_s + per_item_s * batches
    return Saturation(
        fixed_s=float(fixed_s), per_item_s=float(per_item_s), misfit=float(np.max(np.abs(fitted / seconds - 1)))
    )


class Curve(Frozen):
    """The rows of one recipe, one for each batch, with the batches growing."""

    subject: Subject
    recipe: str
    rows: tuple[RunSummary, ...]
    knee: Knee | None = None
    """None if the measured batches do not show one."""

    @property
    def measured(self) -> list[RunSummary]:
        return [row for row in self.rows if row.throughput_per_s is not None]


def curves_of(lines: Sequence[Line]) -> list[Curve]:
    """In the order in which subjects and recipes first appear."""
    chosen: dict[tuple[Subject, str], dict[int, Line]] = {}
    for line in lines:
        batch = line.row.batch
        if batch is None:
            continue
        points = chosen.setdefault((line.subject, line.row.recipe), {})
        if batch not in points or _standing(line) > _standing(points[batch]):
            points[batch] = line
    return [_curve(subject, recipe, points) for (subject, recipe), points in chosen.items()]


def _standing(line: Line) -> tuple[bool, bool, float, str]:
    """Of several lines of one batch the one with the highest standing is shown: it ran, was measured at length, and is the newest."""
    return line.row.failure is None, not line.is_capture, line.measured_at, line.record.id


def _curve(subject: Subject, recipe: str, points: dict[int, Line]) -> Curve:
    lines = [points[batch] for batch in sorted(points)]
    knee = supported_knee([_trial(line) for line in lines])
    return Curve(
        subject=subject,
        recipe=recipe,
        rows=tuple(line.row for line in lines),
        knee=None if isinstance(knee, Note) else knee,
    )


def _trial(line: Line) -> BatchTrial:
    row, batch = line.row, line.row.batch or 0
    if row.throughput_per_s is None:
        failure = row.failure or Failure(stage="measure", kind="crash", message="no step was timed")
        return BatchTrial(batch=batch, fits=False, failure=failure, record_id=line.record.id)
    return timed_trial(batch, line.record, row)
