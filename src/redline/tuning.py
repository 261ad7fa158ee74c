"""Searches for the fastest recipe, as notebooks and the command line ask for them."""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from redline.analyze.tune.record import (
    DEFAULT_BUDGET_S,
    Tolerance,
    TuneRecord,
    TuneSpec,
    decode_tune,
    encode_tune,
)
from redline.api import ask, checked, opened, specs_of
from redline.errors import BenchError, RecordError, SpecError, UsageError
from redline.launch.lock import device_lock
from redline.protocol import AskSnippet, AskSteps, Snippet, StepChoice, StepChoices
from redline.record import RunRecord
from redline.spec import Recipe, RunSpec
from redline.units import parse_seconds

if TYPE_CHECKING:
    from redline.analyze.tune.finding import TuneFinding, Winner
    from redline.launch import Door
    from redline.recipes import PlainRecipe
    from redline.search.tune.tuner import Clock, TuneObserver
    from redline.store import History, TuneLedger

NO_SNIPPET = "no snippet"


class TuneResult:
    """What a search found, with all that it rests on."""

    def __init__(self, tune: TuneRecord, records: Mapping[str, RunRecord], inputs: Any | None = None) -> None:
        from redline.analyze.tune.finding import finding_of
        from redline.store import ceilings_of

        self.tune = tune
        self.records = dict(records)
        self.inputs = inputs
        """The example inputs the search was given."""
        self.finding: TuneFinding = finding_of(tune, self.records, ceilings_of(self.records.values()))

    def __str__(self) -> str:
        from redline.report.terminal import as_text
        from redline.report.tune import tune_report

        return as_text(tune_report(self.finding))

    @property
    def winner(self) -> Winner | None:
        return self.finding.winner

    @property
    def recipe(self) -> str:
        """The winner's; raises where there is none."""
        if self.winner is None:
            raise UsageError("the search found no recipe that may be recommended; its `finding.rejected` says why")
        return self.winner.recipe

    @property
    def snippet(self) -> str | None:
        """The winner as plain PyTorch."""
        return self.finding.snippet

    @property
    def plain(self) -> PlainRecipe:
        """The winner outside of any measurement: `redline.recipe(...)` for this workload."""
        from redline.recipes import recipe

        workload, device = self.tune.tune.spec.workload, self.tune.tune.spec.device
        return recipe(self.recipe, task=workload.task, optimizer=workload.optimizer, device=device)

    def apply(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The winner applied to a model in this process, for inputs like these or like those of the search."""
        from redline.recipes import arguments_of

        if not args and not kwargs and self.tune.tune.spec.workload.task == "infer":
            args, kwargs = arguments_of(self._inputs_or("apply(model, inputs)"))
        return self.plain.apply(model, *args, **kwargs)

    def training_step(
        self, model: Any, loss: Callable[[Any, Any], Any], inputs: Any, targets: Any
    ) -> Callable[[Any, Any], Any]:
        """The winner of a search for training: a function of inputs and targets that does one whole step.

        Made for inputs like these, a dict of keywords among others; None: those of the search.
        """
        if inputs is None:
            inputs = self._inputs_or("training_step(model, loss, inputs, targets)")
        return self.plain.training_step(model, loss, inputs, targets)

    def _inputs_or(self, call: str) -> Any:
        if self.inputs is None:
            name = call.partition("(")[0]
            raise UsageError(f"{name} needs example inputs, as the recipe is made for their shape: {call}")
        return self.inputs

    def document(self) -> dict[str, Any]:
        """What `--json` prints, as plain values."""
        document: dict[str, Any] = msgspec.json.decode(self.to_json())
        return document

    def to_json(self) -> str:
        from redline.report.tune import tune_json

        return tune_json(self.finding)


def tune(
    model: Any,
    inputs: Any | None = None,
    *,
    batch: int | str | None = None,
    objective: str = "throughput",
    budget: float | str = DEFAULT_BUDGET_S,
    slo_p95: float | str | None = None,
    tolerance: float | str | None = None,
    allow_quantized: bool = False,
    check: Any | None = None,
    recipes: str | Iterable[str] = (),
    steps: Iterable[str] = (),
    without: Iterable[str] = (),
    replicates: int = 3,
    name: str | None = None,
    resume: bool = False,
    loss: Any | None = None,
    door: Door | None = None,
    history: History | None = None,
    observer: TuneObserver | None = None,
    clock: Clock = time.monotonic,
    **settings: Any,
) -> TuneResult:
    """The fastest recipe that keeps the numbers right, what each step of it brings, and the code to paste.

    `batch` may be "auto"; `budget` and `slo_p95` are seconds or texts such as "10m" and "20ms"; `tolerance` is a
    relative error, or a factor on that of rounding such as "2x". `recipes` are tried first, `steps` restricts what may
    be used, `without` leaves steps out. `check` is a metric of your own (a function of the model, higher is better):
    quantized recipes are recommended only when it holds. `settings` are those of `run`.
    """
    tunes_batch = batch == "auto"
    if isinstance(batch, str) and not tunes_batch:
        raise SpecError(f"batch must be a number or 'auto', got {batch!r}")
    table = {**settings, **({} if batch is None or tunes_batch else {"batch": batch})}
    (spec, *more), own_door = specs_of(model, inputs, recipes="baseline", loss=loss, **table)
    if more:
        raise UsageError("a search is for one model: name one")
    asked = TuneSpec(
        spec=spec,
        objective=_objective(objective),
        tunes_batch=tunes_batch,
        slo_p95_s=parse_seconds(slo_p95) if isinstance(slo_p95, str) else slo_p95,
        tolerance=_tolerance(tolerance),
        allow_quantized=allow_quantized,
        check=_check(check, allow_quantized=allow_quantized, task=spec.workload.task),
        steps=tuple(steps),
        without=tuple(without),
        seeds=tuple([recipes] if isinstance(recipes, str) else recipes),
        replicates=replicates,
    )
    result = tune_spec(
        asked,
        budget_s=parse_seconds(budget) if isinstance(budget, str) else budget,
        name=name,
        resume=resume,
        door=own_door or door,
        history=history,
        observer=observer,
        clock=clock,
    )
    result.inputs = inputs
    return result


def tune_spec(
    asked: TuneSpec,
    *,
    budget_s: float = DEFAULT_BUDGET_S,
    name: str | None = None,
    resume: bool = False,
    door: Door | None = None,
    history: History | None = None,
    observer: TuneObserver | None = None,
    clock: Clock = time.monotonic,
) -> TuneResult:
    """Search, or go on searching. A mistake is raised before anything is measured; Ctrl-C returns what is known."""
    from redline.search.batch import require_processes
    from redline.search.tune.search import search
    from redline.search.tune.space import space_for
    from redline.search.tune.tuner import TuneObserver, Tuner

    if not budget_s > 0:
        raise SpecError(f"budget must be above 0, got {budget_s}")
    if asked.tunes_batch:
        require_processes([asked.spec])
    watching = observer or TuneObserver()
    called = name or default_name(asked)
    with ExitStack() as stack:
        door = door or stack.enter_context(opened(asked.spec.launch))
        history = history or stack.enter_context(_history())
        ledger = history.tunes()
        stack.enter_context(ledger.held(called))
        kept = _kept(ledger, called) if resume else None
        (spec,) = checked([asked.spec], door)
        asked = msgspec.structs.replace(asked, spec=spec)
        kept = _resumed(kept, asked) if kept is not None else None
        choices = step_choices(spec, door)
        space, refused = space_for(asked, choices)
        for seed in asked.seeds:
            space.checked(seed)
        quantizing = tuple(choice.step for choice in choices if choice.quantizes)
        record = kept or TuneRecord(
            name=called, tune=asked, created_at=time.time(), refused=tuple(refused), quantizing=quantizing
        )
        stack.enter_context(device_lock(spec.device, on_wait=watching.waiting))
        tuner = Tuner(
            tune=record,
            space=space,
            door=door,
            journal=history,
            ledger=_Kept(ledger),
            observer=watching,
            clock=clock,
            budget_s=budget_s,
            order=random.Random(spec.seed),
            records=history.load_many(record.record_ids) if kept else {},
        )
        search(tuner)
        result = TuneResult(tuner.tune, tuner.records)
        snippet, why = _snippet(result, door)
        if snippet is not None or why is not None:
            notes = (*tuner.tune.notes, why) if why is not None else tuner.tune.notes
            tuner.keep(snippet=snippet, notes=notes)
            result = TuneResult(tuner.tune, tuner.records)
    return result


def kept_tune(
    name: str, history: History | None = None, on_unreadable: Callable[[str, RecordError], None] | None = None
) -> TuneResult:
    """A search from the history, as it stood when it was last written."""
    with ExitStack() as stack:
        history = history or stack.enter_context(_history())
        body = history.tunes().load(name)
        if body is None:
            known = ", ".join(row.name for row in history.tunes().rows()[:5])
            raise UsageError(f"no tune {name!r} in {history.place}{f'; there are {known}' if known else ''}")
        record = decode_tune(body)
        told = {} if on_unreadable is None else {"on_unreadable": on_unreadable}
        return TuneResult(record, history.load_many(record.record_ids, **told))


def kept_searches(
    history: History, on_unreadable: Callable[[str, RecordError], None] = lambda name, error: None
) -> Iterator[TuneRecord]:
    """All searches of a history, newest first."""
    for row in history.tunes().rows():
        try:
            body = history.tunes().load(row.name)
            if body is not None:
                yield decode_tune(body)
        except RecordError as error:
            on_unreadable(row.name, error)


def step_choices(spec: RunSpec, door: Door) -> tuple[StepChoice, ...]:
    """What the bench says can be tried on this workload."""
    reply = ask(AskSteps(spec=spec), door)
    assert isinstance(reply, StepChoices)
    return reply.choices


def default_name(asked: TuneSpec) -> str:
    """The same question has the same name, so that `--resume` finds it; whatever the budget and the number of heats."""
    from redline.analyze.tune.question import bare_question

    model = asked.spec.workload.model
    first = re.sub(r"[^\w.+-]+", "-", Path(model.partition(":")[0]).stem if "/" in model else model)
    limit = str(asked.spec.launch.memory_limit_bytes)
    digest = hashlib.sha256(msgspec.json.encode(bare_question(asked)) + limit.encode()).hexdigest()[:8]
    return f"{first}-{asked.spec.workload.task}-{digest}"


class _Kept:
    """A search's ledger in the history."""

    def __init__(self, ledger: TuneLedger) -> None:
        self._ledger = ledger

    def save(self, record: TuneRecord) -> None:
        from redline.store import TuneRow

        workload = record.tune.spec.workload
        row = TuneRow(
            name=record.name,
            created_at=record.created_at,
            model=workload.model,
            task=workload.task,
            state=record.state,
        )
        self._ledger.save(row, encode_tune(record))


def _kept(ledger: TuneLedger, name: str) -> TuneRecord:
    body = ledger.load(name)
    if body is None:
        raise UsageError(f"no tune {name!r} to resume; without --resume it starts")
    return decode_tune(body)


def _resumed(kept: TuneRecord, asked: TuneSpec) -> TuneRecord:
    """The search as it goes on. One that is done is only told again, unless more heats are asked for than it was to have.

    What it had to say of its end is said anew at the new one, and the code is that of the winner then.
    """
    from redline.analyze.tune.question import differences

    others = differences(kept.tune, asked)
    if others:
        raise UsageError(f"tune {kept.name!r} was asked at other settings ({', '.join(others)}): give another --name")
    if kept.state == "done" and asked.replicates <= kept.tune.replicates:
        notes = tuple(note for note in kept.notes if not note.startswith(NO_SNIPPET))
        return msgspec.structs.replace(kept, snippet=None, notes=notes)
    return msgspec.structs.replace(kept, tune=asked, state="running", snippet=None, notes=())


def _snippet(result: TuneResult, door: Door) -> tuple[str | None, str | None]:
    """The winner's code, or why there is none."""
    if result.winner is None:
        return None, None
    spec = result.tune.tune.spec
    workload = msgspec.structs.replace(spec.workload, batch=result.winner.batch or spec.workload.batch)
    recipe = Recipe.parse(result.winner.recipe)
    try:
        reply = ask(AskSnippet(spec=msgspec.structs.replace(spec, recipe=recipe, workload=workload)), door)
    except BenchError as error:
        return None, f"{NO_SNIPPET}: {str(error).splitlines()[0]}"
    assert isinstance(reply, Snippet)
    return reply.code, None


def _objective(word: str) -> Any:
    if word not in ("throughput", "latency"):
        raise SpecError(f"objective must be throughput or latency, got {word!r}")
    return word


def _tolerance(given: float | str | None) -> Tolerance:
    if given is None:
        return Tolerance()
    return Tolerance.parse(given) if isinstance(given, str) else Tolerance(absolute=float(given))


def _check(given: Any | None, *, allow_quantized: bool, task: str) -> str | None:
    """A check by name, or a function as a file that a worker can open."""
    if given is None:
        return None
    if not allow_quantized:
        raise UsageError("a check is for quantized recipes: give it together with allow_quantized")
    if task != "infer":
        raise UsageError("a check is of a model that answers: it goes with inference")
    if isinstance(given, str):
        place, _, function = given.rpartition(":")
        if not place or not function.isidentifier():
            raise SpecError(f"check {given!r} does not name a function: write path/to/file.py:function")
        if place.endswith(".py") and not Path(place).expanduser().is_file():
            raise SpecError(f"check {given!r}: no such file: {place}")
        return given
    from redline.api import pickled

    artifact = pickled(given)
    if artifact is None:
        raise UsageError("the check cannot be pickled: give it as 'file.py:function'")
    return f"pickle:{artifact}"


def _history() -> History:
    from redline.store import History

    return History.open()
