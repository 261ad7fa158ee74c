"""The checklist of a model in a terminal and as a document."""

from __future__ import annotations

from typing import Literal

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.recommend.evidence import interval_text
from redline.report.export import JsonDocument, json_document
from redline.report.terminal import Fitted, as_text, make_table
from redline.spec import Frozen, Task

Stage = Literal["measure", "analyse", "optimise", "validate", "scale"]


class Line(msgspec.Struct, frozen=True):
    stage: Stage
    text: str
    done: bool
    command: str
    """What would tick it."""


class Technique(Frozen):
    """A recipe of one switch, with the gain that was measured here."""

    switch: str
    task: Task
    batch: int | None
    ratio: float
    low: float
    high: float | None
    effort: str
    when: str


class Checklist(Frozen):
    model: str
    records: int
    lines: tuple[Line, ...]
    techniques: tuple[Technique, ...]

    def __str__(self) -> str:
        return as_text(checklist_report(self))

    def to_json(self) -> JsonDocument:
        return json_document("checklist", self)


def checklist_report(found: Checklist) -> RenderableType:
    done = sum(line.done for line in found.lines)
    parts: list[RenderableType] = [
        Text(f"{found.model}: {done} of {len(found.lines)} done, from {found.records} records", style="bold")
    ]
    stage = ""
    for line in found.lines:
        if line.stage != stage:
            stage = line.stage
            parts.append(Text(stage, style="bold"))
        parts.append(Text(f"  [{'x' if line.done else ' '}] {line.text}", style="green" if line.done else ""))
        if not line.done:
            parts.append(Text(f"      {line.command}", style="dim"))
    if found.techniques:
        table = make_table(Text("gains measured here, one switch each, against the baseline", style="dim"))
        table.add_column("switch", no_wrap=True)
        table.add_column("task", no_wrap=True)
        table.add_column("gain", justify="right", no_wrap=True)
        table.add_column("effort", overflow="fold")
        table.add_column("when", overflow="fold")
        for each in found.techniques:
            between = f"{each.low:.2f}" if each.high is None else interval_text(each.low, each.high)
            table.add_row(each.switch, each.task, f"{each.ratio:.2f}× ({between})", each.effort, each.when)
        parts.append(Fitted(table))
    return Group(*parts)
