"""`redline.tune`: the fastest recipe that keeps the numerics, what each switch brings, and the code to paste."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack, cast

import msgspec
from rich.console import RenderableType

from redline.analyze.summary import CeilingsOf
from redline.api.recipe import PlainRecipe, arguments_of, recipe
from redline.api.settings import OtherSettings, listed, named_function, one_spec, takes_settings
from redline.api.workspace import Workspace, use
from redline.model.errors import BenchError, DoorError, RecordError, SpecError, UsageError
from redline.model.fields import MOST_THREADS, Frozen, require_range, seconds_of
from redline.model.migrations import decode, encode
from redline.model.note import note
from redline.model.questions import AskSnippet, AskSwitches, Snippet, SwitchChoices
from redline.model.record import RunRecord
from redline.model.spec import Recipe
from redline.model.units import parse_price
from redline.search.batch import require_batches
from redline.search.spread import on_cluster, require_cluster
from redline.search.tune.loop import begun_with, run_search, with_machine
from redline.search.tune.record import (
    KeptSearches,
    Objective,
    Tolerance,
    TuneRecord,
    TuneSpec,
    decode_tune,
    default_name,
    encode_tune,
    resumed,
)
from redline.search.tune.result import TuneSummary, Winner, summary_of, with_price
from redline.search.tune.space import space_for
from redline.search.tune.state import Clock, Search, usual_jobs
from redline.show.export import JsonDocument, json_document
from redline.show.notebook import Bars, Shown
from redline.show.tune import tune_report


class TuneResult(Shown):
    """What a search found, with all that it rests on."""

    def __init__(
        self,
        tune: TuneRecord,
        records: Mapping[str, RunRecord],
        ceilings_of: CeilingsOf | None = None,
        inputs: Any | None = None,
    ) -> None:
        self.tune = tune
        self.records = dict(records)
        self.inputs = inputs
        """The example inputs the search was given."""
        self.summary: TuneSummary = summary_of(tune, self.records, ceilings_of)

    def report(self) -> RenderableType:
        return tune_report(self.summary)

    def frame_rows(self) -> Sequence[Any]:
        return self.summary.ranking

    def bars(self) -> Bars | None:
        bars = [(row.recipe, row.ratio, row.low, row.high) for row in self.summary.ranking if math.isfinite(row.ratio)]
        return Bars(f"{self.summary.model} against the baseline", "time of the baseline over time of this one", bars)

    @property
    def winner(self) -> Winner | None:
        return self.summary.winner

    @property
    def recipe(self) -> str:
        """The winner's; raises where nothing is surely faster than the baseline."""
        if self.winner is None:
            raise UsageError("the search found no recipe that is surely faster than the baseline; print it to see why")
        return self.winner.recipe

    @property
    def snippet(self) -> str | None:
        """The winner as plain PyTorch."""
        return self.summary.snippet

    @property
    def plain(self) -> PlainRecipe:
        """The winner outside of any measurement: `redline.recipe(...)` for this workload."""
        workload, device = self.tune.tune.spec.workload, self.tune.tune.spec.device
        return recipe(self.recipe, task=workload.task, optimizer=workload.optimizer, device=device)

    def apply(self, model: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Callable[..., Any]:
        """The winner applied to a copy of a model, or with `inplace=True` to the model itself.

        It is made for inputs like these, or like those of the search where none are given.
        """
        if not args and not kwargs and self.tune.tune.spec.workload.task == "infer":
            args, kwargs = arguments_of(self._inputs_or("apply(model, inputs)"))
        return self.plain.apply(model, *args, inplace=inplace, **kwargs)

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

    def to_json(self) -> JsonDocument:
        return json_document("tune", self.summary)


@takes_settings
def tune(
    model: Any,
    inputs: Any | None = None,
    *,
    batch: int | str | None = None,
    threads: int | None = None,
    objective: str = "throughput",
    budget: float | str = 600.0,
    slo_p95: float | str | None = None,
    tolerance: float | str | None = None,
    allow_quantized: bool = False,
    check: Any | None = None,
    jobs: int | None = None,
    recipes: str | Iterable[str] = (),
    switches: Iterable[str] = (),
    without: Iterable[str] = (),
    replicates: int = 3,
    name: str | None = None,
    resume: bool = False,
    ray: bool = False,
    address: str | None = None,
    loss: Any | None = None,
    price: str | None = None,
    workspace: Workspace | None = None,
    clock: Clock = time.monotonic,
    **settings: Unpack[OtherSettings],
) -> TuneResult:
    """Search for the fastest recipe that keeps the numerics. Ctrl-C returns the best so far.

    `objective` is "throughput", "latency" or "energy" (the fewest joules per item); for a generation also "ttft", the time to the first token, or "tpot", the
    time per further one.
    `batch` may be "auto"; `budget` and `slo_p95` are seconds or texts such as "10m" and "20ms"; `tolerance` is a
    relative error, or a factor on the error of rounding such as "2x". `recipes` are tried first, `switches` restricts
    which switches may be used, `without` excludes some. `check` is a metric of your own (a function of the model,
    higher is better): it is run on all that go to the last race and on the winner, and what loses more than 1 % of the
    baseline's is not recommended; quantized recipes never are without one. `jobs` recipes are prepared at the same time
    (by default as many as processors allow); only one is ever timed. `price` of the machine, such as "2.50/h",
    adds the cost of a million items. A mistake is raised before anything is measured.

    With `ray` the search runs whole on one GPU of the Ray cluster at `address` (`auto`: this machine's), since its trials
    are compared with each other; it starts again elsewhere if that machine is lost.
    """
    require_cluster(ray, address)
    per_hour = parse_price(price) if price is not None else None
    table = _table(settings, threads, batch)
    with use(workspace) as opened:
        spec, working = one_spec(opened, "a search", model, inputs, recipes="baseline", loss=loss, **table)
        asked = TuneSpec(
            spec=spec,
            objective=cast(Objective, objective),
            tunes_batch=batch == "auto",
            slo_p95_s=seconds_of("slo_p95", slo_p95) if slo_p95 is not None else None,
            tolerance=Tolerance.of(tolerance),
            allow_quantized=allow_quantized,
            check=_check(opened, check, task=spec.workload.task),
            switches=tuple(switches),
            without=tuple(without),
            seeds=tuple(listed(recipes)),
            replicates=replicates,
        )
        budget_s = seconds_of("budget", budget)
        wanted = Wanted(asked=asked, budget_s=budget_s, jobs=jobs, name=name or default_name(asked), resume=resume)
        result = _search_on_cluster(wanted, working, address) if ray else _search_here(wanted, working, clock)
    result.inputs = inputs
    if per_hour is not None:
        result.summary = with_price(result.summary, per_hour)
    return result


def _table(settings: Mapping[str, Any], threads: int | None, batch: int | str | None) -> dict[str, Any]:
    """The settings of the spec that a search begins with."""
    if isinstance(batch, str) and batch != "auto":
        raise SpecError(f"batch must be a number or 'auto', got {batch!r}")
    if settings.get("no_check"):
        raise UsageError("no_check does not go with a search: it recommends nothing whose outputs were not checked")
    asked = {"threads": threads, "batch": None if batch == "auto" else batch}
    return {**settings, **{name: value for name, value in asked.items() if value is not None}}


class Wanted(Frozen):
    """A search that was asked for, on this machine or on one of a cluster."""

    asked: TuneSpec
    budget_s: float
    jobs: int | None
    name: str
    resume: bool

    def __post_init__(self) -> None:
        require_range("jobs", self.jobs, 1, MOST_THREADS)
        if not self.budget_s > 0:
            raise SpecError(f"budget must be above 0, got {self.budget_s}")


def _search_here(wanted: Wanted, workspace: Workspace, clock: Clock = time.monotonic) -> TuneResult:
    """Search, or continue a search."""
    asked = wanted.asked
    if asked.tunes_batch:
        require_batches([asked.spec])
    history, ledger = workspace.history, workspace.history.tunes()
    searches = KeptSearches(ledger)
    with ledger.held(wanted.name):
        kept = searches.to_resume(wanted.name) if wanted.resume else None
        before = searches.readable(wanted.name) if not wanted.resume else None
        (spec,) = workspace.checked([asked.spec])
        started_s = clock()  # the budget begins when torch is loaded
        if spec.workload.task == "step":
            raise UsageError("a function is timed as it is, so there is no recipe to search: tune the model inside it")
        asked = msgspec.structs.replace(asked, spec=spec)
        kept = resumed(kept, asked) if kept is not None else None
        offered = workspace.ask(AskSwitches(spec=spec), SwitchChoices, spec.launch)
        space, refused = space_for(asked, offered.choices)
        for seed in asked.seeds:
            space.checked(seed)
        quantizing = tuple(choice.switch for choice in offered.choices if choice.capabilities.quantizes)
        record = kept or TuneRecord(
            name=wanted.name,
            tune=asked,
            created_at=time.time(),
            refused=tuple(refused),
            quantizing=quantizing,
            facts=offered.facts,
        )
        record = with_machine(record, searches.newest_first())
        if before is not None:
            record = begun_with(record, before, history.load_many(before.record_ids), asked, space)
        before_s = clock() - started_s  # waiting for the device is not charged
        with workspace.lock(spec.device):
            search = Search(
                tune=record,
                space=space,
                door=workspace.door(spec.launch),
                journal=history,
                keeper=searches,
                observer=workspace.observer,
                clock=clock,
                budget_s=wanted.budget_s,
                order=random.Random(spec.seed),
                records=history.load_many(record.record_ids) if kept else {},
                jobs=wanted.jobs or usual_jobs(spec),
                before_s=before_s,
            )
            run_search(search)
            return _with_snippet(search, workspace)


class _Sent(Frozen):
    """What a machine of a cluster is asked."""

    search: Wanted
    kept: bytes = b""
    """Where the search goes on: how far it came, with the records that it rests on."""
    records: tuple[bytes, ...] = ()


class _Found(Frozen):
    """What it answers."""

    tune: bytes
    records: tuple[bytes, ...]


def _search_on_cluster(wanted: Wanted, workspace: Workspace, address: str | None) -> TuneResult:
    """The search whole on one machine of a cluster; what it found is kept here."""
    history, ledger = workspace.history, workspace.history.tunes()
    searches = KeptSearches(ledger)
    with ledger.held(wanted.name):
        kept = searches.to_resume(wanted.name) if wanted.resume else None
        records = history.load_many(kept.record_ids) if kept is not None else {}
        sent = _Sent(
            search=wanted,
            kept=encode_tune(kept) if kept is not None else b"",
            records=tuple(map(encode, records.values())),
        )
        workspace.observer.stage("searching on the cluster")
        payload, device = msgspec.msgpack.encode(sent), wanted.asked.spec.device
        ((_, answer),) = on_cluster(_search_there, [payload], [device], address)
        if isinstance(answer, DoorError):
            raise answer
        found = msgspec.msgpack.decode(answer, type=_Found)
        measured = [decode(record) for record in found.records]
        for record in measured:
            history.finish(record)
        tune = decode_tune(found.tune)
        searches.save(tune)
    return TuneResult(tune, {record.id: record for record in measured}, workspace.ceilings_of(measured))


def _search_there(payload: bytes) -> bytes:
    """On the machine of the cluster, in a history that lasts as long as the search."""
    sent = msgspec.msgpack.decode(payload, type=_Sent)
    with TemporaryDirectory(prefix="redline-tune-") as folder:
        with Workspace(history=Path(folder) / "history.sqlite") as workspace:
            for record in sent.records:
                workspace.history.finish(decode(record))
            if sent.kept:
                KeptSearches(workspace.history.tunes()).save(decode_tune(sent.kept))
            result = _search_here(sent.search, workspace)
        records = tuple(map(encode, result.records.values()))
    return msgspec.msgpack.encode(_Found(tune=encode_tune(result.tune), records=records))


def _result(search: Search, workspace: Workspace) -> TuneResult:
    return TuneResult(search.tune, search.records, workspace.ceilings_of(search.records.values()))


def kept_tune(
    name: str,
    *,
    workspace: Workspace | None = None,
    on_unreadable: Callable[[str, RecordError], None] | None = None,
) -> TuneResult:
    """A search from the history, as it was last written."""
    with use(workspace) as opened, opened.reading() as history:
        record = KeptSearches(history.tunes()).load(name)
        if record is None:
            known = ", ".join(row.name for row in history.tunes().rows()[:5])
            raise UsageError(f"no tune {name!r} in {history.location}{f'; there are {known}' if known else ''}")
        ids = record.record_ids
        records = history.load_many(ids, on_unreadable=on_unreadable) if on_unreadable else history.load_many(ids)
        return TuneResult(record, records, opened.ceilings_of(records.values()))


def _with_snippet(search: Search, workspace: Workspace) -> TuneResult:
    """What was found, with the winner's code kept, or a note why there is none."""
    result = _result(search, workspace)
    if result.winner is None:
        return result
    spec = search.asked.spec
    workload = msgspec.structs.replace(spec.workload, batch=result.winner.batch or spec.workload.batch)
    winner = msgspec.structs.replace(spec, recipe=Recipe.parse(result.winner.recipe), workload=workload)
    try:
        search.keep(snippet=workspace.ask(AskSnippet(spec=winner), Snippet, spec.launch).code)
    except BenchError as error:
        search.keep(snippet=None, notes=(*search.tune.notes, note("no-snippet", f"no snippet: {error}")))
    return _result(search, workspace)


def _check(workspace: Workspace, given: Any | None, *, task: str) -> str | None:
    """A check by name, or a function as a file that a worker can open."""
    if given is None:
        return None
    if task != "infer":
        raise UsageError("check needs the outputs of a model: it works with inference only")
    return named_function(workspace, "check", given)
