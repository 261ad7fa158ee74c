"""`redline tune`: the fastest recipe that keeps the numerics, what each switch brings, and the code to paste."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec

from redline.analyze.advice import command_line
from redline.analyze.rows import metric_of as figure_of
from redline.analyze.trust import error_text
from redline.model.errors import BenchError, DoorError, Exit, RecordError, SpecError, UsageError
from redline.model.fields import MOST_REPLICATES, MOST_THREADS, Frozen, require_range, seconds_of
from redline.model.metrics import COMPILE, Block, Fact, Figure, Headline, Row, Table
from redline.model.migrations import decode, encode
from redline.model.note import Note, note
from redline.model.protocol import AskSnippet, AskSwitches, Snippet, SwitchChoices
from redline.model.record import RunRecord
from redline.model.settings import WHAT, setting
from redline.model.spec import BASELINE, Recipe
from redline.model.units import counted, parse_price
from redline.model.work import Facts
from redline.search.batch import require_batches
from redline.search.spread import on_cluster, require_cluster
from redline.search.tune.costs import compile_s
from redline.search.tune.lessons import metric_of
from redline.search.tune.loop import run_search, with_hints
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
from redline.search.tune.space import space_for
from redline.search.tune.state import Clock, Search, usual_jobs
from redline.search.tune.summary import Ranked, TuneSummary, summary_of
from redline.show.folder import check_file, write_text
from redline.show.result import Result
from redline.show.searches import FIGURE_OF, GAIN, answer, vs_baseline
from redline.verbs.recipe import PlainRecipe, arguments_of, recipe
from redline.verbs.verb import ISOLATED, WORKLOAD, Address, ModelName, Ray, target, verb
from redline.verbs.workspace import Workspace, named_function, one_spec, use

COST = Figure(
    name="cost_per_million", header="per million", better="lower", doc="Cost of a million items at the price given."
)
SHOWN = 5
"""A person sees so many rows of the ranking without -v."""


def _words(name: str, value: Any) -> tuple[str, ...]:
    """Several as a person writes them: a list, or a text with commas."""
    given = value.split(",") if isinstance(value, str) else value
    return tuple(word.strip() for word in given)


def _batch(name: str, value: Any) -> int | str | None:
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    if isinstance(value, str) and value != "auto":
        raise SpecError(f"batch must be a number or 'auto', got {value!r}")
    return value  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class TuneResult(Result):
    """Holds what a search found, with all that it rests on."""

    tune: TuneRecord
    recorded: Mapping[str, RunRecord]
    """All records of the search, by id."""
    summary: TuneSummary
    inputs: Any | None = None
    """The example inputs the search was given."""

    @property
    def winner(self) -> Ranked | None:
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
        return self.tune.snippet

    @property
    def plain(self) -> PlainRecipe:
        """The winner outside of any measurement: `redline.recipe(...)` for this workload."""
        workload, device = self.tune.tune.spec.workload, self.tune.tune.spec.device
        return recipe(self.recipe, task=workload.task, optimizer=workload.optimizer, device=device)

    def apply(self, model: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Callable[..., Any]:
        """Applies the winner to a copy of a model, or with `inplace=True` to the model itself.

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


