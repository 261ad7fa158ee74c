"""The derived row of a record, and of records measured together: what tables print and `--json` carries."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import Any

import msgspec

from redline.analyze.advice import bare_step, command_line, options_of, worth_trying
from redline.analyze.blocks import (
    Latency,
    ThroughputInterval,
    blocks_as,
    energy_figures,
    latency_of,
    median_step_s,
    memory_of,
    per_wall_second,
    phase_medians,
    ratio_in_turns,
    round_medians_s,
    throughput_interval,
    timed_blocks,
    utilisation_of,
)
from redline.analyze.bound import Bound, bound
from redline.analyze.generation import Generation, TokenTimes, generation_of
from redline.analyze.load import LoadSummary, load_of
from redline.analyze.pairs import TIME_BAND, RaceVerdict, log_ratio, racer_name, ratio_over, verdict_of
from redline.analyze.roofline import Roofline, at_step, roofline_of
from redline.analyze.statistics import student_t
from redline.analyze.train import TrainingSummary, training_of
from redline.analyze.trust import Verdict, farthest, verdict
from redline.model.fields import Frozen
from redline.model.identity import Subject, batch_of, conditions_of, is_capture, subjects_of
from redline.model.note import note
from redline.model.record import (
    BatchOrigin,
    Capabilities,
    ColdStart,
    Failure,
    Memory,
    Numerics,
    RunRecord,
    device_of,
)
from redline.model.spec import BASELINE, Task
from redline.model.units import significant
from redline.model.work import Ceilings

CeilingsOf = Callable[[RunRecord], Ceilings | None]
"""What is known of the limits of the device a record was measured on."""


class VersusFirst(Frozen, frozen=True, kw_only=True):
    """Against the first of the group. `ratio` is time of the first over time of this one: above 1 is faster."""

    recipe: str = ""
    """The first's."""
    ratio: float
    low: float | None
    """None with too few common rounds for an interval; the ratio is then one of medians."""
    high: float | None
    memory_change: float | None
    first_doubted: bool = False
    """The first's own times are not to be relied on, so that nothing is decided against it."""

    @property
    def verdict(self) -> RaceVerdict:
        """Returns whether the interval decides it; without one nothing is decided."""
        return "inconclusive" if self.low is None or self.high is None else verdict_of(self.low, self.high)


