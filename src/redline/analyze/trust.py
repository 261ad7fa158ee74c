"""This module says whether a number can be trusted, by labels with their reasons, from one record alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
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
from redline.model.units import format_seconds, format_share

TrustLabel = Literal[
    "valid", "noisy", "throttled", "no-steady-state", "shared-gpu", "shared-cpu", "not-isolated", "invalid"
]

NOTED_SPREAD = 0.05
"""Steps that scatter by more of their mean are worth a word, however well their median is known."""
FEWEST_EPOCHS = 3
"""Below it, nothing is said of how much they differ."""
SHARED_CPU = 0.05
"""A worker that had to wait for a processor longer than this, of the time it could have run, was slowed by others."""
NOTED_CORES = 0.25
"""If other processes keep so many cores busy, a note says so; less is what any machine has."""

CONDEMNING_THROTTLE = {
    "hw_slowdown": "hardware slow-down",
    "sw_thermal": "software thermal slow-down",
    "hw_thermal": "hardware thermal slow-down",
    "power_brake": "external power brake",
}
NOTED_THROTTLE = {
    # Many cards always run at their power cap. This is worth knowing, but it is no reason to distrust the number.
    "sw_power_cap": "software power cap",
    "sync_boost": "clocks held to those of a sync-boost group",
}

Said = Iterator[tuple[TrustLabel | None, Note]]
"""This is a note with the label it brings. The label is None where the note is worth knowing, but no reason for distrust."""


DISQUALIFYING: frozenset[TrustLabel] = frozenset(
    {"invalid", "throttled", "shared-gpu", "shared-cpu", "no-steady-state"}
)
"""Doubts about a number that no recommendation may rest on; `noisy` is said beside it."""


class Verdict(Frozen, frozen=True, kw_only=True):
    """Several labels may hold; `valid` stands alone. Each other label has at least one reason."""

    labels: tuple[TrustLabel, ...]
    reasons: tuple[Note, ...] = ()
    notes: tuple[Note, ...] = ()
    """These are worth knowing, but they are no reason for distrust."""

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
    said = [each for look in LOOKS for each in look(record)]
    one_process = note("one-process", "the interval covers one process; another process may differ by a few percent")
    return Verdict(
        labels=tuple(dict.fromkeys(label for label, _ in said if label is not None)) or ("valid",),
        reasons=tuple(dict.fromkeys(told for label, told in said if label is not None)),
        notes=(*(told for label, told in said if label is None), one_process, *record.notes),
    )


def target_half_width(record: RunRecord) -> float:
    """Returns the interval this record had to reach; a CPU is shared and has a wider one."""
    measure = record.spec.measure
    return measure.cpu_target_half_width if device_kind(record) == "cpu" else measure.target_half_width


def _scatter(record: RunRecord) -> Said:
    """Yields what the samples of each kind of block say.

    The interval decides, whatever ended the timing: steps may scatter widely about a median that is known to a fraction of a
    percent, and a race ends when its pairs are told apart, however wide each interval is.
    """
    target, trains = target_half_width(record), record.spec.train is not None
    words = {"unreachable": "stopped early", "interrupted": "interrupted", "target": "ended"}
    stopped = words.get(record.stopped or "", "stopped at the time limit")
    for kind, blocks in _series(record):
        interval = None if trains else median_interval(blocks)
        if interval is None and not trains and record.stopped not in (None, "target"):
            yield "noisy", note("few-samples", f"{kind}: {stopped}: too few samples for an interval", about=kind)
        elif interval is not None and interval.half_width > target and record.stopped is not None:
            is_usable = interval.high <= WIDEST * interval.low
            width = f" at ±{format_share(interval.half_width)}" if is_usable else f", {TOO_NOISY}"
            late = record.stopped == "unreachable"
            aim = (
                f"reaching ±{format_share(target)} would exceed the time limit"
                if late
                else f"the target is ±{format_share(target)}"
            )
            yield "noisy", note("wide-interval", f"{kind}: {stopped}{width}: {aim}", about=kind)
        deviation = spread(list(chain.from_iterable(blocks)))
        if deviation is not None and deviation > NOTED_SPREAD:
            yield None, note("spread", f"{kind}: spread {format_share(deviation)} of the mean", about=kind)


def _series(record: RunRecord) -> list[tuple[BlockKind, list[tuple[float, ...]]]]:
    """Returns the timed blocks of each kind that has any; of a training the time per sample of its epochs."""
    if record.spec.train is not None:
        epochs = [epoch.train_s / epoch.samples for epoch in steady_epochs(record.epochs)]
        return [("throughput", [tuple(epochs)])] if len(epochs) >= FEWEST_EPOCHS else []
    series = [(kind, [block.samples for block in timed_blocks(record, kind)]) for kind in get_args(BlockKind)]
    return [(kind, blocks) for kind, blocks in series if blocks]


def _throttling(record: RunRecord) -> Said:
    looks = [look.throttle for block in record.blocks for look in block.telemetry]
    for word in sorted(set(chain.from_iterable(looks))):
        condemned = CONDEMNING_THROTTLE.get(word)
        hits = sum(word in look for look in looks)
        text = f"{condemned or NOTED_THROTTLE.get(word, word)} in {hits} of {len(looks)} samples of the device's state"
        label: TrustLabel | None = "throttled" if condemned else None
        yield label, note("throttled" if condemned else "clock-limited", text, about=word)


def _warmup(record: RunRecord) -> Said:
    if (prepared := record.prepared) is None:
        return
    if not prepared.warmup.steady:
        fallback = note("not-steady", f"not steady after {prepared.warmup.seconds:.0f} s of warming up")
        yield "no-steady-state", prepared.warmup.reason or fallback
    yield from (("no-steady-state", each) for each in prepared.workload.notes if each.code == "work-changes")


def _neighbours(record: RunRecord) -> Said:
    during = [look.foreign for block in record.blocks for look in block.telemetry]
    before = record.prepared.environment.neighbours if record.prepared is not None else ()
    for when, words, seen in (
        ("timing", "while timing", chain.from_iterable(during)),
        ("start", "at the start", before),
    ):
        if names := ", ".join(dict.fromkeys(seen)):
            yield "shared-gpu", note("shared-gpu", f"other processes on the GPU {words}: {names}", about=when)


def _others_on_the_cpu(record: RunRecord) -> Said:
    """Says whether other processes slowed a run on a CPU, and adds a note on those that used the machine without slowing it by much."""
    blocks = [block for block in record.blocks if block.others_cpu_s is not None and block.wall_s > 0]
    if not blocks:
        return
    busiest = max(blocks, key=lambda block: (block.others_cpu_s or 0.0) / block.wall_s).busiest
    named = f" ({'; '.join(busiest)})" if busiest else ""
    known = [block for block in blocks if block.cpu_s is not None] if device_kind(record) == "cpu" else []
    ran_s, waited = sum(block.cpu_s or 0.0 for block in known), waited_s(record, known)
    if known and waited > SHARED_CPU * (ran_s + waited):
        share = format_share(waited / (ran_s + waited))
        text = f"other processes kept the CPU busy: {share} of its time the worker waited for a processor{named}"
        yield "shared-cpu", note("shared-cpu", text, about="timing")
        return
    cores = median((block.others_cpu_s or 0.0) / block.wall_s for block in blocks)
    if cores > NOTED_CORES:
        text = f"other processes kept {cores:.1f} cores busy while it was timed{named}"
        yield None, note("others-at-work", text, about="timing")


def _circumstances(record: RunRecord) -> Said:
    """Says what else a reader should know of how it was measured."""
    prepared = record.prepared
    if prepared is not None and not prepared.isolated:
        text = "measured in the caller's own process, with whatever state it had"
        yield "not-isolated", note("not-isolated", text)
    if (late := late_rank(record)) is not None:
        longer = f"takes {format_seconds(late.seconds)} a step longer than the others, most of it in {late.phase}"
        yield None, note("straggler", f"rank {late.rank} {longer}: {late.why}", about=str(late.rank))
    if (crowded := oversubscription(record)) is not None:
        yield None, crowded
    if (moved := shift(record)) is not None:
        change = math.expm1(-moved)
        told = f"{format_share(abs(change))} {'faster' if change > 0 else 'slower'}"
        text = (
            f"ran {told} while taking turns with other processes than by itself (or the device drifted); "
            "times rescaled to match its uncontended blocks"
        )
        yield None, note("contended", text, about="throughput")
    if record.stopped == "interrupted":
        yield None, note("interrupted", "interrupted before it was finished")
    for each in prepared.workload.notes if prepared is not None else ():
        if each.code == "masked-positions" and prepared is not None and prepared.numerics.is_compared:
            yield None, each


LOOKS: tuple[Callable[[RunRecord], Said], ...] = (
    _scatter, _throttling, _warmup, _neighbours, _others_on_the_cpu, _circumstances
)  # fmt: skip
"""These functions are asked in turn, in the order in which the labels are printed."""


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
