"""`redline workshop`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from redline.cli.options import HOW, OUTPUT, DeviceName, Exit, Json, opt, print_json, tell


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
    from redline.api.workshop import workshop as walk
    from redline.report.terminal import make_console
    from redline.report.workshop import exercise_text

    console = make_console(stderr=json)

    def start(number: int, title: str, explain: str) -> None:
        console.print(f"\nExercise {number}: {title}", style="bold", markup=False)
        console.print(explain, markup=False)

    result = walk(
        exercise or None,
        folder=out,
        quick=quick,
        resume=resume,
        device=device,
        on_start=start,
        on_exercise=lambda found: console.print("\n".join(exercise_text(found)), markup=False, highlight=False),
    )
    if json:
        print_json(result.to_json())
    done = sum(found.skipped is None for found in result.exercises)
    tell(f"{done} of {len(result.exercises)} exercises done; results in {out / 'my_workshop_results.txt'}")
    return Exit.DONE  # a checkpoint that is not met is part of the answer
