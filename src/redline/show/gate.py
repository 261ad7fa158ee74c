"""What a gate says: in a terminal, as Markdown for a pull request, as JUnit's XML and as a document; and a bisection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from xml.etree import ElementTree

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.checks import Check
from redline.analyze.gate import GateRow, GateVerdict
from redline.model.fields import Frozen
from redline.model.units import format_bytes, format_seconds
from redline.show.export import JsonDocument, json_document
from redline.show.terminal import Fitted, make_table, markdown_line, markdown_table, one_line

STYLES = {
    "faster": "green",
    "slower": "red",
    "same": "",
    "inconclusive": "yellow",
    "incomparable": "yellow",
    "failed": "red",
}
SIGNS = {"faster": "🟢", "slower": "🔴", "same": "⚪", "inconclusive": "🟡", "incomparable": "🟡", "failed": "🔴"}
BASES = {"interleaved": "interleaved", "stored": "stored records", "none": "–"}
HEADERS = (
    "benchmark",
    "baseline",
    "now",
    "time",
    "interval",
    "threshold",
    "processes",
    "basis",
    "verdict",
)


def gate_json(rows: Sequence[GateRow], baseline: str, *, failed: bool) -> JsonDocument:
    benchmarks = [{**msgspec.to_builtins(row), "failed": row.failed} for row in rows]
    return json_document("gate", {"baseline": baseline, "benchmarks": benchmarks, "failed": failed})


def gate_report(rows: Sequence[GateRow], baseline: str) -> RenderableType:
    grid = make_table(Text(f"against {one_line(baseline)}", style="bold"))
    for header in HEADERS:
        is_text = header in ("benchmark", "verdict", "basis")
        grid.add_column(header, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in rows:
        cells = [Text(one_line(value)) for value in _cells(row)]
        cells[-1].style = STYLES[row.verdict]
        grid.add_row(*cells)
    told = [Text(f"  {one_line(line)}", style=style) for line, style in _remarks(rows)]
    shown = Fitted(grid, ("processes", "basis", "threshold", "baseline", "now", "interval"))
    return Group(shown, *told, Text(conclusion(rows), style="bold"))


def gate_markdown(rows: Sequence[GateRow], baseline: str) -> str:
    cells = [[*_cells(row)[:-1], f"{SIGNS[row.verdict]} {row.verdict}"] for row in rows]
    parts = [
        [markdown_line("## Performance against {}", baseline), ""],
        markdown_table(HEADERS, cells),
        ["", *(markdown_line("- {}", line) for line, _ in _remarks(rows))],
        ["", markdown_line("**{}**", conclusion(rows))],
    ]
    return "\n".join(line for part in parts for line in part) + "\n"


def gate_junit(rows: Sequence[GateRow], baseline: str, *, undecided_ok: bool = False) -> str:
    failures = sum(row.failed and row.verdict != "failed" for row in rows)
    # An undecided benchmark with a failed check is one failure, as its exit code says.
    undecided = sum(row.undecided and not row.failed for row in rows)
    errors = sum(row.verdict == "failed" for row in rows) + (0 if undecided_ok else undecided)
    skipped = undecided if undecided_ok else 0
    suite = ElementTree.Element(
        "testsuite",
        name="redline gate",
        tests=str(len(rows)),
        failures=str(failures),
        errors=str(errors),
        skipped=str(skipped),
    )
    for row in rows:
        case = ElementTree.SubElement(suite, "testcase", classname="redline.gate", name=one_line(row.name))
        said = one_line(row_sentence(row))
        detail = "\n".join(one_line(line) for line, _ in _remarks([row]))
        if row.verdict == "failed":
            ElementTree.SubElement(case, "error", message=said).text = detail
        elif row.failed:
            ElementTree.SubElement(case, "failure", message=said).text = detail
        elif row.undecided and undecided_ok:
            ElementTree.SubElement(case, "skipped", message=said)
        elif row.undecided:
            ElementTree.SubElement(case, "error", message=said).text = detail
        ElementTree.SubElement(case, "system-out").text = f"{said} (against {one_line(baseline)})"
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def conclusion(rows: Sequence[GateRow]) -> str:
    counts = Counter(row.verdict for row in rows)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    checks = [f"{row.name}: {each.name}" for row in rows for each in row.checks if each.failed]
    if any(row.failed for row in rows):
        return f"failed: {told}" + (f"; failed checks: {', '.join(checks)}" if checks else "")
    return f"undecided: {told}" if any(row.undecided for row in rows) else f"passed: {told}"


def row_sentence(row: GateRow) -> str:
    """What the gate says of one benchmark, on one line."""
    failed = [f"{each.name} {each.said}" for each in row.checks if each.failed]
    if row.change is None:
        return f"{row.verdict}: {'; '.join([*failed, *map(str, row.reasons)])}"
    bounds = "" if row.low is None or row.high is None else f" ({1 / row.high - 1:+.1%} to {1 / row.low - 1:+.1%})"
    return f"{row.verdict}: time {row.change:+.1%}{bounds}, threshold {row.threshold:.1%}" + "".join(
        f"; {each}" for each in failed
    )


def _cells(row: GateRow) -> list[str]:
    interval = "–" if row.low is None or row.high is None else f"{1 / row.high - 1:+.1%} … {1 / row.low - 1:+.1%}"
    return [
        row.name,
        "–" if row.baseline_s is None else format_seconds(row.baseline_s),
        "–" if row.candidate_s is None else format_seconds(row.candidate_s),
        "–" if row.change is None else f"{row.change:+.1%}",
        interval,
        f"{row.threshold:.1%}",
        f"{row.baseline_processes} / {row.candidate_processes}",
        BASES[row.basis],
        row.verdict,
    ]


def _remarks(rows: Sequence[GateRow]) -> list[tuple[str, str]]:
    """Checks, reasons and notes, each with its benchmark and a style."""
    found: list[tuple[str, str]] = []
    for row in rows:
        found += [(f"{row.name}: {_check_words(each)}", "red" if each.failed else "dim") for each in row.checks]
        found += [(f"{row.name}: {each}", "red" if row.verdict == "failed" else "yellow") for each in row.reasons]
        found += [(f"{row.name}: {each}", "dim") for each in row.notes]
    return found


def _check_words(each: Check) -> str:
    values = (
        ""
        if each.baseline is None or each.candidate is None
        else f" {_figure(each, each.baseline)} → {_figure(each, each.candidate)}"
    )
    return f"{each.name}{values}: {each.said}{' (failed)' if each.failed else ''}"


def _figure(each: Check, value: float) -> str:
    if each.name == "memory":
        return format_bytes(int(value))
    if each.name == "compile":
        return format_seconds(value)
    return f"{value:.1e}" if each.name == "numerics" else f"{value:g}"


class BisectStep(Frozen):
    """A gate of one candidate against the first. `ratio` as in a gate: below 1 it is slower."""

    name: str
    about: str
    verdict: GateVerdict
    ratio: float | None
    low: float | None
    high: float | None
    said: str = ""


def bisect_json(
    benchmark: str,
    what: str,
    steps: Sequence[BisectStep],
    suspects: Sequence[str],
    about: str,
    earlier: BisectStep | None = None,
) -> JsonDocument:
    fields = {
        "benchmark": benchmark,
        "what": what,
        "culprit": suspects[0] if len(suspects) == 1 else None,
        "suspects": suspects,
        "about": about,
        "earlier": msgspec.to_builtins(earlier),
        "steps": msgspec.to_builtins(steps),
    }
    return json_document("bisect", fields)


def bisect_report(
    benchmark: str,
    what: str,
    steps: Sequence[BisectStep],
    suspects: Sequence[str],
    about: str,
    earlier: BisectStep | None = None,
) -> RenderableType:
    table = make_table(Text(one_line(f"{benchmark}: each {what} against the first"), style="bold"))
    for header in (what, "about", "time", "interval", "verdict"):
        number = header in ("time", "interval")
        table.add_column(header, overflow="fold", justify="right" if number else "left", no_wrap=number)
    for step in steps:
        bounds = "–" if step.low is None or step.high is None else f"{1 / step.high - 1:+.1%} … {1 / step.low - 1:+.1%}"
        time = "–" if step.ratio is None else f"{1 / step.ratio - 1:+.1%}"
        name = step.name[:12] if what == "commit" else step.name
        cells = (name, step.about, time, bounds, step.verdict)
        table.add_row(*(Text(one_line(cell)) for cell in cells))
    failed = [Text(one_line(f"  {_short(step.name)}: {step.said}"), style="yellow") for step in steps if step.said]
    lines = [_conclusion(what, steps, suspects, about), *_smaller_part(what, earlier)]
    concluded = [Text(one_line(line), style="bold") for line in lines]
    return Group(Fitted(table, ("about", "interval")), *failed, *concluded)


def _smaller_part(what: str, earlier: BisectStep | None) -> list[str]:
    if earlier is None or earlier.ratio is None:
        return []
    told = f"{what} {_short(earlier.name)} before it was already {1 / earlier.ratio - 1:+.1%} slower than the first"
    return [f"that is the larger part: {told}; bisect again up to that one to find the other part"]


def _short(name: str) -> str:
    return name if len(name) <= 40 else name[:12]


def _conclusion(what: str, steps: Sequence[BisectStep], suspects: Sequence[str], about: str) -> str:
    if len(suspects) == 1:
        return f"it got slower with {what} {suspects[0]}" + (f": {about}" if about else "")
    if suspects:
        told = ", ".join(map(_short, suspects))
        return f"not found: one of these {len(suspects)} made it slower, and those between could not be decided: {told}"
    last = steps[-1]
    if last.verdict in ("same", "faster"):
        return f"nothing to find: the last {what} is not slower than the first"
    if last.verdict == "failed":
        return f"not found: the last {what} ({_short(last.name)}) cannot be measured"
    return f"not found: the last {what} ({_short(last.name)}) was {last.verdict}; a larger --budget may decide it"