@verb(
    takes=(*WORKLOAD, *ISOLATED, "effort"),
    tasks=("infer", "train", "generate"),
    examples=(
        "redline tune resnet50 --batch 32 --budget 5m --snippet fast.py",
        "redline tune my_model.py:build --task train --objective energy",
        "redline tune hf:gpt2 --task generate --prompt 512 --objective tpot",
    ),
    also=("save", "report", "log"),
)
def tune(
    model: ModelName,
    inputs: Any | None = None,
    *,
    budget: Annotated[
        Any,
        setting(
            "Time until the answer, such as 60s or 5m. Default: by what compiling the model takes.",
            kind=str,
        ),
    ] = None,
    objective: Annotated[
        Objective,
        setting("What to optimize. energy: joules per item; ttft and tpot, the times of tokens, with --task generate."),
    ] = "throughput",
    snippet: Annotated[
        Path | None, setting("Write the winner as plain PyTorch to this file.", shape="FILE", kind=str)
    ] = None,
    batch: Annotated[
        Any, setting("Items per step, or auto to search it too.", short="-b", group=WHAT, kind=str, read=_batch)
    ] = None,
    recipes: Annotated[
        Any, setting("A recipe to try first; repeatable.", short="-r", option="--recipe", kind=list[str])
    ] = (),
    switches: Annotated[
        Any, setting("Use only these switches, such as fp16,compile,graphs.", kind=str, read=_words)
    ] = (),
    without: Annotated[Any, setting("Leave these switches out, such as compile.", kind=str, read=_words)] = (),
    slo_p95: Annotated[Any, target("Keep p95 of the step time within this limit, such as 20ms.")] = None,
    tolerance: Annotated[
        Any, setting("Numerics: a factor on the error of rounding such as 2x, or a relative error.", kind=str)
    ] = None,
    allow_quantized: Annotated[bool, setting("Try int8 and fp8 too; recommended only with --check.")] = False,
    check: Annotated[
        Any,
        setting(
            "file.py:function, a metric of the model, higher is better; run on the winner and all finalists.", kind=str
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        setting("Recipes prepared at the same time. Default: as many as processors allow.", least=1, most=MOST_THREADS),
    ] = None,
    replicates: Annotated[int, setting("Fresh processes of each finalist.", least=1, most=MOST_REPLICATES)] = 3,
    price: Annotated[
        str | None, setting("Price of the machine, such as 2.50/h: adds the cost of a million items.")
    ] = None,
    name: Annotated[str | None, setting("Name of the search. Default: derived from what is asked.")] = None,
    resume: Annotated[bool, setting("Continue the same search where it stopped.")] = False,
    ray: Ray = False,
    address: Address = None,
    loss: Any | None = None,
    workspace: Workspace | None = None,
    clock: Clock = time.monotonic,
    **settings: Any,
) -> TuneResult:
    """Find the fastest recipe that keeps the numerics; write its code.

    The winner is proven against the baseline, and each of its switches is measured. Every recipe's numerics are checked before it is timed.
    Ctrl-C prints the best so far. A --check that raises an error under a recipe rejects that recipe, and the exit code is 5.
    """
    require_cluster(ray, address)
    per_hour = parse_price(price) if price is not None else None
    if snippet is not None:
        check_file(Path(snippet))
    if settings.get("no_check"):
        raise UsageError("no_check does not go with a search: it recommends nothing whose outputs were not checked")
    if batch not in (None, "auto"):
        settings["batch"] = batch
    with use(workspace) as opened:
        spec, working = one_spec(opened, "a search", model, inputs, recipes="baseline", loss=loss, **settings)
        asked = TuneSpec(
            spec=spec,
            objective=objective,
            tunes_batch=batch == "auto",
            slo_p95_s=slo_p95,
            tolerance=Tolerance.of(tolerance),
            allow_quantized=allow_quantized,
            check=_check(opened, check, task=spec.workload.task),
            switches=tuple(switches),
            without=tuple(without),
            seeds=(recipes,) if isinstance(recipes, str) else tuple(recipes),
            replicates=replicates,
        )
        budget_s = seconds_of("budget", budget) if budget is not None else None
        wanted = Wanted(asked=asked, budget_s=budget_s, jobs=jobs, name=name or default_name(asked), resume=resume)
        result = _search_on_cluster(wanted, working, address) if ray else _search_here(wanted, working, clock)
    if snippet is not None and result.snippet is not None:
        write_text(Path(snippet), result.snippet)
    return result_of(
        result.tune, result.recorded, result.summary, inputs=inputs, snippet_file=snippet, per_hour=per_hour
    )


def usual_budget_s(facts: Facts | None, spec_device: str, task: Any) -> float:
    """A minute, and three and a half times what compiling the model may take: three minutes or so for one that compiles in 40 s."""
    on_cpu = spec_device.partition(":")[0] == "cpu"
    return round(min(60.0 + 3.5 * compile_s(facts, on_cpu=on_cpu, task=task), 600.0), -1)


class Wanted(Frozen):
    """A search that was asked for, on this machine or on one of a cluster."""

    asked: TuneSpec
    budget_s: float | None
    """None: by what the model costs."""
    jobs: int | None
    name: str
    resume: bool

    def __post_init__(self) -> None:
        require_range("jobs", self.jobs, 1, MOST_THREADS)
        if self.budget_s is not None and not self.budget_s > 0:
            raise SpecError(f"budget must be above 0, got {self.budget_s}")


def _search_here(wanted: Wanted, workspace: Workspace, clock: Clock = time.monotonic) -> TuneResult:
    """Search, or continue a search."""
    asked = wanted.asked
    if asked.tunes_batch:
        require_batches([asked.spec])
    history, ledger = workspace.history, workspace.history.tunes()
    searches = KeptSearches(ledger)
    with ledger.held(wanted.name):
        started_s = clock()
        kept = searches.to_resume(wanted.name) if wanted.resume else None
        (spec,) = workspace.checked([asked.spec])
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
        if kept is None:
            record = with_hints(record, searches.newest_first(), lambda one: history.load_many(one.record_ids), space)
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
                budget_s=wanted.budget_s or usual_budget_s(record.facts, spec.device, spec.workload.task),
                order=random.Random(spec.seed),
                records=history.load_many(record.record_ids) if kept else {},
                jobs=wanted.jobs or usual_jobs(spec),
                before_s=before_s,
            )
            run_search(search)
            return _with_snippet(search, workspace)


