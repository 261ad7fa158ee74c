"""`redline compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import OUTPUT, WAY, Exit, Json, opt, print_json
from redline.model.errors import UsageError


def compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A record's id, a sweep's name or a file of 'history export --raw'; commas join several."
        ),
    ],
    other: Annotated[str, typer.Argument(metavar="B", help="The same, to be compared with A.")],
    across: Annotated[
        bool, opt("--across", group=WAY, help="Compare across devices and thread counts, which is otherwise refused.")
    ] = False,
    fail_inconclusive: Annotated[
        bool, opt("--fail-inconclusive", group=WAY, help="Exit with 4 where there is no verdict.")
    ] = False,
    html: Annotated[
        Path | None, opt("--html", group=OUTPUT, help="Write a page with both distributions and the kernels of both.")
    ] = None,
    markdown: Annotated[bool, opt("--markdown", group=OUTPUT, help="Print the table as Markdown.")] = False,
    json: Json = False,
) -> int:
    """Is B faster or slower than A? A verdict with an interval.

    There is one verdict per benchmark, or the reason why there is none. For generations, TTFT, TPOT and the tokens per second of prefill and decode each have an interval and a verdict. If one of
    them clearly got slower and none got faster, the verdict is slower, even if the total time does not show it. Generations
    of different lengths are incomparable.

    One record per side is enough for a verdict when the difference is larger than processes usually differ.

    Exit codes: 0 same, faster or inconclusive; 1 slower; 3 incomparable; 4 inconclusive, with --fail-inconclusive; 5 a
    run that failed.

    \b
    Examples:
      redline compare 19f1a2 19f1b7
      redline compare before.json after.json --markdown
      redline compare 19f1a2 19f1b7 --html before-after.html
    """
    from redline.api.compare import compare as compare_sides
    from redline.api.compare import compared_page
    from redline.show.compare import compare_markdown
    from redline.show.folder import write_text
    from redline.show.terminal import make_console

    if markdown and json:
        raise UsageError("give --markdown or --json, not both")
    result = compare_sides(first, other, across=across)
    found = result.found
    if html is not None:
        write_text(html, compared_page(found, first, other))
    if json:
        print_json(result.to_json())
    elif markdown:
        sys.stdout.write(compare_markdown(found, first, other))
    else:
        make_console().print(result.report())
    codes = {"slower": Exit.SLOWER, "incomparable": Exit.INCOMPARABLE, "invalid": Exit.FAILED_ROW}
    if found.verdict == "inconclusive" and fail_inconclusive:
        return Exit.INCONCLUSIVE
    return codes.get(found.verdict, Exit.DONE)
