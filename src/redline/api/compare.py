"""`redline.compare`: is B faster or slower than A?"""

from __future__ import annotations

import re

from redline.analyze.compare import Comparisons, compare_records
from redline.api.report import Chosen, choose, is_file
from redline.api.workspace import Workspace, use
from redline.errors import UsageError
from redline.record import RunRecord


def compare(first: str, other: str, *, across: bool = False, workspace: Workspace | None = None) -> Comparisons:
    """Compare two records, sweeps or exported files, benchmark by benchmark.

    Several joined by commas are one side: three or more records of a benchmark, each its own process, give an interval.
    `across` also sets different devices and thread counts side by side, which is otherwise refused.
    """
    with use(workspace) as opened:
        return compare_records(*(_side(words, opened) for words in (first, other)), across=across)


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
