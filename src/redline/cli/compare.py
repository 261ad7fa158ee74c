"""`redline compare A B`: the table or the document, and the exit code of a gate."""

from __future__ import annotations

import sys

from redline.analyze.compare import ComparisonVerdict
from redline.errors import UsageError
from redline.report.compare import compare_json, compare_markdown, compare_report
from redline.report.terminal import make_console
from redline.reporting import compare

EXIT_CODES: dict[ComparisonVerdict, int] = {
    "same": 0,
    "faster": 0,
    "slower": 1,
    "incomparable": 3,
    "inconclusive": 0,
    "invalid": 5,
}
EXIT_INCONCLUSIVE = 4
"""When asked for: a gate that lets pass what it cannot judge is the person's choice."""


def compare_and_print(first: str, other: str, *, fail_inconclusive: bool, as_markdown: bool, as_json: bool) -> int:
    if as_markdown and as_json:
        raise UsageError("give --markdown or --json, not both")
    found = compare(first, other)
    if as_json:
        sys.stdout.write(compare_json(found) + "\n")
    elif as_markdown:
        sys.stdout.write(compare_markdown(found, first, other))
    else:
        make_console().print(compare_report(found, first, other))
    if found.verdict == "inconclusive" and fail_inconclusive:
        return EXIT_INCONCLUSIVE
    return EXIT_CODES[found.verdict]
