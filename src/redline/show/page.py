"""This module makes whole pages of results, which `redline serve` shows and `--html` writes. Every text is escaped, as none is trusted."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from redline import __version__
from redline.show.result import Link, Result, no_link, web


def static_file(name: str) -> str:
    return (files("redline.show") / "static" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("redline.show"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )


def page(
    title: str,
    *results: Result,
    is_start: bool = False,
    sides: Sequence[str] = (),
    is_file: bool = False,
    link: Link = no_link,
) -> str:
    """Returns a page of a server.

    `is_file` makes one that stands for itself. `sides` are the ids of the records that are compared, on a page that asks for others.
    With `is_start` it tells what is being measured.
    """
    values = {
        "title": title,
        "parts": [(result.verb.replace(" ", "-"), _part(result, link), _picture(result)) for result in results],
        "is_start": is_start,
        "sides": sides,
        "style": static_file("serve.css") if is_file else "",
        "version": __version__,
    }
    return _environment().get_template("page.html.j2").render(values)


def _part(result: Result, link: Link) -> str:
    """Returns HTML without styles in the text, which a strict policy forbids. Quotes in a cell are escaped, so only our own are found."""
    return re.sub(r" style='[^']*'", "", web(result, link))


def _picture(result: Result) -> str:
    if result.picture is None:
        return ""
    file, figure = io.BytesIO(), result.picture()
    figure.savefig(file, format="png", dpi=110)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def written_page(result: Result) -> Any:
    """Returns the result as a page that needs no server. Some results have a page of their own."""
    own = getattr(result, "to_html", None)
    if own is not None:
        return own()
    return page(str(result.headline or result.verb), result, is_file=True)
