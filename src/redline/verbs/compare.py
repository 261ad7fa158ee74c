"""`redline compare`: is B faster or slower than A? A verdict with an interval, or the reason why there is none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np

from redline.analyze.blocks import timed_blocks
from redline.analyze.compare import Comparison, Comparisons, compare_records
from redline.model.errors import Exit, UsageError
from redline.model.files import is_file
from redline.model.metrics import Figure, Headline, Metric, Row, Table
from redline.model.record import RunRecord
from redline.model.settings import WAY, setting
from redline.show.canvas import label_axes, label_text, new_figure
from redline.show.result import Result
from redline.verbs.report import Chosen, choose
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, use

RATIO = Figure(name="ratio", unit="x", header="A/B", better="higher", doc="Time of A over time of B.")
CHANGE = Figure(name="change", unit="change", doc="Of B, relative to A.")
FIRST = Figure(name="first", unit="s", header="A")
OTHER = Figure(name="other", unit="s", header="B")

Side = Annotated[
    str,
    setting(
        "A record's id, a grid's name, or a file (--save, 'history export'); commas join several.", is_argument=True
    ),
]


@verb(
    examples=(
        "redline compare 19f1a2 19f1b7",
        "redline compare before.redline after.redline",
        "redline compare 19f1a2 19f1b7 --html before-after.html",
    ),
    also=("plot", "html", "summary"),
)
def compare(
    a: Side,
    b: Side,
    *,
    across: Annotated[
        bool, setting("Compare across devices and thread counts, which is otherwise refused.", group=WAY)
    ] = False,
    fail_inconclusive: Annotated[bool, setting("Exit with 4 where there is no verdict.", group=WAY)] = False,
    workspace: Workspace | None = None,
) -> Result:
    """Is B faster or slower than A? A verdict with an interval.

    There is one verdict per benchmark, or the reason why there is none. For generations, the time to the first token and per further
    token each have an interval and a verdict. If one of them clearly got slower and none got faster, the verdict is slower, even if the
    total time does not show it. Generations of different lengths are incomparable.

    One record per side is enough for a verdict when the difference is larger than processes usually differ.

    Exit codes: 0 same, faster or inconclusive; 1 slower; 3 incomparable; 4 inconclusive, with --fail-inconclusive; 5 a run that failed.
    """
    with use(workspace) as opened:
        sides = [_side(words, opened) for words in (a, b)]
        found = compare_records(*sides, across=across)
    return result_of(found, a, b, sides, fail_inconclusive=fail_inconclusive)


def _side(words: str, workspace: Workspace) -> list[RunRecord]:
    """Returns all records that a word names, or several words joined by commas: replicates of one side."""
    chosen = Chosen()
    for word in [words] if is_file(words) else words.split(","):
        chosen.add(_named(word.strip(), workspace))
    return chosen.records


def _named(word: str, workspace: Workspace) -> list[RunRecord]:
    """Returns the records of a file or a grid, else the one with this id."""
    if is_file(word):
        return choose([word], workspace=workspace).records
    with workspace.reading() as history:
        if history.sweep(word).cells():
            return choose(sweep=word, workspace=workspace).records
        if not re.fullmatch(r"[0-9a-f]{4,}", word):
            raise UsageError(f"{word!r} is neither a file, nor a grid in {history.location}, nor the id of a record")
        return [history.load(word)]


def result_of(
    found: Comparisons,
    a: str,
    b: str,
    sides: Sequence[Sequence[RunRecord]] = (),
    *,
    fail_inconclusive: bool = False,
) -> Result:
    codes = {"slower": Exit.SLOWER, "incomparable": Exit.INCOMPARABLE, "invalid": Exit.FAILED_ROW}
    if fail_inconclusive:
        codes["inconclusive"] = Exit.INCONCLUSIVE
    only = {name: ", ".join(map(str, alone)) for name, alone in (("A", found.only_first), ("B", found.only_other))}
    several = len(found.comparisons) > 1
    parts = tuple(row for comparison in found.comparisons for row in _part_rows(comparison))
    title = f"A {a} against B {b}; A/B above 1: B is faster"
    columns = ("benchmark", "verdict", "ratio", "first", "other", "runs", "p95_change", "memory_change")
    part_columns = ("benchmark", "part", "verdict", "change", "first", "other")
    return Result(
        verb="compare",
        headline=_headline(found),
        tables=(
            Table(name="benchmarks", title=title, rows=tuple(map(_row, found.comparisons)), columns=columns),
            Table(name="parts", title="of a generation", rows=parts, columns=part_columns[not several :]),
        ),
        about={
            "a": a,
            "b": b,
            "verdict": found.verdict,
            **{f"only_in_{name}": told for name, told in only.items() if told},
        },
        exit_code=codes.get(found.verdict, Exit.DONE),
        picture=(lambda: _figure(sides, (a, b))) if sides and _samples(*sides) and _samples(*sides[::-1]) else None,
    )


def _headline(found: Comparisons) -> Headline:
    if not found.comparisons:
        return Headline(template="incomparable: the two have no benchmark in common.")
    if len(found.comparisons) > 1:
        counts = Counter(comparison.verdict for comparison in found.comparisons)
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        return Headline(template=f"verdict of B: {told}.")
    (only,) = found.comparisons
    template, figures = "verdict of B: {verdict}", {"verdict": only.verdict}
    ratio = _ratio_of(only)
    if ratio is not None:
        template += "; the runs are too noisy for a ratio" if ratio.is_too_noisy else "; it is {ratio} as fast as A"
    return Headline(template=f"{template}.", figures={**figures, "ratio": ratio} if ratio else figures)


def _ratio_of(each: Comparison) -> Metric | None:
    return None if each.ratio is None else RATIO(each.ratio.ratio, each.ratio.low, each.ratio.high)


def _row(each: Comparison) -> Row:
    against = "" if each.other_recipe == each.benchmark.recipe else f" against {each.other_recipe}"
    ratio = _ratio_of(each)
    metrics = [] if ratio is None else [ratio, FIRST(each.first_s), OTHER(each.other_s)]
    # If the ratio has no number, two times beside it would amount to one, so they are left out.
    metrics = metrics[:1] if ratio is not None and ratio.is_too_noisy else metrics
    for figure in each.figures:
        if figure.name in UNITS:
            change = Figure(name=f"{figure.name}_change", unit="change", header=figure.name)
            sides = (Figure(name=f"{figure.name}_{side}", unit=UNITS[figure.name]) for side in ("first", "other"))
            values = (figure.first, figure.other)
            metrics += [change(figure.change), *(made(value) for made, value in zip(sides, values, strict=True))]
    return Row(
        facts={
            "benchmark": f"{each.benchmark}{against}",
            "verdict": each.verdict,
            "basis": each.basis,
            "runs": " / ".join(map(str, each.runs)),
            **{f"{figure.name}_verdict": figure.verdict for figure in each.figures if figure.name in UNITS},
        },
        metrics=tuple(metrics),
        notes=(*each.reasons, *each.notes),
    )


UNITS = {"p95": "s", "memory": "B"}
"""The row of a benchmark has these beside its time. The parts of a generation have a table of their own."""


def _part_rows(each: Comparison) -> Iterator[Row]:
    """Yields the times of a generation. What is less is faster."""
    for part in each.figures:
        if part.name not in UNITS:
            verdict = {"less": "faster", "more": "slower"}.get(part.verdict, part.verdict)
            yield Row(
                facts={"benchmark": str(each.benchmark), "part": part.name, "verdict": verdict},
                metrics=(CHANGE(part.change, part.low, part.high), FIRST(part.first), OTHER(part.other)),
            )


def _samples(side: Sequence[RunRecord], other: Sequence[RunRecord]) -> list[float]:
    """Returns what the verdict was made from: of records that were measured in turns the rounds that both have."""
    rounds = {record.group: {block.round for block in timed_blocks(record, "throughput")} for record in other}
    return [
        sample
        for record in side
        for block in timed_blocks(record, "throughput")
        if record.group not in rounds or record.group is None or block.round in rounds[record.group]
        for sample in block.samples
    ]


def _figure(sides: Sequence[Sequence[RunRecord]], names: Sequence[str]) -> Any:
    """Draws the share of steps that took at most so long, up to the 99th percentile: one step that was held up would flatten the rest."""
    figure, axes = new_figure(8, 4)
    for name, letter, side, other in zip(names, "AB", sides, sides[::-1], strict=True):
        shares = np.linspace(0, 0.99, 100)
        axes.plot(np.quantile(_samples(side, other), shares) * 1e3, shares, label=label_text(f"{letter} {name}"))
    label_axes(axes, "ms per step", "share of steps", "timed without the profiler")
    axes.legend(fontsize="small")
    return figure
