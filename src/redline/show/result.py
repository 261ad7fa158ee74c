"""A result has five printers: a terminal, Markdown, HTML, CSV and JSON. None of them knows a verb or computes a figure."""

from __future__ import annotations

import csv
import html
import importlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from redline.model.errors import UsageError
from redline.model.metrics import Block, Fact, Headline, Row, Table, disturbances, plain
from redline.model.note import Note
from redline.model.record import RunRecord
from redline.model.units import counted, printable
from redline.show.canvas import data_url, save_figure
from redline.show.export import JsonDocument, harmless, safe_document
from redline.show.terminal import Fitted, Remark, as_text, make_table, markdown_line, markdown_table

SCHEMA = 3
"""This is the version of the JSON document. It is raised when a field changes its meaning or goes away."""
WHOLE_NAME = 28
"""This many characters of a row's name are kept on one line: in a narrow terminal, columns are left out before a name is folded."""
MOST_COLUMNS = 7
"""A person reads this many columns without -v."""
MOST_NOTES = 3
"""A person reads this many notes without -v; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A result is what a verb found: the answer, what it rests on, what to know about it, and what to do next.

    `print` shows it as the command does, and a notebook shows tables. `to_dataframe` returns a pandas frame, and `to_json` returns what
    `--json` prints.
    """

    verb: str
    headline: Headline | None = None
    tables: tuple[Table, ...] = ()
    about: Mapping[str, Fact] = field(default_factory=dict)
    """All rows share these conditions: model, task, device, versions."""
    notes: tuple[Note, ...] = ()
    """The most important note comes first."""
    blocks: tuple[Block, ...] = ()
    next: str = ""
    """It is one command, or one sentence if no command helps."""
    records: Sequence[RunRecord] = ()
    """These records are behind the rows, if the verb measures."""
    record_ids: tuple[str, ...] = ()
    exit_code: int = 0
    picture: Callable[[], Any] | None = None
    """It draws the figure of this result; None if there is nothing to draw."""

    def table(self, name: str) -> Table:
        for table in self.tables:
            if table.name == name:
                return table
        raise KeyError(f"{self.verb} has no table {name!r}; it has {', '.join(table.name for table in self.tables)}")

    @property
    def rows(self) -> tuple[Row, ...]:
        """Returns the rows of the first table."""
        return self.tables[0].rows if self.tables else ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """Returns the row that has this number in the first table, or several for a slice."""
        return self.rows[index]

    def __str__(self) -> str:
        return as_text(terminal(self))

    def __repr__(self) -> str:
        return f"<redline.{self.verb}: {self.headline or f'{len(self.rows)} rows'}>"

    def _repr_html_(self) -> str:
        drawn = "" if self.picture is None else f'<img alt="" style="max-width:100%" src="{data_url(self.picture())}">'
        return web(self) + drawn

    def to_json(self) -> JsonDocument:
        """Returns what `--json` prints."""
        return document(self)

    def to_dataframe(self, table: str | None = None) -> Any:
        """Returns a pandas data frame that has the rows of a table, by default of the first."""
        try:
            pandas: Any = importlib.import_module("pandas")
        except ImportError:
            raise UsageError("to_dataframe needs pandas: pip install pandas") from None
        return pandas.DataFrame(
            columns_of(self.table(table) if table is not None else self.tables[0]) if self.tables else {}
        )

    def plot(self, path: str | Path | None = None) -> Any:
        """Returns the figure of this result, and also writes it as a picture if a path is given."""
        if self.picture is None:
            raise UsageError("there is nothing to draw here: no row has a number to compare")
        figure = self.picture()
        if path is not None:
            save_figure(figure, Path(path))
        return figure


# A terminal


