"""The workshop in a terminal, and the results file a learner keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from redline.report.terminal import one_line

if TYPE_CHECKING:
    from redline.api.workshop import ExerciseResult, WorkshopResult

MARKS = {True: "[x]", False: "[ ]", None: "[-]"}
RULE = "-" * 72


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
