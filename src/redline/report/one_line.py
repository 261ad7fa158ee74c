"""Text for people on one line, whatever it holds: names and messages are anyone's to write."""

from __future__ import annotations

from redline.trace.classes import printable


def one_line(text: str, longest: int | None = None) -> str:
    """Blanks of any kind become one space, nothing is left that a terminal would obey; the end stays when it is cut."""
    line = printable(" ".join(text.split()))
    return line if longest is None or len(line) <= longest else f"{line[: longest - 9]}…{line[-8:]}"