class _Sent(Frozen):
    """The question to a machine of a cluster."""

    search: Wanted
    kept: bytes = b""
    """How far a search came that goes on there, with the records that it rests on."""
    records: tuple[bytes, ...] = ()


class _Found(Frozen):
    """The answer of a machine of a cluster."""

    tune: bytes
    records: tuple[bytes, ...]


def _search_on_cluster(wanted: Wanted, workspace: Workspace, address: str | None) -> TuneResult:
    """Runs the whole search on one machine of a cluster and keeps here what it found."""
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
    return _found(tune, {record.id: record for record in measured}, workspace)


def _search_there(payload: bytes) -> bytes:
    """Runs the search on the machine of the cluster, in a history that lasts as long as the search."""
    sent = msgspec.msgpack.decode(payload, type=_Sent)
    with TemporaryDirectory(prefix="redline-tune-") as folder:
        with Workspace(history=Path(folder) / "history.sqlite") as workspace:
            for record in sent.records:
                workspace.history.finish(decode(record))
            if sent.kept:
                KeptSearches(workspace.history.tunes()).save(decode_tune(sent.kept))
            result = _search_here(sent.search, workspace)
        records = tuple(map(encode, result.recorded.values()))
    return msgspec.msgpack.encode(_Found(tune=encode_tune(result.tune), records=records))


def _found(tune: TuneRecord, records: Mapping[str, RunRecord], workspace: Workspace) -> TuneResult:
    return result_of(tune, records, summary_of(tune, records, workspace.ceilings_of(records.values())))


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
        return _found(record, records, opened)


def _with_snippet(search: Search, workspace: Workspace) -> TuneResult:
    """Keeps the winner's code, or a note why there is none, and returns what was found."""
    result = _found(search.tune, search.records, workspace)
    if result.winner is None:
        return result
    spec = search.asked.spec
    workload = msgspec.structs.replace(spec.workload, batch=result.winner.row.batch or spec.workload.batch)
    winner = msgspec.structs.replace(spec, recipe=Recipe.parse(result.winner.recipe), workload=workload)
    try:
        search.keep(snippet=workspace.ask(AskSnippet(spec=winner), Snippet, spec.launch).code)
    except BenchError as error:
        search.keep(snippet=None, notes=(*search.tune.notes, note("no-snippet", f"no snippet: {error}")))
    return _found(search.tune, search.records, workspace)


