"""A search for the fastest recipe, as it is kept: what was asked, which records it made, how far it came.

All that is said about it (`redline.analyze.tune.finding`) can be made again from this and those records.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from redline.errors import RecordError, SpecError
from redline.record import BlockKind
from redline.spec import RunSpec, Spec

Objective = Literal["throughput", "latency"]
TuneState = Literal["running", "interrupted", "out-of-budget", "done"]
"""`out-of-budget`: it ended, and had more to do than the budget held; with another budget it goes on."""

TUNE_SCHEMA = 1
DEFAULT_BUDGET_S = 600.0
NUMERICS_FACTOR = 4.0
"""Times the floor: what the bench itself judges by."""
LARGEST_TOLERANCE = 0.8
"""Beyond it a recipe that ignores its input would come close to passing."""


class Tolerance(Spec):
    """How far from strict fp32 is near enough: so many times the error of mere rounding, or a relative error."""

    factor: float | None = None
    absolute: float | None = None

    def __post_init__(self) -> None:
        for name in ("factor", "absolute"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SpecError(f"tolerance must be above 0, got {value}")

    @classmethod
    def parse(cls, text: str) -> Tolerance:
        """`2x` is twice the error that rounding alone makes; `1e-3` a relative error."""
        match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(x|×)?\s*", text, re.IGNORECASE)
        try:
            value = float(match.group(1)) if match else 0.0
        except ValueError:
            value = 0.0
        if match is None or not value > 0:
            raise SpecError(f"tolerance must be a factor such as 2x or a relative error such as 1e-3, got {text!r}")
        return cls(factor=value) if match.group(2) else cls(absolute=value)


class TuneSpec(Spec):
    """What is searched for."""

    spec: RunSpec
    """The workload under the baseline."""
    objective: Objective = "throughput"
    tunes_batch: bool = False
    """Also look for the batch, with the best two recipes."""
    slo_p95_s: float | None = None
    tolerance: Tolerance = Tolerance()
    allow_quantized: bool = False
    check: str | None = None
    """The user's own metric, `file.py:function` or a pickled function: higher is better."""
    steps: tuple[str, ...] = ()
    """Only these may be used; empty: all there are."""
    without: tuple[str, ...] = ()
    seeds: tuple[str, ...] = ()
    """Recipes tried first."""
    replicates: int = 3

    def __post_init__(self) -> None:
        if self.slo_p95_s is not None and not self.slo_p95_s > 0:
            raise SpecError(f"slo_p95 must be above 0, got {self.slo_p95_s}")
        if self.replicates < 1:
            raise SpecError(f"replicates must be 1 or more, got {self.replicates}")

    @property
    def kind(self) -> BlockKind:
        return self.objective


class Trial(Spec):
    """One recipe tried in the search, measured in turns with the fastest one so far."""

    recipe: str
    record_id: str
    anchor_id: str | None = None
    """The record it was measured in turns with; None where it stood alone."""
    cost_s: float = 0.0
    """From opening the worker to the last block."""


class Refused(Spec):
    """A step that was never tried, and why."""

    step: str
    reason: str


class Metric(Spec):
    """What the user's own check said about one recipe."""

    recipe: str
    value: float | None
    baseline: float | None
    failure: str | None = None


class BatchChoice(Spec):
    """The batch found for one recipe, and what it brings there."""

    recipe: str
    batch: int
    throughput_per_s: float
    record_ids: tuple[str, ...] = ()


class TuneRecord(Spec):
    """A search, whole or on its way."""

    name: str
    tune: TuneSpec
    schema: int = TUNE_SCHEMA
    created_at: float = 0.0
    state: TuneState = "running"
    refused: tuple[Refused, ...] = ()
    quantizing: tuple[str, ...] = ()
    """Steps that change the weights themselves."""
    trials: tuple[Trial, ...] = ()
    finals: tuple[tuple[str, ...], ...] = ()
    """Heats of the last few with the baseline: record ids."""
    ablations: tuple[tuple[str, ...], ...] = ()
    """Heats of the winner with itself less one step."""
    batches: tuple[BatchChoice, ...] = ()
    batch_heats: tuple[tuple[str, ...], ...] = ()
    """Heats of the winner with the baseline at the batch that was found."""
    metrics: tuple[Metric, ...] = ()
    snippet: str | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    """Over all sessions that worked on it."""

    @property
    def record_ids(self) -> list[str]:
        heats = (*self.finals, *self.ablations, *self.batch_heats, *(choice.record_ids for choice in self.batches))
        return [trial.record_id for trial in self.trials] + [each for heat in heats for each in heat]


def encode_tune(record: TuneRecord) -> bytes:
    return msgspec.msgpack.encode(record)


def decode_tune(body: bytes) -> TuneRecord:
    try:
        return msgspec.msgpack.decode(body, type=TuneRecord)
    except (msgspec.MsgspecError, ValueError, SpecError) as error:
        raise RecordError(f"a stored search cannot be read: {error}") from None
