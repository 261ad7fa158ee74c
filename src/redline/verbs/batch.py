"""`redline batch`: the largest batch that fits, the throughput knee, and the best batch under a latency target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from redline.analyze.batch import SATURATED, SLO_TESTS, BatchSummary, BatchTrial
from redline.analyze.rows import metric_of
from redline.model.errors import Exit
from redline.model.fields import MOST_ITEMS
from redline.model.metrics import (
    MEMORY,
    MEMORY_SHARE,
    Fact,
    Figure,
    Headline,
    Row,
    Table,
)
from redline.model.settings import setting
from redline.model.spec import Effort
from redline.model.spec_table import layered
from redline.model.units import format_bytes, format_seconds
from redline.search.batch import MAX_TRIALS, require_batches, search_batch
from redline.show.charts import curve_figure
from redline.show.result import Result
from redline.verbs.verb import ANY_BATCH, ISOLATED, ModelName, Recipes, target, verb
from redline.verbs.workspace import Workspace, specs_of, use

LARGEST = Figure(name="largest_batch", header="largest", better="higher", doc="The largest batch that ran by itself.")
BELOW = Figure(name="largest_is_below", doc="The largest that may fit lies below this.")
KNEE = Figure(name="knee_batch", header=f"knee ({SATURATED:.0%})", doc="More items per step hardly bring more.")
WITHIN = Figure(
    name="batch_within_target", header="within target", better="higher", doc="The best that keeps the targets."
)
RATIO = Figure(name="largest_ratio", unit="x", header="vs first", better="higher", doc="Over that of the first recipe.")
DENSITY = Figure(name="throughput_per_gib", header="items/s/GiB", better="higher", doc="Throughput over needed memory.")
FAILED = Figure(name="trials_that_failed", doc="Trials that did not fit or did not run.")


@verb(
    takes=(*ANY_BATCH, *ISOLATED),
    examples=(
        "redline batch resnet50 -r fp16+channels-last",
        "redline batch resnet50 --task train -r amp --max-memory 16GiB --plot b.png",
        "redline batch hf:gpt2 --task generate --max-memory 16GiB",
    ),
    also=("plot", "save", "log"),
)
def batch(
    model: ModelName,
    inputs: Any | None = None,
    *,
    recipes: Recipes = "baseline",
    slo_p95: Annotated[
        Any,
        target("Also find the best batch whose p95 step time stays within this limit, such as 20ms."),
    ] = None,
    max_batch: Annotated[int | None, setting("Try no batch larger than this.", least=1, most=MOST_ITEMS)] = None,
    effort: Annotated[Effort, setting("How long each trial is timed; see 'redline run --help'.")] = "quick",
    loss: Any | None = None,
    workspace: Workspace | None = None,
    **settings: Any,
) -> Result:
    """Find the largest batch that fits, the throughput knee, and the best batch under a latency target.

    Every batch is tried in a process of its own; numerics are not checked on the way ('redline run' does that). Several recipes are
    searched one after the other.
    """
    with use(workspace) as opened:
        table = layered({"effort": effort}, settings)
        specs, working = specs_of(opened, model, inputs, recipes=recipes, loss=loss, **table)
        require_batches(specs)
        found, observer = [], working.observer
        checked, most = working.checked(specs), MAX_TRIALS + (SLO_TESTS if slo_p95 else 0)
        observer.planned(most * len(checked))
        for spec in checked:
            with working.lock(spec.device):
                door = working.door(spec.launch)
                found.append(search_batch(spec, door, working.journal, observer, most=max_batch, slo_p95_s=slo_p95))
            observer.planned(len(found[-1].trials) - most)  # trials that were not needed
        return result_of(found)


# What it shows


def result_of(searches: Sequence[BatchSummary]) -> Result:
    """Returns the answers recipe by recipe, then every trial."""
    first = searches[0]
    trials = [
        trial_row(search, trial) for search in searches for trial in sorted(search.trials, key=lambda each: each.batch)
    ]
    answers = tuple(_answer_row(search, first) for search in searches)
    several = len(searches) > 1
    columns = ("largest_batch", "largest_ratio", "knee_batch", "batch_within_target", "trials", "trials_that_failed")
    trial_columns = ("batch", "throughput", "latency_p50", "latency_p95", "memory", "memory_share", "remark")
    row = first.row
    where = f"{row.device_name} ({row.device})" if row.device_name else row.device
    about: dict[str, Fact] = {"model": row.model, "task": row.task, "device": where, "setting": first.setting}
    about |= {"limit": f"up to {format_bytes(first.limit_bytes)}"} if first.limit_bytes else {}
    title = " · ".join(str(part) for part in about.values() if part)
    return Result(
        verb="batch",
        headline=_headline(searches),
        tables=(
            Table(name="recipes", title=title, rows=answers, columns=("recipe", *columns)),
            Table(name="trials", title="trials", rows=tuple(trials), columns=("recipe", *trial_columns)[not several :]),
        ),
        about=about,
        next=_next(searches),
        record_ids=tuple(trial.row.record_id for search in searches for trial in search.trials),
        exit_code=Exit.FAILED_ROW if any(search.max_batch is None for search in searches) else Exit.DONE,
        picture=lambda: curve_figure(trials, "throughput"),
    )


def _answer_row(search: BatchSummary, first: BatchSummary) -> Row:
    ratio = search.max_batch / first.max_batch if search.max_batch and first.max_batch and search is not first else None
    return Row(
        facts={"recipe": search.row.recipe, "target": _target(search)},
        metrics=(
            LARGEST(search.max_batch),
            BELOW(search.max_batch_below),
            *([RATIO(ratio)] if ratio is not None else []),
            KNEE(search.knee_batch),
            *([WITHIN(search.slo_batch)] if search.slo_p95_s else []),
            MEMORY_LIMIT(search.limit_bytes),
            TRIALS(len(search.trials)),
            FAILED(sum(not trial.fits for trial in search.trials)),
        ),
        notes=tuple(search.notes),
        failure="" if search.max_batch is not None else "no batch fits" if search.ooms else "no batch runs",
    )


MEMORY_LIMIT = Figure(name="memory_limit", unit="B", doc="What there was to fill.")
TRIALS = Figure(name="trials", doc="Batches that were tried, each in a process of its own.")


def trial_row(search: BatchSummary, trial: BatchTrial) -> Row:
    facts: dict[str, Fact] = {
        "model": search.row.model,
        "recipe": search.row.recipe,
        "batch": trial.batch,
        "purpose": trial.purpose,
        "remark": _remark(trial),
    }
    if not trial.fits:
        assert trial.failure is not None
        why = "does not fit" if trial.is_oom else f"{trial.failure.kind}: {trial.failure.told}"
        return Row(
            facts=facts, failure="" if trial.is_oom else f"batch {trial.batch}: {why}", record_id=trial.row.record_id
        )
    needed, limit = trial.needed_bytes, trial.memory.limit_bytes
    metrics = [
        metric_of(trial.row, "throughput"),
        metric_of(trial.row, "latency_p50"),
        metric_of(trial.row, "latency_p95"),
        MEMORY(needed),
        MEMORY_SHARE(needed / limit if needed is not None and limit else None),
        DENSITY((trial.throughput_per_s or 0.0) / (needed / 2**30) if needed else None),
        metric_of(trial.row, "ttft"),
        metric_of(trial.row, "tpot"),
    ]
    known = tuple(metric for metric in metrics if metric is not None)
    return Row(facts=facts, metrics=known, record_id=trial.row.record_id)


def _remark(trial: BatchTrial) -> str:
    if not trial.fits:
        return "does not fit" if trial.is_oom else "failed"
    remarks = trial.doubts
    remarks += ["host-bound"] if trial.row.bound.label == "host" else []
    remarks += ["short of memory"] if trial.memory.allocator_retries else []
    return ", ".join(remarks)


def _headline(searches: Sequence[BatchSummary]) -> Headline:
    """Returns the largest batch and where throughput saturates, for the recipe that fits most."""
    running = [search for search in searches if search.max_batch is not None]
    if not running:
        return Headline(template="No batch of {model} runs.", figures={"model": searches[0].row.model})
    best = max(running, key=lambda search: search.max_batch or 0)
    known = best.max_batch_below is not None and best.max_batch_below <= (best.max_batch or 0) * 1.03 + 1
    figures: dict[str, Any] = {"recipe": best.row.recipe, "largest": LARGEST(best.max_batch)}
    text = "{largest} is the largest batch that fits" if known else "Batch {largest} fits, and larger ones may"
    text += " with {recipe}" if len(searches) > 1 or best.row.recipe != "baseline" else ""
    if best.slo_batch is not None:
        figures |= {"within": WITHIN(best.slo_batch), "target": _target(best)}
        text += "; batch {within} is the best that keeps {target}"
    elif best.slo_p95_s:
        figures["target"] = _target(best)
        text += "; none that was tried keeps {target}"
    elif best.knee is not None and not best.is_doubted:
        figures |= {"knee": KNEE(best.knee.batch), "share": MEMORY_SHARE(best.knee.share)}
        text += "; batch {knee} already has {share} of the speed"
    return Headline(template=f"{text}.", figures=figures)


def _target(search: BatchSummary) -> str | None:
    return f"p95 ≤ {format_seconds(search.slo_p95_s)}" if search.slo_p95_s else None


def _next(searches: Sequence[BatchSummary]) -> str:
    running = [search for search in searches if search.max_batch is not None]
    if not running:
        failed = next((trial.row.record_id for search in searches for trial in search.trials if trial.failure), "")
        return f"redline history show {failed[:13]}"
    best = max(running, key=lambda search: search.max_batch or 0)
    if best.is_doubted:
        return "run it again on a quiet machine"
    if best.slo_p95_s and not any(search.slo_batch for search in running):
        return f"redline tune {best.row.model}"  # a faster recipe may keep the target
    return best.at_length or ""
