"""The workshop in a terminal, and the results file a learner keeps."""

from __future__ import annotations

from collections.abc import Iterator

from redline.report.export import JsonDocument, json_document
from redline.report.terminal import one_line
from redline.spec import Frozen

MARKS = {True: "[x]", False: "[ ]", None: "[-]"}
RULE = "-" * 72


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


def exercise_text(found: ExerciseResult) -> Iterator[str]:
    """Figures, checkpoints with what a failed one means, and the questions with their answers."""
    if found.skipped is not None:
        yield f"skipped: {one_line(found.skipped)}"
        if found.example is not None:
            yield f"example (not measured here): {one_line(found.example)}"
        return
    width = max((len(name) for name in found.figures), default=0)
    for name, value in found.figures.items():
        yield f"  {one_line(name):<{width}}  {one_line(value)}"
    for check in found.checks:
        yield f"  {MARKS[check.passed]} {check.name}: {one_line(check.seen)}"
        if check.passed is False and check.explain:
            yield f"      {check.explain}"
    for answer in found.answers:
        yield f"  {answer.question} {one_line(answer.answer)}"


def results_text(result: WorkshopResult) -> str:
    lines = [
        "My workshop results",
        f"device: {one_line(result.device_name)} ({result.device})",
        f"model: {result.model}, batch {result.batch}{', quick' if result.quick else ''}",
        "",
    ]
    for found in result.exercises:
        lines += [f"Exercise {found.number}: {found.title}", RULE, *exercise_text(found), ""]
    return "\n".join(lines)