def _check(workspace: Workspace, given: Any | None, *, task: str) -> str | None:
    """A check by name, or a function as a file that a worker can open."""
    if given is None:
        return None
    if task != "infer":
        raise UsageError("check needs the outputs of a model: it works with inference only")
    return named_function(workspace, "check", given)


# What it shows


def result_of(
    tune: TuneRecord,
    records: Mapping[str, RunRecord],
    summary: TuneSummary,
    *,
    inputs: Any | None = None,
    snippet_file: str | Path | None = None,
    per_hour: float | None = None,
) -> TuneResult:
    """Shows the winner, its code and five rows of the ranking; with -v all that the search knows."""
    first = next((ranked.row for ranked in summary.ranking), None)
    device = first.device if first is not None else tune.tune.spec.device
    roofline = summary.leader.row.roofline if summary.leader is not None else None
    about: dict[str, Fact] = {
        "model": tune.tune.spec.workload.model,
        "task": tune.tune.spec.workload.task,
        "batch": first.batch if first is not None else None,
        "device": f"{first.device_name} ({device})" if first is not None and first.device_name else device,
        "objective": tune.tune.objective,
    }
    title = " · ".join(f"{name} {value}" if name == "batch" else str(value) for name, value in about.items() if value)
    about |= {
        "state": tune.state,
        "name": tune.name,
        "seconds": tune.seconds,
        "trials": len({trial.recipe for trial in tune.trials}),
        "headroom": roofline.headroom if roofline is not None else None,
    }
    speed = FIGURE_OF.get(tune.tune.objective, "throughput")
    return TuneResult(
        verb="tune",
        headline=Headline(template="{answer}", figures={"answer": answer(summary)}),
        tables=(
            Table(
                name="ranking",
                title=title,
                rows=tuple(_ranked_row(summary, each, at, per_hour) for at, each in enumerate(summary.ranking)),
                columns=("recipe", "vs_baseline", "verdict", speed, "error", "compile", "cost_per_million"),
            ),
            *_other_tables(tune, summary),
        ),
        about=about,
        notes=tuple(_notes(tune, summary, records)),
        blocks=tuple(_blocks(summary, snippet_file)),
        next=_next(tune, summary),
        record_ids=tuple(tune.record_ids),
        exit_code=_exit_code(tune, summary),
        tune=tune,
        records=list(records.values()),
        recorded=dict(records),
        summary=summary,
        inputs=inputs,
    )


def _ranked_row(found: TuneSummary, ranked: Ranked, number: int, per_hour: float | None) -> Row:
    """A verdict stands only where an interval decides it: what was seen in one process was not raced."""
    row = ranked.row
    is_winner = found.winner is not None and ranked.recipe == found.winner.recipe
    verdict = ranked.verdict if ranked.low is not None else "not raced"
    facts: dict[str, Fact] = {
        "recipe": ranked.recipe,
        "verdict": "winner" if is_winner else verdict if ranked.recipe != BASELINE else "",
        "error": error_text(row.numerics, with_steps=True),
        "remark": str(ranked.note or ("host-bound" if row.bound.label == "host" else "")),
    }
    known = [figure_of(row, name) for name in ("throughput", *FIGURE_OF.values())]
    metrics = [vs_baseline(ranked), *(metric for metric in known if metric is not None)]
    metrics += [COMPILE(ranked.compile_s)] if ranked.compile_s is not None else []
    metrics += [COST(row.changed(per_hour=per_hour).cost_per_million)] if per_hour is not None else []
    return Row(facts=facts, metrics=tuple(metrics), is_detail=number >= SHOWN)


