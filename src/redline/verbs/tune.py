"""`redline tune`: the fastest recipe that keeps the numerics, what each switch brings, and the code to paste."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from redline.analyze.advice import command_line
from redline.analyze.rows import metric_of as figure_of
from redline.analyze.trust import error_text
from redline.model.errors import BenchError, Exit, RecordError, SpecError, UsageError
from redline.model.fields import MOST_REPLICATES, MOST_THREADS, seconds_of
from redline.model.metrics import COMPILE, Block, Fact, Figure, Headline, Row, Table
from redline.model.note import Note, note
from redline.model.protocol import AskSnippet, AskSwitches, Snippet, SwitchChoices
from redline.model.record import RunRecord
from redline.model.settings import setting
from redline.model.spec import BASELINE, Recipe
from redline.model.units import counted, parse_price
from redline.search.tune.costs import compile_s
from redline.search.tune.lessons import metric_of
from redline.search.tune.loop import run_search, with_hints
from redline.search.tune.record import (
    KeptSearches,
    Objective,
    Tolerance,
    TuneRecord,
    TuneSpec,
    default_name,
    resumed,
)
from redline.search.tune.space import space_for
from redline.search.tune.state import Clock, Search, is_on_cpu, usual_jobs
from redline.search.tune.summary import Ranked, TuneSummary, summary_of
from redline.show.folder import check_file, write_text
from redline.show.result import Result
from redline.show.searches import FIGURE_OF, GAIN, answer, speed_of, vs_baseline
from redline.verbs.recipe import PlainRecipe, arguments_of, recipe
from redline.verbs.verb import ISOLATED, WORKLOAD, ModelName, target, verb
from redline.verbs.workspace import Workspace, named_function, one_spec, use

COST = Figure(
    name="cost_per_million", header="per million", better="lower", doc="Cost of a million items at the price given."
)
SHOWN = 5
"""A person sees so many rows of the ranking without -v."""


def _words(name: str, value: Any) -> tuple[str, ...]:
    """Returns several words as a person writes them: a list, or a text with commas."""
    given = value.split(",") if isinstance(value, str) else value
    return tuple(word.strip() for word in given)


@dataclass(frozen=True, kw_only=True)
class TuneResult(Result):
    """Holds what a search found, with all that it rests on."""

    tune: TuneRecord
    recorded: Mapping[str, RunRecord]
    """These are all records of the search, by id."""
    summary: TuneSummary
    inputs: Any | None = None
    """The example inputs the search was given."""

    @property
    def winner(self) -> Ranked | None:
        return self.summary.winner

    @property
    def recipe(self) -> str:
        """Returns the winner's recipe; raises where nothing is surely faster than the baseline."""
        if self.winner is None:
            raise UsageError("the search found no recipe that is surely faster than the baseline; print it to see why")
        return self.winner.recipe

    @property
    def snippet(self) -> str | None:
        """Returns the winner as plain PyTorch."""
        return self.tune.snippet

    @property
    def plain(self) -> PlainRecipe:
        """Returns the winner outside of any measurement: `redline.recipe(...)` for this workload."""
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
        """Returns the winner of a search for training: a function of inputs and targets that does one whole step.

        It is made for inputs like these, a dict of keywords among others. With None it is made for those of the search.
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
    loss: Any | None = None,
    workspace: Workspace | None = None,
    clock: Clock = time.monotonic,
    **settings: Any,
) -> TuneResult:
    """Find the fastest recipe that keeps the numerics; write its code.

    The winner is proven against the baseline, and each of its switches is measured. Every recipe's numerics are checked before it is timed.
    Ctrl-C prints the best so far. A --check that raises an error under a recipe rejects that recipe, and the exit code is 5.
    """
    per_hour = parse_price(price) if price is not None else None
    if snippet is not None:
        check_file(Path(snippet))
    if settings.get("batch") == "auto":
        raise UsageError("a search is at one batch: 'redline batch MODEL -r RECIPE' finds the best one for its winner")
    if settings.get("no_check"):
        raise UsageError("no_check does not go with a search: it recommends nothing whose outputs were not checked")
    with use(workspace) as opened:
        spec, working = one_spec(opened, "a search", model, inputs, recipes="baseline", loss=loss, **settings)
        asked = TuneSpec(
            spec=spec,
            objective=objective,
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
        if budget_s is not None and not budget_s > 0:
            raise SpecError(f"budget must be above 0, got {budget_s}")
        name = name or default_name(asked)
        result = _search(working, asked, name=name, resume=resume, budget_s=budget_s, jobs=jobs, clock=clock)
    if snippet is not None and result.snippet is not None:
        write_text(Path(snippet), result.snippet)
    return result_of(
        result.tune, result.recorded, result.summary, inputs=inputs, snippet_file=snippet, per_hour=per_hour
    )


def _search(
    workspace: Workspace,
    asked: TuneSpec,
    *,
    name: str,
    resume: bool,
    budget_s: float | None,
    jobs: int | None,
    clock: Clock,
) -> TuneResult:
    """Searches, or continues a search; without a budget, for as long as the model costs."""
    history, ledger = workspace.history, workspace.history.tunes()
    searches = KeptSearches(ledger)
    with ledger.held(name):
        started_s = clock()
        kept = searches.to_resume(name) if resume else None
        (spec,) = workspace.checked([asked.spec])
        if spec.workload.task == "step":
            raise UsageError("a function is timed as it is, so there is no recipe to search: tune the model inside it")
        asked = msgspec.structs.replace(asked, spec=spec)
        record = resumed(kept, asked) if kept is not None else TuneRecord(name=name, tune=asked, created_at=time.time())
        offered = workspace.ask(AskSwitches(spec=spec), SwitchChoices, spec.launch)
        space, refused = space_for(asked, offered.choices)
        for seed in asked.seeds:
            space.checked(seed)
        if kept is None:
            quantizing = tuple(choice.switch for choice in offered.choices if choice.capabilities.quantizes)
            known = {"refused": tuple(refused), "quantizing": quantizing, "facts": offered.facts}
            record = with_hints(msgspec.structs.replace(record, **known), searches.newest_first())
        before_s = clock() - started_s  # waiting for the device is not charged
        if budget_s is None:
            budget_s = usual_budget_s(record, is_on_cpu(spec))
            cost_s = compile_s(record.facts, on_cpu=is_on_cpu(spec)) * (record.compile_scale or 1.0)
            workspace.observer.noted(f"compiling takes about {cost_s:.0f} s, so the budget is {budget_s:.0f} s; --budget changes it")  # fmt: skip
        with workspace.lock(spec.device):
            search = Search(
                tune=record,
                space=space,
                door=workspace.door(spec.launch),
                journal=history,
                keeper=searches,
                observer=workspace.observer,
                clock=clock,
                budget_s=budget_s,
                order=random.Random(spec.seed),
                records=history.load_many(record.record_ids) if kept is not None else {},
                jobs=jobs or usual_jobs(spec),
                before_s=before_s,
            )
            run_search(search)
            return _with_snippet(search, workspace)


def usual_budget_s(tune: TuneRecord, on_cpu: bool) -> float:
    """Returns a minute, and three and a half times what compiling the model may take: three minutes or so for one that compiles in 40 s."""
    cost_s = compile_s(tune.facts, on_cpu=on_cpu) * (tune.compile_scale or 1.0)
    return round(min(60.0 + 3.5 * cost_s, 600.0), -1)


def _found(tune: TuneRecord, records: Mapping[str, RunRecord], workspace: Workspace) -> TuneResult:
    return result_of(tune, records, summary_of(tune, records, workspace.ceilings_of(records.values())))


def kept_tune(
    name: str,
    *,
    workspace: Workspace | None = None,
    on_unreadable: Callable[[str, RecordError], None] | None = None,
) -> TuneResult:
    """Returns a search from the history, as it was last written."""
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
    winner = msgspec.structs.replace(spec, recipe=Recipe.parse(result.winner.recipe))
    try:
        search.keep(snippet=workspace.ask(AskSnippet(spec=winner), Snippet, spec.launch).code)
    except BenchError as error:
        search.keep(snippet=None, notes=(*search.tune.notes, note("no-snippet", f"no snippet: {error}")))
    return _found(search.tune, search.records, workspace)


def _check(workspace: Workspace, given: Any | None, *, task: str) -> str | None:
    """Returns a check by name, or a function as a file that a worker can open."""
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
    workload, first = tune.tune.spec.workload, next((ranked.row for ranked in summary.ranking), None)
    device = first.device if first is not None else tune.tune.spec.device
    roofline = summary.leader.row.roofline if summary.leader is not None else None
    about: dict[str, Fact] = {
        "model": workload.model,
        "task": workload.task,
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
    columns = ("recipe", "vs_baseline", "verdict", speed, "error", "compile", "cost_per_million")
    ranking = tuple(_ranked_row(summary, each, at, per_hour) for at, each in enumerate(summary.ranking))
    is_sound = summary.leader is not None and not any(metric.failure for metric in tune.metrics)
    return TuneResult(
        verb="tune",
        headline=Headline(template="{answer}", figures={"answer": answer(summary)}),
        tables=(Table(name="ranking", title=title, rows=ranking, columns=columns), *_other_tables(summary)),
        about=about,
        notes=tuple(_notes(summary, records)),
        blocks=tuple(_blocks(summary, snippet_file)),
        next=_next(summary),
        record_ids=tuple(tune.record_ids),
        exit_code=Exit.INTERRUPTED if tune.state == "interrupted" else Exit.DONE if is_sound else Exit.FAILED_ROW,
        tune=tune,
        records=list(records.values()),
        recorded=dict(records),
        summary=summary,
        inputs=inputs,
    )


def _ranked_row(found: TuneSummary, ranked: Ranked, number: int, per_hour: float | None) -> Row:
    """Returns a row of the ranking. A verdict stands only where an interval decides it: what was seen in one process was not raced."""
    row = ranked.row
    is_winner = found.winner is not None and ranked.recipe == found.winner.recipe
    verdict = ranked.verdict if ranked.low is not None else "not raced"
    facts: dict[str, Fact] = {
        "recipe": ranked.recipe,
        "verdict": "winner" if is_winner else verdict if ranked.recipe != BASELINE else "",
        "error": error_text(row.numerics, with_steps=True),
        "remark": str(ranked.note or ("host-bound" if row.bound.label == "host" else "")),
    }
    speed = speed_of(found, ranked)
    known = [
        speed if speed and name == speed.name else figure_of(row, name) for name in ("throughput", *FIGURE_OF.values())
    ]
    metrics = [vs_baseline(ranked), *(metric for metric in known if metric is not None)]
    metrics += [COMPILE(ranked.compile_s)] if ranked.compile_s is not None else []
    metrics += [COST(row.changed(per_hour=per_hour).cost_per_million)] if per_hour is not None else []
    return Row(facts=facts, metrics=tuple(metrics), is_detail=number >= SHOWN)


def _other_tables(found: TuneSummary) -> Iterator[Table]:
    tune = found.tune
    spent = [Figure(name=name, unit="s")(value) for name, value in msgspec.structs.asdict(tune.spent).items()]
    facts = msgspec.to_builtins(tune.facts) if tune.facts is not None else {}
    plain = {name: ", ".join(map(str, value)) if isinstance(value, list) else value for name, value in facts.items()}
    checks = (Row(facts={"recipe": each.recipe, "value": each.value, "baseline": each.baseline}, failure=each.failure or "") for each in tune.metrics)  # fmt: skip
    yield Table(name="checks", title="your check", rows=tuple(checks))
    details: dict[str, Iterable[Row]] = {
        "gains": (Row(facts={"switch": each.switch}, metrics=(GAIN(each.gain, each.low, each.high),)) for each in found.switches),
        "rejected": (Row(facts={"recipe": each.recipe, "part": each.switch, "scope": each.scope, "code": each.code, "why": each.text}) for each in found.rejected),
        "given up": (Row(facts={"recipe": each.recipe}, metrics=(Figure(name="after", unit="s")(each.seconds),)) for each in tune.given_up),
        "not tried": (Row(facts={"switch": each.switch, "why": str(each.reason)}) for each in tune.refused),
        "spent": [Row(facts={"what": "seconds"}, metrics=tuple(spent))],
        "a step of the model": (Row(facts={"fact": name, "value": value}) for name, value in plain.items() if value and not isinstance(value, dict)),
    }  # fmt: skip
    for name, rows in details.items():
        yield Table(name=name.replace(" ", "_"), title=name, rows=tuple(rows)).as_detail()


def _blocks(found: TuneSummary, snippet_file: str | Path | None) -> Iterator[Block]:
    tune, workload = found.tune, found.tune.tune.spec.workload
    best = found.winner or (None if found.has_answer else found.leader)  # what was stopped shows the best so far
    if best is not None and best.recipe != BASELINE:
        code = {
            "train": f"redline.recipe({best.recipe!r}, task='train').training_step(model, loss, inputs, targets)",
            "generate": f"redline run {workload.model} --task generate -r {best.recipe}",
        }.get(workload.task, f"redline.recipe({best.recipe!r}).apply(model, *example_inputs)")
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
"""A number format keeps about so many decimal digits."""
LEFT_OUT_OF_COMPARISON = ("masked-positions", "one-input-set")
"""Codes of notes that say what the comparison of outputs leaves out."""


def _notes(found: TuneSummary, records: Mapping[str, RunRecord]) -> Iterator[Note]:
    """Yields what failed, the baseline first, how the search ended, and what the leader's figures rest on."""
    reasons: dict[str, list[str]] = {}
    for each in sorted(found.rejected, key=lambda each: each.recipe != BASELINE):
        reasons.setdefault(each.text, []).append(each.recipe)
    texts = [
        f"{counted(len(recipes), 'recipe') + ', such as ' if recipes[1:] else ''}{recipes[0]}: {text}"
        for text, recipes in reasons.items()
    ]
    if texts:
        yield note("rejected-in-final", f"rejected: {'; '.join(texts)}")
    yield from found.tune.notes
    if found.leader is not None:
        yield from _leader_notes(found.leader, found)
        own = (each.prepared for each in records.values() if str(each.spec.recipe) == found.leader.recipe)
        known = dict.fromkeys(each for one in own if one is not None for each in one.workload.notes)
        yield from (each for each in known if found.winner is not None and each.code in LEFT_OUT_OF_COMPARISON)
    tried = {trial.recipe for trial in found.tune.trials}
    late = {each.recipe: each.seconds for each in found.tune.given_up if each.recipe not in tried}
    if late:
        told = ", ".join(f"{recipe} ({seconds:.0f} s were not enough)" for recipe, seconds in late.items())
        yield note("given-up", f"given up while they were prepared: {told}")


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


def _next(found: TuneSummary) -> str:
    tune, winner = found.tune, found.winner
    if tune.state in ("running", "interrupted"):
        return "the same command with --resume continues"
    remedies = {
        "baseline-too-slow": "the same command with a larger --budget, or on a quieter machine",
        "not-finite": "give inputs, weights or a loss with which the baseline's own numbers are finite",
        "not-repeatable": "make the model give the same twice: no state between calls, and random numbers from torch alone",
    }
    for each in tune.notes:
        if each.code in remedies:
            return remedies[each.code]
    if found.leader is None:
        return "make the baseline run; 'redline run' shows where it breaks"
    if not found.has_answer:
        return "the same command with --resume and a larger --budget continues"
    if winner is not None:
        return command_line("profile", tune.tune.spec, batch=winner.row.batch, recipes=[winner.recipe]) or ""
    if any(row.verdict == "inconclusive" and row.low is not None for row in found.ranking):
        return "stay with the baseline, or try again on a quiet machine or with more --replicates"
    return "stay with the baseline; try another batch, or --allow-quantized with a --check"
