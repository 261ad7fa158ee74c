"""The one JSON document on stdout that `--json` asks for."""

from __future__ import annotations

import sys
from typing import Any

import msgspec


def print_document(document: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")
