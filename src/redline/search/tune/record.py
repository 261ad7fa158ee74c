"""A search for the fastest recipe is kept as a record: what was asked, which records it made, and how far it came.

All that is said about it (`redline.search.tune.summary`) can be made again from this and those records.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec

from redline.model.errors import RecordError, SpecError, UsageError
from redline.model.fields import Frozen, require_choice
from redline.model.identity import different_fields, given, question_key
from redline.model.migrations import without_removed_settings
from redline.model.note import Note, notes_from_texts
from redline.model.record import FailureScope, TimeKind
from redline.model.spec import RunSpec
from redline.model.work import Facts
from redline.store import TuneLedger, TuneRow

Objective = TimeKind
TuneState = Literal["running", "interrupted", "out-of-budget", "done"]
"""A search that is `out-of-budget` has ended with more to do than the budget held; with another budget it goes on."""

TUNE_SCHEMA = 3


class Tolerance(Frozen):
    """A tolerance says how far from strict fp32 is acceptable: by a factor on the error of rounding alone, or by a relative error."""

    factor: float | None = None
    absolute: float | None = None

    @classmethod
    def of(cls, asked: float | str | None) -> Tolerance:
        """Returns the tolerance that a person asked for.

        `2x` is twice the error that rounding alone makes, `1e-3` is a relative error, and None is what the bench judges by.
        """
        if asked is None:
            return cls()
        text = str(asked).strip().lower()
        try:
            number = float(text.removesuffix("x").removesuffix("×"))
        except ValueError:
            number = 0.0
        if not 0 < number < math.inf:
            raise SpecError(f"tolerance must be a factor such as 2x or a relative error such as 1e-3, got {asked!r}")
        return cls(factor=number) if text.endswith(("x", "×")) else cls(absolute=number)


class TuneSpec(Frozen):
    """Says what is searched for."""

    spec: RunSpec
    """This is the workload under the baseline."""
    objective: Objective = "throughput"
    slo_p95_s: float | None = None
    tolerance: Tolerance = Tolerance()
    allow_quantized: bool = False
    check: str | None = None
    """This is the user's own metric, as `file.py:function` or a pickled function; higher values are better."""
    switches: tuple[str, ...] = ()
    """Only these may be used; if it is empty, all may be."""
    without: tuple[str, ...] = ()
    seeds: tuple[str, ...] = ()
    """These recipes are tried first."""
    replicates: int = 3

    def __post_init__(self) -> None:
        require_choice("objective", self.objective, Objective)
        if self.objective in ("ttft", "tpot") and self.spec.workload.task != "generate":
            raise SpecError(f"objective {self.objective} is a time per token: it goes with --task generate")
        if self.objective == "tpot" and self.spec.workload.new_tokens == 1:
            raise SpecError("objective tpot is the time per token after the first: it needs new_tokens 2 or more")
        if self.slo_p95_s is not None and not self.slo_p95_s > 0:
            raise SpecError(f"slo_p95 must be above 0, got {self.slo_p95_s}")
        if self.replicates < 1:
            raise SpecError(f"replicates must be 1 or more, got {self.replicates}")

    @property
    def kind(self) -> TimeKind:
        return self.objective


class Trial(Frozen):
    """A trial is one recipe that the search tried. It was measured interleaved with the fastest one so far."""

    recipe: str
    record_id: str
    anchor_id: str | None = None
    """It was interleaved with the process of this record; None means that it was timed alone."""
    cost_s: float = 0.0
    """It took this many seconds from opening the worker to the last block."""


class Lesson(Frozen):
    """A failure taught that recipes with all of these switches are not to be tried again on this workload."""

    switches: tuple[str, ...]
    scope: FailureScope
    reason: Note
    recipe: str
    """The failure was seen in this recipe."""
    overrules_trials: bool = False
    """If it is True, the lesson also speaks against recipes whose trial went well: it was seen in the last race, or by a check as long."""
    suspects: tuple[str, ...] = ()
    """The bench suspects these switches; if there are none, it suspects all."""


