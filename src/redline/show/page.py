"""Results as whole pages: what `redline serve` shows, and what `--html` writes. Names are not trusted: every text is escaped."""

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
    """A page of a server. `is_file`: one that stands for itself. `sides`: the ids of the records that are compared, on a page that asks for others. `is_start`: tells what is being measured."""
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
    """Without styles in the text, which a strict policy forbids; quotes in a cell are escaped, so this finds only our own."""
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