class RunSummary(Frozen, frozen=True, kw_only=True):
    """One row. None means unknown, never a guess; a failed run has no speed, even if some blocks were timed."""

    model: str
    task: Task
    recipe: str
    batch: int | None = None
    """None where it is unknown."""
    batch_from: BatchOrigin | None = None
    """How the batch is known."""
    items_per_step: int | None = None
    """What throughput counts: the batch, the items declared, or 1 step."""
    item: str | None = None
    device: str
    device_name: str | None = None
    conditions: dict[str, Any] = {}
    """Threads, sizes, optimizer, loss, versions: what tells it from its neighbours."""
    throughput_per_s: float | None = None
    throughput_interval: ThroughputInterval | None = None
    sustained_per_s: float | None = None
    """This is by the wall clock, if that says clearly less than the median step: the machine stalled now and then, and this is
    what a user would get. None where the two agree."""
    latency_s: Latency | None = None
    phases_s: dict[str, float] | None = None
    memory: Memory | None = None
    cold_start_s: ColdStart | None = None
    numerics: Numerics | None = None
    capabilities: Capabilities | None = None
    """What the recipe does to the program, as its switches say; None where it was never prepared."""
    energy_per_item_j: float | None = None
    """None where the device has no counter, or its blocks were too short for it."""
    power_w: float | None = None
    """Mean over the metered blocks."""
    energy_too_short: bool = False
    """There is a counter, but all metered blocks together took less than it needs for a figure."""
    utilisation: float | None = None
    """The mean of the samples of the device that were taken while blocks ran."""
    cost_per_million: float | None = None
    """Per million items, at the price per hour that was given."""
    vs_first: VersusFirst | None = None
    verdict: Verdict
    bound: Bound
    flops: int | None = None
    """Products of one step, forward and backward; None where they were not counted."""
    roofline: Roofline | None = None
    """None where work or ceilings are not known."""
    generation: Generation | None = None
    training: TrainingSummary | None = None
    """For a training on data."""
    load: LoadSummary | None = None
    """It is there for requests that arrived by themselves."""
    failure: Failure | None = None
    """Without its traceback."""
    worth_trying: tuple[str, ...] = ()
    """Recipes that model and device allow and that may help, the most promising last."""
    arguments: str | None = None
    """MODEL and options with which any command measures the same workload again; None for a live model."""
    options: dict[str, str] = {}
    """How it was measured, by the command that can be told: effort, door, whether numerics are checked."""
    record_id: str
    replicate_ids: tuple[str, ...] = ()
    """The records of all processes that this row is about, where there are several; `record_id` is the middle one."""
    group: str | None = None

    def command(self, name: str, recipes: Sequence[str] = ()) -> str | None:
        """`redline NAME` on the same workload with everything that was asked for; None for a live model."""
        if self.arguments is None:
            return None
        words = ["redline", name, self.arguments, self.options.get(name, "")]
        words += [f"--replicates {len(self.replicate_ids)}"] if name == "run" and len(self.replicate_ids) > 1 else []
        words += [f"-r {shlex.quote(recipe)}" for recipe in recipes]
        return " ".join(filter(None, words))

    @property
    def delivered_per_s(self) -> float | None:
        """Returns what a user would get: recommendations go by this."""
        return self.sustained_per_s if self.sustained_per_s is not None else self.throughput_per_s

    @property
    def ttft_s(self) -> float | None:
        """Generation: the median time to the first token."""
        return self.generation.ttft_s if self.generation is not None else None

    @property
    def tpot_s(self) -> TokenTimes | None:
        """Generation: the time per output token after the first."""
        return self.generation.tpot_s if self.generation is not None else None

    @property
    def step_s(self) -> float | None:
        """The median step, as throughput sees it."""
        return self.items_per_step / self.throughput_per_s if self.items_per_step and self.throughput_per_s else None


def summarize(records: Sequence[RunRecord], ceilings_of: CeilingsOf | None = None) -> list[RunSummary]:
    """Returns one row per record, in the order given; each is set against the first of its own group."""
    firsts, known = first_of_each_group(records), ceilings_of or (lambda _: None)
    verdicts = {record.id: verdict(record) for record in records}
    beside: dict[tuple[str | None, str], set[str]] = {}
    for record in records:
        beside.setdefault((record.group, record.spec.workload.model), set()).add(str(record.spec.recipe))
    rows = []
    for record in records:
        first = firsts.get(record.group or "")
        found = _figures(record, known(record), verdicts[record.id])
        if record.failure is None and record.spec.train is None and first is not None:
            found["vs_first"] = _versus(record, first, first_doubted=not verdicts[first.id].settles)
        recipes = beside[record.group, record.spec.workload.model]
        rows.append(RunSummary(**found, **_advice(record, known(record), found["bound"], recipes)))
    return agreeing(rows)


def name_of(row: RunSummary) -> str:
    """The recipe. Functions that were compared go by their own names."""
    if row.task != "step" or not row.group:
        return row.recipe
    return row.model if row.recipe == BASELINE else f"{row.model} {row.recipe}"


def agreeing(rows: Sequence[RunSummary]) -> list[RunSummary]:
    """Returns the rows with speeds that agree with the ratios beside them.

    A ratio compares neighbours in time, round by round; a speed is over all rounds of its own process, and on a machine that changes
    pace the two contradict each other. So the speed shown beside a ratio is that of the paired rounds: the first's times the ratio.
    Times of the same blocks go with it.
    """
    firsts: dict[tuple[str | None, str], RunSummary] = {}
    for row in rows:
        if row.vs_first is None and row.throughput_per_s is not None:
            firsts.setdefault((row.group, name_of(row)), row)
    found = []
    for row in rows:
        first = firsts.get((row.group, row.vs_first.recipe)) if row.vs_first is not None and row.group else None
        if first is None or not row.throughput_per_s or not first.throughput_per_s or row.vs_first is None:
            found.append(row)
            continue
        items = (row.items_per_step or 1) / (first.items_per_step or 1)
        found.append(_at_speed(row, first.throughput_per_s * row.vs_first.ratio * items))
    return found


