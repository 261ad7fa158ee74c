"""This module writes records for other programs, as one JSON document or as a CSV table with stable columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NewType

import msgspec

DOCUMENT_SCHEMA = 2
"""The number is raised whenever a field of a JSON document or a column of the CSV table changes its meaning or goes away.

In 2, reasons and notes became objects of code, about and text, and every document got its kind.
"""

DocumentKind = Literal[
    "run", "batch", "tune", "profile", "profile-diff", "flops", "roofline", "report",
    "compare", "models", "show", "export", "checklist", "workshop", "micro",
    "gate", "history", "tag", "import", "delete", "prune", "recover", "bisect", "monitor", "memory", "watch",
]  # fmt: skip
"""The kind names the command that has made a document, or the option that asked another question; see docs/report.md."""

JsonDocument = NewType("JsonDocument", str)
"""This is a text that `json_document` has made; `--json` prints nothing else."""

_OBEYED = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""A terminal obeys these characters: control codes, line separators and marks that turn the direction of text."""


def json_document(
    kind: DocumentKind, fields: Mapping[str, Any] | msgspec.Struct, *, indent: bool = True
) -> JsonDocument:
    """Returns what `--json` prints: `schema` and `kind` are at the top, then the fields. NaN and infinity become null."""
    plain = msgspec.to_builtins(fields) if isinstance(fields, msgspec.Struct) else fields
    assert not plain.keys() & {"schema", "kind"}, "the document's own"
    encoded = msgspec.json.encode({"schema": DOCUMENT_SCHEMA, "kind": kind, **plain})
    text = (msgspec.json.format(encoded, indent=2) if indent else encoded).decode()
    return safe_document(text)


def safe_document(text: str) -> JsonDocument:
    """Returns JSON in which characters that a terminal obeys are escaped, because anyone may write them in names."""
    return JsonDocument(_OBEYED.sub(lambda found: f"\\u{ord(found.group()):04x}", text) + "\n")


def harmless(text: str) -> str:
    """Returns text on one line that no spreadsheet takes for a formula, because file names and error messages are not trusted."""
    one_line = " ".join(text.splitlines())
    # Spreadsheets trim what they import, so a formula behind blanks is one too.
    formula = text[:1] in ("\t", "\r", "\n") or one_line.lstrip().startswith(("=", "+", "-", "@"))
    return f"'{one_line}" if formula else one_line
