"""This module makes consoles and plain text, and fits tables into the width that there is."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from redline.model.units import THIN_SPACE, printable

PIPE_WIDTH = 160
"""This is the width if there is no terminal and COLUMNS says nothing. Every column fits in it."""


class SafeConsole(Console):
    """This console shows what a terminal would obey, such as an escape sequence in a model's name, as a question mark."""

    def print(self, *objects: Any, crop: bool = False, **how: Any) -> None:
        """Prints as `Console` does, but whole: a path that is longer than a line goes on in the next."""
        super().print(*objects, crop=crop, **how)

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
        console = SafeConsole(stderr=stderr, highlight=False, width=_asked_width() or PIPE_WIDTH)
    return console


def _asked_width() -> int | None:
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if asked.isdecimal() and int(asked) > 0 else None


def as_text(report: RenderableType) -> str:
    """Returns a report without colours, as wide as it needs to be."""
    # Neither a notebook nor FORCE_COLOR may put control codes into a plain text.
    console = SafeConsole(
        width=PIPE_WIDTH, color_system=None, no_color=True, highlight=False, force_terminal=False, force_jupyter=False
    )
    with console.capture() as captured:
        console.print(report)
    return captured.get()


def make_table(title: Text | None) -> Table:
    return Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False, padding=(0, 1)
    )


