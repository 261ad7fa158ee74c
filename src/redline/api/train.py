"""`redline.train`: epochs on data, with losses, accuracy and where the time goes; and `redline.find_workers`: does the training
wait for its data, and how many loader workers would fix it?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

import msgspec
from rich.console import RenderableType

from redline.analyze.summary import CeilingsOf, cost_per_million
from redline.analyze.train import LoaderSummary, TrainingSummary, loader_summary, training_of
from redline.api.settings import one_spec, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.model.errors import BenchError, UsageError
from redline.model.record import RunRecord
from redline.model.spec import RunSpec
from redline.model.spec_table import training_table
from redline.model.units import parse_price
from redline.search.observer import NoJournal
from redline.search.train import After, train_spec
from redline.show.export import JsonDocument, json_document
from redline.show.notebook import Bars, Shown
from redline.show.train import accuracy_remarks, loader_report, train_report

DEFAULT_DATA = "synthetic-learnable"
NAMED = 3
"""Settings that are named where a training is not the one to resume."""
LOOKED_BACK = 50
"""Records among which a training that was cut off is looked for."""


class DataSettings(TypedDict, total=False):
    """Which data, and how they reach the device: the fields of `DataSpec`."""

    folder: str | None
    train_samples: int | None
    val_samples: int | None
    workers: int
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int
    prefetch: bool
    on_device: bool
    augment: Literal["none", "host", "device"]
    download: bool
    loader_timeout_s: float


class ModelSettings(TypedDict, total=False):
    """Which model, and where it runs."""

    batch: int | None
    image_size: int | None
    classes: int | None
    stem: Literal["imagenet", "cifar"] | None
    optimizer: Literal["sgd", "adam", "adamw"]
    device: str
    threads: int | None
    seed: int
    max_memory: str | int | None
    launch: Mapping[str, Any]


class TrainSettings(DataSettings, ModelSettings, total=False):
    """And how it is trained: the fields of `TrainSpec`."""

    learning_rate: float | None
    weight_decay: float
    schedule: Literal["constant", "cosine", "one-cycle"]
    target_accuracy: float | None
    last_batch: Literal["run", "drop"]
    max_seconds: float | None
    deterministic: bool


class TrainResult(Shown, Sequence[TrainingSummary]):
    """One row per training, with the records they were derived from."""

    def __init__(
        self, records: Sequence[RunRecord], ceilings_of: CeilingsOf | None = None, price: str | None = None
    ) -> None:
        self.records = list(records)
        known = ceilings_of or (lambda _: None)
        rows = [training_of(record, known(record)) for record in self.records]
        self.rows = rows if price is None else [_priced(row, parse_price(price)) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def report(self) -> RenderableType:
        return train_report(self.rows)

    def frame_rows(self) -> Sequence[Any]:
        return [epoch for row in self.rows for epoch in row.epochs]

    def bars(self) -> Bars | None:
        timed = [row for row in self.rows if row.samples_per_s]
        bars = [(f"{row.model} {row.recipe}", row.samples_per_s or 0.0, None, None) for row in timed]
        return Bars("speed of training", "samples per second", bars)

    @property
    def failed(self) -> bool:
        return any(record.failure is not None for record in self.records)

    def to_json(self) -> JsonDocument:
        """One training is a document of its own; several are a list under `trainings`."""
        return json_document(
            "train",
            self.rows[0] if len(self.rows) == 1 else {"trainings": self.rows, "remarks": accuracy_remarks(self.rows)},
        )


@takes_settings
def train(
    model: Any,
    inputs: Any | None = None,
    *,
    data: str = DEFAULT_DATA,
    epochs: int = 3,
    recipes: str | Iterable[str] = "baseline",
    loss: Any | None = None,
    resume: bool = False,
    price: str | None = None,
    workspace: Workspace | None = None,
    **settings: Unpack[TrainSettings],
) -> TrainResult:
    """Train a model (by name, several, or a live module with example inputs) on data, one recipe after the other.

    `data`: cifar10 or imagefolder with a `folder`, synthetic, synthetic-learnable, or `file.py:loaders`. `resume` goes on
    with a training of the same call that was cut off.
    """
    if price is not None:
        parse_price(price)  # before anything is trained
    with use(workspace) as opened:
        table = training_table(data, {"epochs": epochs, **settings})
        specs, working = specs_of(opened, model, inputs, recipes=recipes, loss=loss, **table)
        records = train_specs(specs, working, resume=resume)
        return TrainResult(records, opened.ceilings_of(records), price)


def _priced(row: TrainingSummary, per_hour: float) -> TrainingSummary:
    return msgspec.structs.replace(row, cost_per_million=cost_per_million(row.samples_per_s, per_hour))


def train_specs(
    specs: Sequence[RunSpec],
    workspace: Workspace,
    *,
    resume: bool = False,
    after: After | None = None,
    keep: bool = True,
) -> list[RunRecord]:
    """Check all specs first, then train one after the other. `keep` False: nothing goes into the history."""
    specs = workspace.checked(specs)
    known = [_to_resume(spec, workspace) for spec in specs] if resume else [None] * len(specs)
    if resume and not any(known):
        raise UsageError(
            f"no training of this command was begun before{_nearest(specs[0], workspace)}: leave out --resume"
        )
    records = []
    for spec, before in zip(specs, known, strict=True):
        if before is not None and before.stopped in ("target", "ceiling"):
            records.append(before)  # of several trainings some may be done
            continue
        with workspace.lock(spec.device):
            records.append(_trained(spec, before, workspace, after, keep))
    return records


def _trained(
    spec: RunSpec, before: RunRecord | None, workspace: Workspace, after: After | None, keep: bool
) -> RunRecord:
    return train_spec(
        spec,
        workspace.door(spec.launch),
        workspace.journal if keep else NoJournal(),
        workspace.observer,
        checkpoints=workspace.history.folder / "checkpoints" if keep and workspace.keeps else None,
        going_on=before,
        after=after,
    )


def _to_resume(spec: RunSpec, workspace: Workspace) -> RunRecord | None:
    """The newest training of this spec, done or not; None where there is none."""
    if not workspace.keeps:
        raise UsageError("a training is resumed from the history, and this workspace keeps none")
    history = workspace.history
    for row in history.rows(model=spec.workload.model, task="train", recipe=str(spec.recipe), limit=LOOKED_BACK):
        record = history.load(row.id)
        if record.spec != spec:
            continue
        if row.status == "running":
            raise UsageError(f"training {row.id[:13]} is still running: wait for it, or stop it first")
        return record
    return None


def _nearest(spec: RunSpec, workspace: Workspace) -> str:
    """In what the newest training of the same model differs, as the end of a sentence; empty where there is none."""
    for row in workspace.history.rows(model=spec.workload.model, task="train", limit=LOOKED_BACK):
        other = workspace.history.load(row.id).spec
        if other.train is None:
            continue
        asked, had = (dict(_flat(msgspec.to_builtins(each))) for each in (spec, other))
        changed = [name for name in asked | had if asked.get(name) != had.get(name)]
        told = ", ".join(f"{name} {had.get(name)} and not {asked.get(name)}" for name in changed[:NAMED])
        more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
        return f" (the newest of this model has {told}{more})" if told else ""
    return ""


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a spec by their own names, without the tables they stand in."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, key)
    else:
        yield name, value


class LoaderSettings(DataSettings, ModelSettings, total=False):
    """Which data and how they are loaded; which model and where it runs."""


class LoaderResult(Shown):
    """What was found, and the record it was found in."""

    def __init__(self, summary: LoaderSummary, record: RunRecord) -> None:
        self.summary = summary
        self.record = record

    def report(self) -> RenderableType:
        return loader_report(self.summary)

    def frame_rows(self) -> Sequence[Any]:
        return [self.summary]

    def bars(self) -> Bars | None:
        found = self.summary
        named = (("loader", found.loader_per_s), ("model", found.model_per_s), ("together", found.together_per_s))
        return Bars("who waits for whom", "samples per second", [(name, value, None, None) for name, value in named])

    def to_json(self) -> JsonDocument:
        return json_document("loader", self.summary)


@takes_settings
def find_workers(
    model: Any,
    inputs: Any | None = None,
    *,
    data: str = DEFAULT_DATA,
    recipe: str = "baseline",
    loss: Any | None = None,
    workspace: Workspace | None = None,
    **settings: Unpack[LoaderSettings],
) -> LoaderResult:
    """Measure the loader alone, the model alone on data that are there, and both together, with and without prefetching.

    Where the training waits for its data, the number of workers is searched that ends it. Nothing is trained and nothing
    goes into the history. A worker that fails raises `BenchError`.
    """
    with use(workspace) as opened:
        table = training_table(data, settings)
        spec, working = one_spec(opened, "the loader's measurement", model, inputs, recipes=recipe, loss=loss, **table)
        (record,) = train_specs([spec], working, after=After(feeds=True, epochs=False), keep=False)
    if record.failure is not None:
        raise BenchError(record.failure.kind, f"{record.failure.stage}: {record.failure.message}")
    summary = loader_summary(record)
    assert summary is not None
    return LoaderResult(summary, record)
