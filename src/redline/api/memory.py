"""`redline.memory`: what a step holds in memory, by kind and by module, and what a recipe saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import msgspec
from rich.console import RenderableType

from redline.analyze.advice import command_line
from redline.api.settings import Settings, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.errors import UsageError
from redline.note import Note, note
from redline.questions import AskMemory, MemoryAnswer
from redline.record import new_id
from redline.report.export import JsonDocument, json_document
from redline.report.memory import MemoryRow, memory_report
from redline.report.notebook import Bars, Shown


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
        if any(spec.workload.task == "generate" for spec in specs):
            raise UsageError(
                "memory looks at a step of inference or training; 'redline run --task generate' tells the memory of weights, "
                "cache and the whole generation"
            )
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
            keep_memory(rows[-1], working)
        return MemoryResult(rows)


KEPT = ".memory.json"
"""How the files end that lie beside the history's traces."""


def keep_memory(row: MemoryRow, workspace: Workspace) -> None:
    """For the dashboard."""
    if workspace.keeps:
        workspace.traces.mkdir(parents=True, exist_ok=True)
        (workspace.traces / f"{new_id()}{KEPT}").write_bytes(msgspec.json.encode(row))


def kept_memories(workspace: Workspace) -> tuple[list[MemoryRow], list[Note]]:
    """What was last seen of each model, task, recipe, batch and device; and which files cannot be read."""
    newest: dict[tuple[Any, ...], MemoryRow] = {}
    unreadable = []
    if not workspace.keeps:
        return [], []
    with workspace.reading() as history:
        folder = history.folder / "traces"
    for path in sorted(folder.glob(f"*{KEPT}")):
        try:
            row = msgspec.json.decode(path.read_bytes(), type=MemoryRow)
        except (OSError, msgspec.DecodeError) as error:
            unreadable.append(note("unreadable", f"left out {path.name}: {error}", about=path.name))
            continue
        newest[row.model, row.task, row.recipe, row.batch, row.device] = row
    return list(newest.values()), unreadable
