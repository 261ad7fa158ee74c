"""Where the events of a JSON trace begin and end, without parsing them.

Most pieces are cut by guess: at the last `}, {` of a block. A wrong guess (inside a string, or deeper down) leaves a
piece that is no JSON, so that decoding it tells; then `scan` looks at every string and bracket, slowly and exactly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BLANKS = b" \t\r\n"
_MOST_GUESSES = 64

# A lone quote is a string that the buffer's end cuts off.
_TOKEN = re.compile(rb'(?s)"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]')
_EVENTS = re.compile(rb'"traceEvents"\s*+:\s*+\[')
_QUOTE, _OPENING, _CLOSING, _END = ord('"'), frozenset(b"[{"), frozenset(b"]}"), ord("]")


@dataclass(frozen=True)
class Scan:
    """What an exact look at a buffer that begins between two events found."""

    spans: list[tuple[int, int]]
    """Whole events."""
    strays: int
    """Values between events that are none: numbers, words."""
    consumed: int
    """Up to here the buffer is understood."""
    end: int | None
    """Where the closing bracket of the list of events stands, if it is in the buffer."""


def find_events(buffer: bytes) -> int | None:
    """Where the first event may begin; None when the list of events is not in the buffer."""
    # A key never looks like this inside a string: its quotes would be escaped there.
    found = _EVENTS.search(buffer)
    if found:
        return found.end()
    bare = buffer.lstrip(_BLANKS)
    return len(buffer) - len(bare) + 1 if bare[:1] == b"[" else None


def last_boundary(buffer: bytes) -> int | None:
    """The place of a comma that seems to stand between two events, as late as possible."""
    position = len(buffer)
    for _ in range(_MOST_GUESSES):
        position = buffer.rfind(b"{", 0, position)
        if position < 0:
            return None
        # Between two events there is little but a comma; an event is longer than what is looked at here.
        before = buffer[max(0, position - 64) : position].rstrip(_BLANKS)
        if before.endswith(b",") and before[:-1].rstrip(_BLANKS).endswith(b"}"):
            return buffer.rindex(b",", 0, position)
    return None


def scan(buffer: bytes) -> Scan:
    """Step over strings and count brackets, so that not even nonsense between them leads astray."""
    spans: list[tuple[int, int]] = []
    strays = depth = start = consumed = 0
    for token in _TOKEN.finditer(buffer):
        character = buffer[token.start()]
        if character in _OPENING:
            if depth == 0:
                start = token.start()
                strays += _strays(buffer[consumed:start])
            depth += 1
        elif character in _CLOSING:
            if depth == 0:
                end = token.start() if character == _END else None
                return Scan(spans, strays + _strays(buffer[consumed : token.start()]), consumed, end)
            depth -= 1
            if depth == 0:
                spans.append((start, token.end()))
                consumed = token.end()
        elif character == _QUOTE and token.end() - token.start() == 1:
            break
    return Scan(spans, strays, consumed, None)


def _strays(between: bytes) -> int:
    return sum(1 for word in between.split(b",") if word.strip(_BLANKS))
