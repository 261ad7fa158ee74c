"""`redline workshop` and `redline checklist`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from redline.cli.options import HOW, OUTPUT, DeviceName, Exit, Json, Model, opt, print_json, tell


def workshop(
    exercise: Annotated[list[int] | None, opt(group=HOW, help="Do only this exercise (1 to 7); repeatable.")] = None,
    quick: Annotated[bool, opt("--quick", group=HOW, help="Small sizes: minutes on a CPU.")] = False,
    resume: Annotated[
        bool, opt("--resume", group=HOW, help="Continue with the exercises that are not done yet.")
    ] = False,
    device: DeviceName = "auto",
    out: Annotated[
        Path, opt("--out", "-o", group=OUTPUT, metavar="DIR", help="Where my_workshop_results.txt and .json go.")
    ] = Path("."),
    json: Json = False,
) -> int:
    """Walk through seven exercises on this machine: baseline, precision, profiler, FLOPs, GPUs, compilation, vendors.

    Each one explains, measures, checks its own checkpoints and answers its questions from your numbers.

    \b
    Examples:
      redline workshop --quick
      redline workshop --exercise 2 --exercise 6
      redline workshop --resume
    """
    from rich.text import Text

    from redline.api.workshop import workshop as walk
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.report.terminal import make_console
    from redline.report.workshop import ExerciseResult, WorkshopResult, exercise_text, heading, outcome

    def say(*lines: str, style: str = "") -> None:
        observer.say(Text("\n".join(lines), style=style), on_stdout=not json)

    def begin(known: WorkshopResult) -> None:
        say(*heading(known))
        if known.exercises:
            numbers = ", ".join(str(found.number) for found in known.exercises)
            say(f"done already: {numbers}; --exercise N does one again")

    def start(number: int, title: str, explain: str) -> None:
        say("", f"Exercise {number}: {title}", style="bold")
        say(explain)

    def show(found: ExerciseResult) -> None:
        say(*exercise_text(found, make_console(stderr=json).width))

    try:
        with LiveObserver() as observer, Workspace(observer=observer) as workspace:
            result = walk(
                exercise or None,
                folder=out,
                quick=quick,
                resume=resume,
                device=device,
                on_begin=begin,
                on_start=start,
                on_exercise=show,
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


def _interrupted(out: Path, quick: bool, device: str) -> str:
    from redline.api.workshop import results_file

    if not results_file(out).exists():
        return "interrupted; nothing was done yet"
    same = [*(["--quick"] if quick else []), *(["--device", device] if device != "auto" else []), "--out", str(out)]
    again = f"{shlex.join(['redline', 'workshop', *same])} --resume"
    return f"interrupted; what is done is kept: '{again}' continues"


def checklist(model: Model, json: Json = False) -> int:
    """Show what has been measured of a model here (measure, analyse, optimise, validate, scale) and what has not.

    \b
    Examples:
      redline checklist resnet50
    """
    from redline.api.workshop import checklist as check
    from redline.report.terminal import make_console
    from redline.report.workshop import checklist_report

    found = check(model)
    print_json(found.to_json()) if json else make_console().print(checklist_report(found))
    return Exit.DONE
