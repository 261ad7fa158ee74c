"""`redline workshop`: seven exercises on the learner's own machine, checked and written down by the tool; and
`redline workshop --checklist`: what has been measured of a model here, and the command for what has not.

What the hardware cannot do is skipped, with an example that is marked as one. Results are written after every exercise.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from redline.analyze.ranks import oversubscription
from redline.analyze.summary import RunSummary, summarize
from redline.api.settings import specs_of
from redline.api.workspace import Workspace, use
from redline.model.errors import RedlineError, SpecError
from redline.model.identity import device_key
from redline.model.names import refuse_impossible_name
from redline.model.record import RunRecord
from redline.model.spec import BASELINE, Recipe, WorkloadSpec
from redline.report.folder import check_folder
from redline.report.workshop import Checklist, ExerciseResult, Line, Technique, WorkshopResult, results_text
from redline.search.tune.record import KeptSearches
from redline.verbs.exercises import EXERCISES, Lab


def workshop(
    exercises: list[int] | None = None,
    *,
    folder: str | Path = ".",
    quick: bool = False,
    resume: bool = False,
    device: str = "auto",
    on_exercise: Callable[[ExerciseResult], None] = lambda result: None,
    on_start: Callable[[int, str, str], None] = lambda number, title, explain: None,
    on_begin: Callable[[WorkshopResult], None] = lambda result: None,
    workspace: Workspace | None = None,
) -> WorkshopResult:
    """Do the exercises, and fill in `my_workshop_results.txt` and `.json` in `folder` after each one.

    All seven start over; with `resume` those that are done stay. Where only some are named, the results of the others in
    that folder stay as they are. `on_begin` hears of the device, the model and what is done already.
    """
    chosen = exercises or [number for number, _, _, _ in EXERCISES]
    for number in chosen:
        if not 1 <= number <= len(EXERCISES):
            raise SpecError(f"exercise must be from 1 to {len(EXERCISES)}, got {number}")
    folder = Path(folder)
    if resume and not results_file(folder).exists():
        raise SpecError(f"nothing to resume in {folder}: leave out --resume")
    check_folder(folder)
    with use(workspace) as opened:
        resolved = opened.checked(specs_of(opened, "simple_cnn", device=device)[0])[0].device
        lab = _lab(resolved, opened, quick)
        name = opened.environment(resolved).device.name
        result = WorkshopResult(device=resolved, device_name=name, model=lab.model, batch=lab.batch, quick=quick)
        done = _kept(folder, result) if resume or exercises else {}
        settled = {number for number, found in done.items() if resume and found.skipped is None}
        on_begin(msgspec.structs.replace(result, exercises=tuple(done[number] for number in sorted(settled))))
        for number, title, explain, exercise in EXERCISES:
            if number not in chosen or number in settled:
                continue
            on_start(number, title, explain)
            try:
                found = exercise(lab, ExerciseResult(number=number, title=title, explain=explain))
            except RedlineError as error:
                found = ExerciseResult(number=number, title=title, explain=explain, skipped=str(error).splitlines()[0])
            done[number] = found
            result = msgspec.structs.replace(result, exercises=tuple(done[key] for key in sorted(done)))
            _write(folder, result)
            on_exercise(found)
    return msgspec.structs.replace(result, exercises=tuple(done[key] for key in sorted(done)))


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
        (folder / "my_workshop_results.txt").write_text(results_text(result), encoding="utf-8")
        results_file(folder).write_text(result.to_json(), encoding="utf-8")
    except OSError as error:
        raise SpecError(f"cannot write into {folder}: {error.strerror}") from None


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


def checklist(model: str, *, workspace: Workspace | None = None) -> Checklist:
    """Measure, analyse, optimise, validate, scale: ticked from the records that exist."""
    with use(workspace) as opened, opened.reading() as history:
        records = history.find(model=model, newest_first=False)
        if not records:  # of a name that nothing has, no command below would run
            refuse_impossible_name(WorkloadSpec(model=model))
        rows = summarize(records, opened.ceilings_of(records))
        searches = [
            search
            for search in KeptSearches(history.tunes()).newest_first()
            if search.tune.spec.workload.model == model
        ]
        ceilings_known = any(
            history.ceilings().get(device_key(record.prepared.environment)) is not None
            for record in records
            if record.prepared is not None
        )
        batches = {row.batch for row in rows if row.failure is None}
        lines = [
            *_measured(model, rows),
            *_analysed(model, records, ceilings_known),
            *_optimised(model, rows, [search.name for search in searches]),
            *_validated(model, rows, records),
            *_scaled(model, len(batches), records),
        ]
    return Checklist(model=model, records=len(records), lines=tuple(lines), techniques=tuple(_techniques(rows)))


def _measured(model: str, rows: Sequence[RunSummary]) -> list[Line]:
    name = shlex.quote(model)
    baseline = [row for row in rows if row.recipe == BASELINE and row.throughput_per_s]
    trusted = [row for row in baseline if row.verdict.trusted]
    trained = [row for row in rows if row.task == "train" and row.failure is None]
    return [
        Line("measure", "a baseline was measured", bool(baseline), f"redline run {name}"),
        Line("measure", "and its result may be trusted", bool(trusted), f"redline run {name} --effort strict"),
        Line("measure", "a training step was measured", bool(trained), f"redline run {name} --task train"),
    ]


def _analysed(model: str, records: Sequence[RunRecord], ceilings_known: bool) -> list[Line]:
    name = shlex.quote(model)
    profiled = any(record.trace is not None for record in records)
    return [
        Line("analyse", "a step was profiled", profiled, f"redline profile {name}"),
        Line("analyse", "the device's ceilings are known", ceilings_known, "redline roofline"),
    ]


def _optimised(model: str, rows: Sequence[RunSummary], searches: Sequence[str]) -> list[Line]:
    name = shlex.quote(model)
    compared = [row for row in rows if row.vs_first is not None]
    # Rows come oldest first: what was measured last counts.
    newest = {(row.task, row.batch, row.recipe): row for row in compared}.values()
    decided = [row for row in newest if row.vs_first and not row.vs_first.first_doubted and row.verdict.trusted]
    faster = [row for row in decided if row.vs_first and (row.vs_first.low or 0) > 1]
    return [
        Line("optimise", "other recipes were compared with the baseline", bool(compared),
             f"redline run {name} -r baseline -r channels-last+compile"),
        Line("optimise", "a recipe is surely faster", bool(faster), f"redline tune {name}"),
        Line("optimise", "the fastest recipe was searched for", bool(searches), f"redline tune {name}"),
    ]  # fmt: skip


def _validated(model: str, rows: Sequence[RunSummary], records: Sequence[RunRecord]) -> list[Line]:
    name = shlex.quote(model)
    checked = [row for row in rows if row.recipe != BASELINE and row.numerics is not None and row.numerics.passed]
    sizes: dict[tuple[str, str], set[str]] = {}
    for record in records:
        if record.failure is None and record.blocks:
            sizes.setdefault((record.key or "", str(record.spec.recipe)), set()).add(record.id)
    repeated = any(len(ids) >= 3 for ids in sizes.values())
    return [
        Line(
            "validate",
            "the numerics of another recipe were checked",
            bool(checked),
            f"redline run {name} -r baseline -r amp",
        ),
        Line(
            "validate",
            "a result was repeated in three processes",
            repeated,
            f"redline run {name} -r {BASELINE} -r amp --decide",
        ),
    ]


def _scaled(model: str, batches: int, records: Sequence[RunRecord]) -> list[Line]:
    name = shlex.quote(model)
    ranked = [
        record
        for record in records
        if record.spec.ranks > 1 and record.failure is None and oversubscription(record) is None
    ]
    return [
        Line("scale", "several batches were measured", batches >= 3, f"redline batch {name}"),
        Line("scale", "several ranks were measured", bool(ranked), f"redline scale {name} --task train --ranks 1,2"),
    ]


def _techniques(rows: Sequence[RunSummary]) -> list[Technique]:
    """The newest decided gain of each recipe of one switch over the baseline, the largest first."""
    found: dict[str, Technique] = {}
    for row in rows:
        switches = Recipe.parse(row.recipe).switches
        versus = row.vs_first
        if len(switches) != 1 or versus is None or versus.recipe != BASELINE or versus.low is None:
            continue
        effort, when = EFFORTS.get(switches[0].name, ("", ""))
        found[f"{row.task} {row.recipe}"] = Technique(
            switch=row.recipe, task=row.task, batch=row.batch, ratio=versus.ratio, low=versus.low, high=versus.high,
            effort=effort, when=when,
        )  # fmt: skip
    return sorted(found.values(), key=lambda technique: -technique.ratio)