class GivenUp(Frozen):
    """This recipe was not prepared in time."""

    recipe: str
    seconds: float
    """It had taken this many seconds by then."""


class Spent(Frozen):
    """This says what the seconds of a search went into, over all sessions that worked on it."""

    baseline: float = 0.0
    trials: float = 0.0
    race: float = 0.0
    ablation: float = 0.0
    failed: float = 0.0
    """These seconds went into trials that broke, gave wrong numbers or were given up."""
    other: float = 0.0
    """These seconds went into starting up, the facts, the user's check and deciding."""
    left: float = 0.0
    """These seconds were left of the last session's budget."""


class Refused(Frozen):
    """This switch was never tried, for this reason."""

    switch: str
    reason: Note


class Metric(Frozen):
    """This is the value that the user's own check gave for one recipe."""

    recipe: str
    value: float | None
    baseline: float | None
    failure: str | None = None


class TuneRecord(Frozen):
    """This is what is kept of a search, which may still be running."""

    name: str
    tune: TuneSpec
    schema: int = TUNE_SCHEMA
    created_at: float = 0.0
    state: TuneState = "running"
    refused: tuple[Refused, ...] = ()
    quantizing: tuple[str, ...] = ()
    """These switches change the weights themselves."""
    trials: tuple[Trial, ...] = ()
    finals: tuple[tuple[str, ...], ...] = ()
    """There is one entry for each replicate of the last race: the ids of its records."""
    ablations: tuple[tuple[str, ...], ...] = ()
    """There is one entry for each replicate that raced the winner against itself less one switch: the ids of its records."""
    metrics: tuple[Metric, ...] = ()
    lessons: tuple[Lesson, ...] = ()
    given_up: tuple[GivenUp, ...] = ()
    machine: str = ""
    """It names the device and its software as `redline.model.identity.device_key` does."""
    compile_scale: float | None = None
    """Compiling took this many times what was expected, in this search or in earlier ones on this machine; None if it is not known."""
    facts: Facts | None = None
    """One step of the workload was watched before the search, with these facts."""
    spent: Spent = Spent()
    budget_s: float = 0.0
    """This was the budget of the last session."""
    snippet: str | None = None
    notes: tuple[Note, ...] = ()
    seconds: float = 0.0
    """All sessions together worked on the search for this long."""

    @property
    def record_ids(self) -> list[str]:
        replicates = (*self.finals, *self.ablations)
        return [*(trial.record_id for trial in self.trials), *chain.from_iterable(replicates)]


def encode_tune(record: TuneRecord) -> bytes:
    return msgspec.msgpack.encode(record)


def decode_tune(body: bytes) -> TuneRecord:
    try:
        return msgspec.convert(_migrated(msgspec.msgpack.decode(body)), TuneRecord)
    except (msgspec.MsgspecError, ValueError, SpecError) as error:
        raise RecordError(f"a stored search cannot be read: {error}") from None


def _migrated(plain: Any) -> Any:
    """Returns a stored search in today's form, without fields that were removed since.

    Schema 1 called switches steps and replicates heats, and its notes were texts."""
    if not isinstance(plain, dict):
        return plain
    asked = plain.get("tune") or {}
    if plain.get("schema") == 1:
        spec = asked.get("spec") or {}
        asked = {**_switches(asked), "spec": {**spec, "recipe": _switches(spec.get("recipe") or {})}}
        refused = [{"switch": row["step"], "reason": notes_from_texts(row["reason"])} for row in plain["refused"]]
        plain = {**plain, "refused": refused, "notes": notes_from_texts(plain.get("notes", []))}
    if "spec" in asked:
        plain = {**plain, "tune": {**asked, "spec": without_removed_settings(asked["spec"])}}
    parts = {"tune": TuneSpec, "facts": Facts, "spent": Spent}
    known = {name: _known(value, parts[name]) if name in parts else value for name, value in plain.items()}
    return {**_known(known, TuneRecord), "schema": TUNE_SCHEMA}