def _other_tables(tune: TuneRecord, found: TuneSummary) -> Iterator[Table]:
    checks = (Row(facts={"recipe": each.recipe, "value": each.value, "baseline": each.baseline}, failure=each.failure or "") for each in tune.metrics)  # fmt: skip
    yield Table(name="checks", title="your check", rows=tuple(checks))
    details: dict[str, Iterable[Row]] = {
        "gains": (Row(facts={"switch": each.switch}, metrics=(GAIN(each.gain, each.low, each.high),)) for each in found.switches),
        "rejected": (Row(facts={"recipe": each.recipe, "part": each.switch, "scope": each.scope, "code": each.code, "why": each.text}) for each in found.rejected),
        "not tried": (Row(facts={"switch": each.switch, "why": str(each.reason)}) for each in tune.refused),
        "untried": (Row(facts={"recipe": each.recipe}, metrics=(GAIN(1 + each.gain), Figure(name="needs", unit="s")(each.budget_s))) for each in tune.untried),
        "spent": [Row(facts={"what": "seconds"}, metrics=tuple(Figure(name=name, unit="s")(value) for name, value in msgspec.structs.asdict(tune.spent).items()))],
    }  # fmt: skip
    if tune.facts is not None:
        known = msgspec.to_builtins(tune.facts).items()
        values = {name: ", ".join(map(str, value)) if isinstance(value, list) else value for name, value in known}
        plain = {name: value for name, value in values.items() if value and not isinstance(value, dict)}
        details["a step of the model"] = [Row(facts={"fact": name, "value": value}) for name, value in plain.items()]
    for name, rows in details.items():
        yield Table(name=name.replace(" ", "_"), title=name, rows=tuple(rows)).as_detail()


def _blocks(found: TuneSummary, snippet_file: str | Path | None) -> Iterator[Block]:
    tune, workload = found.tune, found.tune.tune.spec.workload
    best = found.winner or (None if found.has_answer else found.leader)  # what was stopped shows the best so far
    if best is not None and best.recipe != BASELINE:
        code = f"redline.recipe({best.recipe!r}).apply(model, *example_inputs)"
        if workload.task == "train":
            code = f"redline.recipe({best.recipe!r}, task='train').training_step(model, loss, inputs, targets)"
        elif workload.task == "generate":
            code = f"redline run {workload.model} --task generate -r {best.recipe}"
        file = f"\ncode without Redline: {snippet_file}" if snippet_file is not None and tune.snippet else ""
        yield Block(title="", text=f"  {code}{file}")
    if tune.tune.objective == "latency":
        text = "  judged by the latency of one step, with the copy of its inputs into a graph's buffers"
        yield Block(title="", text=text)
    if found.switches:
        gains = ", ".join(f"{each.switch} {each.gain:.2f}×" for each in found.switches)
        yield Block(title="", text=f"  what each switch brings: {gains}")
    if tune.snippet is not None:
        yield Block(title="snippet", text=tune.snippet, is_detail=True)


# Notes beside the figures

DISTURBANCES = ("shared-cpu", "shared-gpu", "throttled", "others-at-work")
"""Doubts about times that are not the recipe's doing."""
MUCH_DOUBLE = 0.2
"""A model that computes with 64 bits in this share of its operators' time does so on purpose."""
DIGITS = {"bf16": 2, "fp16": 3, "tf32": 3}
"""Decimal digits that a number format keeps, about."""
LEFT_OUT_OF_COMPARISON = ("masked-positions", "one-input-set")
"""Codes of notes that say what the comparison of outputs leaves out."""


