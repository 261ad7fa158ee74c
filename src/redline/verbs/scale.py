"""`redline scale`: the same model on 1, 2, 4 and more ranks, against the ideal, and what is in the way of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec

from redline.analyze.finding import Finding
from redline.analyze.scale import Mode, ScalePoint, ScaleRun, points_of, rank_rows
from redline.model.errors import Exit, SpecError, UsageError
from redline.model.fields import MOST_ITEMS, MOST_RANKS, MOST_THREADS, require_range
from redline.model.metrics import Headline, Row, Table
from redline.model.note import Code, Note, note
from redline.model.settings import WHAT, setting
from redline.model.spec import RunSpec
from redline.model.units import counted, format_ratio
from redline.search.grid import parse_numbers
from redline.search.scale import measure_scale
from redline.show.charts import bar_figure
from redline.show.result import Result
from redline.verbs.verb import ISOLATED, SHAPE, Models, OneRecipe, verb
from redline.verbs.workspace import Workspace, specs_of, use

COLUMNS = ("ranks", "throughput", "efficiency", "batch_per_rank", "exposed", "bus", "straggler", "trust")


@verb(
    takes=(*SHAPE, "task", "prompt", "new_tokens", "items", "optimizer", "stem", "device", "seed", "effort", *ISOLATED, "rendezvous"),
    examples=(
        "redline scale resnet50 --task train --ranks 1,2,4,8 --batch-per-rank 32,64",
        "redline scale resnet50 --task train --ranks 1,2,4,8 --batch 256",
        "redline scale my_model.py:build --ranks 1,2 --device cpu --threads 1",
    ),
    tasks=("infer", "train", "generate"),
    also=("plot", "save", "report", "log"),
)  # fmt: skip
def scale(
    model: Models = None,
    inputs: Any | None = None,
    *,
    ranks: Annotated[
        Any, setting("Numbers of ranks, such as 1,2,4,8 or 1..8 (doubling).", group=WHAT, kind=str)
    ] = "1,2",
    batch: Annotated[
        int | None,
        setting("Strong scaling: items per step, split over the ranks.", short="-b", group=WHAT, least=1, most=MOST_ITEMS),
    ] = None,
    batch_per_rank: Annotated[
        Any,
        setting("Weak scaling: items per step on every rank; several, such as 16,32,64.", group=WHAT, kind=str),
    ] = None,
    threads: Annotated[
        int | None,
        setting("CPU threads per rank. Default: as many as let the most ranks fill the machine.", group=WHAT, least=1, most=MOST_THREADS),
    ] = None,
    recipe: OneRecipe = "baseline",
    loss: Any | None = None,
    workspace: Workspace | None = None,
    **settings: Any,
) -> Result:  # fmt: skip
    """Measure 1, 2, 4 and more ranks: throughput against the ideal.

    Weak scaling keeps the batch per rank, strong scaling splits one global batch. Training averages gradients with DDP (or the
    switch fsdp); inference runs one replica per rank. Ranks that would share a GPU are refused; more threads than processors are
    marked and not counted as scaling.
    """
    counts = _numbers("ranks", ranks, MOST_RANKS)
    mode: Mode = "weak" if batch is None else "strong"
    if batch is not None and batch_per_rank is not None:
        raise UsageError(
            "strong scaling splits one batch, weak scaling keeps the batch per rank: give batch or batch_per_rank"
        )
    sizes = [0] if batch_per_rank is None else _numbers("batch_per_rank", batch_per_rank, MOST_ITEMS)
    with use(workspace) as opened:
        specs: list[RunSpec] = []
        working = opened
        for size in sizes:
            for count in counts:
                given: dict[str, Any] = {"ranks": count, "threads": threads}
                given |= {"batch": batch or size * count} if batch or size else {}
                asked, working = specs_of(opened, model, inputs, recipes=recipe, loss=loss, **given, **settings)
                specs += asked
        # Outputs are not compared here: `redline run` does that.
        uncompared = [
            msgspec.structs.replace(spec, measure=msgspec.structs.replace(spec.measure, check_numerics=False))
            for spec in specs
        ]
        runs = _measured(_with_threads(working.checked(uncompared), max(counts)), working)
        return result_of(points_of(runs, mode), mode)


def _numbers(name: str, given: Any, most: int) -> list[int]:
    try:
        numbers = parse_numbers(given, name)
    except SpecError:
        raise SpecError(f"{name} must be numbers such as 1,2,4 or a range such as 1..8, got {given!r}") from None
    if not numbers:
        raise SpecError(f"{name} names no number")
    for number in numbers:
        require_range(name, number, 1, most)
    return sorted(set(numbers))


def _with_threads(specs: Sequence[RunSpec], most: int) -> list[RunSpec]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    per_rank = max(1, cores // most)
    return [
        msgspec.structs.replace(spec, threads=per_rank) if spec.device == "cpu" and spec.threads is None else spec
        for spec in specs
    ]


def _measured(specs: Sequence[RunSpec], workspace: Workspace) -> list[ScaleRun]:
    """Measures all points of one model, then those of the next; the device is locked for as many ranks as are measured."""
    models = list(dict.fromkeys(spec.workload.model for spec in specs))
    specs = sorted(specs, key=lambda spec: models.index(spec.workload.model))
    runs: list[ScaleRun] = []
    with TemporaryDirectory(prefix="redline-scale-") as folder:
        for number, (ranks, alike) in enumerate(groupby(specs, key=lambda spec: spec.ranks)):
            together = list(alike)
            with workspace.lock(together[0].device, ranks if together[0].launch.rendezvous is None else 1):
                runs += measure_scale(
                    together,
                    lambda spec: workspace.door(spec.launch),
                    workspace.journal,
                    Path(folder) / str(number),
                    workspace.observer,
                )
    return runs


# What it shows


def result_of(points: Sequence[ScalePoint], mode: Mode) -> Result:
    """Returns every number of ranks, what is in the way, and each rank."""
    first = points[0].row
    findings = [(point.row, finding) for point in points for finding in point.findings]
    models = dict.fromkeys(point.row["model"] for point in points)
    how = "batch per rank kept" if mode == "weak" else "one batch split"
    threads = f" · {counted(int(first.facts['threads']), 'thread')} per rank" if first.facts["threads"] else ""
    named = f"{first['model']} · " if len(models) == 1 else ""
    title = f"{named}{first['task']} · {first['recipe']} · {mode} scaling ({how}){threads}"
    ranked = [(point, row) for point in points for row in rank_rows(point.run.record)]
    columns = COLUMNS if len(models) == 1 else ("model", *COLUMNS)
    table = Table(name="points", title=title, rows=tuple(point.row for point in points), columns=columns)
    return Result(
        verb="scale",
        headline=_headline([point.row for point in points]),
        tables=(
            table,
            Table(
                name="ranks",
                title="each rank by itself",
                rows=tuple(
                    msgspec.structs.replace(row, facts={**row.facts, "model": point.row.facts["model"]})
                    for point, row in ranked
                ),
                is_detail=True,
            ),
        ),
        about={"mode": mode},
        notes=tuple(_told(*each) for each in findings),
        next=findings[0][1].next if findings else "",
        record_ids=tuple(point.row.record_id for point in points),
        exit_code=Exit.FAILED_ROW if any("throughput" not in point.row for point in points) else Exit.DONE,
        picture=lambda: bar_figure(table),
    )


def _told(row: Row, finding: Finding) -> Note:
    where = f"{row['model']}, {counted(int(row.facts['ranks'] or 1), 'rank')}"
    where += f", {row['batch_per_rank']} per rank" if row["batch_per_rank"] else ""
    bound = f"at most {format_ratio(finding.gain_bound)} without it"
    return note(msgspec.convert(finding.code, Code), f"{where}: {finding.evidence} ({bound})", about=str(row["ranks"]))


def _headline(rows: Sequence[Row]) -> Headline:
    """Names the most ranks that do scale, with what they reach."""
    scaling = [row for row in rows if "efficiency" in row]
    if not scaling:
        shared = any(row["is_oversubscribed"] for row in rows)
        why = "ranks share processors here, so nothing is said of scaling" if shared else "nothing could be measured"
        return Headline(template="{model}: {why}.", figures={"model": rows[0]["model"], "why": why})
    best = max(scaling, key=lambda row: int(row.facts["ranks"] or 1))
    figures = {name: best[name] for name in ("model", "throughput", "efficiency")}
    figures["ranks"] = counted(int(best.facts["ranks"] or 1), "rank")
    return Headline(template="{model} on {ranks} does {throughput}, {efficiency} of the ideal.", figures=figures)
