"""`redline batch`: the largest batch that fits, the throughput knee, and the best batch under a latency target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from redline.analyze.batch import SATURATED, SLO_TESTS, BatchSummary, BatchTrial, SloTargets, curve_of, items_of_one
from redline.analyze.rows import metric_of
from redline.model.errors import DoorError, Exit, UsageError
from redline.model.fields import MOST_ITEMS, Frozen
from redline.model.metrics import (
    LATENCY_P50,
    LATENCY_P95,
    MEMORY,
    MEMORY_SHARE,
    TPOT,
    Fact,
    Figure,
    Headline,
    Row,
    Table,
)
from redline.model.migrations import decode, encode
from redline.model.settings import setting
from redline.model.spec import Effort, RunSpec
from redline.model.spec_table import layered
from redline.model.units import format_bytes
from redline.search.batch import MAX_TRIALS, require_batches, search_batch
from redline.search.spread import Collected, on_cluster, require_cluster
from redline.show.canvas import label_axes, new_figure
from redline.show.result import Result
from redline.verbs.verb import ANY_BATCH, ISOLATED, Address, ModelName, Ray, Recipes, target, verb
from redline.verbs.workspace import Workspace, specs_of, use

NO_TARGET = SloTargets()

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
        "redline batch hf:gpt2 --task generate --slo-ttft 200ms --slo-tpot 20ms",
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
    slo_ttft: Annotated[
        Any, target("Generation: keep the time to the first token within this limit, such as 200ms.")
    ] = None,
    slo_tpot: Annotated[
        Any,
        target("Generation: keep p95 of the time per further token within this limit, such as 20ms."),
    ] = None,
    max_batch: Annotated[int | None, setting("Try no batch larger than this.", least=1, most=MOST_ITEMS)] = None,
    effort: Annotated[Effort, setting("How long each trial is timed; see 'redline run --help'.")] = "quick",
    ray: Ray = False,
    address: Address = None,
    loss: Any | None = None,
    workspace: Workspace | None = None,
    **settings: Any,
) -> Result:
    """Find the largest batch that fits, the throughput knee, and the best batch under a latency target.

    Every batch is tried in a process of its own; numerics are not checked on the way ('redline run' does that). Several recipes are
    searched one after the other, on a Ray cluster at the same time.
    """
    require_cluster(ray, address)
    slo = SloTargets(p95_s=slo_p95, ttft_s=slo_ttft, tpot_s=slo_tpot)
    with use(workspace) as opened:
        table = layered({"effort": effort}, settings)
        specs, working = specs_of(opened, model, inputs, recipes=recipes, loss=loss, **table)
        _require_sound(specs, slo, max_batch)
        search = (
            _on_cluster(specs, working, slo, max_batch, address) if ray else searched(specs, working, slo, max_batch)
        )
        return result_of(search)


def searched(
    specs: Sequence[RunSpec], workspace: Workspace, slo: SloTargets = NO_TARGET, max_batch: int | None = None
) -> list[BatchSummary]:
    """One search per spec, in their order. The batch in a spec is ignored."""
    _require_sound(specs, slo, max_batch)
    checked = workspace.checked(specs)
    most = MAX_TRIALS + (SLO_TESTS if slo else 0)
    workspace.observer.planned(most * len(checked))
    found = []
    for spec in checked:
        with workspace.lock(spec.device):
            door = workspace.door(spec.launch)
            found.append(search_batch(spec, door, workspace.journal, workspace.observer, most=max_batch, slo=slo))
        workspace.observer.planned(len(found[-1].trials) - most)  # trials that were not needed
    return found


def _require_sound(specs: Sequence[RunSpec], slo: SloTargets, max_batch: int | None) -> None:
    require_batches(specs)
    if slo.ttft_s is not None or slo.tpot_s is not None:
        others = sorted({spec.workload.task for spec in specs} - {"generate"})
        if others:
            raise UsageError(f"slo_ttft and slo_tpot are for --task generate, not for {', '.join(others)}")


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
        picture=lambda: _figure(searches),
    )


def _answer_row(search: BatchSummary, first: BatchSummary) -> Row:
    ratio = search.max_batch / first.max_batch if search.max_batch and first.max_batch and search is not first else None
    return Row(
        facts={"recipe": search.row.recipe, "target": str(search.slo) or None},
        metrics=(
            LARGEST(search.max_batch),
            BELOW(search.max_batch_below),
            *([RATIO(ratio)] if ratio is not None else []),
            KNEE(search.knee_batch),
            *([WITHIN(search.slo_batch)] if search.slo else []),
            MEMORY_LIMIT(search.limit_bytes),
            TRIALS(len(search.trials)),
            FAILED(sum(not trial.fits for trial in search.trials)),
        ),
        notes=search.notes,
        failure="" if search.max_batch is not None else "no batch fits" if search.ooms else "no batch runs",
    )


MEMORY_LIMIT = Figure(name="memory_limit", unit="B", doc="What there was to fill.")
TRIALS = Figure(name="trials", doc="Batches that were tried, each in a process of its own.")


def trial_row(search: BatchSummary, trial: BatchTrial) -> Row:
    facts: dict[str, Fact] = {
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
        LATENCY_P50(trial.row.latency_s.p50 if trial.row.latency_s else None),
        LATENCY_P95(trial.row.latency_s.p95 if trial.row.latency_s else None),
        MEMORY(needed),
        MEMORY_SHARE(needed / limit if needed is not None and limit else None),
        DENSITY((trial.throughput_per_s or 0.0) / (needed / 2**30) if needed else None),
        metric_of(trial.row, "ttft"),
        *([TPOT(trial.tpot_s)] if trial.tpot_s is not None else []),
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
    if best.slo and best.slo_batch is not None:
        figures |= {"within": WITHIN(best.slo_batch), "target": str(best.slo)}
        text += "; batch {within} is the best that keeps {target}"
    elif best.slo:
        figures["target"] = str(best.slo)
        text += "; none that was tried keeps {target}"
    elif best.knee is not None and not _is_doubted(best):
        figures |= {"knee": KNEE(best.knee.batch), "share": MEMORY_SHARE(best.knee.share)}
        text += "; batch {knee} already has {share} of the speed"
    return Headline(template=f"{text}.", figures=figures)


def _is_doubted(search: BatchSummary) -> bool:
    """Returns whether other processes disturbed the trials, so that nothing is recommended by their speeds."""
    return any(each.code == "doubted-trials" for each in search.notes)


def _next(searches: Sequence[BatchSummary]) -> str:
    running = [search for search in searches if search.max_batch is not None]
    if not running:
        failed = next((trial.row.record_id for search in searches for trial in search.trials if trial.failure), "")
        return f"redline history show {failed[:13]}"
    best = max(running, key=lambda search: search.max_batch or 0)
    if _is_doubted(best):
        return "run it again on a quiet machine"
    if best.slo and not any(search.slo_batch for search in running):
        return f"redline tune {best.row.model}"  # a faster recipe may keep the target
    return best.at_length or ""


def _figure(searches: Sequence[BatchSummary]) -> Any:
    """Throughput, latency and memory against the batch."""
    figure, (speed, latency, memory) = new_figure(13, 4.2, columns=3)
    for number, search in enumerate(searches):
        fitting = sorted((trial for trial in search.trials if trial.fits), key=lambda trial: trial.batch)
        batches = [trial.batch for trial in fitting]
        colour = f"C{number % 10}"
        for axes, values in zip((speed, latency, memory), _curves(fitting), strict=True):
            axes.plot(batches, values, "o-", color=colour, label=search.row.recipe)
        if search.limit_bytes:
            failed = [trial.batch for trial in search.trials if trial.is_oom]
            memory.plot(failed, [search.limit_bytes / 2**30] * len(failed), "x", color=colour)
        if (curve := curve_of(search.trials)) is not None:
            items = items_of_one(search.trials)
            grid = [batches[0] * (batches[-1] / batches[0]) ** (at / 99) for at in range(100)]
            speed.plot(grid, [items * at / curve.seconds(at) for at in grid], "--", color=colour, alpha=0.6)
        if search.knee is not None:
            speed.plot([search.knee.batch], [search.knee.throughput_per_s], "o", color=colour, markersize=10, alpha=0.5)
    for axes in (speed, latency, memory):
        axes.set_xscale("log", base=2)
    first, row = searches[0], searches[0].row
    label_axes(speed, "batch", f"{row.item or 'items'}/s", "throughput; dashed: a + c·b, dot: knee")
    label_axes(latency, "batch", "ms per step", "median latency")
    label_axes(memory, "batch", "GiB", "memory needed; crosses: did not fit")
    if first.limit_bytes:
        memory.axhline(first.limit_bytes / 2**30, color="0.4", linestyle=":")
    if first.slo.p95_s is not None:
        latency.axhline(first.slo.p95_s * 1e3, color="0.4", linestyle=":")
    speed.legend(fontsize="small")
    figure.suptitle(" · ".join(part for part in (row.model, row.task, row.device_name or row.device) if part))
    return figure


def _curves(trials: Sequence[BatchTrial]) -> Iterator[list[float]]:
    nothing = float("nan")
    yield [trial.throughput_per_s or nothing for trial in trials]
    yield [trial.row.latency_s.p50 * 1e3 if trial.row.latency_s else nothing for trial in trials]
    yield [trial.needed_bytes / 2**30 if trial.needed_bytes else nothing for trial in trials]


# On a cluster


class _Search(Frozen):
    """What a machine of a cluster is asked."""

    spec: RunSpec
    slo: SloTargets
    max_batch: int | None


class _Found(Frozen):
    summary: BatchSummary
    records: tuple[bytes, ...]


def _on_cluster(
    specs: Sequence[RunSpec], workspace: Workspace, slo: SloTargets, max_batch: int | None, address: str | None
) -> list[BatchSummary]:
    """Each search whole on one machine. One that was lost is raised once the others are kept."""
    payloads = [msgspec.msgpack.encode(_Search(spec=spec, slo=slo, max_batch=max_batch)) for spec in specs]
    summaries: dict[int, BatchSummary] = {}
    lost: list[DoorError] = []
    for number, answer in on_cluster(_search_there, payloads, [spec.device for spec in specs], address):
        if isinstance(answer, DoorError):
            lost.append(answer)
            continue
        found = msgspec.msgpack.decode(answer, type=_Found)
        for record in found.records:
            workspace.journal.finish(decode(record))
        for trial in found.summary.trials:
            workspace.observer.tried(trial)
        summaries[number] = found.summary
    if lost:
        raise lost[0]
    return [summaries[number] for number in sorted(summaries)]


def _search_there(payload: bytes) -> bytes:
    asked = msgspec.msgpack.decode(payload, type=_Search)
    journal = Collected()
    with Workspace(journal=journal) as workspace:
        (summary,) = searched([asked.spec], workspace, asked.slo, asked.max_batch)
    return msgspec.msgpack.encode(_Found(summary=summary, records=tuple(map(encode, journal.records))))
