"""What is here: models that go by name, and the health of the installation."""

from __future__ import annotations

from redline import api
from redline.cli.document import print_document
from redline.errors import UsageError
from redline.report.inventory import health_report, model_listing
from redline.report.terminal import make_console


def show_models(pattern: str | None, *, as_json: bool) -> None:
    names = api.models(pattern)
    if as_json:
        print_document({"models": names.models, "missing": names.missing})
        return
    make_console().print(model_listing(names))
    if pattern and not names.models:
        raise UsageError(f"no model matches {pattern!r}")


def show_health(*, as_json: bool) -> None:
    items = api.doctor()
    if as_json:
        print_document({"items": items, "ok": all(item.ok is not False for item in items)})
    else:
        make_console().print(health_report(items))
