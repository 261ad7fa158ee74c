"""This module answers what was measured, from the records of one process (`Measurement`) or of several (`Replicates`), also beside others
(`Line`).

Nothing is copied out of a record. Each figure is derived from it when somebody asks, and kept; `redline.analyze.rows` makes rows of them.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, Self

import msgspec

from redline.analyze.advice import bare_step, command_line, options_of, worth_trying
from redline.analyze.blocks import (
    Latency,
    blocks_as,
    energy_figures,
    latency_of,
    median_step_s,
    memory_of,
    per_wall_second,
    phase_medians,
    round_medians_s,
    throughput_interval,
    timed_blocks,
    utilisation_of,
)
from redline.analyze.bound import Bound, bound
from redline.analyze.generation import Generation, TokenTimes, generation_of
from redline.analyze.load import LoadSummary, load_of
from redline.analyze.pairs import TIME_BAND, RaceVerdict, log_ratio, racer_name, ratio_in_turns, ratio_over, verdict_of
from redline.analyze.roofline import Roofline, at_step, roofline_of
from redline.analyze.statistics import Interval, mean_interval
from redline.analyze.train import TrainingSummary, training_of
from redline.analyze.trust import Verdict, farthest, verdict
from redline.model.fields import Frozen
from redline.model.identity import Subject, batch_of, conditions_of, is_capture, subjects_of
from redline.model.note import note
from redline.model.record import (
    ColdStart,
    Failure,
    Memory,
    Numerics,
    Prepared,
    RunRecord,
    device_name,
    device_of,
)
from redline.model.spec import BASELINE, RunSpec, Task
from redline.model.work import Ceilings

CeilingsOf = Callable[[RunRecord], Ceilings | None]
"""This function returns what is known of the limits of the device that a record was measured on."""


class VersusFirst(Frozen, frozen=True, kw_only=True):
    """This compares one with the first of the group. `ratio` is time of the first over time of this one: above 1 is faster."""

    recipe: str = ""
    """This is the recipe of the first."""
    ratio: float
    low: float | None
    """It is None with too few common rounds for an interval; the ratio is then one of medians."""
    high: float | None
    memory_change: float | None
    first_doubted: bool = False
    """The first's own times are not to be relied on, so that nothing is decided against it."""

    @property
    def verdict(self) -> RaceVerdict:
        """Returns whether the interval decides it; without one nothing is decided."""
        return "inconclusive" if self.low is None or self.high is None else verdict_of(self.low, self.high)


