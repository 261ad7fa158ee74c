"""A bisection: which commit, environment or recipe made it slower, and the gates that found it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.gate import GateVerdict
from redline.report.export import JsonDocument, json_document
from redline.report.terminal import Fitted, make_table, one_line
from redline.spec import Frozen


class BisectStep(Frozen):
    """A gate of one place against the first. `ratio` as in a gate: below 1 it is slower."""

    name: str
    about: str
    verdict: GateVerdict
    ratio: float | None
    low: float | None
    high: float | None
    said: str = ""


def bisect_json(
    benchmark: str, what: str, steps: Sequence[BisectStep], culprit: str | None, about: str
) -> JsonDocument:
    fields = {
        "benchmark": benchmark,
        "what": what,
        "culprit": culprit,
        "about": about,
        "steps": msgspec.to_builtins(steps),
    }
    return json_document("bisect", fields)


def bisect_report(
    benchmark: str, what: str, steps: Sequence[BisectStep], culprit: str | None, about: str
) -> RenderableType:
    table = make_table(Text(one_line(f"{benchmark}: each {what} against the first"), style="bold"))
    for header in (what, "about", "time", "interval", "verdict"):
        number = header in ("time", "interval")
        table.add_column(header, overflow="fold", justify="right" if number else "left", no_wrap=number)
    for step in steps:
        bounds = "–" if step.low is None or step.high is None else f"{1 / step.high - 1:+.1%} … {1 / step.low - 1:+.1%}"
        time = "–" if step.ratio is None else f"{1 / step.ratio - 1:+.1%}"
        name = step.name[:12] if what == "commit" else step.name
        cells = (name, step.about or step.said, time, bounds, step.verdict)
        table.add_row(*(Text(one_line(cell)) for cell in cells))
    return Group(
        Fitted(table, ("about", "interval")), Text(one_line(_conclusion(what, steps, culprit, about)), style="bold")
    )


def _conclusion(what: str, steps: Sequence[BisectStep], culprit: str | None, about: str) -> str:
    if culprit is not None:
        return f"it got slower with {what} {culprit}" + (f": {about}" if about else "")
    if len(steps) == 1 and steps[0].verdict in ("same", "faster"):
        return f"nothing to find: the last {what} is not slower than the first"
    return f"not found: {steps[-1].name[:40]} was {steps[-1].verdict}; a larger --budget may decide it"