def _notes(tune: TuneRecord, found: TuneSummary, records: Mapping[str, RunRecord]) -> Iterator[Note]:
    """Yields what failed, the baseline first, how the search ended, and what the leader's figures rest on."""
    reasons: dict[str, list[str]] = {}
    for each in sorted(found.rejected, key=lambda each: each.recipe != BASELINE):
        reasons.setdefault(each.text, []).append(each.recipe)
    if reasons:
        texts = [
            f"{counted(len(recipes), 'recipe')}, such as {recipes[0]}: {text}"
            if recipes[1:]
            else f"{recipes[0]}: {text}"
            for text, recipes in reasons.items()
        ]
        yield note("rejected-in-final", f"rejected: {'; '.join(texts)}")
    yield from tune.notes
    if found.leader is not None:
        yield from _leader_notes(found.leader, found)
        own = (each.prepared for each in records.values() if str(each.spec.recipe) == found.leader.recipe)
        known = dict.fromkeys(each for one in own if one is not None for each in one.workload.notes)
        yield from (each for each in known if found.winner is not None and each.code in LEFT_OUT_OF_COMPARISON)
    tried = {trial.recipe for trial in tune.trials}
    for name in dict.fromkeys(each.recipe for each in tune.given_up if each.recipe not in tried):
        seconds = max(each.seconds for each in tune.given_up if each.recipe == name)
        yield note("given-up", f"{name} was given up: {seconds:.0f} s were not enough to prepare it", about=name)


def _leader_notes(leader: Ranked, found: TuneSummary) -> Iterator[Note]:
    verdict, tune, facts = leader.row.verdict, found.tune, found.tune.facts
    for each in dict.fromkeys((*verdict.reasons, *verdict.notes)):
        if each.code in DISTURBANCES:
            doubt = "" if leader.recipe == BASELINE else "; undisturbed it may be faster, and its gain another"
            remedy = ": run it again when they have ended" if each.code == "shared-cpu" else ""
            yield note(each.code, f"{leader.recipe}: {each}{doubt}{remedy}", about=leader.recipe)
    if found.winner is None:
        return
    if tune.tune.check is not None and metric_of(leader.recipe, tune) is None:
        yield note("check-not-run", f"your check has not been run on {leader.recipe}: it is not proven")
    if facts is not None and (facts.branches or facts.varies_shapes):
        what = "runs other operators" if facts.branches else "gives its operators other shapes"
        where = "on other values of its inputs, and was timed with its own: elsewhere the gain may differ"
        yield note("one-branch", f"the model {what} {where}")
    number_format = leader.row.numerics.number_format if leader.row.numerics is not None else None
    digits = DIGITS.get(number_format or "")
    if facts is not None and facts.double_share >= MUCH_DOUBLE and digits is not None:
        kept = f"{number_format} keeps about {digits} of its 16 digits"
        text = f"the model computes in float64, and {kept}: where they matter, search with --tolerance 1e-6"
        yield note("fewer-digits", text)


def _next(tune: TuneRecord, found: TuneSummary) -> str:
    codes = {each.code for each in tune.notes}
    if tune.state in ("running", "interrupted"):
        return "the same command with --resume continues"
    if "baseline-too-slow" in codes:
        return "the same command with a larger --budget, or on a quieter machine"
    if "not-finite" in codes and found.leader is None:
        return "give inputs, weights or a loss with which the baseline's own numbers are finite"
    if "not-repeatable" in codes:
        return "make the model give the same twice: no state between calls, and random numbers from torch alone"
    if found.leader is None:
        return "make the baseline run; 'redline run' shows where it breaks"
    if not found.has_answer:
        return "the same command with --resume and a larger --budget continues"
    if found.winner is not None:
        recipes = [found.winner.recipe]
        return command_line("profile", tune.tune.spec, batch=found.winner.row.batch, recipes=recipes) or ""
    if any(row.verdict == "inconclusive" and row.low is not None for row in found.ranking):
        return "stay with the baseline, or try again on a quiet machine or with more --replicates"
    return "stay with the baseline; try another batch, or --allow-quantized with a --check"


def _exit_code(tune: TuneRecord, found: TuneSummary) -> int:
    if tune.state == "interrupted":
        return Exit.INTERRUPTED
    is_sound = found.leader is not None and not any(metric.failure for metric in tune.metrics)
    return Exit.DONE if is_sound else Exit.FAILED_ROW
