"""Results in a notebook (tables and a picture as HTML, a data frame, a figure), and a bar while a cell measures."""

from __future__ import annotations

import html
import importlib
import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from redline.analyze.statistics import Interval
from redline.model.errors import UsageError
from redline.model.protocol import Progress
from redline.model.record import RunRecord
from redline.model.units import printable
from redline.search.observer import Observer
from redline.show.canvas import COLOURS, data_url, label_text, new_figure, save_figure
from redline.show.course import Course, ended_words, interval_words, stage_words
from redline.show.terminal import Fitted, as_text

WIDE = 400
"""Characters: a notebook scrolls sideways, so no column is hidden."""
MOST_BARS = 24


class Bars(NamedTuple):
    """The picture of a result: one bar for each of its rows."""

    title: str
    unit: str
    bars: Sequence[tuple[str, float, float | None, float | None]]
    """Label, value, and the interval where there is one."""


class Shown:
    """A result that a notebook shows as tables and a picture, `print` as plain text, and pandas as a frame."""

    def report(self) -> RenderableType:
        """What the command prints."""
        raise NotImplementedError

    def frame_rows(self) -> Sequence[Any]:
        """One struct or mapping for each row of the data frame."""
        raise NotImplementedError

    def bars(self) -> Bars | None:
        """What to draw; None where there is nothing to compare."""
        return None

    def __str__(self) -> str:
        return as_text(self.report())

    def _repr_html_(self) -> str:
        picture = self.figure()
        drawn = "" if picture is None else f'<img alt="" style="max-width:100%" src="{data_url(picture)}">'
        return f'<div class="redline">{"".join(html_of(self.report()))}{drawn}</div>'

    def to_dataframe(self) -> Any:
        """The rows as a pandas data frame; nested fields become columns such as `latency_s.p50`."""
        try:
            pandas: Any = importlib.import_module("pandas")
        except ImportError:
            raise UsageError("to_dataframe needs pandas: pip install pandas") from None
        return pandas.DataFrame([dict(_flat(msgspec.to_builtins(row))) for row in self.frame_rows()])

    def figure(self) -> Any:
        """A matplotlib figure of the rows; None where there is nothing to draw."""
        found = self.bars()
        return None if found is None or not found.bars else _drawn(found)

    def plot(self, path: str | Path | None = None) -> Any:
        """The figure, also written to a file where a path is given; raises where there is nothing to draw."""
        picture = self.figure()
        if picture is None:
            raise UsageError("there is nothing to draw here: no row has a number to compare")
        if path is not None:
            save_figure(picture, Path(path))
        return picture


def html_of(report: RenderableType) -> Iterator[str]:
    """The tables of a report as HTML tables, its lines as paragraphs; every text is escaped."""
    console = Console(width=WIDE, file=io.StringIO(), force_terminal=False, force_jupyter=False)
    for part in _parts(report, console):
        if isinstance(part, Table):
            yield from _html_table(part, console)
        else:
            text = "".join(segment.text for segment in console.render(part) if not segment.control).rstrip()
            style = "font-weight:600" if isinstance(part, Text) and "bold" in str(part.style) else ""
            yield f'<p style="margin:.2em 0;white-space:pre-wrap;{style}">{_escaped(text)}</p>' if text else ""


def _parts(report: RenderableType, console: Console) -> Iterator[RenderableType]:
    if isinstance(report, Group):
        for part in report.renderables:
            yield from _parts(part, console)
    elif isinstance(report, Fitted):
        yield report.table
    elif isinstance(report, Table | Text | str):
        yield report
    elif hasattr(report, "__rich_console__"):
        inner: Any
        for inner in report.__rich_console__(console, console.options):
            yield from _parts(inner, console)
    else:
        yield report


