"""`redline.memory`: what a step holds in memory, by kind and by module, and what a recipe saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import msgspec
from rich.console import RenderableType

from redline.analyze.command_line import command_line
from redline.api.settings import Settings, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.protocol import AskMemory, MemoryAnswer
from redline.record import new_id
from redline.report.export import JsonDocument, json_document
from redline.report.memory import memory_report
from redline.report.notebook import Bars, Shown
from redline.spec import Frozen
from redline.work import MemoryUse


class MemoryRow(Frozen):
    """One model under one recipe."""

    model: str
    task: str
    recipe: str
    batch: int | None
    device: str
    use: MemoryUse
    saved_bytes: int | None = None
    """Of the peak, against the first row."""
    compared: str | None = None
    """The command that compares it with bf16; None for a live module."""
    sized: str | None = None
    """The command that finds its largest batch."""


class MemoryResult(Shown, Sequence[MemoryRow]):
    def __init__(self, rows: Sequence[MemoryRow]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def report(self) -> RenderableType:
        return memory_report(self.rows)

    def frame_rows(self) -> Sequence[Any]:
        return self.rows

    def bars(self) -> Bars | None:
        bars = [(f"{row.model} {row.recipe}", row.use.peak_bytes / 2**20, None, None) for row in self.rows]
        return Bars("peak of a step", "MiB", bars)

    def to_json(self) -> JsonDocument:
        """The first row's figures, and every row under `results`."""
        return json_document("memory", {**msgspec.to_builtins(self.rows[0].use), "results": self.rows})


@takes_settings
def memory(
    model: Any,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] = "baseline",
    loss: Any | None = None,
    workspace: Workspace | None = None,
    **settings: Unpack[Settings],
) -> MemoryResult:
    """Run two steps of a model under each recipe and tell whose memory the second one's peak is.

    Where memory runs out, the error names who asked for it and who held the rest, and a snapshot lies beside the history.
    """
    with use(workspace) as opened:
        specs, working = specs_of(opened, model, inputs, recipes=recipes, loss=loss, **settings)
        rows: list[MemoryRow] = []
        for spec in working.checked(specs):
            with working.lock(spec.device):
                question = AskMemory(spec=spec, snapshot=str(working.traces / f"memory-{new_id()}"))
                answer = working.ask(question, MemoryAnswer, spec.launch)
            rows.append(
                MemoryRow(
                    model=spec.workload.model,
                    task=spec.workload.task,
                    recipe=str(spec.recipe),
                    batch=answer.workload.batch,
                    device=answer.environment.device.name,
                    use=answer.use,
                    saved_bytes=rows[0].use.peak_bytes - answer.use.peak_bytes if rows else None,
                    compared=command_line(
                        "memory", spec, batch=spec.workload.batch, recipes=(str(spec.recipe), "amp-bf16")
                    ),
                    sized=command_line("batch", spec) if spec.workload.task in ("infer", "train") else None,
                )
            )
        return MemoryResult(rows)
