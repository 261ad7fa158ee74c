"""`redline models` and `redline doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from redline.cli.options import Json


def models(
    pattern: Annotated[str | None, typer.Argument(help="Part of a name, or a pattern with *.")] = None,
    json: Json = False,
) -> None:
    """Models that go by name."""
    from redline.cli.inventory import show_models

    show_models(pattern, as_json=json)


def doctor(json: Json = False) -> None:
    """Look at drivers, torch, devices, permissions, compilers, profilers and extras; say how to mend each."""
    from redline.cli.inventory import show_health

    show_health(as_json=json)