def _at_speed(row: RunSummary, per_s: float) -> RunSummary:
    factor = per_s / (row.throughput_per_s or per_s)
    changes: dict[str, Any] = {"throughput_per_s": per_s}
    if (interval := row.throughput_interval) is not None:
        changes["throughput_interval"] = msgspec.structs.replace(
            interval, low=interval.low * factor, high=interval.high * factor
        )
    if (latency := row.latency_s) is not None and latency.clock == "host":  # else it has blocks of its own
        times = {name: getattr(latency, name) for name in ("p50", "p90", "p95", "p99", "mean", "std", "low", "high")}
        changes["latency_s"] = msgspec.structs.replace(
            latency, **{name: None if value is None else value / factor for name, value in times.items()}
        )
    return msgspec.structs.replace(row, **changes)


def _advice(record: RunRecord, ceilings: Ceilings | None, found: Bound, beside: Collection[str]) -> dict[str, Any]:
    """Returns what to try next, besides the recipes that were measured with it."""
    # Other commands measure the bare step of a training on data.
    spec = record.spec if record.spec.train is None else bare_step(record) or record.spec
    plain = command_line("profile", spec, batch=spec.workload.batch, recipes=())
    return {
        "worth_trying": worth_trying(record, ceilings, host_bound=found.label == "host", known=beside),
        "arguments": plain.removeprefix("redline profile ") if plain is not None else None,
        "options": {name: words for name in ("run", "tune") if (words := options_of(name, spec))},
    }


def first_of_each_group(records: Iterable[RunRecord]) -> dict[str, RunRecord]:
    firsts: dict[str, RunRecord] = {}
    for record in records:
        if record.group and (record.group not in firsts or record.position < firsts[record.group].position):
            firsts[record.group] = record
    return firsts


def _figures(record: RunRecord, ceilings: Ceilings | None, trust: Verdict) -> dict[str, Any]:
    """The fields of a row that its record alone tells, by name."""
    spec, prepared = record.spec, record.prepared
    found: dict[str, Any] = {
        "record_id": record.id,
        "model": spec.workload.model,
        "task": spec.workload.task,
        "recipe": str(spec.recipe),
        "device": device_of(record),
        "conditions": conditions_of(record),
        "verdict": trust,
        "bound": bound(record, ceilings),
        "group": record.group,
        "batch": batch_of(record),
        "memory": memory_of(record),
        "failure": record.failure.brief() if record.failure is not None else None,
        "load": load_of(record) if spec.load is not None else None,
        "training": training_of(record, ceilings) if spec.train is not None else None,
    }
    if prepared is not None:
        found |= {
            "batch_from": prepared.workload.batch_from,
            "items_per_step": prepared.workload.items_per_step,
            "item": prepared.workload.item,
            "device_name": prepared.environment.device.name or None,
            "cold_start_s": prepared.cold_start,
            "numerics": prepared.numerics,
            "capabilities": prepared.capabilities,
            "flops": prepared.work.total_flops if prepared.work else None,
            "roofline": roofline_of(record, ceilings),
        }
    if record.failure is not None:
        return found
    found["phases_s"] = phase_medians(record)
    if (training := found["training"]) is not None:
        # It is of whole epochs, as medians of single steps do not see a loader that stalls now and then.
        return found | {
            "throughput_per_s": training.samples_per_s,
            "utilisation": training.utilisation,
            "energy_per_item_j": training.energy_per_sample_j,
        }
    blocks, items = timed_blocks(record, "throughput"), found.get("items_per_step")
    step_s = median_step_s(blocks)
    interval, by_wall = throughput_interval(blocks, items), per_wall_second(blocks, items)
    per_s = items / step_s if items and step_s else None
    return found | {
        "throughput_per_s": per_s,
        "throughput_interval": interval,
        "sustained_per_s": by_wall if _stalled(per_s, interval, by_wall) else None,
        "latency_s": latency_of(record),
        **energy_figures(blocks_as(record.blocks, "throughput"), items),
        "utilisation": utilisation_of(record),
        "generation": generation_of(record, ceilings),
    }