def _known(plain: Any, kind: Any) -> Any:
    """Returns a table without the fields that its class does not have any more."""
    return {name: plain[name] for name in kind.__struct_fields__ if name in plain} if isinstance(plain, dict) else plain


def _switches(plain: dict[str, Any]) -> dict[str, Any]:
    return {"switches" if name == "steps" else name: value for name, value in plain.items()}


LISTS = ("switches", "without", "seeds")
"""The order of these fields' values does not matter."""


class KeptSearches:
    """This class saves and loads the searches that a history keeps."""

    def __init__(self, ledger: TuneLedger) -> None:
        self._ledger = ledger

    def save(self, record: TuneRecord) -> None:
        workload = record.tune.spec.workload
        row = TuneRow(
            name=record.name,
            created_at=record.created_at,
            model=workload.model,
            task=workload.task,
            state=record.state,
        )
        self._ledger.save(
            row, encode_tune(record), f"{len(record.trials)} trials, at most {record.budget_s:.0f} s in all"
        )

    def load(self, name: str) -> TuneRecord | None:
        """Returns a search as it was last written; None if there is no search of that name."""
        body = self._ledger.load(name)
        return None if body is None else decode_tune(body)

    def to_resume(self, name: str) -> TuneRecord:
        kept = self.load(name)
        if kept is None:
            raise UsageError(f"no tune {name!r} to resume; without --resume it starts")
        return kept

    def newest_first(
        self, on_unreadable: Callable[[str, RecordError], None] = lambda name, error: None
    ) -> Iterator[TuneRecord]:
        for row in self._ledger.rows():
            try:
                if (record := self.load(row.name)) is not None:
                    yield record
            except RecordError as error:
                on_unreadable(row.name, error)


def question_of(asked: TuneSpec) -> dict[str, Any]:
    """Returns what two searches of the same workload must both ask to be the same. How often they race is not part of it."""
    lists = {name: sorted(getattr(asked, name)) for name in LISTS if getattr(asked, name)}
    return {**given(asked, leave_out=("spec", "replicates", *LISTS)), **lists}


WORDS = {"slo_p95_s": "slo-p95", "allow_quantized": "allow-quantized", "seeds": "recipe"}
"""These fields are asked for by another word than their own."""


def differences(one: TuneSpec, other: TuneSpec) -> list[str]:
    """Returns what differs, in the words in which it is asked for. How long it may take and how often it races does not count."""
    asked, others = question_of(one), question_of(other)
    differing = [name for name in TuneSpec.__struct_fields__ if asked.get(name) != others.get(name)]
    return list(
        dict.fromkeys([*different_fields(one.spec, other.spec), *(WORDS.get(name, name) for name in differing)])
    )


def default_name(asked: TuneSpec) -> str:
    """Returns a name that `--resume` can find: it is the same for the same question, whatever the budget and the number of replicates."""
    model = asked.spec.workload.model
    first = re.sub(r"[^\w.+-]+", "-", Path(model.partition(":")[0]).stem if "/" in model else model)
    return f"{first}-{asked.spec.workload.task}-{question_key(asked.spec, question_of(asked))[:8]}"


def resumed(kept: TuneRecord, asked: TuneSpec) -> TuneRecord:
    """Returns the search as it goes on. One that is done is only told again, unless more replicates are asked for than it was to have.

    What it had to say of its end is said anew at the new one, and the code is that of the winner then.
    """
    others = differences(kept.tune, asked)
    if others:
        raise UsageError(f"tune {kept.name!r} was asked at other settings ({', '.join(others)}): give another --name")
    if kept.state == "done" and asked.replicates <= kept.tune.replicates:
        notes = tuple(each for each in kept.notes if each.code != "no-snippet")
        return msgspec.structs.replace(kept, snippet=None, notes=notes)
    lessons = tuple(lesson for lesson in kept.lessons if lesson.reason.about != "late")  # there may be time for it now
    return msgspec.structs.replace(kept, tune=asked, state="running", snippet=None, notes=(), lessons=lessons)