def terminal(result: Result, *, verbose: bool = False, quiet: bool = False) -> RenderableType:
    """Returns what a terminal shows: the answer, the tables, at most three notes, and one command to go on with.

    With `quiet` it is the answer alone; with `verbose` it has every column, every table and every note.
    """
    parts: list[RenderableType] = [Text(str(result.headline), style="bold")] if result.headline is not None else []
    if quiet:
        return Group(*parts)
    shown = [table for table in result.tables if table.rows and (verbose or not table.is_detail)]
    for table in shown:
        parts += [Text(table.title, style="bold")] if table.title else []
        if table.is_list:
            parts += _paragraphs(table)
            continue
        parts += [terminal_table(table, verbose=verbose), *_row_remarks(table)]
    parts += [
        Text(f"{block.title}\n{block.text}" if block.title else block.text, no_wrap=True, overflow="ignore")
        for block in result.blocks
        if verbose or not block.is_detail
    ]
    if hidden := [table.name.replace("_", " ") for table in result.tables if table.rows and table not in shown]:
        parts.append(Remark(f"more tables with -v: {', '.join(hidden)}", "dim"))
    parts += _note_lines(result, shown, verbose=verbose)
    if result.next:
        parts.append(Remark(f"next: {result.next}", "bold", first=""))
    return Group(*parts)


def _paragraphs(table: Table) -> Iterator[RenderableType]:
    """Yields each row as sentences: what it is with its figures, then what is said of it. Each of the other facts has a line."""
    for number, row in enumerate(table.rows, 1):
        (_, first), (_, said), *others = row.facts.items()
        figures = ", ".join(f"{metric.header} {metric}" for metric in row.metrics)
        name = f"{first} ({figures})" if figures else str(first)
        yield Remark(f"{name}: {said}", "yellow", first=f"{number}. ")
        yield from (Remark(f"{fact}: {value}", "bold", first="   ") for fact, value in others if value)


def terminal_table(table: Table, *, verbose: bool = False) -> RenderableType:
    """Returns a table of at most seven columns. With `verbose` it has all, and those that do not fit beside the others stand below them."""
    shown = [name for name in table.columns if name in table.names][:MOST_COLUMNS] or list(table.names)
    names = list(table.names) if verbose else shown
    made = make_table(None)
    for name in names:
        is_number = table.is_number(name) and name != names[0]
        made.add_column(
            table.header(name),
            justify="right" if is_number else "left",
            no_wrap=is_number,
            min_width=WHOLE_NAME if name == names[0] else None,
        )
    rows = [row for row in table.rows if verbose or not row.is_detail]
    for row in rows:
        cells = [row.cell(name) for name in names]
        cells[0] = "  " * row.depth + cells[0]
        style = "red" if row.failure else ""
        made.add_row(Text(cells[0], style=style), *map(Text, cells[1:]))
    if left := len(table.rows) - len(rows):
        made.caption = f"{counted(left, 'more row')} with -v"
    # The columns that matter least are last, so they are left out from the right if the terminal is narrow.
    keys = len([name for name in table.keys if name in names])
    return Fitted(made, [table.header(name) for name in reversed(names[1:])], keys=keys if verbose else 0)


def _row_remarks(table: Table) -> Iterator[RenderableType]:
    for row in table.rows:
        if row.failure:
            yield Remark(f"{table.called(row)}: {row.failure}", "red")


def _all_notes(result: Result, shown: Sequence[Table]) -> tuple[list[str], list[str]]:
    """Returns one note of each kind, and those that say the same of other rows.

    Notes on what disturbed the figures come first, then the notes of the whole, then those of single rows.
    """
    notes = [("", note) for note in (*disturbances(row for table in shown for row in table.rows), *result.notes)]
    notes += [(table.called(row), note) for table in shown for row in table.rows for note in row.notes]
    first, again = dict[str, str](), []
    for about, note in dict.fromkeys(notes):
        line = f"{about}: {note}" if about else str(note)
        if first.setdefault(note.code, line) != line:
            again.append(line)
    return list(first.values()), again