class Measurement:
    """A measurement is one record. None is unknown, never a guess; what failed has no speed, even if some blocks were timed."""

    def __init__(
        self,
        record: RunRecord,
        ceilings: Ceilings | None = None,
        first: Measurement | None = None,
        beside: Collection[str] = (),
    ) -> None:
        """`first`: what it is set against, of its own group. `beside`: the recipes that were measured with it."""
        self.record, self.ceilings, self.first, self.beside = record, ceilings, first, beside
        self.per_hour: float | None = None
        """This is the price of an hour of the machine."""
        self.pacer: Measurement | None = None
        """The measurement whose speed, times the ratio, is the speed of this one (`agreeing`)."""
        self.told: dict[str, Any] = {}
        """These are figures that others know better than this record, such as a ratio that a search saw in more processes."""

    def changed(self, **given: Any) -> Self:
        """Returns the same with another price, or with figures that are known better; what follows from them is derived anew."""
        other = object.__new__(type(self))
        known = {name: value for name, value in vars(self).items() if name in _GIVEN}
        own = {name: value for name, value in given.items() if name in _GIVEN}
        told = self.told | {name: value for name, value in given.items() if name not in _GIVEN}
        vars(other).update({**known, **own, "told": told, **told})
        return other

    # What it is

    @property
    def spec(self) -> RunSpec:
        return self.record.spec

    @property
    def prepared(self) -> Prepared | None:
        return self.record.prepared

    @property
    def processes(self) -> tuple[Measurement, ...]:
        """Returns each process by itself."""
        return (self,)

    @property
    def replicate_ids(self) -> tuple[str, ...]:
        """Returns the records of all processes, where there are several; `record_id` is the middle one."""
        return tuple(each.record.id for each in self.processes) if len(self.processes) > 1 else ()

    @cached_property
    def record_id(self) -> str:
        return self.record.id

    @property
    def group(self) -> str | None:
        return self.record.group

    @cached_property
    def model(self) -> str:
        return self.spec.workload.model

    @cached_property
    def task(self) -> Task:
        return self.spec.workload.task

    @cached_property
    def recipe(self) -> str:
        return str(self.spec.recipe)

    @cached_property
    def batch(self) -> int | None:
        return batch_of(self.record)

    @cached_property
    def items_per_step(self) -> int | None:
        """Returns how many items of a step throughput counts: the batch, the items declared, or 1 step."""
        return self.prepared.workload.items_per_step if self.prepared is not None else None

    @cached_property
    def item(self) -> str | None:
        return self.prepared.workload.item if self.prepared is not None else None

    @property
    def device(self) -> str:
        return device_of(self.record)

    @property
    def device_name(self) -> str | None:
        return device_name(self.record) or None

    @cached_property
    def conditions(self) -> dict[str, Any]:
        """Returns what tells it from its neighbours: threads, sizes, optimizer, loss, versions."""
        return conditions_of(self.record)

    @cached_property
    def failure(self) -> Failure | None:
        return self.record.failure

    @cached_property
    def arguments(self) -> str | None:
        """Returns MODEL and options with which any command measures the same workload again, or None for a live model."""
        plain = command_line("profile", self._bare, batch=self._bare.workload.batch, recipes=())
        return plain.removeprefix("redline profile ") if plain is not None else None

    @property
    def _bare(self) -> RunSpec:
        """Returns the spec for other commands, which measure the bare step of a training on data."""
        return self.spec if self.spec.train is None else bare_step(self.record) or self.spec

    def command(self, name: str, recipes: Sequence[str] = ()) -> str | None:
        """`redline NAME` on the same workload with everything that was asked for; None for a live model."""
        if self.arguments is None:
            return None
        words = ["redline", name, self.arguments, options_of(name, self._bare) if name in ("run", "tune") else ""]
        words += [f"--replicates {len(self.processes)}"] if name == "run" and len(self.processes) > 1 else []
        return " ".join(filter(None, [*words, *(f"-r {shlex.quote(recipe)}" for recipe in recipes)]))

    # What it says

    @cached_property
    def verdict(self) -> Verdict:
        return verdict(self.record)

    @cached_property
    def bound(self) -> Bound:
        return bound(self.record, self.ceilings)

    @cached_property
    def worth_trying(self) -> tuple[str, ...]:
        """Recipes that model and device allow and that may help, the most promising last."""
        return worth_trying(self.record, self.ceilings, host_bound=self.bound.label == "host", known=self.beside)

    @cached_property
    def numerics(self) -> Numerics | None:
        return self.prepared.numerics if self.prepared is not None else None

    @cached_property
    def quantizes(self) -> bool:
        return self.prepared is not None and self.prepared.capabilities.quantizes

    @cached_property
    def cold_start_s(self) -> ColdStart | None:
        return self.prepared.cold_start if self.prepared is not None else None

    @cached_property
    def memory(self) -> Memory | None:
        return memory_of(self.record)

    @cached_property
    def training(self) -> TrainingSummary | None:
        return training_of(self.record, self.ceilings) if self.spec.train is not None else None

    @cached_property
    def load(self) -> LoadSummary | None:
        """It is there for requests that arrived by themselves."""
        return load_of(self.record) if self.spec.load is not None else None

    @cached_property
    def generation(self) -> Generation | None:
        return generation_of(self.record, self.ceilings) if self._is_timed else None

    @property
    def ttft_s(self) -> float | None:
        """Returns the median time to the first token of a generation."""
        return self.generation.ttft_s if self.generation is not None else None

    @property
    def tpot_s(self) -> TokenTimes | None:
        """Returns the time per output token after the first of a generation."""
        return self.generation.tpot_s if self.generation is not None else None

    @cached_property
    def phases_s(self) -> dict[str, float] | None:
        return phase_medians(self.record) if self.failure is None else None

    @cached_property
    def energy(self) -> dict[str, Any]:
        """Returns joules of an item and watts; `is_too_short` where all metered blocks together took less than a counter needs."""
        if self.training is not None:
            return {"per_item_j": self.training.energy_per_sample_j}
        return (
            energy_figures(blocks_as(self.record.blocks, "throughput"), self.items_per_step) if self._is_timed else {}
        )

    @cached_property
    def utilisation(self) -> float | None:
        if self.training is not None:
            return self.training.utilisation
        return utilisation_of(self.record) if self._is_timed else None

    @property
    def cost_per_million(self) -> float | None:
        """Per million items, by what a user gets, at the price per hour that was given."""
        rate = self.delivered_per_s
        return self.per_hour / 3600 / rate * 1e6 if self.per_hour and rate else None

    # How fast it is

    @property
    def _is_timed(self) -> bool:
        return self.failure is None and self.spec.train is None

    @cached_property
    def _own_per_s(self) -> float | None:
        """Returns the speed by the median step of all rounds. A training goes by its whole epochs, which see a loader that stalls now and
        then."""
        if self.training is not None:
            return self.training.samples_per_s if self.failure is None else None
        step_s = median_step_s(timed_blocks(self.record, "throughput")) if self._is_timed else None
        return self.items_per_step / step_s if self.items_per_step and step_s else None

    @cached_property
    def _own_interval(self) -> Interval | None:
        if not self._is_timed:
            return None
        return throughput_interval(timed_blocks(self.record, "throughput"), self.items_per_step)

    @cached_property
    def _own_latency(self) -> Latency | None:
        return latency_of(self.record) if self._is_timed else None

    @cached_property
    def _delivered_share(self) -> float:
        """Returns what the wall clock leaves of the speed where it clearly contradicts the median step, else 1."""
        by_wall = (
            per_wall_second(timed_blocks(self.record, "throughput"), self.items_per_step) if self._is_timed else None
        )
        if self._own_per_s is None or by_wall is None:
            return 1.0
        least = min(self._own_per_s / (1 + TIME_BAND), self._own_interval.low if self._own_interval else math.inf)
        return by_wall / self._own_per_s if by_wall < least else 1.0

    @cached_property
    def _pace(self) -> float:
        """Returns how much faster it was in the rounds that are compared than in all rounds of its own."""
        if self.pacer is None or self.vs_first is None or not self._own_per_s or not self.pacer.throughput_per_s:
            return 1.0
        items = (self.items_per_step or 1) / (self.pacer.items_per_step or 1)
        return self.pacer.throughput_per_s * self.vs_first.ratio * items / self._own_per_s

    @cached_property
    def throughput_per_s(self) -> float | None:
        return None if self._own_per_s is None else self._own_per_s * self._pace

    @cached_property
    def throughput_interval(self) -> Interval | None:
        found, pace = self._own_interval, self._pace
        return found and Interval(low=found.low * pace, median=found.median * pace, high=found.high * pace)

    @cached_property
    def sustained_per_s(self) -> float | None:
        """Returns the speed by the wall clock, where that says clearly less than the median step: the machine stalled now and then."""
        share = self._delivered_share
        return None if share == 1.0 or self.throughput_per_s is None else self.throughput_per_s * share

    @property
    def delivered_per_s(self) -> float | None:
        """Returns what a user would get: recommendations go by this."""
        return self.sustained_per_s if self.sustained_per_s is not None else self.throughput_per_s

    @property
    def step_s(self) -> float | None:
        """Returns the median step, as throughput sees it."""
        return self.items_per_step / self.throughput_per_s if self.items_per_step and self.throughput_per_s else None

    @cached_property
    def latency_s(self) -> Latency | None:
        found, pace = self._own_latency, self._pace
        if found is None or pace == 1.0 or found.clock != "host":  # else it has blocks of its own
            return found
        times = {name: getattr(found, name) for name in ("p50", "p90", "p95", "p99", "mean", "std", "low", "high")}
        return msgspec.structs.replace(found, **{name: value and value / pace for name, value in times.items()})

    @cached_property
    def roofline(self) -> Roofline | None:
        """Returns the roofline, or None where work or ceilings are not known."""
        found, step_s = roofline_of(self.record, self.ceilings), self.step_s
        is_own = self._pace == 1.0 and len(self.processes) == 1
        return found if found is None or is_own or step_s is None else at_step(found, step_s)

    @cached_property
    def vs_first(self) -> VersusFirst | None:
        first = self.first
        if first is None or not self._is_timed or first.record.id == self.record.id or first.failure is not None:
            return None
        own_rounds = round_medians_s(self.record)
        common = round_medians_s(first.record).keys() & own_rounds.keys()
        if not common:
            return None
        paired = ratio_in_turns(first.record, self.record)
        # With few rounds one stall would decide their mean; the median step of all of them is what the table shows, too.
        first_s, own_s = (
            median(s for block in timed_blocks(each, "throughput") if block.round in common for s in block.samples)
            for each in (first.record, self.record)
        )
        return VersusFirst(
            recipe=racer_name(first.spec),
            ratio=paired.ratio if paired else first_s / own_s,
            low=paired.low if paired else None,
            high=paired.high if paired else None,
            memory_change=_memory_change(self.memory, first.memory),
            first_doubted=not first.verdict.settles,
        )


