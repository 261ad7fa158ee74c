"""The workshop in a terminal, the results file a learner keeps, and the checklist of a model."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Literal

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.recommend.evidence import interval_text
from redline.model.fields import Frozen
from redline.model.spec import Task
from redline.report.export import JsonDocument, json_document
from redline.report.terminal import Fitted, as_text, make_table, one_line

MARKS = {True: "[x]", False: "[ ]", None: "[-]"}
RULE = "-" * 72
FILE_WIDTH = 100
"""Where the lines of the results file are broken."""


class Check(Frozen):
    """A checkpoint; None where it could not be looked at."""

    name: str
    passed: bool | None
    seen: str
    explain: str = ""
    """What a failed one means and what to do."""


class Answer(Frozen):
    question: str
    answer: str


class ExerciseResult(Frozen):
    number: int
    title: str
    explain: str
    figures: dict[str, str] = {}
    values: dict[str, float] = {}
    """The same figures as numbers, in SI units."""
    checks: tuple[Check, ...] = ()
    answers: tuple[Answer, ...] = ()
    skipped: str | None = None
    """Why it could not be done here."""
    example: str | None = None
    """What one would see elsewhere; not measured here."""

    @property
    def passed(self) -> bool:
        return self.skipped is None and all(check.passed is not False for check in self.checks)

    def __str__(self) -> str:
        return "\n".join([f"Exercise {self.number}: {self.title}", RULE, *exercise_text(self)])


class WorkshopResult(Frozen):
    device: str
    device_name: str
    model: str
    batch: int
    quick: bool
    exercises: tuple[ExerciseResult, ...] = ()

    def __str__(self) -> str:
        return results_text(self)

    def to_json(self) -> JsonDocument:
        return json_document("workshop", self)


def exercise_text(found: ExerciseResult, width: int = FILE_WIDTH) -> Iterator[str]:
    """Figures, checkpoints with what a failed one means, and the questions with their answers."""
    if found.skipped is not None:
        yield from _broken("  ", f"skipped: {found.skipped}", width)
        if found.example is not None:
            yield from _broken("  ", f"example (not measured here): {found.example}", width)
        return
    room = max((len(name) for name in found.figures), default=0)
    for name, value in found.figures.items():
        yield from _broken(f"  {one_line(name):<{room}}  ", value, width)
    for check in found.checks:
        yield from _broken(f"  {MARKS[check.passed]} ", f"{check.name}: {check.seen}", width)
        if check.passed is False and check.explain:
            yield from _broken("      ", check.explain, width)
    for answer in found.answers:
        yield from _broken("  ", answer.question, width)
        yield from _broken("      ", answer.answer, width)


def _broken(start: str, text: str, width: int) -> list[str]:
    """The text in lines of this width at most, all of them below its first word."""
    indent = " " * min(len(start), width // 2)
    lines = textwrap.wrap(
        one_line(text),
        width,
        initial_indent=start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [start.rstrip()]


def heading(result: WorkshopResult) -> list[str]:
    """What all exercises are about."""
    return [
        f"device: {one_line(result.device_name)} ({result.device})",
        f"model: {result.model}, batch {result.batch}{', quick' if result.quick else ''}",
    ]


def outcome(result: WorkshopResult) -> str:
    """How far the learner has come, in one line."""
    done = [found for found in result.exercises if found.skipped is None]
    skipped = len(result.exercises) - len(done)
    checks = [check.passed for found in done for check in found.checks if check.passed is not None]
    told = f"{len(done)} of {len(result.exercises)} exercises done{f', {skipped} skipped' if skipped else ''}"
    return f"{told}; {sum(checks)} of {len(checks)} checkpoints met"


def results_text(result: WorkshopResult) -> str:
    lines = ["My workshop results", *heading(result), ""]
    for found in result.exercises:
        lines += [str(found), ""]
    return "\n".join(lines)


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
