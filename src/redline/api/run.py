"""`redline.run`: measure models under one or more recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Unpack

import msgspec
from rich.console import RenderableType

from redline.analyze.replicates import replicate_rows
from redline.analyze.summary import CeilingsOf, RunSummary, with_price
from redline.api.settings import Settings, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.launch.torchrun import invitation
from redline.model.errors import UsageError
from redline.model.fields import MOST_REPLICATES, require_range
from redline.model.record import RunRecord
from redline.model.spec import Recipe, RunSpec
from redline.model.units import parse_price
from redline.report.export import JsonDocument, json_document
from redline.report.notebook import Bars, Shown
from redline.report.run import RunReport, speed_bars
from redline.search.run import measure_together


class RunResult(Shown, Sequence[RunSummary]):
    """The rows of a run, with the records they were derived from."""

    def __init__(
        self, records: Sequence[RunRecord], ceilings_of: CeilingsOf | None = None, price: str | None = None
    ) -> None:
        self.records = list(records)
        rows = replicate_rows(self.records, ceilings_of)
        self.rows = rows if price is None else with_price(rows, parse_price(price))
        """One for each thing that was measured, over all its replicates."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def report(self) -> RenderableType:
        return RunReport(self.rows)

    def frame_rows(self) -> Sequence[Any]:
        return self.rows

    def bars(self) -> Bars | None:
        return speed_bars(self.rows)

    @property
    def failed(self) -> bool:
        """Whether any row could not be measured."""
        return any(record.failure is not None or not record.blocks for record in self.records)

    def to_json(self) -> JsonDocument:
        return json_document("run", {"results": self.rows})


@takes_settings
def run(
    model: Any = None,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] = "baseline",
    loss: Any | None = None,
    file: str | Path | None = None,
    trust: bool = False,
    replicates: int = 1,
    price: str | None = None,
    workspace: Workspace | None = None,
    **settings: Unpack[Settings],
) -> RunResult:
    """Measure a model: by name (or several), or a live module with example inputs.

    Several recipes are measured interleaved and compared with the first. `file` is a TOML file with `[[run]]` tables;
    other arguments override it. One of another user's that names code is refused unless `trust` is set. With `replicates` all is measured in so many fresh processes, and intervals cover what
    differs between them. `price` of the machine, such as "2.50/h", adds the cost of a million items. Records go into the workspace's history.
    """
    require_range("replicates", replicates, 1, MOST_REPLICATES)
    if price is not None:
        parse_price(price)  # before anything is measured
    with use(workspace) as opened:
        specs, working = specs_of(opened, model, inputs, recipes=recipes, loss=loss, file=file, trust=trust, **settings)
        records = measure_specs(specs, working, replicates)
        return RunResult(records, opened.ceilings_of(records), price)


def run_step(step: Callable[..., Any], *, workspace: Workspace | None = None, **settings: Any) -> RunResult:
    """Measure a training step of your own, any callable, as it is; `setup`, `teardown` and `batch` as `run` takes them.

    `redline.profile(step)` says where its time goes, and `redline.race` sets it against another.
    """
    if not callable(step):
        raise UsageError(f"run_step measures a function, got {type(step).__name__}")
    return run(step, workspace=workspace, **settings)


def demo(device: str = "auto", *, workspace: Workspace | None = None) -> RunResult:
    """A first look with good defaults for the device."""
    with use(workspace) as opened:
        found = opened.checked(specs_of(opened, "resnet18", device=device)[0])[0].device
        if found == "cpu":
            recipes = ["baseline", "channels-last", "channels-last+compile", "channels-last+compile:freeze"]
            return run("resnet18", batch=4, recipes=recipes, effort="quick", device="cpu", workspace=opened)
        recipes = ["baseline", "amp+channels-last+compile", "fp16+channels-last+compile:reduce-overhead"]
        return run("resnet50", batch=32, recipes=recipes, device=found, workspace=opened)


def measure_specs(specs: Sequence[RunSpec], workspace: Workspace, replicates: int = 1) -> list[RunRecord]:
    """Check all specs first, then measure those of one workload together. Any mistake is raised before the first."""
    specs = workspace.checked(specs)
    workspace.observer.planned(len(specs) * replicates)
    records: list[RunRecord] = []
    for _, together in groupby(specs, key=lambda spec: msgspec.structs.replace(spec, recipe=Recipe())):
        group = list(together)
        here = group[0].ranks if group[0].launch.rendezvous is None else 1
        with workspace.lock(group[0].device, here):
            door = workspace.door(group[0].launch)
            if group[0].launch.rendezvous is not None:
                workspace.observer.noted(invitation(group[0]))
            for replicate in range(replicates):
                if replicates > 1:
                    recipes = [str(spec.recipe) for spec in group]
                    workspace.observer.replicate(replicate + 1, replicates, recipes)
                seed = group[0].seed + replicate  # of the order in which blocks are timed
                records += measure_together(group, door, workspace.journal, workspace.observer, seed=seed)
    return records
