"""What changed between two profiles, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from redline.analyze.profile_diff import Changed, ProfileDiff, counts
from redline.model.units import format_ratio, format_seconds, format_share
from redline.show.profile import DEFAULT_ROWS, STYLE
from redline.show.terminal import Fitted, plain_table


class DiffReport:
    def __init__(self, diff: ProfileDiff, rows: int = DEFAULT_ROWS) -> None:
        self._diff = diff
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        diff = self._diff
        yield Text(f"before: {diff.before}", style="bold")
        yield Text(f"after:  {diff.after}", style="bold")
        yield Text(diff.answer, style="bold")
        tables = [_changes(f"per {diff.unit}", [diff.step, diff.busy], 2)]
        tables.append(_changes("classes", diff.classes, len(diff.classes)))
        if diff.kernels:
            tables.append(_changes(f"kernels: {_told(diff.kernels)}", diff.kernels, self._rows))
        if diff.operators:
            tables.append(_changes(f"operators: {_told(diff.operators)}", diff.operators, self._rows))
        yield from (Fitted(table, ("calls", "difference", "before", "after")) for table in tables)
        if diff.aligned:
            yield Fitted(_alignment(diff, self._rows))
        if diff.findings_gone:
            yield Text(f"resolved: {', '.join(diff.findings_gone)}", style="green")
        if diff.findings_new:
            yield Text(f"new: {', '.join(diff.findings_new)}", style="red")
        yield from (Text(f"note: {note}", style="dim") for note in diff.notes)


def _changes(title: str, rows: Sequence[Changed], most: int) -> Table:
    table = plain_table(title)
    table.add_column("name", overflow="fold")
    for header in ("before", "after", "difference", "ratio", "calls"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("change", no_wrap=True)
    for row in rows[:most]:
        change = row.after_s - row.before_s
        calls = f"{row.calls_before:.4g} → {row.calls_after:.4g}"
        ratio = format_ratio(row.ratio) if row.ratio is not None else "–"
        table.add_row(
            Text(row.short_name),
            format_seconds(row.before_s) if row.before_s else "–",
            format_seconds(row.after_s) if row.after_s else "–",
            f"{'+' if change > 0 else '−' if change < 0 else ''}{format_seconds(abs(change))}",
            ratio,
            calls,
            Text(row.change, style=STYLE.get(row.change, "dim")),
        )
    if len(rows) > most:
        table.caption = f"and {len(rows) - most} that changed less: --rows {len(rows)} or --json shows all"
    return table


def _alignment(diff: ProfileDiff, most: int) -> Table:
    table = plain_table("by module, annotation and operator, each with what is inside it")
    table.add_column("where", overflow="fold")
    for header in ("before", "after", "difference", "ratio", "of the whole"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in diff.aligned[:most]:
        change = row.after_s - row.before_s
        sign = "+" if change > 0 else "−" if change < 0 else ""
        table.add_row(
            Text(row.path),
            format_seconds(row.before_s) if row.before_s else "–",
            format_seconds(row.after_s) if row.after_s else "–",
            f"{sign}{format_seconds(abs(change))}",
            format_ratio(row.ratio) if row.ratio is not None else "–",
            f"{sign}{format_share(abs(row.share))}",
            Text(row.change, style=STYLE.get(row.change, "dim")),
        )
    if len(diff.aligned) > most:
        table.caption = (
            f"and {len(diff.aligned) - most} that changed less: --rows {len(diff.aligned)} or --json shows all"
        )
    return table


def _told(rows: Sequence[Changed]) -> str:
    return ", ".join(f"{count} {change}" for change, count in sorted(counts(rows).items()))
