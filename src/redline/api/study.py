"""`redline.study`: precision and compilation over several models and batches, as one measurement."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from rich.console import RenderableType

from redline.api.roofline import device_ceilings
from redline.api.run import RunResult
from redline.api.settings import specs_of
from redline.api.workspace import Workspace, use
from redline.model.spec import Recipe, RunSpec
from redline.report.export import JsonDocument, export_csv, json_document
from redline.report.folder import check_folder, write_text
from redline.report.study import draw_study, study_markdown, study_report, why
from redline.search.study import measure_groups, study_measure
from redline.search.tune.tuner import usual_jobs

MODELS = ("resnet50", "vit_b_16")
RECIPES = ("baseline", "amp", "amp+torchscript", "fp16+channels-last+compile")
BATCHES = (1, 8, 16, 32)


class StudyResult(RunResult):
    """One row per model, recipe and batch; each recipe against the baseline of its model and batch."""

    def report(self) -> RenderableType:
        return study_report(self.rows)

    def to_json(self) -> JsonDocument:
        return json_document("study", {"results": self.rows, "why": why(self.rows)})

    def save(self, folder: str | Path) -> list[Path]:
        """README.md, latency.png, throughput.png, results.csv and results.json in a folder."""
        folder = Path(folder)
        check_folder(folder)
        pictures = draw_study(self.rows, folder)
        by_id = {record.id: record for record in self.records}
        chosen = [by_id[row.record_id] for row in self.rows]
        write_text(folder / "README.md", study_markdown(self.rows))
        write_text(folder / "results.csv", export_csv(chosen, summarize=lambda _: self.rows))
        write_text(folder / "results.json", self.to_json())
        return [*pictures, *(folder / name for name in ("README.md", "results.csv", "results.json"))]


def study(
    models: Sequence[str] = MODELS,
    *,
    recipes: Sequence[str] = RECIPES,
    batches: Sequence[int] = BATCHES,
    device: str = "auto",
    effort: str = "quick",
    workspace: Workspace | None = None,
) -> StudyResult:
    """Measure the recipes of each model and batch interleaved, against the first; the device's ceilings once before."""
    with use(workspace) as opened:
        specs: list[RunSpec] = []
        for model in models:
            for batch in batches:
                settings: dict[str, Any] = {"batch": batch, "device": device, "effort": effort}
                specs += specs_of(opened, model, recipes=list(recipes), **settings)[0]
        checked = [msgspec.structs.replace(spec, measure=study_measure(spec.measure)) for spec in opened.checked(specs)]
        first = checked[0]
        if opened.keeps:
            device_ceilings(first.device, workspace=opened)
        groups = [
            list(each) for _, each in groupby(checked, lambda spec: msgspec.structs.replace(spec, recipe=Recipe()))
        ]
        opened.observer.planned(len(checked))
        with opened.lock(first.device):
            door = opened.door(first.launch)
            records = measure_groups(groups, door, opened.journal, opened.observer, _workers(first))
        return StudyResult(records, opened.ceilings_of(records))


def _workers(spec: RunSpec) -> int:
    """Workers that may be open at the same time: on a GPU most of them wait, so one for each processor."""
    jobs = usual_jobs(spec)
    return jobs if spec.device == "cpu" else 2 * jobs