def _stalled(per_s: float | None, interval: ThroughputInterval | None, by_wall: float | None) -> bool:
    """Returns whether the wall clock contradicts the median step by more than its interval, and by more than matters."""
    if per_s is None or by_wall is None:
        return False
    return by_wall < min(per_s / (1 + TIME_BAND), interval.low if interval is not None else per_s)


def _versus(record: RunRecord, first: RunRecord, *, first_doubted: bool) -> VersusFirst | None:
    if first.id == record.id or first.failure is not None:
        return None
    first_rounds, own_rounds = round_medians_s(first), round_medians_s(record)
    common = first_rounds.keys() & own_rounds.keys()
    if not common:
        return None
    paired = ratio_in_turns(first, record)
    # With few rounds one stall would decide their mean; the median step of all of them is what the table shows, too.
    first_step, own_step = (_median_step_s(each, common) for each in (first, record))
    return VersusFirst(
        recipe=racer_name(first.spec),
        ratio=paired.ratio if paired else first_step / own_step,
        low=paired.low if paired else None,
        high=paired.high if paired else None,
        memory_change=_memory_change(memory_of(record), memory_of(first)),
        first_doubted=first_doubted,
    )


def _median_step_s(record: RunRecord, rounds: Container[int]) -> float:
    return median(s for block in timed_blocks(record, "throughput") if block.round in rounds for s in block.samples)


def _memory_change(own: Memory | None, first: Memory | None) -> float | None:
    """Compares what the allocator reserved, or else what the whole process held."""
    for name in ("peak_reserved_bytes", "peak_rss_bytes"):
        mine, theirs = getattr(own, name, None), getattr(first, name, None)
        if mine is not None and theirs is not None:
            return mine / theirs - 1 if theirs else None
    return None


def with_price(rows: Sequence[RunSummary], per_hour: float) -> list[RunSummary]:
    """Returns the rows with what a million items cost at this price of the machine."""
    return [
        msgspec.structs.replace(row, cost_per_million=cost_per_million(row.delivered_per_s, per_hour)) for row in rows
    ]


def cost_per_million(per_s: float | None, per_hour: float) -> float | None:
    return per_hour / 3600 / per_s * 1e6 if per_s else None


Process = tuple[RunRecord, RunSummary]


def replicate_rows(records: Sequence[RunRecord], ceilings_of: CeilingsOf | None = None) -> list[RunSummary]:
    """Returns one row for all records of one spec, in the order of their first; a record alone keeps its own row."""
    rows = summarize(records, ceilings_of)
    together: dict[tuple[bytes, int], list[Process]] = {}
    copies: Counter[tuple[bytes, str]] = Counter()
    for record, row in zip(records, rows, strict=True):
        # A recipe that is compared with itself has the same spec several times in a group.
        spec = msgspec.msgpack.encode(record.spec)
        copies[spec, record.group or record.id] += 1
        together.setdefault((spec, copies[spec, record.group or record.id]), []).append((record, row))
    firsts = first_of_each_group(records)
    return agreeing([joined_row(processes, firsts) for processes in together.values()])


@dataclass(frozen=True)
class Line:
    """One recipe at one batch of one subject, over all processes that measured it."""

    subject: Subject
    record: RunRecord
    """The one that `row.record_id` names."""
    row: RunSummary
    """Its ratio is left out where it is against another recipe than most ratios of its subject are."""
    processes: tuple[Process, ...]
    """In the order in which they were measured."""

    @property
    def rates(self) -> tuple[float, ...]:
        """Items per second of each process."""
        return tuple(row.throughput_per_s for _, row in self.processes if row.throughput_per_s is not None)

    @property
    def measured_at(self) -> float:
        """The newest of them."""
        return max(record.created_at for record, _ in self.processes)

    @property
    def is_capture(self) -> bool:
        return is_capture(self.record)

    @property
    def told(self) -> str:
        """How many processes there were and how much they differ."""
        if len(self.rates) < 2:
            return "1"
        low, high = (significant(each, max(3, len(str(round(each))))) for each in (min(self.rates), max(self.rates)))
        return f"{len(self.rates)}: {low}–{high}"


