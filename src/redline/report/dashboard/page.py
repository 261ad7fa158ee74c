"""One HTML file that needs nothing else: style, script, library and data lie inside it.

plotly.js is kept gzipped, which makes the page 3 MB smaller; the browser unpacks it. A content policy with the scripts'
own hashes lets nothing else run, whatever a model is called.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from redline import __version__
from redline.report.contents import Contents
from redline.report.dashboard.cards import cards_of
from redline.report.dashboard.environment import places_of
from redline.report.dashboard.payload import as_json, payload_of
from redline.report.dashboard.sections import sections_of
from redline.report.dashboard.tiles import tiles_of
from redline.report.method import METHOD

SCRIPTS = ("data.js", "theme.js", "filters.js", "plots.js", "charts.js", "table.js", "main.js")
"""In this order: each may use those before it."""
STYLE = "style.css"


def dashboard(contents: Contents) -> str:
    payload = payload_of(contents)
    script = _script()
    library, packed = _library()
    # Names are anyone's to write: everything the template fills in is escaped, and the data is no markup at all.
    environment = Environment(
        loader=PackageLoader("redline.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("dashboard.html.j2").render(
        contents=contents,
        sections=sections_of(payload),
        tiles=tiles_of(contents),
        advice=cards_of(contents),
        places=places_of(contents.records),
        method=METHOD,
        version=__version__,
        policy=_policy(script, library),
        style=Markup(_static(STYLE)),
        script=Markup(script),
        packed=Markup(packed),
        data=Markup(as_json(payload)),
    )


def _policy(*scripts: str) -> str:
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _script() -> str:
    parts = "\n".join(_static(name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}\n}})();'


def _static(name: str) -> str:
    return (files("redline.report.dashboard") / "static" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _library() -> tuple[str, str]:
    """plotly.js as text, and gzipped in base64."""
    source: Any = files("plotly") / "package_data" / "plotly.min.js"
    # A browser reads a script's line ends as plain ones; the hash must be of the same text.
    text: str = source.read_text(encoding="utf-8").replace("\r\n", "\n").replace("\r", "\n")
    packed = gzip.compress(text.encode(), compresslevel=9, mtime=0)
    return text, base64.b64encode(packed).decode()
