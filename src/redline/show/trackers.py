"""This module exports to experiment trackers: Weights & Biases, MLflow and TensorBoard get the figures of a result by their names.

Each row of the first table becomes one run of the tracker, named by what sets it apart, with its facts as configuration. A figure
with an interval has the fields NAME_low and NAME_high beside it, as in CSV, and a doubt is a tag. Rows with an epoch are the steps
of the run they belong to; their figures are called epoch/NAME.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from redline.model.errors import MissingExtra, UnknownName, UsageError
from redline.model.metrics import Fact, Row
from redline.show.result import Result

PROJECT = "redline"
"""This project, experiment or folder is used if the tracker's own environment variable names no other."""
STEP = "epoch"


@dataclass
class Entry:
    """An entry is one run of a tracker."""

    name: str
    facts: Mapping[str, Fact]
    values: dict[str, float]
    doubts: dict[str, str]
    steps: list[tuple[int, dict[str, float]]]


def check_tracker(tracker: str) -> None:
    """Refuses a tracker that is unknown or not installed, before anything is measured."""
    if tracker not in TRACKERS:
        raise UnknownName("tracker", tracker, TRACKERS, f"one of {', '.join(TRACKERS)}")
    if find_spec(tracker) is None:
        raise MissingExtra(f"--log {tracker}", tracker, tracker)


def log_result(result: Result, tracker: str) -> str:
    """Writes the result to a tracker, and returns where it can be seen."""
    check_tracker(tracker)
    entries = entries_of(result)
    if not entries:
        raise UsageError("nothing was measured, so there is nothing to log")
    return TRACKERS[tracker](result.verb, entries)


def entries_of(result: Result) -> list[Entry]:
    rows = [row for row in result.rows if row.metrics and not row.failure]
    varying = [name for name in (rows[0].facts if rows else ()) if len({str(row.facts.get(name)) for row in rows}) > 1]
    epochs = [row for table in result.tables for row in table.rows if isinstance(row.facts.get(STEP), int)]
    entries = []
    for row in rows:
        facts = {name: value for name, value in {**result.about, **row.facts}.items() if value not in (None, "")}
        model = facts.get("model", result.verb)
        apart = [facts[name] for name in varying if facts.get(name, model) != model]
        entries.append(
            Entry(
                name=" · ".join(map(str, (model, *apart))),
                facts=facts,
                values=_values(row),
                doubts={metric.name: str(metric.doubt.code) for metric in row.metrics if metric.doubt is not None},
                steps=[
                    (int(str(epoch[STEP])), _values(epoch, f"{STEP}/"))
                    for epoch in epochs
                    if all(facts.get(name, value) == value for name, value in epoch.facts.items() if name != STEP)
                ],
            )
        )
    return entries


def _values(row: Row, prefix: str = "") -> dict[str, float]:
    """Returns the figures of a row with their intervals; those that are unknown are left out."""
    ends = (("", "value"), ("_low", "low"), ("_high", "high"))
    known = {f"{metric.name}{end}": getattr(metric, field) for metric in row.metrics for end, field in ends}
    return {prefix + name: value for name, value in known.items() if value is not None}


def _to_wandb(verb: str, entries: list[Entry]) -> str:
    wandb: Any = import_module("wandb")
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    where = ""
    for entry in entries:
        run = wandb.init(
            project=project, group=verb, name=entry.name, config=entry.facts,
            tags=[f"doubt:{code}" for code in sorted(set(entry.doubts.values()))], settings=wandb.Settings(silent=True),
        )  # fmt: skip
        for step, values in entry.steps:
            run.log(values, step=step)
        run.summary.update(entry.values)
        where = str(Path(run.dir).parent) if run.offline else run.url
        run.finish()
    return f"project {project}: {where}"


def _to_mlflow(verb: str, entries: list[Entry]) -> str:
    mlflow: Any = import_module("mlflow")
    experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    for entry in entries:
        with mlflow.start_run(run_name=entry.name):
            mlflow.set_tags({"redline.verb": verb, **{f"doubt.{name}": code for name, code in entry.doubts.items()}})
            mlflow.log_params(entry.facts)
            for step, values in entry.steps:
                mlflow.log_metrics(values, step=step)
            mlflow.log_metrics(entry.values)
    return f"experiment {experiment.name} at {mlflow.get_tracking_uri()}"


def _to_tensorboard(verb: str, entries: list[Entry]) -> str:
    summary: Any = import_module("tensorboard.summary")
    folder = Path("runs", PROJECT, time.strftime(f"%Y%m%d-%H%M%S-{verb}"))
    for entry in entries:
        writer = summary.Writer(str(folder / re.sub(r"[^\w.+-]+", "-", entry.name).strip("-")))
        for step, values in [*entry.steps, (0, entry.values)]:
            for name, value in values.items():
                writer.add_scalar(f"redline/{name}", value, step)
        writer.close()
    return str(folder)


TRACKERS: Mapping[str, Callable[[str, list[Entry]], str]] = {
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
    "tensorboard": _to_tensorboard,
}