def lines_of(records: Sequence[RunRecord], rows: Sequence[RunSummary]) -> list[Line]:
    """In the order in which things were first measured, those of a group as they were asked for: a race opens them in any order.

    What failed, and what ran beside a profile, stays apart. `rows`: one per record.
    """
    together: dict[Hashable, list[Process]] = {}
    subjects = subjects_of(records)
    usual = _usual_firsts(subjects, rows)
    of_key: dict[Hashable, Subject] = {}
    for index in _as_asked(records):
        subject, record, row = subjects[index], records[index], rows[index]
        if row.vs_first is not None and row.vs_first.recipe != usual[subject]:
            row = msgspec.structs.replace(row, vs_first=None)
        key = _same(subject, record, row)
        of_key[key] = subject
        together.setdefault(key, []).append((record, row))
    firsts = first_of_each_group(records)
    lines = [_line(of_key[key], processes, firsts) for key, processes in together.items()]
    agreed = agreeing([line.row for line in lines])
    return _with_failures([replace(line, row=row) for line, row in zip(lines, agreed, strict=True)])


def _as_asked(records: Sequence[RunRecord]) -> list[int]:
    """Returns their numbers, with those of a group by position, where the first of the group stands."""
    begun: dict[str, int] = {}
    for index, record in enumerate(records):
        begun.setdefault(record.group or record.id, index)
    return sorted(
        range(len(records)), key=lambda at: (begun[records[at].group or records[at].id], records[at].position)
    )


def _with_failures(lines: Sequence[Line]) -> list[Line]:
    """Lines that say how often the same failed since it was first measured: what works now and then is no sure thing."""
    failed: dict[Hashable, list[Line]] = {}
    for line in lines:
        if line.row.failure is not None:
            failed.setdefault((line.subject, line.row.recipe, line.row.batch), []).append(line)
    told = []
    for line in lines:
        since = min(record.created_at for record, _ in line.processes)
        broken = failed.get((line.subject, line.row.recipe, line.row.batch), ())
        ways = [each.row.failure for each in broken if each.measured_at >= since]
        if line.row.failure is None and ways and ways[0] is not None:
            text = f"{len(ways)} more process{'es' if len(ways) > 1 else ''} failed: {ways[0].kind} at {ways[0].stage}"
            verdict = line.row.verdict
            noted = msgspec.structs.replace(verdict, notes=(*verdict.notes, note("also-failed", text)))
            line = replace(line, row=msgspec.structs.replace(line.row, verdict=noted))
        told.append(line)
    return told


def _line(subject: Subject, processes: Sequence[Process], firsts: Mapping[str, RunRecord]) -> Line:
    row = joined_row(processes, firsts)
    record = next(record for record, _ in processes if record.id == row.record_id)
    return Line(subject, record, row, tuple(processes))


def _usual_firsts(subjects: Sequence[Subject], rows: Sequence[RunSummary]) -> dict[Subject, str]:
    """The baseline where any ratio of a subject is against it: an ablation sets its recipes against the winner.

    Else what most are against.
    """
    counts: dict[Subject, Counter[str]] = {}
    for subject, row in zip(subjects, rows, strict=True):
        if row.vs_first is not None:
            counts.setdefault(subject, Counter())[row.vs_first.recipe] += 1
    return {
        subject: BASELINE if BASELINE in firsts else firsts.most_common(1)[0][0] for subject, firsts in counts.items()
    }


def _same(subject: Subject, record: RunRecord, row: RunSummary) -> Hashable:
    if row.throughput_per_s is None or is_capture(record) or record.prepared is None or record.spec.train is not None:
        return record.id
    environment = record.prepared.environment
    return subject, row.recipe, row.batch, environment.versions.get("torch"), environment.device.driver


