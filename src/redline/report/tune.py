"""A search for the fastest recipe in a terminal and as a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from redline.report.cells import error_cell
from redline.report.race import VERDICT_STYLE
from redline.report.terminal import make_table
from redline.search.tune.result import Ranked, TuneFinding, Winner
from redline.spec import BASELINE
from redline.units import significant

SHOWN = 12
"""Rows of the ranking a person is shown; the document has all."""


def tune_report(found: TuneFinding) -> RenderableType:
    """Ranking, winner, what each switch brings, what was rejected and why, the code, the next step."""
    parts: list[RenderableType] = []
    if found.ranking:
        parts.append(_ranking(found))
        if len(found.ranking) > SHOWN:
            parts.append(Text(f"  and {len(found.ranking) - SHOWN} slower ones (--json lists all)", style="dim"))
    parts += [_winner(found, found.winner)] if found.winner is not None else []
    parts += _checked(found)
    if found.switches:
        parts.append(_steps(found))
    parts += _reasons(found)
    parts += [Text(f"  note: {note}", style="yellow") for note in found.notes]
    parts.append(Text(_spent(found), style="dim"))
    if found.snippet is not None:
        parts += [Text("without Redline:", style="dim"), Text(found.snippet.rstrip())]
    return Group(*parts, Text(_next_step(found), style="bold"))


def _ranking(found: TuneFinding) -> Table:
    where = f"{found.device_name} ({found.device})" if found.device_name else found.device
    batch = f"batch {found.batch}" if found.batch else ""
    title = " · ".join(part for part in (found.model, found.task, batch, where, found.objective) if part)
    table = make_table(Text(title, style="bold"))
    table.add_column("recipe", overflow="fold", min_width=12)
    for header in ("vs baseline", "verdict", "rel. error", "compile s"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in found.ranking[:SHOWN]:
        is_winner = found.winner is not None and row.recipe == found.winner.recipe
        remark = _standing(found) if is_winner else str(row.note or ("host-bound" if row.bound == "host" else ""))
        table.add_row(
            Text(row.recipe, style="bold" if is_winner else ""),
            _ratio(row),
            Text(row.verdict, style=VERDICT_STYLE[row.verdict]),
            error_cell(row.numerics, with_steps=True),
            "–" if row.compile_s is None else f"{row.compile_s:.1f}",
            Text(remark, style="green" if is_winner else "dim"),
        )
    return table


def _ratio(row: Ranked) -> str:
    if row.recipe == BASELINE:
        return "–"
    return f"{row.ratio:.2f}×" + (f" ({row.low:.2f}–{row.high:.2f})" if row.low and row.high else "")


def _winner(found: TuneFinding, winner: Winner) -> Text:
    rate = winner.throughput_per_s
    told = f"{_standing(found)}: {winner.recipe}"
    if winner.recipe != BASELINE:
        told += f", {winner.ratio:.2f}× the baseline"
        told += f" ({winner.low:.2f}–{winner.high:.2f})" if winner.low and winner.high else ", from one process only"
    if rate is not None:
        told += f", {significant(rate, max(3, len(str(round(rate)))))} {winner.item or 'item'}/s"
    told += f" at batch {winner.batch}" if winner.batch else ""
    told += f"; {found.headroom:.1f}× left to the roofline" if found.headroom is not None else ""
    return Text(told, style="bold green")


def _checked(found: TuneFinding) -> list[Text]:
    """What the user's check said of the winner."""
    recipe = found.winner.recipe if found.winner is not None else None
    metric = next((metric for metric in found.metrics if metric.recipe == recipe), None)
    if metric is None or metric.value is None or metric.baseline is None:
        return []
    return [Text(f"  your check: {metric.value:.4g}, {metric.baseline:.4g} with the baseline", style="green")]


def _standing(found: TuneFinding) -> str:
    return "winner" if found.has_answer else "best so far"


def _steps(found: TuneFinding) -> Table:
    table = make_table(Text("gain of each switch (time without it / time with it)", style="dim"))
    table.add_column("switch", no_wrap=True)
    table.add_column("gain", justify="right", no_wrap=True)
    for gain in found.switches:
        interval = f" ({gain.low:.2f}–{gain.high:.2f})" if gain.low and gain.high else ""
        table.add_row(Text(gain.switch), f"{gain.gain:.2f}×{interval}")
    return table


def _reasons(found: TuneFinding) -> list[RenderableType]:
    told: list[RenderableType] = [
        Text(f"  rejected: {row.recipe}: {row.reason}", style="red") for row in found.rejected
    ]
    return told + [Text(f"  not tried: {row.switch}: {row.reason}", style="dim") for row in _apart(found)]


def _apart(found: TuneFinding) -> Sequence[Any]:
    """Refused switches, without those the user left out."""
    return [row for row in found.refused if row.reason.code not in ("not-asked-for", "excluded")]


def _spent(found: TuneFinding) -> str:
    return f"{found.trials} recipe{'s' if found.trials != 1 else ''} tried in {found.seconds:.0f} s, {found.compile_seconds:.0f} s of that compiling"


def _next_step(found: TuneFinding) -> str:
    if found.state in ("running", "interrupted"):
        return "next: the same command with --resume continues"
    if not found.has_answer:
        return "next: the same command with --resume and a larger --budget continues"
    if found.winner is None:
        return "next: no recipe can be recommended; the reasons are above"
    if found.winner.recipe == BASELINE:
        return "next: nothing here beats the baseline; try another batch, or --allow-quantized with a --check"
    use = f"redline.recipe({found.winner.recipe!r}).apply(model, *example_inputs)"
    if found.task == "train":
        use = f"redline.recipe({found.winner.recipe!r}, task='train').training_step(model, loss, inputs, targets)"
    told = f"next: {use}, or the code above"
    return f"{told}; '{found.explained_by}' profiles it" if found.explained_by else told
