"""Two profiles side by side, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from redline.analyze.profile_diff import Changed, ProfileDiff, counts
from redline.report.profile import DEFAULT_ROWS
from redline.report.terminal import plain_table
from redline.units import format_seconds

STYLE = {"faster": "green", "vanished": "green", "slower": "red", "appeared": "red"}


class DiffReport:
    def __init__(self, diff: ProfileDiff, rows: int = DEFAULT_ROWS) -> None:
        self._diff = diff
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        diff = self._diff
        yield Text(f"before: {diff.before}", style="bold")
        yield Text(f"after:  {diff.after}", style="bold")
        yield _table(f"per {diff.unit}", [diff.step, diff.busy], 2)
        yield _table("classes", diff.classes, len(diff.classes))
        if diff.kernels:
            yield _table(f"kernels: {_told(diff.kernels)}", diff.kernels, self._rows)
        if diff.operators:
            yield _table(f"operators: {_told(diff.operators)}", diff.operators, self._rows)
        if diff.findings_gone:
            yield Text(f"no longer in the way: {', '.join(diff.findings_gone)}", style="green")
        if diff.findings_new:
            yield Text(f"new in the way: {', '.join(diff.findings_new)}", style="red")
        yield from (Text(f"note: {note}", style="dim") for note in diff.notes)


def _table(title: str, rows: Sequence[Changed], most: int) -> Table:
    table = plain_table(title)
    table.add_column("name", overflow="fold")
    for header in ("before", "after", "difference", "ratio", "calls"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows[:most]:
        change = row.after_s - row.before_s
        calls = f"{row.calls_before:.4g} → {row.calls_after:.4g}"
        ratio = f"{row.ratio:.2f}×" if row.ratio is not None else "–"
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


def _told(rows: Sequence[Changed]) -> str:
    return ", ".join(f"{count} {change}" for change, count in sorted(counts(rows).items()))