def _note_lines(result: Result, tables: Sequence[Table], *, verbose: bool) -> Iterator[RenderableType]:
    notes = [line for kind in _all_notes(result, tables) for line in kind]
    shown = notes if verbose else notes[:MOST_NOTES]
    for line in shown:
        yield Remark(line, "yellow")
    if left := len(notes) - len(shown):
        yield Text(f"  {left} more with -v", style="dim")


# Markdown and HTML


def markdown(result: Result) -> str:
    lines = [markdown_line("**{}**", result.headline), ""] if result.headline is not None else []
    for table in result.tables:
        if not table.rows:
            continue
        names = table.names
        headers = [table.header(name) for name in names]
        rows = [[row.cell(name) for name in names] for row in table.rows]
        left = next((at for at, name in enumerate(names) if table.is_number(name) and at), len(names))
        lines += [markdown_line("### {}", table.title), ""] if table.title else []
        lines += [*markdown_table(headers, rows, left=left), ""]
        lines += [markdown_line("- {}: {}", table.called(row), row.failure) for row in table.rows if row.failure]
    for block in result.blocks:
        lines += [markdown_line("### {}", block.title), ""] if block.title else []
        lines += [*(f"    {printable(line)}" for line in block.text.splitlines()), ""]
    lines += [markdown_line("- {}", line) for notes in _all_notes(result, result.tables) for line in notes]
    lines += ["", f"Next: `{printable(result.next).replace('`', '')}`"] if result.next else []
    return "\n".join(lines).rstrip() + "\n"


Link = Callable[[Table, Row], str]
"""Returns the address of the page about a row, or nothing if there is none."""


def no_link(table: Table, row: Row) -> str:
    return ""


def web(result: Result, link: Link = no_link) -> str:
    """Returns the result as a piece of HTML: tables are tables, and every text is escaped."""
    parts = (
        [f"<p class='headline'><strong>{_safe(str(result.headline))}</strong></p>"]
        if result.headline is not None
        else []
    )
    parts += [web_table(table, link) for table in result.tables if table.rows]
    for block in result.blocks:
        parts.append(f"{f'<h3>{_safe(block.title)}</h3>' if block.title else ''}<pre>{_safe(block.text)}</pre>")
    notes = [line for kind in _all_notes(result, result.tables) for line in kind]
    parts += [f"<ul class='notes'>{''.join(f'<li>{_safe(line)}</li>' for line in notes)}</ul>"] if notes else []
    parts += [f"<p class='next'>next: <code>{_safe(result.next)}</code></p>"] if result.next else []
    return f"<div class='redline'>{''.join(parts)}</div>"


def web_table(table: Table, link: Link = no_link) -> str:
    """Returns a table that has the columns of a terminal, and all of them behind a fold. A single row is a list of names and values."""
    title = f"<h3>{_safe(table.title)}</h3>" if table.title else ""
    if len(table.rows) == 1 and len(table.names) > MOST_COLUMNS:
        (row,) = table.rows
        texts = [_safe(row.cell(name)) for name in table.names]
        texts[0] = _linked(texts[0], link(table, row)) + _safe(f": {row.failure}" if row.failure else "")
        pairs = zip(table.names, texts, strict=True)
        items = (f"<div><dt>{_safe(table.header(name))}</dt><dd>{text}</dd></div>" for name, text in pairs)
        return f"{title}<dl class='row'>{''.join(items)}</dl>"
    brief = [name for name in table.columns if name in table.names][:MOST_COLUMNS] or list(table.names)
    shown = f"{title}{_html_table(table, brief, link)}"
    if len(brief) < len(table.names):
        whole = _html_table(table, list(table.names), link)
        shown += f"<details><summary>all {len(table.names)} columns</summary>{whole}</details>"
    return (
        f"<details><summary>{_safe(table.title or table.name)}</summary>{shown}</details>" if table.is_detail else shown
    )


