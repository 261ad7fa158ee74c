"""`redline.run`: measure models under one or more recipes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Unpack

import msgspec

from redline.analyze.summary import CeilingsOf, RunSummary, summarize
from redline.api.settings import Settings, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.record import RunRecord
from redline.report.export import export_json
from redline.report.run import run_table_text
from redline.search.group import measure_together
from redline.spec import Recipe, RunSpec


class RunResult(Sequence[RunSummary]):
    """The rows of a run, with the records they were derived from."""

    def __init__(self, records: Sequence[RunRecord], ceilings_of: CeilingsOf | None = None) -> None:
        self.records = list(records)
        self.rows = summarize(self.records, ceilings_of)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __str__(self) -> str:
        return run_table_text(self.rows)

    @property
    def failed(self) -> bool:
        """Whether any row could not be measured."""
        return any(record.failure is not None or not record.blocks for record in self.records)

    def to_json(self) -> str:
        return export_json(self.records, summarize=lambda _: self.rows)


@takes_settings
def run(
    model: Any = None,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] = "baseline",
    loss: Any | None = None,
    file: str | Path | None = None,
    workspace: Workspace | None = None,
    **settings: Unpack[Settings],
) -> RunResult:
    """Measure a model: by name (or several), or a live module with example inputs.

    Several recipes are measured interleaved and compared with the first. `file` is a TOML file with `[[run]]` tables;
    other arguments override it. Records go into the workspace's history.
    """
    with use(workspace) as opened:
        specs, working = specs_of(opened, model, inputs, recipes=recipes, loss=loss, file=file, **settings)
        records = measure_specs(specs, working)
        return RunResult(records, opened.ceilings_of(records))


def demo(device: str = "auto", *, workspace: Workspace | None = None) -> RunResult:
    """A first look with good defaults for the device."""
    with use(workspace) as opened:
        found = opened.checked(specs_of(opened, "resnet18", device=device)[0])[0].device
        if found == "cpu":
            recipes = ["baseline", "channels-last", "channels-last+compile", "channels-last+compile:freeze"]
            return run("resnet18", batch=4, recipes=recipes, effort="quick", device="cpu", workspace=opened)
        recipes = ["baseline", "amp+channels-last+compile", "fp16+channels-last+compile:reduce-overhead"]
        return run("resnet50", batch=32, recipes=recipes, device=found, workspace=opened)


def measure_specs(specs: Sequence[RunSpec], workspace: Workspace) -> list[RunRecord]:
    """Check all specs first, then measure those of one workload together. Any mistake is raised before the first."""
    specs = workspace.checked(specs)
    records: list[RunRecord] = []
    for _, together in groupby(specs, key=lambda spec: msgspec.structs.replace(spec, recipe=Recipe())):
        group = list(together)
        with workspace.lock(group[0].device):
            door = workspace.door(group[0].launch)
            records += measure_together(group, door, workspace.journal, workspace.observer, seed=group[0].seed)
    return records
