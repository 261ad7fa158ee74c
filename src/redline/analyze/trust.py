"""Whether a number can be trusted: labels with their reasons, from one record alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from statistics import median
from typing import Literal, get_args

from redline.analyze.blocks import device_kind, shift, timed_blocks, waited_s
from redline.analyze.ranks import late_rank, oversubscription
from redline.analyze.statistics import median_interval, spread
from redline.model.fields import Frozen
from redline.model.metrics import TOO_NOISY, WIDEST
from redline.model.note import Code, Note, note
from redline.model.record import BlockKind, Numerics, RunRecord, steady_epochs
from redline.model.spec import MeasureSpec
from redline.model.units import format_seconds, format_share

TrustLabel = Literal[
    "valid", "noisy", "throttled", "no-steady-state", "shared-gpu", "shared-cpu", "not-isolated", "invalid"
]

NOTED_SPREAD = 0.05
FEWEST_EPOCHS = 3
"""Below it, nothing is said of how much they differ."""
SHARED_CPU = 0.05
"""A worker that had to wait for a processor longer than this, of the time it could have run, was slowed by others."""
OUTLIER = 2.0
"""A step that takes this many times the median was held up by something."""
FEWEST_OUTLIERS = 0.001
"""Share of the steps: what is rarer is not worth a word."""
NOTED_CORES = 0.25
"""Kept busy by other processes: less is what any machine has."""

CONDEMNING_THROTTLE = {
    "hw_slowdown": "hardware slow-down",
    "sw_thermal": "software thermal slow-down",
    "hw_thermal": "hardware thermal slow-down",
    "power_brake": "external power brake",
}
NOTED_THROTTLE = {
    # Many cards always run at their power cap: worth knowing, but no reason to distrust the number.
    "sw_power_cap": "software power cap",
    "sync_boost": "clocks held to those of a sync-boost group",
}

Doubt = tuple[TrustLabel, Note]


DISQUALIFYING: frozenset[TrustLabel] = frozenset(
    {"invalid", "throttled", "shared-gpu", "shared-cpu", "no-steady-state"}
)
"""Doubts about a number that no recommendation may rest on; `noisy` is said beside it."""


class Verdict(Frozen, frozen=True, kw_only=True):
    """Several labels may hold; `valid` stands alone. Each other label has at least one reason."""

    labels: tuple[TrustLabel, ...]
    reasons: tuple[Note, ...] = ()
    notes: tuple[Note, ...] = ()
    """Worth knowing, but no reason for distrust."""

    @property
    def trusted(self) -> bool:
        return self.labels == ("valid",)

    @property
    def settles(self) -> bool:
        """Returns whether a comparison may rest on the throughput: nothing disqualifies it, and its blocks are not noisy."""
        return not DISQUALIFYING & set(self.labels) and not self.doubts("throughput")

    def doubts(self, kind: BlockKind) -> bool:
        """Returns whether one of the reasons is about the blocks of this kind."""
        return any(reason.about == kind for reason in self.reasons)

    def noted(self, *codes: Code) -> list[Note]:
        return [each for each in self.notes if each.code in codes]


def verdict(record: RunRecord) -> Verdict:
    if record.failure is not None:
        return Verdict(labels=("invalid",), reasons=(note("failed", record.failure.message),), notes=record.notes)
    if not record.loads and not any(block.samples for block in record.blocks):
        return Verdict(labels=("invalid",), reasons=(note("not-timed", "no step was timed"),), notes=record.notes)
    scatter = list(_scatter(record))
    doubts = [
        *((label, each) for label, each in scatter if label is not None),
        *_throttling(record),
        *_warmup(record),
        *_neighbours(record),
        *_shared_cpu(record),
        *_isolation(record),
    ]
    labels = tuple(dict.fromkeys(label for label, _ in doubts))
    return Verdict(
        labels=labels or ("valid",),
        reasons=tuple(dict.fromkeys(reason for _, reason in doubts)),
        notes=(
            *_rank_notes(record),
            *_contention_notes(record),
            *(each for label, each in scatter if label is None),
            *_load_notes(record),
            *_throttle_notes(record),
            *_stop_notes(record),
            *_comparison_notes(record),
            note("one-process", "the interval covers one process; another process may differ by a few percent"),
            *record.notes,
        ),
    )


def target_half_width(record: RunRecord) -> float:
    """The interval this record had to reach; a CPU is shared and has a wider one."""
    return _target(record, record.spec.measure)


def _target(record: RunRecord, measure: MeasureSpec) -> float:
    return measure.cpu_target_half_width if device_kind(record) == "cpu" else measure.target_half_width


def _scatter(record: RunRecord) -> Iterator[tuple[TrustLabel | None, Note]]:
    """Yields what the samples of each kind of block say, with a label where it is a doubt.

    The interval decides, whatever ended the timing: steps may scatter widely about a median that is known to a fraction of a
    percent, and a race ends when its pairs are told apart, however wide each interval is.
    """
    own, normal = target_half_width(record), _target(record, MeasureSpec())
    has_interval = record.spec.train is None
    for kind, blocks in _series(record):
        samples = list(chain.from_iterable(blocks))
        interval = median_interval(blocks) if has_interval else None
        width = interval.half_width if interval is not None else 0.0
        if interval is None and has_interval and record.stopped not in (None, "target"):
            text = f"{kind}: {_stopped(record)}: too few samples for an interval"
            yield "noisy", note("few-samples", text, about=kind)
        elif interval is not None and width > own and record.stopped is not None:
            is_usable = interval.high <= WIDEST * interval.low
            told = f"{_stopped(record)}{f' at ±{format_share(width)}' if is_usable else f', {TOO_NOISY}'}"
            yield "noisy", note("wide-interval", f"{kind}: {told}: {_shortfall(record, own)}", about=kind)
        elif normal < width <= own:  # narrow enough for a quick run, and would not be for a normal one
            told = f"±{format_share(width)} meets the target of this effort, ±{format_share(own)}"
            text = f"{kind}: {told}, not that of --effort normal, ±{format_share(normal)}"
            yield None, note("wide-interval", text, about=kind)
        deviation, middle = spread(samples), median(samples)
        if deviation is not None and deviation > NOTED_SPREAD:
            yield None, note("spread", f"{kind}: spread {format_share(deviation)} of the mean", about=kind)
        late = [sample for sample in samples if sample > OUTLIER * middle]
        if middle > 0 and len(late) >= max(1, FEWEST_OUTLIERS * len(samples)):
            told = f"{len(late)} of {len(samples)} steps took more than {OUTLIER:g}× the median"
            longest = f"the longest {max(late) / middle:.1f}×"
            yield (
                None,
                note(
                    "outliers", f"{kind}: {told}, {longest}; the median does not mind them, the mean does", about=kind
                ),
            )


def _stopped(record: RunRecord) -> str:
    words = {"unreachable": "stopped early", "interrupted": "interrupted", "target": "ended"}
    return words.get(record.stopped or "", "stopped at the time limit")


def _shortfall(record: RunRecord, target: float) -> str:
    if record.stopped == "unreachable":
        return f"reaching ±{format_share(target)} would exceed the time limit"
    return f"the target is ±{format_share(target)}"


def _load_notes(record: RunRecord) -> Iterator[Note]:
    """Notes about other processes that used the machine but did not slow the run by much."""
    blocks = [block for block in record.blocks if block.others_cpu_s is not None and block.wall_s > 0]
    if not blocks or any(_shared_cpu(record)):
        return
    cores = median((block.others_cpu_s or 0.0) / block.wall_s for block in blocks)
    if cores > NOTED_CORES:
        text = f"other processes kept {cores:.1f} cores busy while it was timed{_named(record)}"
        yield note("others-at-work", text, about="timing")


def _named(record: RunRecord) -> str:
    """Those other processes, from the block in which they had most."""
    busiest = max(record.blocks, key=lambda block: (block.others_cpu_s or 0.0) / max(block.wall_s, 1e-9)).busiest
    return f" ({'; '.join(busiest)})" if busiest else ""


def _rank_notes(record: RunRecord) -> Iterator[Note]:
    if (late := late_rank(record)) is not None:
        longer = f"takes {format_seconds(late.seconds)} a step longer than the others, most of it in {late.phase}"
        text = f"rank {late.rank} {longer}: {late.why}"
        yield note("straggler", text, about=str(late.rank))
    if (crowded := oversubscription(record)) is not None:
        yield crowded


def _contention_notes(record: RunRecord) -> Iterator[Note]:
    if (moved := shift(record)) is not None:
        change = math.expm1(-moved)
        told = f"{format_share(abs(change))} {'faster' if change > 0 else 'slower'}"
        text = (
            f"ran {told} while taking turns with other processes than by itself (or the device drifted); "
            "times rescaled to match its uncontended blocks"
        )
        yield note("contended", text, about="throughput")


def _throttling(record: RunRecord) -> Iterator[Doubt]:
    looks = _throttle_looks(record)
    for word, meaning in CONDEMNING_THROTTLE.items():
        hits = sum(word in look for look in looks)
        if hits:
            text = f"{meaning} in {hits} of {len(looks)} samples of the device's state"
            yield "throttled", note("throttled", text, about=word)


def _throttle_notes(record: RunRecord) -> Iterator[Note]:
    looks = _throttle_looks(record)
    for word in sorted(set(chain.from_iterable(looks)) - CONDEMNING_THROTTLE.keys()):
        hits = sum(word in look for look in looks)
        text = f"{NOTED_THROTTLE.get(word, word)} in {hits} of {len(looks)} samples of the device's state"
        yield note("clock-limited", text, about=word)


def _throttle_looks(record: RunRecord) -> list[tuple[str, ...]]:
    return [look.throttle for block in record.blocks for look in block.telemetry]


def _warmup(record: RunRecord) -> Iterator[Doubt]:
    if record.prepared is not None and not record.prepared.warmup.steady:
        warmup = record.prepared.warmup
        fallback = note("not-steady", f"not steady after {warmup.seconds:.0f} s of warming up")
        yield "no-steady-state", warmup.reason or fallback
    if record.prepared is not None:
        yield from (("no-steady-state", each) for each in record.prepared.workload.notes if each.code == "work-changes")


def _neighbours(record: RunRecord) -> Iterator[Doubt]:
    during = [look.foreign for block in record.blocks for look in block.telemetry]
    if seen := _distinct(chain.from_iterable(during)):
        yield "shared-gpu", note("shared-gpu", f"other processes on the GPU while timing: {seen}", about="timing")
    if record.prepared is not None and (seen := _distinct(record.prepared.environment.neighbours)):
        yield "shared-gpu", note("shared-gpu", f"other processes on the GPU at the start: {seen}", about="start")


def _shared_cpu(record: RunRecord) -> Iterator[Doubt]:
    """On a CPU: whether other processes slowed it."""
    blocks = [block for block in record.blocks if block.cpu_s is not None and block.others_cpu_s is not None]
    if device_kind(record) != "cpu" or not blocks:
        return
    ran_s, idle_s = sum(block.cpu_s or 0.0 for block in blocks), waited_s(record, blocks)
    if idle_s > SHARED_CPU * (ran_s + idle_s):
        share = format_share(idle_s / (ran_s + idle_s))
        told = f"other processes kept the CPU busy: {share} of its time the worker waited for a processor"
        text = f"{told}{_named(record)}"
        yield "shared-cpu", note("shared-cpu", text, about="timing")


def _isolation(record: RunRecord) -> Iterator[Doubt]:
    if record.prepared is not None and not record.prepared.isolated:
        text = "measured in the caller's own process, with whatever state it had"
        yield "not-isolated", note("not-isolated", text)


def _stop_notes(record: RunRecord) -> Iterator[Note]:
    if record.stopped == "interrupted":
        yield note("interrupted", "interrupted before it was finished")


def _comparison_notes(record: RunRecord) -> Iterator[Note]:
    """Yields what the verdict on its numbers leaves out."""
    if (prepared := record.prepared) is None:
        return
    for each in prepared.workload.notes:
        if each.code == "masked-positions" and prepared.numerics.is_compared:
            yield each


def _series(record: RunRecord) -> list[tuple[BlockKind, list[tuple[float, ...]]]]:
    """The timed blocks of each kind that has any; of a training the time per sample of its epochs."""
    if record.spec.train is not None:
        epochs = [epoch.train_s / epoch.samples for epoch in steady_epochs(record.epochs)]
        return [("throughput", [tuple(epochs)])] if len(epochs) >= FEWEST_EPOCHS else []
    series = [(kind, [block.samples for block in timed_blocks(record, kind)]) for kind in get_args(BlockKind)]
    return [(kind, blocks) for kind, blocks in series if blocks]


def _distinct(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def farthest(checks: Iterable[Numerics | None]) -> Numerics | None:
    """Returns, of several checks of one recipe, the one over the most steps: errors grow along a loss path.

    The first of those with equally many steps; records that were only timed do not count.
    """
    known = [check for check in checks if check is not None]
    return max(known, key=lambda each: (not each.is_left_out, each.steps or 0), default=None)


def error_text(numerics: Numerics | None, *, with_steps: bool = False) -> str:
    """`with_steps`: say how long a path of losses was followed, where rows may differ in that."""
    if numerics is None:
        return "n/a"
    if numerics.is_left_out:
        return "not checked"
    if not numerics.finite:
        return "not finite ✗"
    if numerics.method == "reference":
        return numerics.number_format
    if numerics.degenerate:
        return "no signal ✗"
    # Records of older versions have the signal error alone.
    told = f"{numerics.rel_error:.1e}" if numerics.rel_error is not None else "inf"
    if numerics.rel_error is None and numerics.rel_l2 is not None:
        told = f"{numerics.rel_l2:.1e} of the signal"
    if numerics.by_equality and numerics.equal_share is not None:
        told = "equal" if numerics.equal_share == 1 else f"{format_share(1 - numerics.equal_share)} unequal"
    told += f" in {numerics.steps} steps" if with_steps and numerics.steps is not None else ""
    return told if numerics.passed else f"{told} ✗"
