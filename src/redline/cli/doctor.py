"""`redline models` and `redline doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from redline.cli.options import Exit, Json, print_json
from redline.model.errors import UsageError, closest


def models(
    pattern: Annotated[str | None, typer.Argument(help="Part of a name, or a pattern with *.")] = None,
    json: Json = False,
) -> int:
    """List the models that can be measured by name.

    \b
    Examples:
      redline models resnet
      redline models 'timm:convnext*'
    """
    from redline.api.doctor import models as list_models
    from redline.api.workspace import Workspace
    from redline.report.doctor import model_listing
    from redline.report.export import json_document
    from redline.report.terminal import make_console

    with Workspace() as workspace:
        names = list_models(pattern, workspace=workspace)
        if json:
            print_json(json_document("models", {"models": names.models, "missing": names.missing}))
        if pattern and not names.models:
            close = closest(pattern, (model.name for model in list_models(workspace=workspace).models))
            told = "; did you mean {}?".format(" or ".join(close)) if close else ""
            raise UsageError(f"no model matches {pattern!r}{told}")
    if not json:
        make_console().print(model_listing(names))
    return Exit.DONE


def doctor(json: Json = False) -> int:
    """Check drivers, torch, devices, profilers; say how to fix each.

    Permissions, compilers and optional packages are checked too.

    \b
    Examples:
      redline doctor
    """
    from redline.api.doctor import doctor as examine_machine
    from redline.report.doctor import health_report
    from redline.report.export import json_document
    from redline.report.terminal import make_console

    items = examine_machine()
    if json:
        print_json(json_document("doctor", {"items": items, "ok": all(item.ok is not False for item in items)}))
    else:
        make_console().print(health_report(items))
    return Exit.DONE