def _html_table(table: Table, console: Console) -> Iterator[str]:
    def told(cell: RenderableType) -> str:
        text = cell.plain if isinstance(cell, Text) else cell if isinstance(cell, str) else as_text(cell)
        return _escaped(text.strip())

    aligned = [f"text-align:{'right' if column.justify == 'right' else 'left'}" for column in table.columns]
    if table.title:
        yield f'<p style="margin:.6em 0 .2em;font-weight:600">{told(table.title)}</p>'
    yield "<table>"
    if table.show_header and any(str(column.header) for column in table.columns):
        cells = zip(table.columns, aligned, strict=True)
        yield f"<tr>{''.join(f'<th style={style!r}>{told(column.header)}</th>' for column, style in cells)}</tr>"
    for row in zip(*(column.cells for column in table.columns), strict=True):
        yield f"<tr>{''.join(f'<td style={style!r}>{told(cell)}</td>' for cell, style in zip(row, aligned, strict=True))}</tr>"
    yield "</table>"


def _escaped(text: str) -> str:
    return html.escape("\n".join(map(printable, text.split("\n"))))


def _flat(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, each in value.items():
        if isinstance(each, Mapping) and each:
            yield from _flat(each, f"{above}{name}.")
        else:
            yield f"{above}{name}", each


def _drawn(found: Bars) -> Any:
    shown = list(found.bars)[:MOST_BARS]
    figure, axes = new_figure(7.6, 1.2 + 0.36 * len(shown))
    for index, (_, value, low, high) in enumerate(shown):
        reach = None if low is None or high is None else [[max(0.0, value - low)], [max(0.0, high - value)]]
        axes.barh(index, value, xerr=reach, color=COLOURS[0] if index else "#5c6573", error_kw={"capsize": 3})
    axes.set_yticks(range(len(shown)), [label_text(label) for label, *_ in shown], fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(label_text(found.unit))
    axes.set_title(label_text(found.title, 90), fontsize=10.5, loc="left")
    return figure


PERIOD_S = 0.25
"""The page is written over this often at most."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; nothing is imported to find out."""
    shell = sys.modules.get("IPython")
    running: Any = shell.get_ipython() if shell is not None else None
    return running is not None and getattr(running, "kernel", None) is not None


def display_in_place() -> Callable[[str], None]:
    """What writes HTML below the running cell, each time over what it wrote before."""
    shell: Any = importlib.import_module("IPython.display")
    handle: Any = shell.display(shell.HTML(""), display_id=True)
    return lambda page: handle.update(shell.HTML(page))


class NotebookProgress(Observer):
    """A bar below the cell, with one line that says what is happening; it is gone when the result comes."""

    def __init__(
        self,
        display: Callable[[], Callable[[str], None]] = display_in_place,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._display = display
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._show: Callable[[str], None] | None = None
        self._course = Course(self._clock)
        self._shown_at = -math.inf

    def planned(self, records: int) -> None:
        if self._course.whole and self._course.done == self._course.whole:
            self.ended()  # a workspace may serve several cells, each with a bar of its own
        self._course.planned(records)

    def noted(self, line: str) -> None:
        self._draw(line)

    def asked(self, progress: Progress) -> None:
        self._draw(stage_words(progress))

    def waiting(self, holder: str) -> None:
        self._draw(f"waiting for the GPU: {holder} is using it")

    def opened(self, record: RunRecord) -> None:
        self._course.opened(record)

    def progress(self, record: RunRecord, progress: Progress) -> None:
        self._draw(f"{record.spec.workload.model} {record.spec.recipe}: {stage_words(progress)}")

    def measured(self, record: RunRecord, rounds: int, interval: Interval | None, target: float) -> None:
        words = interval_words(rounds, interval, target)
        self._draw(f"{record.spec.workload.model} {record.spec.recipe}: {words}")

    def closed(self, record: RunRecord) -> None:
        self._course.closed(record)
        self._draw(f"{record.spec.workload.model} {record.spec.recipe}: {ended_words(record)}", at_once=True)

    def ended(self) -> None:
        """The result follows: the display makes room for it, and what is measured next gets its own."""
        if self._show is not None:
            self._show("")
        self._begin()

    def _draw(self, words: str, *, at_once: bool = False) -> None:
        now = self._clock()
        if now - self._shown_at < PERIOD_S and not at_once:
            return
        self._shown_at = now
        if self._show is None:
            self._show = self._display()
        course = self._course
        bar = f'<progress value="{course.done}" max="{course.whole}"></progress> ' if course.whole else ""
        line = html.escape(printable(" ".join(", ".join(filter(None, (course.told, words))).splitlines())))
        self._show(f"<div>{bar}{line}</div>")
