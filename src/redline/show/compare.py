"""A comparison of records (terminal, Markdown, JSON, and before and after on one page), and of two profiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from redline.analyze.blocks import latency_blocks
from redline.analyze.compare import Comparison, Comparisons, Metric
from redline.analyze.profile_diff import Changed, ProfileDiff, counts
from redline.model.record import RunRecord
from redline.model.units import format_bytes, format_count, format_ratio, format_seconds, format_share
from redline.show.export import JsonDocument, json_document
from redline.show.profile import DEFAULT_ROWS, STYLE
from redline.show.terminal import Fitted, make_table, markdown_line, markdown_table, one_line, plain_table

STYLES = {
    "faster": "green",
    "same": "",
    "slower": "red",
    "inconclusive": "yellow",
    "incomparable": "yellow",
    "invalid": "red",
}
BASES = {
    "turns": "interleaved",
    "replicates": "over processes",
    "single runs": "fewer than three processes per side",
    "none": "",
}
HEADERS = ("benchmark", "A", "B", "A/B", "95 % interval", "runs", "p95", "memory", "verdict")
PART_HEADERS = ("benchmark", "of a generation", "A", "B", "change", "95 % interval", "verdict")
PARTS_TOLD = "Below 0 % a time is shorter, above 0 % a rate is higher; TPOT is each generation's mean over its tokens"
PARTS = {
    "ttft_s": "time to first token (TTFT)",
    "tpot_s": "time per output token (TPOT)",
    "prefill_tokens_per_s": "prefill tok/s",
    "decode_tokens_per_s": "decode tok/s",
}


def compare_json(found: Comparisons) -> JsonDocument:
    return json_document("compare", {**msgspec.to_builtins(found), "verdict": found.verdict})


def compare_report(found: Comparisons, first: str, other: str) -> RenderableType:
    title = Text(f"A {one_line(first)} against B {one_line(other)}; A/B above 1: B is faster", style="bold")
    rows = make_table(title)
    for header in HEADERS:
        text = header in ("benchmark", "verdict")
        rows.add_column(header, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    for each in found.comparisons:
        cells = [Text(one_line(value)) for value in comparison_cells(each)]
        cells[-1].style = STYLES[each.verdict]
        rows.add_row(*cells)
    parts = _parts_table(found)
    told = [Text(f"  {one_line(line)}", style="dim" if is_note else "yellow") for line, is_note in _remarks(found)]
    return Group(
        Fitted(rows, ("memory", "p95", "runs", "A", "B", "95 % interval")),
        *parts,
        *told,
        Text(conclusion(found), style="bold"),
    )


def _parts_table(found: Comparisons) -> list[RenderableType]:
    lines = part_rows(found)
    if not lines:
        return []
    rows = make_table(Text(PARTS_TOLD, style="dim"))
    several = len(found.comparisons) > 1
    for header in PART_HEADERS if several else PART_HEADERS[1:]:
        text = header in ("benchmark", "of a generation", "verdict")
        rows.add_column(header, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    for line in lines:
        rows.add_row(*(Text(one_line(value)) for value in (line if several else line[1:])))
    return [Fitted(rows, ("A", "B"))]


def part_rows(found: Comparisons) -> list[list[str]]:
    """The quantities of a generation, for each comparison that has them."""
    return [
        [comparison_cells(each)[0], PARTS[metric.name], *_part_cells(metric)]
        for each in found.comparisons
        for metric in each.metrics
        if metric.name in PARTS
    ]


def _part_cells(metric: Metric) -> list[str]:
    unit = format_seconds if metric.name.endswith("_s") and "per_s" not in metric.name else format_count
    interval = "none" if metric.low is None or metric.high is None else f"{metric.low:+.1%} to {metric.high:+.1%}"
    is_time = metric.name in ("ttft_s", "tpot_s")
    words = {"less": "faster" if is_time else "slower", "more": "slower" if is_time else "faster"}
    told = words.get(metric.verdict, metric.verdict)
    return [unit(metric.first), unit(metric.other), f"{metric.change:+.1%}", interval, told]


def compare_markdown(found: Comparisons, first: str, other: str) -> str:
    rows, parts_of = [comparison_cells(row) for row in found.comparisons], part_rows(found)
    parts = [
        [markdown_line("## {} (A) against {} (B)", first, other), ""],
        markdown_table(HEADERS, rows) if rows else [],
        ["", *markdown_table(PART_HEADERS, parts_of)] if parts_of else [],
        ["", *(markdown_line("- {}", line) for line, _ in _remarks(found))],
        ["", markdown_line("**{}** A/B is time of A over time of B: above 1, B is faster.", conclusion(found))],
    ]
    return "\n".join(line for part in parts for line in part) + "\n"


def conclusion(found: Comparisons) -> str:
    if not found.comparisons:
        return "incomparable: the two have no benchmark in common"
    counts: dict[str, int] = {}
    for each in found.comparisons:
        counts[each.verdict] = counts.get(each.verdict, 0) + 1
    return "verdict: " + ", ".join(
        f"{count} {name}" if len(found.comparisons) > 1 else name for name, count in counts.items()
    )


def comparison_cells(each: Comparison) -> list[str]:
    recipes = "" if each.other_recipe == each.benchmark.recipe else f" against {each.other_recipe}"
    interval = f"{each.low:.3f}–{each.high:.3f}" if each.low is not None and each.high is not None else "none"
    return [
        f"{each.benchmark}{recipes}",
        "–" if each.first_s is None else format_seconds(each.first_s),
        "–" if each.other_s is None else format_seconds(each.other_s),
        "–" if each.ratio is None else f"{each.ratio:.3f}×",
        "–" if each.ratio is None else interval,
        f"{each.first_runs} / {each.other_runs}",
        *(_metric(each, name) for name in ("p95", "memory")),
        each.verdict,
    ]


def _metric(each: Comparison, name: str) -> str:
    found = next((metric for metric in each.metrics if metric.name == name), None)
    if found is None:
        return "–"
    unit = format_bytes if name == "memory" else format_seconds
    mark = f" {found.verdict}" if found.verdict in ("less", "more") else ""
    return f"{unit(found.other)} ({found.change:+.1%}{mark})"


def _remarks(found: Comparisons) -> Iterator[tuple[str, bool]]:
    """Each line once, with the benchmarks it is about; reasons before notes."""
    for is_note in (False, True):
        about: dict[str, list[str]] = {}
        for each in found.comparisons:
            for line in map(str, each.notes if is_note else each.reasons):
                about.setdefault(line, []).append(str(each.benchmark))
            if is_note and (basis := BASES[each.basis]):
                about.setdefault(f"basis: {basis}", []).append(str(each.benchmark))
        for line, names in about.items():
            of_all = len(names) == len(found.comparisons)
            yield line if of_all else f"{_some(names)}: {line}", is_note
    for side, alone in (("A", found.only_first), ("B", found.only_other)):
        if alone:
            yield f"only in {side}: {_some([str(each) for each in alone])}", True


def _some(names: Sequence[str], most: int = 3) -> str:
    return "; ".join(names[:most]) + (" …" if len(names) > most else "")


WIDTH, HEIGHT, MARGIN = 900, 280, 36
KERNELS = 40


def compare_page(
    found: Comparisons,
    sides: tuple[str, str],
    records: tuple[Sequence[RunRecord], Sequence[RunRecord]],
    diff: ProfileDiff | None = None,
) -> str:
    """`sides`: what A and B are called. `diff`: of the two profiles, where both sides have one."""
    environment = Environment(
        loader=PackageLoader("redline.show"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["time"] = format_seconds
    samples = [_samples(side) for side in records]
    return environment.get_template("compare.html.j2").render(
        title=f"{sides[0]} (A) against {sides[1]} (B)",
        conclusion=conclusion(found),
        headers=HEADERS,
        rows=[comparison_cells(each) for each in found.comparisons],
        part_headers=PART_HEADERS,
        part_rows=part_rows(found),
        reasons=[str(each) for one in found.comparisons for each in (*one.reasons, *one.notes)],
        curves=_curves(samples),
        ticks=_ticks(samples),
        size=(WIDTH, HEIGHT),
        diff=diff,
        kernels=diff.kernels[:KERNELS] if diff is not None else (),
    )


def _samples(side: Sequence[RunRecord]) -> list[float]:
    return list(chain.from_iterable(block.samples for record in side for block in latency_blocks(record)))


def _bounds(samples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Up to the 99th percentile: one step that was held up would flatten everything else."""
    known = [each for each in samples if each]
    return min(min(each) for each in known), max(float(np.quantile(each, 0.99)) for each in known)


def _curves(samples: Sequence[Sequence[float]]) -> list[str]:
    """The share of steps that took at most this long, as the points of two lines."""
    if not all(samples):
        return []
    low, high = _bounds(samples)
    span = (high - low) or low or 1.0
    lines = []
    for each in samples:
        shares = np.linspace(0, 0.99, 100)
        across = MARGIN + (np.quantile(each, shares) - low) / span * (WIDTH - 2 * MARGIN)
        up = HEIGHT - MARGIN - shares * (HEIGHT - 2 * MARGIN)
        lines.append(" ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, up, strict=True)))
    return lines


def _ticks(samples: Sequence[Sequence[float]]) -> list[tuple[float, str]]:
    if not all(samples):
        return []
    low, high = _bounds(samples)
    return [
        (MARGIN + share * (WIDTH - 2 * MARGIN), format_seconds(low + share * (high - low)))
        for share in np.linspace(0, 1, 5)
    ]


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
