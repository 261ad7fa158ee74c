"""`redline train`, and the options of all commands that train on data."""

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
    Models,
    Options,
    Price,
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
    epochs: Annotated[int | None, opt("--epochs", "-e", group=HOW, help="Number of epochs. Default: 3.")] = None,
    recipe: Recipes = None,
    given: Given,
    find_workers: Annotated[
        bool,
        opt(
            "--find-workers",
            group=HOW,
            help="Train nothing: measure loader and model separately and together, and how many loader workers are enough.",
        ),
    ] = False,
    resume: Annotated[bool, opt("--resume", group=HOW, help="Resume this training where it stopped.")] = False,
    price: Price = None,
    plot: Annotated[Path | None, opt(group=OUTPUT, help="Write accuracy over time and speeds as a PNG.")] = None,
    report: Report = None,
    json: Json = False,
) -> int:
    """Train on data for epochs: time, accuracy, data wait, memory.

    Every epoch is kept as soon as it is done; after Ctrl-C or a crash the same command with --resume continues.

    \b
    Examples:
      redline train resnet18 --data cifar10 --folder ~/data -r amp-bf16
      redline train simple_cnn resnet18 transformer
      redline train resnet18 --data cifar10 --folder ~/data --find-workers
    """
    from redline.api.train import train as train_models
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveTrain
    from redline.cli.verb import tell_report
    from redline.show.canvas import check_picture
    from redline.show.folder import check_folder
    from redline.show.terminal import make_console
    from redline.show.train import draw_trainings
    from redline.verbs.report import report_records

    if not model:
        raise UsageError("name at least one model to train, such as resnet18")
    if report is not None:
        check_folder(report)
    if plot is not None:
        check_picture(plot)
    if find_workers:
        of_training = {name: value for name, value in given.items() if name in TRAINING}
        flags = {
            "resume": resume or None,
            "plot": plot,
            "report": report,
            "price": price,
        }
        needless = next(iter(of_training | only_set(epochs=epochs, **flags)), None)
        if needless is not None:
            raise UsageError(f"--find-workers trains nothing: leave out --{needless.replace('_', '-')}")
        return _find_workers(model, data, recipe or ["baseline"], given, json)
    asked = given | only_set(recipes=recipe, epochs=epochs, resume=resume, price=price)
    try:
        with LiveTrain() as observer, Workspace(observer=observer) as workspace:
            result = train_models(model, data=data, **asked, workspace=workspace)
            observer.stop()
            print_json(result.to_json()) if json else make_console().print(result.report())
            if plot is not None:
                draw_trainings(result.rows, plot)
            if report is not None:
                tell_report(report_records(result.records, report, workspace=workspace))
    except KeyboardInterrupt:
        tell("interrupted; finished epochs are kept, and the same command with --resume continues")
        return Exit.INTERRUPTED
    return Exit.FAILED_ROW if result.failed else Exit.DONE


def _find_workers(models: list[str], data: str, recipes: list[str], given: Given, json: bool) -> int:
    from redline.api.train import find_workers
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.show.terminal import make_console

    if len(models) != 1 or len(recipes) != 1:
        raise UsageError("--find-workers takes one model under one recipe")
    with LiveObserver() as observer, Workspace(observer=observer) as workspace:
        result = find_workers(models[0], data=data, recipe=recipes[0], **given, workspace=workspace)
        observer.stop()
    print_json(result.to_json()) if json else make_console().print(result.report())
    return Exit.DONE
