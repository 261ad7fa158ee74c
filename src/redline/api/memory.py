"""`redline.profile_memory`: what a step holds in memory, by kind and by module, and what a recipe saves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import msgspec
from rich.console import RenderableType

from redline.analyze.advice import command_line
from redline.api.settings import Settings, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.model.errors import BenchError, UsageError
from redline.model.note import Note, note
from redline.model.questions import AskMemory, MemoryAnswer
from redline.model.record import new_id
from redline.model.spec import RunSpec
from redline.show.export import JsonDocument, json_document
from redline.show.memory import MemoryRow, memory_report
from redline.show.notebook import Bars, Shown


class MemoryResult(Shown, Sequence[MemoryRow]):
    """A row per model and recipe; `failures` says of the others why there is none."""

    def __init__(self, rows: Sequence[MemoryRow], failures: Mapping[str, str] | None = None) -> None:
        self.rows = list(rows)
        self.failures = dict(failures or {})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def report(self) -> RenderableType:
        return memory_report(self.rows, self.failures)

    def frame_rows(self) -> Sequence[Any]:
        return self.rows

    def bars(self) -> Bars | None:
        bars = [(f"{row.model} {row.recipe}", row.use.peak_bytes / 2**20, None, None) for row in self.rows]
        return Bars("peak of a step", "MiB", bars)

    def to_json(self) -> JsonDocument:
        """The first row's figures, and every row under `results`."""
        first = msgspec.to_builtins(self.rows[0].use)
        return json_document("memory", {**first, "results": self.rows, "failures": self.failures})


@takes_settings
def profile_memory(
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
                "--memory looks at a step of inference or training; 'redline run --task generate' tells the memory of weights, "
                "cache and the whole generation"
            )
        rows: list[MemoryRow] = []
        failures: dict[str, BenchError] = {}
        for spec in working.checked(specs):
            try:
                row = _row(spec, working, rows)
            except BenchError as error:
                failures[f"{spec.workload.model} {spec.recipe}"] = error  # the others still run
                continue
            rows.append(row)
            keep_memory(row, working)
    if not rows:
        raise next(iter(failures.values()))
    return MemoryResult(rows, {name: str(error) for name, error in failures.items()})


def _row(spec: RunSpec, workspace: Workspace, before: Sequence[MemoryRow]) -> MemoryRow:
    with workspace.lock(spec.device):
        question = AskMemory(spec=spec, snapshot=str(workspace.traces / f"memory-{new_id()}"))
        answer = workspace.ask(question, MemoryAnswer, spec.launch)
    first = next((row for row in before if row.model == spec.workload.model), None)
    return MemoryRow(
        model=spec.workload.model,
        task=spec.workload.task,
        recipe=str(spec.recipe),
        batch=answer.workload.batch,
        device=answer.environment.device.name,
        use=answer.use,
        saved_bytes=first.use.peak_bytes - answer.use.peak_bytes if first is not None else None,
        compared=command_line(
            "profile --memory", spec, batch=spec.workload.batch, recipes=(str(spec.recipe), "amp-bf16")
        ),
        sized=command_line("batch", spec) if spec.workload.task in ("infer", "train") else None,
    )


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
