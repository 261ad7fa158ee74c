"""`redline.compare`: is B faster or slower than A?"""

from __future__ import annotations

import re

from redline.analyze.compare import Comparisons, compare_records
from redline.api.profile import compare_profiles
from redline.api.report import Chosen, choose, is_file
from redline.api.workspace import Workspace, use
from redline.errors import UsageError
from redline.record import RunRecord
from redline.report.compare_page import compare_page


def compare(first: str, other: str, *, across: bool = False, workspace: Workspace | None = None) -> Comparisons:
    """Compare two records, sweeps or exported files, benchmark by benchmark.

    Several joined by commas are one side: three or more records of a benchmark, each its own process, give an interval.
    `across` also sets different devices and thread counts side by side, which is otherwise refused.
    """
    with use(workspace) as opened:
        return compare_records(*(_side(words, opened) for words in (first, other)), across=across)


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
