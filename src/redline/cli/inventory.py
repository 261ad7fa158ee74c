"""What is here: models that go by name, and the health of the installation."""

from __future__ import annotations

from redline import api
from redline.cli.document import print_document
from redline.errors import UsageError, closest
from redline.report.inventory import health_report, model_listing
from redline.report.terminal import make_console


def show_models(pattern: str | None, *, as_json: bool) -> None:
    names = api.models(pattern)
    if as_json:
        print_document({"models": names.models, "missing": names.missing})
    if pattern and not names.models:
        close = closest(pattern, (model.name for model in api.models().models))
        told = "; did you mean {}?".format(" or ".join(close)) if close else ""
        raise UsageError(f"no model matches {pattern!r}{told}")
    if not as_json:
        make_console().print(model_listing(names))


def show_health(*, as_json: bool) -> None:
    items = api.doctor()
    if as_json:
        print_document({"items": items, "ok": all(item.ok is not False for item in items)})
    else:
        make_console().print(health_report(items))