def joined_row(processes: Sequence[Process], firsts: Mapping[str, RunRecord]) -> RunSummary:
    """Returns the row over all processes of one thing. `firsts`: of each group, what the others are set against.

    Processes whose numbers are doubted are left out where others are sound, and the row says how many.
    """
    if len(processes) == 1:
        return processes[0][1]
    ids = tuple(row.record_id for _, row in processes)
    # The group is that of the first, because whose middle process is in which group is chance.
    group = processes[0][1].group
    broken = next((row for _, row in processes if row.failure is not None), None)
    if broken is not None:  # what works in some processes only does not work
        return msgspec.structs.replace(broken, replicate_ids=ids, group=group)
    timed = [process for process in processes if process[1].throughput_per_s is not None]
    sound = [process for process in timed if process[1].verdict.trusted] or timed
    rows = [row for _, row in sound]
    if not rows:
        return msgspec.structs.replace(processes[0][1], replicate_ids=ids)
    middle = sorted(rows, key=lambda row: row.throughput_per_s or 0.0)[len(rows) // 2]
    joined = msgspec.structs.replace(
        middle,
        numerics=farthest(row.numerics for _, row in processes),
        cold_start_s=processes[0][1].cold_start_s,
        verdict=_verdict(rows, len(timed) - len(rows), middle),
        replicate_ids=ids,
        group=group,
    )
    if len(rows) == 1:
        return msgspec.structs.replace(joined, vs_first=_versus_over(timed, firsts))
    interval = _interval([row.throughput_per_s or 0.0 for row in rows])
    per_s = math.sqrt(interval.low * interval.high)
    # Each process stalls for a share of its own time; the rates of processes differ for other reasons too.
    shares = [(row.delivered_per_s or 0.0) / (row.throughput_per_s or 1.0) for row in rows]
    have_stalled = 2 * sum(row.sustained_per_s is not None for row in rows) > len(rows)
    return msgspec.structs.replace(
        joined,
        throughput_per_s=per_s,
        throughput_interval=interval,
        sustained_per_s=per_s * median(shares) if have_stalled else None,
        latency_s=_latency([row.latency_s for row in rows if row.latency_s is not None]),
        vs_first=_versus_over(timed, firsts),
        roofline=at_step(middle.roofline, middle.items_per_step / per_s)
        if middle.roofline and middle.items_per_step
        else None,
    )


def _verdict(rows: Sequence[RunSummary], left_out: int, middle: RunSummary) -> Verdict:
    found = next((row.verdict for row in rows if not row.verdict.trusted), middle.verdict)
    # An interval over several processes is not that of one.
    notes = [each for each in found.notes if each.code != "one-process" or len(rows) == 1]
    if left_out:
        told = f"{left_out} of {len(rows) + left_out} processes left out: their numbers are doubted"
        notes.append(note("left-out", told))
    return msgspec.structs.replace(found, notes=tuple(notes))


def _interval(values: Sequence[float]) -> ThroughputInterval:
    """Student's interval on the mean of the logarithms."""
    logs = [math.log(value) for value in values]
    half = student_t(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    centre = fmean(logs)
    return ThroughputInterval(low=math.exp(centre - half), high=math.exp(centre + half), half_width=math.expm1(half))


def _latency(of_each: Sequence[Latency]) -> Latency | None:
    """Returns the latency of the middle process, its p50 with an interval over all of them."""
    if len(of_each) < 2:
        return of_each[0] if of_each else None
    middle = sorted(of_each, key=lambda latency: latency.p50)[len(of_each) // 2]
    interval = _interval([latency.p50 for latency in of_each])
    return msgspec.structs.replace(
        middle, p50=median(latency.p50 for latency in of_each), low=interval.low, high=interval.high
    )


def _versus_over(processes: Sequence[Process], firsts: Mapping[str, RunRecord]) -> VersusFirst | None:
    """The mean over all processes of what was seen in turns; its interval covers what differs between them.

    Processes whose own speed is doubted count too: what disturbed them disturbed the first as well, and a race, which
    stops by this interval, cannot choose among its replicates.
    """
    compared = [(record, row.vs_first) for record, row in processes if row.vs_first is not None]
    logs = [log for record, _ in compared if (log := log_ratio(firsts[record.group or ""], record)) is not None]
    # As a race computes it, which is looked at after each replicate: one recipe has one interval, whoever prints it.
    met = ratio_over(logs)
    if met is None:
        return next((versus for _, versus in compared if versus.low is not None), compared[0][1] if compared else None)
    doubted = all(versus.first_doubted for _, versus in compared)
    return msgspec.structs.replace(compared[0][1], ratio=met.ratio, low=met.low, high=met.high, first_doubted=doubted)
