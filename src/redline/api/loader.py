"""`redline.loader`: does the training wait for its data, and how many loader workers end that?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from rich.console import RenderableType

from redline.analyze.training import LoaderFinding, loader_finding
from redline.api.settings import one_spec, takes_settings
from redline.api.train import DEFAULT_DATA, DataSettings, ModelSettings, train_specs, training_table
from redline.api.workspace import Workspace, use
from redline.errors import BenchError
from redline.record import RunRecord
from redline.report.export import JsonDocument, json_document
from redline.report.notebook import Bars, Shown
from redline.report.train import loader_report
from redline.search.train import After


class LoaderSettings(DataSettings, ModelSettings, total=False):
    """Which data and how they are loaded; which model and where it runs."""


class LoaderResult(Shown):
    """What was found, and the record it was found in."""

    def __init__(self, finding: LoaderFinding, record: RunRecord) -> None:
        self.finding = finding
        self.record = record

    def report(self) -> RenderableType:
        return loader_report(self.finding)

    def frame_rows(self) -> Sequence[Any]:
        return [self.finding]

    def bars(self) -> Bars | None:
        found = self.finding
        named = (("loader", found.loader_per_s), ("model", found.model_per_s), ("together", found.together_per_s))
        return Bars("who waits for whom", "samples per second", [(name, value, None, None) for name, value in named])

    def to_json(self) -> JsonDocument:
        return json_document("loader", self.finding)


@takes_settings
def loader(
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
    finding = loader_finding(record)
    assert finding is not None
    return LoaderResult(finding, record)
