"""`redline workshop`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from redline.cli.options import HOW, OUTPUT, DeviceName, Exit, Json, opt, print_json, tell
from redline.model.errors import UsageError

if TYPE_CHECKING:
    from redline.cli.progress import LiveObserver
    from redline.report.workshop import ExerciseResult, WorkshopResult


def workshop(
    exercise: Annotated[list[int] | None, opt(group=HOW, help="Do only this exercise (1 to 7); repeatable.")] = None,
    quick: Annotated[bool, opt("--quick", group=HOW, help="Small sizes: minutes on a CPU.")] = False,
    resume: Annotated[
        bool, opt("--resume", group=HOW, help="Continue with the exercises that are not done yet.")
    ] = False,
    checklist: Annotated[
        str | None,
        opt(
            group=HOW,
            metavar="MODEL",
            help="Instead: what has been measured of this model here (measure, analyse, optimise, validate, scale), and the "
            "command for what has not.",
        ),
    ] = None,
    device: DeviceName = "auto",
    out: Annotated[
        Path, opt("--out", "-o", group=OUTPUT, metavar="DIR", help="Where my_workshop_results.txt and .json go.")
    ] = Path("."),
    json: Json = False,
) -> int:
    """Walk through seven exercises on this machine.

    They are about a baseline, precision, the profiler, FLOPs, several GPUs, compilation and vendors' profilers. Each one explains, measures, checks its own checkpoints and answers its questions from your numbers.

    \b
    Examples:
      redline workshop --quick
      redline workshop --exercise 2 --exercise 6
      redline workshop --checklist resnet50
    """
    from redline.api.workshop import workshop as walk
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.report.workshop import outcome

    if checklist is not None:
        if exercise or quick or resume:
            raise UsageError("--checklist reads the history and walks through no exercise: leave out the other options")
        return _show_checklist(checklist, json)
    try:
        with LiveObserver() as observer, Workspace(observer=observer) as workspace:
            teacher = _Teacher(observer, on_stdout=not json)
            result = walk(
                exercise or None,
                folder=out,
                quick=quick,
                resume=resume,
                device=device,
                on_begin=teacher.begin,
                on_start=teacher.start,
                on_exercise=teacher.show,
                workspace=workspace,
            )
            observer.stop()
    except KeyboardInterrupt:
        tell(_interrupted(out, quick, device))
        return Exit.INTERRUPTED
    if json:
        print_json(result.to_json())
    tell(f"{outcome(result)}; results in {out / 'my_workshop_results.txt'}")
    return Exit.DONE  # a checkpoint that is not met is part of the answer


class _Teacher:
    """Prints the workshop as it goes: what is done already, each exercise, and what came of it."""

    def __init__(self, observer: LiveObserver, *, on_stdout: bool) -> None:
        self._observer = observer
        self._on_stdout = on_stdout

    def begin(self, known: WorkshopResult) -> None:
        from redline.report.workshop import heading

        self._say(*heading(known))
        if known.exercises:
            numbers = ", ".join(str(found.number) for found in known.exercises)
            self._say(f"done already: {numbers}; --exercise N does one again")

    def start(self, number: int, title: str, explain: str) -> None:
        self._say("", f"Exercise {number}: {title}", style="bold")
        self._say(explain)

    def show(self, found: ExerciseResult) -> None:
        from redline.report.terminal import make_console
        from redline.report.workshop import exercise_text

        self._say(*exercise_text(found, make_console(stderr=not self._on_stdout).width))

    def _say(self, *lines: str, style: str = "") -> None:
        from rich.text import Text

        self._observer.say(Text("\n".join(lines), style=style), on_stdout=self._on_stdout)


def _interrupted(out: Path, quick: bool, device: str) -> str:
    from redline.api.workshop import results_file

    if not results_file(out).exists():
        return "interrupted; nothing was done yet"
    same = [*(["--quick"] if quick else []), *(["--device", device] if device != "auto" else []), "--out", str(out)]
    again = f"{shlex.join(['redline', 'workshop', *same])} --resume"
    return f"interrupted; what is done is kept: '{again}' continues"


def _show_checklist(model: str, json: bool) -> int:
    from redline.api.workshop import checklist
    from redline.report.terminal import make_console
    from redline.report.workshop import checklist_report

    found = checklist(model)
    print_json(found.to_json()) if json else make_console().print(checklist_report(found))
    return Exit.DONE
