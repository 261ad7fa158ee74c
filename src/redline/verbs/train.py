"""`redline train`: epochs on data, with losses, accuracy and where the time goes; with `--find-workers` who waits for whom, loader or model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from redline.analyze.measurement import Measurement, measurements
from redline.analyze.rows import metric_of
from redline.analyze.train import (
    DATA_BOUND_SHARE,
    TrainingSummary,
    about_the_loader,
    best_workers,
    is_data_bound,
    latest_feed,
    loading_share,
    where_time_goes,
)
from redline.model.errors import BenchError, Exit, UsageError
from redline.model.fields import MOST_ITEMS, MOST_ROWS
from redline.model.metrics import THROUGHPUT, Block, Fact, Figure, Headline, Metric, Row, Table
from redline.model.note import Note, note
from redline.model.record import RunRecord
from redline.model.settings import DATA, OUTPUT, WHAT, setting, settings_of
from redline.model.spec import DataSpec, RunSpec, TrainSpec
from redline.model.spec_table import training_table
from redline.model.units import counted, format_seconds, format_share, parse_price
from redline.search.observer import NoJournal
from redline.search.train import After, train_spec
from redline.show.plots import training_figure
from redline.show.report import epoch_rows
from redline.show.result import Result
from redline.verbs.verb import ISOLATED, Models, Recipes, verb
from redline.verbs.workspace import Workspace, specs_of, use

DEFAULT_DATA = "synthetic-learnable"
OF_DATA = tuple(settings_of(DataSpec))
OF_TRAINING = tuple(name for name in settings_of(TrainSpec) if name != "epochs")
OF_MODEL = ("image_size", "classes", "stem", "optimizer", "device", "threads", "seed", *ISOLATED)
DataName = Annotated[
    str,
    setting(
        "cifar10, imagefolder, synthetic, synthetic-learnable, or your own as file.py:loaders.", short="-d", group=DATA
    ),
]

FIGURES = (
    "throughput", "epoch_time", "accuracy", "data_wait", "memory", "train_loss", "val_loss", "steps", "flops", "utilisation",
    "energy_per_item", "cost_per_million",
)  # fmt: skip
"""A training shares these figures with other measurements."""
OWN = {
    "best_accuracy": Figure(name="best_accuracy", unit="share", better="higher", doc="Of all epochs."),
    "time_to_target_s": Figure(name="time_to_target", unit="s", better="lower", doc="Up to the epoch that reached it."),
    "samples_per_s_with_validation": Figure(
        name="with_validation", unit="{item}/s", header="with validation/s", better="higher"
    ),
    "parameters": Figure(name="parameters", unit="count"),
}
SHARE = "Share of the training time."
COLUMNS = ("throughput", "epoch_time", "accuracy", "memory", "bound", "data_wait")
EPOCH_COLUMNS = ("epoch", "seconds", "throughput", "train_loss", "accuracy", "data_wait", "memory")


@verb(
    takes=(*OF_DATA, *OF_MODEL, *OF_TRAINING),
    examples=(
        "redline train resnet18 --data cifar10 --folder ~/data -r amp-bf16",
        "redline train simple_cnn resnet18 transformer",
        "redline train resnet18 --data cifar10 --folder ~/data --find-workers",
    ),
    also=("plot", "save", "report", "log"),
)
def train(
    model: Models = None,
    inputs: Any | None = None,
    *,
    data: DataName = DEFAULT_DATA,
    epochs: Annotated[int | None, setting("Number of epochs. Default: 3.", short="-e", least=1, most=MOST_ROWS)] = None,
    recipes: Recipes = "baseline",
    batch: Annotated[
        int | None, setting("Samples per step. Default: 128.", short="-b", group=WHAT, least=1, most=MOST_ITEMS)
    ] = None,
    find_workers: Annotated[
        bool,
        setting("Train nothing: measure loader and model separately and together, and how many loader workers are enough."),
    ] = False,
    price: Annotated[
        str | None, setting("Price of the machine; adds the cost of a million samples.", shape="2.50/h", group=OUTPUT)
    ] = None,
    loss: Any | None = None,
    workspace: Workspace | None = None,
    **settings: Any,
) -> Result:  # fmt: skip
    """Train on data for epochs: time, accuracy, data wait, memory.

    Every epoch is kept as soon as it is done. With --find-workers nothing is trained and nothing goes into the history.
    """
    per_hour = None if price is None else parse_price(price)  # before anything is trained
    if find_workers:
        of_training = {"epochs": epochs, "price": price, **settings}
        needless = [name for name in ("epochs", "price", *OF_TRAINING) if of_training.get(name)]
        if needless:
            raise UsageError(f"--find-workers trains nothing: leave out --{needless[0].replace('_', '-')}")
    with use(workspace) as opened:
        table = training_table(data, {"epochs": epochs or 3, "batch": batch, **settings})
        specs, working = specs_of(opened, model, inputs, recipes=recipes, loss=loss, **table)
        if find_workers:
            return _found_workers(specs, working)
        try:
            records = train_specs(specs, working)
        except KeyboardInterrupt:
            working.observer.noted("finished epochs are kept in the history")
            raise
        summaries = measurements(records, opened.ceilings_of(records))
        return result_of(records, [summary.changed(per_hour=per_hour) for summary in summaries])


def train_specs(
    specs: Sequence[RunSpec], workspace: Workspace, *, after: After | None = None, keep: bool = True
) -> list[RunRecord]:
    """Checks all specs first, then trains one after the other. Without `keep` nothing goes into the history."""
    records = []
    for spec in workspace.checked(specs):
        with workspace.lock(spec.device):
            door, journal = workspace.door(spec.launch), workspace.journal if keep else NoJournal()
            records.append(train_spec(spec, door, journal, workspace.observer, after=after))
    return records


# The following makes what a training shows.


def result_of(records: Sequence[RunRecord], summaries: Sequence[Measurement]) -> Result:
    """Shows a training with its epochs, and several trainings side by side."""
    rows = [training_row(summary) for summary in summaries]
    trainings = [summary.training for summary in summaries if summary.training is not None]
    epochs = [row for training in trainings for row in epoch_rows(training)]
    is_one = len(rows) == 1
    apart = [name for name in ("model", "recipe", "batch", "data", "seed") if len({row[name] for row in rows}) > 1]
    side_by_side = Table(name="trainings", rows=tuple(rows), columns=(*(apart or ["model"]), *COLUMNS))
    title = " · ".join(str(rows[0][name]) for name in ("model", "stem", "data", "recipe", "device") if rows[0][name])
    by_epoch = Table(name="epochs", title=title if is_one else "", rows=tuple(epochs), columns=("model", "recipe", *EPOCH_COLUMNS)[2 * is_one:])  # fmt: skip
    return Result(
        verb="train",
        headline=_headline(rows),
        tables=(side_by_side.as_detail(), by_epoch) if is_one else (side_by_side, by_epoch.as_detail()),
        blocks=tuple(
            Block(title="", text=f"where the time of {training.model} goes: {message}", is_detail=not is_one)
            for training in trainings
            if (message := where_time_goes(training))
        ),
        next=_next(trainings),
        records=records,
        record_ids=tuple(record.id for record in records),
        exit_code=Exit.FAILED_ROW if any(training.failure for training in trainings) else Exit.DONE,
        picture=lambda: training_figure(trainings),
    )


def training_row(summary: Measurement) -> Row:
    training = summary.training
    assert training is not None
    facts: dict[str, Fact] = {name: getattr(training, name) for name in ("model", "recipe", "batch", "data", "stem", "loss", "seed", "workers", "threads", "state")}  # fmt: skip
    facts |= {
        "device": f"{training.device_name} ({training.device})" if training.device_name else training.device,
        "epochs": len(training.epochs),
        "target_accuracy": training.target_accuracy,
        "bound": bottleneck(training),
    }
    known = [metric_of(summary, name) for name in FIGURES]
    own = [
        figure(getattr(training, name), item=training.item)
        for name, figure in OWN.items()
        if getattr(training, name) is not None
    ]
    shares = [
        Figure(name=f"{name}_share", unit="share", better="neither", doc=SHARE)(share)
        for name, share in training.phase_shares.items()
    ]
    return Row(
        facts=facts,
        metrics=tuple(metric for metric in (*known, *own, *shares) if metric is not None),
        notes=(*training.doubts, *training.notes, *_target(training)),
        failure=training.failure or "",
        record_id=training.record_id,
    )


def _target(training: TrainingSummary) -> Iterator[Note]:
    if training.target_accuracy is not None:
        seconds = training.time_to_target_s
        reached = f"was reached after {format_seconds(seconds)}" if seconds else "was not reached"
        yield note("counted", f"accuracy {format_share(training.target_accuracy)} {reached}", about="target_accuracy")


def bottleneck(training: TrainingSummary) -> str:
    """Returns what limits it if that is known, else the longest phase."""
    if training.bound.label not in ("unknown", "device"):
        return training.bound.label
    shares = training.phase_shares
    longest = max(shares, key=lambda name: shares[name], default=None)
    return f"{longest} {format_share(shares[longest])}" if longest else "unknown"


def _headline(rows: Sequence[Row]) -> Headline:
    """Returns the fastest training, with what it learned."""
    timed = [row for row in rows if row.value("throughput")]
    if not timed:
        return Headline(template="{model} was not trained.", figures={"model": rows[0]["model"]})
    best = max(timed, key=lambda row: row.value("throughput"))
    figures: dict[str, Metric | Fact] = {name: best[name] for name in ("model", "throughput", "epoch_time", "recipe") if name in best}  # fmt: skip
    several = len({row["recipe"] for row in rows}) > 1
    text = "{model} with {recipe}" if several else "{model}"
    text += " is the fastest: it trains at {throughput}" if len(rows) > 1 else " trains at {throughput}"
    text += "; an epoch takes {epoch_time}" if "epoch_time" in best else ""
    if "accuracy" in best:
        figures |= {"accuracy": best["accuracy"], "epochs": counted(int(best.facts["epochs"] or 0), "epoch")}
        text += "; accuracy is {accuracy} after {epochs}"
    if best["bound"] == "data":
        figures["wait"] = best["data_wait"]
        text += "; {wait} of the time it waits for data"
    return Headline(template=f"{text}.", figures=figures)


def _next(trainings: Sequence[TrainingSummary]) -> str:
    unfinished = next(
        (training for training in trainings if training.state in ("interrupted", "failed") and training.epochs), None
    )
    if unfinished is not None:
        done = f"{len(unfinished.epochs)} of {unfinished.planned_epochs} epochs are kept"
        return f"{done} in the history; run the same command again to train them all"
    if any(training.failure for training in trainings):
        return "fix what failed and run the same command again"
    waiting = next((training for training in trainings if training.bound.label == "data"), None)
    if waiting is not None:
        return waiting.fed_by or "redline.train(..., find_workers=True) finds the workers that the data need"
    return next((training.tuned_by for training in trainings if training.tuned_by), None) or "redline report"


# Who waits for whom

RATES = {
    "loader": Figure(name="loader", unit="{item}/s", header="loader alone/s", better="higher"),
    "model": Figure(name="model_alone", unit="{item}/s", header="model alone/s", better="higher"),
    "together": Figure(name="together", unit="{item}/s", header="together/s", better="higher"),
    "plain": Figure(name="without_prefetch", unit="{item}/s", header="without prefetching/s", better="higher"),
}
WAIT = Figure(name="data_wait", unit="share", header="data wait", better="lower")
PARTS = {"loader": "loader alone", "model": "model alone", "together": "together"}


def _found_workers(specs: Sequence[RunSpec], workspace: Workspace) -> Result:
    if len(specs) != 1:
        raise UsageError(f"--find-workers takes one model under one recipe, got {len(specs)}")
    (record,) = train_specs(specs, workspace, after=After(feeds=True, epochs=False), keep=False)
    if record.failure is not None:
        raise BenchError(record.failure.kind, f"{record.failure.stage}: {record.failure.message}")
    return loader_result(record)


def loader_result(record: RunRecord) -> Result:
    """Shows whether the training or its loader waits for the other, and what to do about it."""
    assert record.spec.train is not None
    data, info = record.spec.train.data, record.prepared.data if record.prepared else None
    item = record.prepared.workload.item if record.prepared else None
    is_users = ":" in data.name
    workers = info.workers if info and is_users else data.workers
    together, plain = latest_feed(record, "together"), latest_feed(record, "together", prefetch=False)
    assert together is not None
    parts = {"loader": latest_feed(record, "loader"), "model": latest_feed(record, "model"), "together": together, "plain": plain}  # fmt: skip
    best, ends_it = best_workers(record)
    verdict = "data-bound" if is_data_bound(record) else "not data-bound"
    answer = Row(
        facts={"verdict": verdict, "workers": workers, "best_workers": best, "ends_it": ends_it},
        metrics=(
            *(RATES[name](fed.per_s if fed else None, item=item) for name, fed in parts.items()),
            WAIT(together.wait_share),
        ),
    )
    trials = [
        Row(
            facts={
                "part": PARTS[fed.part],
                "workers": None if fed.part == "model" else workers if is_users else fed.workers,
                "prefetch": fed.prefetch if fed.part == "together" else None,
            },
            metrics=(
                THROUGHPUT(fed.per_s, item=item),
                *([WAIT(fed.wait_share)] if fed.part == "together" else []),
            ),
        )
        for fed in record.feeds
    ]
    figures: dict[str, Metric | Fact] = {
        "verdict": verdict,
        "wait": answer["data_wait"],
        "workers": counted(workers, "loader worker"),
    }
    text = "{verdict}: {wait} of the time is spent waiting for batches with {workers}"
    if plain and plain.per_s:
        figures["prefetch"] = f"{together.per_s / plain.per_s:.2f}×"
        text += "; prefetching brings {prefetch}"
    if verdict == "not data-bound" and together.wait_share > DATA_BOUND_SHARE:
        figures["most"] = format_share(loading_share(record))
        text += "; loading takes {most} at most, so it is the hand-over: loader and model share the processor"
    elif verdict == "data-bound" and best is not None:
        figures |= {"best": counted(best, "worker"), "many": best}
        if ends_it:
            text += "; {best} ends it" if best == 1 else "; {best} end it"
        elif best == workers:
            text += "; no number of workers up to the number of cores makes the training faster"
        else:
            text += "; no number of workers up to the number of cores ends it, {many} are the fastest"
    return Result(
        verb="train",
        headline=Headline(template=f"{text}.", figures=figures),
        tables=(
            Table(name="loader", rows=(answer,), is_detail=True),
            Table(name="trials", title="loader and model", rows=tuple(trials)),
        ),
        next=about_the_loader(record),
    )
