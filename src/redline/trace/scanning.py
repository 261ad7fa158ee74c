"""Where events begin and end in the text of a trace: quickly by a guess, exactly by counting brackets, and in damaged
text by what looks like a border."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

BLANKS = b" \t\r\n"
_MOST_GUESSES = 64

# A lone quote is a string that the buffer's end cuts off.
_TOKEN = re.compile(rb'(?s)"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]')
_EVENTS = re.compile(rb'"traceEvents"\s*+:\s*+\[')
_BORDER = re.compile(rb'\}[ \t\r\n]*+,[ \t\r\n]*+(?=\{[ \t\r\n]*+")')
_REALLY_OVER = re.compile(rb'[ \t\r\n]*+(?:\}|,[ \t\r\n]*+"|$)')
_QUOTE, _OPENING, _CLOSING, _END = ord('"'), frozenset(b"[{"), frozenset(b"]}"), ord("]")


_APART = ord("]") - ord("[")
"""From each opening bracket to its closing one: the same for both kinds."""


@dataclass(frozen=True)
class Scan:
    """What an exact look at a buffer that begins between two events found."""

    spans: list[tuple[int, int]]
    """Whole events."""
    strays: int
    """Values between events that are none: numbers, words, brackets."""
    consumed: int
    """Up to here the buffer is understood."""
    end: int | None
    """Where the closing bracket of the list of events stands, if it is in the buffer."""


def find_events(buffer: bytes) -> int | None:
    """Where the first event may begin; None when no list of events of the document itself is in the buffer."""
    bare = buffer.lstrip(BLANKS)
    if bare[:1] == b"[":
        return len(buffer) - len(bare) + 1
    depth = 0
    for token in _TOKEN.finditer(buffer):
        character = buffer[token.start()]
        if character == _QUOTE:
            found = _EVENTS.match(buffer, token.start()) if depth == 1 else None
            if found:
                return found.end()
        else:
            depth += 1 if character in _OPENING else -1
    return None


def find_any_events(buffer: bytes) -> int | None:
    """The same where the text before it is damaged, or where the list stands deeper in the document."""
    # A key never looks like this inside a string: its quotes would be escaped there.
    found = _EVENTS.search(buffer)
    return found.end() if found else None


def last_boundary(buffer: bytes) -> int | None:
    """The position of a comma that seems to stand between two events, as late as possible."""
    position = len(buffer)
    for _ in range(_MOST_GUESSES):
        position = buffer.rfind(b"{", 0, position)
        if position < 0:
            return None
        # Between two events there is little but a comma; an event is longer than what is looked at here.
        before = buffer[max(0, position - 64) : position].rstrip(BLANKS)
        if before.endswith(b",") and before[:-1].rstrip(BLANKS).endswith(b"}"):
            return buffer.rindex(b",", 0, position)
    return None


def scan(buffer: bytes) -> Scan:
    """Step over strings and count brackets, so that not even nonsense between them leads astray."""
    spans: list[tuple[int, int]] = []
    strays = start = consumed = 0
    opened: list[int] = []
    for token in _TOKEN.finditer(buffer):
        character = buffer[token.start()]
        if character in _OPENING:
            if not opened:
                start = token.start()
                strays += _strays(buffer[consumed:start])
            opened.append(character)
        elif character in _CLOSING:
            if not opened:
                between = _strays(buffer[consumed : token.start()])
                if character == _END and _REALLY_OVER.match(buffer, token.end()):
                    return Scan(spans, strays + between, consumed, token.start())
                strays += between + 1  # a bracket that closes nothing: events follow all the same
                consumed = token.end()
                continue
            if character - opened.pop() != _APART:
                break  # a bracket is missing: from here on they pair up wrongly
            if not opened:
                spans.append((start, token.end()))
                consumed = token.end()
        elif character == _QUOTE and token.end() - token.start() == 1:
            break
    return Scan(spans, strays, consumed, None)


def _strays(between: bytes) -> int:
    return sum(1 for word in between.split(b",") if word.strip(BLANKS))


def pieces(buffer: bytes) -> Iterator[tuple[int, int]]:
    """What lies between things that look like borders of events. In damaged text a missing quote or bracket would
    hide everything behind it from an exact look; here it costs the events it stands in."""
    begin = 0
    for border in _BORDER.finditer(buffer):
        yield begin, border.start() + 1
        begin = border.end()
    yield begin, len(buffer)
