"""`redline study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from redline.cli.options import OUTPUT, WHAT, DeviceName, Exit, Json, Models, Recipes, TrialEffort, opt, print_json


def study(
    model: Models = None,
    recipe: Recipes = None,
    batches: Annotated[str, opt("--batches", group=WHAT, help="Batches, separated by commas.")] = "1,8,16,32",
    device: DeviceName = "auto",
    effort: TrialEffort = "quick",
    out: Annotated[Path | None, opt("--out", group=OUTPUT, help="A folder for the table and the two pictures.")] = None,
    json: Json = False,
) -> int:
    """Study precision and compilation: mean and percentile latency, speed-up and memory change, and why one model gains more.

    Without arguments: resnet50 and vit_b_16 under baseline, amp, amp+torchscript and fp16+channels-last+compile.

    \b
    Examples:
      redline study --out study
      redline study resnet18 -r baseline -r channels-last --batches 1,4
    """
    from redline.api.study import MODELS, RECIPES
    from redline.api.study import study as run_study
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.model.errors import UsageError
    from redline.report.folder import check_folder
    from redline.report.study import study_report
    from redline.report.terminal import make_console

    numbers = [word.strip() for word in batches.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in numbers):
        raise UsageError(f"--batches takes whole numbers above 0, separated by commas, got {batches!r}")
    if out is not None:
        check_folder(out)
    with LiveObserver() as observer, Workspace(observer=observer) as workspace:
        result = run_study(
            model or MODELS,
            recipes=recipe or RECIPES,
            batches=[int(word) for word in numbers],
            device=device,
            effort=effort,
            workspace=workspace,
        )
        observer.stop()
    print_json(result.to_json()) if json else make_console().print(study_report(result.rows))
    if out is not None:
        written = ", ".join(path.name for path in result.save(out))
        make_console(stderr=True).print(f"written to {out}: {written}", markup=False)
    return Exit.FAILED_ROW if result.failed else Exit.DONE