def _html_table(table: Table, names: Sequence[str], link: Link) -> str:
    headers = [_safe(table.header(name)) for name in names]
    kinds = [
        "class='n' style='text-align:right'" if table.is_number(name) and at else "style='text-align:left'"
        for at, name in enumerate(names)
    ]
    head = "".join(f"<th scope='col' {kind}>{header}</th>" for header, kind in zip(headers, kinds, strict=True))
    body = []
    for row in table.rows:
        cells = [_safe(row.cell(name)) for name in names]
        cells[0] = "\u2003" * row.depth + cells[0] + _safe(f": {row.failure}" if row.failure else "")
        cells[0] = _linked(cells[0], link(table, row))
        lines = zip(headers, kinds, cells, strict=True)
        body.append("".join(f"<td data-label='{header}' {kind}>{cell}</td>" for header, kind, cell in lines))
    rows = "".join(f"<tr>{line}</tr>" for line in body)
    return f"<div class='scroll' tabindex='0'><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


def _linked(text: str, address: str) -> str:
    return f"<a href='{_safe(address)}'>{text}</a>" if address else text


def _safe(text: str) -> str:
    return html.escape("\n".join(map(printable, text.split("\n"))))


# CSV and JSON


def columns_of(table: Table) -> dict[str, list[Any]]:
    """Returns a table as columns of plain values, for CSV, data frames and pages. Facts are first, then figures with intervals and doubts.

    `throughput_low` and `throughput_high` are the interval of `throughput`, and `throughput_doubt` is the code of the doubt about it.
    """
    rows = table.rows
    found: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for row in rows for name in row.facts):
        found[name] = [row.facts.get(name) for row in rows]
    for name in dict.fromkeys(metric.name for row in rows for metric in row.metrics):
        metrics = [row.metric(name) for row in rows]
        known = [metric for metric in metrics if metric is not None]
        found[name] = [metric and metric.value for metric in metrics]
        if any(metric.has_interval for metric in known):
            found[f"{name}_low"] = [metric and metric.low for metric in metrics]
            found[f"{name}_high"] = [metric and metric.high for metric in metrics]
        if any(metric.doubt is not None for metric in known):
            found[f"{name}_doubt"] = [metric.doubt.code if metric and metric.doubt else None for metric in metrics]
    found["failure"] = [row.failure or None for row in rows]
    found["record_id"] = [row.record_id or None for row in rows]
    return found


def comma_separated(table: Table) -> str:
    """Returns a table as CSV, with a line for each row. A cell is empty if the value is unknown. Times are in seconds, sizes in bytes."""
    columns = columns_of(table)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_csv_cell(value) for value in values] for values in zip(*columns.values(), strict=True))
    return text.getvalue()


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return harmless(value) if isinstance(value, str) else repr(value)


def document(result: Result) -> JsonDocument:
    """Returns what `--json` prints. It has the same shape for every verb."""
    fields: dict[str, Any] = {"schema": SCHEMA, "verb": result.verb}
    if result.headline is not None:
        fields["headline"] = {
            "text": str(result.headline),
            "figures": {name: plain(value) for name, value in result.headline.figures.items()},
        }
    fields["about"] = dict(result.about)
    fields["tables"] = {table.name: [row_document(row) for row in table.rows] for table in result.tables}
    fields["notes"] = result.notes
    fields["blocks"] = {block.title: block.text for block in result.blocks}
    fields["next"] = result.next or None
    fields["record_ids"] = result.record_ids
    return safe_document(msgspec.json.format(msgspec.json.encode(fields), indent=2).decode())


def row_document(row: Row) -> dict[str, Any]:
    """Returns a row as plain values: facts are under their names, and figures are objects of value, unit, low, high and doubt."""
    found: dict[str, Any] = {**row.facts, **{metric.name: plain(metric) for metric in row.metrics}}
    found |= {"notes": row.notes} if row.notes else {}
    found |= {"failure": row.failure} if row.failure else {}
    found |= {"record_id": row.record_id} if row.record_id else {}
    return found