_GIVEN = frozenset(vars(Measurement(None)))  # type: ignore[arg-type]
"""A measurement is given these attributes; all others are derived from them."""


def _memory_change(own: Memory | None, first: Memory | None) -> float | None:
    """Compares what the allocator reserved, or else what the whole process held."""
    for name in ("peak_reserved_bytes", "peak_rss_bytes"):
        mine, theirs = getattr(own, name, None), getattr(first, name, None)
        if mine is not None and theirs is not None:
            return mine / theirs - 1 if theirs else None
    return None


class Replicates(Measurement):
    """These are several processes of one thing. The middle one is shown, and every interval has what differs between them.

    Processes whose numbers are doubted are left out where others are sound, and the verdict says how many.
    """

    def __init__(self, processes: Sequence[Measurement]) -> None:
        timed = [each for each in processes if each.throughput_per_s is not None]
        sound = [each for each in timed if each.verdict.trusted] or timed
        ordered = sorted(sound, key=lambda each: each.throughput_per_s or 0.0)
        # A recipe that works in some processes only does not work.
        broken = next((each for each in processes if each.failure is not None), None)
        middle = broken or (ordered[len(ordered) // 2] if ordered else processes[0])
        super().__init__(middle.record, middle.ceilings, middle.first, middle.beside)
        self.per_hour, self._processes, self._middle = middle.per_hour, tuple(processes), middle
        self._timed, self._sound = (timed, sound) if broken is None else ([], [])

    @property
    def processes(self) -> tuple[Measurement, ...]:
        return self._processes

    @property
    def group(self) -> str | None:
        """Returns the group of the first process, because whose middle process is in which group is chance."""
        return self._processes[0].group

    @cached_property
    def numerics(self) -> Numerics | None:
        return farthest(each.numerics for each in self._processes) if self._sound else self._middle.numerics

    @cached_property
    def quantizes(self) -> bool:
        return self.prepared is not None and self.prepared.capabilities.quantizes

    @cached_property
    def cold_start_s(self) -> ColdStart | None:
        return (self._processes[0] if self._sound else self._middle).cold_start_s

    @cached_property
    def verdict(self) -> Verdict:
        if not self._sound:
            return self._middle.verdict
        found = next((each.verdict for each in self._sound if not each.verdict.trusted), self._middle.verdict)
        # An interval over several processes is not that of one.
        notes = [each for each in found.notes if each.code != "one-process" or len(self._sound) == 1]
        if left_out := len(self._timed) - len(self._sound):
            text = f"{left_out} of {len(self._timed)} processes left out: their numbers are doubted"
            notes.append(note("left-out", text))
        return msgspec.structs.replace(found, notes=tuple(notes))

    @cached_property
    def _own_interval(self) -> Interval | None:
        if len(self._sound) < 2:
            return self._middle.throughput_interval
        return mean_interval([each.throughput_per_s or 0.0 for each in self._sound])

    @cached_property
    def _own_per_s(self) -> float | None:
        if len(self._sound) < 2 or self._own_interval is None:
            return self._middle.throughput_per_s
        return self._own_interval.median

    @cached_property
    def _delivered_share(self) -> float:
        # Each process stalls for a share of its own time, but the rates of processes differ for other reasons too.
        shares = [each._delivered_share for each in self._sound or [self._middle]]
        return median(shares) if 2 * sum(share < 1.0 for share in shares) > len(shares) else 1.0

    @cached_property
    def _own_latency(self) -> Latency | None:
        """Returns the latency of the middle process, with an interval of p50 over all of them."""
        known = sorted(
            (each.latency_s for each in self._sound or [self._middle] if each.latency_s is not None),
            key=lambda latency: latency.p50,
        )
        if len(known) < 2:
            return known[0] if known else None
        medians = [latency.p50 for latency in known]
        interval = mean_interval(medians)
        middle = known[len(known) // 2]
        return msgspec.structs.replace(middle, p50=median(medians), low=interval.low, high=interval.high)

    @cached_property
    def vs_first(self) -> VersusFirst | None:
        """Returns the mean over all processes of what was seen in turns; its interval covers what differs between them.

        Processes whose own speed is doubted count too: what disturbed them disturbed the first as well, and a race, which
        stops by this interval, cannot choose among its replicates.
        """
        met = [(each, each.vs_first) for each in self._timed if each.vs_first is not None]
        if not met:
            return None
        logs = [log for each, _ in met if each.first and (log := log_ratio(each.first.record, each.record)) is not None]
        # As a race computes it, which is looked at after each replicate: one recipe has one interval, whoever prints it.
        found = ratio_over(logs)
        if found is None:
            return next((versus for _, versus in met if versus.low is not None), met[0][1])
        is_doubted = all(versus.first_doubted for _, versus in met)
        return msgspec.structs.replace(
            met[0][1], ratio=found.ratio, low=found.low, high=found.high, first_doubted=is_doubted
        )


_GIVEN |= {"_processes", "_middle", "_timed", "_sound"}


def name_of(row: Measurement) -> str:
    """Returns the recipe. Functions that were compared go by their own names."""
    if row.task != "step" or not row.group:
        return row.recipe
    return row.model if row.recipe == BASELINE else f"{row.model} {row.recipe}"


def agreeing(rows: Sequence[Measurement]) -> list[Measurement]:
    """Returns the rows with speeds that agree with the ratios beside them.

    A ratio compares neighbours in time, round by round; a speed is over all rounds of its own process, and on a machine that changes
    pace the two contradict each other. So the speed shown beside a ratio is that of the paired rounds: the first's times the ratio.
    Times of the same blocks go with it.
    """
    firsts: dict[tuple[str | None, str], Measurement] = {}
    for row in rows:
        if row.vs_first is None and row.throughput_per_s is not None:
            firsts.setdefault((row.group, name_of(row)), row)
    pacers = [firsts.get((row.group, row.vs_first.recipe)) if row.group and row.vs_first else None for row in rows]
    return [row.changed(pacer=pacer) if pacer else row for row, pacer in zip(rows, pacers, strict=True)]


def _each(records: Sequence[RunRecord], ceilings_of: CeilingsOf | None) -> list[Measurement]:
    """Returns each record by itself, set against the first of its own group."""
    known, beside = ceilings_of or (lambda _: None), dict[tuple[str | None, str], set[str]]()
    for record in records:
        beside.setdefault((record.group, record.spec.workload.model), set()).add(str(record.spec.recipe))
    made = [
        Measurement(record, known(record), None, beside[record.group, record.spec.workload.model]) for record in records
    ]
    firsts: dict[str, Measurement] = {}
    for row in made:
        if row.group and (row.group not in firsts or row.record.position < firsts[row.group].record.position):
            firsts[row.group] = row
    for row in made:
        row.first = firsts.get(row.group or "")
    return made


def measurements(records: Sequence[RunRecord], ceilings_of: CeilingsOf | None = None) -> list[Measurement]:
    """Returns one per record, in the order given; each is set against the first of its own group."""
    return agreeing(_each(records, ceilings_of))


def joined(processes: Sequence[Measurement]) -> Measurement:
    """Returns all processes of one thing as one."""
    return processes[0] if len(processes) == 1 else Replicates(processes)


def over_processes(records: Sequence[RunRecord], ceilings_of: CeilingsOf | None = None) -> list[Measurement]:
    """Returns one for all records of one spec, in the order of their first."""
    together: dict[tuple[bytes, int], list[Measurement]] = {}
    copies: Counter[tuple[bytes, str]] = Counter()
    for row in measurements(records, ceilings_of):
        # A recipe that is compared with itself has the same spec several times in a group.
        spec = msgspec.msgpack.encode(row.spec), row.group or row.record.id
        copies[spec] += 1
        together.setdefault((spec[0], copies[spec]), []).append(row)
    return agreeing([joined(processes) for processes in together.values()])


@dataclass(frozen=True)
class Line:
    """A line is one recipe at one batch of one subject, over all processes that measured it."""

    subject: Subject
    row: Measurement
    """Its ratio is left out where it is against another recipe than most ratios of its subject are."""

    @property
    def record(self) -> RunRecord:
        """Returns the record that the row shows."""
        return self.row.record

    @property
    def processes(self) -> tuple[tuple[RunRecord, Measurement], ...]:
        """Returns the processes in the order in which they were measured."""
        return tuple((each.record, each) for each in self.row.processes)

    @property
    def measured_at(self) -> float:
        """Returns when the newest of them was measured."""
        return max(record.created_at for record, _ in self.processes)

    @property
    def is_capture(self) -> bool:
        return is_capture(self.record)


def lines_of(rows: Sequence[Measurement]) -> list[Line]:
    """Returns the lines in the order in which things were first measured, those of a group as they were asked for: a race opens them in any
    order.

    What failed, and what ran beside a profile, stays apart. `rows`: one per record.
    """
    subjects = subjects_of([row.record for row in rows])
    begun: dict[str, int] = {}
    for index, row in enumerate(rows):
        begun.setdefault(row.group or row.record.id, index)
    firsts = _usual_firsts(subjects, rows)
    together: dict[Hashable, list[Measurement]] = {}
    of_key: dict[Hashable, Subject] = {}
    for subject, row in sorted(
        zip(subjects, rows, strict=True),
        key=lambda pair: (begun[pair[1].group or pair[1].record.id], pair[1].record.position),
    ):
        is_odd = row.vs_first is not None and row.vs_first.recipe != firsts[subject]
        key = _same(subject, row)
        of_key[key] = subject
        together.setdefault(key, []).append(row.changed(vs_first=None) if is_odd else row)
    agreed = agreeing([joined(processes) for processes in together.values()])
    return [Line(of_key[key], row) for key, row in zip(together, agreed, strict=True)]


def _usual_firsts(subjects: Sequence[Subject], rows: Iterable[Measurement]) -> Mapping[Subject, str]:
    """Returns for each subject the recipe that most of its ratios are against.

    It is the baseline where any ratio of a subject is against it, because an ablation sets its recipes against the winner.
    """
    counts: dict[Subject, Counter[str]] = {}
    for subject, row in zip(subjects, rows, strict=True):
        if row.vs_first is not None:
            counts.setdefault(subject, Counter())[row.vs_first.recipe] += 1
    return {
        subject: BASELINE if BASELINE in firsts else firsts.most_common(1)[0][0] for subject, firsts in counts.items()
    }


def _same(subject: Subject, row: Measurement) -> Hashable:
    if row.throughput_per_s is None or is_capture(row.record) or row.prepared is None or row.spec.train is not None:
        return row.record.id
    environment = row.prepared.environment
    return subject, row.recipe, row.batch, environment.versions.get("torch"), environment.device.driver
