"""`redline train` and `redline loader`, and the options of all commands that train on data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from redline.cli.options import (
    ANY_BATCH,
    HOW,
    ISOLATED,
    OUTPUT,
    WHAT,
    Exit,
    Given,
    Json,
    Model,
    Models,
    Options,
    Price,
    Recipe,
    Recipes,
    Report,
    only_set,
    opt,
    options_of,
    print_json,
    takes,
    tell,
)
from redline.model.errors import UsageError
from redline.model.settings import DATA, settings_of
from redline.model.training import DataSpec, TrainSpec

DATA_OPTIONS: Options = options_of(*settings_of(DataSpec))
"""Which data, and how they reach the device."""

TRAINED_MODEL: Options = {
    name: option
    for name, option in ANY_BATCH.items()
    if name not in ("task", "sequence_length", "prompt", "new_tokens")
}
"""Which model is trained, and where, apart from its batch."""

BATCH: Options = {
    "batch": Annotated[int | None, opt("--batch", "-b", group=WHAT, help="Samples per step. Default: 128.")]
}

DataName = Annotated[
    str,
    opt(
        "--data",
        "-d",
        group=DATA,
        help="cifar10, imagefolder, synthetic, synthetic-learnable, or your own as file.py:loaders.",
    ),
]

TRAINING: Options = options_of(*(name for name in settings_of(TrainSpec) if name != "epochs"))


@takes(DATA_OPTIONS | BATCH | TRAINED_MODEL | TRAINING | ISOLATED)
def train(
    *,
    model: Models = None,
    data: DataName = "synthetic-learnable",
    epochs: Annotated[int, opt("--epochs", "-e", group=HOW, help="Number of epochs.")] = 3,
    recipe: Recipes = None,
    given: Given,
    resume: Annotated[bool, opt("--resume", group=HOW, help="Resume this training where it stopped.")] = False,
    diagnose: Annotated[
        bool, opt("--diagnose", group=HOW, help="Also measure loader and model separately and together.")
    ] = False,
    price: Price = None,
    compare: Annotated[bool, opt("--compare", group=HOW, help="Show several models in one table and picture.")] = False,
    plot: Annotated[Path | None, opt(group=OUTPUT, help="Write accuracy over time and speeds as a PNG.")] = None,
    report: Report = None,
    json: Json = False,
) -> int:
    """Train on data for epochs: time, accuracy, data wait, memory.

    Every epoch is kept as soon as it is done; after Ctrl-C or a crash the same command with --resume continues.

    \b
    Examples:
      redline train resnet18 --data cifar10 --folder ~/data -r amp-bf16
      redline train simple_cnn resnet18 transformer --compare
    """
    from redline.api.report import report_records
    from redline.api.train import train as train_models
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveTrain
    from redline.cli.report import tell_report
    from redline.report.canvas import check_picture
    from redline.report.folder import check_folder
    from redline.report.terminal import make_console
    from redline.report.train import draw_trainings, train_report

    if not model:
        raise UsageError("name at least one model to train, such as resnet18")
    if compare and len(model) < 2:
        raise UsageError("--compare sets several models side by side: name two or more")
    if report is not None:
        check_folder(report)
    if plot is not None:
        check_picture(plot)
    asked = given | only_set(recipes=recipe, resume=resume, diagnose=diagnose, price=price)
    try:
        with LiveTrain() as observer, Workspace(observer=observer) as workspace:
            result = train_models(model, data=data, epochs=epochs, **asked, workspace=workspace)
            observer.stop()
            shown = train_report(result.rows, compare=compare)
            print_json(result.to_json()) if json else make_console().print(shown)
            if plot is not None:
                draw_trainings(result.rows, plot)
            if report is not None:
                tell_report(report_records(result.records, report, workspace=workspace))
    except KeyboardInterrupt:
        tell("interrupted; finished epochs are kept, and the same command with --resume continues")
        return Exit.INTERRUPTED
    return Exit.FAILED_ROW if result.failed else Exit.DONE


@takes(DATA_OPTIONS | BATCH | TRAINED_MODEL | ISOLATED)
def loader(
    *,
    model: Model = "resnet18",
    data: DataName = "synthetic-learnable",
    recipe: Recipe = None,
    given: Given,
    json: Json = False,
) -> int:
    """Measure loader and model separately and together: is the training data-bound, and how many loader workers would fix it?

    \b
    Examples:
      redline loader resnet18 --data cifar10 --folder ~/data --batch 256
    """
    from redline.api.train import loader as measure_loader
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.report.terminal import make_console
    from redline.report.train import loader_report

    with LiveObserver() as observer, Workspace(observer=observer) as workspace:
        result = measure_loader(model, data=data, recipe=recipe or "baseline", **given, workspace=workspace)
        observer.stop()
    print_json(result.to_json()) if json else make_console().print(loader_report(result.summary))
    return Exit.DONE
