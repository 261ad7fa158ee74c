"""`redline workshop`: seven exercises on the learner's own machine, checked and written down by the tool; and with `--checklist`
what has been measured of a model here, and the command for what has not.

What the hardware cannot do is skipped, with an example that is marked as one. Results are written after every exercise.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from redline.analyze.pairs import verdict_of
from redline.analyze.ranks import oversubscription
from redline.analyze.summary import Line as Measured
from redline.analyze.summary import RunSummary, lines_of, summarize
from redline.model.errors import Interrupted, RedlineError, SpecError, UsageError
from redline.model.identity import device_key
from redline.model.metrics import Fact, Figure, Headline, Row, Table
from redline.model.names import refuse_impossible_name
from redline.model.record import RunRecord
from redline.model.settings import OUTPUT, setting
from redline.model.spec import BASELINE, Recipe, WorkloadSpec
from redline.search.tune.record import KeptSearches
from redline.search.tune.summary import TuneSummary, summary_of
from redline.show.folder import check_folder
from redline.show.result import Result
from redline.show.searches import with_search_ratios
from redline.verbs.exercises import (
    EXERCISES,
    MARKS,
    ExerciseResult,
    Lab,
    WorkshopResult,
    exercise_text,
    heading,
    outcome,
    results_text,
)
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, specs_of, use

GAIN = Figure(name="gain", unit="x", better="higher", doc="Time of the baseline over that with the switch.")
FEWEST_PROCESSES = 3
"""So many processes make an interval that noise within one of them does not overrule."""


@verb(
    takes=("device",),
    examples=(
        "redline workshop --quick",
        "redline workshop --exercise 2 --exercise 6",
        "redline workshop --checklist resnet50",
    ),
)
def workshop(
    exercises: Annotated[
        Any, setting("Do only this exercise (1 to 7); repeatable.", option="--exercise", kind=list[int])
    ] = (),
    *,
    out: Annotated[
        Any, setting("Where my_workshop_results.txt and .json go.", short="-o", group=OUTPUT, shape="DIR", kind=str)
    ] = ".",
    quick: Annotated[bool, setting("Small sizes: minutes on a CPU.")] = False,
    resume: Annotated[bool, setting("Continue with the exercises that are not done yet.")] = False,
    checklist: Annotated[
        str | None,
        setting(
            "Instead: what has been measured of this model here (measure, analyse, optimise, validate, scale), and the command for "
            "what has not.",
            shape="MODEL",
        ),
    ] = None,
    device: str = "auto",
    workspace: Workspace | None = None,
) -> Result:
    """Walk through seven exercises on this machine.

    They are about a baseline, precision, the profiler, FLOPs, several GPUs, compilation and vendors' profilers. Each one explains,
    measures, checks its own checkpoints and answers its questions from your numbers. All start over; with --resume those that are done
    stay. Where only some are named, the results of the others in that folder stay as they are.
    """
    if checklist is not None:
        if exercises or quick or resume:
            raise UsageError("--checklist reads the history and walks through no exercise: leave out the other options")
        return checklist_of(checklist, workspace)
    known = {str(number): number for number, *_ in EXERCISES}
    asked = [str(number) for number in exercises]
    if unknown := [number for number in asked if number not in known]:
        raise SpecError(f"exercise must be from 1 to {len(EXERCISES)}, got {unknown[0][:40]!r}")
    chosen = [known[number] for number in asked] or list(known.values())
    folder = Path(out)
    if resume and not results_file(folder).exists():
        raise SpecError(f"nothing to resume in {folder}: leave out --resume")
    check_folder(folder)
    with use(workspace) as opened:
        resolved = opened.checked(specs_of(opened, "simple_cnn", device=device)[0])[0].device
        lab = _lab(resolved, opened, quick)
        name = opened.environment(resolved).device.name
        walk = WorkshopResult(device=resolved, device_name=name, model=lab.model, batch=lab.batch, quick=quick)
        done = _kept(folder, walk) if resume or exercises else {}
        settled = sorted(number for number, found in done.items() if resume and found.skipped is None)
        _say(opened, *heading(walk))
        if settled:
            _say(opened, f"done already: {', '.join(map(str, settled))}; --exercise N does one again")
        again = ["redline", "workshop", *["--quick"] * quick, *(["--device", device] if device != "auto" else [])]
        again = [*again, "--out", str(out), "--resume"]
        try:
            for number, title, explain, exercise in EXERCISES:
                if number not in chosen or number in settled:
                    continue
                _say(opened, f"Exercise {number}: {title}", explain)
                base = ExerciseResult(number=number, title=title, explain=explain)
                try:
                    found = exercise(lab, base)
                except RedlineError as error:
                    found = msgspec.structs.replace(base, skipped=str(error).splitlines()[0])
                done[number] = found
                walk = msgspec.structs.replace(walk, exercises=tuple(done[key] for key in sorted(done)))
                _write(folder, walk)
                _say(opened, *exercise_text(found))
        except KeyboardInterrupt:
            raise Interrupted(
                walk_result(walk, folder, chosen, shlex.join(again)) if walk.exercises else None
            ) from None
    return walk_result(
        msgspec.structs.replace(walk, exercises=tuple(done[key] for key in sorted(done))), folder, chosen
    )


def _say(workspace: Workspace, *lines: str) -> None:
    """A walk takes minutes: the learner reads each exercise when it is done, and the result at the end."""
    for line in lines:
        workspace.observer.noted(line)


def walk_result(walk: WorkshopResult, folder: Path, chosen: Sequence[int], again: str = "") -> Result:
    """What came of the chosen exercises, and how far all are; `again` is the command that does the others."""
    exercises, figures, checks, answers = [], [], [], []
    for found in (one for one in walk.exercises if one.number in chosen):
        name = f"{found.number} {found.title}"
        met = [check.passed for check in found.checks if check.passed is not None]
        facts = {"exercise": name, "checkpoints": f"{sum(met)} of {len(met)} met"}
        exercises.append(Row(facts=facts, failure=f"skipped: {found.skipped}" if found.skipped else ""))
        figures += [Row(facts={"exercise": name, "figure": key, "value": text}) for key, text in found.figures.items()]
        for check in found.checks:
            shown = {"exercise": name, "checkpoint": f"{MARKS[check.passed]} {check.name}", "seen": check.seen}
            checks.append(Row(facts={**shown, "explain": check.explain if check.passed is False else None}))
        answers += [
            Row(facts={"exercise": name, "question": one.question, "answer": one.answer}) for one in found.answers
        ]
    left = [number for number, *_ in EXERCISES if number not in {found.number for found in walk.exercises}]
    return Result(
        verb="workshop",
        headline=Headline(
            template="{outcome}; they are in {file}.", figures={"outcome": outcome(walk), "file": str(folder / TEXT)}
        ),
        tables=(
            Table(name="exercises", title=" · ".join(heading(walk)), rows=tuple(exercises)),
            Table(name="checkpoints", rows=tuple(checks), columns=("checkpoint", "seen", "exercise")),
            Table(name="figures", rows=tuple(figures), is_detail=True),
            Table(name="answers", rows=tuple(answers), is_detail=True),
        ),
        about={"device": walk.device_name, "model": walk.model, "batch": walk.batch, "quick": walk.quick},
        next=again or (f"redline workshop --exercise {left[0]}" if left else f"redline tune {walk.model}"),
    )  # a checkpoint that is not met is part of the answer


TEXT = "my_workshop_results.txt"


def _lab(device: str, workspace: Workspace, quick: bool) -> Lab:
    if device != "cpu":
        return Lab(workspace, device, "resnet50", 32, None, quick)
    return Lab(workspace, device, "resnet18" if not quick else "simple_cnn", 4, 64 if not quick else 32, quick)


def results_file(folder: Path) -> Path:
    return folder / "my_workshop_results.json"


def _kept(folder: Path, now: WorkshopResult) -> dict[int, ExerciseResult]:
    """What an earlier walk on the same device found; nothing where there was none."""
    path = results_file(folder)
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        kept = msgspec.convert(
            {key: value for key, value in plain.items() if key not in ("schema", "kind")}, WorkshopResult
        )
    except FileNotFoundError:
        return {}
    except (ValueError, msgspec.ValidationError) as error:
        raise SpecError(f"cannot read {path}: {error}; start in another folder (--out)") from None
    if (kept.device_name, kept.model, kept.quick) != (now.device_name, now.model, now.quick):
        raise SpecError(f"{path} is of another device or mode: start in another folder (--out)")
    return {exercise.number: exercise for exercise in kept.exercises}


def _write(folder: Path, result: WorkshopResult) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TEXT).write_text(results_text(result), encoding="utf-8")
        results_file(folder).write_text(result.to_json(), encoding="utf-8")
    except OSError as error:
        raise SpecError(f"cannot write into {folder}: {error.strerror}") from None


# The checklist


EFFORTS = {
    "amp": ("one line", "training and inference where accuracy must stay close to fp32"),
    "amp-bf16": ("one line", "training on GPUs with bf16; no gradient scaling needed"),
    "fp16": ("a cast", "inference of models whose activations stay in range"),
    "bf16": ("a cast", "inference where fp16 overflows"),
    "tf32": ("one flag", "fp32 models on NVIDIA Ampere or later"),
    "channels-last": ("one line", "convolutional networks"),
    "compile": ("one line, minutes of compiling", "many small operators; long-running jobs"),
    "graphs": ("fixed shapes needed", "small batches that wait for the host"),
    "fold-bn": ("one call", "inference of networks with BatchNorm"),
    "fused-optimizer": ("one argument", "training with many parameters"),
    "cudnn-benchmark": ("one flag", "convolutions at fixed shapes"),
}
"""What it takes and when it pays, for switches people ask about; others are listed with their gain alone."""


def checklist_of(model: str, workspace: Workspace | None = None) -> Result:
    """Measure, analyse, optimise, validate, scale: ticked from the records and searches that exist."""
    with use(workspace) as opened, opened.reading() as history:
        records = history.find(model=model, newest_first=False)
        if not records:  # of a name that nothing has, no command below would run
            refuse_impossible_name(WorkloadSpec(model=model))
        ceilings_of = opened.ceilings_of(records)
        rows = summarize(records, ceilings_of)
        by_id = {record.id: record for record in records}
        kept = [
            search
            for search in KeptSearches(history.tunes()).newest_first()
            if search.tune.spec.workload.model == model
        ]
        whole = [search for search in kept if all(record_id in by_id for record_id in search.record_ids)]
        searches = [summary_of(search, by_id, ceilings_of) for search in reversed(whole)]
        ceilings_known = any(
            history.ceilings().get(device_key(record.prepared.environment)) is not None
            for record in records
            if record.prepared is not None
        )
    compared = with_search_ratios(lines_of(records, rows), searches)
    batches = {row.batch for row in rows if row.failure is None}
    checks = [
        *_measured(model, rows),
        *_analysed(model, records, ceilings_known),
        Check(
            "optimise",
            "other recipes were compared with the baseline",
            any(line.row.vs_first for line in compared) or any(len(found.ranking) > 1 for found in searches),
            f"redline run {shlex.quote(model)} -r baseline -r channels-last+compile",
        ),
        Check(
            "optimise", "a recipe is faster", is_any_faster(compared, searches), f"redline tune {shlex.quote(model)}"
        ),
        Check("optimise", "the fastest recipe was searched for", bool(kept), f"redline tune {shlex.quote(model)}"),
        *_validated(model, rows, records),
        *_scaled(model, len(batches), records),
    ]
    return _checklist_result(model, checks, tuple(_techniques(compared)), len(records))


def _checklist_result(model: str, checks: Sequence[Check], gains: tuple[Row, ...], records: int) -> Result:
    first = next((check.command for check in checks if not check.done), "")
    figures: dict[str, Fact] = {
        "model": model,
        "done": sum(check.done for check in checks),
        "all": len(checks),
        "records": records,
    }
    rows = tuple(
        Row(
            facts={
                "stage": check.stage,
                "check": f"{MARKS[check.done]} {check.text}",
                "command": "" if check.done else check.command,
                "done": check.done,
            }
        )
        for check in checks
    )
    return Result(
        verb="checklist",
        headline=Headline(template="{model}: {done} of {all} steps are done, by {records} records.", figures=figures),
        tables=(
            Table(name="checks", rows=rows, columns=("stage", "check", "command")),
            Table(name="gains", title="gains of one switch over the baseline, measured here", rows=gains),
        ),
        about={"model": model},
        next=first,
    )


class Check(NamedTuple):
    stage: str
    text: str
    done: bool
    command: str
    """What would tick it."""


def is_any_faster(lines: Sequence[Measured], searches: Sequence[TuneSummary]) -> bool:
    """Whether a comparison or a search has shown a recipe to be faster than the baseline, by the interval of their ratio.

    The newest comparison of a recipe counts. Noise within a process does not overrule an interval over several of them.
    """
    newest = {(line.row.task, line.row.batch, line.row.recipe): line for line in lines if line.row.vs_first is not None}
    return any(
        _is_faster(line.row) and (line.row.verdict.trusted or len(line.processes) >= FEWEST_PROCESSES)
        for line in newest.values()
    ) or any(rank.verdict == "faster" and rank.recipe != BASELINE for found in searches for rank in found.ranking)


def _is_faster(row: RunSummary) -> bool:
    versus = row.vs_first
    if versus is None or versus.low is None or versus.first_doubted:
        return False
    return verdict_of(versus.low, versus.high if versus.high is not None else versus.low) == "faster"


def _measured(model: str, rows: Sequence[RunSummary]) -> list[Check]:
    name = shlex.quote(model)
    baseline = [row for row in rows if row.recipe == BASELINE and row.throughput_per_s]
    trusted = [row for row in baseline if row.verdict.trusted]
    trained = [row for row in rows if row.task == "train" and row.failure is None]
    return [
        Check("measure", "a baseline was measured", bool(baseline), f"redline run {name}"),
        Check("measure", "and its result may be trusted", bool(trusted), f"redline run {name} --effort strict"),
        Check("measure", "a training step was measured", bool(trained), f"redline run {name} --task train"),
    ]


def _analysed(model: str, records: Sequence[RunRecord], ceilings_known: bool) -> list[Check]:
    name = shlex.quote(model)
    profiled = any(record.trace is not None for record in records)
    return [
        Check("analyse", "a step was profiled", profiled, f"redline profile {name}"),
        Check("analyse", "the device's ceilings are known", ceilings_known, "redline roofline"),
    ]


def _validated(model: str, rows: Sequence[RunSummary], records: Sequence[RunRecord]) -> list[Check]:
    name = shlex.quote(model)
    checked = [row for row in rows if row.recipe != BASELINE and row.numerics is not None and row.numerics.passed]
    sizes: dict[tuple[str, str], set[str]] = {}
    for record in records:
        if record.failure is None and record.blocks:
            sizes.setdefault((record.key or "", str(record.spec.recipe)), set()).add(record.id)
    repeated = any(len(ids) >= 3 for ids in sizes.values())
    return [
        Check(
            "validate",
            "the numerics of another recipe were checked",
            bool(checked),
            f"redline run {name} -r baseline -r amp",
        ),
        Check(
            "validate",
            "a result was repeated in three processes",
            repeated,
            f"redline run {name} -r {BASELINE} -r amp --decide",
        ),
    ]


def _scaled(model: str, batches: int, records: Sequence[RunRecord]) -> list[Check]:
    name = shlex.quote(model)
    ranked = [
        record
        for record in records
        if record.spec.ranks > 1 and record.failure is None and oversubscription(record) is None
    ]
    return [
        Check("scale", "several batches were measured", batches >= 3, f"redline batch {name}"),
        Check("scale", "several ranks were measured", bool(ranked), f"redline scale {name} --task train --ranks 1,2"),
    ]


def _techniques(lines: Sequence[Measured]) -> Iterator[Row]:
    """The newest gain of each recipe of one switch over the baseline, the largest first."""
    found: dict[str, Row] = {}
    for line in lines:
        row, switches = line.row, Recipe.parse(line.row.recipe).switches
        versus = row.vs_first
        if len(switches) != 1 or versus is None or versus.recipe != BASELINE or versus.low is None:
            continue
        effort, when = EFFORTS.get(switches[0].name, ("", ""))
        found[f"{row.task} {row.recipe}"] = Row(
            facts={"switch": row.recipe, "task": row.task, "batch": row.batch, "effort": effort, "when": when},
            metrics=(GAIN(versus.ratio, versus.low, versus.high),),
        )
    yield from sorted(found.values(), key=lambda row: -row.value("gain"))