class Remark:
    """A remark is a sentence beside a table; its lines are indented below its first word, and a path is never split."""

    def __init__(self, text: str, style: str, *, first: str = "  ") -> None:
        self._text, self._style, self._first = text, style, first

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = textwrap.wrap(
            self._text,
            max(options.max_width, len(self._first) + 1),
            initial_indent=self._first,
            subsequent_indent=" " * len(self._first),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines:
            yield Text(line, style=self._style, no_wrap=True, overflow="ignore")


GAP = 3
"""There are this many characters between two columns, and none behind the last."""
LEAST = 14
"""A column of text keeps this width while others can be hidden instead."""
LONGEST_WORD = 24
"""A word of at most this many characters is kept whole, such as `no-steady-state,`; a longer one, such as a path, is broken before a column
is hidden."""
INDENT = 4
"""The next line of an indented cell is indented by this much more, which is more than its children are."""
_BREAKS = re.compile(r"(?<=[\s+/·_,<])|(?<=:)(?!:)")


class Fitted:
    """This is a table with as many columns as the terminal has room for, which names the columns that it hides.

    Those named as `expendable` may go, in this order; by default all but the first two, from the right. With `keys` none is hidden:
    those that do not fit follow in further tables, each of which begins with so many first columns. Columns of text are wrapped between
    words and switches; numbers are never cut.
    """

    def __init__(self, table: Table, expendable: Sequence[str] | None = None, *, keys: int = 0) -> None:
        self.table = table
        self._names = [str(column.header) for column in table.columns]
        self._expendable = self._names[:1:-1] if expendable is None else expendable
        self._keys = self._names[:keys]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = {str(column.header): column for column in self.table.columns}
        natural = {name: _width(name, column) for name, column in columns.items()}
        least = {name: _least(column, natural[name]) for name, column in columns.items()}
        hidden = self._names
        while hidden:
            shown = list(dict.fromkeys([*self._keys, *hidden]))
            kept = set(shown)
            for name in self._expendable:
                if _taken(least, shown) > options.max_width and name in shown and name not in self._keys:
                    shown.remove(name)
            hidden = [name for name in self._names if name in kept - set(shown)]
            if shown == self._keys and hidden:  # not even one more column fits, so one is shown regardless
                shown, hidden = [*shown, hidden[0]], hidden[1:]
            yield self._made(shown, columns, natural, least, options.max_width)
            if not self._keys:
                break
        caption = f"not shown at this width: {', '.join(reversed(hidden))}" if hidden else ""
        for line in (caption, str(self.table.caption or "")):
            if line:
                yield Text(f"  {line}", style="dim italic")

    def _made(
        self,
        shown: Sequence[str],
        columns: Mapping[str, Column],
        natural: Mapping[str, int],
        least: Mapping[str, int],
        width: int,
    ) -> Table:
        widths = _shared(shown, natural, least, width)
        made = make_table(_title_of(self.table) if shown[0] == self._names[0] else None)
        for name in shown:
            column = columns[name]
            # A number that is wider than the terminal is not cut: it goes on in the next line.
            fits = widths[name] >= natural[name]
            made.add_column(column.header, justify=column.justify, no_wrap=fits, overflow="fold", width=widths[name])
        for row in zip(*(columns[name].cells for name in shown), strict=True):
            made.add_row(*(_wrapped(cell, widths[name]) for name, cell in zip(shown, row, strict=True)))
        return made


def _title_of(table: Table) -> Text | None:
    return table.title if isinstance(table.title, Text) else Text(str(table.title)) if table.title else None


def _plain(cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def _width(name: str, column: Column) -> int:
    return max(len(name), *(len(line) for cell in column.cells for line in _plain(cell).plain.split("\n")), 0)


def _least(column: Column, natural: int) -> int:
    """Returns the width below which a column is hidden. For numbers it is all of it, for text what holds the longest word."""
    if column.justify != "left" or column.no_wrap:
        return natural
    words = (len(word.rstrip()) for cell in column.cells for word in _BREAKS.split(_plain(cell).plain))
    return min(natural, max(column.min_width or LEAST, *(min(length, LONGEST_WORD) for length in words), 0))


def _taken(widths: Mapping[str, int], shown: Sequence[str]) -> int:
    return sum(widths[name] for name in shown) + GAP * (len(shown) - 1)


def _shared(shown: Sequence[str], natural: Mapping[str, int], least: Mapping[str, int], width: int) -> dict[str, int]:
    """Returns the width that each column has: the least it needs, and its part of what is left until it has all it could use."""
    widths = {name: least[name] for name in shown}
    room = width - _taken(widths, shown)
    if room < 0:  # not even that fits, so words are broken
        widths = {name: 1 if least[name] < natural[name] else natural[name] for name in shown}
        room = width - _taken(widths, shown)
    growing = sorted(shown, key=lambda name: natural[name] - widths[name])
    for index, name in enumerate(growing):
        more = max(0, min(natural[name] - widths[name], room // (len(growing) - index)))
        widths[name] += more
        room -= more
    return widths


def _wrapped(cell: RenderableType, width: int) -> Text:
    """Returns the cell in lines that have at most `width` characters. It is broken between words and switches, a longer word anywhere.

    A line that is indented, as in a tree, goes on further to the right than it began.
    """
    text = _plain(cell)
    if len(text.plain) <= width:
        return text
    begins_at = len(text.plain) - len(text.plain.lstrip(" "))
    indent = " " * min(begins_at + INDENT, width // 2) if begins_at else ""
    lines = [text.plain[:begins_at]]
    for piece in (piece for line in text.plain[begins_at:].split("\n") for piece in _BREAKS.split(line)):
        if len(lines[-1]) + len(piece.rstrip()) > width and lines[-1].strip():
            lines.append(indent)
        lines[-1] += piece
        while indent and len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], indent + lines[-1][width:]]
    return Text("\n".join(line.rstrip() for line in lines), style=text.style)


def one_line(text: str, longest: int | None = None) -> str:
    """Returns the text on one line. White space becomes one space, control characters are removed, and the end is kept if it is cut."""
    line = printable(_SPACES.sub(" ", text).strip(" "))
    return line if longest is None or len(line) <= longest else f"{line[: longest - 9]}…{line[-8:]}"


LONGEST_CELL, LONGEST_TEXT = 80, 500
"""A text in Markdown has at most this many characters, in a table and elsewhere; the middle of a longer one is left out."""
_SPACES = re.compile(rf"[^\S{THIN_SPACE}]+")
"""This is the pattern of white space, except for the thin space between the digits of a number."""
_SPECIAL = re.compile(r"([\\`*_\[\]#|~$])")
_LEADING = re.compile(r"^([-+=]|\d+[.)](?=\s|$))")


def markdown_line(form: str, *texts: object) -> str:
    """Returns one line of Markdown. `form` is ours and has a `{}` for each text, which is escaped, because anyone may have written it."""
    return form.format(*(_escaped(str(text), LONGEST_TEXT) for text in texts))


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> list[str]:
    """Returns the lines of a table whose first `left` columns are texts and whose others are numbers; every cell is escaped."""
    rule = ["---" if index < left else "---:" for index in range(len(headers))]
    cells = [[_escaped(str(cell), LONGEST_CELL) for cell in row] for row in (headers, *rows)]
    return ["| " + " | ".join(line) + " |" for line in (cells[0], rule, *cells[1:])]


def _escaped(text: str, longest: int) -> str:
    """Returns the text on one line, which is cut if it is too long; Markdown and HTML are escaped."""
    line = one_line(text, longest).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "&#64;")
    line = _SPECIAL.sub(r"\\\1", line)
    # At the start of a line these would begin a list, a quote or a heading's underline.
    return _LEADING.sub(lambda match: "".join(f"&#{ord(one)};" for one in match.group(1)), line)
