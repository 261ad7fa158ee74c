"""`redline checklist`."""

from __future__ import annotations

from redline.cli.options import Exit, Json, Model, print_json


def checklist(model: Model, json: Json = False) -> int:
    """Show what has been measured of a model here (measure, analyse, optimise, validate, scale) and what has not.

    \b
    Examples:
      redline checklist resnet50
    """
    from redline.api.checklist import checklist as check
    from redline.report.checklist import checklist_report
    from redline.report.terminal import make_console

    found = check(model)
    print_json(found.to_json()) if json else make_console().print(checklist_report(found))
    return Exit.DONE
