"""`redline.compare`: is B faster or slower than A?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from redline.analyze.compare import Comparison, Comparisons, ComparisonVerdict, compare_records
from redline.api.profile import compare_profiles
from redline.api.report import Chosen, choose, is_file
from redline.api.workspace import Workspace, use
from redline.model.errors import UsageError
from redline.model.record import RunRecord
from redline.show.compare import compare_json, compare_page, compare_report
from redline.show.export import JsonDocument
from redline.show.notebook import Bars, Shown


class CompareResult(Shown, Sequence[Comparison]):
    """One comparison per benchmark, with the words that named the two sides."""

    def __init__(self, found: Comparisons, first: str, other: str) -> None:
        self.found = found
        self.first = first
        self.other = other

    def __len__(self) -> int:
        return len(self.found.comparisons)

    def __getitem__(self, index: Any) -> Any:
        return self.found.comparisons[index]

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        return self.found.comparisons

    @property
    def verdict(self) -> ComparisonVerdict:
        """The worst of all verdicts."""
        return self.found.verdict

    def report(self) -> RenderableType:
        return compare_report(self.found, self.first, self.other)

    def frame_rows(self) -> Sequence[Any]:
        return self.comparisons

    def bars(self) -> Bars | None:
        known = [(each, each.ratio) for each in self.comparisons if each.ratio is not None]
        bars = [(str(each.benchmark), ratio, each.low, each.high) for each, ratio in known]
        return Bars(f"A {self.first} against B {self.other}", "time of A over time of B", bars)

    def to_json(self) -> JsonDocument:
        return compare_json(self.found)


def compare(first: str, other: str, *, across: bool = False, workspace: Workspace | None = None) -> CompareResult:
    """Compare two records, sweeps or exported files, benchmark by benchmark.

    Several joined by commas are one side: three or more records of a benchmark, each its own process, give an interval.
    `across` also sets different devices and thread counts side by side, which is otherwise refused.
    """
    with use(workspace) as opened:
        found = compare_records(*(_side(words, opened) for words in (first, other)), across=across)
    return CompareResult(found, first, other)


def compared_page(found: Comparisons, first: str, other: str, *, workspace: Workspace | None = None) -> str:
    """The comparison as one HTML page, with the profiles of both sides where each has one."""
    with use(workspace) as opened:
        sides = [_side(words, opened) for words in (first, other)]
        profiled = [next((record.id for record in side if record.trace is not None), None) for side in sides]
        diff = None
        if profiled[0] is not None and profiled[1] is not None:
            diff = compare_profiles(profiled[0], profiled[1], workspace=opened)
    return compare_page(found, (first, other), (sides[0], sides[1]), diff)


def _side(words: str, workspace: Workspace) -> list[RunRecord]:
    """All records that a word names, or several words joined by commas: replicates of one side."""
    chosen = Chosen()
    for word in [words] if is_file(words) else words.split(","):
        chosen.add(_named(word.strip(), workspace))
    return chosen.records


def _named(word: str, workspace: Workspace) -> list[RunRecord]:
    """A file, a sweep of that name, else a record's id; the first that fits."""
    if is_file(word):
        return choose([word], workspace=workspace).records
    with workspace.reading() as history:
        if history.sweep(word).cells():
            return choose(sweep=word, workspace=workspace).records
        if not re.fullmatch(r"[0-9a-f]{4,}", word):
            raise UsageError(f"{word!r} is neither a file, nor a sweep in {history.location}, nor the id of a record")
        return [history.load(word)]
