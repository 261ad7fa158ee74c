"""`redline loader`."""

from __future__ import annotations

from redline.cli.options import ISOLATED, Exit, Given, Json, Model, Recipe, print_json, takes
from redline.cli.train import BATCH, DATA_OPTIONS, TRAINED_MODEL, DataName, data_settings


@takes(DATA_OPTIONS | BATCH | TRAINED_MODEL | ISOLATED)
def loader(
    *,
    model: Model = "resnet18",
    data: DataName = "synthetic-learnable",
    recipe: Recipe = None,
    given: Given,
    json: Json = False,
) -> int:
    """Measure loader and model separately and together: is the training data-bound, and how many workers would end that?

    \b
    Examples:
      redline loader resnet18 --data cifar10 --folder ~/data --batch 256 -r amp-bf16+channels-last
      redline loader resnet50 --data imagefolder --folder ~/pictures --workers 4
    """
    from redline.api.loader import loader as measure_loader
    from redline.api.workspace import Workspace
    from redline.cli.progress import LiveObserver
    from redline.report.terminal import make_console
    from redline.report.train import loader_report

    with LiveObserver() as observer, Workspace(observer=observer) as workspace:
        result = measure_loader(
            model, data=data, recipe=recipe or "baseline", **data_settings(given), workspace=workspace
        )
        observer.stop()
    print_json(result.to_json()) if json else make_console().print(loader_report(result.finding))
    return Exit.DONE
