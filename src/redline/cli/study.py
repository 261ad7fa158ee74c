"""`redline study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from redline.cli.options import (
    MEASURED,
    OUTPUT,
    WHAT,
    WORKLOAD,
    Exit,
    Given,
    Json,
    Price,
    Recipes,
    Report,
    Trust,
    only_set,
    opt,
    options_of,
    several,
    takes,
    tell,
)
from redline.cli.run import DECIDED, KEPT, show_grid
from redline.cli.train import DATA_OPTIONS
from redline.model.errors import UsageError
from redline.model.settings import DATA, settings_of
from redline.model.training import TrainSpec

ASKED = several(WORKLOAD | MEASURED) | DATA_OPTIONS | options_of(*settings_of(TrainSpec)) | DECIDED | KEPT


@takes(ASKED)
def study(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="precision, ladder or batch; or a TOML file of your own.", metavar="NAME|FILE"),
    ] = None,
    *,
    model: Annotated[list[str] | None, opt("--model", "-m", group=WHAT, help="In place of the file's models.")] = None,
    recipe: Recipes = None,
    data: Annotated[
        str | None, opt("--data", "-d", group=DATA, help="Train on: cifar10, synthetic, file.py:loaders.")
    ] = None,
    given: Given,
    new: Annotated[Path | None, opt("--new", group=OUTPUT, help="Write a commented example there, and stop.")] = None,
    trust: Trust = False,
    price: Price = None,
    out: Annotated[
        Path | None, opt("--out", group=OUTPUT, help="A folder for the page, the pictures, CSV and JSON.")
    ] = None,
    report: Report = None,
    json: Json = False,
) -> int:
    """Measure an experiment: a question, and the grid that answers it.

    precision: number formats and TorchScript over batches and two models, and why one gains more. ladder: from one CPU
    thread to the best recipe on a GPU. batch: throughput and latency against the batch. Options are over the file's settings.

    \b
    Examples:
      redline study precision --out study
      redline study ladder --effort quick
      redline study --new mine.toml && redline study mine.toml
    """
    from redline.api.study import StudyResult, experiments, new_experiment
    from redline.api.study import study as measure_study
    from redline.api.workspace import Workspace
    from redline.show.folder import check_folder

    if new is not None:
        tell(f"written: {new_experiment(new)}; 'redline study {new}' measures it")
        return Exit.DONE
    if not names:
        raise UsageError(f"name an experiment: {', '.join(experiments())}, or a TOML file (--new FILE.toml writes one)")
    if out is not None:
        check_folder(out)
    if json and len(names) > 1:
        raise UsageError("--json prints one document: name one experiment")
    asked: dict[str, Any] = given | only_set(recipes=recipe, model=model, data=data, trust=trust, price=price)
    codes = []
    for name in names:

        def measure(workspace: Workspace, name: str = name) -> StudyResult:
            result = measure_study(name, **asked, workspace=workspace)
            if out is not None:
                folder = out if len(names) == 1 else out / Path(name).stem
                written = ", ".join(path.name for path in result.save(folder))
                tell(f"written to {folder}: {written}")
            return result

        codes.append(show_grid(measure, report, json=json))
    return max(codes, default=Exit.DONE)
