"""The paper everything is printed on: consoles, plain text and the look of tables."""

from __future__ import annotations

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 160
"""Where there is no terminal to measure: wide enough for every column."""


def make_console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)
    return console


def as_text(report: RenderableType) -> str:
    """A report without colours, as wide as it needs to be."""
    console = Console(width=PIPE_WIDTH, no_color=True, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(report)
    return captured.get()


def plain_table(title: str) -> Table:
    return make_table(Text(title, style="dim"))


def make_table(title: Text | None) -> Table:
    return Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False, padding=(0, 1)
    )
