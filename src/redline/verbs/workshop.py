"""`redline workshop`: seven exercises on the learner's own machine, checked and written down by the tool; and with `--checklist`
what has been measured of a model here, and the command for what has not.

An exercise that the hardware cannot do is skipped, with an example that is marked as one. Results are written after every exercise.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from redline.analyze.ranks import oversubscription
from redline.model.errors import Interrupted, RedlineError, SpecError, UsageError
from redline.model.fields import Frozen
from redline.model.identity import device_key
from redline.model.metrics import Fact, Headline, Row, Table
from redline.model.settings import OUTPUT, setting
from redline.model.spec import BASELINE, Recipe
from redline.search.tune.record import KeptSearches
from redline.search.tune.summary import summary_of
from redline.show.contents import contents_of, line_row
from redline.show.export import safe_document
from redline.show.folder import check_folder
from redline.show.result import SCHEMA, Result
from redline.show.terminal import one_line
from redline.verbs.exercises import EXERCISES, MARKS, Lab, Sheet
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, specs_of, use

TEXT, DOCUMENT = "my_workshop_results.txt", "my_workshop_results.json"
RULE = "-" * 72


class Walk(Frozen):
    """A walk is the results file: what is known of the exercises that were done on one machine."""

    device: str
    device_name: str
    model: str
    batch: int
    quick: bool
    exercises: tuple[Sheet, ...] = ()

    @property
    def heading(self) -> list[str]:
        mode = ", quick" if self.quick else ""
        return [
            f"device: {one_line(self.device_name)} ({self.device})",
            f"model: {self.model}, batch {self.batch}{mode}",
        ]

    @property
    def outcome(self) -> str:
        """Returns in one line how far the learner has come."""
        done = [sheet for sheet in self.exercises if sheet.skipped is None]
        skipped = len(self.exercises) - len(done)
        checks = [check.passed for sheet in done for check in sheet.checks if check.passed is not None]
        exercises = f"{len(done)} of {len(self.exercises)} exercises done{f', {skipped} skipped' if skipped else ''}"
        return f"{exercises}; {sum(checks)} of {len(checks)} checkpoints met"

    def __str__(self) -> str:
        lines = ["My workshop results", *self.heading, ""]
        for sheet in self.exercises:
            lines += [f"Exercise {sheet.number}: {sheet.title}", RULE, *sheet.lines(), ""]
        return "\n".join(lines)


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
    if resume and not (folder / DOCUMENT).exists():
        raise SpecError(f"nothing to resume in {folder}: leave out --resume")
    check_folder(folder)
    with use(workspace) as opened:
        lab = _lab(opened.checked(specs_of(opened, "simple_cnn", device=device)[0])[0].device, opened, quick)
        name = opened.environment(lab.device).device.name
        walk = Walk(device=lab.device, device_name=name, model=lab.model, batch=lab.batch, quick=quick)
        done = _kept(folder, walk) if resume or exercises else {}
        settled = sorted(number for number, sheet in done.items() if resume and sheet.skipped is None)
        # A walk takes minutes: the learner reads each exercise when it is done, and the result at the end.
        say = opened.observer.noted
        for line in walk.heading:
            say(line)
        if settled:
            say(f"done already: {', '.join(map(str, settled))}; --exercise N does one again")
        try:
            for number, title, explain, exercise in EXERCISES:
                if number not in chosen or number in settled:
                    continue
                say(f"Exercise {number}: {title}")
                say(explain)
                sheet = Sheet(number=number, title=title, explain=explain)
                try:
                    exercise(lab, sheet)
                except RedlineError as error:
                    sheet = Sheet(number=number, title=title, explain=explain, skipped=str(error).splitlines()[0])
                done[number] = sheet
                walk = msgspec.structs.replace(walk, exercises=tuple(done[key] for key in sorted(done)))
                _write(folder, walk)
                for line in sheet.lines():
                    say(line)
        except KeyboardInterrupt:
            words = ["redline", "workshop", *["--quick"] * quick, *(["--device", device] if device != "auto" else [])]
            again = shlex.join([*words, "--out", str(out), "--resume"])
            raise Interrupted(walk_result(walk, folder, chosen, again) if walk.exercises else None) from None
    return walk_result(
        msgspec.structs.replace(walk, exercises=tuple(done[key] for key in sorted(done))), folder, chosen
    )


def walk_result(walk: Walk, folder: Path, chosen: Sequence[int], again: str = "") -> Result:
    """Returns what came of the chosen exercises, and how far all are; `again` is the command that does the others."""
    exercises, figures, checks, answers = [], [], [], []
    for sheet in (one for one in walk.exercises if one.number in chosen):
        exercise = {"exercise": f"{sheet.number} {sheet.title}"}
        met = [check.passed for check in sheet.checks if check.passed is not None]
        exercises.append(
            Row(
                facts={**exercise, "checkpoints": f"{sum(met)} of {len(met)} met"},
                failure=f"skipped: {sheet.skipped}" if sheet.skipped else "",
            )
        )
        figures += [Row(facts={**exercise, "figure": name, "value": text}) for name, text in sheet.figures.items()]
        answers += [Row(facts={**exercise, "question": name, "answer": text}) for name, text in sheet.answers.items()]
        for check in sheet.checks:
            facts = {**exercise, "checkpoint": f"{MARKS[check.passed]} {check.name}", "seen": check.seen}
            checks.append(Row(facts={**facts, "explain": check.explain if check.passed is False else None}))
    left = [number for number, *_ in EXERCISES if number not in {sheet.number for sheet in walk.exercises}]
    return Result(
        verb="workshop",
        headline=Headline(
            template="{outcome}; they are in {file}.", figures={"outcome": walk.outcome, "file": str(folder / TEXT)}
        ),
        tables=(
            Table(name="exercises", title=" · ".join(walk.heading), rows=tuple(exercises)),
            Table(name="checkpoints", rows=tuple(checks), columns=("checkpoint", "seen", "exercise")),
            Table(name="figures", rows=tuple(figures), is_detail=True),
            Table(name="answers", rows=tuple(answers), is_detail=True),
        ),
        about={"device": walk.device_name, "model": walk.model, "batch": walk.batch, "quick": walk.quick},
        next=again or (f"redline workshop --exercise {left[0]}" if left else f"redline tune {walk.model}"),
    )  # a checkpoint that is not met is part of the answer


def _lab(device: str, workspace: Workspace, quick: bool) -> Lab:
    if device != "cpu":
        return Lab(workspace, device, "resnet50", 32, None, quick)
    return Lab(workspace, device, "resnet18" if not quick else "simple_cnn", 4, 64 if not quick else 32, quick)


def _kept(folder: Path, now: Walk) -> dict[int, Sheet]:
    """Returns what an earlier walk on the same device found, or nothing where there was none."""
    path = folder / DOCUMENT
    try:
        kept = msgspec.convert(json.loads(path.read_text(encoding="utf-8"))["walk"], Walk)
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise SpecError(f"cannot read {path}: {error!s}; start in another folder (--out)") from None
    if (kept.device_name, kept.model, kept.quick) != (now.device_name, now.model, now.quick):
        raise SpecError(f"{path} is of another device or mode: start in another folder (--out)")
    return {sheet.number: sheet for sheet in kept.exercises}


def _write(folder: Path, walk: Walk) -> None:
    document = msgspec.json.format(msgspec.json.encode({"schema": SCHEMA, "verb": "workshop", "walk": walk}), indent=2)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TEXT).write_text(str(walk), encoding="utf-8")
        (folder / DOCUMENT).write_text(safe_document(document.decode()), encoding="utf-8")
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
"""For switches people ask about, this says what they take and when they pay. Others are listed with their gain alone."""


def checklist_of(model: str, workspace: Workspace | None = None) -> Result:
    """Returns which steps are done (measure, analyse, optimise, validate, scale), by the records and searches that exist.

    It reads the same rows as a report, so that a recipe is faster here if and only if the tables say so.
    """
    with use(workspace) as opened, opened.reading() as history:
        records = history.find(model=model, newest_first=False)
        ceilings_of = opened.ceilings_of(records)
        by_id = {record.id: record for record in records}
        kept = [one for one in KeptSearches(history.tunes()).newest_first() if one.tune.spec.workload.model == model]
        whole = [search for search in kept if all(record_id in by_id for record_id in search.record_ids)]
        searches = [summary_of(search, by_id, ceilings_of) for search in reversed(whole)]
        devices = {device_key(one.prepared.environment) for one in records if one.prepared is not None}
        has_ceilings = any(history.ceilings(device) is not None for device in devices)
    contents = contents_of(records, tunes=searches, profiles=(), ceilings_of=ceilings_of)
    rows = [line_row(line) for line in contents.lines]
    timed = [row for row in rows if not row.failure]
    compared = [row for row in timed if "ratio" in row]
    baseline = [row for row in timed if row["recipe"] == BASELINE and "throughput" in row]
    ranked = [one for one in records if one.spec.ranks > 1 and one.failure is None and oversubscription(one) is None]
    is_faster = any(row["verdict"] == "faster" for row in compared) or any(
        rank.verdict == "faster" and rank.recipe != BASELINE for search in searches for rank in search.ranking
    )
    name = shlex.quote(model)
    checks = (
        ("measure", "a baseline was measured", bool(baseline), f"run {name}"),
        ("measure", "and its result may be trusted", any(row["trust"] == "valid" for row in baseline), f"run {name} --effort strict"),
        ("measure", "a training step was measured", any(row["task"] == "train" for row in timed), f"run {name} --task train"),
        ("analyse", "a step was profiled", any(record.trace is not None for record in records), f"profile {name}"),
        ("analyse", "the device's ceilings are known", has_ceilings, "roofline"),
        ("optimise", "other recipes were compared with the baseline", bool(compared) or any(len(one.ranking) > 1 for one in searches), f"run {name} -r baseline -r channels-last+compile"),
        ("optimise", "a recipe is faster", is_faster, f"tune {name}"),
        ("optimise", "the fastest recipe was searched for", bool(kept), f"tune {name}"),
        ("validate", "the numerics of another recipe were checked", any(row["recipe"] != BASELINE and row.get("numerics") == "passed" for row in timed), f"run {name} -r baseline -r amp"),
        ("validate", "a result was repeated in three processes", any(int(str(row["processes"])) >= 3 for row in timed), f"run {name} -r {BASELINE} -r amp --decide"),
        ("scale", "several batches were measured", len({row["batch"] for row in timed}) >= 3, f"batch {name}"),
        ("scale", "several ranks were measured", bool(ranked), f"scale {name} --task train --ranks 1,2"),
    )  # fmt: skip
    steps = tuple(
        Row(
            facts={
                "stage": stage,
                "check": f"{MARKS[is_done]} {text}",
                "command": "" if is_done else f"redline {command}",
                "done": is_done,
            }
        )
        for stage, text, is_done, command in checks
    )
    figures: dict[str, Fact] = {
        "model": model,
        "done": sum(is_done for _, _, is_done, _ in checks),
        "all": len(checks),
        "records": len(records),
    }
    return Result(
        verb="checklist",
        headline=Headline(template="{model}: {done} of {all} steps are done, by {records} records.", figures=figures),
        tables=(
            Table(name="checks", rows=steps, columns=("stage", "check", "command")),
            Table(
                name="gains",
                title="gains of one switch over the baseline, measured here",
                rows=tuple(sorted(_gains(compared), key=lambda row: -row.value("ratio"))),
            ),
        ),
        about={"model": model},
        next=next((f"redline {command}" for _, _, is_done, command in checks if not is_done), ""),
    )


def _gains(compared: Sequence[Row]) -> Iterator[Row]:
    """Yields the gain of each recipe of one switch over the baseline."""
    for row in compared:
        switches = Recipe.parse(str(row["recipe"])).switches
        ratio = row.metric("ratio")
        if len(switches) == 1 and row["compared_with"] == BASELINE and ratio is not None and ratio.has_interval:
            effort, when = EFFORTS.get(switches[0].name, ("", ""))
            facts = {"switch": row["recipe"], "task": row["task"], "batch": row.get("batch")}
            yield Row(facts={**facts, "effort": effort, "when": when}, metrics=(ratio,))  # type: ignore[dict-item]
