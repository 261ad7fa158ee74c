"""A comparison for people and programs: terminal, Markdown, JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.compare import Comparison, Comparisons
from redline.report.export import JsonDocument, json_document
from redline.report.terminal import Fitted, cell, escaped, make_table, one_line, table
from redline.units import format_bytes, format_seconds

STYLES = {
    "faster": "green",
    "same": "",
    "slower": "red",
    "inconclusive": "yellow",
    "incomparable": "yellow",
    "invalid": "red",
}
BASES = {
    "turns": "interleaved, one process each",
    "replicates": "over processes",
    "single runs": "fewer than three processes per side",
    "none": "",
}
HEADERS = ("benchmark", "A", "B", "A/B", "95 % interval", "runs", "p95", "memory", "verdict")


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
    told = [Text(f"  {one_line(line)}", style="dim" if is_note else "yellow") for line, is_note in _remarks(found)]
    return Group(
        Fitted(rows, ("memory", "p95", "runs", "A", "B", "95 % interval")), *told, Text(conclusion(found), style="bold")
    )


def compare_markdown(found: Comparisons, first: str, other: str) -> str:
    rows = [[cell(value) for value in comparison_cells(each)] for each in found.comparisons]
    parts = [
        [f"## {escaped(first, 120)} (A) against {escaped(other, 120)} (B)", ""],
        table(list(HEADERS), rows) if rows else [],
        ["", *(f"- {escaped(line, 500)}" for line, _ in _remarks(found))],
        ["", f"**{escaped(conclusion(found))}** A/B is time of A over time of B: above 1, B is faster."],
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
