"""`redline doctor`."""

from __future__ import annotations

from redline.cli.options import Exit, Json, print_json


def doctor(json: Json = False) -> int:
    """Check drivers, torch, devices, profilers; say how to fix each.

    Permissions, compilers and optional packages are checked too.

    \b
    Examples:
      redline doctor
    """
    from redline.api.doctor import doctor as examine_machine
    from redline.show.doctor import health_report
    from redline.show.export import json_document
    from redline.show.terminal import make_console

    items = examine_machine()
    if json:
        print_json(json_document("doctor", {"items": items, "ok": all(item.ok is not False for item in items)}))
    else:
        make_console().print(health_report(items))
    return Exit.DONE
