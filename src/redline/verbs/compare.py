"""`redline compare`: is B faster or slower than A? A verdict with an interval, or the reason why there is none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Any

import numpy as np

from redline.analyze.blocks import timed_blocks
from redline.analyze.compare import Comparison, Comparisons, compare_records
from redline.analyze.profile_diff import diff_profiles
from redline.model.errors import Exit, UsageError
from redline.model.files import is_file
from redline.model.metrics import Figure, Headline, Row, Table
from redline.model.record import RunRecord
from redline.model.settings import WAY, setting
from redline.show.canvas import label_axes, label_text, new_figure
from redline.show.result import Result
from redline.verbs.capture import read_profile
from redline.verbs.report import Chosen, choose
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, use

RATIO = Figure(name="ratio", unit="x", header="A/B", better="higher", doc="Time of A over time of B.")
CHANGE = Figure(name="change", unit="change", doc="Of B, relative to A.")
UNITS = {"p95": "s", "memory": "B", "ttft_s": "s", "tpot_s": "s"}
"""Units of what is compared besides the step; the others are rates of tokens."""
PARTS = {
    "ttft_s": "time to first token (TTFT)",
    "tpot_s": "time per output token (TPOT)",
    "prefill_tokens_per_s": "prefill tok/s",
    "decode_tokens_per_s": "decode tok/s",
}
SHOWN_KERNELS = 40

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

    There is one verdict per benchmark, or the reason why there is none. For generations, TTFT, TPOT and the tokens per second of prefill and
    decode each have an interval and a verdict. If one of them clearly got slower and none got faster, the verdict is slower, even if the
    total time does not show it. Generations of different lengths are incomparable.

    One record per side is enough for a verdict when the difference is larger than processes usually differ.

    Exit codes: 0 same, faster or inconclusive; 1 slower; 3 incomparable; 4 inconclusive, with --fail-inconclusive; 5 a run that failed.
    """
    with use(workspace) as opened:
        sides = [_side(words, opened) for words in (a, b)]
        found = compare_records(*sides, across=across)
        traced = [next((record.id for record in side if record.trace is not None), None) for side in sides]
        kernels = _kernels(traced[0], traced[1], opened) if traced[0] and traced[1] else None
    return result_of(found, a, b, sides, kernels, fail_inconclusive=fail_inconclusive)


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


def _kernels(first: str, other: str, workspace: Workspace) -> Table:
    """Returns what the profiles of both sides say of each kernel."""
    diff = diff_profiles(*(read_profile(side, workspace=workspace) for side in (first, other)))
    rows = [
        Row(
            facts={"kernel": kernel.short_name, "verdict": kernel.change},
            metrics=(
                Figure(name="first", unit="s", header="A")(kernel.before_s),
                Figure(name="other", unit="s", header="B")(kernel.after_s),
                *([RATIO(kernel.ratio)] if kernel.ratio is not None else []),
            ),
        )
        for kernel in diff.kernels[:SHOWN_KERNELS]
    ]
    return Table(name="kernels", title=str(diff.answer), rows=tuple(rows), is_detail=True)


def result_of(
    found: Comparisons,
    a: str,
    b: str,
    sides: Sequence[Sequence[RunRecord]] = (),
    kernels: Table | None = None,
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
            *([kernels] if kernels is not None else []),
        ),
        about={
            "a": a,
            "b": b,
            "verdict": found.verdict,
            **{f"only_in_{name}": told for name, told in only.items() if told},
        },
        exit_code=codes.get(found.verdict, Exit.DONE),
        picture=(lambda: _figure(sides, (a, b))) if all(_samples(side) for side in sides) and sides else None,
    )


def _headline(found: Comparisons) -> Headline:
    if not found.comparisons:
        return Headline(template="incomparable: the two have no benchmark in common.")
    if len(found.comparisons) > 1:
        counts = Counter(comparison.verdict for comparison in found.comparisons)
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        return Headline(template=f"verdict of B: {told}.")
    (each,) = found.comparisons
    if each.ratio is None:
        return Headline(template=f"verdict of B: {each.verdict}.")
    ratio = RATIO(each.ratio, each.low, each.high)
    if ratio.is_too_noisy:
        template = "verdict of B: {verdict}; the runs are too noisy for a ratio."
        return Headline(template=template, figures={"verdict": each.verdict})
    return Headline(
        template="verdict of B: {verdict}; it is {ratio} as fast as A.",
        figures={"verdict": each.verdict, "ratio": ratio},
    )


def _row(each: Comparison) -> Row:
    against = "" if each.other_recipe == each.benchmark.recipe else f" against {each.other_recipe}"
    metrics = [
        RATIO(each.ratio, each.low, each.high),
        Figure(name="first", unit="s", header="A")(each.first_s),
        Figure(name="other", unit="s", header="B")(each.other_s),
    ]
    for part in each.metrics:
        if part.name not in PARTS:
            metrics += [
                Figure(name=f"{part.name}_change", unit="change", header=part.name)(part.change),
                *(
                    Figure(name=f"{part.name}_{side}", unit=UNITS[part.name])(value)
                    for side, value in (("first", part.first), ("other", part.other))
                ),
            ]
    return Row(
        facts={
            "benchmark": f"{each.benchmark}{against}",
            "verdict": each.verdict,
            "basis": each.basis,
            "runs": f"{each.first_runs} / {each.other_runs}",
            **{f"{part.name}_verdict": part.verdict for part in each.metrics if part.name not in PARTS},
        },
        metrics=tuple(metric for metric in metrics if metric.value is not None),
        notes=(*each.reasons, *each.notes),
    )


def _part_rows(each: Comparison) -> Iterator[Row]:
    """The quantities of a generation. What is less is faster for a time and slower for a rate."""
    for part in each.metrics:
        if part.name in PARTS:
            unit = UNITS.get(part.name, "tok/s")
            less, more = ("faster", "slower") if unit == "s" else ("slower", "faster")
            yield Row(
                facts={
                    "benchmark": str(each.benchmark),
                    "part": PARTS[part.name],
                    "verdict": {"less": less, "more": more}.get(part.verdict, part.verdict),
                },
                metrics=(
                    CHANGE(part.change, part.low, part.high),
                    Figure(name="first", unit=unit, header="A")(part.first),
                    Figure(name="other", unit=unit, header="B")(part.other),
                ),
            )


def _samples(side: Sequence[RunRecord]) -> list[float]:
    """Returns what the verdict was made from."""
    return list(chain.from_iterable(block.samples for record in side for block in timed_blocks(record, "throughput")))


def _figure(sides: Sequence[Sequence[RunRecord]], names: Sequence[str]) -> Any:
    """Draws the share of steps that took at most so long, up to the 99th percentile: one step that was held up would flatten the rest."""
    figure, axes = new_figure(8, 4)
    for name, letter, side in zip(names, "AB", sides, strict=True):
        shares = np.linspace(0, 0.99, 100)
        axes.plot(np.quantile(_samples(side), shares) * 1e3, shares, label=label_text(f"{letter} {name}"))
    label_axes(axes, "ms per step", "share of steps", "timed without the profiler")
    axes.legend(fontsize="small")
    return figure
