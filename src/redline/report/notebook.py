"""Results in a notebook (tables and a picture as HTML, a data frame, a figure), and live progress while a cell measures."""

from __future__ import annotations

import base64
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

from redline.analyze.pairs import Pair
from redline.analyze.statistics import Interval
from redline.model.errors import UsageError
from redline.model.protocol import Progress
from redline.model.record import RunRecord
from redline.model.training import Epoch
from redline.model.units import format_seconds, printable
from redline.report.canvas import COLOURS, label_text, new_figure, save_figure
from redline.report.course import Course, ended_words, replicate_words, stage_words
from redline.report.terminal import Fitted, as_text
from redline.search.observer import Observer

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
        drawn = "" if picture is None else f'<img alt="" style="max-width:100%" src="{_data_url(picture)}">'
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


def _data_url(figure: Any) -> str:
    held = io.BytesIO()
    figure.savefig(held, dpi=110, format="png")
    return f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"


PERIOD_S = 0.25
"""The page is written over this often at most."""
MOST_LINES = 12

Show = Callable[[str], None]


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; nothing is imported to find out."""
    shell = sys.modules.get("IPython")
    running: Any = shell.get_ipython() if shell is not None else None
    return running is not None and getattr(running, "kernel", None) is not None


def running_cell() -> object:
    """What tells one cell from the next."""
    shell = sys.modules.get("IPython")
    running: Any = shell.get_ipython() if shell is not None else None
    return getattr(running, "execution_count", None)


def display_in_place() -> Show:
    """What writes HTML below the running cell, each time over what it wrote before."""
    shell: Any = importlib.import_module("IPython.display")
    handle: Any = shell.display(shell.HTML(""), display_id=True)
    return lambda page: handle.update(shell.HTML(page))


class NotebookProgress(Observer):
    """`display` makes room below a cell and returns what writes into it; a workspace may serve several cells."""

    def __init__(
        self,
        display: Callable[[], Show] = display_in_place,
        clock: Callable[[], float] = time.monotonic,
        cell: Callable[[], object] = running_cell,
    ) -> None:
        self._display = display
        self._show: Show | None = None
        self._clock = clock
        self._cell = cell
        self._of_cell: object = None
        self._shown_at = -math.inf
        self.course = Course(clock)
        self._lines: dict[str, tuple[str, str]] = {}
        """By record: its name and what it is doing."""
        self._head = ""

    def planned(self, records: int) -> None:
        self._turn_page()
        self.course.planned(records)

    def noted(self, line: str) -> None:
        self._set_head(line)

    def asked(self, progress: Progress) -> None:
        self._set_head(stage_words(progress))

    def waiting(self, holder: str) -> None:
        self._set_head(f"waiting for the GPU: {holder} is using it")

    def replicate(self, number: int, planned: int, recipes: Sequence[str]) -> None:
        self._set_head(replicate_words(number, planned))

    def standing(self, pairs: Sequence[Pair]) -> None:
        decided = sum(pair.verdict != "inconclusive" for pair in pairs)
        self._set_head(f"{decided} of {len(pairs)} pairs decided")

    def stage(self, words: str) -> None:
        self._set_head(words)

    def attempting(self, recipe: str, number: int, why: str) -> None:
        self._set_head(f"trial {number}: {recipe} ({why})")

    def leads(self, recipe: str, ratio: float) -> None:
        self._set_head(f"leader: {recipe}, {ratio:.2f}× the baseline")

    def opened(self, record: RunRecord) -> None:
        self._turn_page()
        self.course.opened(record)
        self._tell(record, "opening a worker")

    def progress(self, record: RunRecord, progress: Progress) -> None:
        self.course.entered(record, progress.stage)
        if progress.training is not None:
            now = progress.training
            steps = f" of {now.steps}" if now.steps else ""
            self._tell(record, f"epoch {now.epoch} of {now.epochs}, step {now.step}{steps}")
            return
        self._tell(record, stage_words(progress))

    def measured(self, record: RunRecord, rounds: int, interval: Interval | None, target: float) -> None:
        self._tell(record, self.course.measured(record, str(record.spec.recipe), rounds, interval, target))

    def epoch(self, record: RunRecord, epoch: Epoch) -> None:
        self._tell(record, f"epoch {epoch.number}: {format_seconds(epoch.seconds)}")

    def closed(self, record: RunRecord) -> None:
        self.course.closed(record)
        self._shown_at = -math.inf  # results appear at once
        self._tell(record, f"{'✗' if record.failure else '✓'} {ended_words(record)}")

    def ended(self) -> None:
        """The result follows: the display makes room for it."""
        if self._show is not None:
            self._show("")
        self._of_cell = None
        self._turn_page()

    def _turn_page(self) -> None:
        """A new cell begins with an empty display."""
        cell = self._cell()
        if cell != self._of_cell:
            self._of_cell, self._show = cell, None
            self.course = Course(self._clock)
            self._lines.clear()
            self._head = ""

    def _set_head(self, words: str) -> None:
        self._turn_page()
        self._head = words
        self._draw()

    def _tell(self, record: RunRecord, words: str) -> None:
        batch = f" batch {record.spec.workload.batch}" if record.spec.workload.batch else ""
        self._lines[record.id] = f"{record.spec.workload.model} {record.spec.recipe}{batch}", words
        self._draw()

    def _draw(self) -> None:
        now = self._clock()
        if now - self._shown_at < PERIOD_S:
            return
        self._shown_at = now
        if self._show is None:
            self._show = self._display()
        self._show(self.page())

    def page(self) -> str:
        """The newest lines as a table, and above it how far everything is."""
        head = ", ".join(part for part in (self.course.told, self._head) if part)
        rows = "".join(
            f'<tr><td style="text-align:left">{_cell(name)}</td><td style="text-align:left">{_cell(words)}</td></tr>'
            for name, words in list(self._lines.values())[-MOST_LINES:]
        )
        return f'<div class="redline-progress"><p style="margin:.2em 0">{_cell(head)}</p><table>{rows}</table></div>'


def _cell(text: str) -> str:
    return html.escape(printable(" ".join(text.splitlines())))
