"""`redline run`: measure models under recipes, interleaved where recipes are compared, and resumed where a grid stopped.

`measure` plans the cells of tables of settings and measures those that are not settled yet, and `result_of` shows what came of it. The
study and the demo use both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import msgspec

from redline.analyze.measurement import CeilingsOf, Measurement, over_processes
from redline.analyze.pairs import Pair, pairs_of
from redline.analyze.rows import columns_for, headline_of, row_of, table_of, title_of
from redline.model.errors import Exit, Interrupted, UsageError
from redline.model.fields import MOST_REPLICATES, Frozen
from redline.model.metrics import RATIO, Fact, Row, Table
from redline.model.note import Note, note
from redline.model.record import RunRecord
from redline.model.settings import HOW, OUTPUT, check_settings, setting
from redline.model.spec import BASELINE, RunSpec
from redline.model.spec_table import layered, read_runs
from redline.model.units import parse_price
from redline.search.decide import REPLICATES, check_racers
from redline.search.grid import (
    Cell,
    GridSummary,
    LeftOut,
    check_name,
    grid_from_tables,
    listed,
    make_plan,
    standing,
    value_of,
)
from redline.search.run import Account, GridRun, unsettled
from redline.search.spread import require_cluster, spread
from redline.show.charts import bar_figure
from redline.show.result import Result
from redline.store import SettledCell
from redline.verbs.verb import MEASURED, RANKS, WORKLOAD, Address, AnyRecipes, Models, Ray, split, verb
from redline.verbs.workspace import Workspace, described_model, use

CONTINUES = "the same command with --resume continues with the rest"


class Keeping(Frozen):
    """This says how a grid is measured and kept: it has what is not a setting of a single cell."""

    name: Annotated[str | None, setting("Name of the grid, for --resume and 'redline compare'.")] = None
    decide: Annotated[bool, setting("Measure in fresh processes until every pair of recipes is decided.")] = False
    replicates: Annotated[
        int | None,
        setting(
            "Fresh processes to measure in; intervals then cover how they differ. Default: 1.",
            least=1,
            most=MOST_REPLICATES,
        ),
    ] = None
    resume: Annotated[bool, setting("Measure only what the same grid still lacks.")] = False
    retry_failed: Annotated[bool, setting("Resume, and try failed cells again.")] = False
    dry_run: Annotated[bool, setting("Show the plan; measure nothing.")] = False
    price: Annotated[
        str | None,
        setting("Price of the machine; adds the cost of a million items.", group=OUTPUT, shape="2.50/h"),
    ] = None

    def __post_init__(self) -> None:
        check_settings(self)
        check_name(self.name)
        if self.price is not None:
            parse_price(self.price)

    @property
    def resumes(self) -> bool:
        return self.resume or self.retry_failed


@dataclass(kw_only=True)
class Measured:
    """This is what came of a plan: all of it, or as far as it got before Ctrl-C."""

    records: list[RunRecord] = field(default_factory=list)
    summary: GridSummary | None = None
    """It has every cell, also those that failed or are still to be measured. It is None for a single group that is all there."""
    decided: list[list[list[RunRecord]]] = field(default_factory=list)
    """These are the replicates of each group whose pairs were to be decided."""
    is_plan: bool = False
    """It is true for a dry run, in which nothing was measured."""
    was_interrupted: bool = False


@verb(
    takes=(*WORKLOAD, *RANKS, *MEASURED),
    settings=Keeping,
    grid=(*WORKLOAD, *RANKS, *MEASURED),
    examples=(
        "redline run resnet50 -b 32 -r baseline -r fp16+channels-last+compile",
        "redline run resnet50 vit_b_16 -b 1..64 -r baseline -r fp16 --resume",
        "redline run resnet50 -r fp16 -r fp16+channels-last --decide",
    ),
    also=("plot", "save", "report", "log"),
)
def run(
    model: Models = None,
    inputs: Any | None = None,
    *,
    recipes: AnyRecipes = None,
    file: Annotated[Path | None, setting("A TOML file with [[run]] tables.", short="-f", group=HOW)] = None,
    trust: Annotated[bool, setting("Accept a file that another user owns and that names code to run.")] = False,
    ray: Ray = False,
    address: Address = None,
    loss: Any | None = None,
    targets: Any | None = None,
    setup: Any | None = None,
    teardown: Any | None = None,
    workspace: Workspace | None = None,
    **settings: Any,
) -> Result:
    """Measure models under recipes; several values make a grid.

    Recipes are measured interleaved, and each is compared with the first. In Python a model may also be a live module with its inputs,
    or a function; several functions are compared with decide.

    Every setting takes several values or a range (-b 1,8 or -b 1..64, which doubles). Rows are kept as they come, and --resume
    continues after Ctrl-C. A cell that fails is a row. --decide measures until every pair is decided.

    Switches: tf32, amp, amp-bf16, fp16, bf16, channels-last, compile[:MODE][,key=value], compile:regional, compile:combine,
    compile:freeze, fused-linear, patch-products, torchscript, graphs, cudnn-benchmark, fold-bn, sdpa:BACKEND, fused-optimizer,
    overlap-gradients, checkpointing, keep-memory, int8, fp8, onnx, tensorrt; with --ranks fsdp;
    in generation static-cache, decode-kernels. docs/recipes.md says what each does and needs.
    """
    how = split(Keeping, settings)
    require_cluster(ray, address)
    if ray and how.decide:
        raise UsageError("pairs are decided on one machine: leave out ray (--launch ray), or decide")
    if recipes is not None:
        settings["recipe"] = listed(recipes)
    with use(workspace) as opened:
        tables, working = [], opened
        models = model if isinstance(model, list | tuple) and any(map(callable, model)) else [model]
        for one in models:
            described, working = described_model(
                opened, one, inputs, loss, targets, setup, teardown, task=settings.get("task")
            )
            if len(models) > 1 and working is not opened:
                raise UsageError("a function that cannot be pickled is measured by itself: give all as file.py:step")
            tables.append({**settings, **described})
        about: dict[str, Any] = {}
        if file is not None:
            about, tables = read_runs(Path(file), tables[0], trust=trust)
        found = measure(
            tables,
            working,
            how,
            about=about,
            where="" if file is None else str(file),
            elsewhere=partial(spread, address=address) if ray else None,
        )
        return shown(result_of(found, working.ceilings_of(found.records), price=how.price), found)


def shown(result: Result, found: Measured) -> Result:
    """Returns the result; after Ctrl-C it is raised, so that what was finished is printed."""
    if found.was_interrupted:
        raise Interrupted(replace(result, next=CONTINUES))
    return result


# Measuring


def measure(
    tables: Sequence[Mapping[str, Any]],
    workspace: Workspace,
    how: Keeping,
    *,
    about: Mapping[str, Any] | None = None,
    where: str = "",
    elsewhere: Callable[[Sequence[RunSpec]], Iterator[tuple[int, RunRecord]]] | None = None,
) -> Measured:
    """Plan the cells of tables of settings, then measure those that are not settled yet.

    `about` is what a file says of itself, and `elsewhere` measures the cells on other machines. A mistake in any cell is raised before
    the first is measured.
    """
    about = about or {}
    # With --decide, what differs between processes matters more than a narrow interval.
    effort = {"effort": "quick"} if how.decide else {}
    name = how.name if how.name is not None else about.get("name")
    check_name(name)
    grid = grid_from_tables([layered(effort, table) for table in tables], where)
    if not grid.cells:
        raise UsageError("nothing to measure: name at least one model and one recipe")
    plan = make_plan(
        grid,
        workspace.answers(grid.cells),
        workspace.environment,
        name,
        replicates=how.replicates or 1,
        decides=how.decide,
        is_kept=True if how.resumes or how.dry_run or name is not None else None,
    )
    if how.decide:
        for group in plan.groups:
            check_racers([cell.spec for cell in group], how.replicates or REPLICATES)
    ledger = workspace.history.sweep(plan.name) if plan.is_kept else Account()
    settled = ledger.cells() if how.resumes else {}
    waiting = [cell for group in unsettled(plan, settled, retry_failed=how.retry_failed) for cell in group]
    if how.dry_run:
        to_do = {cell.key for cell in waiting}
        kept = {key: cell for key, cell in settled.items() if key not in to_do}
        return Measured(summary=standing(plan, kept), is_plan=True)
    if plan.is_kept:
        workspace.observer.grid_planned(plan, len(waiting))
    running = GridRun(
        plan,
        workspace,
        ledger,
        live=None if plan.is_kept and workspace.keeps else workspace.journal,
        load=workspace.history.load_many if plan.is_kept else lambda ids: {},
        replicates=(how.replicates or REPLICATES) if how.decide else 0,
        spread=elsewhere,
    )
    found = Measured(decided=running.decided)
    try:
        running.go(resume=how.resumes, retry_failed=how.retry_failed)
    except KeyboardInterrupt:
        if not (workspace.keeps and (running.records or settled)):
            raise
        found.was_interrupted = True
    summary = standing(plan, ledger.cells())
    ids = {cell.key: settled.record_id for cell, settled in summary.cells if settled is not None}
    absent = [record_id for key, record_id in ids.items() if key not in running.records]
    loaded = workspace.history.load_many(absent) if absent else {}
    records = [running.records.get(key) or loaded.get(record_id) for key, record_id in ids.items()]
    found.records = [record for record in records if record is not None]
    if how.decide:
        found.records = [record for replicates in running.decided for replicate in replicates for record in replicate]
    found.summary = summary if plan.is_kept or plan.left_out else None
    return found


# What it shows


def result_of(
    found: Measured,
    ceilings_of: CeilingsOf | None = None,
    *,
    verb: str = "run",
    price: str | None = None,
    columns: Sequence[str] = (),
) -> Result:
    """Returns the rows of what was measured, the pairs that were to be decided, and one sentence that follows from both."""
    measured = over_processes(found.records, ceilings_of)
    if price is not None:
        measured = [row.changed(per_hour=parse_price(price)) for row in measured]
    summary, pairs = found.summary, [pair for replicates in found.decided for pair in pairs_of(replicates)]
    rows = list(_rows(measured, summary))
    table, about = table_of(rows, "plan" if found.is_plan else "results", columns or columns_for(measured))
    title = title_of(about, measured) if measured else ""
    if summary is not None:
        about |= {"grid": summary.name, "cells": len(summary.cells)}
        about |= {status: summary.count(status) for status in ("done", "failed")}
        title = " · ".join(filter(None, (title, counts_of(summary))))
    table = msgspec.structs.replace(table, title=title)
    tables = [table, _pair_table(pairs)] if pairs else [table]
    return Result(
        verb=verb,
        headline=headline_of(table),
        tables=tuple(tables),
        about=about,
        notes=tuple(_notes(found, measured, pairs)),
        next=_next(found, measured, table, pairs),
        records=tuple(found.records),
        record_ids=tuple(record.id for record in found.records),
        exit_code=Exit.FAILED_ROW if _has_failed(found) else Exit.DONE,
        picture=partial(bar_figure, table) if any("throughput" in row for row in rows) else None,
    )


def _has_failed(found: Measured) -> bool:
    """Returns whether any row could not be measured. Of a grid over more than models and recipes, each cell says so itself."""
    if found.summary is not None and found.summary.sweeps:
        return False
    return any(record.failure is not None or not (record.blocks or record.epochs) for record in found.records)


def _rows(measured: Sequence[Measurement], summary: GridSummary | None) -> Iterator[Row]:
    """Yields a row for everything that was measured; of a grid also for the cells that are still to be measured."""
    if summary is None:
        yield from map(row_of, measured)
        return
    by_record = {record_id: row for row in measured for record_id in (row.replicate_ids or (row.record_id,))}
    settled_ones = {_identity_of(cell, summary.axes) for cell, settled in summary.cells if settled is not None}
    seen = set[tuple[str, ...]]()
    are_named = any(cell.run for cell, _ in summary.cells)
    for cell, settled in summary.cells if are_named else in_reading_order(summary):
        found = by_record.get(settled.record_id) if settled is not None else None
        # Replicates of a combination share its row; one run may take up the record of another.
        identity = _identity_of(cell, summary.axes) if found is None else (found.record_id, cell.run)
        if identity in seen or (settled is None and identity in settled_ones):
            continue
        seen.add(identity)
        workload = cell.spec.workload
        row = (
            row_of(found)
            if found is not None
            else Row(
                facts={
                    "model": workload.model,
                    "task": workload.task,
                    "recipe": str(cell.spec.recipe),
                    "batch": workload.batch,
                    **{name: value_of(cell.spec, name) for name in summary.axes},
                    "trust": "to do" if settled is None else settled.status,
                }
            )
        )
        named: dict[str, Fact] = {"run": cell.run} if cell.run else {}
        yield msgspec.structs.replace(row, facts={**named, **row.facts})


def _identity_of(cell: Cell, axes: Sequence[str]) -> tuple[str, ...]:
    """Returns a key that is the same for all replicates of a combination."""
    spec = cell.spec
    values = (str(value_of(spec, name)) for name in axes)
    return cell.run, spec.workload.model, spec.workload.task, str(spec.recipe), *values


def in_reading_order(summary: GridSummary) -> list[tuple[Cell, SettledCell | None]]:
    """Returns the cells by model, task, other settings, recipe and size, each in the order in which its values came."""
    sizes = ("prompt", "new_tokens", "batch")
    names = ("model", "task", *(name for name in summary.axes if name not in sizes), "recipe", *sizes)
    columns = {name: [str(value_of(cell.spec, name)) for cell, _ in summary.cells] for name in names}
    ranks = {name: {text: rank for rank, text in enumerate(dict.fromkeys(texts))} for name, texts in columns.items()}
    order = sorted(range(len(summary.cells)), key=lambda at: [ranks[name][columns[name][at]] for name in names])
    return [summary.cells[at] for at in order]


def counts_of(summary: GridSummary) -> str:
    counts = [f"{len(summary.cells)} cells", f"{summary.count('done')} done"]
    counts += [f"{failed} failed"] if (failed := summary.count("failed")) else []
    return ", ".join([*counts, f"{to_do} to do"] if (to_do := summary.count(None)) else counts)


def _pair_table(pairs: Sequence[Pair]) -> Table:
    """Returns every two recipes that were to be decided. The verdict is about the recipe, not about what it was set against."""
    rows = [
        Row(
            facts={
                "recipe": pair.b,
                "against": pair.a,
                "verdict": {"inconclusive": "undecided"}.get(pair.verdict, pair.verdict),
                "replicates": pair.replicates,
            },
            metrics=(AS_FAST(pair.ratio, pair.low, pair.high),),
        )
        for pair in pairs
    ]
    return Table(
        name="pairs", title="Pairs", rows=tuple(rows), columns=("recipe", "against", "verdict", "ratio", "replicates")
    )


AS_FAST = msgspec.structs.replace(RATIO, header="ratio")


def _notes(found: Measured, measured: Sequence[Measurement], pairs: Sequence[Pair]) -> Iterator[Note]:
    summary = found.summary
    for left, together in groupby(sorted(summary.left_out, key=_reason) if summary else (), key=_reason):
        cells = list(together)
        names = dict.fromkeys(one.name for one in cells)
        yield note(cells[0].reason.code, f"skipped ({left}): {'; '.join(names)}")
    if any(row.prepared and row.prepared.workload.batch_from == "unknown" and row.task != "step" for row in measured):
        yield note(
            "batch-unknown",
            "the batch is unknown, so steps are counted: add --batch-axis N or --items N, or let the factory take batch",
        )
    busy = [each for row in measured if row.roofline for each in row.roofline.notes if each.code == "busy-ceilings"]
    yield from busy[:1]


def _reason(left: LeftOut) -> str:
    return str(left.reason)


# What to do next


def _next(found: Measured, measured: Sequence[Measurement], table: Table, pairs: Sequence[Pair]) -> str:
    summary = found.summary
    if found.is_plan:
        return "run it without --dry-run; you can stop it at any time, and --resume continues"
    if summary is not None and summary.count(None):
        return CONTINUES
    sound = [row for row in measured if row.failure is None]
    if not sound or (found.decided and not pairs):
        broken = next((record for record in found.records if record.failure is not None), None)
        return f"redline history show {broken.id[:13]}" if broken is not None else "run the same command again"
    if any(pair.verdict == "inconclusive" for pair in pairs):
        replicates = max(len(each) for each in found.decided)
        return f"--replicates {2 * replicates} or --effort strict measures longer"
    broken = next(
        (record for record in found.records if record.failure is not None and record.failure.kind != "oom"), None
    )
    if broken is not None:
        return f"redline history show {broken.id[:13]}"
    rows = {row.record_id: row for row in table.rows}
    return next_of([row for row in sound if row.model == sound[0].model], rows)


def next_of(sound: Sequence[Measurement], rows: Mapping[str, Row]) -> str:
    """Returns one command after rows of one model, as it would be typed; for a live model the call."""
    verdicts = {row.record_id: rows[row.record_id].get("verdict") for row in sound if row.record_id in rows}
    faster = [row for row in sound if verdicts.get(row.record_id) == "faster" and not (row.numerics and row.numerics.is_wrong)]  # fmt: skip
    best = max(faster, key=lambda row: row.vs_first.ratio if row.vs_first else 0.0, default=None)
    if best is None and any(verdict == "undecided" for verdict in verdicts.values()):
        recipes = list(dict.fromkeys(row.recipe for row in sound))
        line = sound[0].command("run", recipes) if len(recipes) > 1 else None
        return f"{line} --decide" if line else "decide=True measures in fresh processes until every pair is decided"
    # We take the fastest row of a ladder, because one goes on from its last rung and not from its first.
    row = best or (
        sound[0] if any(row.vs_first for row in sound) else max(sound, key=lambda row: row.throughput_per_s or 0.0)
    )
    if row.model.startswith("watch:"):
        return f"redline watch --profile -- {row.model.removeprefix('watch:')}"
    compared = any(other.vs_first for other in sound)
    if (not compared or row.bound.label == "host") and row.worth_trying and row.bound.evidence.code != "outside-operators":  # fmt: skip
        recipes = [row.recipe, *row.worth_trying]
        return row.command("run", recipes) or f"redline.run({_live(row)}, recipes={recipes!r})"
    is_tunable = row.task != "step" and row.conditions.get("ranks", 1) == 1 and row.training is None
    name = "tune" if compared and is_tunable and best is None else "profile"
    recipes = [row.recipe] if name == "profile" and row.recipe != BASELINE else []
    return row.command(name, recipes) or f"redline.{name}({_live(row)})"


def _live(row: Measurement) -> str:
    if row.task == "step":
        return row.model.partition(":")[2]
    return "model, task='generate'" if row.task == "generate" else "model, inputs"
