"""Consoles, plain text and the style of tables."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from redline.units import printable

PIPE_WIDTH = 160
"""Where there is no terminal to measure: wide enough for every column."""


class SafeConsole(Console):
    """Shows what a terminal would obey, such as an escape sequence in a model's name, as a question mark."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None and not segment.text.isprintable():
                text = "\n".join(map(printable, segment.text.split("\n")))
                yield Segment(text, segment.style)
            else:
                yield segment


def make_console(*, stderr: bool = False) -> Console:
    console = SafeConsole(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console = SafeConsole(stderr=stderr, highlight=False, width=PIPE_WIDTH)
    return console


def as_text(report: RenderableType) -> str:
    """A report without colours, as wide as it needs to be."""
    console = SafeConsole(width=PIPE_WIDTH, no_color=True, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(report)
    return captured.get()


def plain_table(title: str) -> Table:
    return make_table(Text(title, style="dim"))


def make_table(title: Text | None) -> Table:
    return Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False, padding=(0, 1)
    )


def one_line(text: str, longest: int | None = None) -> str:
    """The text on one line: white space becomes one space, control characters are removed; the end is kept when it is cut."""
    line = printable(" ".join(text.split()))
    return line if longest is None or len(line) <= longest else f"{line[: longest - 9]}…{line[-8:]}"


LONGEST = 80
_SPECIAL = re.compile(r"([\\`*_\[\]#|~$])")
_LEADING = re.compile(r"^([-+=]|\d+[.)](?=\s|$))")


def escaped(text: str, longest: int | None = None) -> str:
    """On one line, cut where it is too long, with Markdown and HTML escaped."""
    line = one_line(text, longest).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "&#64;")
    line = _SPECIAL.sub(r"\\\1", line)
    # At the start of a line these would begin a list, a quote or a heading's underline.
    return _LEADING.sub(lambda match: "".join(f"&#{ord(one)};" for one in match.group(1)), line)


def cell(text: str) -> str:
    return escaped(text, LONGEST)


def table(headers: list[str], rows: list[list[str]], *, left: int = 1) -> list[str]:
    """Lines of a table whose first `left` columns are texts and whose others are numbers; cells are escaped already."""
    rule = ["---" if place < left else "---:" for place in range(len(headers))]
    return ["| " + " | ".join(line) + " |" for line in (headers, rule, *rows)]
