"""Packages that only some steps need: named where they are missing, imported where they are used."""

from __future__ import annotations

from importlib.util import find_spec

from redline.errors import MissingExtra


def missing_extra(package: str, extra: str) -> str | None:
    """Why a step cannot be had without `package`, or None where it is installed. Nothing is imported."""
    return None if find_spec(package) else str(MissingExtra("it", package, extra))
