"""Text that stays text in Markdown, whatever it says: names and messages are anyone's to write."""

from __future__ import annotations

import re

from redline.report.one_line import one_line

LONGEST = 80
_SPECIAL = re.compile(r"([\\`*_\[\]#|~$])")
_LEADING = re.compile(r"^([-+=]|\d+[.)](?=\s|$))")


def escaped(text: str, longest: int | None = None) -> str:
    """On one line, cut where it is too long, with nothing in it that a Markdown reader or a browser would obey."""
    line = one_line(text, longest).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "&#64;")
    line = _SPECIAL.sub(r"\\\1", line)
    # At the start of a line these would begin a list, a quote or a heading's underline.
    return _LEADING.sub(lambda match: "".join(f"&#{ord(one)};" for one in match.group(1)), line)


def cell(text: str) -> str:
    return escaped(text, LONGEST)


def table(headers: list[str], rows: list[list[str]], *, left: int = 1) -> list[str]:
    """Lines of a table whose first `left` columns are texts and whose others are numbers; cells are escaped already."""
    rule = ["---" if place < left else "---:" for place in range(len(headers))]
    return ["| " + " | ".join(line) + " |" for line in (headers, rule, *rows)]
